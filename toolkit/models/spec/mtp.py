"""A layer that reads a model's hidden state and the token drawn from it, and says what comes next: the model's own
(multi-token prediction, MTP), or trained for it (EAGLE)."""

from __future__ import annotations

from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import plain, read
from toolkit.models.spec.check import check_spec
from toolkit.models.spec.decoder import DecoderSpec
from toolkit.models.spec.parts import LinearSpec, NormSpec


@dataclass(frozen=True)
class MtpSpec:
    """The layer reads ``join([token_norm(embedding), state_norm(state)])``; absent norms are identity.

    ``layer``: the model as one of this layer alone; its embedding and head are the model's, its final norm stands
    between the layer and the head. The state of a token that is known is the model's hidden state behind
    ``model_norm``, its final norm; that of a guess is what the layer made of the token before, behind the layer's final
    norm where ``normed``. ``bare``: the head reads what the layer gives itself; its final norm then only scales that,
    so that the likeliest token stays what it is. ``state_first``: the join reads the state before the embedding.
    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), 2.2; vLLM for the norms.
    """

    layer: DecoderSpec
    model_norm: NormSpec
    token_norm: NormSpec | None
    state_norm: NormSpec | None
    join: LinearSpec
    normed: bool = False
    bare: bool = False
    state_first: bool = False

    def norms(self) -> list[NormSpec]:
        """Those that stand before the layer, the model's own first."""
        return [norm for norm in (self.model_norm, self.token_norm, self.state_norm) if norm is not None]

    def numbers(self) -> dict[str, int]:
        """What is there beside the layer, without the model's own norm: name → numbers in it."""
        found = {norm.name: norm.size for norm in self.norms()[1:]}
        found |= {f"{self.join.name}.bias": self.join.out_features} if self.join.bias else {}
        return found | {self.join.name: self.join.in_features * self.join.out_features}

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, fields by name."""
        return dict(plain(self))

    @staticmethod
    def from_json(data: dict[str, Any]) -> MtpSpec:
        """Inverse of ``to_json``. Raises ValueError for unknown or missing fields and for impossible numbers."""
        spec = read(MtpSpec, data)
        check_spec(spec.layer)
        h = spec.layer.hidden_size
        if (spec.join.in_features, spec.join.out_features) != (2 * h, h) or any(n.size != h for n in spec.norms()):
            raise ValueError(f"join, norms: expected those of a width of {h}")
        return spec
