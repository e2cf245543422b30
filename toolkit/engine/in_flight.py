"""Steps on their way through the runner: submitted, their results handed out; one that fails is run again in halves."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from toolkit.base.garbage import let_go
from toolkit.engine.admission import own_rope
from toolkit.engine.intake import INTERNAL_ERROR
from toolkit.engine.options import EngineOptions
from toolkit.engine.pictures.sight import Sight
from toolkit.engine.plan import Plan
from toolkit.engine.recovery import Entry, entries_of, halves, rewind, still_due
from toolkit.engine.request import EngineOutput
from toolkit.engine.results import StepResults, progress_of
from toolkit.engine.scheduler import Scheduler
from toolkit.engine.sequence import Sequence
from toolkit.engine.step import Step
from toolkit.engine.step_builder import Growth, StepBuilder
from toolkit.runners.base import RunnerLost

if TYPE_CHECKING:
    from toolkit.engine.drafts.speculator import Speculator
    from toolkit.runners.base import Runner, StepHandle
    from toolkit.runners.step import StepOutput

log = logging.getLogger(__name__)

BROKEN_AFTER = 8  # requests failed one after another, with no step in between that ran: the runner's cache is made anew


class InFlight:
    """Steps of one runner, oldest first. ``end(sequence, keep)``: is called for each that ends, ``keep`` its blocks.
    ``tokens``: that were generated. ``outputs`` of its methods gets what they have for users."""

    def __init__(
        self,
        runner: Runner,
        options: EngineOptions,
        scheduler: Scheduler,
        speculator: Speculator | None,
        end: Callable[[Sequence, bool], None],
    ) -> None:
        spec, own = runner.spec, own_rope(runner)
        axes = 3 if spec.vision is not None and spec.vision.axes else 1
        growth = None if own is None else Growth(own.original_max_position, not own.doubled)
        self.builder = StepBuilder(scheduler.blocks, options.max_batch_size, spec.vocab_size, axes, growth)
        self.sight = Sight(runner, options.pictures_together, options.pictures_kept)
        self.results = StepResults(spec.vocab_size, self.builder)
        if speculator is not None:
            self.results.verified = speculator.verified
        self.tokens = 0
        self._runner = runner
        self._num_blocks = options.num_blocks
        self._scheduler = scheduler
        self._blocks = scheduler.blocks
        self._speculator = speculator
        self._end = end
        self._steps: deque[tuple[Step, StepHandle]] = deque()
        self._failures = 0  # since a step has last run

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def newest(self) -> Plan:
        """Of the step submitted last; there is one."""
        return self._steps[-1][0].plan

    def enter(self, plan: Plan, outputs: list[EngineOutput]) -> None:
        """Give those that start their row of arrays; one whose numbers do not fit ends."""
        for seq in plan.started:
            try:
                self.builder.enter(seq)
            except Exception as e:
                self._blame(seq, e, outputs)
        plan.chunks = [chunk for chunk in plan.chunks if not chunk[0].finished]

    def submit(self, plan: Plan, outputs: list[EngineOutput], waited: bool = False) -> None:
        """Start a step and count its tokens as computed. ``waited``: it is collected next."""
        try:
            step, handle = self._start(plan, waited)
        except Exception as e:
            entries = entries_of(plan, [s.computed for s in plan.sequences()])  # before others' results are taken
            self.drain(outputs)
            self._retry(entries, e, outputs)
            return
        self._count(step)
        self._steps.append((step, handle))

    def drain(self, outputs: list[EngineOutput]) -> None:
        """Collect all."""
        while self._steps:
            self.collect(outputs)

    def collect(self, outputs: list[EngineOutput]) -> None:
        """Wait for the oldest step and hand out what it produced."""
        step, handle = self._steps.popleft()
        try:
            result = handle.result()
        except Exception as e:
            later = [s for s, _ in self._steps]
            for _, behind in self._steps:  # it built on this step's tokens: only its end matters
                try:
                    behind.result()
                except Exception as also:
                    log.info("a step behind the one that failed: %s", also)
                    let_go(also)
            self._steps.clear()
            rewind([step, *later], self._scheduler, self.builder)
            self._retry(entries_of(step.plan, step.starts), e, outputs)
            return
        self._hand_out(step, result, outputs)
        now = time.perf_counter()  # log-probabilities of prompts are work, too
        self._scheduler.pace.ended(step.plan, now)
        if self._speculator is not None:
            self._speculator.step_ended(step.plan, len(step.batch.token_ids), now)

    def _start(self, plan: Plan, waited: bool) -> tuple[Step, StepHandle]:
        if self._speculator is not None:  # a draft may have failed
            self.builder.tap(*self._speculator.taps)
        step = self.builder.build(plan)
        step.batch.waited = waited
        plan.submitted = time.perf_counter()
        try:
            self.sight.show(step)
            return step, self._runner.submit(step.batch)
        except Exception:
            self._blocks.copies.put_back(step.batch.copy_blocks)
            raise

    def _count(self, step: Step) -> None:
        """The step is on its way."""
        for seq in step.plan.decodes:
            seq.computed += 1
        for seq, _, count in step.plan.chunks:
            if seq not in step.plan.guesses:
                seq.computed, seq.replay = seq.settled(seq.computed + count), 0
        self.results.expect(step)

    def _hand_out(self, step: Step, result: StepOutput, outputs: list[EngineOutput]) -> None:
        self._failures = 0
        self._blocks.copies.done(step.batch.copy_blocks)
        stored = dict(zip(step.plan.sequences(), step.batch.seq_lens.tolist(), strict=True))
        outputs += progress_of((seq, start + count) for seq, start, count in step.plan.chunks)
        for seq, output in self.results.take(step, result):
            self.tokens += len(output.token_ids)
            outputs.append(output)
            if output.finish_reason is not None:
                if output.finish_reason != "error":
                    self._scheduler.label(seq, stored[seq])
                    self._lend(seq, output)
                self._end(seq, output.finish_reason != "error")
        for seq, end in stored.items():
            if seq.keys_root is not None:
                self._scheduler.label(seq, end)
        if self._speculator is not None:
            self._speculator.observe(step, result)

    def _lend(self, seq: Sequence, output: EngineOutput) -> None:
        if seq.request.lend:
            whole = seq.prompt_len // self._blocks.block_size
            output.block_ids = [key.hex() for key in seq.keys[:whole]]
            keeper = self._scheduler.keeper
            if keeper is not None and keeper.lender is not None and seq.keys:
                keeper.lender.end(seq)

    # -- steps that fail ------------------------------------------------------------------------

    def _retry(self, entries: list[Entry], error: Exception, outputs: list[EngineOutput]) -> None:
        """Run a failed step once more in halves, at last request by request: those that fail alone end."""
        if isinstance(error, RunnerLost):
            raise error
        log.error("a step of %d requests failed: %s: %s", len(entries), type(error).__name__, error, exc_info=error)
        let_go(error)
        groups = deque(halves(entries))
        self.sight.lost()
        while groups:
            group = still_due(groups.popleft(), self._scheduler)
            if not group:
                continue
            try:
                step, result = self._run(Plan(chunks=[(e.seq, e.start, e.stop - e.start) for e in group]))
            except RunnerLost:
                raise
            except Exception as e:
                let_go(e)
                self.sight.lost()
                if len(group) == 1:
                    self._blame(group[0].seq, e, outputs)
                else:
                    groups.extendleft(reversed(halves(group)))
                continue
            self._count(step)
            self._hand_out(step, result, outputs)
        if self._failures >= BROKEN_AFTER:
            self._renew_cache()

    def _run(self, plan: Plan) -> tuple[Step, StepOutput]:
        step, handle = self._start(plan, True)
        try:
            return step, handle.result()
        except Exception:
            self._blocks.copies.put_back(step.batch.copy_blocks)
            raise

    def _blame(self, seq: Sequence, error: Exception, outputs: list[EngineOutput]) -> None:
        self._failures += 1
        text = f"the engine failed while it ran this request ({type(error).__name__}: {error})"
        log.error("request %s: %s", seq.id, text)
        outputs.append(EngineOutput(seq.id, finish_reason="error", error=text, error_code=INTERNAL_ERROR))
        self._end(seq, False)

    def _renew_cache(self) -> None:
        """Nothing runs any more: give the runner an empty cache, and compute in it what still waits."""
        for seq in list(self._scheduler.running):
            self._scheduler.preempt(seq)
        self._blocks.reset_cache()
        self._runner.release_cache()
        self.sight.lost()
        self._runner.allocate_cache(self._num_blocks)
        self._failures = 0
