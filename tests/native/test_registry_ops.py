"""The CPU's kernels against the registry's oracle, on the registry's cases, as every other implementation is tried.

They take packed weights and rows that the executor has prepared, so what calls them in an op's own terms stands here.
Where keys and values are stored rounded, and what no op declares, ``test_ops.py`` has it.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int32, c_int64
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from toolkit.artifacts.canonical import ChannelInt8, GroupInt
from toolkit.kernels import registry
from toolkit.kernels.op import Case, Implementation, Target
from toolkit.kernels.reference.attention import oldest
from toolkit.kernels.reference.linear import unpack_codes
from toolkit.kernels.tolerances import compare
from toolkit.runners.native.packing.pack import pack_dense, pack_weight
from toolkit.runners.native.packing.packed import PackedTensor

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "swigluoai", "relu2")  # by their numbers in ops.h


def by_rows(run: Callable[[np.ndarray], np.ndarray], x: Tensor) -> Tensor:
    """``run`` on every row of ``x``."""
    flat = x.reshape(-1, x.shape[-1]).numpy()
    return torch.from_numpy(np.stack([run(row.copy()) for row in flat])).view(x.shape)


def linear(ops: Any, packed: PackedTensor, x: Tensor, bias: Tensor | None) -> Tensor:
    return torch.from_numpy(ops.linear(packed, x.numpy(), bias=None if bias is None else bias.numpy()))


def rms_norm(ops: Any, x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    scale = (weight + weight_offset).numpy()
    return by_rows(lambda row: ops.rms_norm(row, scale, eps), x)


def layer_norm(ops: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    heads = weight.reshape(-1, x.shape[-1]).numpy()
    offsets = [None] * len(heads) if bias is None else bias.reshape(-1, x.shape[-1]).numpy()
    rows = x.reshape(-1, x.shape[-1]).numpy()
    found = [ops.layer_norm(r.copy(), heads[i % len(heads)], offsets[i % len(heads)], eps) for i, r in enumerate(rows)]
    return torch.from_numpy(np.stack(found)).view(x.shape)


def rope(ops: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = c_int64(2 * cos.shape[1])
    turned = [
        by_rows(lambda row, c=c, s=s: ops.in_place("tk_op_rope", row, c, s, size), heads)  # type: ignore[misc]
        for heads, c, s in zip(x, cos.numpy(), sin.numpy(), strict=True)
    ]
    return torch.stack(turned)


def act(ops: Any, x: Tensor, activation: str) -> Tensor:
    kind = c_int32(ACTIVATIONS.index(activation))
    return by_rows(lambda row: ops.in_place("tk_op_activate", row, c_int64(row.size), kind), x)


def act_and_mul(ops: Any, x: Tensor, activation: str) -> Tensor:
    """Behind two linears, as the kernel has it: those that take one half of ``x`` each."""
    gate, up = (pack_dense(half.contiguous()) for half in torch.eye(x.shape[1]).chunk(2))
    return torch.from_numpy(ops.gated(gate, up, x.numpy(), ACTIVATIONS.index(activation)))


def dense(ops: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(ops, pack_dense(weight), x, bias)


def group_int(
    ops: Any, x: Tensor, packed: Tensor, scales: Tensor, zeros: Any, minima: Any, bits: int, **more: Any
) -> Any:
    codes = unpack_codes(packed, bits)
    size = codes.shape[1] // scales.shape[1]
    weight = GroupInt(codes, scales, zeros, bits, size, minima, more["group_index"])
    return linear(ops, pack_weight(weight), x, more["bias"])


def channel_int8(ops: Any, x: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    return linear(ops, pack_weight(ChannelInt8(weight, scales)), x, bias)


def embedding(ops: Any, ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    packed = pack_dense(table)
    return torch.from_numpy(np.stack([ops.row(packed, i, scale) for i in ids.tolist()]))


def moe_experts(
    ops: Any, x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, **more: Any
) -> Any:
    out = torch.zeros_like(x)
    kind = ACTIVATIONS.index(more["activation"])
    for token, (chosen, shares) in enumerate(zip(experts.tolist(), weights.tolist(), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = (pack_dense(half.contiguous()) for half in gate_up[expert].chunk(2))
            inner = ops.gated(gate, up, x[token : token + 1].numpy(), kind)
            out[token] += share * torch.from_numpy(ops.linear(pack_dense(down[expert]), inner)[0])
    return out


def attention(ops: Any, q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Any, **more: Any) -> Tensor:
    """Head by head, as the kernel has it, out of the blocks in which a sequence lies."""
    out, groups, sinks = torch.zeros_like(q), q.shape[1] // k_cache.shape[2], more["sinks"]
    for s, total in enumerate(more["seq_lens"].tolist()):
        start, stop = more["cu_seqlens"][s : s + 2].tolist()
        blocks = torch.from_numpy(block_table[s]).clamp(min=0).long()
        k, v = (cache[blocks].flatten(0, 1)[:total] for cache in (k_cache, v_cache))
        at = np.arange(total - (stop - start), total)
        lo = np.maximum(oldest(at, more.get("window"), more.get("chunked", False)), 0)
        for head in range(q.shape[1]):
            held = [part[:, head // groups].contiguous().numpy() for part in (k, v)]
            found = ops.attention(
                *held,
                q[start:stop, head].contiguous().numpy(),
                lo,
                at + 1,
                kv_type=0,
                bf16=False,
                scale=more["scale"],
                softcap=more.get("softcap") or 0.0,
                sinks=None if sinks is None else sinks[head].repeat(len(at)).numpy(),
            )
            out[start:stop, head] = torch.from_numpy(found)
    return out[..., : more.get("latent") or q.shape[2]]


def by_sequences(
    states: Tensor, table: Tensor, starts: np.ndarray, tokens: int, run: Callable[[Tensor, slice], Tensor]
) -> Tensor:
    """What ``run`` returns for each sequence's state, which it changes, and tokens."""
    if tokens == len(table):
        starts = np.arange(tokens + 1)
    pairs = table[:, :2].tolist()
    begun = [states[read].clone() if read >= 0 else torch.zeros_like(states[0]) for read, _ in pairs]
    found = []
    for (_, write), state, first, stop in zip(pairs, begun, starts[:-1], starts[1:], strict=True):
        found.append(run(state, slice(first, stop)))
        states[write] = state
    return torch.cat(found)


def causal_conv(
    ops: Any, x: Tensor, weight: Tensor, bias: Any, states: Tensor, table: Tensor, cu_seqlens: Any, silu: bool
) -> Tensor:
    taps, more = weight.T.contiguous().numpy(), None if bias is None else bias.numpy()

    def run(state: Tensor, at: slice) -> Tensor:
        return torch.from_numpy(ops.convolve(x[at].numpy(), taps, more, state.numpy(), silu))

    return by_sequences(states, table, cu_seqlens, len(x), run)


def recur(ops: Any, state: Tensor, *inputs: Tensor, delta: bool) -> Tensor:
    """One head's, whose columns fit one stripe."""
    stripe = np.zeros((len(state), 32), np.float32)
    stripe[:, : state.shape[1]] = state
    found = ops.recur(stripe, *(part.contiguous().numpy() for part in inputs), delta)
    state.copy_(torch.from_numpy(stripe[:, : state.shape[1]]))
    return torch.from_numpy(found)


def state_scan(ops: Any, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, **more: Any) -> Tensor:
    keep, share = (a * dt).exp(), x.shape[1] // b.shape[1]

    def run(state: Tensor, at: slice) -> Tensor:
        heads = [
            recur(ops, h.T, b[at, i // share], c[at, i // share], x[at, i], keep[at, i], dt[at, i], delta=False)
            for i, h in enumerate(state)
        ]
        return torch.stack(heads, 1) + skip[:, None] * x[at]

    return by_sequences(more["states"], more["table"], more["cu_seqlens"], len(x), run)


def delta_rule(ops: Any, q: Tensor, k: Tensor, v: Tensor, fade: Tensor, beta: Tensor, **more: Any) -> Tensor:
    keep, share = fade.exp(), v.shape[1] // k.shape[1]

    def run(state: Tensor, at: slice) -> Tensor:
        heads = [
            recur(ops, h, k[at, i // share], q[at, i // share], v[at, i], keep[at, i], beta[at, i], delta=True)
            for i, h in enumerate(state)
        ]
        return torch.stack(heads, 1)

    return by_sequences(more["states"], more["table"], more["cu_seqlens"], len(v), run)


NATIVE: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "rope": rope,
    "act": act,
    "act_and_mul": act_and_mul,
    "linear": dense,
    "linear_group_int": group_int,
    "linear_int8": channel_int8,
    "embedding": embedding,
    "moe_experts": moe_experts,
    "paged_attention": attention,
    "causal_conv": causal_conv,
    "state_scan": state_scan,
    "delta_rule": delta_rule,
}


def cannot(op: str, case: Case) -> bool:
    """Cases that the kernel is not for."""
    if op == "moe_experts":
        return case.label.endswith("bias")  # the executor adds them in the epilogue, which test_ops has
    traits = case.traits
    others = any(traits.get(name) for name in ("bits", "cache", "block"))
    return op == "paged_attention" and (others or "alibi" in case.label)


@pytest.mark.parametrize("op, case", [(o, c) for o in NATIVE for c in registry.load()[o].cases() if not cannot(o, c)],
                         ids=lambda value: getattr(value, "label", value))  # fmt: skip
def test_kernel_equals_the_registry_s_reference(op: str, case: Case, ops: Any) -> None:
    run = NATIVE[op]
    found = Implementation("cpu", lambda **given: run(ops, **given), ("cpu",), ("float32",))
    assert compare(registry.load()[op], found, case, Target("cpu", "float32", None, case.traits)) is None
