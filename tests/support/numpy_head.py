"""A draft head (EAGLE-3) in numpy, float32: what others are compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.drafts.draft_head import HeadSpec
from toolkit.artifacts.weight_files.safetensors_file import widened
from toolkit.models.rope import inv_freq
from toolkit.runners.drafts.head import F32, I64, Drawn, Rows

QUERIES = 256  # of a text, whose scores are held at once


class KeysValues:
    """Of one text: those of its rows ``first``, ``first`` + 1 …, ``length`` of them."""

    def __init__(self, spec: HeadSpec, first: int) -> None:
        self.first, self.length = first, 0
        self._shape = spec.kv_heads, 64, spec.head_dim
        self.keys: F32 = np.empty(self._shape, np.float32)
        self.values: F32 = np.empty(self._shape, np.float32)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def add(self, keys: F32, values: F32) -> None:
        """Behind the last: [rows, kv heads, head_dim]."""
        end = self.length + len(keys)
        if end > self.keys.shape[1]:
            shape = self._shape[0], max(end, 2 * self.keys.shape[1]), self._shape[2]
            for name in ("keys", "values"):
                grown = np.empty(shape, np.float32)
                grown[:, : self.length] = getattr(self, name)[:, : self.length]
                setattr(self, name, grown)
        self.keys[:, self.length : end] = keys.transpose(1, 0, 2)
        self.values[:, self.length : end] = values.transpose(1, 0, 2)
        self.length = end


class Head:
    """``weights``: by the names of ``HeadSpec.shapes``, float32; ``embed``: the embedding as it is stored, float32,
    float16 or the bits of bfloat16."""

    name = "eagle3"

    def __init__(
        self,
        spec: HeadSpec,
        weights: Mapping[str, F32],
        embed: NDArray[Any],
        d2t: I64 | None,
    ) -> None:
        self.spec = spec
        self.width = spec.hidden_size
        self._norms = {name: w for name, w in weights.items() if w.ndim == 1}
        self._embed = embed
        ids = np.arange(spec.draft_vocab_size)
        self.ids: I64 = ids if d2t is None else ids + d2t  # in the model's vocabulary, of each of its own
        self._freq, self._factor = inv_freq(spec.rope)

        self._w = {name: np.ascontiguousarray(w.T) for name, w in weights.items() if w.ndim > 1}

    def open(self, first: int) -> KeysValues:
        return KeysValues(self.spec, first)

    def grow(self, text: KeysValues, count: int) -> bool:
        return True

    def forget(self, text: KeysValues) -> None:
        """Its memory goes with it."""

    def release(self) -> None:
        """Its weights stay."""

    def wake(self) -> None:
        """Nothing is gone."""

    def close(self) -> None:
        """Nothing is held but memory."""

    def step(self, ids: I64, states: F32, rows: Sequence[Rows]) -> Drawn:
        """As ``run``; of each text's last row what comes next."""
        hidden = self.run(ids, states, rows)[np.cumsum([r.count for r in rows]) - 1]
        logits = self.logits(hidden)
        best = logits.argmax(1)
        top = logits[np.arange(len(best)), best]
        return Drawn(hidden, self.ids[best], 1 / np.exp(logits - top[:, None]).sum(1))

    def fuse(self, states: F32) -> F32:
        """[rows, fused, hidden] of the model's hidden states → [rows, hidden]."""
        s = self.spec
        if s.fc_norm:
            states = np.stack([self._rms(states[:, i], f"fc_norm.{i}.weight") for i in range(states.shape[1])], 1)
        flat = states.reshape(len(states), -1)
        if s.norm_before_fc:
            flat = self._rms(flat, "input_norm.weight")
        return self._linear(flat, "fc.weight")

    def run(self, ids: I64, hidden: F32, rows: Sequence[Rows]) -> F32:
        """Rows of texts one after another: of each the token that came, [rows], and the hidden state before it, fused
        or this head's own, [rows, hidden]. Their keys and values are kept. Returns hidden states [rows, hidden]."""
        s = self.spec
        normed = self._rms(hidden, "layers.0.hidden_norm.weight")
        words = self._rms(self._words(ids), "layers.0.input_layernorm.weight")
        x = (normed if s.norm_before_residual else hidden) + self._attend(np.concatenate([words, normed], 1), rows)
        inner = self._rms(x, "layers.0.post_attention_layernorm.weight")
        gate, up = (self._linear(inner, f"layers.0.mlp.{n}_proj.weight") for n in ("gate", "up"))
        x = x + self._linear(gate / (1 + np.exp(-gate)) * up, "layers.0.mlp.down_proj.weight")
        return self._rms(x, "norm.weight") if s.norm_output else x

    def logits(self, hidden: F32) -> F32:
        """[rows, draft vocabulary] of what ``run`` returned."""
        x = hidden if self.spec.norm_output else self._rms(hidden, "norm.weight")
        return self._linear(x, "lm_head.weight")

    def _attend(self, x: F32, rows: Sequence[Rows]) -> F32:
        s = self.spec
        q, k, v = (
            self._linear(x, f"layers.0.self_attn.{n}_proj.weight").reshape(len(x), -1, s.head_dim) for n in "qkv"
        )
        if s.qk_norm:
            q = self._rms(q, "layers.0.self_attn.q_norm.weight")
            k = self._rms(k, "layers.0.self_attn.k_norm.weight")
        places = [r.kept.first + r.kept.length + np.arange(r.count) for r in rows]
        angle = np.concatenate(places).astype(np.float32)[:, None] * self._freq
        cos, sin = (np.cos(angle) * self._factor)[:, None], (np.sin(angle) * self._factor)[:, None]
        q, k = _turned(q, cos, sin) * np.float32(s.head_dim**-0.5), _turned(k, cos, sin)
        out = np.empty((len(x), s.heads, s.head_dim), np.float32)
        at = 0
        for r in rows:
            r.kept.add(k[at : at + r.count], v[at : at + r.count])
            for start in range(0, r.count, QUERIES):
                stop = min(start + QUERIES, r.count)
                seen = r.kept.length - r.count + stop
                out[at + start : at + stop] = _attended(q[at + start : at + stop], r.kept, seen)
            at += r.count
        return self._linear(out.reshape(len(x), -1), "layers.0.self_attn.o_proj.weight")

    def _linear(self, x: F32, name: str) -> F32:
        return x @ self._w[name]

    def _words(self, ids: I64) -> F32:
        return widened(self._embed[ids])

    def _rms(self, x: F32, name: str) -> F32:
        scale = np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(self.spec.eps))
        return x / scale * self._norms[name]


def _turned(x: F32, cos: F32, sin: F32) -> F32:
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _attended(q: F32, kept: KeysValues, seen: int) -> F32:
    """Queries [rows, heads, head_dim] of the last rows before ``seen`` → [rows, heads, head_dim]."""
    count, heads, size = q.shape
    kv = len(kept.keys)
    grouped = q.reshape(count, kv, heads // kv, size).transpose(1, 2, 0, 3).reshape(kv, -1, size)
    scores = (grouped @ kept.keys[:, :seen].transpose(0, 2, 1)).reshape(kv, heads // kv, count, seen)
    if count > 1:
        later = np.triu(np.ones((count, count), bool), 1)
        scores[..., seen - count :][..., later] = -np.inf
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    shares = (scores / scores.sum(-1, keepdims=True)).reshape(kv, -1, seen)
    found = (shares @ kept.values[:, :seen]).reshape(kv, heads // kv, count, size)
    return found.transpose(2, 0, 1, 3).reshape(count, heads, size)
