"""One module a weight format on disk: what tensors it needs, how they become canonical, and where we produce
it, how canonical becomes them. ``FORMATS`` is keyed by ``quantization_config.quant_method``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from toolkit.artifacts.formats import (
    auto_round,
    awq,
    bitnet,
    bitsandbytes,
    blocked_fp8,
    compressed_tensors,
    gguf_types,
    gptq,
    mlx,
    modelopt,
    mxfp4,
    trellis,
    w8a8,
)
from toolkit.artifacts.formats.layout import Expected
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from toolkit.artifacts.canonical import Weight
    from toolkit.artifacts.checkpoint import Checkpoint


class WeightFormat(Protocol):
    """What a format module offers. ``expected`` and ``check_config`` work from headers alone."""

    @property
    def METHOD(self) -> str: ...

    def check_config(self, quantization: dict[str, Any]) -> None: ...

    def is_quantized(self, checkpoint: Checkpoint, name: str) -> bool: ...

    def expected(self, quantization: dict[str, Any], name: str, shape: tuple[int, ...]) -> list[Expected]: ...

    def read_linear(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Weight: ...


class StackFormat(WeightFormat, Protocol):
    """One that has stacks of experts as they stand. ``shape``: [experts, out, in]; ``transposed``: the dense stack has
    the last two axes the other way round."""

    def expected_stack(
        self, quantization: dict[str, Any], name: str, shape: tuple[int, ...], transposed: bool
    ) -> list[Expected]: ...

    def read_stack(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], transposed: bool) -> Weight: ...


_STACKS: tuple[StackFormat, ...] = (blocked_fp8, mxfp4)
STACK_FORMATS: dict[str, StackFormat] = {module.METHOD: module for module in _STACKS}
_MODULES: tuple[WeightFormat, ...] = (
    awq, gptq, auto_round, compressed_tensors, w8a8, blocked_fp8, mxfp4, modelopt, trellis, bitnet, bitsandbytes,
    mlx, gguf_types,
)  # fmt: skip
FORMATS: dict[str, WeightFormat] = {module.METHOD: module for module in _MODULES}


def format_of(checkpoint: Checkpoint) -> WeightFormat | None:
    """The format of a checkpoint's quantized linears, None if it is dense. Its config is checked, once: it can have
    settings for each of many thousand experts, and every module that is read asks here.

    Raises ToolkitError for an unknown ``quant_method``, with those known, or values the format cannot have.
    """
    quantization = checkpoint.quantization
    if quantization is None:
        return None
    method = str(quantization["quant_method"]).lower()
    if method not in FORMATS:
        raise ToolkitError(
            f"{checkpoint.path / 'config.json'}: quantization_config.quant_method: expected one of "
            f"{', '.join(sorted(FORMATS))}, found {method!r:.40}"
        )
    if checkpoint.checked is quantization:
        return FORMATS[method]
    try:
        FORMATS[method].check_config(quantization)
    except ToolkitError as error:
        raise ToolkitError(f"{checkpoint.path}: {error}") from None
    checkpoint.checked = quantization
    return FORMATS[method]
