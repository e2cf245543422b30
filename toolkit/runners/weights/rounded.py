"""A model's linears in 8 or 4 bits, rounded while they are read, without a text and without a file."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.artifacts.weight_files.reused_memory import ReusedMemory
from toolkit.base.named import Named
from toolkit.errors import ToolkitError, UsageError
from toolkit.runners.weights.info import info_of, reading_ahead, scales_of

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import Weight
    from toolkit.artifacts.scales import AllScales, Scales
    from toolkit.models.spec import DecoderSpec

GROUPS = (64, 32)  # inputs; the larger that divides a row
BITS = {"int8": 8, "int4": 4}  # by load format


def check_load_format(load_format: str, path: Path, method: str | None) -> None:
    """Raise UsageError where weights that ``method`` quantized already would be rounded."""
    if load_format in BITS and method not in (None, "gguf"):
        raise UsageError(f"load_format: found {load_format!r}, but {path} holds {method} weights already; leave it out")


def rounded(
    weights: Mapping[str, Weight | Tensor], spec: DecoderSpec, load_format: str
) -> Mapping[str, Weight | Tensor]:
    """``weights`` as ``load_format`` has them; in 4 bits they are scaled before."""
    if load_format not in BITS:
        return weights
    if load_format != "int4":
        return RoundedWeights(weights, spec, BITS[load_format])
    from toolkit.runners.weights.scaled import ScaledWeights

    scaled = ScaledWeights(weights, spec, GROUPS[-1])
    return RoundedWeights(scaled, spec, BITS[load_format], scaled.parts)


class RoundedWeights(Named["Weight | Tensor"]):
    """``weights`` of ``spec`` with the dense linears inside its layers rounded in groups to the nearest of 8 bits,
    symmetric, or of 4, with zeros; routers, linears that runners hold dense or whose rows no group divides, and what is
    quantized already stay as they are. ``parts``: of a dense linear, what is stored and what to do to its rows before
    they are rounded; None where nothing is."""

    def __init__(
        self,
        weights: Mapping[str, Weight | Tensor],
        spec: DecoderSpec,
        bits: int = 8,
        parts: Callable[[str], tuple[Weight | Tensor, Scales | None]] | None = None,
    ) -> None:
        super().__init__(weights)
        self._weights, self._bits, self._memory = weights, bits, ReusedMemory()
        self._parts = parts or (lambda name: (weights[name], None))
        held = {x.name for _, mixer in spec.mixers() for x in mixer.matrices()}  # as they are, whatever is read
        self._linears = {x.name for x in spec.linears()} - spec.routers() - held

    def __getitem__(self, name: str) -> Weight | Tensor:
        from toolkit.artifacts.canonical import Dense
        from toolkit.runners.native.packing.rounding import to_group_int

        group = self._group(name, info_of(self._weights, name))
        if group is None:
            return self._weights[name]
        found, scales = self._parts(name)
        assert isinstance(found, Dense)
        made = to_group_int(found.weight, self._bits, group, scales, self._memory)
        if not bool(made.scales.isfinite().all()):  # rounded activations would hide it
            raise ToolkitError(
                f"{name}: holds NaN, infinity or a number too large to be rounded, or the weight before it does; fetch "
                "the model again or leave --load-format out"
            )
        return made

    def info(self, name: str) -> Weight | Tensor:
        """``self[name]`` as headers tell it: its matrices are without memory."""
        import torch

        from toolkit.artifacts.canonical import GroupInt

        found = info_of(self._weights, name)
        group = self._group(name, found)
        if group is None:
            return found
        rows, columns = found.shape
        codes = torch.empty(rows, columns, dtype=torch.uint8, device="meta")
        scales = torch.empty(rows, columns // group, dtype=torch.float16, device="meta")
        return GroupInt(
            codes, scales, torch.full((1, 1), 128, dtype=torch.uint8).expand(scales.shape), self._bits, group
        )

    def scales(self) -> AllScales | None:
        """Those of what is rounded."""
        return scales_of(self._weights)

    def _group(self, name: str, found: Weight | Tensor) -> int | None:
        """Inputs that share a scale, None for a weight that stays as it is."""
        from toolkit.artifacts.canonical import Dense

        if name not in self._linears or not isinstance(found, Dense):
            return None
        return next((g for g in GROUPS if found.shape[1] % g == 0), None)

    def reading_ahead(self, names: Container[str]) -> AbstractContextManager[None]:
        """While those called ``names`` are asked for, best once and in their order, the next ones are read."""
        return reading_ahead(self._weights, names)
