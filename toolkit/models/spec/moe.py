"""A router and its experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, cast

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import later
from toolkit.models.spec import sound
from toolkit.models.spec.mixer import MixerSpec
from toolkit.models.spec.mlp import MlpSpec
from toolkit.models.spec.parts import LinearSpec, NormSpec
from toolkit.models.spec.share import Cut, Share, Unit


@dataclass(frozen=True)
class Apart:
    """Norms of a mixture beside an MLP: of what the router, the experts and the ``shared`` MLP read, all of them the
    same input; and of what the experts give together, and the shared MLP, before both are added."""

    router: NormSpec
    experts: NormSpec
    shared: NormSpec
    experts_out: NormSpec
    shared_out: NormSpec

    def norms(self) -> tuple[NormSpec, ...]:
        return (self.router, self.experts, self.shared, self.experts_out, self.shared_out)


@dataclass(frozen=True)
class MoeSpec(MixerSpec):
    """Router and experts. Scores are softmax or sigmoid of the router's logits in float32; the ``top_k`` best
    experts are weighted by their scores, rescaled to sum 1 where ``norm_topk``, times ``scale``.
    ``shared`` runs on every token; its output is weighted by sigmoid(shared_gate(x)) where given.

    ``correction``: a number an expert, added to its score where experts are chosen, not where they are weighed.
    ``groups``: experts stand in so many equal groups, of which the ``top_groups`` best alone are chosen from, each as
    good as its best expert or its two best together (``group_score``). "sparsemixer" (Phi-3.5-MoE, ``top_k`` 2): each
    choice is weighed by the softmax over the logits left that are at most 2 · ``jitter`` of their size below the best.
    ``weigh_input``: weights multiply what an expert reads, not what it gives (Llama 4).
    ``apart``: norms of what each of them reads and gives. ``logit_scale`` multiplies the router's logits; ``each``
    names a number an expert, by which its weight is multiplied in the end (Gemma 4).
    """

    router: LinearSpec
    experts: tuple[MlpSpec, ...]
    top_k: int
    scoring: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    norm_topk: bool = True
    scale: float = 1.0
    shared: MlpSpec | None = None
    shared_gate: LinearSpec | None = None
    correction: str | None = later(None)
    groups: int = later(1)
    top_groups: int = later(1)
    group_score: Literal["best", "two"] = later("best")
    jitter: float = later(0.0)
    weigh_input: bool = later(False)
    apart: Apart | None = later(None)
    logit_scale: float = later(1.0)
    each: str | None = later(None)
    kind: Literal["moe"] = "moe"

    def mlps(self) -> tuple[MlpSpec, ...]:
        """The experts, then the shared one."""
        return self.experts if self.shared is None else (*self.experts, self.shared)

    def linears(self) -> tuple[LinearSpec, ...]:
        gate = () if self.shared_gate is None else (self.shared_gate,)
        return (self.router, *(x for m in self.mlps() for x in m.linears()), *gate)

    def readers(self) -> tuple[LinearSpec, ...]:
        return () if self.apart is not None else self._first(self.mlps())

    def inputs(self) -> tuple[tuple[LinearSpec, ...], ...]:
        if self.apart is None or self.shared is None:
            return super().inputs()
        return (self.routers(), *(self._first(mlps) for mlps, _ in self.normed()))

    def normed(self) -> tuple[tuple[tuple[MlpSpec, ...], NormSpec], ...]:
        """MLPs that read their input through a norm of their own, with it."""
        if self.apart is None or self.shared is None:
            return ()
        return ((self.experts, self.apart.experts), ((self.shared,), self.apart.shared))

    @staticmethod
    def _first(mlps: Sequence[MlpSpec]) -> tuple[LinearSpec, ...]:
        return tuple(x for m in mlps for x in m.readers())

    def input_name(self) -> str:
        return self.router.name

    def width(self, hidden: int) -> int:
        return self.top_k * (3 * self.experts[0].up.out_features + 4 * hidden)

    def adaptable(self) -> tuple[LinearSpec, ...]:
        gate = () if self.shared_gate is None else (self.shared_gate,)
        return () if self.shared is None else (*self.shared.linears(), *gate)

    def routers(self) -> tuple[LinearSpec, ...]:
        return (self.router,) if self.shared_gate is None else (self.router, self.shared_gate)

    def vectors(self) -> dict[str, int]:
        return {name: len(self.experts) for name in (self.correction, self.each) if name is not None}

    def norms(self) -> tuple[NormSpec, ...]:
        return () if self.apart is None else self.apart.norms()

    def unshared(self, world: int, unit: Unit) -> str | None:
        return next((why for m in self.mlps() if (why := m.unshared(world, unit)) is not None), None)

    def share(self, rank: int, world: int, unit: Unit) -> Share:
        """A part of every expert; all ranks route alike."""
        shares = [m.share(rank, world, unit) for m in self.mlps()]
        cuts: dict[str, Cut] = {}
        for part in shares:
            cuts |= part.cuts
        mlps = tuple(cast(MlpSpec, part.mixer) for part in shares)
        experts = mlps[: len(self.experts)]
        return Share(replace(self, experts=experts, shared=None if self.shared is None else mlps[-1]), cuts)

    def share_seats(self, own: Sequence[int], rank: int, world: int, unit: Unit) -> Share:
        """Whole experts, those of numbers ``own``; of the shared one a part."""
        shared = Share(None) if self.shared is None else self.shared.share(rank, world, unit)
        return Share(replace(self, experts=tuple(self.experts[i] for i in own), shared=shared.mixer), shared.cuts)

    def check(self, hidden: int) -> None:
        sound.expect("experts", bool(self.experts), 0, "at least one")
        sound.expect("top_k", self.top_k <= len(self.experts), self.top_k, f"at most {len(self.experts)}")
        sound.linear(self.router, hidden, len(self.experts))
        self._check_routing()
        for expert in self.experts:
            expert.check(hidden)
            sound.expect("gate_scale", expert.gate_scale == 1, expert.gate_scale, "1 for experts")
            sound.expect("seen", expert.seen is None, expert.seen, "none for experts")
            sound.expect("inner_norm", expert.inner_norm is None, "one", "none for experts")
            sound.expect("curve", expert.curve is None, expert.curve, "none for experts")
            inner, found = self.experts[0].up.out_features, expert.up.out_features
            sound.expect(expert.up.name, found == inner, found, f"{inner}, as in expert 0")
        if self.shared is not None:
            self.shared.check(hidden)
            sound.expect("inner_norm", self.shared.inner_norm is None, "one", "none beside experts")
        if self.shared_gate is not None:
            sound.linear(self.shared_gate, hidden, 1)
        if self.apart is not None:
            sound.expect(
                "apart", self.shared is not None and self.shared_gate is None, "alone", "a shared MLP beside it"
            )
            for norm in self.apart.norms():
                sound.norm(norm, hidden)

    def _check_routing(self) -> None:
        count = len(self.experts)
        sound.expect("groups", count % self.groups == 0, self.groups, f"a divisor of {count}")
        sound.expect("top_groups", self.top_groups <= self.groups, self.top_groups, f"at most {self.groups}")
        each = count // self.groups
        enough = self.top_k <= self.top_groups * each
        sound.expect("top_groups", enough, self.top_groups, f"groups that hold {self.top_k} experts")
        good = self.group_score == "best" or each >= 2
        sound.expect("group_score", good, self.group_score, "best, with one expert a group")
        sound.expect("jitter", self.jitter >= 0, self.jitter, "a number of 0 or more")
        if self.scoring == "sparsemixer":
            sound.expect("top_k", self.top_k == 2 and count > 1, self.top_k, "2 for sparsemixer, of several experts")
            plain = self.correction is None and self.groups == 1 and not self.norm_topk
            expected = "another: sparsemixer has no groups, correction or norm_topk"
            sound.expect("scoring", plain, self.scoring, expected)
