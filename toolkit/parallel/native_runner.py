"""Ranks of the native runner: processes that hand each other rows in memory that all of a machine have mapped, and that
a bridge joins to other machines'.

Every linear's rows are shared out, heads and their caches too; what ranks make is gathered, and no sum is cut. So they
give the bits of one process.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from toolkit.base.threads import usable_cores
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.eyes.pictures import Picture
from toolkit.parallel import ranks as timing
from toolkit.parallel.bridge import Bridge
from toolkit.parallel.layout import Layout
from toolkit.parallel.model import Model
from toolkit.parallel.native_model import NativeRank, open_native, signature
from toolkit.parallel.nodes import Nodes, about
from toolkit.parallel.places import cores_of, on_cores
from toolkit.parallel.ranks import RankLost, Ranks, crowded
from toolkit.parallel.runner import RankedRunner
from toolkit.parallel.wire import digest
from toolkit.runners.base import Backend, MemoryNeed, RunnerError, RunnerLost, StepHandle
from toolkit.runners.choose import Opened
from toolkit.runners.native.library import ISA_VARIABLE, instructions
from toolkit.runners.native.need import block_bytes
from toolkit.runners.native.share import Share
from toolkit.runners.native.stepper import Running
from toolkit.runners.step import StepBatch, StepOutput

LOOK_SECONDS = 0.2  # after which one looks whether those that a step waits for are still there
Call = tuple[Any, list[Any]]


class _Meeting:
    """What ``RankedRunner`` asks of a group."""

    def __init__(self, runner: NativeRank, world: int) -> None:
        self._runner = runner
        self.broken = ""
        self.layout = Layout(tp=world)

    @property
    def messages(self) -> int:
        return self._runner.meetings()

    def leave(self) -> None:
        """Nobody waits for others any more."""
        self._runner.lose()


class NativeRanks(RankedRunner):
    """Implements ``toolkit.runners.base.Runner``; as ``RankedRunner``, but that steps run while the next one is made
    ready, and pictures are read by the first rank."""

    name = "native"
    backend: Backend = "turbomind"
    device = "cpu"
    batch_invariant = asynchronous = True
    _bridge: Bridge | None = None  # to the ranks of other machines

    def __init__(self, model: Model, world: int, opened: Opened | None = None, nodes: Nodes | None = None) -> None:
        """Open the model and start the ranks, or wait for those of other ``nodes``; no weights are loaded. ``opened``:
        what ``open_native`` has of it, which says nothing against it. Raises ToolkitError or UsageError, one line."""
        if opened is None:
            opened, reason = open_native(model, world)
            if reason is not None:
                raise UsageError(f"tp={world}: {model.path}: {reason}")
        own = None if nodes is None else about(Path(model.path), model, Layout(tp=world))
        here = world if nodes is None else nodes.here(world)
        cores, total = cores_of(here), model.options.threads or usable_cores()
        threads = max(1, total // here) if cores is None else min(map(len, cores))
        model = replace(model, options=replace(model.options, device="cpu", threads=threads))
        self._memory = os.memfd_create("toolkit-ranks")
        try:
            self._cores = None if cores is None else cores[0]
            local = NativeRank(opened, model, Share(0, world, self._memory))
            self._local: NativeRank = local
            self._weights, self._path = opened.weights, model.path
            self._group: Any = _Meeting(local, world)
            self.spec, self.options, self.dtype = opened.spec, local.options, local.dtype
            self._here = here
            on = "" if nodes is None else f" on {nodes.count} machines"
            self.notes = [f"{world} ranks{on}, threads of each: {threads}; numbers of memory are of one rank"]
            self.notes += crowded(here)
            self._block_bytes = [
                block_bytes(self.spec, self.options, self.dtype, Share(rank, world)) for rank in range(world)
            ]
            self._steps: deque[_Step] = deque()  # under way, in their order
            self._lost = ""
            self._ranks = Ranks(world, threads, "toolkit.parallel.native_worker", nodes, own)
        except BaseException:  # ranks of other machines have not come, say
            self.close()
            raise
        told = replace(model, options=replace(model.options, dtype=local.dtype))
        try:
            shared = {"memory": f"/proc/{os.getpid()}/fd/{self._memory}", "here": here, "store": None}
            if nodes is not None:
                self._store = dist.TCPStore(nodes.host, 0, is_master=True, wait_for_workers=False)
                shared["store"] = [nodes.host, self._store.port]
            self._ranks.open(told.to_json(), True, **shared)
            answers = self._ranks.answers(timing.OPEN_SECONDS)
            self._met(answers)
            mine, how = signature(opened, Path(model.path), times=nodes is None), instructions()
            for rank, answer in enumerate(answers, 1):
                if answer["value"] != mine:
                    raise RankLost(f"rank {rank} has found another model at {model.path}; was it changed meanwhile?")
                if answer["instructions"] != how:
                    raise RankLost(
                        f"rank {rank} computes with {answer['instructions']}, rank 0 with {how}, which may round "
                        f"otherwise; set {ISA_VARIABLE} to what all machines have"
                    )
            if nodes is not None:
                more = {"world": world, "seconds": timing.STEP_SECONDS, "machine": 0, "own": nodes.host}
                self._bridge = Bridge(shared | more, local.lose)
                self._met(self._ranks.answers(timing.OPEN_SECONDS))
        except (RankLost, RuntimeError) as e:
            self.close()
            raise ToolkitError(f"tp={world}: the ranks have not met: {e}") from None
        except BaseException:
            self.close()
            raise

    @property
    def first(self) -> NativeRank:
        """The rank of this process, whose weights a draft head borrows."""
        return self._local

    # -- calls that all ranks do

    def memory(self) -> MemoryNeed:
        """Of one rank: the first, whose part is the largest. Free memory is shared out evenly."""
        found = self._local.memory()
        return replace(found, free=found.free // self._here)

    def load_weights(self) -> None:
        """All ranks load their parts, at the same time."""
        with on_cores(self._cores):  # which the threads keep that are started here
            super().load_weights()
        self.notes = list(dict.fromkeys([*self.notes, *self._local.notes]))

    def warm_up(self, most: int, length: int, tokens: int) -> None:
        self._local.warm_up(most, length, tokens)

    @property
    def adapter_numbers(self) -> Collection[int]:
        """As ``NativeRunner``."""
        return self._local.adapter_numbers

    def read_adapter(self, number: int, path: Path) -> bool:
        """As ``NativeRunner``, on all ranks."""
        mine, others = self._all("read_adapter", number, str(path))
        return all([mine, *others])

    def add_adapter(self, number: int, path: Path) -> None:
        """As ``NativeRunner``, on all ranks, or on none."""
        try:
            self._all("add_adapter", number, str(path))
        except (ToolkitError, RunnerError):
            if not self._lost:
                self._all("remove_adapter", number)
            raise

    def remove_adapter(self, number: int) -> None:
        """As ``NativeRunner``."""
        self._all("remove_adapter", number)

    def encode(self, pictures: Sequence[Picture]) -> list[NDArray[np.float32]]:
        """On the first rank."""
        return self._local.encode(pictures)

    def _all(self, name: str, *arguments: Any, own: Sequence[Any] = ()) -> Call:
        while self._steps:  # their answers come first
            self._end_first()
        return super()._all(name, *arguments, own=own)

    # -- steps

    def submit(self, batch: StepBatch) -> StepHandle:
        """Start a step on all ranks and return; ``result`` waits for it."""
        if self._lost:
            raise RunnerLost(self._lost)
        try:
            self._ranks.tell("submit", batch)
        except RankLost as e:
            raise self._lose(str(e)) from None
        step = _Step(self, self._local.submit(batch))
        self._steps.append(step)
        return step

    def _end_first(self) -> None:
        """Wait for the step that was begun first, on all ranks."""
        step = self._steps.popleft()
        try:
            step.output = self._ended(step.running)
        except RunnerError as e:
            step.error = e
        if self._lost:
            for other in self._steps:
                other.error = RunnerLost(self._lost)
            self._steps.clear()

    def _ended(self, running: Running) -> StepOutput:
        """What all ranks have come to. Raises RunnerLost where they have not come to the same."""
        if self._lost:
            raise RunnerLost(self._lost)
        error, output, broken = None, None, not self._has_ended(running)
        try:
            output = running.result()
        except RunnerError as e:
            error = e
        if broken or self._local.lost:
            raise self._lose_with_bridge(self._ranks.why_lost())
        try:
            answers = self._ranks.answers(timing.STEP_SECONDS)
        except RankLost as e:
            raise self._lose(str(e)) from None
        for rank, answer in enumerate(answers, 1):
            if (answer["error"] is None) != (error is None):
                raise self._lose(f"rank {rank}: {answer['error'] or f'it ran a step that rank 0 did not ({error})'}")
            if output is not None and answer["value"] != digest(output):
                raise self._lose(f"rank {rank} drew other tokens than rank 0")
        if error is not None:
            raise error
        assert output is not None
        return output

    def look(self) -> float | None:
        if not self._lost and self._local.lost:
            raise self._lose_with_bridge(self._ranks.gone())
        return super().look()

    def _lose_with_bridge(self, why: str) -> RunnerLost:
        return self._lose("; ".join(filter(None, (why, "" if self._bridge is None else self._bridge.why()))))

    def _has_ended(self, running: Running) -> bool:
        """Wait for this rank's step; where others do not come it is broken off, and this is False."""
        until = time.monotonic() + timing.STEP_SECONDS
        while not running.ended(LOOK_SECONDS):
            if self._ranks.gone() or time.monotonic() > until:
                self._group.leave()
                return False
        return True

    def _part(self) -> None:
        super()._part()
        if self._bridge is not None:
            self._bridge.close()

    def close(self) -> None:
        """End the other ranks, release weights and cache."""
        if hasattr(self, "_ranks"):
            super().close()
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


class _Step:
    """Of all ranks, under way or ended; implements ``toolkit.runners.base.StepHandle``."""

    def __init__(self, owner: NativeRanks, running: Running) -> None:
        self._owner, self.running = owner, running
        self.output: StepOutput | None = None
        self.error: RunnerError | None = None

    def result(self) -> StepOutput:
        while self.output is None and self.error is None:
            self._owner._end_first()
        if self.error is not None:
            raise self.error
        assert self.output is not None
        return self.output
