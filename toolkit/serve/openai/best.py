"""``best_of``: which of the answers to a prompt are returned."""

from __future__ import annotations

from collections.abc import Sequence

from toolkit.messages import Response
from toolkit.serve.generation.choice import Choice


class Best:
    """Adds up the log-probabilities of ``choices``; their configs have to ask for them (``logprobs`` of 0 or more)."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._choices = choices
        self._sum = {choice.index: 0.0 for choice in choices}
        self._tokens = dict.fromkeys(self._sum, 0)

    def add(self, index: int, delta: Response) -> None:
        """Count the tokens of choice ``index`` that ``delta`` has."""
        for token, found in zip(delta.token_ids, delta.logprobs or (), strict=False):
            self._sum[index] += found[token]
            self._tokens[index] += 1

    def of_each_prompt(self, n: int) -> list[int]:
        """The ``n`` choices of each prompt whose tokens have the highest mean log-probability, best first, prompt after
        prompt. Of equals the one that was asked first goes before."""
        groups: dict[int, list[int]] = {}
        for choice in self._choices:
            groups.setdefault(choice.prompt, []).append(choice.index)
        return [i for group in groups.values() for i in sorted(group, key=self._doubt)[:n]]

    def _doubt(self, index: int) -> float:
        return -self._sum[index] / max(self._tokens[index], 1)
