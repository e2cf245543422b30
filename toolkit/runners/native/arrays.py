"""A ``StepBatch`` as the structures of step.h: addresses of arrays, with their shapes checked against each other."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import RunnerError, check_mutual
from toolkit.runners.native.library import StepArrays, StepResults, address
from toolkit.runners.step import COLUMNS, SamplingBatch, StepBatch, StepOutput, Views

I32, I64, F32 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32)
I8 = np.dtype(np.int8)


class Checked(NamedTuple):
    """An array that is as it should be, and where its numbers lie."""

    array: np.ndarray[Any, Any]
    dtype: np.dtype[Any]
    size: int
    address: int | None


class Arrays:
    """``structure`` points into arrays that this object keeps. The lengths checked here, the library checks the values.
    ``before``: those of a step before, some of whose arrays may come again.

    Raises RunnerError naming the array whose type or size is wrong.
    """

    def __init__(self, batch: StepBatch, spec: DecoderSpec, before: Arrays | None = None) -> None:
        self._held: list[Any] = []
        self._known: dict[int, Checked] = {}
        self._before = {} if before is None else before._known
        self.structure = s = StepArrays()
        tokens, seqs = len(batch.token_ids), len(batch.seq_lens)
        rows, groups = len(batch.sample_index), len(batch.block_tables)
        if len(batch.adapter) and batch.adapter.max() >= 0:
            raise RunnerError("adapter: this runner has no adapters")
        axes = len(batch.positions)
        if batch.positions.shape not in ((1, tokens), (3, tokens)):
            raise RunnerError(f"positions: expected shape (1 or 3, {tokens}), found {batch.positions.shape}")
        s.tokens, s.seqs, s.rows, s.groups, s.axes = tokens, seqs, rows, groups, axes
        s.token_ids = self._put("token_ids", batch.token_ids, I32, tokens)
        s.from_previous = self._put("from_previous", batch.from_previous, I32, tokens)
        s.positions = self._put("positions", batch.positions, I32, axes * tokens)
        if (reach := _reach(batch, spec.block)) is not None:
            s.reach = self._put("reach", reach, I32, tokens)
        s.cu_seqlens = self._put("cu_seqlens", batch.cu_seqlens, I32, seqs + 1)
        s.seq_lens = self._put("seq_lens", batch.seq_lens, I32, seqs)
        s.rope_set = self._put("rope_set", batch.rope_set, I8, seqs)
        s.sample_index = self._put("sample_index", batch.sample_index, I32, rows)
        s.logits_size, s.hidden_size = len(batch.logits_index), len(batch.hidden_index)
        s.target_size = len(batch.target_index)
        s.logits_index = self._put("logits_index", batch.logits_index, I32, s.logits_size)
        s.hidden_index = self._put("hidden_index", batch.hidden_index, I32, s.hidden_size)
        s.target_index = self._put("target_index", batch.target_index, I32, s.target_size)
        s.target_ids = self._put("target_ids", batch.target_ids, I32, s.target_size)
        if batch.embeds is not None:
            s.embeds_size = len(batch.embed_index)
            width = spec.hidden_size * (1 if spec.vision is None else 1 + len(spec.vision.deep))
            s.embeds = self._put("embeds", batch.embeds, F32, s.embeds_size * width)
            s.embed_index = self._put("embed_index", batch.embed_index, I32, s.embeds_size)
        s.routed_size = len(batch.routed)
        s.routed = self._put("routed", batch.routed, I32, s.routed_size)
        if batch.views is not None:
            self._views(batch.views, spec.hidden_size)
        self._groups(batch, spec, tokens, seqs)
        self._sampling(batch.sampling, rows, spec.vocab_size)
        self._before = {}

    def _put(self, name: str, array: np.ndarray[Any, Any], dtype: np.dtype[Any], size: int) -> int | None:
        known = self._before.get(id(array))  # kept alive by it, so it is the same
        if known is not None and known.dtype is dtype and known.size == size:
            self._known[id(array)] = known
            return known.address
        if array.dtype != dtype or array.size != size or not array.flags.c_contiguous:
            raise RunnerError(f"{name}: expected {size} contiguous {dtype} values, found {array.size} of {array.dtype}")
        checked = Checked(array, dtype, size, address(array))
        self._known[id(array)] = checked
        return checked.address

    def _pointers(self, addresses: list[int | None]) -> int:
        array = (ctypes.c_void_p * max(len(addresses), 1))(*addresses)
        self._held.append(array)
        return ctypes.addressof(array)

    def _numbers(self, values: list[int]) -> int:
        array = (ctypes.c_int64 * max(len(values), 1))(*values)
        self._held.append(array)
        return ctypes.addressof(array)

    def _views(self, v: Views, hidden: int) -> None:
        s, put = self.structure, self._put
        s.rows_size, s.new_size, s.gone_size = len(v.rows), len(v.new), len(v.gone)
        s.views_size, s.seen_size = len(v.tokens), len(v.seen)
        s.picture_rows = put("views.rows", v.rows, F32, s.rows_size * hidden)
        s.new_pictures = put("views.new", v.new, I32, 2 * s.new_size)
        s.gone = put("views.gone", v.gone, I32, s.gone_size)
        s.views = put("views.tokens", v.tokens, I32, 2 * s.views_size)
        s.view_ptr = put("views.ptr", v.ptr, I32, s.views_size + 1)
        s.seen = put("views.seen", v.seen, I32, s.seen_size)

    def _groups(self, batch: StepBatch, spec: DecoderSpec, tokens: int, seqs: int) -> None:
        s, groups = self.structure, len(batch.block_tables)
        if len(batch.slot_mapping) != groups or len(batch.copy_blocks) not in (0, groups):
            raise RunnerError(f"slot_mapping, copy_blocks: expected {groups} groups")
        tables, widths, slots = [], [], []
        for g, (table, group) in enumerate(zip(batch.block_tables, spec.cache_groups, strict=False)):
            widths.append(table.shape[-1])
            tables.append(self._put("block_tables", table, I32, seqs * table.shape[-1]))
            slots.append(self._put("slot_mapping", batch.slot_mapping[g], I64, 0 if group.kind == "state" else tokens))
        copies = [self._put("copy_blocks", pairs, I32, 2 * len(pairs)) for pairs in batch.copy_blocks]
        s.block_tables, s.slot_mapping = self._pointers(tables), self._pointers(slots)
        s.copies = self._pointers(copies or [None] * groups)
        s.table_width = self._numbers(widths)
        s.copies_size = self._numbers([len(pairs) for pairs in batch.copy_blocks] or [0] * groups)

    def _sampling(self, b: SamplingBatch, rows: int, vocab: int) -> None:
        s, put = self.structure, self._put
        for name, dtype in COLUMNS.items():
            setattr(s, name, put(f"sampling.{name}", getattr(b, name), dtype, rows))
        s.position = put("sampling.position", b.position, I64, rows)
        s.logprobs = put("sampling.logprobs", b.logprobs, I32, rows)
        s.history_size, s.bias_size = len(b.history_ids), len(b.bias_ids)
        s.history_ptr = put("sampling.history_ptr", b.history_ptr, I32, rows + 1)
        s.history_ids = put("sampling.history_ids", b.history_ids, I32, s.history_size)
        s.history_count = put("sampling.history_count", b.history_count, I32, s.history_size)
        s.bias_ptr = put("sampling.bias_ptr", b.bias_ptr, I32, rows + 1)
        s.bias_ids = put("sampling.bias_ids", b.bias_ids, I32, s.bias_size)
        s.bias_values = put("sampling.bias_values", b.bias_values, F32, s.bias_size)
        if b.grammar is not None:
            s.grammar = put("sampling.grammar", b.grammar, I32, rows * ((vocab + 31) // 32))


def _reach(batch: StepBatch, block: int) -> np.ndarray[Any, np.dtype[np.int32]] | None:
    """The place behind the last that each token sees, [T], or None where that is its own."""
    if block == 1 and not len(batch.mutual):
        return None
    check_mutual(batch)
    counts = np.diff(batch.cu_seqlens)
    shifts = np.repeat(batch.seq_lens - batch.cu_seqlens[1:], counts)  # from flat tokens to places
    reach = np.arange(1, len(shifts) + 1) + shifts
    reach = np.minimum(-(-reach // block) * block, np.repeat(batch.seq_lens, counts))
    for first, stop, _ in batch.mutual.tolist():
        reach[first:stop] = reach[stop - 1]
    return reach.astype(np.int32)


def outputs_for(batch: StepBatch, spec: DecoderSpec) -> tuple[StepOutput, StepResults, ctypes.Array[ctypes.c_int32]]:
    """Outputs of the step's sizes, of which the library writes every number; the structure that points at them; and which
    sampled rows it can draw no token for, [N] 0 or 1.
    """
    rows = len(batch.sample_index)
    asked = int(batch.sampling.logprobs.max()) if batch.sampling.logprobs.size else 0
    width = max(0, min(asked, spec.vocab_size))
    output = StepOutput(
        tokens=np.empty((rows, 1), np.int32),
        counts=np.ones(rows, np.int32),
        logprob=np.empty((rows, 1), np.float32),
        top_ids=np.empty((rows, width), np.int32),
        top_logprobs=np.empty((rows, width), np.float32),
        logits=np.empty((len(batch.logits_index), spec.vocab_size), np.float32),
        hidden=np.empty((len(batch.hidden_index), spec.hidden_size), np.float32),
        target_logprobs=np.empty(len(batch.target_index), np.float32),
    )
    bad = (ctypes.c_int32 * max(rows, 1))()
    results = StepResults(
        top_width=width,
        tokens=address(output.tokens),
        logprob=address(output.logprob),
        top_ids=address(output.top_ids),
        top_logprobs=address(output.top_logprobs),
        logits=address(output.logits),
        hidden=address(output.hidden),
        target_logprobs=address(output.target_logprobs),
        bad=ctypes.addressof(bad),
    )
    return output, results, bad
