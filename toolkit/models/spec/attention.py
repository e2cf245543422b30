"""Multi-head attention with grouped keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import later
from toolkit.models.spec import sound
from toolkit.models.spec.keeps import Paged
from toolkit.models.spec.mixer import MixerSpec, Rotary
from toolkit.models.spec.parts import AlibiSpec, LinearSpec, NormSpec, PositionBias, QueryScale, RopeSpec, Spread
from toolkit.models.spec.share import Cut, Share, Unit, by, cut_linears, own_heads, unfit


@dataclass(frozen=True)
class AttentionSpec(MixerSpec):
    """Multi-head attention with grouped keys and values.

    ``scale`` multiplies q·k; ``softcap`` c turns scores s into c·tanh(s/c); ``window`` w lets position p see
    keys in (p - w, p], or where ``chunked`` those from the last multiple of w on (Llama 4); ``sinks`` names a per-head
    logit added to the softmax denominator (or None). ``group`` indexes ``DecoderSpec.cache_groups``. ``alibi`` raises
    scores by the distance of keys. ``clip`` c keeps projections within ±c, before anything else; ``norm_last``: q and k
    are normed when they are turned, not before (Hunyuan). ``gate``: what comes of all heads is multiplied by
    sigmoid(gate(x)) before ``o`` reads it (Qwen3-Next). ``block`` b: position p sees the other keys of its own b
    positions too, which begin at a multiple of b, those behind it included (SDAR).
    ``mutual``: p sees every key of the text, with a ``window`` w those in (p - w, p + w); ``alibi`` then
    lowers scores by the distance on both sides (BERT, ModernBERT, jina v2). ``position_bias``: of such texts
    alone (MPNet).
    ``sink_tokens`` s: beside a window w of (p - w, p], where p is s + w or more, the first s positions are seen, as by
    a query at s + w - 1: as if they stood right before the window; below, p sees all (StreamingLLM).
    ``strict``: tokens of a picture see none behind them here, whatever ``VisionSpec.mutual`` says.
    ``v`` may be ``k``: values are then what keys were before norm and rope. ``v_norm``: of each head of them (Gemma 4).
    ``o_norm``: of what ``o`` reads, all heads at once (BitNet).
    """

    q: LinearSpec
    k: LinearSpec
    v: LinearSpec
    o: LinearSpec
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    q_norm: NormSpec | None = None
    k_norm: NormSpec | None = None
    window: int | None = None
    softcap: float | None = None
    sinks: str | None = None
    group: int = 0
    chunked: bool = later(False)
    alibi: AlibiSpec | None = later(None)
    clip: float | None = later(None)
    norm_last: bool = later(False)
    q_scale: QueryScale | None = later(None)
    gate: LinearSpec | None = later(None)
    block: int = later(1)
    mutual: bool = later(False)
    sink_tokens: int = later(0)
    v_norm: NormSpec | None = later(None)
    o_norm: NormSpec | None = later(None)
    strict: bool = later(False)
    position_bias: PositionBias | None = later(None)
    kind: Literal["attention"] = "attention"

    def linears(self) -> tuple[LinearSpec, ...]:
        return (*self.readers(), self.o)

    def readers(self) -> tuple[LinearSpec, ...]:
        v = () if self.v == self.k else (self.v,)
        return (self.q, self.k, *v, *(() if self.gate is None else (self.gate,)))

    def width(self, hidden: int) -> int:
        return (4 * self.heads + 4 * self.kv_heads) * self.head_dim

    def norms(self) -> tuple[NormSpec, ...]:
        return tuple(n for n in (self.q_norm, self.k_norm, self.v_norm, self.o_norm) if n is not None)

    def vectors(self) -> dict[str, int]:
        return {} if self.sinks is None else {self.sinks: self.heads}

    def common(self) -> dict[str, tuple[int, ...]]:
        bias = self.position_bias
        return {} if bias is None else {bias.name: (bias.buckets, self.heads)}

    def ropes(self) -> tuple[RopeSpec, ...]:
        return () if self.rope is None else (self.rope,)

    def rotary(self) -> dict[str, Rotary]:
        if self.rope is None:
            return {}
        turned = (self.q, self.k, self.q_norm, self.k_norm)
        names = (x.name for x in turned if x is not None)
        return dict.fromkeys(names, Rotary(self.head_dim, 0, self.rope.rotary_dim))

    def keeps(self) -> Paged:
        # a text whose tokens see each other is computed in one step: nothing of it leaves a window
        window = None if self.mutual else self.window
        return Paged(self.kv_heads, self.head_dim, window, self.chunked, self.sink_tokens)

    def unshared(self, world: int, unit: Unit) -> str | None:
        return unfit(self.heads, self.kv_heads, self.o, self.head_dim, world, unit)

    def share(self, rank: int, world: int, unit: Unit) -> Share:
        """Heads of its own."""
        whose, whose_kv = own_heads(self.heads, self.kv_heads, rank, world)
        (first, stop), (first_kv, stop_kv) = whose, whose_kv
        heads, kv_heads = stop - first, stop_kv - first_kv
        own, kept = by(self.head_dim, whose, whose_kv)
        made, cuts = cut_linears(self, q=[own], k=[kept], v=[kept], o=[own], gate=[own])
        norms: dict[str, Any] = {}
        for name, norm, part, count in (("q_norm", self.q_norm, own, heads), ("k_norm", self.k_norm, kept, kv_heads)):
            if norm is None:
                continue
            if norm.heads > 1:
                norms[name] = replace(norm, heads=count)
                cuts |= dict.fromkeys(norm.vectors(), Cut("rows", *part))
            elif norm.size != self.head_dim:  # over all heads, of which several ranks may have the same
                whole = norm.size * (world // self.kv_heads if name == "k_norm" and self.kv_heads < world else 1)
                norms[name] = replace(norm, size=part[1] - part[0], spread=Spread(whole))
                cuts |= dict.fromkeys(norm.vectors(), Cut("rows", *part))
        if self.o_norm is not None:
            norms["o_norm"] = replace(self.o_norm, size=own[1] - own[0], spread=Spread(self.o_norm.size))
            cuts |= dict.fromkeys(self.o_norm.vectors(), Cut("rows", *own))
        if self.sinks is not None:
            cuts[self.sinks] = Cut("rows", first, stop)
        alibi = self.alibi and replace(self.alibi, slopes=self.alibi.slopes[first:stop])
        mixer = replace(self, heads=heads, kv_heads=kv_heads, alibi=alibi, **made, **norms)
        return Share(mixer, cuts)

    def check(self, hidden: int) -> None:
        q_size, kv_size = sound.projections(self, hidden)
        if self.q_norm is not None:
            sound.norm(self.q_norm, self.head_dim, q_size, heads=self.heads)
        if self.k_norm is not None:
            sound.norm(self.k_norm, self.head_dim, kv_size, heads=self.kv_heads)
        if self.v_norm is not None:
            sound.norm(self.v_norm, self.head_dim)
        if self.o_norm is not None:
            sound.norm(self.o_norm, q_size)
        over_all = self.k_norm is not None and self.k_norm.size != self.head_dim
        apart = self.v != self.k or not (self.norm_last or over_all or self.rope is None)
        sound.expect(
            "v", apart, self.v.name, "another than k without a rope, or with norm_last or a norm over all heads"
        )
        for name, limit in (("softcap", self.softcap), ("clip", self.clip)):
            sound.expect(name, limit is None or limit > 0, limit, "a number above 0")
        sound.expect("chunked", not self.chunked or self.window is not None, self.chunked, "false without a window")
        alone = self.window is not None and not (self.chunked or self.mutual or self.norm_last or self.q_scale)
        found = f"{self.sink_tokens} beside a window that slides, positions as they are and no norm behind the rope"
        sound.expect("sink_tokens", not self.sink_tokens or alone, self.sink_tokens, f"0, or {found}")
        sound.expect("block", self.block == 1 or self.window is None, self.block, "1 beside a window")
        odd = self.chunked or self.block > 1 or self.softcap is not None or self.sinks is not None
        sound.expect("mutual", not (self.mutual and odd), self.mutual, "false beside chunked, block, softcap or sinks")
        ahead = self.mutual or self.block > 1
        sound.expect("strict", not (self.strict and ahead), self.strict, "false where tokens see those behind them")
        plain = self.alibi is None or not (self.mutual and self.alibi.rounded)
        sound.expect("alibi", plain, "rounded", "none that is rounded where tokens see each other")
        if self.alibi is not None:
            count = len(self.alibi.slopes)
            sound.expect("alibi", count == self.heads, f"{count} slopes", f"{self.heads}, one a head")
            for name, other in (("softcap", self.softcap), ("sinks", self.sinks)):
                sound.expect(name, other is None, other, "none beside alibi")
        if (bias := self.position_bias) is not None:
            alone = self.mutual and self.alibi is None
            sound.expect("position_bias", alone, bias.name, "none but where tokens see each other, without alibi")
            steps = bias.buckets % 4 == 0 and bias.buckets // 4 < bias.distance
            sound.expect("buckets", steps, bias.buckets, f"a multiple of 4, below 4 times {bias.distance}")
        if (q := self.q_scale) is not None:
            sound.expect("q_scale", q.form == "floor" or q.length > 1, q.length, "a length above 1")
            sound.expect("q_scale", q.factor >= 0, q.factor, "a factor of 0 or more")
        if self.rope is not None:
            sound.rope(self.rope, self.head_dim)
