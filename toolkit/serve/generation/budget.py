"""A limit of thoughts: where it is reached, a closing sentence is put behind them, and the model goes on to answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace

from toolkit.messages import Response
from toolkit.parsers.formats import ReasoningFormat
from toolkit.parsers.thinking import Thinking
from toolkit.serve.generation.choice import Budget, Choice
from toolkit.serve.state import AGAIN

CLOSING = "I have thought about this for long enough and answer now."


def closing_text(form: ReasoningFormat, message: str | None) -> str:
    """What ends a thought."""
    return f"\n\n{message or CLOSING}\n{form.ends[0]}\n\n"


async def within(
    budget: Budget, choice: Choice, run: Callable[[Choice, str], AsyncGenerator[Response, None]]
) -> AsyncGenerator[Response, None]:
    """``run(choice, "")``; where its thought takes too long, ``run`` again behind the closing sentence, with a mark by
    which the two can be told apart. The sentence's tokens count as certain; each token's experts are told once."""
    reader = Thinking(budget.form, None, budget.begun)
    token_ids: list[int] = []
    thought = cached = routed = 0
    async with aclosing(run(choice, "")) as stream:
        async for delta in stream:
            yield delta
            token_ids += delta.token_ids
            cached, routed = delta.cached_tokens, routed + _routed(delta)
            reader.add(delta.text)
            thought += len(delta.token_ids) if reader.thinking else 0
            if delta.finish_reason is not None:
                return
            if reader.thinking and thought >= budget.tokens:
                break
    before = len(token_ids) + len(budget.token_ids)
    said = Response(text=budget.text, generate_token_len=before, input_token_len=len(choice.token_ids))
    said.cached_tokens, said.token_ids = cached, list(budget.token_ids)
    if choice.config.logprobs is not None:
        said.logprobs = [{token: 0.0} for token in budget.token_ids]
    yield said
    room = budget.session_len - len(choice.token_ids)
    left = min(choice.config.max_new_tokens or room, room) - before
    if left < 1:
        yield replace(said, text="", token_ids=[], logprobs=None, finish_reason="length")
        return
    config = replace(budget.after, max_new_tokens=left, min_new_tokens=None)
    rest = replace(
        choice, token_ids=[*choice.token_ids, *token_ids, *budget.token_ids], config=config, budget=None, progress=False
    )
    async with aclosing(run(rest, AGAIN)) as stream:
        async for delta in stream:
            delta.generate_token_len += before
            delta.cached_tokens = cached
            if (rows := _routed(delta)) and routed:  # of what was computed before, and is again
                delta.routed_experts, routed = delta.routed_experts[routed:], max(0, routed - rows)
            yield delta


def _routed(delta: Response) -> int:
    """Tokens whose experts it tells."""
    return 0 if delta.routed_experts is None else len(delta.routed_experts)
