"""What a model will take on a GPU, before anything is allocated."""

from __future__ import annotations

import torch

from toolkit.artifacts.canonical import BlockFp8, ChannelInt8, Fp4, Fp8, GroupInt, Weight
from toolkit.kernels.reference.linear import codes_per_byte
from toolkit.models.spec import AttentionSpec, DecoderSpec, MlpSpec, MoeSpec

CONTEXT_BYTES = 512 << 20  # CUDA's own, compiled kernels, cuBLAS workspaces, the graphs' nodes
PART_KEYS = 256  # keys that one partial result of decode attention stands for
PART_ROWS = 16  # rows of a partial result, padding included


def weight_bytes(spec: DecoderSpec, sample: Weight, dtype: torch.dtype) -> int:
    """Bytes of all weights where the layers' linears are of ``sample``'s form."""
    size = dtype.itemsize
    inside = sum(x.in_features * x.out_features for x in spec.linears())
    outside = spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
    if isinstance(sample, GroupInt):
        scale = sample.scales.element_size() + (1 if sample.minima is None else sample.minima.element_size())
        each = 1 / codes_per_byte(sample.bits) + scale / sample.group_size
    elif isinstance(sample, Fp4):
        each = 0.5 + 1 / sample.group_size
    else:
        each = 1 if isinstance(sample, (ChannelInt8, Fp8, BlockFp8)) and dtype != torch.float32 else size
    return int(inside * each) + outside * size + 4 * sum(n.size for n in spec.norms())


def activation_bytes(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """Of one token at the widest moment of a layer; the residual stream and what is added to it are float32."""
    size, widest = dtype.itemsize, 0
    for layer in spec.layers:
        for s in layer.sublayers:
            m = s.mixer
            if isinstance(m, AttentionSpec):
                widest = max(widest, (4 * m.heads + 4 * m.kv_heads) * m.head_dim * size)
            elif isinstance(m, MlpSpec):
                widest = max(widest, 3 * m.up.out_features * size)
            elif isinstance(m, MoeSpec):
                inner = 3 * m.experts[0].up.out_features + 2 * spec.hidden_size
                widest = max(widest, m.top_k * (inner * size + 4 * spec.hidden_size))
    return 12 * spec.hidden_size + 2 * spec.hidden_size * size + widest


def attention_bytes(spec: DecoderSpec, block_bytes: tuple[int, ...], block_size: int, free: int) -> int:
    """Partial results of decode attention over a cache that fills ``free`` bytes, rounded up as graphs are."""
    tokens = free // max(1, sum(block_bytes)) * block_size
    heads = max((a.kv_heads * a.head_dim for _, a in spec.attention_layers()), default=0)
    return 2 * tokens // PART_KEYS * PART_ROWS * heads * 4
