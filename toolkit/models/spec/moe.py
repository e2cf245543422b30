"""A router and its experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from toolkit.models.spec import sound
from toolkit.models.spec.mixer import MixerSpec
from toolkit.models.spec.mlp import MlpSpec
from toolkit.models.spec.parts import LinearSpec


@dataclass(frozen=True)
class MoeSpec(MixerSpec):
    """Router and experts. Scores are softmax or sigmoid of the router's logits in float32; the ``top_k`` best
    experts are weighted by their scores, rescaled to sum 1 where ``norm_topk``, times ``scale``.
    ``shared`` runs on every token; its output is weighted by sigmoid(shared_gate(x)) where given.
    """

    router: LinearSpec
    experts: tuple[MlpSpec, ...]
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk: bool = True
    scale: float = 1.0
    shared: MlpSpec | None = None
    shared_gate: LinearSpec | None = None
    kind: Literal["moe"] = "moe"

    def mlps(self) -> tuple[MlpSpec, ...]:
        """The experts, then the shared one."""
        return self.experts if self.shared is None else (*self.experts, self.shared)

    def linears(self) -> tuple[LinearSpec, ...]:
        gate = () if self.shared_gate is None else (self.shared_gate,)
        return (self.router, *(x for m in self.mlps() for x in m.linears()), *gate)

    def readers(self) -> tuple[LinearSpec, ...]:
        return tuple(x for m in self.mlps() for x in m.readers())

    def input_name(self) -> str:
        return self.router.name

    def width(self, hidden: int) -> int:
        return self.top_k * (3 * self.experts[0].up.out_features + 4 * hidden)

    def adaptable(self) -> tuple[LinearSpec, ...]:
        gate = () if self.shared_gate is None else (self.shared_gate,)
        return () if self.shared is None else (*self.shared.linears(), *gate)

    def routers(self) -> tuple[LinearSpec, ...]:
        return (self.router,) if self.shared_gate is None else (self.router, self.shared_gate)

    def check(self, hidden: int) -> None:
        sound.expect("experts", bool(self.experts), 0, "at least one")
        sound.expect("top_k", self.top_k <= len(self.experts), self.top_k, f"at most {len(self.experts)}")
        sound.linear(self.router, hidden, len(self.experts))
        for expert in self.experts:
            expert.check(hidden)
            inner, found = self.experts[0].up.out_features, expert.up.out_features
            sound.expect(expert.up.name, found == inner, found, f"{inner}, as in expert 0")
        if self.shared is not None:
            self.shared.check(hidden)
        if self.shared_gate is not None:
            sound.linear(self.shared_gate, hidden, 1)
