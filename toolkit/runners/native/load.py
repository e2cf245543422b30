"""What the native runner loads: packed weights, of whatever it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.models.spec import DecoderSpec
from toolkit.runners.native.packing.artifact import of_first_alone
from toolkit.runners.native.packing.packed import PackedTensor
from toolkit.runners.native.share import Parts, Share
from toolkit.runners.weights.info import info_of, reading_ahead

DTYPES = ("float32", "bfloat16", "float16")


def stored_dtype(value: Any) -> str:
    """The float type that a checkpoint's embedding is stored in; float16 scales speak for quantized ones."""
    if isinstance(value, PackedTensor):
        return str(value.meta.origin.get("stored") or DTYPES[value.meta.dtype])
    tensor = getattr(value, "weight", None)
    if tensor is None or not tensor.is_floating_point() or tensor.element_size() == 1:
        tensor = value.scales
    name = str(tensor.dtype).removeprefix("torch.")
    return name if name in DTYPES else "bfloat16"


def _are_packed(found: Mapping[str, Any]) -> bool:
    return isinstance(info_of(found, next(iter(found))), PackedTensor)


def outlines_of(spec: DecoderSpec, found: Mapping[str, Any]) -> Mapping[str, PackedTensor]:
    """What the weights are or will be packed to, without their bytes."""
    if _are_packed(found):
        return found
    from toolkit.runners.native.packing.pack_model import outlines

    return outlines(spec, found)


def packed_of(
    spec: DecoderSpec, found: Mapping[str, Any], share: Share, notes: list[str]
) -> tuple[Mapping[str, PackedTensor], list[str]]:
    """The weights of the language model as a rank has them, and a line for each kind that takes more bits than it has;
    ``notes``: those of weights that are packed already."""
    if _are_packed(found):
        return found, notes
    from toolkit.runners.native.packing.pack_model import gathered, pack_model

    made: list[str] = []
    own = [name for name in found if not of_first_alone(name)]
    parts = Parts(spec, {} if share.ranks == 1 else outlines_of(spec, found), share)
    with reading_ahead(found, set(own)):
        language = pack_model(spec, ((name, found[name]) for name in own), None, made)
        packed = {name: parts.kept(name, tensor.in_memory()) for name, tensor in language}
    return packed, gathered(made)
