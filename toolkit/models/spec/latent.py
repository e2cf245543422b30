"""Multi-head latent attention. DeepSeek-V2 (arXiv 2405.04434)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import sound
from toolkit.models.spec.keeps import Latent
from toolkit.models.spec.mixer import MixerSpec, Rotary
from toolkit.models.spec.parts import LinearSpec, NormSpec, RopeSpec
from toolkit.models.spec.share import Share, Unit, by, cut_linears, portion, unfit_heads, unfit_inputs


@dataclass(frozen=True)
class LatentSpec(MixerSpec):
    """Attention whose keys and values are made from one small vector of each token, which alone is kept.

    ``q`` gives for each head ``nope_dim`` numbers, then ``rope_dim`` that turn; it reads the input, or where ``q_a`` is
    given ``q_a_norm(q_a(x))``. ``kv_a`` gives ``kv_rank`` numbers, the latent, then ``rope_dim`` that turn, a key that
    all heads share. ``kv_b`` makes of ``kv_a_norm(latent)`` for each head ``nope_dim`` numbers of its key, then
    ``v_dim`` of its value. ``scale`` multiplies q·k; ``o`` reads the heads' values.

    Two forms give the same: expanded, keys and values of each head are made from the rows kept, and attention is
    ordinary; absorbed, ``kv_b``'s key part multiplies the queries and its value part what attention to the rows
    themselves gives. That takes ``kv_b`` from both sides, so that runners hold it as a matrix, whatever form it is
    stored in (``matrices``).
    """

    q_a: LinearSpec | None
    q_a_norm: NormSpec | None
    q: LinearSpec
    kv_a: LinearSpec
    kv_a_norm: NormSpec
    kv_b: LinearSpec
    o: LinearSpec
    heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    kv_rank: int
    scale: float
    rope: RopeSpec
    group: int = 0
    kind: Literal["latent"] = "latent"

    @property
    def qk_dim(self) -> int:
        """Numbers of a head's query and key."""
        return self.nope_dim + self.rope_dim

    def linears(self) -> tuple[LinearSpec, ...]:
        queries = (self.q,) if self.q_a is None else (self.q_a, self.q)
        return (*queries, self.kv_a, self.kv_b, self.o)

    def readers(self) -> tuple[LinearSpec, ...]:
        return self.q if self.q_a is None else self.q_a, self.kv_a

    def matrices(self) -> tuple[LinearSpec, ...]:
        return (self.kv_b,)

    def adaptable(self) -> tuple[LinearSpec, ...]:
        return tuple(x for x in self.linears() if x is not self.kv_b)

    def width(self, hidden: int) -> int:
        return self.heads * (3 * self.qk_dim + 2 * self.v_dim + 2 * (self.kv_rank + self.rope_dim))

    def norms(self) -> tuple[NormSpec, ...]:
        return (self.kv_a_norm,) if self.q_a_norm is None else (self.q_a_norm, self.kv_a_norm)

    def ropes(self) -> tuple[RopeSpec, ...]:
        return (self.rope,)

    def rotary(self) -> dict[str, Rotary]:
        return {
            self.q.name: Rotary(self.qk_dim, self.nope_dim, self.rope.rotary_dim),
            self.kv_a.name: Rotary(self.kv_rank + self.rope_dim, self.kv_rank, self.rope.rotary_dim),
        }

    def keeps(self) -> Latent:
        return Latent(self.kv_rank + self.rope_dim)

    def unshared(self, world: int, unit: Unit) -> str | None:
        if (reason := unfit_heads(self.heads, 1, world)) is not None:
            return reason
        return unfit_inputs(self.o, by(self.v_dim, *(portion(self.heads, rank, world) for rank in range(world))), unit)

    def share(self, rank: int, world: int, unit: Unit) -> Share:
        """Heads of its own; all ranks make and keep the same rows."""
        heads = portion(self.heads, rank, world)
        made, cuts = cut_linears(
            self, q=by(self.qk_dim, heads), kv_b=by(self.nope_dim + self.v_dim, heads), o=by(self.v_dim, heads)
        )
        return Share(replace(self, heads=heads[1] - heads[0], **made), cuts)

    def check(self, hidden: int) -> None:
        q_in, q_size = hidden, self.heads * self.qk_dim
        sound.expect("q_a_norm", (self.q_a is None) == (self.q_a_norm is None), self.q_a_norm, "one where q_a is given")
        if self.q_a is not None and self.q_a_norm is not None:
            q_in = self.q_a.out_features
            sound.linear(self.q_a, hidden, q_in)
            sound.norm(self.q_a_norm, q_in)
        sound.linear(self.q, q_in, q_size)
        sound.linear(self.kv_a, hidden, self.kv_rank + self.rope_dim)
        sound.norm(self.kv_a_norm, self.kv_rank)
        sound.linear(self.kv_b, self.kv_rank, self.heads * (self.nope_dim + self.v_dim))
        sound.expect(self.kv_b.name, not self.kv_b.bias, self.kv_b.bias, "no bias")
        sound.linear(self.o, self.heads * self.v_dim, hidden)
        sound.rope(self.rope, self.rope_dim)
