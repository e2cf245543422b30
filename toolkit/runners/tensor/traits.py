"""What kernels are asked of a model beside sizes, so that those which lack it are not chosen."""

from __future__ import annotations

from typing import Any

from toolkit.models.spec import DecoderSpec, MoeSpec


def model_traits(spec: DecoderSpec) -> dict[str, Any]:
    """Traits of targets, without those that most models have not either."""
    found: dict[str, Any] = {}
    if any(a.chunked for _, a in spec.attention_layers()):
        found["chunked"] = True
    if any(a.block > 1 for _, a in spec.attention_layers()):
        found["block"] = True
    if any(a.alibi is not None for _, a in spec.attention_layers()):
        found["alibi"] = True
    if any(m.kind == "moe" and routes_specially(m) for _, m in spec.mixers()):
        found["routing"] = "more"
    return found


def routes_specially(spec: MoeSpec) -> bool:
    """Whether ``moe_route`` has to know more than scores and how many are chosen."""
    return spec.scoring == "sparsemixer" or spec.groups > 1 or spec.correction is not None
