"""A limit of thoughts: where it is reached, a closing sentence is put behind them, and the model goes on to answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from toolkit.engine.text.detokenizer import Detokenizer
from toolkit.messages import Response
from toolkit.parsers.formats import ReasoningFormat
from toolkit.parsers.thinking import Thinking
from toolkit.serve.generation.choice import Budget, Choice
from toolkit.serve.state import AGAIN

if TYPE_CHECKING:
    from toolkit.artifacts.text.tokenizer import Tokenizer

CLOSING = "I have thought about this for long enough and answer now."


def closing_text(form: ReasoningFormat, message: str | None) -> str:
    """What ends a thought."""
    return f"\n\n{message or CLOSING}\n{form.ends[0]}\n\n"


async def within(
    budget: Budget,
    choice: Choice,
    tokenizer: Tokenizer,
    run: Callable[[Choice, str], AsyncGenerator[Response, None]],
) -> AsyncGenerator[Response, None]:
    """``run(choice, "")``; where its thought takes too long, ``run`` again behind the closing sentence, with a mark by
    which the two can be told apart. The sentence's tokens count as certain; each token's experts are told once."""
    thought = _Thought(budget, choice, tokenizer)
    token_ids: list[int] = []
    cached = routed = right = wrong = 0  # the last two: guessed tokens, of both parts together
    async with aclosing(run(choice, "")) as stream:
        async for delta in stream:
            cut = thought.add(delta)
            yield cut or delta
            token_ids += (cut or delta).token_ids
            cached, routed = delta.cached_tokens, routed + _routed(cut or delta)
            right, wrong = delta.accepted_tokens, delta.rejected_tokens
            if cut is not None:
                break
            if delta.finish_reason is not None:
                return
    before = len(token_ids) + len(budget.token_ids)
    said = Response(text=budget.text, generate_token_len=before, input_token_len=len(choice.token_ids))
    said.cached_tokens, said.token_ids = cached, list(budget.token_ids)
    said.accepted_tokens, said.rejected_tokens = right, wrong
    if choice.config.logprobs is not None:
        said.logprobs = [{token: 0.0} for token in budget.token_ids]
    yield said
    room = budget.session_len - len(choice.token_ids)
    left = min(choice.config.max_new_tokens or room, room) - before
    if left < 1:
        yield replace(said, text="", token_ids=[], logprobs=None, finish_reason="length")
        return
    least = min((choice.config.min_new_tokens or 0) - before, left)
    config = replace(budget.after, max_new_tokens=left, min_new_tokens=least if least > 0 else None)
    rest = replace(
        choice, token_ids=[*choice.token_ids, *token_ids, *budget.token_ids], config=config, budget=None, progress=False
    )
    async with aclosing(run(rest, AGAIN)) as stream:
        async for delta in stream:
            delta.generate_token_len += before
            delta.cached_tokens = cached
            delta.accepted_tokens, delta.rejected_tokens = delta.accepted_tokens + right, delta.rejected_tokens + wrong
            if (rows := _routed(delta)) and routed:  # of what was computed before, and is again
                delta.routed_experts, routed = delta.routed_experts[routed:], max(0, routed - rows)
            yield delta


class _Thought:
    """Counts a thought's tokens one by one. How many come in a delta is chance (they are guessed, or their client is
    slow), and where a thought ends must not be."""

    def __init__(self, budget: Budget, choice: Choice, tokenizer: Tokenizer) -> None:
        config, prompt = choice.config, choice.token_ids
        shown = config.shown_special_tokens or ()
        self._detokenizer = Detokenizer(tokenizer, config.skip_special_tokens, prompt, shown)
        self._reader = Thinking(budget.form, None, budget.begun)
        self._left = budget.tokens
        self._prompt_len = len(prompt)
        self._written = self._routed = 0  # tokens of the answer, and those whose experts were told
        self._unsaid = ""  # text of them that was held back, for it may be a stop word

    def add(self, delta: Response) -> Response | None:
        """As much of ``delta`` as there is room for, where more follows; None where all of it has room."""
        count = delta.generate_token_len - self._written
        for i, token in enumerate(delta.token_ids, 1):
            text = self._detokenizer.add_one(token)
            self._unsaid += text
            self._reader.add(text)
            self._left -= self._reader.thinking
            over = delta.finish_reason is not None and i == count
            if self._reader.thinking and self._left <= 0 and not over:
                return self._beginning(delta, i)
        self._unsaid = self._unsaid[len(delta.text) :]
        self._written, self._routed = delta.generate_token_len, self._routed + _routed(delta)
        return None

    def _beginning(self, delta: Response, tokens: int) -> Response:
        """A delta with its first ``tokens`` alone."""
        written = self._written + tokens
        cut = replace(delta, text=self._unsaid, token_ids=delta.token_ids[:tokens], generate_token_len=written)
        cut.finish_reason = cut.stop_reason = None
        if delta.logprobs is not None:
            cut.logprobs = delta.logprobs[:tokens]
        if delta.routed_experts is not None:  # the last token has not been computed with
            cut.routed_experts = delta.routed_experts[: max(0, self._prompt_len + written - 1 - self._routed)]
        return cut


def _routed(delta: Response) -> int:
    """Tokens whose experts it tells."""
    return 0 if delta.routed_experts is None else len(delta.routed_experts)
