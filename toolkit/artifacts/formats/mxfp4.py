"""MXFP4 as in gpt-oss, ``quant_method`` "mxfp4".

``X.weight_blocks`` uint8 [out, in/32, 16], two e2m1 codes a byte, the first low; ``X.weight_scales`` uint8
[out, in/32], e8m0. w = value * 2 ** (scale - 127). Experts of a layer are stacked, [experts, out, in/32, …], and named
``X_blocks`` and ``X_scales``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.formats.bits import unpack_pairs
from toolkit.artifacts.formats.describe import Layout, form_name
from toolkit.artifacts.formats.layout import Expected
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import Fp4, Weight
    from toolkit.artifacts.checkpoint import Checkpoint

METHOD = "mxfp4"
GROUP = 32


def check_config(quantization: dict[str, Any]) -> None:
    """Nothing in the configuration changes how a linear is read."""


def is_quantized(checkpoint: Checkpoint, name: str) -> bool:
    return any(f"{name}{middle}_blocks" in checkpoint for middle in (".weight", ""))


def expected(quantization: dict[str, Any], name: str, shape: tuple[int, ...]) -> list[Expected]:
    """The tensors of a linear with dense shape [out, in]."""
    return _expected(name, f"{name}.weight", shape)


def expected_stack(quantization: dict[str, Any], name: str, shape: tuple[int, ...], transposed: bool) -> list[Expected]:
    """The tensors of experts [experts, out, in], which stand so whatever order the dense ones have."""
    return _expected(name, name, shape)


def _expected(name: str, prefix: str, shape: tuple[int, ...]) -> list[Expected]:
    *rows, n_in = shape
    if n_in % GROUP:
        raise ToolkitError(f"{name}: {n_in} input features are no multiple of mxfp4's blocks of {GROUP}")
    return [
        Expected(f"{prefix}_blocks", (*rows, n_in // GROUP, GROUP // 2), ("U8",)),
        Expected(f"{prefix}_scales", (*rows, n_in // GROUP), ("U8", "F8_E8M0")),
    ]


def read_linear(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Fp4:
    """The linear ``name`` of dense shape [out, in] in canonical form."""
    return _read(checkpoint, f"{name}.weight", shape)


def read_stack(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], transposed: bool) -> Fp4:
    """Experts [experts, out, in] in canonical form, one below the other."""
    return _read(checkpoint, name, shape)


def _read(checkpoint: Checkpoint, prefix: str, shape: tuple[int, ...]) -> Fp4:
    import torch

    from toolkit.artifacts.canonical import Fp4

    codes = unpack_pairs(checkpoint.tensor(f"{prefix}_blocks")).reshape(-1, shape[-1])
    scales = checkpoint.tensor(f"{prefix}_scales").view(torch.uint8)
    return Fp4(codes, scales.reshape(len(codes), -1), GROUP)


def cannot_hold(weight: Weight) -> str | None:
    """Why ``weight`` is no mxfp4, or None."""
    import torch

    from toolkit.artifacts.canonical import Fp4

    good = isinstance(weight, Fp4) and (weight.group_size, weight.scales.dtype) == (GROUP, torch.uint8)
    return None if good else f"mxfp4 holds 4-bit floats in blocks of 32 with e8m0 scales, found {form_name(weight)}"


def write_linear(name: str, weight: Weight) -> dict[str, Tensor]:
    """Tensors of an ``Fp4`` with e8m0 scales. Raises ToolkitError for any other weight."""
    from toolkit.artifacts.canonical import Fp4

    if reason := cannot_hold(weight):
        raise ToolkitError(f"{name}: {reason}")
    assert isinstance(weight, Fp4)
    pairs = weight.codes.view(weight.shape[0], -1, GROUP // 2, 2)
    return {
        f"{name}.weight_blocks": pairs[..., 0] | pairs[..., 1] << 4,
        f"{name}.weight_scales": weight.scales.contiguous(),
    }


def config(layouts: Mapping[str, Layout | None]) -> dict[str, Any]:
    """``quantization_config`` of linears by name (None: left dense)."""
    found: dict[str, Any] = {"quant_method": METHOD}
    skip = [name for name, layout in {"lm_head": None, **layouts}.items() if layout is None]
    return {**found, "modules_to_not_convert": skip}
