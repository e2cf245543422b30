"""Guesses that a model's head is made to make, so that as many come true as of a head that was trained for real."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toolkit import GenerationConfig, TurbomindEngineConfig, pipeline
from toolkit.engine.drafts.draft import NO_GUESS
from toolkit.engine.drafts.head import DraftHead
from toolkit.engine.drafts.speculator import Depth, Speculator

DEEPEST = 8  # tokens of a guess that are kept
Guessed = tuple[list[int], list[int]]  # tokens, and how sure the head was of each


def guesses(
    model: str, head: str, prompts: list[str], settings: Callable[[str], GenerationConfig]
) -> dict[str, dict[int, Guessed]]:
    """By prompts and by the tokens of the answer that were known: what ``head`` guesses as ``model`` answers."""
    found: dict[str, dict[int, Guessed]] = {prompt: {} for prompt in prompts}
    now: dict[int, Guessed] = {}
    kept = DraftHead.propose, DraftHead._goes_on, Speculator._depth

    def propose(self: DraftHead, asked: Any) -> Any:
        kept[0](self, [(seq, DEEPEST) for seq, _ in asked])
        for seq, _ in asked:
            if (follower := self._followers.get(seq)) is not None and follower.guessed:
                now[seq.known - seq.prompt_len] = list(follower.guessed), list(follower.sure)
        return [NO_GUESS for _ in asked]

    DraftHead.propose = propose  # type: ignore[method-assign]
    DraftHead._goes_on = lambda self, guess, most, odds: len(guess.tokens) < most  # type: ignore[method-assign]
    Speculator._depth = lambda self, draft, asked, best, rows: Depth(DEEPEST, [True] * len(asked))  # type: ignore[method-assign]
    try:
        config = TurbomindEngineConfig(speculative_draft_model=head, speculative_shared="off")
        with pipeline(model, backend_config=config) as pipe:
            for prompt in prompts:
                now = found[prompt]
                pipe(prompt, gen_config=settings(prompt))
    finally:
        DraftHead.propose, DraftHead._goes_on, Speculator._depth = kept  # type: ignore[method-assign]
    return found


class Replayed:
    """From now on heads compute, but guess what was kept of another's guesses (``guesses``)."""

    def __init__(self, kept: dict[str, dict[int, Guessed]]) -> None:
        self._kept = kept
        self._now: dict[int, Guessed] = {}

        def take(going: Any, drawn: Any, found: Any) -> None:
            for (seq, follower, _), token in zip(going, drawn.tokens.tolist(), strict=True):
                at = len(found[seq].tokens)
                tokens, sure = self._now.get(seq.known - seq.prompt_len, ([], []))
                kind = sure[at] if at < len(sure) else 0
                found[seq].tokens.append(tokens[at] if at < len(tokens) else token)
                found[seq].chances.append(follower.odds.of(kind))
                follower.guessed.append(found[seq].tokens[-1])
                follower.sure.append(kind)

        DraftHead._take = staticmethod(take)  # type: ignore[method-assign]

    def begin(self, prompt: str) -> None:
        """Requests answer this one, until the next call."""
        self._now = self._kept[prompt]
