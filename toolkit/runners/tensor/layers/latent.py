"""Latent attention over the rows in the paged cache: expanded for the many tokens of a prompt, absorbed for few.

Sequences that bring few tokens go through ``paged_attention`` as one key head of ``kv_rank + rope_dim`` numbers, whose
values are the latent part of its own keys. For more tokens it costs less to make the keys and values of each head once
(``LatentAttention.break_even``).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.kernels.reference.cache import dequantize_heads, is_float8, slots_of
from toolkit.models.spec import LatentSpec
from toolkit.runners.tensor.cache import LayerCache
from toolkit.runners.tensor.layers.linear import Activations, Linear
from toolkit.runners.tensor.layers.norms import LayerNorm, Norm, norm_later
from toolkit.runners.tensor.ops import Ops
from toolkit.runners.tensor.step.context import StepContext

EXPANDED = 1 << 24  # numbers of keys and values that are made at once, head by head where these are more
QUERIES = 512  # rows that attend at once where there is something before them


@dataclass(frozen=True)
class Part:
    """Sequences of a step that are absorbed. ``tokens``: their rows of the flat batch, or None where they are all."""

    tokens: Tensor | None
    table: np.ndarray
    cu_seqlens: np.ndarray
    seq_lens: np.ndarray
    plan: object


@dataclass(frozen=True)
class LatentAttention:
    """``entry`` gives queries (or what they are made from by ``q_norm`` and ``q``), the latent and the shared key.

    ``keys`` [heads, nope_dim, kv_rank] and ``values`` [heads, v_dim, kv_rank] are the parts of ``kv_b``.
    """

    spec: LatentSpec
    layer: int
    entry: Linear
    q_norm: Norm | LayerNorm | None
    q: Linear | None
    kv_norm: Norm | LayerNorm
    keys: Tensor
    values: Tensor
    o: Linear
    ops: Ops

    def __call__(self, x: Activations, step: StepContext) -> Tensor:
        spec, cache = self.spec, step.cache.layers[self.layer, self.spec.group]
        queries, latent, shared = self.entry(x).split_with_sizes(
            [(spec.q if spec.q_a is None else spec.q_a).out_features, spec.kv_rank, spec.rope_dim], dim=1
        )
        if self.q is not None and self.q_norm is not None:
            queries = self.q(self.q_norm(queries.contiguous()))
        nope, turning = queries.view(len(queries), spec.heads, -1).split([spec.nope_dim, spec.rope_dim], dim=-1)
        latent, weight = norm_later(self.kv_norm, latent, self.kv_norm.eps)
        turned = self.ops.latent_write(
            turning,
            latent,
            shared,
            cache.k,
            step.slots[spec.group],
            *step.rope[spec.rope],
            weight,
            self.kv_norm.eps,
            cache.bits,
            cache.k_params,
        )
        few, many = self._parts(step)
        if few is not None and few.tokens is None:
            return self.o(self._absorbed(nope, turned, cache, few).flatten(1))
        out = torch.empty(len(turned), spec.heads, spec.v_dim, dtype=turned.dtype, device=turned.device)
        if few is not None:
            out[few.tokens] = self._absorbed(nope[few.tokens], turned[few.tokens], cache, few)
        for sequence in many:
            start, stop = step.batch.cu_seqlens[sequence : sequence + 2].tolist()
            q = torch.cat([nope[start:stop], turned[start:stop]], dim=-1)
            out[start:stop] = self._expanded(q, self._context(cache, step, sequence, turned.dtype))
        return self.o(out.flatten(1))

    @property
    def break_even(self) -> float:
        """New tokens from which a sequence costs less expanded: by the products of a query and a key in either form,
        and those that make a key and its value."""
        spec = self.spec
        saved = 2 * spec.kv_rank - spec.nope_dim - spec.v_dim
        return spec.kv_rank * (spec.nope_dim + spec.v_dim) / saved if saved > 0 else float("inf")

    def _parts(self, step: StepContext) -> tuple[Part | None, list[int]]:
        """(the sequences with few new tokens, the numbers of the others); found once a step for all layers alike."""
        kind = (self.spec.group, None)
        found = step.shared.get((kind, self.break_even))
        if found is None:
            batch, new = step.batch, np.diff(step.batch.cu_seqlens)
            many = np.flatnonzero(new > self.break_even) if self.ops.plan_attention is not None else new[:0]
            few = np.setdiff1d(np.arange(len(new)), many)
            if not len(many):
                table, plan = batch.block_tables[kind[0]], step.plans[kind]
                part: Part | None = Part(None, table, batch.cu_seqlens, batch.seq_lens, plan)
            else:
                part = self._part(step, few, new) if len(few) else None
            found = step.shared[kind, self.break_even] = (part, many.tolist())
        return found

    def _part(self, step: StepContext, few: np.ndarray, new: np.ndarray) -> Part:
        batch, group = step.batch, self.spec.group
        device = step.slots[group].device
        tokens = np.flatnonzero(np.isin(np.repeat(np.arange(len(new)), new), few))
        cu = np.concatenate([[0], np.cumsum(new[few])]).astype(np.int32)
        table, lens = batch.block_tables[group][few], batch.seq_lens[few]
        return Part(torch.from_numpy(tokens).to(device), table, cu, lens, step.plan_of(group, None, table, cu, lens))

    def _absorbed(self, nope: Tensor, turned: Tensor, cache: LayerCache, part: Part) -> Tensor:
        """[tokens, heads, v_dim]."""
        inner = torch.bmm(nope.transpose(0, 1), self.keys).transpose(0, 1)
        y = self.ops.paged_attention(
            torch.cat([inner, turned], dim=-1),
            cache.k,
            cache.v,
            part.table,
            part.cu_seqlens,
            part.seq_lens,
            self.spec.scale,
            bits=cache.bits,
            k_params=cache.k_params,
            v_params=cache.v_params,
            plan=part.plan,
            latent=self.spec.kv_rank,
        )
        return torch.bmm(y.transpose(0, 1), self.values.transpose(1, 2)).transpose(0, 1)

    def _context(self, cache: LayerCache, step: StepContext, sequence: int, dtype: torch.dtype) -> Tensor:
        """The rows of a sequence so far, [keys, kv_rank + rope_dim]."""
        size = step.cache.block_size
        at = torch.arange(int(step.batch.seq_lens[sequence]), device=cache.k.device)
        index = step.tables[self.spec.group][sequence][at // size].long() * size + at % size
        rows = slots_of(cache.k).index_select(0, index)
        if cache.bits:
            assert cache.k_params is not None
            rows = dequantize_heads(rows, cache.k_params.flatten(0, 1).index_select(0, index), cache.bits, dtype)
        elif is_float8(cache.k.dtype):
            rows = rows.view(cache.k.dtype).to(dtype)
        return rows[:, 0]

    def _expanded(self, q: Tensor, rows: Tensor) -> Tensor:
        """Attention of the last tokens of a sequence, ``q`` [tokens, heads, qk_dim]. Returns [tokens, heads, v_dim]."""
        spec, out = self.spec, []
        latent, shared = rows[:, : spec.kv_rank], rows[:, spec.kv_rank :]
        width = max(spec.qk_dim, spec.v_dim)
        step = max(1, EXPANDED // (2 * width * len(rows)))
        for first in range(0, spec.heads, step):
            heads = slice(first, first + step)
            k = torch.matmul(latent, self.keys[heads].transpose(1, 2))
            k = torch.cat([k, shared.expand(len(k), *shared.shape)], dim=-1)
            v = torch.matmul(latent, self.values[heads].transpose(1, 2))
            mine = q[:, heads].transpose(0, 1)
            # torch's fused attention takes heads of one size
            mine, k, v = (F.pad(t, (0, width - t.shape[-1])) for t in (mine, k, v))
            out.append(_causal(mine, k, v, spec.scale)[..., : spec.v_dim])
        return torch.cat(out).transpose(0, 1)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of the last positions, ``q`` [heads, tokens, width], to ``k`` and ``v`` [heads, keys, width]."""
    before = k.shape[1] - q.shape[1]
    if before == 0:
        return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, scale=scale)[0]
    out = []
    for start in range(0, q.shape[1], QUERIES):
        rows = q[:, start : start + QUERIES]
        keys = before + start + rows.shape[1]
        at = torch.arange(before + start, keys, device=q.device)[:, None]
        seen = torch.arange(keys, device=q.device) <= at
        parts = (rows[None], k[None, :, :keys], v[None, :, :keys])
        out.append(F.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale)[0])
    return torch.cat(out, dim=1)
