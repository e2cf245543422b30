"""NVIDIA Model Optimizer's checkpoints, ``quant_method`` "modelopt" (also modelopt_fp4 and modelopt_mixed).

``quant_algo`` says how a linear is stored, for MIXED_PRECISION its entry in ``quantized_layers`` does:
FP8, FP8_PER_CHANNEL_PER_TOKEN: ``weight`` float8_e4m3fn [out, in], ``weight_scale`` float32, one number or [out];
FP8_PB_WO: the same with ``weight_scale`` [ceil(out/128), 1, ceil(in/128), 1]; MXFP8: uint8 (e8m0) [out, in/32];
NVFP4, NVFP4_AWQ, W4A16_NVFP4: ``weight`` uint8 [out, in/2], two e2m1 codes a byte, the first low; ``weight_scale``
float8_e4m3fn [out, in/16]; ``weight_scale_2`` float32, one number: w = code * weight_scale * weight_scale_2;
W8A16: ``weight`` int8 [out, in], ``weight_scale`` [out].
Older releases tell all that in hf_quant_config.json alone, which stands in for config.json's. Static ``input_scale`` is
not needed: activations are rounded by what they are (float8), or not at all (4 bits).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.artifacts.formats.bits import unpack_pairs
from toolkit.artifacts.formats.layout import FLOATS, Expected, wrong
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import BlockFp8, Fp4, Fp8, GroupInt
    from toolkit.artifacts.checkpoint import Checkpoint

METHOD = "modelopt"
TILE = 128
NV_GROUP, MX_GROUP = 16, 32
MIXED = "MIXED_PRECISION"
ROWS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")  # float8, a scale for all or for each row
NVFP4 = ("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ")
ALGORITHMS = (*ROWS, "FP8_PB_WO", "MXFP8", *NVFP4, "W8A16")


def check_config(quantization: dict[str, Any]) -> None:
    """Raise ToolkitError for what this reader cannot read."""
    if _upper(quantization) != MIXED:
        _known("quant_algo", quantization)
        return
    layers = quantization.get("quantized_layers")
    if not isinstance(layers, dict) or not layers:
        raise wrong("quantized_layers", "an object of layers", layers)
    for name, layer in layers.items():
        if not isinstance(layer, dict):
            raise wrong(f"quantized_layers.{name}", "an object with quant_algo", layer)
        _known(f"quantized_layers.{name}.quant_algo", layer)


def _upper(settings: dict[str, Any]) -> str:
    return str(settings.get("quant_algo")).upper()


def _known(field: str, settings: dict[str, Any]) -> None:
    if _upper(settings) not in ALGORITHMS:
        raise wrong(field, f"one of {', '.join((*ALGORITHMS, MIXED))}", settings.get("quant_algo"))
    group = NV_GROUP if _upper(settings) in NVFP4 else None
    if group is not None and settings.get("group_size") not in (None, group):
        raise wrong(field.replace("quant_algo", "group_size"), str(group), settings["group_size"])


def _algorithm(quantization: dict[str, Any], name: str) -> str:
    """How the linear ``name`` is stored, whose tensors show that it is quantized."""
    found = _upper(quantization)
    if found != MIXED:
        return found
    layers = quantization["quantized_layers"]
    # A stack of experts is named as a whole by some releases.
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        if (layer := layers.get(".".join(parts[:count]))) is not None:
            return _upper(layer)
    raise ToolkitError(f"{name}: quantized, but quantization_config.quantized_layers has no entry for it")


def is_quantized(checkpoint: Checkpoint, name: str) -> bool:
    return f"{name}.weight_scale" in checkpoint


def expected(quantization: dict[str, Any], name: str, shape: tuple[int, ...]) -> list[Expected]:
    """The tensors of a linear with dense shape [out, in]."""
    (n_out, n_in), kind = shape, _algorithm(quantization, name)
    weight, scale = f"{name}.weight", f"{name}.weight_scale"
    if kind in ROWS:
        return [Expected(weight, shape, ("F8_E4M3",)), Expected(scale, (), FLOATS, also=((1,), (n_out,), (n_out, 1)))]
    if kind == "W8A16":
        return [Expected(weight, shape, ("I8",)), Expected(scale, (n_out,), FLOATS, also=((n_out, 1),))]
    if kind == "FP8_PB_WO":
        rows, columns = -(-n_out // TILE), -(-n_in // TILE)
        tiles = Expected(scale, (rows, 1, columns, 1), FLOATS, also=((rows, columns),))
        return [Expected(weight, shape, ("F8_E4M3",)), tiles]
    group = MX_GROUP if kind == "MXFP8" else NV_GROUP
    if n_in % group:
        raise ToolkitError(f"{name}: {n_in} input features are no multiple of {kind}'s blocks of {group}")
    if kind == "MXFP8":
        return [
            Expected(weight, shape, ("F8_E4M3",)),
            Expected(scale, (n_out, n_in // group), ("U8", "F8_E8M0")),
        ]
    return [
        Expected(weight, (n_out, n_in // 2), ("U8",)),
        Expected(scale, (n_out, n_in // group), ("F8_E4M3",)),
        Expected(f"{name}.weight_scale_2", (), ("F32",), also=((1,),)),
    ]


def read_linear(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> BlockFp8 | Fp4 | Fp8 | GroupInt:
    """The linear ``name`` of dense shape [out, in] in canonical form."""
    import torch

    from toolkit.artifacts.canonical import BlockFp8, Fp4, Fp8, GroupInt

    (n_out, n_in), kind = shape, _algorithm(checkpoint.quantization or {}, name)
    weight, scale = checkpoint.tensor(f"{name}.weight"), checkpoint.tensor(f"{name}.weight_scale")
    if kind in ROWS:
        return Fp8(weight, scale.float().reshape(-1).expand(n_out).contiguous())
    if kind == "FP8_PB_WO":
        return BlockFp8(weight, scale.float().reshape(-(-n_out // TILE), -(-n_in // TILE)), (TILE, TILE))
    if kind == "MXFP8":
        return BlockFp8(weight, torch.exp2(scale.view(torch.uint8).float() - 127), (1, MX_GROUP))
    if kind == "W8A16":
        codes = (weight.to(torch.int16) + 128).to(torch.uint8)
        scales = scale.reshape(n_out, 1)
        return GroupInt(codes, scales, torch.full_like(scales, 128, dtype=torch.uint8), 8, n_in)
    return Fp4(unpack_pairs(weight), scale, NV_GROUP, _divisor(checkpoint, f"{name}.weight_scale_2"))


def _divisor(checkpoint: Checkpoint, name: str) -> Tensor:
    """float32 [1], what scales are divided by: the reciprocal of what is stored."""
    return checkpoint.tensor(name).float().reshape(1).reciprocal()
