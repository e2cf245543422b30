"""Running steps: decode steps and short prompts through graphs where the device captures them, others kernel by kernel.

With graphs nothing here waits for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import RunnerError
from toolkit.runners.step import StepBatch, Views
from toolkit.runners.tensor.cache import KVCache
from toolkit.runners.tensor.decoder import Added, Decoder, Moe
from toolkit.runners.tensor.devices.device import Device, GraphDevice
from toolkit.runners.tensor.layers.lora import AdapterStep
from toolkit.runners.tensor.layers.positions import PositionTables
from toolkit.runners.tensor.step.checks import check_batch, check_sampling
from toolkit.runners.tensor.step.context import StepContext
from toolkit.runners.tensor.step.draws import DRAWN_BY, plain
from toolkit.runners.tensor.step.graphs import Graphs
from toolkit.runners.tensor.step.idle import idle_batch, idle_prompts, parts
from toolkit.runners.tensor.step.inputs import (
    ADAPTER,
    TAPPED,
    TURNED,
    DecodeArrays,
    GraphKey,
    Kind,
    axes_array,
    decode_arrays,
    graph_rows,
    is_decode,
    power_of_2,
    table_arrays,
    tile_name,
    token_arrays,
)
from toolkit.runners.tensor.step.pending import Pending
from toolkit.runners.tensor.step.prompts import SIZES, PromptArrays, PromptKey, fits, prompt_arrays
from toolkit.runners.tensor.step.rows import chosen_experts, produce
from toolkit.runners.tensor.step.sampler import row_best, sample_rows
from toolkit.runners.tensor.step.tiles import AttentionPlan, DecodeCut, Heads, TileRows, kind_of_decode, sight_of

log = logging.getLogger(__name__)
MOST_SAMPLED = 8192  # rows whose tokens the next step may refer to
WARM_LENGTHS = (256, 512, 1024, 2048, 4096)  # tokens beyond which there are graphs from the start, with more tiles
# Steps of more sequences than FEW_ROWS are captured for lengths beyond MANY_LENGTH when they first come. With as few at
# most, a chat, so are steps with prompts: to start sooner is worth more.
FEW_ROWS, MANY_LENGTH = 8, 512
MOST_ENTRIES = 1 << 18  # of a block table that goes over with every step of a prompt's graph


class Steps:
    """One model and one cache at work on ``device``. ``on_graphs``: the same device where decode steps are captured and
    nothing may wait, else None; ``adapters``: what the decoder's linears ask for the step's adapters; ``prompts``:
    tokens of the largest step with prompts that is to be a graph, 0: none is.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        decoder: Decoder,
        cache: KVCache,
        device: Device,
        on_graphs: GraphDevice | None,
        adapters: AdapterStep,
        prompts: int = 0,
    ) -> None:
        self.spec, self.decoder, self.cache, self.device = spec, decoder, cache, device
        self.adapters = adapters
        q_scales = (a.q_scale for _, a in spec.attention_layers() if a.q_scale is not None)
        self._positions = PositionTables(spec.ropes(), q_scales, device.torch)
        kinds = [(group, kept.window) for _, group, kept in spec.paged()]
        kinds += [(attention.group, attention.newest) for attention in spec.borrowers()]
        self._tile_rows: dict[Kind, TileRows] = {kind: {} for kind in kinds}
        self.graphs: Graphs | None = None
        self.prompts: Graphs | None = None  # steps with prompts
        self._most_tokens, self._room = prompts, (0, 0)
        # new tokens of a sequence beyond which latent attention takes another way, sequence by sequence
        self._absorbed = min((getattr(s.mixer, "break_even", inf) for s in decoder.steps), default=inf)
        # what the layers of a step with a prompt leave for its norm and head, and what went into some of them
        self._left: tuple[Tensor, Tensor] | None = None
        self._tapped: dict[tuple[int, ...], Tensor] = {}
        if on_graphs is not None:
            one = (
                spec.block == 1 and not spec.mutual
            )  # else no step is of one token a sequence, which is what graphs are of
            attends, may = bool(self._tile_rows), one and _capturable(decoder)
            self.graphs = Graphs("decode steps", on_graphs, attends, may)
            if prompts and may and decoder.split is None and decoder.added is None:
                self.prompts = Graphs("steps with prompts", on_graphs, attends)
        self._cuts: dict[tuple[Kind, Heads], DecodeCut] = {}  # of the decode step before
        self._pictures: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}  # by number, what cross layers keep of them
        self._previous = torch.zeros(MOST_SAMPLED, dtype=torch.int64, device=device.torch)
        self._best = torch.zeros(MOST_SAMPLED, dtype=torch.float32, device=device.torch)
        self._sampled = 0  # rows of the step before
        self._ends = decoder.split is None or decoder.split.ends  # else other ranks have the last layers

    def submit(self, batch: StepBatch, explain: Callable[[Exception, StepBatch], RunnerError]) -> Pending:
        """Queue a step. Raises RunnerError for a batch that cannot be."""
        self.check(batch)
        for group, pairs in enumerate(batch.copy_blocks):
            if len(pairs):
                self.copy_blocks(group, pairs)
        self._reach(int(batch.positions.max()))
        if self.graphs is not None and is_decode(batch) and not batch.fills:
            tensors, capture = self._decode(batch, self.graphs)
        else:
            tensors, capture = self._mixed(batch)
        self._sampled = rows = len(batch.sample_index) if self._ends else 0
        found = self.device.fetch(tensors)
        if capture is not None:
            capture()
        spec = self.spec
        bad = batch.sampling.senseless()[:rows]
        return Pending(found, rows, bad, spec, lambda error: explain(error, batch))

    def idle(self) -> None:
        """Take part in a step of others, who may want experts that are here."""
        self._sampled = 0
        self.decoder.idle()

    def warm_up(self, most: int, length: int, tokens: int) -> None:
        """Compile the kernels of steps of up to ``tokens`` tokens of sequences up to ``length``, and capture decode
        steps of up to ``most`` and short prompts, large ones first: smaller ones then fit the memory of their pool.
        Where there are adapters, prompts and short sequences once more with them. Without graphs that is nothing.
        """
        if self.graphs is None:
            return
        self.expect(most, length)
        spare, size = self.cache.num_blocks, self.cache.block_size
        adapters = (-1, 0) if self.adapters.count else (-1,)
        idle = partial(idle_batch, own_lengths=any(rope.own for rope in self.spec.ropes()))
        for adapter in adapters:
            for added in idle_prompts(length, tokens):
                self._mixed(idle(added, spare, size, adapter))
            self._decode(idle([(1, 1)], spare, size, adapter, self.spec.vocab_size), self.graphs)
        for n in reversed(SIZES if self.prompts is not None and most > FEW_ROWS else ()):
            if n <= min(self._most_tokens, tokens):
                for whole in (parts(n, length), [1, *parts(n - 1, length)]):
                    _, capture = self._mixed(idle([(new, new) for new in whole], spare, size))
                    if capture is not None:
                        capture()
        for rows in sorted({graph_rows(n) for n in range(1, min(most, MOST_SAMPLED) + 1)}, reverse=True):
            longest = (length if rows <= FEW_ROWS else min(length, MANY_LENGTH + 1)) if self._tile_rows else 0
            beyond = (n + 1 for n in WARM_LENGTHS if n < longest)
            for total, adapter in (*((1, a) for a in adapters), *((n, -1) for n in beyond)):
                _, capture = self._decode(idle([(1, total)] * rows, spare, size, adapter), self.graphs)
                if capture is not None:
                    capture()
        self._sampled = 0

    def expect(self, most: int, length: int) -> None:
        """Have room in graphs for ``most`` sequences of up to ``length`` tokens: else the first ones that are longer
        want others, and have all forgotten.
        """
        self._reach(length - 1)
        table = -(-length // self.cache.block_size)
        if (most + 1) * table <= MOST_ENTRIES:  # else tables have room for as much as a step needs
            self._room = power_of_2(most + 1), power_of_2(table)

    def _reach(self, position: int) -> None:
        """Have what positions up to this one need."""
        if self._positions.reach(position):
            for graphs in (self.graphs, self.prompts):
                if graphs is not None:
                    graphs.clear()

    def check(self, batch: StepBatch) -> None:
        """Raise RunnerError for a batch that cannot be."""
        blocks, size, adapters = self.cache.num_blocks, self.cache.block_size, self.adapters.count
        check_batch(batch, self.spec, blocks, size, self._sampled, adapters)
        check_sampling(batch, self.spec.vocab_size)
        if len(batch.sample_index) > MOST_SAMPLED:
            raise RunnerError(f"sample_index: expected at most {MOST_SAMPLED} rows, found {len(batch.sample_index)}")

    def copy_blocks(self, group: int, pairs: NDArray[np.int32]) -> None:
        """Blocks ``pairs`` [C, 2], from the first to the second."""
        ends = self.device.put({"source": pairs[:, 0].astype(np.int64), "target": pairs[:, 1].astype(np.int64)})
        self.cache.copy(group, ends["source"], ends["target"])

    # -- decode steps

    def _decode(self, batch: StepBatch, graphs: Graphs) -> tuple[dict[str, Tensor], Callable[[], None] | None]:
        """One token for every sequence: (results on the device, what captures the step afterwards)."""
        n, draws = len(batch.seq_lens), plain(batch.sampling)
        spare, size = self.cache.num_blocks, self.cache.block_size
        adapters = self.adapters.of_tokens(batch)
        offset, tile_rows = self._positions.offset, self._tile_rows
        made = decode_arrays(batch, self.spec, spare, size, offset, tile_rows, self._cuts, draws, adapters)
        logits, capture = graphs.run(made, self._decode_body)
        if logits is None:
            return {"tokens": self._previous[:n], "best": self._best[:n]}, capture
        sampled = sample_rows(logits[:n], batch.sampling, self.decoder.ops, self.device)
        self._previous[:n].copy_(sampled.tokens)
        return sampled.tensors(), capture

    def _decode_body(self, t: dict[str, Tensor], made: DecodeArrays, key: GraphKey) -> Tensor | None:
        """What a graph holds: everything from token ids to logits, and drawing where that is all there is to do."""
        starts = np.arange(key.rows + 1, dtype=np.int32)
        plans = {
            kind: AttentionPlan(
                t[f"table{kind[0]}"], starts, made.lengths, sight_of(self.spec, kind), self.device.put, rows
            )
            for kind, rows in self._tile_rows.items()
        }
        for kind, heads, room in key.tiles:
            items, merges = t[tile_name("items", kind, heads)], t[tile_name("merges", kind, heads)]
            plans[kind].give(heads, items, merges, room, kind_of_decode(heads))
        x, delta = self._layers(self._embed(t), t, plans, made.batch)
        logits = self.decoder.logits(self.decoder.hidden(x, delta, None))
        self.adapters.use(None, self.decoder.ops)  # what it holds may lie in a graph's memory, which may go
        if not made.draws:
            return logits
        columns = (t[name] for name in DRAWN_BY)
        self._previous[: key.rows].copy_(self.decoder.ops.sample(logits, *columns))
        self._best[: key.rows].copy_(row_best(logits))
        return None

    # -- any step

    def _mixed(self, batch: StepBatch) -> tuple[dict[str, Tensor], Callable[[], None] | None]:
        """Prompts, or rows that a decode step does not return: (results on the device, what captures the step)."""
        graphs, capture = self.prompts, None
        routes: list[tuple[Tensor, Tensor]] | None = [] if len(batch.routes_index) else None
        taps: dict[int, Tensor | None] = dict.fromkeys(batch.aux_layers)
        delta: Tensor | None
        aux: Tensor | None = None
        if graphs is not None and graphs.enabled and fits(batch, self._most_tokens, self._absorbed):
            x, delta, capture = self._prompt(batch, graphs)
            if len(batch.aux_index):
                rows = self.device.put({"rows": batch.aux_index.astype(np.int64)})["rows"]
                aux = self._tapped[batch.aux_layers].index_select(0, rows)
        else:
            x, delta = self._kernel_by_kernel(batch, routes, taps)
            if taps and len(batch.aux_index):
                aux = torch.stack([tap for tap in taps.values() if tap is not None], 1)
        if batch.fills:
            found = {}
        elif self._ends:
            found = produce(self.decoder, x, delta, batch, self.device)
        else:
            assert self.decoder.split is not None
            self.decoder.split.send(x.float() if delta is None else x + delta)
            found = {}
        if aux is not None:
            found["aux"] = aux
        if routes:
            found["routes"] = chosen_experts(routes, batch.routes_index, self.device)
        if "tokens" in found:
            self._previous[: len(batch.sample_index)].copy_(found["tokens"])
        return found, capture

    def _prompt(self, batch: StepBatch, graphs: Graphs) -> tuple[Tensor, Tensor, Callable[[], None] | None]:
        """What the layers leave, of padding too, and what captures the step."""
        adapters, offset = self.adapters.of_tokens(batch), self._positions.offset
        spare, size = self.cache.num_blocks, self.cache.block_size
        made = prompt_arrays(batch, self.spec, spare, size, offset, self._tile_rows, adapters, self._room)
        _, capture = graphs.run(made, self._prompt_body)
        assert self._left is not None
        x, delta = self._left
        return x[: made.tokens], delta[: made.tokens], capture

    def _prompt_body(self, t: dict[str, Tensor], made: PromptArrays, key: PromptKey) -> None:
        """What a graph of a step with prompts holds: everything from token ids to what the last layer leaves."""
        put, starts, lengths = self.device.put, made.starts, made.lengths
        plans = {
            kind: AttentionPlan(t[f"table{kind[0]}"], starts, lengths, sight_of(self.spec, kind), put, rows, made.own)
            for kind, rows in self._tile_rows.items()
        }
        for kind, heads, step, _, room in key.tiles:
            items, merges = t[tile_name("items", kind, heads)], t[tile_name("merges", kind, heads)]
            plans[kind].give(heads, items, merges, room, step)
        taps: dict[int, Tensor | None] = dict.fromkeys(key.tapped)
        x, delta = self._layers(self._embed(t), t, plans, made.batch, taps=taps)
        self.adapters.use(None, self.decoder.ops)
        assert delta is not None, "a model has layers"
        if self._left is None:  # memory of a graph is overwritten by the next one
            self._left = x.new_empty(self._most_tokens, x.shape[1]), delta.new_empty(self._most_tokens, delta.shape[1])
        self._left[0][: key.rows].copy_(x)
        self._left[1][: key.rows].copy_(delta)
        if key.tapped:
            streams = torch.stack([tap for tap in taps.values() if tap is not None], 1)
            if key.tapped not in self._tapped:
                self._tapped[key.tapped] = streams.new_empty(self._most_tokens, *streams.shape[1:])
            self._tapped[key.tapped][: key.rows].copy_(streams)

    def _kernel_by_kernel(
        self, batch: StepBatch, routes: list[tuple[Tensor, Tensor]] | None, taps: dict[int, Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """What the layers leave of a step of any kind; ``routes`` and ``taps``: see ``StepContext``."""
        adapters = self.adapters.of_tokens(batch)
        arrays = token_arrays(batch, self.spec, self._positions.offset, adapters) | axes_array(batch)
        arrays |= table_arrays(batch)
        if batch.types is not None:
            arrays["types"] = batch.types.astype(np.int64)
        if batch.embeds is not None and len(batch.embed_index):
            arrays |= {"embeds": batch.embeds, "embed_index": batch.embed_index.astype(np.int64)}
        if len(batch.routed):
            arrays["routed"] = batch.routed.astype(np.int64)
        if len(batch.aux_index):
            arrays[TAPPED] = batch.aux_index.astype(np.int64)
        t = self.device.put(arrays)
        split = self.decoder.split
        if split is None or split.begins:
            x = self._embed(t) if self.decoder.added is None else self._embed_text(t, self.decoder.added)
        else:
            x = split.receive((len(batch.token_ids), self.spec.hidden_size), self.device.torch)
        if "embeds" in t and (split is None or split.begins):
            x = x.index_copy(0, t["embed_index"], t["embeds"][:, : self.spec.hidden_size].to(x.dtype))
        plans = {
            kind: self._plan(*kind, batch.block_tables[kind[0]], batch.cu_seqlens, batch.seq_lens, t[f"table{kind[0]}"])
            for kind in self._tile_rows
        }
        if batch.views is not None:
            self.keep_pictures(batch.views)
        return self._layers(x, t, plans, batch, routes, taps)

    def keep_pictures(self, views: Views) -> None:
        """Keys and values of the pictures that are new, none of those that are not wanted any more."""
        for number in views.gone.tolist():
            self._pictures.pop(number, None)
        if not len(views.new):
            return
        rows = self.device.put({"rows": views.rows})["rows"].to(self.decoder.table.dtype)
        self.adapters.use(None, self.decoder.ops)
        for (number, _), mine in zip(views.new.tolist(), rows.split(views.new[:, 1].tolist()), strict=True):
            self._pictures[number] = self.decoder.remember(mine)

    def _embed(self, t: dict[str, Tensor]) -> Tensor:
        return self.decoder.embed(self._ids(t))

    def _ids(self, t: dict[str, Tensor]) -> Tensor:
        source = t["source"]
        taken = self._previous.index_select(0, source.clamp(min=0))
        return torch.where(source >= 0, taken, t["ids"])

    def _embed_text(self, t: dict[str, Tensor], added: Added) -> Tensor:
        return added(self._embed(t), self._positions.places(t["rope"]), t.get("types"))

    def _plan(
        self,
        group: int,
        window: int | None,
        table: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        on_device: Tensor | None = None,
    ) -> object:
        """What attention makes of these sequences; None where it plans nothing. ``on_device``: ``table``, if it is
        there already. With graphs a plan that no kernel has to wait for.
        """
        sight = sight_of(self.spec, (group, window))
        if self.graphs is not None:
            there = self.device.put({"table": table})["table"] if on_device is None else on_device
            return AttentionPlan(there, starts, lengths, sight, self.device.put, self._tile_rows[group, window])
        make = self.decoder.ops.plan_attention
        if make is None:
            return None
        blocks, size, device = self.cache.num_blocks[group] + 1, self.cache.block_size, self.device.torch
        return make(table, starts, lengths, size, blocks, window, device, sight.chunked, sight.block)

    def _layers(
        self,
        x: Tensor,
        t: dict[str, Tensor],
        plans: Mapping[Kind, object],
        batch: StepBatch,
        routes: list[tuple[Tensor, Tensor]] | None = None,
        taps: dict[int, Tensor | None] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        self.adapters.use(t.get(ADAPTER), self.decoder.ops, t.get("routed"))
        groups = list(enumerate(self.spec.cache_groups))
        slots = {group: t[f"slots{group}"] for group, kept in groups if kept.kind != "state"}
        tables = {group: t[f"table{group}"] for group, _ in groups}
        angles = self._positions.angles(t["rope"], t.get("axes"), t.get(TURNED))
        made = angles, self._positions.q_scales(t["rope"]), dict(plans), self._plan
        context = StepContext(batch, self.cache, slots, tables, t.get("starts"), *made, routes=routes)
        if (views := batch.views) is not None and len(views.tokens):
            seen = [tuple(part.tolist()) for part in np.split(views.seen, views.ptr[1:-1])]
            pairs = zip(views.tokens.tolist(), seen, strict=True)
            context.views, context.pictures = tuple((a, b, s) for (a, b), s in pairs), self._pictures
        if "embeds" in t:
            context.deep, context.deep_index = t["embeds"].split(x.shape[1], 1)[1:], t["embed_index"]
        if (table := self.spec.per_layer) is not None:
            ids = self._ids(t)
            context.ids = ids.index_fill(0, t["embed_index"], table.pad) if "embed_index" in t else ids
        if taps:
            context.taps, context.tap_rows = taps, t.get(TAPPED)
        if batch.fills:
            self.decoder.fill(x, context)
            return x[:0], None
        return self.decoder.run(x, context)


def _capturable(decoder: Decoder) -> bool:
    """Whether decode steps can be graphs: experts that run one by one depend on what the router says."""
    if not any(isinstance(s.mixer, Moe) and s.mixer.experts for s in decoder.steps):
        return True
    log.warning("experts of a form that no kernel runs together: decode steps run kernel by kernel")
    return False
