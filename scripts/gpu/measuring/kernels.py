"""Kernels at the shapes of an 8B model: ours, torch's, and peers'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from gpu.machine import capability_of
from gpu.measuring import peers
from gpu.measuring.timing import copies, seconds
from torch import Tensor

from toolkit.kernels.op import Implementation, Target
from toolkit.kernels.reference.linear import pack_codes
from toolkit.kernels.registry import load

Row = dict[str, Any]
POLICIES = (0, 8, 4, 16, 17)  # quant_policy of the caches that decode attention reads
ROW_WISE, SAMPLED = (1, 64), (1, 64, 256)  # rows
SAMPLES = ("greedy", "peaked top-p", "top-p", "flat top-p")


@dataclass(frozen=True)
class Size:
    """What is measured: an 8B model's on a GPU, something tiny in a dry run."""

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    vocab: int = 128256
    sequences: int = 64
    context: int = 4096
    prompt: int = 2048
    block: int = 64
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384)
    copied: int = 4 << 30

    def linears(self) -> list[tuple[int, int]]:
        """(out, in) of a layer's four products."""
        q, kv = self.heads * self.dim, self.kv_heads * self.dim
        return [(q + 2 * kv, self.hidden), (self.hidden, q), (2 * self.inner, self.hidden), (self.hidden, self.inner)]


TINY = Size(128, 256, 4, 2, 16, 320, 3, 40, 20, 16, (1, 3), 1 << 20)


@dataclass(frozen=True)
class Where:
    """A device, and which families of kernels are ours there. ``capability``: of the GPU that "meta" stands for."""

    device: str
    families: tuple[str, ...]
    scratch: dict[str, Any] = field(default_factory=dict)  # of kernels, which run one after another
    capability: int | None = None

    @property
    def half(self) -> torch.dtype:
        """Of activations; a CPU computes faster in float32."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    def target(self, dtype: str, **traits: Any) -> Target:
        device = "cpu" if self.device == "cpu" else "cuda"
        return Target(device, dtype, self.capability or capability_of(self.device), traits)

    def ours(self, op: str, dtype: str, **traits: Any) -> Iterator[tuple[Implementation | None, str]]:
        """(implementation, its family) of each of ours that has the op; None and the reason where it cannot run."""
        declared = load()[op]
        for family in self.families:
            found = declared.implementations.get(family)
            if found is not None:
                reason = found.unsupported(self.target(dtype, **traits))
                yield (found, family) if reason is None else (None, f"{family}: {reason}")


def meta(capability: int) -> Where:
    """A GPU that is not there: tensors without memory, for recording what would be launched on it."""
    return Where("meta", ("cuda", "triton"), capability=capability)


def names(size: Size) -> list[str]:
    """Of all rows that there are on a GPU."""
    linear = ("dense torch", "w4 cuda", "w4 triton", "w4 marlin")
    decode = (*POLICIES, "flash_attn")
    found = ["copy", *(f"linears {how}, {rows} rows" for how in linear for rows in size.rows)]
    found += [*(f"attention decode {how}" for how in decode), "attention prefill"]
    found += [f"{op}, {rows} rows" for rows in ROW_WISE for op in ("add_rms_norm", "act_and_mul")]
    return found + [f"sample {how}, {rows} rows" for rows in SAMPLED for how in SAMPLES]


def copy_rate(size: Size, where: Where) -> Iterator[Row]:
    """Bytes read and written a second by a kernel of torch; a copy in a graph goes another way, and slower."""
    x = torch.randint(0, 256, (size.copied,), dtype=torch.uint8, device=where.device)  # zeros go faster than numbers
    x = x.view(torch.int32)
    y = torch.empty_like(x)
    took = seconds([lambda: torch.bitwise_xor(x, 1, out=y)], where.device)
    yield {"name": "copy", "value": 2 * size.copied / took, "unit": "B/s"}


def measured(name: str, runs: Callable[[], list[Any]], where: Where, **more: Any) -> Row:
    """A row; with what was raised instead of a figure where it does not run."""
    try:
        return {"name": name, "value": seconds(runs(), where.device), "unit": "s"} | more
    except Exception as error:  # whatever a kernel, a compiler or a peer raises: the other figures count
        lines = str(error).strip().splitlines()
        return {"name": name, "error": f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"}


def _sum(name: str, parts: list[Row], **more: Any) -> Row:
    failed = next((p["error"] for p in parts if "error" in p), None)
    if failed is not None:
        return {"name": name, "error": failed}
    return {"name": name, "value": sum(p["value"] for p in parts), "unit": "s"} | more


def linears(size: Size, where: Where) -> Iterator[Row]:
    """The four products of a layer together, W4A16 in groups of 128 and dense, at each number of rows."""
    group = min(128, size.hidden // 2)
    makers: dict[str, Callable[[int, int], tuple[Callable[[Tensor], Any], int]]] = {
        "linears dense torch": lambda o, i: _dense(o, i, where)
    }
    for implementation, family in where.ours("linear_group_int", str(where.half).removeprefix("torch."), bits=4):
        if implementation is None:
            yield {"name": f"linears w4 {family.partition(':')[0]}", "error": family}
            continue
        makers[f"linears w4 {family}"] = lambda o, i, found=implementation: _grouped(found, o, i, group, where)
    if where.device == "cuda":
        makers["linears w4 marlin"] = lambda o, i: _marlin(o, i, group, where)
        makers["linears w4 first marlin"] = lambda o, i: _first_marlin(o, i, group)
    for label, make in makers.items():
        try:
            made = [[make(o, i)] for o, i in size.linears()]
            for some, (o, i) in zip(made, size.linears(), strict=True):
                some += [make(o, i) for _ in range(copies(some[0][1], where.device) - 1)]
        except Exception as error:
            yield {"name": label, "error": f"{type(error).__name__}: {error}"}
            continue
        total = sum(some[0][1] for some in made)
        for rows in size.rows:
            inputs = [torch.randn(rows, i, device=where.device).to(where.half) for _, i in size.linears()]
            parts = [
                measured(label, lambda some=some, x=x: [lambda f=f, x=x: f(x) for f, _ in some], where)
                for some, x in zip(made, inputs, strict=True)
            ]
            yield _sum(f"{label}, {rows} rows", parts, bytes=total)
        del made


def _dense(n_out: int, n_in: int, where: Where) -> tuple[Callable[[Tensor], Any], int]:
    weight = torch.randn(n_out, n_in, dtype=where.half, device=where.device)
    return (lambda x: F.linear(x, weight)), weight.nbytes


def _codes(n_out: int, n_in: int, group: int, where: Where) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 16, (n_out, n_in), dtype=torch.uint8, device=where.device)
    return codes, torch.full((n_out, n_in // group), 0.01, dtype=torch.float16, device=where.device)


def _grouped(
    implementation: Implementation, n_out: int, n_in: int, group: int, where: Where
) -> tuple[Callable[[Tensor], Any], int]:
    codes, scales = _codes(n_out, n_in, group, where)
    # as AWQ has them; all 8 would be a symmetric weight, whose zeros are dropped when it is packed
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, device=where.device)
    arguments = (pack_codes(codes, 4), scales, zeros, None, 4, None, None)
    size = codes.numel() // 2 + scales.nbytes + zeros.nbytes
    if implementation.prepare is not None:
        return implementation.prepare(*arguments, scratch=where.scratch), size
    return (lambda x: implementation.run(x, *arguments)), size


def _marlin(n_out: int, n_in: int, group: int, where: Where) -> tuple[Callable[[Tensor], Any], int]:
    codes, scales = _codes(n_out, n_in, group, where)
    return peers.marlin(codes, scales.to(where.half), group), codes.numel() // 2 + scales.nbytes


def _first_marlin(n_out: int, n_in: int, group: int) -> tuple[Callable[[Tensor], Any], int]:
    run = peers.first_marlin(n_out, n_in, group)
    return (lambda x: run(x.view(torch.float16))), n_out * n_in // 2 + 2 * n_out * n_in // group


def attention(size: Size, where: Where) -> Iterator[Row]:
    """Decode over at least a gigabyte of cache (bf16), each way of storing it; a prompt over a longer cache."""
    dtype = str(where.half).removeprefix("torch.")
    lengths = np.full(size.sequences, size.context, np.int32)
    starts = np.arange(size.sequences + 1, dtype=np.int32)
    for policy in POLICIES:
        yield _attend(f"attention decode {policy}", size, where, dtype, policy, starts, lengths)
    if where.device == "cuda":
        yield _peer_decode(size, where, lengths)
    one = np.array([0, size.prompt], np.int32), np.array([max(size.context, size.prompt)], np.int32)
    yield _attend("attention prefill", size, where, dtype, 0, *one)


def _cache(size: Size, where: Where, dtype: str, policy: int, blocks: int) -> tuple[list[Tensor | None], int]:
    """(keys, values, their parameters; bits) of one layer, filled with anything finite."""
    from toolkit.kernels.reference.cache import key_bits
    from toolkit.runners.tensor.cache import FLOAT8, cache_bits

    bits, shape = cache_bits(policy), (blocks, size.block, size.kv_heads)
    if bits:
        widths = (size.dim * key_bits(bits) // 8, size.dim * bits // 8)
        data = [torch.randint(0, 256, (*shape, w), dtype=torch.uint8, device=where.device) for w in widths]
        params = [torch.full((*shape, 2), 0.01, dtype=torch.float16, device=where.device) for _ in widths]
        return [*data, *params], bits
    kind = FLOAT8.get(policy, getattr(torch, dtype))
    return [torch.randn(*shape, size.dim, device=where.device).to(kind) for _ in range(2)] + [None, None], 0


def _tables(size: Size, lengths: np.ndarray) -> tuple[np.ndarray, int]:
    """Block tables in scattered order, and how many blocks there are."""
    each = -(-int(lengths.max()) // size.block)
    blocks = each * len(lengths)
    order = np.random.default_rng(0).permutation(blocks).astype(np.int32)
    return order.reshape(len(lengths), each), blocks


def _attend(
    name: str, size: Size, where: Where, dtype: str, policy: int, starts: np.ndarray, lengths: np.ndarray
) -> Row:
    from toolkit.runners.tensor.cache import cache_traits

    able = list(where.ours("paged_attention", dtype, head_dim=size.dim, **cache_traits(policy)))
    found = next((implementation for implementation, _ in able if implementation is not None), None)
    if found is None:
        return {"name": name, "error": "; ".join(reason for _, reason in able) or "none of ours is there"}
    table, blocks = _tables(size, lengths)
    (k, v, kp, vp), bits = _cache(size, where, dtype, policy, blocks + 1)
    q = torch.randn(int(starts[-1]), size.heads, size.dim, device=where.device).to(getattr(torch, dtype))
    device = torch.device(where.device)
    plan = found.plan and found.plan(table, starts, lengths, size.block, blocks + 1, None, device)

    def run() -> Any:
        scale = size.dim**-0.5
        return found.run(
            q, k, v, table, starts, lengths, scale, bits=bits, k_params=kp, v_params=vp, plan=plan, turned=bits == 4
        )

    read = sum(t.nbytes for t in (k, v, kp, vp) if t is not None)
    return measured(name, lambda: [run], where, bytes=read)


def _peer_decode(size: Size, where: Where, lengths: np.ndarray) -> Row:
    table, blocks = _tables(size, lengths)
    (k, v, _, _), _ = _cache(size, where, "bfloat16", 0, blocks)
    q = torch.randn(size.sequences, size.heads, size.dim, device=where.device).to(torch.bfloat16)
    on_device = torch.from_numpy(table).to(where.device), torch.from_numpy(lengths).to(where.device)
    run = lambda: peers.flash_attention_decode(q, k, v, *on_device)  # noqa: E731
    return measured("attention decode flash_attn", lambda: [run], where)


def row_wise(size: Size, where: Where) -> Iterator[Row]:
    """Norms, activations and sampling, at one row and at many."""
    half, device = where.half, where.device
    name = str(half).removeprefix("torch.")
    for rows in (min(n, size.rows[-1]) for n in ROW_WISE):
        x = torch.randn(rows, size.hidden, device=device).to(half)
        residual, weight = torch.randn(rows, size.hidden, device=device), torch.ones(size.hidden, device=device)
        gate_up = torch.randn(rows, 2 * size.inner, device=device).to(half)
        calls = {"add_rms_norm": (x, residual, weight, 1e-5), "act_and_mul": (gate_up, "silu")}
        for op, arguments in calls.items():
            yield _row(op, name, arguments, rows, where)
    for rows in SAMPLED if device != "cpu" else (2,):
        logits = torch.randn(rows, size.vocab, device=device) * 3
        column = torch.ones(rows, device=device)
        k, u = torch.zeros(rows, dtype=torch.int64, device=device), torch.full((rows,), 0.4, device=device)
        yield _row("sample", "float32", (logits, column * 0, k, column, column * 0, u), rows, where, " greedy")
        filters = (column, k, column * 0.9, column * 0, u)
        peaked = logits.clone()  # as a language model's: few candidates stand out
        peaked[:, :: max(size.vocab // 300, 1)] += 12
        yield _row("sample", "float32", (peaked, *filters), rows, where, " peaked top-p")
        yield _row("sample", "float32", (logits, *filters), rows, where, " top-p")
        yield _row("sample", "float32", (logits * 0.03, *filters), rows, where, " flat top-p")


def _row(op: str, dtype: str, arguments: tuple[Any, ...], rows: int, where: Where, label: str = "") -> Row:
    name = f"{op}{label}, {rows} rows"
    found = next((i for i, _ in where.ours(op, dtype) if i is not None), None)
    if found is None:
        return {"name": name, "error": "none of ours runs here"}
    return measured(name, lambda: [lambda: found.run(*arguments)] * 8, where)
