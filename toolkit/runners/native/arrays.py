"""A ``StepBatch`` as the structures of step.h: addresses of arrays, with their shapes checked against each other."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import RunnerError, check_mutual, check_texts
from toolkit.runners.native.library import StepArrays, StepResults, address
from toolkit.runners.routes import width_of
from toolkit.runners.step import COLUMNS, NONE, SamplingBatch, StepBatch, StepOutput, Views

I32, I64, F32 = np.dtype(np.int32), np.dtype(np.int64), np.dtype(np.float32)
I8 = np.dtype(np.int8)
NO_VIEWS = Views(rows=np.zeros((0, 0), np.float32), new=NONE, gone=NONE, tokens=NONE, ptr=NONE, seen=NONE)
# What is asked for of flat tokens: a batch's indexes of them, and the structure's field that counts these.
_ASKED = [(f"{rows}_index", f"{rows}_size") for rows in ("logits", "hidden", "aux", "target", "routes")]


class Arrays:
    """``structure`` points into arrays that this object keeps. The lengths checked here, the library checks the values.
    ``before``: of the step before; an array that comes again in its place is not looked at again. ``slots``: [S] of
    sequences' adapters, -1 = none; None = none has one.

    Raises RunnerError naming the array whose type or size is wrong.
    """

    def __init__(
        self,
        batch: StepBatch,
        spec: DecoderSpec,
        before: Arrays | None = None,
        slots: np.ndarray[Any, np.dtype[np.int32]] | None = None,
    ) -> None:
        self._held: list[Any] = []
        self._known: dict[str, tuple[np.ndarray[Any, Any], int]] = {} if before is None else dict(before._known)
        s = StepArrays() if before is None else StepArrays.from_buffer_copy(before.structure)
        self.structure: StepArrays = s
        tokens, seqs = len(batch.token_ids), len(batch.seq_lens)
        rows, groups = len(batch.sample_index), len(batch.block_tables)
        axes = len(batch.positions)
        if batch.positions.shape not in ((1, tokens), (3, tokens)):
            raise RunnerError(f"positions: expected shape (1 or 3, {tokens}), found {batch.positions.shape}")
        s.tokens, s.seqs, s.rows, s.groups, s.axes = tokens, seqs, rows, groups, axes
        put = self._put
        put("token_ids", batch.token_ids, I32, tokens)
        put("from_previous", batch.from_previous, I32, tokens)
        put("positions", batch.positions, I32, axes * tokens)
        put("reach", _reach(batch, spec), I32, tokens)
        put("types", batch.types, I32, tokens)
        put("cu_seqlens", batch.cu_seqlens, I32, seqs + 1)
        put("seq_lens", batch.seq_lens, I32, seqs)
        put("rope_set", batch.rope_set, I8, seqs)
        put("rope_length", batch.rope_length, I32, tokens)
        put("adapter", slots, I32, seqs)
        put("sample_index", batch.sample_index, I32, rows)
        for index, size in _ASKED:
            asked = getattr(batch, index)
            setattr(s, size, len(asked))
            put(index, asked, I32, len(asked))
        s.aux_sublayers_size = len(batch.aux_layers)
        before_each = _sublayers_before(spec, batch.aux_layers) if batch.aux_layers else None
        put("aux_layers", before_each, I32, s.aux_sublayers_size, "aux_sublayers")
        put("target_ids", batch.target_ids, I32, s.target_size)
        width = spec.hidden_size * (1 if spec.vision is None else 1 + len(spec.vision.deep))
        s.embeds_size = 0 if batch.embeds is None else len(batch.embed_index)
        put("embeds", batch.embeds, F32, s.embeds_size * width)
        put("embed_index", batch.embed_index if s.embeds_size else None, I32, s.embeds_size)
        s.fills, s.routed_size = int(batch.fills), len(batch.routed)
        put("routed", batch.routed, I32, s.routed_size)
        self._views(batch.views or NO_VIEWS, spec.hidden_size)
        self._groups(batch, spec, tokens, seqs)
        self._sampling(batch.sampling, rows, spec.vocab_size)

    def _put(
        self, name: str, array: np.ndarray[Any, Any] | None, dtype: np.dtype[Any], size: int, field: str = ""
    ) -> None:
        """``array`` (None: there is none) into the field of the structure that has its name, or ``field``."""
        field = field or name
        known = self._known.get(field)
        if array is None:
            if known is not None:
                del self._known[field]
                setattr(self.structure, field, None)
        elif known is None or known[0] is not array or known[1] != size:
            setattr(self.structure, field, self._checked(name, array, dtype, size))
            self._known[field] = array, size

    @staticmethod
    def _checked(name: str, array: np.ndarray[Any, Any], dtype: np.dtype[Any], size: int) -> int | None:
        """Where the numbers of an array lie that has this type and size."""
        if array.dtype != dtype or array.size != size or not array.flags.c_contiguous:
            raise RunnerError(f"{name}: expected {size} contiguous {dtype} values, found {array.size} of {array.dtype}")
        return address(array)

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
        put("views.rows", v.rows, F32, s.rows_size * hidden, "picture_rows")
        put("views.new", v.new, I32, 2 * s.new_size, "new_pictures")
        put("views.gone", v.gone, I32, s.gone_size, "gone")
        put("views.tokens", v.tokens, I32, 2 * s.views_size, "views")
        put("views.ptr", v.ptr, I32, len(v.ptr) if v is NO_VIEWS else s.views_size + 1, "view_ptr")
        put("views.seen", v.seen, I32, s.seen_size, "seen")

    def _groups(self, batch: StepBatch, spec: DecoderSpec, tokens: int, seqs: int) -> None:
        s, groups = self.structure, len(batch.block_tables)
        if len(batch.slot_mapping) != groups or len(batch.copy_blocks) not in (0, groups):
            raise RunnerError(f"slot_mapping, copy_blocks: expected {groups} groups")
        tables, widths, slots = [], [], []
        for table, slot, group in zip(batch.block_tables, batch.slot_mapping, spec.cache_groups, strict=False):
            widths.append(table.shape[-1])
            tables.append(self._checked("block_tables", table, I32, seqs * table.shape[-1]))
            slots.append(self._checked("slot_mapping", slot, I64, 0 if group.kind == "state" else tokens))
        copies = [self._checked("copy_blocks", pairs, I32, 2 * len(pairs)) for pairs in batch.copy_blocks]
        self._held += [batch.block_tables, batch.slot_mapping, batch.copy_blocks]
        s.block_tables, s.slot_mapping = self._pointers(tables), self._pointers(slots)
        s.copies = self._pointers(copies or [None] * groups)
        s.table_width = self._numbers(widths)
        s.copies_size = self._numbers([len(pairs) for pairs in batch.copy_blocks] or [0] * groups)

    def _sampling(self, b: SamplingBatch, rows: int, vocab: int) -> None:
        s, put = self.structure, self._put
        for name, dtype in COLUMNS.items():
            put(f"sampling.{name}", getattr(b, name), dtype, rows, name)
        put("sampling.position", b.position, I64, rows, "position")
        put("sampling.logprobs", b.logprobs, I32, rows, "logprobs")
        s.history_size, s.bias_size = len(b.history_ids), len(b.bias_ids)
        put("sampling.history_ptr", b.history_ptr, I32, rows + 1, "history_ptr")
        put("sampling.history_ids", b.history_ids, I32, s.history_size, "history_ids")
        put("sampling.history_count", b.history_count, I32, s.history_size, "history_count")
        put("sampling.bias_ptr", b.bias_ptr, I32, rows + 1, "bias_ptr")
        put("sampling.bias_ids", b.bias_ids, I32, s.bias_size, "bias_ids")
        put("sampling.bias_values", b.bias_values, F32, s.bias_size, "bias_values")
        put("sampling.grammar", b.grammar, I32, rows * ((vocab + 31) // 32), "grammar")


def _reach(batch: StepBatch, spec: DecoderSpec) -> np.ndarray[Any, np.dtype[np.int32]] | None:
    """The place behind the last that each token sees, [T], or None where that is its own."""
    if spec.encoder is not None:
        check_texts(batch, spec)
    if spec.mutual:
        return np.repeat(batch.seq_lens, np.diff(batch.cu_seqlens))
    block = spec.block
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


def _sublayers_before(spec: DecoderSpec, layers: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.int32]]:
    """How many sublayers are before each of ``layers``."""
    counts = np.cumsum([0, *(len(layer.sublayers) for layer in spec.layers)])
    if max(layers) >= len(counts) or min(layers) < 0:
        raise RunnerError(f"aux_layers: expected numbers up to {len(counts) - 1}, found {layers}")
    return counts[list(layers)].astype(np.int32)


def outputs_for(batch: StepBatch, spec: DecoderSpec) -> tuple[StepOutput, StepResults, ctypes.Array[ctypes.c_int32]]:
    """Outputs of the step's sizes, of which the library writes every number; the structure that points at them; and
    which sampled rows it can draw no token for, [N] 0 or 1.
    """
    rows = len(batch.sample_index)
    width = min(max(0, 0, *batch.sampling.logprobs.tolist()), spec.vocab_size)
    output = StepOutput(
        tokens=np.empty((rows, 1), np.int32),
        logprob=np.empty((rows, 1), np.float32),
        top_ids=np.empty((rows, width), np.int32),
        top_logprobs=np.empty((rows, width), np.float32),
        logits=np.empty((len(batch.logits_index), spec.vocab_size), np.float32),
        hidden=np.empty((len(batch.hidden_index), spec.hidden_size), np.float32),
        target_logprobs=np.empty(len(batch.target_index), np.float32),
    )
    if batch.aux_layers:
        output.aux = np.empty((len(batch.aux_index), len(batch.aux_layers), spec.hidden_size), np.float32)
    if asked := len(batch.routes_index):  # by mixture as yet
        output.routes = np.empty((asked, len(spec.mixtures()), width_of(spec)), np.uint16)
    bad = (ctypes.c_int32 * max(rows, 1))()
    results = StepResults(
        top_width=width,
        tokens=address(output.tokens),
        logprob=address(output.logprob),
        top_ids=address(output.top_ids),
        top_logprobs=address(output.top_logprobs),
        logits=address(output.logits),
        hidden=address(output.hidden),
        aux=address(output.aux),
        target_logprobs=address(output.target_logprobs),
        routes=address(output.routes),
        bad=ctypes.addressof(bad),
    )
    return output, results, bad
