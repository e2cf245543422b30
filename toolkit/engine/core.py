"""The engine loop's body: requests in, steps through a runner, outputs out. Single-threaded; one caller owns it."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.manifest import content_digest
from toolkit.engine.admission import (
    check_request,
    in_blocks,
    long_rope_from,
    longest_request,
    own_rope,
    turned_by,
)
from toolkit.engine.cache.block_manager import BlockManager
from toolkit.engine.cache.kept.keeper import Keeper
from toolkit.engine.cache.kept.moving import Moving
from toolkit.engine.cache.kept.shelf import Shelf
from toolkit.engine.cache.prefix import root_key
from toolkit.engine.cache.told import Listener, Told
from toolkit.engine.canvas import Canvas
from toolkit.engine.constraints.request import Building, Built, Constraints
from toolkit.engine.drafts.choose import speculator
from toolkit.engine.drafts.draft import Draft
from toolkit.engine.nap import Nap
from toolkit.engine.options import EngineOptions
from toolkit.engine.pictures.sight import Sight
from toolkit.engine.pictures.spans import find_spans, positions_of, runs_of
from toolkit.engine.plan import Plan
from toolkit.engine.recovery import Entry, entries_of, halves, rewind, still_due
from toolkit.engine.request import EngineOutput, EngineRequest
from toolkit.engine.results import StepResults, progress_of
from toolkit.engine.scheduler import Scheduler
from toolkit.engine.sequence import LogitsProcessor, Sequence
from toolkit.engine.step_builder import Growth, Step, StepBuilder
from toolkit.errors import BusyError, ToolkitError, UsageError
from toolkit.runners.base import RunnerError, RunnerLost

if TYPE_CHECKING:
    from toolkit.artifacts.text.tokenizer import Tokenizer
    from toolkit.runners.base import Runner, StepHandle
    from toolkit.runners.step import StepOutput

log = logging.getLogger(__name__)

INVALID_REQUEST = 400  # error codes of EngineOutput, as HTTP has them
INTERNAL_ERROR = 500
UNAVAILABLE = 503
INTAKE_SECONDS = 0.01  # that a loop takes requests in for, before the next step of those that run
READ_SECONDS = 0.005  # that a loop without anything else to do waits for blocks, before it takes requests in
WRITE_SECONDS = 0.002  # without requests, between two looks at whether there is room to write more blocks
SWEEP_SECONDS = 60.0  # between two looks at blocks that nobody uses
BROKEN_AFTER = 8  # requests failed one after another, with no step in between that ran: the runner's cache is made anew


class EngineCore:
    """One model's running requests.

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
        self.keeper = None
        if shelf is not None or moving is not None:
            lender = None if moving is None else moving.lender(runner, self.blocks)
            self.keeper = Keeper(shelf, runner, self.blocks, lender)
        self._adapters = dict(enumerate(adapters))
        self.scheduler = Scheduler(self.blocks, options, rows, self.keeper)
        axes = 3 if spec.vision is not None and spec.vision.axes else 1
        own = own_rope(runner)
        growth = None if own is None else Growth(own.original_max_position, not own.doubled)
        self.builder = StepBuilder(self.blocks, options.max_batch_size, spec.vocab_size, axes, growth)
        self.sight = Sight(runner, options.pictures_together, options.pictures_kept)
        self.results = StepResults(spec.vocab_size, self.builder)
        self.speculator = speculator(runner, options, drafts)
        if self.speculator is not None:
            self.scheduler.guesses, self.results.verified = self.speculator.choose, self.speculator.verified
            self.builder.aux_layers = self.speculator.aux_layers
        self.constraints = Constraints(open_tokenizer, spec.vocab_size)
        self._sequences: dict[str, Sequence] = {}
        self._held: dict[str, tuple[Building, EngineRequest, list[LogitsProcessor]]] = {}  # constraints not built yet
        self._outputs: list[EngineOutput] = []  # made between steps
        self._flying: deque[tuple[Step, StepHandle]] = deque()  # submitted, oldest first
        self._lookahead = runner.asynchronous if options.lookahead is None else options.lookahead
        self._leaving: set[int] = set()  # adapters that go once no request uses them
        self._arrivals = 0
        self._damage = ""
        self._generation_tokens = 0
        self._steps = 0
        self._step_seconds = 0.0
        self._failures = 0  # since a step has last run
        self._block_bytes = runner.memory().block_bytes
        self._give_back = runner.discard_blocks if runner.device == "cpu" else None
        self._next_sweep = time.monotonic() + SWEEP_SECONDS
        self._long_from, self._own_rope = long_rope_from(runner), own_rope(runner)
        self._nap = Nap(runner, self.blocks, options.num_blocks, empty)
        self._read_weights = read_weights
        self._renewed = False

    # -- requests -------------------------------------------------------------------------------

    def add(self, request: EngineRequest, processors: Seq[LogitsProcessor] = ()) -> None:
        """Queue a request. One that cannot run ends in an error output of the next step; nothing is raised."""
        if self._nap.gone:
            asleep = EngineOutput(request.id, finish_reason="error", error=self._nap.why, error_code=UNAVAILABLE)
            self._outputs.append(asleep)
            return
        if self._damage:
            failed = EngineOutput(request.id, finish_reason="error", error=self._damage, error_code=INTERNAL_ERROR)
            self._outputs.append(failed)
            return
        try:
            if request.id in self._sequences or request.id in self._held:
                raise UsageError(f"request id {request.id!r} is already running")
            check_request(request, self.runner, self.max_len, self.options.session_len)
            if self.runner.spec.mask_token is not None:
                request = in_blocks(request, self.runner.spec.mask_token, bool(processors))
            if (built := self.constraints.find(request.params)) is not None:
                self._accept(request, list(processors), built)
            else:
                building = self.constraints.begin(request.params, request.whose.user)
                self._held[request.id] = (building, request, list(processors))
        except Exception as e:
            self._refuse(request, e)

    def tell_damage(self, text: str) -> None:
        """From now on, by any thread: every new request ends in the error ``text``, for the weights are not right. It
        is no matter once they have been replaced."""
        if not self._renewed:
            log.error("%s", text)
            self._damage = text

    def abort(self, request_id: str) -> None:
        """End a request and free its blocks now. Unknown ids (already finished) are ignored."""
        seq = self._sequences.get(request_id)
        if (held := self._held.pop(request_id, None)) is not None:
            held[0].leave()
            self._outputs.append(EngineOutput(request_id, finish_reason="abort"))
        elif seq is not None:
            self._outputs.append(EngineOutput(request_id, finish_reason="abort", cached_tokens=seq.cached_tokens))
            self._end(seq, keep=True)

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
        while self._flying:
            self._collect(self._outputs)
        for request_id in [*self._sequences, *self._held]:
            self.abort(request_id)
            why = self._nap.why
            self._outputs[-1] = EngineOutput(request_id, finish_reason="error", error=why, error_code=UNAVAILABLE)
        self.sight.forget()
        if self.keeper is not None:
            self.keeper.flush()
        self._nap.begin()
        if self.speculator is not None:
            self.speculator.rest()
        return self._nap.gone

    def wake(self, *parts: str) -> list[str]:
        """Load what ``sleep`` gave back: "weights", "kv_cache". Returns what is still gone. Raises ToolkitError where
        that fails."""
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
        while self._flying:
            self._collect(self._outputs)
        if not keep:
            for request_id in [*self._sequences, *self._held]:
                self.abort(request_id)
        for seq in list(self.scheduler.running):
            self.scheduler.preempt(seq)
        self.sight.forget()
        self._forget_kept()
        self._nap.renew(weights)
        self._renewed, self._damage = True, ""
        return self._nap.gone

    def load_adapter(self, number: int, path: str) -> None:
        """Have requests use the adapter in the directory ``path`` as ``number``. Raises ToolkitError where it cannot be
        read or fits another model, UsageError where the runner takes none in."""
        add = getattr(self.runner, "add_adapter", None)
        if add is None:
            raise UsageError("adapters: this backend takes them at the start alone (--adapters); restart the server")
        try:
            add(number, Path(path))
        except RunnerError as e:
            raise ToolkitError(f"{path}: {e}") from e
        if self.keeper is not None:  # where numbers of other processes stand for other adapters
            self._adapters[number] = content_digest(Path(path))

    def unload_adapter(self, number: int) -> None:
        """Forget the adapter once the requests that use it have ended. UsageError where the runner keeps them all."""
        if not hasattr(self.runner, "remove_adapter"):
            raise UsageError("adapters: this backend keeps those it was started with; restart the server without it")
        self._leaving.add(number)
        self._drop_adapters()

    def trace_ranks(self, on: bool) -> list[list[list[Any]]]:
        """Of each rank what it has done since this was last called (``toolkit.parallel.group.Event``); from now on that
        is kept where ``on``. Raises UsageError where there is one process alone."""
        trace = getattr(self.runner, "trace", None)
        if trace is None:
            raise UsageError("ranks: the model is not split; expected --tp, --pp or --dp above 1")
        while self._flying:
            self._collect(self._outputs)
        found: list[list[list[Any]]] = trace(on)
        return found

    def _drop_adapters(self) -> None:
        held = (request for _, request, _ in self._held.values())
        used = {r.adapter for r in (*(s.request for s in self._sequences.values()), *held)}
        for number in self._leaving - used:
            self.runner.remove_adapter(number)  # type: ignore[attr-defined]  # it has taken it in
            self._leaving.discard(number)

    def _forget_kept(self) -> None:
        """Other weights come: what is kept is not theirs, and of them nothing is kept."""
        if self.keeper is not None:
            log.info("the KV cache of new weights is not kept on disk, nor handed over to other engines")
            self._end_keeping()

    def close(self) -> None:
        """No step comes any more: write what is to be kept, free the model."""
        self._end_keeping()
        if self.speculator is not None:
            self.speculator.close()
        self.runner.close()

    def _end_keeping(self) -> None:
        if self.keeper is not None:
            self.keeper.close()  # which writes what is to be kept
            self.keeper = self.scheduler.keeper = None

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do or to report."""
        return bool(self._sequences or self._outputs or self._flying or self._held)

    @property
    def patience(self) -> float | None:
        """Seconds after which ``step`` should be called even without work, to give memory back; None = never."""
        if self.keeper is not None and self.keeper.pending and not self._nap.gone:
            return WRITE_SECONDS
        if self._give_back is None or self._nap.gone or not any(pool.touched for pool in self.blocks.pools):
            return None
        return max(0.0, self._next_sweep - time.monotonic())

    def _refuse(self, request: EngineRequest, error: Exception) -> None:
        code, text = INVALID_REQUEST, str(error)
        if isinstance(error, BusyError):
            code = UNAVAILABLE
        elif not isinstance(error, ToolkitError):
            log.error("request %s cannot be taken in", request.id, exc_info=error)
            code, text = INTERNAL_ERROR, f"the engine cannot take this request in ({type(error).__name__}: {error})"
        self._outputs.append(EngineOutput(request.id, finish_reason="error", error=text, error_code=code))

    def _admit_held(self) -> None:
        """Queue requests whose constraints have been built meanwhile; with nothing else to do, wait a little."""
        self.constraints.proceed()
        if not self._sequences and not self._outputs:
            next(iter(self._held.values()))[0].wait(0.005)
        for request_id, (building, request, processors) in list(self._held.items()):
            if building.done:
                del self._held[request_id]
                try:
                    self._accept(request, processors, building.result())
                except Exception as e:
                    self._refuse(request, e)

    def _accept(self, request: EngineRequest, processors: list[LogitsProcessor], built: Built) -> None:
        """Queue a request that has passed its checks."""
        longest = len(request.token_ids) + request.params.max_new_tokens
        rope_set = int(self._long_from is not None and longest > self._long_from)
        turned = rope_set if self._own_rope is None else turned_by(self._own_rope, len(request.token_ids))
        encoder, mutual = self.runner.spec.encoder, self.runner.spec.mutual
        pairs = encoder is not None and encoder.type_rows > 1
        shares = not mutual and (self.options.prefix_caching or request.session is not None)
        owner = "" if self.options.prefix_caching else f"session {request.session}"
        vision, spans = self.runner.spec.vision, []
        if vision is not None and request.pictures:
            spans = find_spans(request.token_ids, request.pictures, vision.image_token)
        axes, shift = positions_of(vision, len(request.token_ids), spans)
        seq = Sequence(
            request,
            order=self._arrivals,
            max_len=self.max_len,
            rope_set=rope_set,
            turned_by=turned,
            keys_root=root_key(turned, self._adapter(request.adapter), owner) if shares else None,
            processors=processors,
            spans=spans,
            axes=axes,
            shift=shift,
            canvas=self._canvas(),
            whole=mutual,
            second=request.second if pairs else 0,
            **self.constraints.fields(request, built),
        )
        if vision is not None and vision.mutual and spans:
            seq.runs = runs_of(spans)
        if vision is not None and vision.crossed:
            seq.looks_at = frozenset(picture.digest for picture in request.pictures)
        self._arrivals += 1
        self._sequences[request.id] = seq
        self.scheduler.add(seq)

    def _adapter(self, number: int) -> int | str:
        return self._adapters.get(number, number)

    def _canvas(self) -> Canvas | None:
        """For a request's tokens, where the model guesses blocks of them."""
        spec = self.runner.spec
        return None if spec.mask_token is None else Canvas(spec.block, spec.mask_token, self.options.unmasking)

    def _end(self, seq: Sequence, *, keep: bool) -> None:
        if not seq.finished:
            self.scheduler.finish(seq, keep=keep)
            self._sequences.pop(seq.id, None)
            if self.speculator is not None:
                self.speculator.forget(seq)
            if self._leaving:
                self._drop_adapters()

    # -- steps ----------------------------------------------------------------------------------

    def step(self) -> list[EngineOutput]:
        """Run one step; returns the outputs that are ready, in no particular order.

        With lookahead the step is submitted before the results of the one before are read, unless a running request's
        next input depends on them by more than a token id. Behind a long step there is none: it is waited for, so that
        requests which come meanwhile are in the next one. Nor where the next step is to verify guesses.
        """
        started = time.perf_counter()
        if self._give_back is not None and not self._nap.gone and time.monotonic() >= self._next_sweep:
            self._sweep(self._give_back)
        if self._held:
            self._admit_held()
        if self.keeper is not None and not self._nap.gone:
            self.keeper.turn(busy=bool(self.scheduler.running))
        outputs, self._outputs = self._outputs, []
        ahead = self._lookahead and not any(s.needs_host for s in self.scheduler.running)
        if ahead and self._flying and self._waits_for(self._flying[-1][0].plan):
            self._collect(outputs)
            self._step_seconds += time.perf_counter() - started
            return outputs
        while self._flying and not ahead:
            self._collect(outputs)
        plan = self.scheduler.schedule()
        self._enter(plan, outputs)
        outputs += progress_of((seq, seq.computed) for seq in plan.started)
        if plan:
            self._submit(plan, outputs)
            self._steps += 1
        elif self.keeper is not None and self.keeper.reading and not self._flying:
            self.keeper.wait(READ_SECONDS)
        while len(self._flying) > (1 if ahead and plan and not plan.guesses else 0):
            self._collect(outputs)
        self._step_seconds += time.perf_counter() - started
        if self.options.check and not self._sequences:
            self.check_integrity()
        return outputs

    def _waits_for(self, plan: Plan) -> bool:
        """Whether the results of a step in flight are to be there before the next one."""
        tempted = self.speculator is not None and self.speculator.tempted(self.scheduler.running)
        return tempted or self.scheduler.pace.is_long(plan)

    def _enter(self, plan: Plan, outputs: list[EngineOutput]) -> None:
        """Give those that start their row of arrays; one whose numbers do not fit ends."""
        for seq in plan.started:
            try:
                self.builder.enter(seq)
            except Exception as e:
                self._blame(seq, e, outputs)
        plan.chunks = [chunk for chunk in plan.chunks if not chunk[0].finished]

    def _submit(self, plan: Plan, outputs: list[EngineOutput]) -> None:
        """Start a step and count its tokens as computed."""
        try:
            step, handle = self._start(plan)
        except Exception as e:
            entries = entries_of(plan, [s.computed for s in plan.sequences()])  # before others' results are taken
            while self._flying:
                self._collect(outputs)
            self._retry(entries, e, outputs)
            return
        self._count(step)
        self._flying.append((step, handle))

    def _start(self, plan: Plan) -> tuple[Step, StepHandle]:
        step = self.builder.build(plan)
        plan.submitted = time.perf_counter()
        try:
            self.sight.show(step)
            return step, self.runner.submit(step.batch)
        except Exception:
            self.blocks.put_back(step.batch.copy_blocks)
            raise

    def _count(self, step: Step) -> None:
        """The step is on its way."""
        for seq in step.plan.decodes:
            seq.computed += 1
        for seq, _, count in step.plan.chunks:
            if seq not in step.plan.guesses:
                seq.computed, seq.replay = seq.settled(seq.computed + count), 0
        self.results.expect(step)

    def _collect(self, outputs: list[EngineOutput]) -> None:
        """Wait for the oldest step in flight and hand out what it produced."""
        step, handle = self._flying.popleft()
        try:
            result = handle.result()
        except Exception as e:
            later = [s for s, _ in self._flying]
            for _, behind in self._flying:  # it built on this step's tokens: only its end matters
                try:
                    behind.result()
                except Exception as also:
                    log.info("a step behind the one that failed: %s", also)
            self._flying.clear()
            rewind([step, *later], self.scheduler, self.builder)
            self._retry(entries_of(step.plan, step.starts), e, outputs)
            return
        self._hand_out(step, result, outputs)
        now = time.perf_counter()  # log-probabilities of prompts are work, too
        self.scheduler.pace.ended(step.plan, now)
        if self.speculator is not None:
            self.speculator.step_ended(step.plan, len(step.batch.token_ids), now)

    def _hand_out(self, step: Step, result: StepOutput, outputs: list[EngineOutput]) -> None:
        self._failures = 0
        self.blocks.copied(step.batch.copy_blocks)
        stored = dict(zip(step.plan.sequences(), step.batch.seq_lens.tolist(), strict=True))
        outputs += progress_of((seq, start + count) for seq, start, count in step.plan.chunks)
        for seq, output in self.results.take(step, result):
            self._generation_tokens += len(output.token_ids)
            outputs.append(output)
            if output.finish_reason is not None:
                if output.finish_reason != "error":
                    self.scheduler.label(seq, stored[seq])
                    self._lend(seq, output)
                self._end(seq, keep=output.finish_reason != "error")
        for seq in step.plan.sequences():
            self.scheduler.label(seq, stored[seq])
        if self.speculator is not None:
            self.speculator.observe(step, result)

    def _lend(self, seq: Sequence, output: EngineOutput) -> None:
        if seq.request.lend:
            whole = seq.prompt_len // self.blocks.block_size
            output.block_ids = [key.hex() for key in seq.keys[:whole]]
            if self.keeper is not None and self.keeper.lender is not None and seq.keys:
                self.keeper.lender.end(seq)

    # -- steps that fail ------------------------------------------------------------------------

    def _retry(self, entries: list[Entry], error: Exception, outputs: list[EngineOutput]) -> None:
        """Run a failed step once more in halves, at last request by request: those that fail alone end."""
        if isinstance(error, RunnerLost):
            raise error
        log.error("a step of %d requests failed: %s: %s", len(entries), type(error).__name__, error, exc_info=error)
        groups = deque(halves(entries))
        self.sight.lost()
        while groups:
            group = still_due(groups.popleft(), self.scheduler)
            if not group:
                continue
            try:
                step, result = self._run(Plan(chunks=[(e.seq, e.start, e.stop - e.start) for e in group]))
            except RunnerLost:
                raise
            except Exception as e:
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
        step, handle = self._start(plan)
        try:
            return step, handle.result()
        except Exception:
            self.blocks.put_back(step.batch.copy_blocks)
            raise

    def _blame(self, seq: Sequence, error: Exception, outputs: list[EngineOutput]) -> None:
        self._failures += 1
        text = f"the engine failed while it ran this request ({type(error).__name__}: {error})"
        log.error("request %s: %s", seq.id, text)
        outputs.append(EngineOutput(seq.id, finish_reason="error", error=text, error_code=INTERNAL_ERROR))
        self._end(seq, keep=False)

    def _renew_cache(self) -> None:
        """Nothing runs any more: give the runner an empty cache, and compute in it what still waits."""
        for seq in list(self.scheduler.running):
            self.scheduler.preempt(seq)
        self.blocks.reset_cache()
        self.runner.release_cache()
        self.sight.lost()
        self.runner.allocate_cache(self.options.num_blocks)
        self._failures = 0

    # -- the whole ------------------------------------------------------------------------------

    def _sweep(self, give_back: Callable[[int, list[int]], None]) -> None:
        """Give the memory of blocks that nobody has wanted for a while back to the system."""
        self._next_sweep = time.monotonic() + SWEEP_SECONDS
        for group, pool in enumerate(self.blocks.pools):
            if blocks := pool.sweep():
                give_back(group, blocks)

    def _cache_bytes(self) -> tuple[int, int]:
        """(all of the KV cache, what of it is in memory)."""
        pools = list(zip(self.blocks.pools, self._block_bytes, strict=True))
        whole = sum(pool.size * size for pool, size in pools)
        return whole, sum(pool.touched * size for pool, size in pools) if self._give_back else whole

    def stats(self) -> dict[str, Any]:
        """Gauges and counters since the start, JSON values."""
        planned, resident = self._cache_bytes()
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting) + len(self._held),
            "kv_usage": self.blocks.usage(),
            "kv_planned_bytes": planned,
            "kv_resident_bytes": resident,
            "prompt_tokens": self.scheduler.looked_up_tokens,
            "generation_tokens": self._generation_tokens,
            "prefix_hit_tokens": self.scheduler.hit_tokens,
            "prefix_queried_tokens": self.scheduler.looked_up_tokens,
            "preemptions": self.scheduler.preemptions,
            "steps": self._steps,
            "step_seconds": self._step_seconds,
            "pictures_encoded": self.sight.encoded,
            **({} if self.keeper is None else self.keeper.stats()),
            **({} if self.speculator is None else self.speculator.stats()),
        }

    def check_integrity(self) -> None:
        """Assert that the block manager's books are right."""
        self.blocks.check_integrity()
        rows = [s.row for s in self.scheduler.running]
        assert len(set(rows)) == len(rows)
        assert not any(s.row >= 0 for s in self.scheduler.waiting)
