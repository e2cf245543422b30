"""MLX's checkpoints (mlx-lm), called ``quant_method`` "mlx" here: their config.json has ``quantization`` with
``group_size``, ``bits`` and ``mode``, and what is other for a linear under its name.

"affine": ``weight`` uint32 [out, in * bits / 32], codes from the lowest bits up, over borders of words too; ``scales``
and ``biases`` [out, in/group_size]: w = code * scale + bias.
"mxfp4", "nvfp4": eight e2m1 codes a word, ``scales`` uint8, which is e8m0 for 32 inputs, e4m3 for 16. "mxfp8": four
e4m3 codes a word, e8m0 for 32. Source: mlx.core.quantize, mlx.nn.quantize.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.artifacts.formats.bits import unpack_pairs, unpack_words
from toolkit.artifacts.formats.layout import FLOATS, Expected, whole, wrong
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from toolkit.artifacts.canonical import BlockFp8, Fp4, GroupInt
    from toolkit.artifacts.checkpoint import Checkpoint

METHOD = "mlx"
AFFINE = "affine"
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (16, 32, 64, 128)
FLOAT_MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}  # bits and inputs of a scale


def check_config(quantization: dict[str, Any]) -> None:
    """Raise ToolkitError for what this reader cannot read."""
    _settings(quantization, "")
    for name, value in quantization.items():
        if isinstance(value, dict):
            _settings(quantization, name)


def _settings(quantization: dict[str, Any], name: str) -> tuple[str, int, int]:
    """(mode, bits, group size) of the linear ``name``, "" for most of them."""
    own = quantization.get(name)
    found = {**quantization, **(own if isinstance(own, dict) else {})}
    mode = found.get("mode", AFFINE)
    if mode != AFFINE and mode not in FLOAT_MODES:
        raise wrong(f"{name}.mode".lstrip("."), f"one of {', '.join((AFFINE, *FLOAT_MODES))}", mode)
    bits, group = whole(found, "bits", BITS), whole(found, "group_size", GROUPS)
    if mode != AFFINE and (bits, group) != FLOAT_MODES[mode]:
        known = FLOAT_MODES[mode]
        raise wrong(f"{name}.bits".lstrip("."), f"{known[0]} and group_size {known[1]} for {mode}", (bits, group))
    return mode, bits, group


def is_quantized(checkpoint: Checkpoint, name: str) -> bool:
    return f"{name}.scales" in checkpoint


def expected(quantization: dict[str, Any], name: str, shape: tuple[int, ...]) -> list[Expected]:
    """The tensors of a linear with dense shape [out, in]."""
    mode, bits, group = _settings(quantization, name)
    n_out, n_in = shape
    if n_in % group or n_in * bits % 32:
        raise ToolkitError(f"{name}: {n_in} input features are no multiple of {METHOD}'s groups of {group}")
    scales = [f"{name}.scales", *([f"{name}.biases"] if mode == AFFINE else [])]
    kinds = FLOATS if mode == AFFINE else ("U8",)
    packed = Expected(f"{name}.weight", (n_out, n_in * bits // 32), ("U32",))
    return [packed, *(Expected(one, (n_out, n_in // group), kinds) for one in scales)]


def read_linear(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> BlockFp8 | Fp4 | GroupInt:
    """The linear ``name`` of dense shape [out, in] in canonical form."""
    import torch

    from toolkit.artifacts.canonical import BlockFp8, Fp4, GroupInt

    mode, bits, group = _settings(checkpoint.quantization or {}, name)
    weight, scales = checkpoint.tensor(f"{name}.weight"), checkpoint.tensor(f"{name}.scales")
    if mode == AFFINE:
        codes = unpack_words(weight.view(torch.int32), bits)
        return GroupInt(codes, scales, None, bits, group, checkpoint.tensor(f"{name}.biases"))
    if mode == "mxfp8":
        floats = weight.view(torch.uint8).view(torch.float8_e4m3fn)
        return BlockFp8(floats, torch.exp2(scales.float() - 127), (1, group))
    codes = unpack_pairs(weight.view(torch.uint8))
    return Fp4(codes, scales if mode == "mxfp4" else scales.view(torch.float8_e4m3fn), group)
