"""After a step that failed: back to before it, and its requests in halves, to find the one at fault."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.plan import Plan
from toolkit.engine.scheduler import Scheduler
from toolkit.engine.sequence import Sequence
from toolkit.engine.step import Step
from toolkit.engine.step_builder import StepBuilder


@dataclass(frozen=True)
class Entry:
    """What one request had in a step: the tokens from position ``start`` to ``stop`` - 1."""

    seq: Sequence
    start: int
    stop: int


def entries_of(plan: Plan, starts: Iterable[int]) -> list[Entry]:
    """The requests of a plan, without their guesses; ``starts``: in the order of ``plan.sequences()``."""
    counts = [1] * len(plan.decodes) + [count - plan.guesses.get(seq, 0) for seq, _, count in plan.chunks]
    return [Entry(seq, start, start + n) for seq, start, n in zip(plan.sequences(), starts, counts, strict=True)]


def still_due(entries: Iterable[Entry], scheduler: Scheduler) -> list[Entry]:
    """Those of requests that still run and stand where the step found them, from where they can be run again. One that
    can only be run from its beginning is preempted."""
    found = []
    for entry in entries:
        seq = entry.seq
        if seq.finished or seq.row < 0:
            continue
        at = scheduler.blocks.restart(seq.row, entry.start)
        if at is None and seq.computed == entry.start:
            scheduler.preempt(seq)
            seq.needs_host = True
        elif at is not None and seq.computed in (entry.start, at):
            seq.computed = at
            found.append(replace(entry, start=at))
    return found


def halves(entries: list[Entry]) -> list[list[Entry]]:
    """Two parts; one entry stays one part, to be tried once more by itself."""
    middle = len(entries) // 2
    return [part for part in (entries[:middle], entries[middle:]) if part]


def rewind(steps: list[Step], scheduler: Scheduler, builder: StepBuilder) -> None:
    """Make the requests what they were before ``steps`` (oldest first; nothing else is in flight) were submitted.

    One that has given up blocks since, which the oldest step reads, is preempted: it is computed again, and its steps
    are waited for from now on. A step of its that fails then is found with all of its blocks, and can be run again.
    """
    seen: set[Sequence] = set()
    for step in reversed(steps):
        scheduler.blocks.copies.put_back(step.batch.copy_blocks)
    for step in steps:
        ends = step.batch.seq_lens.tolist() if step is steps[0] else None  # it is run again, and no other
        for i, (seq, start) in enumerate(zip(step.plan.sequences(), step.starts, strict=True)):
            if seq in seen or seq.finished:
                continue
            seen.add(seq)
            seq.forget_expected()
            if seq.row < 0:
                continue
            at = scheduler.blocks.restart(seq.row, start)
            if at is not None:
                seq.computed = at
                scheduler.blocks.cut(seq.row, at if ends is None else ends[i])
                builder.enter(seq)
            else:
                scheduler.preempt(seq)
                seq.needs_host = True
