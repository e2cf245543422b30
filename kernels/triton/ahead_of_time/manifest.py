"""Every variant of every kernel that a served model needs, as calls of the ops on meta tensors.

A call records its launches, and from these come signatures, specialisations, compile-time constants, warps and stages:
what is compiled ahead of time is by construction what is launched. The shapes are those of Llama-3 8B (hidden 4096, 32
query heads, 8 key heads of 128, feed-forward 14336, vocabulary 128256) and, where they select another variant, others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from .call import CODES, Call, empty
from .linears import linears
from .states import states


def _rowwise() -> Iterator[Call]:
    for label, shape in (("hidden2048", (64, 2048)), ("hidden4096", (64, 4096)), ("heads", (64, 32, 128))):

        def norm(dtype: torch.dtype, shape=shape) -> dict[str, Any]:
            return {"x": empty(*shape, dtype=dtype), "weight": empty(shape[-1], dtype=dtype), "eps": 1e-5}

        def add(dtype: torch.dtype, shape=shape) -> dict[str, Any]:
            args = {"x": empty(*shape, dtype=dtype), "weight": empty(shape[-1], dtype=dtype), "eps": 1e-5}
            return args | {"residual": empty(*shape, dtype=torch.float32)}

        yield Call("rms_norm", label, norm)
        if label != "heads":
            yield Call("add_rms_norm", label, add)
    for kind in ("silu", "gelu", "gelu_tanh"):

        def act(dtype: torch.dtype, kind=kind) -> dict[str, Any]:
            return {"x": empty(64, 28672, dtype=dtype), "activation": kind}

        yield Call("act_and_mul", kind, act)
    yield from _quantizing()
    for label, heads, dim, turned in (("q128", 32, 128, 128), ("k128", 8, 128, 128), ("partial80", 32, 80, 32)):

        def turn(dtype: torch.dtype, heads=heads, dim=dim, turned=turned) -> dict[str, Any]:
            angles = [empty(64, turned // 2, dtype=torch.float32) for _ in range(2)]
            return {"x": empty(64, heads, dim, dtype=dtype), "cos": angles[0], "sin": angles[1]}

        yield Call("rope", label, turn)
    yield Call(
        "embedding",
        "vocab128256",
        lambda d: {"ids": empty(64, dtype=torch.int64), "table": empty(128256, 4096, dtype=d)},
    )


def _quantizing() -> Iterator[Call]:
    """Norms and activations that write the codes of a W8A8 linear's input."""
    for short, codes in CODES.items():

        def norm(dtype: torch.dtype, codes=codes) -> dict[str, Any]:
            args = {"x": empty(64, 4096, dtype=dtype), "weight": empty(4096, dtype=torch.float32)}
            return args | {"eps": 1e-5, "codes": codes}

        def add(dtype: torch.dtype, norm=norm) -> dict[str, Any]:
            return norm(dtype) | {"residual": empty(64, 4096, dtype=torch.float32)}

        def act(dtype: torch.dtype, codes=codes) -> dict[str, Any]:
            return {"x": empty(64, 28672, dtype=dtype), "activation": "silu", "codes": codes}

        yield Call("rms_norm_quant", short, norm, traits={"codes": short})
        yield Call("add_rms_norm_quant", short, add, traits={"codes": short})
        yield Call("act_and_mul_quant", short, act, traits={"codes": short})


FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
CACHES = ("float", "int8", "int4", "e4m3", "e5m2")


def _cache(form: str, blocks: int, heads: int, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """A cache of blocks of 64 slots, and what the ops are told about it."""
    bits = int(form[3:]) if form.startswith("int") else 0
    kind = torch.uint8 if bits else FLOAT8.get(form, dtype)
    widths = (dim * 3 // 4, dim // 2) if bits == 4 else (dim, dim)
    k, v = (empty(blocks, 64, heads, width, dtype=kind) for width in widths)
    params = [empty(blocks, 64, heads, 2, dtype=torch.float16) if bits else None for _ in range(2)]
    scales = {"k_scale": 0.5, "v_scale": 0.25} if form in FLOAT8 else {}
    return {"k_cache": k, "v_cache": v, "k_params": params[0], "v_params": params[1], "bits": bits} | scales


def _cache_traits(form: str, dim: int) -> dict[str, Any]:
    kind = str(FLOAT8[form]).removeprefix("torch.") if form in FLOAT8 else None
    return {"head_dim": dim, "bits": int(form[3:]) if form.startswith("int") else 0, "cache": kind}


def _named(*parts: object) -> str:
    """A label; the plain form of a cache is left out."""
    return "-".join(str(p) for p in parts if p != "float")


def _kv_write() -> Iterator[Call]:
    shapes = [(128, form) for form in CACHES] + [(64, "float"), (64, "int4"), (80, "int4"), (96, "int4"), (256, "int4")]
    for dim, form in shapes:

        def write(dtype: torch.dtype, dim=dim, form=form) -> dict[str, Any]:
            k, v = (empty(64, 8, dim, dtype=dtype) for _ in range(2))
            return {"k": k, "v": v, "slot_mapping": empty(64, dtype=torch.int64)} | _cache(form, 1024, 8, dim, dtype)

        yield Call("kv_write", _named(dim, form), write, traits=_cache_traits(form, dim))


def _rope_kv_write() -> Iterator[Call]:
    # head_dim, turned elements, heads, key heads, form, norms of queries and keys
    shapes: list[tuple[int, int, int, int, str, bool]] = []
    shapes += [(128, 128, 32, 8, form, norms) for form in CACHES for norms in (False, True)]
    shapes += [(64, 64, 32, 8, "float", False), (64, 64, 32, 8, "int4", False), (80, 32, 32, 32, "int4", False)]
    shapes += [(96, 96, 32, 32, "int8", False), (256, 256, 8, 4, "float", False), (256, 256, 8, 4, "int4", False)]
    shapes += [(512, 512, 8, 1, "float", True), (512, 512, 8, 1, "int4", True)]
    for dim, turned, heads, kv_heads, form, norms in shapes:

        def write(dtype, dim=dim, turned=turned, heads=heads, kv_heads=kv_heads, form=form, norms=norms):
            qkv = empty(64, heads + 2 * kv_heads, dim, dtype=dtype)
            q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
            cos, sin = (empty(64, turned // 2, dtype=torch.float32) for _ in range(2))
            inputs = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, "slot_mapping": empty(64, dtype=torch.int64)}
            if norms:
                inputs |= {name: empty(dim, dtype=torch.float32) for name in ("q_weight", "k_weight")}
            return inputs | _cache(form, 1024, kv_heads, dim, dtype)

        label = _named(dim, *([turned] if turned != dim else []), form, *(["norms"] if norms else []))
        yield Call("rope_kv_write", label, write, traits=_cache_traits(form, dim))


STEPS = {"decode": ((1,) * 64, (4096,) * 64), "prefill": ((2048,), (4096,)), "mixed": ((1, 512), (4096, 512))}


def _attention() -> Iterator[Call]:
    window, cap, sinks = {"window": 1024}, {"softcap": 50.0}, {"sinks": True}
    shapes: list[tuple[int, int, dict[str, Any]]] = [(128, 4, {}), (64, 4, {}), (64, 8, window | sinks)]
    shapes += [(256, 2, window | cap), (80, 1, {}), (96, 1, {}), (128, 4, window), (512, 8, {})]
    shapes += [(128, 5, {"window": 8192, "chunked": True}), (128, 1, {"alibi": True}), (128, 4, {"block": 4})]
    for dim, group, options in shapes:
        for form in CACHES:
            for kind, (new, total) in STEPS.items():
                if kind == "mixed" and (dim, group, options) != (128, 4, {}):
                    continue
                if form == "e5m2" and (dim, options) not in ((64, {}), (128, {})):
                    continue  # differs from e4m3 by fewer instructions

                def attend(dtype, dim=dim, group=group, form=form, options=options, new=new, total=total):
                    heads = 8 if group > 1 else 32
                    table = np.zeros((len(new), 64), np.int32)
                    lengths = {
                        "cu_seqlens": np.cumsum([0, *new], dtype=np.int32),
                        "seq_lens": np.array(total, np.int32),
                    }
                    by_head = {name: empty(heads * group, dtype=torch.float32) for name in ("sinks", "alibi")}
                    given = options | {name: t for name, t in by_head.items() if name in options}
                    q = {"q": empty(sum(new), heads * group, dim, dtype=dtype), "scale": dim**-0.5}
                    return q | {"block_table": table} | lengths | _cache(form, 4096, heads, dim, dtype) | given

                label = _named(kind, dim, f"x{group}", form, *options)
                yield Call("paged_attention", label, attend, traits=_cache_traits(form, dim))


def _alike() -> Iterator[Call]:
    """Rows that are to be the same whatever comes with them: tiles of one shape, and of attention keys in ranges of
    prompts. Other ops then have a variant that is above."""
    for n_out, n_in in ((6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096)):

        def multiply(dtype: torch.dtype, n_out=n_out, n_in=n_in) -> dict[str, Any]:
            return {"x": empty(64, n_in, dtype=dtype), "weight": empty(n_out, n_in, dtype=dtype)}

        yield Call("linear", f"alike-{n_out}x{n_in}", multiply, traits={"alike": True})
    for dim, heads, kv_heads in ((128, 32, 8), (64, 32, 8), (256, 8, 4), (80, 32, 32), (96, 32, 32)):
        for form in CACHES[:3]:

            def attend(dtype, dim=dim, heads=heads, kv_heads=kv_heads, form=form) -> dict[str, Any]:
                lengths = {"cu_seqlens": np.array([0, 1, 513], np.int32), "seq_lens": np.array([8300, 512], np.int32)}
                q = {"q": empty(513, heads, dim, dtype=dtype), "scale": dim**-0.5}
                return (
                    q
                    | {"block_table": np.zeros((2, 130), np.int32)}
                    | lengths
                    | _cache(form, 4096, kv_heads, dim, dtype)
                )

            traits = _cache_traits(form, dim) | {"alike": True}
            yield Call("paged_attention", _named("alike", dim, f"x{heads // kv_heads}", form), attend, traits=traits)


def _latent() -> Iterator[Call]:
    """Latent attention in the shapes of DeepSeek-V3, its Lite version before, and MiniCPM 3."""
    for heads, rank, turned in ((128, 512, 64), (16, 512, 64), (40, 256, 32)):
        for form in ("float", "int8", "e4m3"):

            def told(dtype, form=form, width=rank + turned):
                cache = _cache(form, 4096, 1, width, dtype)
                return cache["k_cache"], cache["k_params"], {"bits": cache["bits"]}

            traits = _cache_traits(form, rank + turned) | {"latent": True}
            for kind, (new, total) in STEPS.items():

                def attend(dtype, heads=heads, rank=rank, turned=turned, told=told, new=new, total=total):
                    rows, params, bits = told(dtype)
                    table = np.zeros((len(new), 64), np.int32)
                    lengths = {"cu_seqlens": np.cumsum([0, *new], dtype=np.int32)}
                    lengths |= {"seq_lens": np.array(total, np.int32), "block_table": table}
                    q = {"q": empty(sum(new), heads, rank + turned, dtype=dtype), "scale": 0.1, "latent": rank}
                    both = {"k_cache": rows, "v_cache": rows, "k_params": params, "v_params": params}
                    return q | lengths | both | bits

                yield Call("paged_attention", _named("latent", kind, f"x{heads}", form), attend, traits=traits)

            def write(dtype, heads=heads, rank=rank, turned=turned, told=told):
                rows, params, bits = told(dtype)
                angles = [empty(64, turned // 2, dtype=torch.float32) for _ in range(2)]
                made = {"latent": empty(64, rank, dtype=dtype), "shared": empty(64, turned, dtype=dtype)}
                made |= {"q": empty(64, heads, turned, dtype=dtype), "weight": empty(rank, dtype=torch.float32)}
                where = {"cache": rows, "params": params, "slot_mapping": empty(64, dtype=torch.int64)}
                return made | where | {"cos": angles[0], "sin": angles[1]} | bits

            yield Call("latent_write", _named(f"x{heads}", form), write, traits=traits)


def _sampling() -> Iterator[Call]:
    logits, one = {"logits": empty(64, 128256, dtype=torch.float32)}, ("float32",)
    column = empty(64, dtype=torch.float32)
    names = ("temperature", "top_p", "min_p", "u")
    columns = {name: column for name in names} | {"top_k": empty(64, dtype=torch.int64)}
    for vocab in (32000, 128256, 151936):  # their chunks list candidates in lists of other lengths

        def sample(dtype: torch.dtype, vocab: int = vocab) -> dict[str, Any]:
            return columns | {"logits": empty(64, vocab, dtype=dtype)}

        yield Call("sample", f"vocab{vocab}", sample, one)
    entries = {"rows": empty(512, dtype=torch.int64), "ids": empty(512, dtype=torch.int64)}
    entries |= {"counts": empty(512, dtype=torch.float32)}
    strengths = {name: column for name in ("repetition", "presence", "frequency")}
    yield Call("penalize", "vocab128256", lambda _: logits | entries | strengths, one)
    words = empty(64, 4008, dtype=torch.int32)
    yield Call("apply_bitmask", "vocab128256", lambda _: logits | {"bitmask": words}, one)


def calls() -> list[Call]:
    """All calls, family by family."""
    cache = (*_kv_write(), *_rope_kv_write(), *_attention(), *_alike(), *_latent())
    return [*_rowwise(), *cache, *states(), *linears(), *_sampling()]


# What the machine code of a kernel must show: "vector": 128-bit loads from global memory; "stores": 128-bit stores;
# "async": asynchronous copies into shared memory, "async vector": of 128 bits; "ldmatrix": operands of products read by
# that instruction; "mma": tensor cores, by mma.sync or wgmma; "no conversion": no instruction that converts an integer
# to floating point, which would bind kernels that unpack codes; "lop3": masks and exponents in one instruction; "shared
# vector": 128-bit loads from shared memory. The last three kernels are the CUDA ones.
CLAIMS: dict[str, frozenset[str]] = {
    "rms_norm_kernel": frozenset({"vector"}),
    "act_kernel": frozenset({"vector"}),
    "act_quant_kernel": frozenset({"vector"}),
    "embedding_kernel": frozenset({"vector"}),
    "attend_kernel": frozenset({"async", "mma", "no conversion"}),
    "rope_kv_write_kernel": frozenset({"vector", "no conversion"}),
    "merge_kernel": frozenset({"vector"}),
    "latent_kernel": frozenset({"async", "mma", "no conversion"}),
    "latent_write_kernel": frozenset({"no conversion"}),
    "causal_conv_kernel": frozenset({"no conversion"}),
    "state_scan_kernel": frozenset({"vector", "stores"}),
    "scan_walk_kernel": frozenset({"async", "mma", "no conversion"}),
    "delta_rule_kernel": frozenset({"vector", "stores"}),
    "delta_prepare_kernel": frozenset({"mma", "no conversion"}),
    "delta_walk_kernel": frozenset({"async", "mma", "no conversion"}),
    "group_linear_kernel": frozenset({"async", "mma", "no conversion"}),
    "expand_kernel": frozenset({"stores"}),
    "round_rows_kernel": frozenset({"vector"}),
    "expert_linear_kernel": frozenset({"async", "mma"}),
    "expert_group_kernel": frozenset({"async", "mma", "no conversion"}),
    "expert_row_kernel": frozenset({"async", "mma"}),
    "expert_fp4_kernel": frozenset({"async", "mma", "no conversion"}),
    "expert_block_kernel": frozenset({"async", "mma"}),
    "chunk_kernel": frozenset({"vector"}),
    "weigh_kernel": frozenset({"vector"}),
    "list_kernel": frozenset({"vector"}),
    "flat_kernel": frozenset({"vector"}),
    "combine_kernel": frozenset({"vector"}),
    "row_linear_kernel": frozenset({"async", "mma"}),
    "dense_linear_kernel": frozenset({"async", "mma"}),
    "round_blocks_kernel": frozenset({"vector"}),
    "lora_shrink_kernel": frozenset({"async", "mma"}),
    "lora_expand_kernel": frozenset({"mma"}),
    "block_linear_kernel": frozenset({"async", "mma"}),
    "fp4_linear_kernel": frozenset({"async", "mma", "no conversion"}),
    "fp4_expand_kernel": frozenset({"stores"}),
    "few": frozenset({"vector", "shared vector", "async vector", "mma", "no conversion"}),
    "tile": frozenset({"shared vector", "async vector", "mma", "lop3", "no conversion"}),
    "ahead": frozenset({"shared vector", "async vector", "mma", "lop3", "no conversion"}),
    "expand": frozenset({"vector", "stores", "no conversion"}),
}
WGMMA_ROWS = 64  # of a tile, from which on a kernel with products must show wgmma where there is such a thing

# What an inner loop of a kernel may hold nevertheless, and why.
_DIVISION = "the rare path (tiny or huge numbers) of dividing logits by the temperature as IEEE rounds"
EXCUSED: dict[str, dict[str, str]] = {
    "chunk_kernel": {
        "call": "how lanes that have parted sum over their warp, beside the one instruction of those that have not"
    },
    "draw_kernel": {"call": _DIVISION},
    "weigh_kernel": {"call": _DIVISION},
    "flat_kernel": {"call": _DIVISION},
}


def claims(kernel: str, architecture: int, rows: int) -> frozenset[str]:
    """What the machine code of ``kernel`` must show; ``rows``: of its tile, 0 where it has none."""
    found = CLAIMS.get(kernel, frozenset())
    wide = architecture == 90 and "mma" in found and rows >= WGMMA_ROWS
    return found | {"wgmma"} if wide else found
