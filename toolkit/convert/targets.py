"""What ``convert`` can pack for. A target is a name, a packer and what it needs; adding one is one entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.engine import TORCH_TARGET, Arrays
from toolkit.artifacts.engine_torch import pack_torch
from toolkit.errors import UsageError
from toolkit.models.spec import DecoderSpec

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import Weight

Packer = Callable[[DecoderSpec, Iterable[tuple[str, "Weight | Tensor"]], dict[str, dict[str, Any]]], Arrays]


@dataclass(frozen=True)
class Target:
    """``pack(spec, canonical weights, params)`` yields the arrays and fills ``params``; ``unsupported(spec)`` tells why
    a model cannot be packed so, or None.
    """

    name: str
    summary: str
    pack: Packer
    unsupported: Callable[[DecoderSpec], str | None]


def _torch_pack(
    spec: DecoderSpec, weights: Iterable[tuple[str, Weight | Tensor]], params: dict[str, dict[str, Any]]
) -> Arrays:
    return pack_torch(weights, params)


# In order of preference for "auto".
TARGETS: tuple[Target, ...] = (
    Target(TORCH_TARGET, "any model, for the pytorch backend", _torch_pack, lambda spec: None),
)


def choose_target(name: str, spec: DecoderSpec) -> Target:
    """The target called ``name``, or for "auto" the first that can hold the model. Raises UsageError."""
    if name == "auto":
        return next(target for target in TARGETS if target.unsupported(spec) is None)
    found = next((target for target in TARGETS if target.name == name), None)
    if found is None:
        known = ", ".join(target.name for target in TARGETS)
        raise UsageError(f"--target: expected auto, {known}, found {name!r}")
    if reason := found.unsupported(spec):
        raise UsageError(f"--target {name}: {reason}; use --target auto")
    return found
