"""Runs the choices of one HTTP request in the engine at once and keeps the books."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from typing import Any

from toolkit.engine.request import Whose
from toolkit.errors import UsageError
from toolkit.messages import GenerationConfig, Response
from toolkit.serve.generation.budget import within
from toolkit.serve.generation.choice import Choice
from toolkit.serve.generation.turn import behind
from toolkit.serve.http.access.users import current_user
from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.handed import handed
from toolkit.serve.http.sharing.held import NUMBER_BYTES, TOKEN_BYTES, account, entries_bytes, stays
from toolkit.serve.state import Running, ServerState, request_of
from toolkit.serve.watch.metrics import RequestClock

logger = logging.getLogger("toolkit.serve")
# A prompt alone: no draft, grammar or stop word of its answer.
LENT = GenerationConfig(max_new_tokens=1, with_cache=True)


class Usage:
    """Token counts of an answer: a prompt counts once however many choices it has.

    ``thinks``: tokens of thoughts are told too.
    """

    def __init__(self, choices: Sequence[Choice], thinks: bool = False) -> None:
        self._thinks = thinks
        self.thought = 0  # generated tokens that belong to thoughts
        self._prompt = {choice.prompt: len(choice.token_ids) for choice in choices}
        self._prompt_of = {choice.index: choice.prompt for choice in choices}
        self._cached: dict[int, int] = {}
        self._generated: dict[int, int] = {}
        self._guessed: dict[int, tuple[int, int]] = {}  # accepted and rejected tokens
        self.predicted = False  # whether the client sent what it expects
        self.first_miss: Callable[[int], dict[str, Any]] | None = None  # of so many cached tokens, where it is asked

    def add(self, index: int, response: Response, thought: int = 0) -> None:
        """Count a delta of choice ``index``; ``thought``: its tokens that belong to a thought."""
        self.thought += thought
        prompt = self._prompt_of[index]
        # The first choice of a prompt tells what the cache had; its siblings may hit what that one has just computed.
        self._cached[prompt] = min(self._cached.get(prompt, response.cached_tokens), response.cached_tokens)
        self._generated[index] = response.generate_token_len
        self._guessed[index] = response.accepted_tokens, response.rejected_tokens

    @property
    def prompt(self) -> int:
        return sum(self._prompt.values())

    @property
    def cached(self) -> int:
        """Tokens of prompts that the prefix cache had."""
        return sum(self._cached.values())

    @property
    def generated(self) -> int:
        return sum(self._generated.values())

    def as_dict(self) -> dict[str, object]:
        """As OpenAI's chat and completions have it."""
        told: dict[str, object] = {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        if self.first_miss is not None:
            told["prompt_tokens_details"] = {"cached_tokens": self.cached, "first_miss": self.first_miss(self.cached)}
        details = {"reasoning_tokens": self.thought} if self._thinks else {}
        accepted, rejected = (sum(counts) for counts in zip((0, 0), *self._guessed.values(), strict=True))
        if accepted or rejected or self.predicted:
            details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
        if details:
            told["completion_tokens_details"] = details
        return told


async def run_choices(
    state: ServerState, request_id: str, choices: Sequence[Choice]
) -> AsyncGenerator[tuple[int, Response], None]:
    """Yield (choice index, delta) as the engine produces them; every choice ends with a finish_reason.

    Closing the generator aborts what still runs. Raises ApiError when a choice fails, or where an answer that is sent
    whole is too large to be held: the rest is aborted.
    """
    if (held := account.get()) is not None and len(choices) > 1:
        held.expect(sum(_most_bytes(choice, state.engine.session_len) for choice in choices))
    user = current_user()
    state.quotas.spend(user, sum({choice.prompt: len(choice.token_ids) for choice in choices}.values()))
    if len(choices) == 1:
        stream = _run(state, f"{request_id}-0", choices[0])
        async with contextlib.aclosing(stream):
            async for response in stream:
                yield choices[0].index, response
        return
    queue: asyncio.Queue[tuple[int, Response | Exception | None]] = asyncio.Queue()

    async def pump(choice: Choice) -> None:
        try:
            async for response in _run(state, f"{request_id}-{choice.index}", choice):
                queue.put_nowait((choice.index, response))
            queue.put_nowait((choice.index, None))
        except Exception as error:
            queue.put_nowait((choice.index, error))

    tasks = []
    try:
        for choice in choices:
            tasks.append(asyncio.create_task(pump(choice)))
            await asyncio.sleep(0)  # it begins; others' turn before the next one's prompt is packed
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _run(state: ServerState, engine_id: str, choice: Choice) -> AsyncGenerator[Response, None]:
    return _run_one(state, engine_id, choice) if choice.budget is None else _run_parts(state, engine_id, choice)


async def _run_parts(state: ServerState, engine_id: str, choice: Choice) -> AsyncGenerator[Response, None]:
    """A choice whose thought may be cut: to the engine what comes then is another request, in the books it is one."""
    assert choice.budget is not None
    clock = RequestClock(state.metrics, len(choice.token_ids), current_user().name)
    run = lambda part, mark: _run_one(state, engine_id + mark, part, clock)  # noqa: E731
    try:
        async with contextlib.aclosing(within(choice.budget, choice, state.engine.tokenizer, run)) as stream:
            async for response in stream:
                clock.reason = response.finish_reason or clock.reason
                yield response
    finally:
        clock.finish()


async def _run_one(
    state: ServerState, engine_id: str, choice: Choice, clock_of_all: RequestClock | None = None
) -> AsyncGenerator[Response, None]:
    """``clock_of_all``: of a choice that this is a part of; whoever has it books its end."""
    user, rejected, generated = current_user(), 0, 0
    clock = clock_of_all or RequestClock(state.metrics, len(choice.token_ids), user.name)
    share = state.settings.key_share if user.rules.share is None else user.rules.share
    clock.reason = "abort"
    state.active[engine_id] = Running(user.owner, choice.label)
    stream = state.engine.generate(
        choice.token_ids,
        _config(choice),
        request_id=engine_id,
        session=choice.session,
        adapter=choice.adapter,
        only=choice.only,
        priority=choice.priority + behind.get(),
        pictures=choice.pictures,
        progress=choice.progress,
        whose=Whose(user.id, request_of(engine_id), user.rules.weight, share if user.name else 1.0, user.owner),
        prediction=choice.prediction,
        second=choice.second,
        salt=f"{user.owner} {choice.salt}" if state.settings.prefix_cache_shared == "user" else choice.salt,
        room=_room(choice, state.engine.session_len),
    )
    try:
        async for response in stream:
            more = max(0, response.generate_token_len - generated)  # the end token too, which is not shown
            generated += more
            clock.tokens_arrived(more, response.cached_tokens)
            if (held := account.get() or (stays.get() if response.routed_experts is not None else None)) is not None:
                held.add(_bytes(response), user.id)
            wrong = response.rejected_tokens - rejected if choice.prediction else 0  # computed for nothing, as it asked
            rejected = response.rejected_tokens
            state.quotas.spend(user, more + wrong)
            if response.finish_reason is not None:
                clock.reason = response.finish_reason
                _raise_if_failed(response, state.closing)
            yield response
    except ApiError:
        raise
    except Exception:
        clock.reason = "error"
        raise
    finally:
        state.active.pop(engine_id, None)
        if clock.reason == "abort":
            state.engine.abort(engine_id)
        with contextlib.suppress(Exception):
            await stream.aclose()
        if clock_of_all is None:
            clock.finish()
        logger.info("%s: %s after %d tokens", engine_id, clock.reason, clock.tokens)


def _config(choice: Choice) -> GenerationConfig:
    """A choice's config, but where another server computes its prompt, or writes the answer."""
    told = handed()
    if told.lend:
        return LENT
    return replace(choice.config, migration_request={"remote_engine_id": told.source}) if told.source else choice.config


def _room(choice: Choice, session_len: int) -> int:
    """Tokens that another server may write behind a prompt that this one computes for it; else 0."""
    return (choice.config.max_new_tokens or session_len) if handed().lend else 0


def _bytes(response: Response) -> int:
    """What a delta takes as a part of an answer."""
    entries = (*(response.logprobs or ()), *(response.prompt_logprobs or ()))
    arrays = (response.last_hidden_state, response.routed_experts)
    numbers = sum(array.size for array in arrays if array is not None)
    texts = TOKEN_BYTES * len(response.token_ids) + NUMBER_BYTES * numbers
    return texts + sum(entries_bytes(len(entry or ())) for entry in entries)


def _most_bytes(choice: Choice, session_len: int) -> int:
    """What a whole choice can take."""
    config, prompt = choice.config, len(choice.token_ids)
    tokens = session_len - prompt
    if config.max_new_tokens is not None:
        tokens = min(tokens, config.max_new_tokens)
    of_token = 0 if config.logprobs is None else entries_bytes(config.logprobs + 1)
    of_prompt = 0 if config.prompt_logprobs is None else entries_bytes(config.prompt_logprobs + 1)
    return tokens * (TOKEN_BYTES + of_token) + prompt * of_prompt


def _raise_if_failed(response: Response, closing: bool) -> None:
    if response.finish_reason == "error":
        message = response.error_message or "The engine failed on this request"
        if response.error_code == 400:
            raise UsageError(message)  # it names the field
        raise ApiError(503 if response.error_code == 503 else 500, message, code="engine_error")
    if response.finish_reason == "abort":
        why = "the server is shutting down" if closing else "it was cancelled"
        raise ApiError(503 if closing else 499, f"The request was aborted: {why}", code="request_cancelled")
