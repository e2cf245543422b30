"""fp8 checkpoints, ``quant_method`` "fp8": DeepSeek's tiles of 128 × 128, or one scale a tensor or row.

``weight`` float8_e4m3fn [out, in]; ``weight_scale_inv`` float32 [ceil(out/128), ceil(in/128)], to be multiplied by, for
all its name; without ``weight_block_size`` that is one number (Ministral 3 and what transformers writes), or
``weight_scale`` (one number, or [out, 1]) stands in its place. Activations are quantized at run time, a scale for each
token and 128 inputs; a static ``activation_scale`` is not needed for that. Experts of a layer may be stacked, ``X``
[experts, out, in] and ``X_scale_inv`` [experts, ceil(out/128), ceil(in/128)], or one number each or one for either half
of the rows; the last two axes are the other way round where the dense stack's are (Qwen3-VL).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.formats.describe import Layout, form_name
from toolkit.artifacts.formats.layout import FLOATS, Expected, wrong
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import BlockFp8, Fp8, Weight
    from toolkit.artifacts.checkpoint import Checkpoint

METHOD = "fp8"
BLOCK = (128, 128)
MAX_BLOCK = 1 << 20
_E4M3 = ("e4m3", "e4m3fn", "float8_e4m3fn")  # as DeepSeek spells it, and MiniMax M2
ONE_SCALE = ("weight_scale", "weight_scale_inv")  # names of that of a whole tensor or of its rows


def check_config(quantization: dict[str, Any]) -> None:
    """Raise ToolkitError for what this reader cannot read."""
    kind = quantization.get("fmt")
    if kind is not None and kind not in _E4M3:
        raise wrong("fmt", "'e4m3'", kind)
    _block(quantization)


def _block(quantization: dict[str, Any]) -> tuple[int, int] | None:
    found = quantization.get("weight_block_size")
    if found is None:
        return None
    good = isinstance(found, list) and len(found) == 2 and all(isinstance(x, int) and 0 < x <= MAX_BLOCK for x in found)
    if not good:
        raise wrong("weight_block_size", "[rows, columns]", found)
    return found[0], found[1]


def is_quantized(checkpoint: Checkpoint, name: str) -> bool:
    return any(f"{name}.{x}" in checkpoint for x in ONE_SCALE) or _of_stack(name) in checkpoint


def _of_stack(name: str) -> str:
    return f"{name}_scale_inv"


def expected(quantization: dict[str, Any], name: str, shape: tuple[int, ...]) -> list[Expected]:
    """The tensors of a linear with dense shape [out, in]."""
    block = _block(quantization)
    weight = Expected(f"{name}.weight", shape, ("F8_E4M3",))
    if block is None:
        also = ((), (1,), (shape[0],))
        return [weight, *(Expected(f"{name}.{x}", (shape[0], 1), FLOATS, True, also) for x in ONE_SCALE)]
    tiles = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    return [weight, Expected(f"{name}.weight_scale_inv", tiles, ("F32", "BF16"))]


def expected_stack(quantization: dict[str, Any], name: str, shape: tuple[int, ...], transposed: bool) -> list[Expected]:
    """The tensors of experts [experts, out, in], on disk [experts, in, out] where ``transposed``."""
    count, *sides = shape
    tiles = [-(-side // size) for side, size in zip(sides, _block(quantization) or sides, strict=True)]
    if transposed:
        sides, tiles = sides[::-1], tiles[::-1]
    also = ((count,), (count, 1), (count, 2, 1)) if _block(quantization) is None else ()
    scales = Expected(_of_stack(name), (count, *tiles), ("F32", "BF16"), also=also)
    return [Expected(name, (count, *sides), ("F8_E4M3",)), scales]


def read_stack(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], transposed: bool) -> BlockFp8 | Fp8:
    """Experts [experts, out, in] in canonical form, one below the other."""
    import torch

    from toolkit.artifacts.canonical import BlockFp8, Fp8

    count, n_out, n_in = shape
    weight, scales = checkpoint.tensor(name), checkpoint.tensor(_of_stack(name)).float()
    if transposed:
        weight = weight.transpose(1, 2).contiguous()
    rows = weight.reshape(-1, n_in)
    block = _block(checkpoint.quantization or {})
    if block is None:
        each = scales.reshape(count, -1)  # of all rows, or of the gate's and the up projection's
        return Fp8(rows, each.repeat_interleave(n_out // each.shape[1], dim=1).reshape(-1))
    scales = scales.transpose(1, 2) if transposed else scales
    tiles = scales.shape[1]
    # Tiles of one expert end with it: where its rows do not fill them, rows are told apart one by one.
    ends = None if n_out % block[0] == 0 else torch.arange(n_out, dtype=torch.int32) // block[0]
    if ends is not None:
        ends = (torch.arange(count, dtype=torch.int32)[:, None] * tiles + ends).reshape(-1)
    return BlockFp8(rows, scales.reshape(count * tiles, -1).contiguous(), block, ends)


def read_linear(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> BlockFp8 | Fp8:
    """The linear ``name`` of dense shape [out, in] in canonical form."""
    from toolkit.artifacts.canonical import BlockFp8, Fp8

    weight = checkpoint.tensor(f"{name}.weight")
    block = _block(checkpoint.quantization or {})
    if block is None:
        found = next(f"{name}.{x}" for x in ONE_SCALE if f"{name}.{x}" in checkpoint)
        scale = checkpoint.tensor(found).float().reshape(-1)
        return Fp8(weight, scale.expand(shape[0]).contiguous())
    return BlockFp8(weight, checkpoint.tensor(f"{name}.weight_scale_inv").float(), block)


def cannot_hold(weight: Weight) -> str | None:
    """Why ``weight`` has no form here, or None."""
    import torch

    from toolkit.artifacts.canonical import BlockFp8

    if not isinstance(weight, BlockFp8) or weight.weight.dtype != torch.float8_e4m3fn:
        return f"blocked fp8 holds float8_e4m3fn in tiles, found {form_name(weight)}"
    return None if weight.row_blocks is None else "its rows were taken out of their tiles"


def write_linear(name: str, weight: Weight) -> dict[str, Tensor]:
    """Tensors of a ``BlockFp8``. Raises ToolkitError for any other weight."""
    from toolkit.artifacts.canonical import BlockFp8

    if reason := cannot_hold(weight):
        raise ToolkitError(f"{name}: {reason}")
    assert isinstance(weight, BlockFp8)
    return {f"{name}.weight": weight.weight, f"{name}.weight_scale_inv": weight.scales}


def config(layouts: Mapping[str, Layout | None], *, scale_fmt: str | None = None) -> dict[str, Any]:
    """``quantization_config`` of linears by name (None: left dense). ``scale_fmt``: "ue8m0" for powers of two."""
    blocks = {layout.block for layout in layouts.values() if layout}
    if len(blocks) != 1 or (block := next(iter(blocks))) is None:
        sizes = ", ".join(sorted(map(str, blocks))) or "none"
        raise ToolkitError(
            f"blocked fp8: expected one tile size for the whole model, found {sizes}; use compressed-tensors"
        )
    found: dict[str, Any] = {
        "quant_method": METHOD,
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
    }
    if scale_fmt is not None:
        found["scale_fmt"] = scale_fmt
    skip = [name for name, layout in {"lm_head": None, **layouts}.items() if layout is None]
    return {**found, "modules_to_not_convert": skip}
