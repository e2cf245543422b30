"""A runner of several ranks: the first computes here, the others in processes of their own, all the same steps."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import plain
from toolkit.base.threads import usable_cores
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.eyes.pictures import Picture
from toolkit.parallel import balance
from toolkit.parallel import ranks as timing
from toolkit.parallel.devices import kind_of_ranks, own_device, place_of
from toolkit.parallel.group import Event
from toolkit.parallel.homes import Homes
from toolkit.parallel.layout import Layout, number_of
from toolkit.parallel.micro import Share, in_a_row, joined, layers_of_all, select
from toolkit.parallel.model import Model, RankRunner, open_whole
from toolkit.parallel.nodes import Nodes, about
from toolkit.parallel.part import part_of
from toolkit.parallel.ranks import RankLost, Ranks, crowded
from toolkit.parallel.watch import Watch
from toolkit.parallel.wire import digest
from toolkit.runners.base import Backend, MemoryNeed, RunnerError, RunnerLost, StepHandle
from toolkit.runners.step import StepBatch, StepOutput
from toolkit.runners.tensor.cache import block_bytes
from toolkit.runners.tensor.step.pending import Failed
from toolkit.runners.weights.new import NewWeights

log = logging.getLogger(__name__)
IDLE_SECONDS = 1.0  # without steps, after which it looks whether all ranks are there


class RankedRunner:
    """Implements ``toolkit.runners.base.Runner``: ``local`` is the first rank's part of the model, ``ranks`` have the
    others. A step runs on all of them at once; where one is lost, so is what the model held (``RunnerLost``)."""

    name = "tensor"
    backend: Backend = "pytorch"
    batch_invariant = asynchronous = False
    _homes: Homes | None = None  # of several copies, where there is a cache
    _at_close: Callable[[], None] | None = None
    _store: Any = None  # where ranks of several machines met
    _watch: Watch | None = None  # where messages are queued on devices
    _chosen = 0  # tokens that have chosen experts since these were last placed

    def __init__(
        self,
        model: Model,
        layout: Layout,
        nodes: Nodes | None = None,
        at_close: Callable[[], None] | None = None,
        failed: Callable[[], str] | None = None,
    ) -> None:
        """Open the model and start the ranks, or wait for those of other ``nodes``, as long as none has ``failed``; no
        weights are loaded. ``close`` calls ``at_close`` at its end. Raises ToolkitError or UsageError, one line."""
        self._at_close, world = at_close, layout.world
        here = world if nodes is None else nodes.here(world)
        kind, launched = kind_of_ranks(model.options.device), nodes is not None and nodes.launched > 0
        try:
            device = own_device(kind, model.devices, place_of(0, here, launched))
        except UsageError as e:
            raise UsageError(f"{layout}: {e}") from None
        whole = open_whole(model, layout)
        # not what torch has now, which another runner of this process may have set
        every = model.options.threads or number_of("OMP_NUM_THREADS", 0) or usable_cores()
        threads = max(1, every // here)
        options = replace(model.options, threads=threads, device=kind)
        local = RankRunner(whole, 0, layout, replace(options, device=device), None, here)
        self._local: Any = local
        self._group = local.group
        self.spec, self.options = whole.spec, local.options
        self.device, self.dtype = local.device, local.dtype
        link = self._group.link
        each = f"{world} ranks over {link.name}, threads of each: {threads}; numbers of memory are of one rank"
        eager = [] if kind == "cpu" else ["ranks capture no graphs: decode steps run kernel by kernel"]
        self.notes = [each, *(eager or crowded(here)), *local.notes]
        specs = (part_of(whole.spec, rank, layout, whole.unit).spec for rank in range(world))
        size, policy, dtype = options.block_size, options.quant_policy, getattr(torch, local.dtype)
        self._block_bytes = [block_bytes(spec, size, policy, dtype) for spec in specs]  # of each rank
        self._weights: Callable[[], Mapping[str, Any]] = whole.weights
        self._path = model.path
        self._lost = ""
        told = replace(model, options=replace(options, dtype=local.dtype))
        own = None if nodes is None else about(Path(model.path), model, layout)
        self._ranks = Ranks(world, threads, nodes=nodes, own=own, failed=failed)
        folder, store = None, None
        try:
            if nodes is None:
                folder = self._ranks.meeting_place()
            else:
                self._store = dist.TCPStore(nodes.host, 0, is_master=True, wait_for_workers=False)
                store = [nodes.host, self._store.port]
            more = {"layout": plain(layout), "here": here, "launched": launched, "store": store}
            more["folder"] = None if folder is None else str(folder)
            self._ranks.open(told.to_json(), local.dense, **more)
            self._met(self._ranks.answers(timing.OPEN_SECONDS))
            if folder is not None:
                self._group.join(folder, timing.STEP_SECONDS)
            elif store is not None:
                self._group.join_at(store[0], store[1], store[0], timing.STEP_SECONDS)
            self._met(self._ranks.answers(timing.OPEN_SECONDS))
            if link.queued:  # which may come back to the folder
                self._watch = Watch(self._group, self._ranks.ends, timing.STEP_SECONDS)
            else:
                self._ranks.have_met()
        except (RankLost, RuntimeError) as e:
            self.close()
            raise ToolkitError(f"{layout}: the ranks have not met: {e}") from None
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

    @property
    def layout(self) -> str:
        return f"{len(self._block_bytes)} x {self._local.layout}"

    # -- calls that all ranks do

    def memory(self) -> MemoryNeed:
        """Of one rank, the largest of each number: stages are not alike, nor are devices. On a CPU free memory is
        shared out evenly."""
        found = self._local.memory()
        if self._group.layout.pp == self._group.layout.ep == 1 and self._group.device.type == "cpu":
            return found  # the first has the largest part
        mine, others = self._all("need")
        weights, token, *blocks = map(max, zip(*([x[0], x[1], *x[3:]] for x in (mine, *others)), strict=True))
        free = min(x[2] for x in (mine, *others))
        return replace(found, weights=weights, activations_per_token=token, block_bytes=tuple(blocks), free=free)

    def load_weights(self) -> None:
        self._all("load_weights")

    def use_weights(self, weights: Callable[[], Mapping[str, Any]]) -> Callable[[], Mapping[str, Any]]:
        """Each rank opens the files by itself: ``weights`` are ``NewWeights``, or what this has returned. Raises
        RunnerError where one cannot: all keep those that they have."""
        before = self._weights
        try:
            self._all("renew", *self._told_of(weights))
        except (ToolkitError, RunnerError):
            if not self._lost:
                self._all("renew", *self._told_of(before))
            raise
        self._weights = weights
        return before

    def _told_of(self, weights: Callable[[], Mapping[str, Any]]) -> tuple[str | None, str | None]:
        """(the checkpoint by whose names they are read, their files); None: each rank's own."""
        if not isinstance(weights, NewWeights):
            return None, None
        return None if str(weights.model) == self._path else str(weights.model), str(weights.files)

    def settle(self) -> None:
        self._all("settle")

    def release_weights(self) -> None:
        self._all("release_weights")

    def allocate_cache(self, num_blocks: tuple[int, ...]) -> None:
        self._all("allocate_cache", num_blocks)
        copies = self._group.layout.dp
        self._homes = Homes(copies, self.spec.cache_groups, num_blocks, self.options.block_size) if copies > 1 else None

    def release_cache(self) -> None:
        self._all("release_cache")

    def warm_up(self, most: int, length: int, tokens: int) -> None:
        """Nothing is captured."""

    def trace(self, on: bool) -> list[list[Event]]:
        """Of each rank what it has done since this was last called; from now on that is kept where ``on``."""
        mine, others = self._all("trace", on)
        return [mine, *others]

    def discard_blocks(self, group: int, blocks: Sequence[int]) -> None:
        self._all("discard_blocks", group, [int(block) for block in blocks])
        if self._homes is not None:
            self._homes.nowhere(group, blocks)

    def export_block(self, group: int, block: int, into: memoryview | None = None) -> bytes:
        """The parts of all ranks of a copy that has it, one behind the other."""
        mine, others = self._all("export_block", group, block)
        home = 0 if self._homes is None else self._homes.home(group, block)
        return b"".join(data for rank, data in enumerate((mine, *others)) if self._group.layout.copy(rank) == home)

    def import_block(self, group: int, block: int, data: bytes | memoryview) -> None:
        """To all copies."""
        layout = self._group.layout
        sizes = [sizes[group] for rank, sizes in enumerate(self._block_bytes) if layout.copy(rank) == 0]
        ends = list(itertools.accumulate(sizes, initial=0))
        if len(data) != ends[-1]:
            raise RunnerError(f"block of group {group}: expected {ends[-1]} bytes, found {len(data)}")
        parts = [bytes(data[a:b]) for a, b in itertools.pairwise(ends)]
        at = [layout.stage(rank) * layout.tp + layout.part(rank) for rank in range(layout.world)]
        self._all("import_block", group, block, own=[parts[i] for i in at])
        if self._homes is not None:
            self._homes.everywhere(group, [block])

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
            except (RunnerError, ToolkitError, MemoryError) as e:
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

    def look(self) -> float | None:
        if self._lost:
            raise RunnerLost(self._lost)
        if why := self._ranks.gone():
            raise self._lose(why)
        return IDLE_SECONDS

    # -- steps

    def submit(self, batch: StepBatch) -> StepHandle:
        """Run a step on all ranks: each sequence on those of one copy of the model."""
        if self._lost:
            raise RunnerLost(self._lost)
        try:
            self._local.check(batch)
            shares = self._placed(batch)
            left = batch  # of copies, all of which have made those of blocks, and have the pictures
            if self._homes is not None:
                left = replace(batch, copy_blocks=(), views=None if batch.views is None else batch.views.looks())
            batches = [select(left, share) if share else None for share in shares]
            whose = [batches[self._group.layout.copy(rank)] for rank in range(len(self._block_bytes))]
            parts = max(len(in_a_row(one, self._group.layout.pp)) for one in batches if one is not None)
            before = self._group.messages
            try:
                self._ranks.tell("step", own=[[one, parts] for one in whose[1:]])
            except RankLost as e:
                raise self._lose(str(e)) from None
            outputs = self._outcome(batches[0], parts, before)
            if self._homes is not None:
                self._homes.written(batch, shares)
            if self._group.layout.eplb:
                self._place_experts(len(batch.token_ids))
            return Done(joined(batch, [x for x in outputs if x is not None], [share for share in shares if share]))
        except RunnerLost:
            raise
        except RunnerError as e:
            return Failed(e)

    def _place_experts(self, tokens: int) -> None:
        """After so many more: where a rank has more to do than others by much, experts move."""
        self._chosen += tokens
        if self._chosen < balance.TOKENS:
            return
        self._chosen = 0
        mine, others = self._all("chosen_experts")
        loads: dict[int, list[int]] = {}
        for layer, load in itertools.chain(mine, *others):
            loads[layer] = [a + b for a, b in zip(loads.get(layer, [0] * len(load)), load, strict=True)]
        held = {layer: self._group.experts(layer, len(load)) for layer, load in loads.items()}
        if moves := balance.better(loads, held):
            before, after = (
                max(balance.busiest(loads[i], x[i]) * self._group.seats / max(sum(loads[i]), 1) for i in moves)
                for x in (held, moves)
            )
            try:
                self._all("move_experts", [[layer, seats] for layer, seats in moves.items()])
            except (RunnerError, ToolkitError) as e:  # on some ranks, perhaps
                raise self._lose(str(e)) from None
            log.info("experts of %d layers moved: the busiest rank had %.2f × the mean load, now %.2f ×",
                     len(moves), before, after)  # fmt: skip

    def _placed(self, batch: StepBatch) -> list[Share]:
        """The sequences of each copy, which then has the blocks that they need."""
        homes = self._homes
        if homes is None:
            return [list(range(len(batch.seq_lens)))]
        for group, pairs in enumerate(batch.copy_blocks):
            if len(pairs):
                self._all("copy_blocks", group, pairs)
                homes.copied(group, pairs)
        if batch.views is not None and len(batch.views.new) + len(batch.views.gone):
            self._all("keep_pictures", batch.views)  # also where nobody looks at them yet
        shares, moves = homes.place(batch)
        for group, block in moves:
            self.import_block(group, block, self.export_block(group, block))
        return shares

    def _outcome(self, batch: StepBatch | None, parts: int, before: int) -> list[StepOutput | None]:
        """What each copy has come to. Raises RunnerLost where its ranks have not come to the same."""
        error, output = None, None
        try:
            output = self._local.run(batch, parts)
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
        layout = self._group.layout
        found = {0: output}  # of the first of those that draw the same
        for rank, answer in enumerate(answers, 1):
            if (answer["error"] is None) != (error is None):
                raise self._lose(f"rank {rank}: {answer['error'] or 'it ran a step that rank 0 did not'}")
            first, value = layout.first(rank), answer["value"]
            if first == rank:
                found[rank] = value
            elif value is not None and value != digest(cast(StepOutput, found[first])):
                raise self._lose(f"rank {rank} drew other tokens than rank {first}")
        if error is not None:
            raise error
        copies: list[list[StepOutput | None]] = [[] for _ in range(layout.dp)]
        for rank, one in sorted(found.items()):
            copies[layout.copy(rank)].append(one)
        return [None if stages[0] is None else layers_of_all(cast(list[StepOutput], stages)) for stages in copies]

    def _lose(self, why: str) -> RunnerLost:
        self._lost = f"a rank of the model is lost: {why}"
        self._part()
        self._ranks.end()
        return RunnerLost(self._lost)

    def _part(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        self._group.leave()
        self._store = None  # whoever still waits for others there hears of it

    def close(self) -> None:
        """End the other ranks, release weights and cache."""
        self._lost = self._lost or "the model was closed"
        self._part()
        self._ranks.close()
        self._local.close()
        if self._at_close is not None:
            self._at_close()


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
