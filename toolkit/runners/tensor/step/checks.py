"""Bounds of a step's arrays, checked on the host before anything is indexed by them."""

from __future__ import annotations

import numpy as np

from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import RunnerError, check_mutual, check_texts
from toolkit.runners.step import COLUMNS, StepBatch

_OF_TOKENS = ("sample_index", "logits_index", "hidden_index", "target_index", "routes_index", "aux_index", "routed")


def check_batch(
    batch: StepBatch,
    spec: DecoderSpec,
    num_blocks: tuple[int, ...],
    block_size: int,
    previous: int,
    adapters: int = 0,
) -> None:
    """Raise RunnerError, naming the array, for a batch that would read or write where it must not.

    ``num_blocks``: of each cache group; ``previous``: sampled rows of the step before; ``adapters``: their number.
    """
    tokens, cu, lens, vocab = len(batch.token_ids), batch.cu_seqlens, batch.seq_lens, spec.vocab_size
    new = cu[1:] - cu[:-1]  # np.diff takes five times as long for few sequences
    if tokens == 0 or len(cu) != len(lens) + 1 or cu[0] != 0 or cu[-1] != tokens or (new < 1).any():
        raise RunnerError(f"cu_seqlens: expected rising starts from 0 to {tokens} tokens, found {cu.tolist()}")
    if (lens < new).any():
        raise RunnerError("seq_lens: a sequence has fewer tokens in all than new ones")
    if len(batch.adapter) != len(lens):
        raise RunnerError(f"adapter: expected {len(lens)} entries, found {len(batch.adapter)}")
    _within("adapter", batch.adapter, -1, adapters)
    _within("positions", batch.positions, 0, 1 << 30)
    if batch.rope_length is not None:
        _within("rope_length", batch.rope_length, 0, 1 << 30)
        if len(batch.rope_length) != tokens:
            raise RunnerError(f"rope_length: expected {tokens} entries, found {len(batch.rope_length)}")
    _within("from_previous", batch.from_previous, -1, previous)
    _within("token_ids", batch.token_ids[batch.from_previous < 0], 0, vocab)
    for name in _OF_TOKENS:
        _within(name, getattr(batch, name), 0, tokens)
    _within("target_ids", batch.target_ids, 0, vocab)
    _within("aux_layers", np.asarray(batch.aux_layers, np.int64), 0, len(spec.layers) + 1)
    if len(batch.target_ids) != len(batch.target_index):
        raise RunnerError("target_ids: expected one id for each entry of target_index")
    if batch.embeds is not None:
        _within("embed_index", batch.embed_index, 0, tokens)
    if (views := batch.views) is not None:
        _within("views.tokens", views.tokens, 0, tokens + 1)
        if len(views.ptr) != len(views.tokens) + 1 or views.ptr[-1] != len(views.seen):
            raise RunnerError(f"views.ptr: expected {len(views.tokens) + 1} pointers that span seen")
    check_mutual(batch)
    check_texts(batch, spec)
    for group, blocks in enumerate(num_blocks):
        if spec.cache_groups[group].kind == "state":
            _check_states(batch, new, group, blocks)
            continue
        slots = batch.slot_mapping[group]
        if len(slots) != tokens:
            raise RunnerError(f"slot_mapping of group {group}: expected {tokens} entries, found {len(slots)}")
        _within(f"slot_mapping of group {group}", slots, 0, blocks * block_size)
        _check_table(batch, new, group, spec.cache_groups[group].window, blocks, block_size)
    for pairs, blocks in zip(batch.copy_blocks, num_blocks, strict=False):
        _within("copy_blocks", pairs, 0, blocks)


def _check_table(
    batch: StepBatch, new: np.ndarray, group: int, window: int | None, blocks: int, block_size: int
) -> None:
    """Every block that a sequence will read is there."""
    table, lens, name = batch.block_tables[group], batch.seq_lens, f"block_tables of group {group}"
    _within(name, table, -1, blocks)
    if (lens > table.shape[1] * block_size).any():
        raise RunnerError(f"{name}: {table.shape[1]} blocks hold no {int(lens.max())} tokens")
    if not table.size or table.min() >= 0:
        return  # none is missing, read or not
    start = lens - new
    first = np.zeros_like(lens) if window is None else np.maximum(start + 1 - window, 0)
    entry = np.arange(table.shape[1])
    read = (entry >= (first // block_size)[:, None]) & (entry <= ((lens - 1) // block_size)[:, None])
    if (table[read] < 0).any():
        raise RunnerError(f"{name}: a block that will be read is missing (-1)")


def _check_states(batch: StepBatch, new: np.ndarray, group: int, slots: int) -> None:
    """Each sequence that goes on has a state to begin with, and each a slot of its own for that at its end."""
    table, name = batch.block_tables[group], f"block_tables of group {group}"
    if table.shape != (len(batch.seq_lens), 2):
        raise RunnerError(f"{name}: expected two slots a sequence, found shape {table.shape}")
    _within(name, table, -1, slots)
    begun = batch.seq_lens > new
    if (table[begun, 0] < 0).any() or (table[:, 1] < 0).any():
        raise RunnerError(f"{name}: a state that will be read or written is missing (-1)")
    if len(np.unique(table[:, 1])) < len(table):
        raise RunnerError(f"{name}: two sequences write to one slot")


def check_sampling(batch: StepBatch, vocab: int) -> None:
    """Raise RunnerError where the sampling arrays do not fit ``sample_index``, or name ids that do not exist."""
    s, rows = batch.sampling, len(batch.sample_index)
    for name in (*COLUMNS, "position", "logprobs"):
        if len(getattr(s, name)) != rows:
            raise RunnerError(f"sampling.{name}: expected {rows} entries, found {len(getattr(s, name))}")
    _check_pointers("sampling.history_ptr", s.history_ptr, rows, (s.history_ids, s.history_count))
    _check_pointers("sampling.bias_ptr", s.bias_ptr, rows, (s.bias_ids, s.bias_values))
    _within("sampling.history_ids", s.history_ids, 0, vocab)
    _within("sampling.bias_ids", s.bias_ids, 0, vocab)
    if s.grammar is not None and s.grammar.shape != (rows, (vocab + 31) // 32):
        raise RunnerError(f"sampling.grammar: expected shape {(rows, (vocab + 31) // 32)}, found {s.grammar.shape}")


def _check_pointers(name: str, pointers: np.ndarray, rows: int, values: tuple[np.ndarray, np.ndarray]) -> None:
    """CSR pointers of ``rows`` rows that span both arrays of values."""
    if len(pointers) != rows + 1 or pointers[0] != 0 or any(len(v) != pointers[-1] for v in values):
        raise RunnerError(f"{name}: expected {rows + 1} pointers that span its values")
    if pointers.any() and (falls := np.flatnonzero(np.diff(pointers) < 0)).size:
        raise RunnerError(f"{name}: not ascending at row {falls[0]}")


def _within(name: str, values: np.ndarray, low: int, high: int) -> None:
    """Every value in [low, high)."""
    if values.size and (values.min() < low or values.max() >= high):
        at = int(np.flatnonzero((values < low) | (values >= high))[0])
        raise RunnerError(f"{name}: expected values in [{low}, {high}), found {values.flat[at]} at entry {at}")
