"""Kernels of others that are measured beside ours where they can be imported. None is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Linear = Callable[[Tensor], Tensor]


def marlin(codes: Tensor, scales: Tensor, group_size: int) -> Linear:
    """vLLM's Marlin for symmetric 4-bit weights: ``codes`` uint8 [out, in], ``scales`` of the activations' dtype
    [out, groups].

    Raises ImportError where there is no vLLM with it.
    """
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.marlin_utils import (
        apply_gptq_marlin_linear,
        marlin_make_empty_g_idx,
        marlin_make_workspace_new,
        marlin_permute_scales,
    )
    from vllm.scalar_type import scalar_types

    n_out, n_in = codes.shape
    shifts = torch.arange(8, device=codes.device, dtype=torch.int32) * 4
    words = codes.T.reshape(n_in // 8, 8, n_out).to(torch.int32)
    qweight = (words << shifts[None, :, None]).sum(1, dtype=torch.int32).contiguous()
    none = marlin_make_empty_g_idx(codes.device)
    weight = ops.gptq_marlin_repack(qweight, none, n_in, n_out, 4)
    ordered = marlin_permute_scales(scales.T.contiguous(), n_in, n_out, group_size)
    workspace = marlin_make_workspace_new(codes.device)

    def run(x: Tensor) -> Tensor:
        return apply_gptq_marlin_linear(
            x, weight, ordered, none, none, none, workspace, scalar_types.uint4b8, n_out, n_in, True, None
        )

    return run


def flash_attention_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor) -> Any:
    """FlashAttention-3's (else 2's) decode over a paged cache [blocks, size, heads, dim]; ``q``: [S, heads, dim]."""
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError:
        from flash_attn import flash_attn_with_kvcache
    keyword = "page_table" if "page_table" in flash_attn_with_kvcache.__code__.co_varnames else "block_table"
    return flash_attn_with_kvcache(q[:, None], k_cache, v_cache, cache_seqlens=lengths, causal=True, **{keyword: table})
