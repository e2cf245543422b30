"""Steps of no request: they compile kernels and capture graphs before anyone waits for them."""

from __future__ import annotations

import numpy as np

from toolkit.runners.step import SamplingBatch, StepBatch


def idle_batch(sequences: int, tokens: int, spare: tuple[int, ...], block_size: int) -> StepBatch:
    """``sequences`` of ``tokens`` (at most a block) each, all in the spare block of each group, drawn greedily."""
    total, last = sequences * tokens, np.arange(1, sequences + 1, dtype=np.int32) * tokens
    offsets = np.tile(np.arange(tokens), sequences)
    none = np.zeros(0, np.int32)
    return StepBatch(
        token_ids=np.zeros(total, np.int32),
        from_previous=np.full(total, -1, np.int32),
        positions=offsets.astype(np.int32)[None],
        cu_seqlens=np.concatenate([[0], last]).astype(np.int32),
        seq_lens=np.full(sequences, tokens, np.int32),
        block_tables=tuple(np.full((sequences, 1), block, np.int32) for block in spare),
        slot_mapping=tuple(block * block_size + offsets for block in spare),
        rope_set=np.zeros(sequences, np.int8),
        adapter=np.full(sequences, -1, np.int32),
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
