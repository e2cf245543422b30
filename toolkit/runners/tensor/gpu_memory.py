"""What a model takes on a GPU beside weights and activations, before anything is allocated."""

from __future__ import annotations

from toolkit.models.spec import DecoderSpec

CONTEXT_BYTES = 512 << 20  # CUDA's own, compiled kernels, cuBLAS workspaces, the graphs' nodes
PART_KEYS = 256  # keys that one partial result of decode attention stands for
PART_ROWS = 16  # rows of a partial result, padding included


def attention_bytes(spec: DecoderSpec, block_bytes: tuple[int, ...], block_size: int, free: int) -> int:
    """Partial results of decode attention over a cache that fills ``free`` bytes, rounded up as graphs are."""
    tokens = free // max(1, sum(block_bytes)) * block_size
    heads = max((a.kv_heads * a.head_dim for _, a in spec.attention_layers()), default=0)
    return 2 * tokens // PART_KEYS * PART_ROWS * heads * 4
