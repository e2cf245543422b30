"""The engine loop's body: requests in, steps through a runner, outputs out. Single-threaded; one caller owns it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.engine.adapters import Adapters
from toolkit.engine.admission import longest_request
from toolkit.engine.cache.block_manager import BlockManager
from toolkit.engine.cache.memory import CacheMemory
from toolkit.engine.cache.told import Listener, Told
from toolkit.engine.drafts.choose import speculator
from toolkit.engine.drafts.draft import Draft
from toolkit.engine.in_flight import InFlight
from toolkit.engine.intake import INTERNAL_ERROR, UNAVAILABLE, Intake, refusal
from toolkit.engine.nap import Nap
from toolkit.engine.options import EngineOptions
from toolkit.engine.plan import Plan
from toolkit.engine.request import EngineOutput, EngineRequest
from toolkit.engine.results import progress_of
from toolkit.engine.scheduler import Scheduler
from toolkit.engine.sequence import LogitsProcessor, Sequence
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.artifacts.text.tokenizer import Tokenizer
    from toolkit.engine.cache.kept.keeper import Keeper
    from toolkit.engine.cache.kept.moving import Moving
    from toolkit.engine.cache.kept.shelf import Shelf
    from toolkit.runners.base import Runner

log = logging.getLogger(__name__)

INTAKE_SECONDS = 0.01  # that a loop takes requests in for, before the next step of those that run
READ_SECONDS = 0.005  # that a loop without anything else to do waits for blocks, before it takes requests in
WRITE_SECONDS = 0.002  # without requests, between two looks at whether there is room to write more blocks


class EngineCore:
    """One model's running requests: ``sequences`` by their ids, ``intake`` those that are not queued yet, ``flight``
    the steps under way.

    ``add`` and ``abort`` at any time between steps; ``step`` runs one step and returns what it produced. A request that
    cannot run ends with ``finish_reason`` "error". Of a step that fails the request at fault is found by running it
    again in halves; the others go on, their tokens and the cache are what they would have been. Where the runner is
    lost, ``step`` raises RunnerLost, and the engine is to be ended.
    """

    def __init__(
        self,
        runner: Runner,
        options: EngineOptions,
        open_tokenizer: Callable[[], Tokenizer] | None,
        read_weights: Callable[[Path], Callable[[], Mapping[str, Any]]] | None = None,
        empty: bool = False,
        shelf: Shelf | None = None,
        adapters: Seq[str] = (),
        moving: Moving | None = None,
        drafts: Seq[Draft] = (),
    ) -> None:
        """``open_tokenizer``: for bad words and grammars, which are all that it is for here. ``read_weights``: of a
        directory of new weights what the runner is to load. ``empty``: the runner has no weights yet, and no cache.
        ``shelf``: where blocks are kept beside the cache; ``adapters``: what tells each one's blocks from others'
        there. ``moving``: how blocks go to other engines and come from them.
        ``drafts``: models that guess, beside what guesses in any case."""
        spec = runner.spec
        size = runner.options.block_size
        self.runner = runner
        self.options = options
        self.max_len = longest_request(runner, options)
        self.blocks = BlockManager(
            spec.cache_groups, options.num_blocks, size, options.max_batch_size, max(self.max_len, 1)
        )
        rows = max(1, spec.together, options.max_logit_bytes // (4 * spec.vocab_size))
        self.moving = moving
        keeper = None
        if shelf is not None or moving is not None:
            from toolkit.engine.cache.kept.keeper import Keeper

            lender = None if moving is None else moving.lender(runner, self.blocks)
            keeper = Keeper(shelf, runner, self.blocks, lender)
        self.scheduler = Scheduler(self.blocks, options, rows, keeper)
        self.speculator = speculator(runner, options, drafts)
        if self.speculator is not None:
            self.scheduler.guesses = self.speculator.choose
        self.adapters = Adapters(runner, adapters)
        self.intake = Intake(runner, options, self.max_len, self.adapters, open_tokenizer)
        self.flight = InFlight(runner, options, self.scheduler, self.speculator, self._end)
        self.memory = CacheMemory(runner, self.blocks)
        self.sequences: dict[str, Sequence] = {}
        self._outputs: list[EngineOutput] = []  # made between steps
        self._lookahead = runner.asynchronous if options.lookahead is None else options.lookahead
        self._look = runner.look()
        self._damage = ""
        self._steps = 0
        self._step_seconds = 0.0
        self._nap = Nap(runner, self.blocks, options.num_blocks, empty)
        self._read_weights = read_weights
        self._renewed = False

    @property
    def keeper(self) -> Keeper | None:
        """What keeps blocks beside the cache, if anything does."""
        return self.scheduler.keeper

    # -- requests -------------------------------------------------------------------------------

    def add(self, request: EngineRequest, processors: Seq[LogitsProcessor] = ()) -> None:
        """Queue a request. One that cannot run ends in an error output of the next step; nothing is raised."""
        if self._nap.gone or self._damage:
            why, code = (self._nap.why, UNAVAILABLE) if self._nap.gone else (self._damage, INTERNAL_ERROR)
            self._outputs.append(EngineOutput(request.id, finish_reason="error", error=why, error_code=code))
            return
        try:
            if request.id in self.sequences or request.id in self.intake.held:
                raise UsageError(f"request id {request.id!r} is already running")
            if (seq := self.intake.take(request, processors)) is not None:
                self._queue(seq)
        except Exception as e:
            self._outputs.append(refusal(request, e))

    def tell_damage(self, text: str) -> None:
        """From now on, by any thread: every new request ends in the error ``text``, for the weights are not right. It
        is no matter once they have been replaced."""
        if not self._renewed:
            log.error("%s", text)
            self._damage = text

    def abort(self, request_id: str) -> None:
        """End a request and free its blocks now. Unknown ids (already finished) are ignored."""
        seq = self.sequences.get(request_id)
        if self.intake.drop(request_id):
            self._outputs.append(EngineOutput(request_id, finish_reason="abort"))
        elif seq is not None:
            self._outputs.append(EngineOutput(request_id, finish_reason="abort", cached_tokens=seq.cached_tokens))
            self._end(seq, True)

    def end_session(self, name: str) -> None:
        """Let the session's blocks be evicted like any other cached block."""
        self.blocks.end_session(name)

    def tell_blocks(self, listener: Listener) -> None:
        """Tell which whole blocks the prefix cache has from now on."""
        self.scheduler.told = Told(self.blocks, listener)

    def use_source(self, engine_id: str, address: str, secure: bool) -> None:
        """Take blocks of requests whose ``source`` is ``engine_id`` from the engine that lends them at ``address``, or
        in this machine's memory. Raises ToolkitError where there is no way to it."""
        if self.moving is not None and self.keeper is not None:
            self.keeper.sources[engine_id] = self.moving.source(engine_id, address, secure)

    def drop_source(self, engine_id: str) -> None:
        """Ask that engine no more. Unknown ids are ignored."""
        if self.keeper is not None:
            self.keeper.sources.pop(engine_id, None)

    def sleep(self) -> list[str]:
        """Give weights and KV cache back until ``wake``. What runs or waits ends in an error. Returns what is gone."""
        self.flight.drain(self._outputs)
        for request_id in [*self.sequences, *self.intake.held]:
            self.abort(request_id)
            why = self._nap.why
            self._outputs[-1] = EngineOutput(request_id, finish_reason="error", error=why, error_code=UNAVAILABLE)
        self.flight.sight.forget()
        if self.keeper is not None:
            self.keeper.flush()
        self._nap.begin()
        if self.speculator is not None:
            self.speculator.rest()
        return self._nap.gone

    def wake(self, *parts: str) -> list[str]:
        """Load what ``sleep`` gave back: "weights", "kv_cache". Returns what is still gone. Raises ToolkitError where
        that fails."""
        if not self._nap.gone:  # what guesses would lose what it has, too
            return []
        if self.keeper is not None:
            self.adapters.look_again()
        self._nap.end(parts)
        if self.speculator is not None and not self._nap.gone:
            self.speculator.wake()
        return self._nap.gone

    def update_weights(self, files: str, keep: bool) -> list[str]:
        """Run with the weights in the directory ``files`` from now on; nothing of what was computed with the old ones
        is used again. What runs ends as aborted, or with ``keep`` goes on behind the tokens that it has, as if they had
        been its prompt. Returns what is gone. Raises ToolkitError for weights that cannot be: the old ones stay, and
        what runs goes on.
        """
        assert self._read_weights is not None
        weights = self._read_weights(Path(files))
        self.flight.drain(self._outputs)
        if not keep:
            for request_id in [*self.sequences, *self.intake.held]:
                self.abort(request_id)
        for seq in list(self.scheduler.running):
            self.scheduler.preempt(seq)
        self.flight.sight.forget()
        if self.keeper is not None:
            self.keeper.flush()  # what the old weights have made
        if self.speculator is not None:
            self.speculator.rest()  # what the model lends to a head leaves with the old weights
        try:
            self._nap.renew(weights)
        finally:
            if self.speculator is not None and not self._nap.gone:
                self.speculator.wake()
        if self.keeper is not None:
            log.info("the KV cache of new weights is not kept on disk, nor handed over to other engines")
            self._end_keeping()
        self._renewed, self._damage = True, ""
        return self._nap.gone

    def read_adapter(self, number: int, path: str) -> bool:
        """Whether ``load_adapter`` with the same arguments takes no time; until then files are read beside steps."""
        return self.adapters.read(number, Path(path), digest=self.keeper is not None)

    def load_adapter(self, number: int, path: str) -> None:
        """Have requests use the adapter in the directory ``path`` as ``number``. Raises ToolkitError where it cannot be
        read or fits another model, UsageError where the runner takes none in."""
        self.adapters.load(number, Path(path), digest=self.keeper is not None)

    def unload_adapter(self, number: int) -> None:
        """Forget the adapter once the requests that use it have ended. UsageError where the runner keeps them all."""
        self.adapters.unload(number)
        self._drop_adapters()

    def settle(self) -> None:
        """As ``Runner.settle``."""
        self.flight.drain(self._outputs)
        self.runner.settle()

    def trace_ranks(self, on: bool) -> list[list[list[Any]]]:
        """Of each rank what it has done since this was last called (``toolkit.parallel.group.Event``); from now on that
        is kept where ``on``. Raises UsageError where there is one process alone."""
        trace = getattr(self.runner, "trace", None)
        if trace is None:
            raise UsageError("ranks: the model is not split; expected --tp, --pp or --dp above 1")
        self.flight.drain(self._outputs)
        found: list[list[list[Any]]] = trace(on)
        return found

    def _drop_adapters(self) -> None:
        requests = [s.request for s in self.sequences.values()]
        self.adapters.drop({r.adapter for r in (*requests, *(h.request for h in self.intake.held.values()))})

    def close(self) -> None:
        """No step comes any more: write what is to be kept, free the model."""
        self._end_keeping()
        if self.speculator is not None:
            self.speculator.close()
        self.runner.close()

    def _end_keeping(self) -> None:
        if self.keeper is not None:
            self.keeper.close()  # which writes what is to be kept
            self.scheduler.keeper = None

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do or to report."""
        return bool(self.sequences or self._outputs or self.flight or self.intake.held)

    @property
    def patience(self) -> float | None:
        """Seconds after which ``step`` should be called even without work: to give memory back, or to look whether the
        runner is whole; None = never."""
        if self._nap.gone:
            return None
        if self.keeper is not None and self.keeper.pending:
            return WRITE_SECONDS
        return min((x for x in (self.memory.patience, self._look) if x is not None), default=None)

    def _queue(self, seq: Sequence) -> None:
        self.sequences[seq.id] = seq
        self.scheduler.waiting.add(seq)

    def _end(self, seq: Sequence, keep: bool) -> None:
        if not seq.finished:
            self.scheduler.finish(seq, keep=keep)
            self.sequences.pop(seq.id, None)
            if self.speculator is not None:
                self.speculator.forget(seq)
            if self.adapters.leaving:
                self._drop_adapters()

    # -- steps ----------------------------------------------------------------------------------

    def step(self) -> list[EngineOutput]:
        """Run one step; returns the outputs that are ready, in no particular order.

        With lookahead the step is submitted before the results of the one before are read, unless a running request's
        next input depends on them by more than a token id. Behind a long step there is none: it is waited for, so that
        requests which come meanwhile are in the next one. Nor where the next step is to verify guesses.
        """
        started = time.perf_counter()
        if not self._nap.gone:
            self.memory.sweep()
            if self._look is not None and not self.has_work:
                self._look = self.runner.look()
        if self.intake.held:
            for found in self.intake.ready(idle=not self.sequences and not self._outputs):
                if isinstance(found, Sequence):
                    self._queue(found)
                else:
                    self._outputs.append(found)
        if self.adapters.leaving:  # a request that was held may have ended
            self._drop_adapters()
        if self.keeper is not None and not self._nap.gone:
            self.keeper.turn(busy=bool(self.scheduler.running))
        outputs, self._outputs = self._outputs, []
        ahead = self._lookahead and not any(s.needs_host for s in self.scheduler.running)
        if ahead and self.flight and self._waits_for(self.flight.newest):
            self.flight.collect(outputs)
            self._step_seconds += time.perf_counter() - started
            return outputs
        if not ahead:
            self.flight.drain(outputs)
        plan = self.scheduler.schedule()
        self.flight.enter(plan, outputs)
        outputs += progress_of((seq, seq.computed) for seq in plan.started)
        waited = not ahead or not plan or bool(plan.guesses)
        if plan:
            self.flight.submit(plan, outputs, waited and not self.flight)
            self._steps += 1
        elif self.keeper is not None and self.keeper.reading and not self.flight:
            self.keeper.wait(READ_SECONDS)
        while len(self.flight) > (0 if waited else 1):
            self.flight.collect(outputs)
        self._step_seconds += time.perf_counter() - started
        if self.options.check and not self.sequences:
            self.check_integrity()
        return outputs

    def _waits_for(self, plan: Plan) -> bool:
        """Whether the results of a step in flight are to be there before the next one."""
        tempted = self.speculator is not None and self.speculator.tempted(self.scheduler.running)
        return tempted or self.scheduler.pace.is_long(plan)

    def stats(self) -> dict[str, Any]:
        """Gauges and counters since the start, JSON values."""
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting) + len(self.intake.held),
            "kv_usage": self.blocks.usage(),
            **self.memory.stats(),
            "prompt_tokens": self.scheduler.looked_up_tokens,
            "generation_tokens": self.flight.tokens,
            "prefix_hit_tokens": self.scheduler.hit_tokens,
            "prefix_queried_tokens": self.scheduler.looked_up_tokens,
            "preemptions": self.scheduler.preemptions,
            "steps": self._steps,
            "step_seconds": self._step_seconds,
            "pictures_encoded": self.flight.sight.encoded,
            **({} if self.keeper is None else self.keeper.stats()),
            **({} if self.speculator is None else self.speculator.stats()),
        }

    def check_integrity(self) -> None:
        """Assert that the block manager's books are right, and the scheduler's."""
        self.blocks.check_integrity()
        self.scheduler.check_integrity()
