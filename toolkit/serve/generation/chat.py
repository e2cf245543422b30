"""Runs one conversation's request: prompt, grammar, parsers; for every API that has conversations."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from toolkit.errors import UsageError
from toolkit.messages import GenerationConfig, Response
from toolkit.parsers.grammar import after_thought
from toolkit.parsers.pieces import Answer, Parser, Piece, is_whole
from toolkit.parsers.thinking import Begun
from toolkit.serve.fields.protocol import ChatCompletionRequest
from toolkit.serve.generation.budget import closing_text
from toolkit.serve.generation.cache_report import first_miss
from toolkit.serve.generation.choice import Budget, Choice
from toolkit.serve.generation.choices import Usage, run_choices
from toolkit.serve.generation.read import PIECE, encode_chat, run_sized
from toolkit.serve.generation.sampling import choice_config, generation_config
from toolkit.serve.generation.thoughts import ThoughtTokens
from toolkit.serve.http.access.users import current_user
from toolkit.serve.state import ServerState


class Chat:
    """The answer to one request (a body of ``size`` bytes); ``id`` names it, in the log too.

    While ``deltas`` is run: ``usage``, ``answers`` (one a choice) and ``choices`` grow.
    """

    def __init__(self, state: ServerState, request: ChatCompletionRequest, size: int, id: str) -> None:
        self.state = state
        self.request = request
        self.size = size
        self.id = id
        self.formats = state.formats_of(request.model)
        self.choices: list[Choice] = []
        self.answers: list[Answer] = []
        self.usage = Usage([])
        self._parsers: list[Parser] = []
        self._thoughts: list[ThoughtTokens] = []  # none where this model's are not known
        self._guided = False

    async def prepare(self) -> None:
        """Render and tokenize the conversation. Raises ApiError, UsageError for what cannot be answered."""
        state, request, formats = self.state, self.request, self.formats
        token_ids, prompt, pictures = await encode_chat(state, request, self.size, self.id)
        begun = formats.begun(prompt, request.continued)
        config = generation_config(
            state,
            request,
            max_new_tokens=request.token_limit,
            logprobs=request.logprobs_wanted,
            prompt_logprobs=request.prompt_logprobs,
            routed=request.return_routed_experts,
        )
        bare = replace(state.template_of(request.model).with_stops(config), shown_special_tokens=formats.shown)
        self._guided = formats.guide(request, begun) is not None
        asks, owner, salt = bool(request.cache_report), current_user().owner, request.cache_salt or ""

        def finish() -> tuple[GenerationConfig, Budget | None, int, list[int]]:
            seen = state.prompts.seen(owner, token_ids, compare=asks, salt=salt)
            return self._ruled(bare, begun), self._budget(bare, begun), seen, self._predicted()

        config, budget, seen, predicted = await run_sized(state, finish, self.size)
        adapter = state.adapter_of(request.model)
        common: Any = {"priority": state.priority(request.priority), "label": request.session_id, "pictures": pictures}
        common |= {"prediction": predicted, "salt": salt}
        self.choices = [
            Choice(i, 0, token_ids, choice_config(config, i), adapter, **common, budget=budget and budget.of_choice(i))
            for i in range(request.drawn)
        ]
        if request.return_progress:
            self.choices[0] = replace(self.choices[0], progress=True)
        self.answers = [Answer() for _ in self.choices]
        self.usage = Usage(self.choices, formats.reasoning is not None)
        self.usage.predicted = request.prediction is not None
        if asks:
            engine = state.engine
            tell = partial(first_miss, engine.tokenizer, token_ids, seen=seen, block=engine.plan.block_size)
            self.usage.first_miss = lambda cached: tell(cached=cached)
        self._parsers = [formats.parser(request, begun, f"{self.id}-{i}") for i in range(len(self.choices))]
        if (form := formats.reasoning) is not None:
            self._thoughts = [ThoughtTokens(choice, form, begun, state.engine.tokenizer) for choice in self.choices]

    def _ruled(self, config: GenerationConfig, begun: Begun) -> GenerationConfig:
        """``config`` with the grammar that an answer follows whose prompt ended as ``begun`` says."""
        formats, rule = self.formats, config.response_format
        if self._guided:
            rule = formats.guide(self.request, begun)
        elif rule is not None and formats.reasoning is not None and begun != "closed":
            rule = after_thought(rule, formats.reasoning, begun, formats.specials) or rule
        return replace(config, response_format=rule)

    def _predicted(self) -> list[int]:
        """What the client thinks that the answer will be; no more of it than a session has room for."""
        if self.request.prediction is None:
            return []
        engine = self.state.engine
        text = self.request.prediction.text[: PIECE * engine.session_len]
        return engine.tokenizer.encode(text, add_special_tokens=False)[: engine.session_len]

    def _budget(self, config: GenerationConfig, begun: Begun) -> Budget | None:
        """The limit of the thoughts of the first choice."""
        tokens, form = self.request.thinking_token_budget, self.formats.reasoning
        if tokens is None or form is None or form.harmony or begun == "closed":
            return None
        text = closing_text(form, self.request.thinking_budget_message)
        token_ids = self.state.engine.tokenizer.encode(text, add_special_tokens=False)
        after = self._ruled(config, "closed")
        return Budget(tokens, form, begun, text, token_ids, after, self.state.engine.session_len)

    async def deltas(self) -> AsyncGenerator[tuple[int, Response, list[Piece]], None]:
        """(choice, what the engine said, what that means), after ``prepare``. A choice's last one has its
        finish_reason."""
        try:
            async with aclosing(run_choices(self.state, self.id, self.choices)) as stream:
                async for index, delta in stream:
                    parser = self._parsers[index]
                    pieces = parser.add(delta.text)
                    if delta.finish_reason is not None:
                        pieces += parser.finish()
                    thought = self._thoughts[index].add(delta.token_ids) if self._thoughts else 0
                    self.usage.add(index, delta, thought)
                    self.answers[index].take(pieces)
                    delta.stop_reason = self._asked_stop(delta.stop_reason)
                    yield index, delta, pieces
        except UsageError as error:
            name, _, rest = str(error).partition(": ")
            if self._guided and name == "response_format":
                raise UsageError(f"tools: as a grammar for their calls, {rest}") from error
            raise

    def _asked_stop(self, reason: str | int | None) -> str | int | None:
        """``reason`` where the client asked for it; where the template ends answers is the model's own end."""
        request = self.request
        return reason if reason in (*(request.stop or ()), *(request.stop_token_ids or ())) else None

    def called(self, index: int, delta: Response) -> bool:
        """Whether a choice that ended with ``delta`` did so to have functions called, and not within a call, where a
        stop word of the client's stood."""
        calls = self.answers[index].calls
        return delta.finish_reason == "stop" and bool(calls) and (delta.stop_reason is None or is_whole(calls[-1]))

    def finish_reason(self, index: int, delta: Response) -> str | None:
        """OpenAI's, of a choice that ended with ``delta``."""
        return "tool_calls" if self.called(index, delta) else delta.finish_reason
