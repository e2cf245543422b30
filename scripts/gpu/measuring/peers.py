"""Kernels of others that are measured beside ours where they can be imported. None is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
BUILT = Path(__file__).resolve().parents[3] / "build" / "peers"  # what was built of them here and brought along


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


def first_marlin(n_out: int, n_in: int, group_size: int, library: Path = BUILT / "libmarlin.so") -> Linear:
    """The first Marlin's product (IST-DASLab), float16, made-up weights. ``library``: its kernels and one C function::

        #include "marlin/marlin_cuda_kernel.cu"
        extern "C" int marlin_mul(const void* a, const void* b, void* c, void* s, int m, int n, int k, void* workspace,
                                  int group, int device, void* stream) {
            return marlin_cuda(a, b, c, s, m, n, k, workspace, group, device, (cudaStream_t)stream);
        }

    by ``nvcc -O3 -std=c++17 --expt-relaxed-constexpr -arch=sm_90 -shared -Xcompiler -fPIC``. For an H100 the cache hint
    of its ``cp.async`` must go. Raises OSError where there is none.
    """
    mul = ctypes.CDLL(str(library)).marlin_mul
    make: dict[str, Any] = {"device": "cuda", "dtype": torch.int32}
    words = torch.randint(-(1 << 31), (1 << 31) - 1, (n_in // 16, n_out * 2), **make)
    scales = torch.full((n_in // group_size, n_out), 0.01, device="cuda", dtype=torch.float16)
    workspace = torch.zeros(n_out // 128 * 16, **make)

    def run(x: Tensor) -> Tensor:
        out = x.new_empty(len(x), n_out)
        at = [ctypes.c_void_p(t.data_ptr()) for t in (x, words, out, scales)]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        code = mul(*at, len(x), n_out, n_in, ctypes.c_void_p(workspace.data_ptr()), group_size, 0, stream)
        if code:
            raise RuntimeError(f"marlin_mul: {code}")
        return out

    return run


def flash_attention_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, lengths: Tensor) -> Any:
    """FlashAttention-3's (else 2's) decode over a paged cache [blocks, size, heads, dim]; ``q``: [S, heads, dim]."""
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError:
        from flash_attn import flash_attn_with_kvcache
    keyword = "page_table" if "page_table" in flash_attn_with_kvcache.__code__.co_varnames else "block_table"
    return flash_attn_with_kvcache(q[:, None], k_cache, v_cache, cache_seqlens=lengths, causal=True, **{keyword: table})
