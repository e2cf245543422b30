"""A step: its arrays, and whom its results belong to."""

from __future__ import annotations

from dataclasses import field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.drafts.along import Place
from toolkit.engine.plan import Plan
from toolkit.engine.sequence import Sequence
from toolkit.runners.step import NONE, StepBatch


@dataclass(frozen=True)
class Verified:
    """A guess in a step: of ``count`` tokens. ``places``: what its rows are drawn by, where that is more than numbers;
    ``drawn``: whether the runner draws, a token a row."""

    seq: Sequence
    count: int
    places: list[Place]
    drawn: bool

    @property
    def guess(self) -> list[int]:
        """Its tokens, until those that come are written over them."""
        length = self.seq.length
        return self.seq.tokens[length : length + self.count].tolist()


@dataclass
class Step:
    """A batch and whom its results belong to.

    ``sampled``: the request of each sampled row; or where blocks of tokens are guessed together ``guesses``: (request,
    sampled rows), in the order of the rows. ``verified``: behind ``sampled``, requests whose guess is verified.
    ``logits``, ``hidden``, ``targets``, ``routes``: (request, first position,
    rows) in the order of the rows that come back. ``processed``: requests whose token the host draws from their logits
    row.
    """

    plan: Plan
    batch: StepBatch
    sampled: list[Sequence]
    guesses: list[tuple[Sequence, int]] = field(default_factory=list)
    verified: list[Verified] = field(default_factory=list)
    logits: list[tuple[Sequence, int, int]] = field(default_factory=list)
    hidden: list[tuple[Sequence, int, int]] = field(default_factory=list)
    targets: list[tuple[Sequence, int, int]] = field(default_factory=list)
    routes: list[tuple[Sequence, int, int]] = field(default_factory=list)
    processed: list[Sequence] = field(default_factory=list)
    has_rows: bool = False

    @property
    def starts(self) -> list[int]:
        """First position of each request, in the order of ``plan.sequences()``."""
        return list((self.batch.seq_lens - np.diff(self.batch.cu_seqlens)).tolist())


def joined(parts: list[NDArray[Any]]) -> NDArray[np.int32]:
    return np.concatenate(parts).astype(np.int32) if parts else NONE


def ask_for_rows(step: Step) -> None:
    """Which flat tokens' logits, hidden states, target log-probabilities and experts come back, and to whom."""
    step.has_rows = True
    cu = step.batch.cu_seqlens
    logits, hidden, targets, target_ids, routes = [], [], [], [], []
    for i, seq in enumerate(step.plan.sequences()):
        start, first = seq.computed, int(cu[i])
        count = int(cu[i + 1]) - first
        p, only = seq.params, seq.request.only
        guessed = step.plan.guesses.get(seq, 0)
        last = count - 1 if start + count == seq.length + guessed else count
        fresh = max(0, seq.collected - start)  # rows of positions gathered before a preemption are not wanted again
        if (p.logits == "all" or p.prompt_logprobs > 0) and fresh < count:
            step.logits.append((seq, start + fresh, count - fresh))
            logits.append(np.arange(first + fresh, first + count))
        elif (p.logits == "generation" or seq.drawn_here) and last == count - 1 and not only:
            step.logits.append((seq, start + last - guessed, 1 + guessed))
            logits.append(np.arange(first + last - guessed, first + count))
        if (p.hidden == "all" or only == "mean") and fresh < count:
            step.hidden.append((seq, start + fresh, count - fresh))
            hidden.append(np.arange(first + fresh, first + count))
        elif only == "cls" and start == 0 and not seq.collected:
            step.hidden.append((seq, 0, 1))
            hidden.append(np.arange(first, first + 1))
        elif (only == "last" or (p.hidden == "generation" and not only)) and last == count - 1:
            step.hidden.append((seq, start + last, 1))
            hidden.append(np.arange(first + last, first + count))
        if p.routes and fresh < count:
            step.routes.append((seq, start + fresh, count - fresh))
            routes.append(np.arange(first + fresh, first + count))
        stop = min(start + count, seq.prompt_len - 1)
        if (p.prompt_logprobs == 0 or (only == "score" and p.prompt_logprobs < 0)) and start + fresh < stop:
            step.targets.append((seq, start + fresh, stop - start - fresh))
            targets.append(np.arange(first + fresh, first + stop - start))
            target_ids.append(seq.tokens[start + fresh + 1 : stop + 1])
        if seq.drawn_here and last == count - 1 and not only and seq not in step.plan.guesses:
            step.processed.append(seq)
    step.batch.logits_index = joined(logits)
    step.batch.hidden_index = joined(hidden)
    step.batch.target_index = joined(targets)
    step.batch.target_ids = joined(target_ids)
    step.batch.routes_index = joined(routes)
