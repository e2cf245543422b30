"""A layer for multi-token prediction (MTP): of a model's hidden state and the token drawn from it, what comes next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolkit.base.record import plain, read
from toolkit.models.spec.check import check_spec
from toolkit.models.spec.decoder import DecoderSpec
from toolkit.models.spec.parts import LinearSpec, NormSpec


@dataclass(frozen=True)
class MtpSpec:
    """The layer reads ``join([token_norm(embedding), state_norm(state)])``.

    ``layer``: the model as one of this layer alone; its embedding and head are the model's, its final norm stands
    between the layer and the head. The state of a token that is known is the model's hidden state behind
    ``model_norm``, its final norm; that of a guess is what the layer made of the token before, behind the layer's final
    norm where ``normed``. Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), 2.2; vLLM for the norms.
    """

    layer: DecoderSpec
    model_norm: NormSpec
    token_norm: NormSpec
    state_norm: NormSpec
    join: LinearSpec
    normed: bool = False

    def numbers(self) -> dict[str, int]:
        """What is there beside the layer, without the model's own norm: name → numbers in it."""
        return {
            self.token_norm.name: self.token_norm.size,
            self.state_norm.name: self.state_norm.size,
            self.join.name: self.join.in_features * self.join.out_features,
        }

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, fields by name."""
        found: dict[str, Any] = plain(self)
        return found

    @staticmethod
    def from_json(data: dict[str, Any]) -> MtpSpec:
        """Inverse of ``to_json``. Raises ValueError for unknown or missing fields and for impossible numbers."""
        spec = read(MtpSpec, data)
        check_spec(spec.layer)
        h, norms = spec.layer.hidden_size, (spec.model_norm, spec.token_norm, spec.state_norm)
        if (spec.join.in_features, spec.join.out_features) != (2 * h, h) or any(norm.size != h for norm in norms):
            raise ValueError(f"join, norms: expected those of a width of {h}")
        return spec
