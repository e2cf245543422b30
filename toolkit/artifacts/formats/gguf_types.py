"""Linears of a GGUF file: block types kept as they are stored, float types dense."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.artifacts.formats.layout import FLOATS, Expected

if TYPE_CHECKING:
    from toolkit.artifacts.canonical import Weight
    from toolkit.artifacts.checkpoint import Checkpoint

METHOD = "gguf"
BLOCK_TYPES = (
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
    # read alone (gguf/lattices.py)
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "TQ1_0",
    "TQ2_0",
)


def check_config(quantization: dict[str, Any]) -> None:
    """A GGUF file states everything per tensor: there is nothing to check."""


def is_quantized(checkpoint: Checkpoint, name: str) -> bool:
    return checkpoint.gguf is not None and f"{name}.weight" in checkpoint


def expected(quantization: dict[str, Any], name: str, shape: tuple[int, ...]) -> list[Expected]:
    """The tensor of a linear with dense shape [out, in]."""
    return [Expected(f"{name}.weight", shape, (*FLOATS, *BLOCK_TYPES))]


def read_linear(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Weight:
    """The linear ``name`` in canonical form."""
    assert checkpoint.gguf is not None
    return checkpoint.gguf.weight(f"{name}.weight")
