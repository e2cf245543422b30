"""What ``convert`` can pack for. A target is a name, a packer and what it needs; adding one is one entry here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.engine.artifact import TORCH_TARGET, Arrays
from toolkit.artifacts.engine.torch_target import pack_torch
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import UsageError
from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import RunnerOptions
from toolkit.runners.native.packing.artifact import CPU_TARGET, pack_cpu
from toolkit.runners.native.support import unsupported

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import Weight

CUDA_TARGETS = ("cuda-sm80", "cuda-sm90")  # one packing so far
Named = Iterable[tuple[str, "Weight | Tensor"]]
Params = dict[str, dict[str, Any]]
Packer = Callable[[DecoderSpec, Named, Params, "Bits", list[str]], Arrays]


@dataclass(frozen=True)
class Bits:
    """What is rounded while it is packed. ``head``: a dense head, None = as the target has it; ``vision``: the layers
    of what the model sees with, 16 = as stored."""

    head: int | None = None
    vision: int = 16


@dataclass(frozen=True)
class Target:
    """``pack(spec, canonical weights, params, bits, notes)`` yields the arrays and fills ``params``, and ``notes``
    with what takes more bits than it has.

    ``unsupported(spec)`` tells why a model cannot be packed so, or None. ``head_bits``: what a dense head (for target
    cpu and the embedding) is rounded to by default; None = it stays as stored and the option is refused.
    """

    name: str
    summary: str
    pack: Packer
    unsupported: Callable[[DecoderSpec], str | None]
    head_bits: int | None = None


def _in_integers(weights: Named) -> Named:
    """What has no kernels for trellis codes reads."""
    from toolkit.runners.weights.integers import integers

    return ((name, integers(value)) for name, value in weights)


def _torch_pack(spec: DecoderSpec, weights: Named, params: Params, bits: Bits, notes: list[str]) -> Arrays:
    return pack_torch(_in_integers(weights), params)


def _cpu_pack(spec: DecoderSpec, weights: Named, params: Params, bits: Bits, notes: list[str]) -> Arrays:
    return pack_cpu(spec, weights, params, head_bits=bits.head, vision_bits=bits.vision, notes=notes)


def _cuda_pack(spec: DecoderSpec, weights: Named, params: Params, bits: Bits, notes: list[str]) -> Arrays:
    from toolkit.runners.tensor.cuda_artifact import pack_cuda

    assert bits.head is not None
    return pack_cuda(spec, _in_integers(weights), params, bits.head)


def _cpu_unsupported(spec: DecoderSpec) -> str | None:
    return unsupported(spec, RunnerOptions(device="cpu"))


# In order of preference for "auto".
TARGETS: tuple[Target, ...] = (
    Target(CPU_TARGET, "tiles for the native runner on a CPU", _cpu_pack, _cpu_unsupported, head_bits=8),
    Target(TORCH_TARGET, "any model, for the pytorch backend", _torch_pack, lambda spec: None),
    *(Target(name, "tiles for the CUDA kernels", _cuda_pack, lambda spec: None, head_bits=16) for name in CUDA_TARGETS),
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
