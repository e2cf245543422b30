"""The manifest's calls of linear layers, mixtures of experts and adapters, in the shapes of Llama-3 8B and two MoEs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .call import CODES, Call, empty

FP4 = (("mxfp4", 32, torch.uint8), ("nvfp4", 16, torch.float8_e4m3fn))  # inputs of a block, dtype of its scale


def _group_linear() -> Iterator[Call]:
    forms = [
        ("int4-g128", 4, 128, False, False),
        ("int4-g32", 4, 32, False, False),
        ("int4-minima", 4, 128, True, False),
    ]
    forms += [
        ("int4-order", 4, 128, False, True),
        ("int8-g128", 8, 128, False, False),
        ("int2-g64", 2, 64, False, False),
    ]
    for label, bits, group, minima, order in forms:
        for tokens in (1, 32, 64, 256, 2048) if label == "int4-g128" else (1, 256, 2048):

            def make(dtype, bits=bits, group=group, minima=minima, order=order, tokens=tokens) -> dict[str, Any]:
                groups, planes = 4096 // group, 8 // bits
                return {
                    "x": empty(tokens, 4096, dtype=dtype),
                    "packed": empty(6144, 4096 // planes, dtype=torch.uint8),
                    "scales": empty(6144, groups, dtype=torch.float16),
                    "zeros": None if minima else empty(6144, groups, dtype=torch.uint8),
                    "minima": empty(6144, groups, dtype=torch.float16) if minima else None,
                    "bits": bits,
                    "group_index": empty(4096, dtype=torch.int32) if order else None,
                }

            yield Call("linear_group_int", f"{label}-{tokens}", make, traits={"bits": bits})


def _row_linear() -> Iterator[Call]:
    for short, kind in CODES.items():
        for tokens in (1, 64, 2048):

            def make(dtype: torch.dtype, kind=kind, tokens=tokens) -> dict[str, Any]:
                weight = {"weight": empty(6144, 4096, dtype=kind), "scales": empty(6144, dtype=torch.float32)}
                return {"x": empty(tokens, 4096, dtype=dtype), "bias": empty(6144, dtype=dtype)} | weight

            def ready(dtype: torch.dtype, kind=kind, tokens=tokens, make=make) -> dict[str, Any]:
                args = {"codes": empty(tokens, 4096, dtype=kind), "row_scales": empty(tokens, dtype=torch.float32)}
                return args | {k: v for k, v in make(dtype).items() if k != "x"} | {"dtype": dtype}

            yield Call(f"linear_{short}", f"{tokens}", make)
            yield Call(f"matmul_{short}", f"{tokens}", ready)


def _block_linear() -> Iterator[Call]:
    for tokens in (1, 64, 2048):

        def tiles(dtype: torch.dtype, tokens=tokens) -> dict[str, Any]:
            weight = {"weight": empty(6144, 4096, dtype=torch.float8_e4m3fn), "block": 128}
            weight |= {"scales": empty(48, 32, dtype=torch.float32), "row_blocks": empty(6144, dtype=torch.int32)}
            return {"x": empty(tokens, 4096, dtype=dtype), "bias": empty(6144, dtype=dtype)} | weight

        yield Call("linear_block_fp8", f"{tokens}", tiles)
    for form, group, kind in FP4:
        for tokens in (1, 32, 64, 256, 2048):

            def fp4(dtype: torch.dtype, tokens=tokens, form=form, group=group, kind=kind) -> dict[str, Any]:
                weight = {"packed": empty(6144, 2048, dtype=torch.uint8), "bias": empty(6144, dtype=dtype)}
                factors = {"row_scales": empty(6144, dtype=torch.float32)} if form == "nvfp4" else {}
                weight |= {"scales": empty(6144, 4096 // group, dtype=kind)} | factors
                return {"x": empty(tokens, 4096, dtype=dtype)} | weight

            yield Call("linear_fp4", f"{form}-{tokens}", fp4)


def _moe() -> Iterator[Call]:
    for label, count, top_k, hidden, inner in (("mixtral", 8, 2, 4096, 14336), ("qwen3-30b", 128, 8, 2048, 768)):
        for tokens in (1, 64, 4096):

            def route(dtype, count=count, top_k=top_k, tokens=tokens) -> dict[str, Any]:
                logits = {"logits": empty(tokens, count, dtype=dtype)}
                return logits | {"top_k": top_k, "scoring": "softmax", "norm_topk": True}

            def experts(dtype, count=count, top_k=top_k, hidden=hidden, inner=inner, tokens=tokens) -> dict[str, Any]:
                return {
                    "x": empty(tokens, hidden, dtype=dtype),
                    "experts": empty(tokens, top_k, dtype=torch.int64),
                    "weights": empty(tokens, top_k, dtype=torch.float32),
                    "gate_up": empty(count, 2 * inner, hidden, dtype=dtype),
                    "down": empty(count, hidden, inner, dtype=dtype),
                    "activation": "silu",
                }

            def groups(dtype, count=count, hidden=hidden, inner=inner, experts=experts) -> dict[str, Any]:
                args = experts(dtype) | {"bits": 4}
                for name, n_out, n_in in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
                    args[name] = empty(count, n_out, n_in // 2, dtype=torch.uint8)
                    args[f"{name}_scales"] = empty(count, n_out, n_in // 128, dtype=torch.float16)
                    args[f"{name}_zeros"] = empty(count, n_out, n_in // 128, dtype=torch.uint8)
                return args

            yield Call("moe_experts_group_int", f"{label}-{tokens}", groups, traits={"bits": 4})
            for short, kind in CODES.items():

                def rounded(
                    dtype, count=count, hidden=hidden, inner=inner, experts=experts, kind=kind
                ) -> dict[str, Any]:
                    args = experts(dtype)
                    for name, n_out, n_in in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
                        args[name] = empty(count, n_out, n_in, dtype=kind)
                        args[f"{name}_scales"] = empty(count, n_out, dtype=torch.float32)
                    return args

                yield Call(f"moe_experts_{short}", f"{label}-{tokens}", rounded)

            def tiles(dtype, count=count, hidden=hidden, inner=inner, experts=experts) -> dict[str, Any]:
                args = experts(dtype) | {"block": 128}
                for name, n_out, n_in in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
                    args[name] = empty(count, n_out, n_in, dtype=torch.float8_e4m3fn)
                    args[f"{name}_scales"] = empty(count, n_out // 128, n_in // 128, dtype=torch.float32)
                    args[f"{name}_rows"] = empty(n_out, dtype=torch.int32)
                return args

            yield Call("moe_experts_block_fp8", f"{label}-{tokens}", tiles, traits={"block": 128})
            for form, group, kind in FP4:

                def fp4(
                    dtype, count=count, hidden=hidden, inner=inner, experts=experts, form=form, group=group, kind=kind
                ) -> dict[str, Any]:
                    args = experts(dtype)
                    for name, n_out, n_in in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
                        args[name] = empty(count, n_out, n_in // 2, dtype=torch.uint8)
                        args[f"{name}_scales"] = empty(count, n_out, n_in // group, dtype=kind)
                        if form == "nvfp4":
                            args[f"{name}_factors"] = empty(count, n_out, dtype=torch.float32)
                    return args

                yield Call("moe_experts_fp4", f"{label}-{form}-{tokens}", fp4)
            yield Call("moe_route", f"{label}-{tokens}", route)
            yield Call("moe_experts", f"{label}-{tokens}", experts)


def _lora() -> Iterator[Call]:
    layers = {"qkv": (4096, (4096, 1024, 1024)), "gate_up": (4096, (14336, 14336)), "down": (14336, (4096,))}
    for label, (n_in, widths) in layers.items():
        for rank, tokens in ((16, 1), (16, 2048), (128, 64)):

            def common(dtype: torch.dtype, rank=rank, tokens=tokens, widths=widths) -> dict[str, Any]:
                index = {"ranks": empty(8, dtype=torch.int32), "adapter": empty(tokens, dtype=torch.int32)}
                return index | {"b": empty(8, sum(widths), rank, dtype=dtype), "widths": widths}

            def shrink(dtype, rank=rank, tokens=tokens, n_in=n_in, widths=widths, common=common) -> dict[str, Any]:
                args = {k: v for k, v in common(dtype).items() if k in ("ranks", "adapter")}
                return args | {
                    "x": empty(tokens, n_in, dtype=dtype),
                    "a": empty(8, len(widths), rank, n_in, dtype=dtype),
                }

            def expand(dtype, rank=rank, tokens=tokens, n_in=n_in, widths=widths, common=common) -> dict[str, Any]:
                h = empty(-(-n_in // 2048), tokens, len(widths), rank, dtype=torch.float32)
                return common(dtype) | {"h": h, "y": empty(tokens, sum(widths), dtype=dtype)}

            yield Call("lora_shrink", f"{label}-r{rank}-{tokens}", shrink)
            yield Call("lora_expand", f"{label}-r{rank}-{tokens}", expand)


def linears() -> Iterator[Call]:
    """All of this file."""
    for family in (_group_linear, _row_linear, _block_linear, _moe, _lora):
        yield from family()
