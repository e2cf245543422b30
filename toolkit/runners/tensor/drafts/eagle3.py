"""A draft head (EAGLE-3) on the tensor runner's device, in float32; ``native/draft/eagle3.py`` has the host's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.artifacts.drafts.draft_head import HeadSpec
from toolkit.models.rope import inv_freq
from toolkit.runners.drafts.head import F32, I64, Drawn, Rows, Words

QUERIES = 256  # of a text, whose scores are held at once


class Kept:
    """Of one text keys and values of its rows ``first``, ``first`` + 1 …, ``length`` of them."""

    def __init__(self, spec: HeadSpec, first: int, device: torch.device) -> None:
        self.first, self.length = first, 0
        self.both = torch.empty(2, spec.kv_heads, 64, spec.head_dim, device=device)

    @property
    def nbytes(self) -> int:
        return self.both.nbytes

    def add(self, keys: Tensor, values: Tensor) -> None:
        """Behind the last: [rows, kv heads, head_dim]."""
        end, room = self.length + len(keys), self.both.shape[2]
        if end > room:
            more = self.both.new_empty(*self.both.shape[:2], max(end, 2 * room) - room, self.both.shape[3])
            self.both = torch.cat([self.both, more], 2)
        self.both[:, :, self.length : end] = torch.stack([keys, values]).transpose(1, 2)
        self.length = end


class TorchHead:
    """``weights``: called at every load, by the names of ``HeadSpec.shapes``, float32; ``words``: its
    embedding, on the host."""

    name = "eagle3"

    def __init__(
        self,
        spec: HeadSpec,
        weights: Callable[[], Mapping[str, F32]],
        words: Words,
        d2t: I64 | None,
        device: torch.device,
    ) -> None:
        self.spec, self.width = spec, spec.hidden_size
        self._weights, self._words, self._device = weights, words, device
        ids = np.arange(spec.draft_vocab_size)
        self._ids = torch.from_numpy(ids if d2t is None else ids + d2t).to(device)
        freq, self._factor = inv_freq(spec.rope)
        self._freq = torch.from_numpy(freq).to(device)
        self._w: dict[str, Tensor] = {}
        self.wake()

    # -- texts

    def open(self, first: int) -> Kept:
        return Kept(self.spec, first, self._device)

    def grow(self, text: Kept, count: int) -> bool:
        return True

    def forget(self, text: Kept) -> None:
        """Its memory goes with it."""

    def release(self) -> None:
        self._w = {}

    def wake(self) -> None:
        if not self._w:
            self._w = {name: torch.from_numpy(w).to(self._device) for name, w in self._weights().items()}

    def close(self) -> None:
        self.release()

    # -- steps

    @torch.inference_mode()
    def fuse(self, states: F32) -> F32:
        """As ``Head``."""
        s, x = self.spec, self._put(states)
        if s.fc_norm:
            x = torch.stack([self._rms(x[:, i], f"fc_norm.{i}.weight") for i in range(x.shape[1])], 1)
        x = x.flatten(1)
        if s.norm_before_fc:
            x = self._rms(x, "input_norm.weight")
        return self._back(self._linear(x, "fc.weight"))

    @torch.inference_mode()
    def step(self, ids: I64, states: F32, rows: Sequence[Rows]) -> Drawn:
        """As ``Head``."""
        s, at = self.spec, "layers.0."
        hidden = self._put(states)
        normed = self._rms(hidden, f"{at}hidden_norm.weight")
        words = self._rms(self._put(self._words(ids)), f"{at}input_layernorm.weight")
        x = (normed if s.norm_before_residual else hidden) + self._attend(torch.cat([words, normed], 1), rows)
        inner = self._rms(x, f"{at}post_attention_layernorm.weight")
        gate = F.silu(self._linear(inner, f"{at}mlp.gate_proj.weight"))
        x = x + self._linear(gate * self._linear(inner, f"{at}mlp.up_proj.weight"), f"{at}mlp.down_proj.weight")
        last = torch.from_numpy(np.cumsum([r.count for r in rows]) - 1).to(self._device)
        x = x.index_select(0, last)
        normed = self._rms(x, "norm.weight")
        logits = self._linear(normed, "lm_head.weight")
        top, best = logits.max(1)
        sure = 1 / (logits - top[:, None]).exp().sum(1)
        return Drawn(self._back(normed if s.norm_output else x), self._back(self._ids[best]), self._back(sure))

    def _attend(self, x: Tensor, rows: Sequence[Rows]) -> Tensor:
        s, at = self.spec, "layers.0.self_attn."
        q, k, v = (self._linear(x, f"{at}{n}_proj.weight").unflatten(1, (-1, s.head_dim)) for n in "qkv")
        if s.qk_norm:
            q, k = self._rms(q, f"{at}q_norm.weight"), self._rms(k, f"{at}k_norm.weight")
        places = np.concatenate([r.kept.first + r.kept.length + np.arange(r.count) for r in rows])
        angle = self._put(places.astype(np.float32))[:, None] * self._freq
        cos, sin = (angle.cos() * self._factor)[:, None], (angle.sin() * self._factor)[:, None]
        q, k = _turned(q, cos, sin), _turned(k, cos, sin)
        found, start = [], 0
        for r in rows:
            r.kept.add(k[start : start + r.count], v[start : start + r.count])
            found += [
                self._seen(q[start + a : start + min(a + QUERIES, r.count)], r.kept, r.kept.length - r.count + a)
                for a in range(0, r.count, QUERIES)
            ]
            start += r.count
        return self._linear(torch.cat(found), f"{at}o_proj.weight")

    def _seen(self, q: Tensor, kept: Kept, before: int) -> Tensor:
        """What queries [rows, heads, head_dim] of the rows behind the first ``before`` find -> [rows, …]."""
        end = before + len(q)
        keys, values = kept.both[:, None, :, :end]
        mask = torch.ones(len(q), end, dtype=torch.bool, device=q.device).tril_(before)
        out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], keys, values, mask, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._w[name])

    def _rms(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._w[name], self.spec.eps)

    def _put(self, x: F32) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self._device)

    @staticmethod
    def _back(x: Tensor) -> Any:
        return x.cpu().numpy()


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
