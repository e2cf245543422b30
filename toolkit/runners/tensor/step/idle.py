"""Steps of no request: they compile kernels and capture graphs before anyone waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from toolkit.kernels.triton.attention.plan import DECODE_KEYS, PROMPT_KEYS
from toolkit.runners.step import SamplingBatch, StepBatch

Added = tuple[int, int]  # tokens that a sequence gets, and how many it has then
LEAST_PROMPT = 16  # kernels have no smaller tile of tokens
CHUNK = 64  # tokens that prompts go on with after what is cached; more than any tile of a decode step holds


def idle_batch(
    added: Sequence[Added],
    spare: tuple[int, ...],
    block_size: int,
    adapter: int = -1,
    vocab: int = 0,
    own_lengths: bool = False,
) -> StepBatch:
    """A step of a sequence for each of ``added``, drawn greedily; all of their blocks are the spare one of each group.

    ``adapter``: of all of them; ``own_lengths``: rope turns requests by their own; ``vocab``: where it is given,
    rows have penalties, biases and a mask that allows all.
    """
    new, lengths = np.array(added, np.int32).T
    sequences, total, last = len(new), int(new.sum()), np.cumsum(new, dtype=np.int32)
    positions = np.concatenate([np.arange(length - n, length) for n, length in zip(new, lengths, strict=True)])
    entries = max(2, -(-int(lengths.max()) // block_size))  # of a state group the slots before and after
    return StepBatch(
        token_ids=np.zeros(total, np.int32),
        from_previous=np.full(total, -1, np.int32),
        positions=positions.astype(np.int32)[None],
        cu_seqlens=np.concatenate([[0], last]).astype(np.int32),
        seq_lens=lengths,
        block_tables=tuple(np.full((sequences, entries), block, np.int32) for block in spare),
        slot_mapping=tuple(block * block_size + positions % block_size for block in spare),
        rope_set=np.zeros(sequences, np.int8),
        rope_length=np.zeros(total, np.int32) if own_lengths else None,
        adapter=np.full(sequences, adapter, np.int32),
        sample_index=last - 1,
        sampling=_ruled(sequences, vocab) if vocab else SamplingBatch.greedy(sequences),
    )


def idle_prompts(length: int, tokens: int) -> list[list[Added]]:
    """Steps that are no decode steps and between them meet every tile of tokens and of attention: prompts of 16, 32, 64
    … up to ``tokens`` tokens, in sequences of up to ``length``; one beside a token of a longer sequence; and one that
    goes on behind what is cached. Of the latter two keys are cut into ranges, whatever the window, where any can be.
    """
    sizes = {min(LEAST_PROMPT << i, tokens) for i in range(max(tokens, LEAST_PROMPT).bit_length())}
    chunk = min(CHUNK, tokens, length)
    apart = max(n for n in (1, *(keys + 1 for keys in DECODE_KEYS.values())) if n <= length)
    steps = [[(n, n) for n in parts(size, length)] for size in sorted(sizes)]
    return [*steps, [(1, apart), (chunk, chunk)], [(chunk, min(length, PROMPT_KEYS + max(1, chunk // 2)))]]


def parts(tokens: int, most: int) -> list[int]:
    """``tokens`` in parts of at most ``most``."""
    return [min(most, tokens - at) for at in range(0, tokens, most)]


def _ruled(rows: int, vocab: int) -> SamplingBatch:
    """Rows that need all kernels that change logits before a token is drawn."""
    every, ones = np.arange(rows + 1, dtype=np.int32), np.ones(rows, np.float32)
    ids = np.zeros(rows, np.int32)
    return replace(
        SamplingBatch.greedy(rows),
        repetition_penalty=2 * ones,
        history_ptr=every,
        history_ids=ids,
        history_count=ids + 1,
        bias_ptr=every,
        bias_ids=ids,
        bias_values=ones,
        grammar=np.full((rows, -(-vocab // 32)), -1, np.int32),
    )
