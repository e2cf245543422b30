"""BitNet b1.58's checkpoints, ``quant_method`` "bitnet": weights of three values, -1, 0 and 1, with one scale a linear.

``weight`` uint8 [ceil(out/4), in]: bits 2i and 2i + 1 of row r are the value + 1 of row r + i · ceil(out/4); or floats
[out, in] that are the values. ``weight_scale``, one number: w = value / weight_scale, or with ``linear_class``
"autobitlinear" value * weight_scale. ``quantization_mode`` "online": ``weight`` is any numbers, rounded as they are
read, w = round(weight / mean |weight|) within ±1, times that mean. Linears round what they read to 8 bits, a scale a
token. Source: transformers ``integrations/bitnet.py``, arXiv 2402.17764.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.artifacts.formats.layout import FLOATS, Expected, wrong

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import GroupInt
    from toolkit.artifacts.checkpoint import Checkpoint

METHOD = "bitnet"
PER_BYTE = 4
CLASSES, MODES = ("bitlinear", "autobitlinear"), ("offline", "online")
LEAST = 1e-5  # what the mean of online weights is at least


def check_config(quantization: dict[str, Any]) -> None:
    """Raise ToolkitError for what this reader cannot read."""
    for field, known in (("linear_class", CLASSES), ("quantization_mode", MODES)):
        if quantization.get(field, known[0]) not in known:
            raise wrong(field, f"one of {', '.join(known)}", quantization[field])
    if quantization.get("use_rms_norm"):
        raise wrong("use_rms_norm", "false: a norm inside each linear is not read", True)
    if _online(quantization) and _class(quantization) != CLASSES[1]:
        raise wrong("quantization_mode", f"offline with linear_class {CLASSES[0]}", "online")


def _class(quantization: dict[str, Any]) -> str:
    return str(quantization.get("linear_class", CLASSES[0]))


def _online(quantization: dict[str, Any]) -> bool:
    return quantization.get("quantization_mode") == MODES[1]


def is_quantized(checkpoint: Checkpoint, name: str) -> bool:
    quantization = checkpoint.quantization or {}
    if not _online(quantization):
        return f"{name}.weight_scale" in checkpoint
    skipped = quantization.get("modules_to_not_convert") or ()
    stays = any(f".{part}." in f".{name}." for part in skipped if isinstance(part, str))
    return ".layers." in f".{name}" and not stays


def expected(quantization: dict[str, Any], name: str, shape: tuple[int, ...]) -> list[Expected]:
    """The tensors of a linear with dense shape [out, in]."""
    n_out, n_in = shape
    if _online(quantization):
        return [Expected(f"{name}.weight", shape, FLOATS)]
    packed = (-(-n_out // PER_BYTE), n_in)
    return [
        Expected(f"{name}.weight", packed, ("U8", "I8", *FLOATS), also=(shape,)),
        Expected(f"{name}.weight_scale", (1,), FLOATS, also=((),)),
    ]


def read_linear(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> GroupInt:
    """The linear ``name`` of dense shape [out, in] in canonical form: a group a row, whose inputs runners round with
    one scale a token, as the model's own linears do."""
    import torch

    from toolkit.artifacts.canonical import GroupInt

    weight, quantization = checkpoint.tensor(f"{name}.weight"), checkpoint.quantization or {}
    n_out, n_in = shape
    if _online(quantization):
        scale = weight.float().abs().mean().clamp(min=LEAST)
        codes = (weight.float() / scale).round().clamp(-1, 1)
    else:
        scale = checkpoint.tensor(f"{name}.weight_scale").reshape(())
        scale = scale if _class(quantization) == CLASSES[1] else 1 / scale.float()
        codes = weight if tuple(weight.shape) == shape and weight.is_floating_point() else _unpacked(weight, n_out)
    scales = scale.reshape(1, 1).expand(n_out, 1).contiguous()
    middle = torch.full((n_out, 1), 2, dtype=torch.uint8)
    return GroupInt((codes.float() + 2).to(torch.uint8), scales, middle, 2, n_in)


def _unpacked(packed: Tensor, n_out: int) -> Tensor:
    """int8 [out, in], -1 to 1."""
    import torch

    codes = packed.view(torch.uint8) if packed.dtype == torch.int8 else packed.to(torch.uint8)
    parts = [(codes >> (2 * i)) & 3 for i in range(PER_BYTE)]
    return torch.cat(parts)[:n_out].to(torch.int8) - 1
