"""The head as it is trained: its parameters, and passes over whole samples in which it follows its own states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.artifacts.drafts.draft_head import HeadSpec
from toolkit.models.rope import inv_freq

Weights = dict[str, Tensor]


def first_weights(spec: HeadSpec, norm: Tensor, head: Tensor, seed: int) -> Weights:
    """Where training begins: it passes the latest of the hidden states on to the model's own ``norm`` [hidden] and to
    the rows of its ``head`` [draft vocabulary, hidden]; the layer is as random as any new one."""
    draw = torch.Generator().manual_seed(seed)
    found: Weights = {}
    for name, shape in spec.shapes(len(spec.layers)).items():
        if len(shape) == 1:
            found[name] = torch.ones(shape)
        else:
            found[name] = torch.randn(shape, generator=draw) * 0.02
    found["fc.weight"][:, -spec.hidden_size :] += torch.eye(spec.hidden_size)
    found["norm.weight"], found["lm_head.weight"] = norm.float().clone(), head.float().clone()
    return found


class Passes:
    """Passes over ``taps`` [batch, length, fused · hidden], the hidden states of samples ``ids`` [batch, length].

    Row i knows the tokens up to i + 1 and the hidden states up to i, as when the model has just drawn token i + 1. The
    first pass guesses token i + 2, each further one the next, from the state that the one before it left in place of
    the model's. Keys and values of further passes are their own row's alone: of others the model's states are known.
    """

    def __init__(self, spec: HeadSpec, weights: Weights, embed: Tensor, ids: Tensor, taps: Tensor) -> None:
        self._spec, self._weights, self._embed, self._ids = spec, weights, embed, ids
        self._rows = torch.arange(ids.shape[1] - 1, device=ids.device)
        self._hidden = F.linear(taps[:, :-1], weights["fc.weight"])
        freq, self._factor = inv_freq(spec.rope)
        self._freq = torch.from_numpy(freq).to(taps.device)
        later = self._rows > self._rows[:, None]
        self._hide = torch.zeros(later.shape, device=ids.device).masked_fill_(later, float("-inf"))
        self._keys: list[tuple[Tensor, Tensor]] = []

    def narrow(self, rows: Tensor) -> None:
        """Further passes are of these rows alone, [rows], of those of the last one."""
        self._rows, self._hide, self._hidden = self._rows[rows], self._hide[rows], self._hidden[:, rows]
        self._keys[1:] = [(k[:, :, rows], v[:, :, rows]) for k, v in self._keys[1:]]

    def next(self) -> Tensor:
        """Logits [batch, rows, draft vocabulary] of the next pass. Rows whose text ends before it say nothing."""
        s, w, depth = self._spec, self._weights, len(self._keys)
        last = self._ids.shape[1] - 1
        words = self._embed[self._ids[:, (self._rows + 1 + depth).clamp(max=last)]].to(self._hidden.dtype)
        hidden = _rms(self._hidden, w["layers.0.hidden_norm.weight"], s.eps)
        residual = hidden if s.norm_before_residual else self._hidden
        x = torch.cat([_rms(words, w["layers.0.input_layernorm.weight"], s.eps), hidden], -1)
        residual = residual + self._attend(x, depth)
        x = _rms(residual, w["layers.0.post_attention_layernorm.weight"], s.eps)
        inner = F.silu(F.linear(x, w["layers.0.mlp.gate_proj.weight"])) * F.linear(x, w["layers.0.mlp.up_proj.weight"])
        self._hidden = residual + F.linear(inner, w["layers.0.mlp.down_proj.weight"])
        return F.linear(_rms(self._hidden, w["norm.weight"], s.eps), w["lm_head.weight"])

    def _attend(self, x: Tensor, depth: int) -> Tensor:
        s, w = self._spec, self._weights
        q, k, v = (
            F.linear(x, w[f"layers.0.self_attn.{name}_proj.weight"]).unflatten(-1, (-1, s.head_dim)).transpose(1, 2)
            for name in "qkv"
        )
        angle = (self._rows + 1 + depth).float()[:, None] * self._freq
        cos, sin = angle.cos() * self._factor, angle.sin() * self._factor
        q, k = _turn(q, cos, sin) * s.head_dim**-0.5, _turn(k, cos, sin)
        repeat = s.heads // s.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        self._keys.append((k, v))
        keys, values = self._keys[0]
        own = [(q * mine).sum(-1, keepdim=True) for mine, _ in self._keys[1:]]
        shares = torch.cat([q @ keys.transpose(-1, -2) + self._hide, *own], -1).float().softmax(-1).to(x.dtype)
        found = shares[..., : values.shape[2]] @ values
        for i, (_, mine) in enumerate(self._keys[1:]):
            found = found + shares[..., values.shape[2] + i, None] * mine
        return F.linear(found.transpose(1, 2).flatten(2), w["layers.0.self_attn.o_proj.weight"])


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads of x [batch, heads, rows, head_dim]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
