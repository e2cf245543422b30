"""Steps of no request: they compile kernels and capture graphs before anyone waits for them."""

from __future__ import annotations

import numpy as np

from toolkit.runners.step import SamplingBatch, StepBatch


def idle_batch(
    sequences: int, new: int, length: int, spare: tuple[int, ...], block_size: int, adapter: int = -1
) -> StepBatch:
    """``new`` tokens for each of ``sequences`` that then have ``length``, drawn greedily; all of their blocks are the
    spare one of each group. ``adapter``: of all of them.
    """
    total, last = sequences * new, np.arange(1, sequences + 1, dtype=np.int32) * new
    positions = np.tile(np.arange(length - new, length), sequences)
    entries = -(-length // block_size)
    none = np.zeros(0, np.int32)
    return StepBatch(
        token_ids=np.zeros(total, np.int32),
        from_previous=np.full(total, -1, np.int32),
        positions=positions.astype(np.int32)[None],
        cu_seqlens=np.concatenate([[0], last]).astype(np.int32),
        seq_lens=np.full(sequences, length, np.int32),
        block_tables=tuple(np.full((sequences, entries), block, np.int32) for block in spare),
        slot_mapping=tuple(block * block_size + positions % block_size for block in spare),
        rope_set=np.zeros(sequences, np.int8),
        adapter=np.full(sequences, adapter, np.int32),
        sample_index=last - 1,
        sampling=_greedy(sequences),
        logits_index=none,
        hidden_index=none,
        target_index=none,
        target_ids=none,
    )


def _greedy(rows: int) -> SamplingBatch:
    zeros, ones, none = np.zeros(rows, np.float32), np.ones(rows, np.float32), np.zeros(0, np.int32)
    return SamplingBatch(
        temperature=zeros,
        top_k=np.zeros(rows, np.int32),
        top_p=ones,
        min_p=zeros,
        repetition_penalty=ones,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        seed=np.zeros(rows, np.uint64),
        position=np.zeros(rows, np.int64),
        history_ptr=np.zeros(rows + 1, np.int32),
        history_ids=none,
        history_count=none,
        bias_ptr=np.zeros(rows + 1, np.int32),
        bias_ids=none,
        bias_values=np.zeros(0, np.float32),
        logprobs=np.full(rows, -1, np.int32),
    )
