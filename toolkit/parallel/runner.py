"""A runner of several ranks: the first computes here, the others in processes of their own, all the same steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.errors import ToolkitError
from toolkit.models.pictures import Picture
from toolkit.parallel import ranks as timing
from toolkit.parallel.model import Model, RankRunner, open_whole
from toolkit.parallel.part import part_of
from toolkit.parallel.ranks import RankLost, Ranks
from toolkit.parallel.worker import digest
from toolkit.runners.base import Backend, MemoryNeed, RunnerError, RunnerLost, StepHandle
from toolkit.runners.step import StepBatch, StepOutput
from toolkit.runners.tensor.cache import block_bytes
from toolkit.runners.tensor.step.pending import Failed
from toolkit.runners.weights.new import NewWeights


class RankedRunner:
    """Implements ``toolkit.runners.base.Runner``: ``local`` is the first rank's part of the model, ``ranks`` have the
    others. A step runs on all of them at once; where one is lost, so is what the model held (``RunnerLost``)."""

    name = "tensor"
    backend: Backend = "pytorch"
    asynchronous = False

    def __init__(self, model: Model, world: int) -> None:
        """Open the model and start the ranks; no weights are loaded. Raises ToolkitError or UsageError, one line."""
        whole = open_whole(model, world)
        threads = max(1, (model.options.threads or torch.get_num_threads()) // world)
        options = replace(model.options, threads=threads)
        self._local = local = RankRunner(whole, 0, world, options, None)
        self._group = local.group
        self.spec, self.options = whole.spec, local.options
        self.device, self.dtype = local.device, local.dtype
        each = f"{world} ranks, threads of each: {threads}; numbers of memory are of one rank"
        self.notes = [each, *local.notes]
        specs = (part_of(whole.spec, rank, world, whole.unit).spec for rank in range(world))
        size, policy, dtype = options.block_size, options.quant_policy, getattr(torch, local.dtype)
        self._block_bytes = [block_bytes(spec, size, policy, dtype) for spec in specs]  # of each rank
        self._weights: Callable[[], Mapping[str, Any]] = whole.weights
        self._lost = ""
        self._ranks = Ranks(world, threads)
        told = replace(model, options=replace(options, dtype=local.dtype))
        try:
            self._ranks.open(told.to_json(), local.dense)
            self._met(self._ranks.answers(timing.OPEN_SECONDS))
            self._group.join(self._ranks.folder, timing.STEP_SECONDS)
            self._met(self._ranks.answers(timing.OPEN_SECONDS))
            self._ranks.have_met()
        except (RankLost, RuntimeError) as e:
            self.close()
            raise ToolkitError(f"tp={world}: the ranks have not met: {e}") from None
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _met(answers: list[dict[str, Any]]) -> None:
        for rank, answer in enumerate(answers, 1):
            if answer["error"] is not None:
                raise RankLost(f"rank {rank}: {answer['error']}")

    @property
    def pids(self) -> list[int]:
        """Of the processes of ranks 1, 2 …"""
        return self._ranks.pids

    # -- calls that all ranks do

    def memory(self) -> MemoryNeed:
        """Of one rank: the first, whose part is the largest. On a CPU free memory is shared out evenly."""
        found: MemoryNeed = self._local.memory()
        return found

    def load_weights(self) -> None:
        self._all("load_weights")

    def use_weights(self, weights: Callable[[], Mapping[str, Any]]) -> Callable[[], Mapping[str, Any]]:
        """Each rank opens the files by itself: ``weights`` are ``NewWeights``, or what this has returned."""
        told = (str(weights.model), str(weights.files)) if isinstance(weights, NewWeights) else (None, None)
        before, self._weights = self._weights, weights
        self._all("renew", *told)
        return before

    def release_weights(self) -> None:
        self._all("release_weights")

    def allocate_cache(self, num_blocks: tuple[int, ...]) -> None:
        self._all("allocate_cache", num_blocks)

    def release_cache(self) -> None:
        self._all("release_cache")

    def warm_up(self, most: int, length: int, tokens: int) -> None:
        """Nothing is captured."""

    def discard_blocks(self, group: int, blocks: Sequence[int]) -> None:
        self._all("discard_blocks", group, [int(block) for block in blocks])

    def export_block(self, group: int, block: int) -> bytes:
        """The parts of all ranks, one behind the other."""
        mine, others = self._all("export_block", group, block)
        return b"".join([mine, *others])

    def import_block(self, group: int, block: int, data: bytes) -> None:
        ends = list(itertools.accumulate((sizes[group] for sizes in self._block_bytes), initial=0))
        if len(data) != ends[-1]:
            raise RunnerError(f"block of group {group}: expected {ends[-1]} bytes, found {len(data)}")
        self._all("import_block", group, block, own=[data[a:b] for a, b in itertools.pairwise(ends)])

    def encode(self, pictures: Sequence[Picture]) -> list[NDArray[np.float32]]:
        """A part of the pictures on each rank, by how many numbers they have; one alone on the first."""
        shares = shared_out([sum(part.size for part in picture.parts) for picture in pictures], len(self._block_bytes))
        if not any(shares[1:]):
            return self._local.encode(pictures)
        parts = [[pictures[i] for i in share] for share in shares]
        mine, others = self._all("encode", own=parts)
        rows = {
            i: found
            for share, part in zip(shares, (mine, *others), strict=True)
            for i, found in zip(share, part, strict=True)
        }
        return [rows[i] for i in range(len(pictures))]

    def _all(self, name: str, *arguments: Any, own: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
        """What the runner's method gives here, and on the other ranks. ``own``: of each rank, a last argument."""
        if self._lost:
            raise RunnerLost(self._lost)
        error: Exception | None = None
        mine = None
        try:
            self._ranks.tell(name, *arguments, own=own[1:])
            try:
                mine = getattr(self._local, name)(*arguments, *own[:1])
            except (RunnerError, MemoryError) as e:
                error = e
            answers = self._ranks.answers(timing.LOAD_SECONDS)
        except RankLost as e:
            raise self._lose(str(e)) from None
        if error is not None:
            raise error
        for rank, answer in enumerate(answers, 1):
            if answer["error"] is not None:
                raise RunnerError(f"rank {rank}: {answer['error']}")
        return mine, [answer["value"] for answer in answers]

    # -- steps

    def submit(self, batch: StepBatch) -> StepHandle:
        """Run a step on all ranks."""
        if self._lost:
            raise RunnerLost(self._lost)
        before = self._group.messages
        try:
            self._ranks.tell("submit", batch)
        except RankLost as e:
            raise self._lose(str(e)) from None
        try:
            return Done(self._outcome(self._local.submit(batch), before))
        except RunnerLost:
            raise
        except RunnerError as e:
            return Failed(e)

    def _outcome(self, handle: StepHandle, before: int) -> StepOutput:
        """What all ranks have come to. Raises RunnerLost where they have not come to the same."""
        error, output = None, None
        try:
            output = handle.result()
        except RunnerError as e:
            error = e
        if self._group.broken:
            raise self._lose(self._ranks.why_lost())
        if error is not None and self._group.messages > before:
            raise self._lose(f"rank 0: {error}")
        try:
            answers = self._ranks.answers(timing.STEP_SECONDS)
        except RankLost as e:
            raise self._lose(str(e)) from None
        for rank, answer in enumerate(answers, 1):
            if (answer["error"] is None) != (error is None):
                raise self._lose(f"rank {rank}: {answer['error'] or 'it ran a step that rank 0 did not'}")
            if output is not None and answer["value"] != digest(output):
                raise self._lose(f"rank {rank} drew other tokens than rank 0")
        if error is not None:
            raise error
        assert output is not None
        return output

    def _lose(self, why: str) -> RunnerLost:
        self._lost = f"a rank of the model is lost: {why}"
        self._group.leave()
        self._ranks.end()
        return RunnerLost(self._lost)

    def close(self) -> None:
        """End the other ranks, release weights and cache."""
        self._lost = self._lost or "the model was closed"
        self._group.leave()
        self._ranks.end()
        self._local.close()


def shared_out(sizes: Sequence[int], world: int) -> list[list[int]]:
    """Which of things of these sizes each rank has: the largest first, each where there is least yet."""
    found: list[list[int]] = [[] for _ in range(world)]
    load = [0] * world
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = load.index(min(load))
        found[rank].append(i)
        load[rank] += sizes[i]
    return found


@dataclass(frozen=True)
class Done:
    """A step that has run."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output
