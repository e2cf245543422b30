"""bitsandbytes' checkpoints, ``quant_method`` "bitsandbytes": nf4 and fp4 (``load_in_4bit``), int8 (``load_in_8bit``).

4 bits: ``weight`` [n/2, 1] bytes (or as many in a wider type), two codes a byte, the first high, of the matrix row by
row; ``weight.quant_map`` float32 [16]; ``weight.absmax``, one number for each ``blocksize`` weights one behind the
other: float32, or uint8 codes of ``weight.nested_quant_map`` [256] times ``weight.nested_absmax``, one for each
``nested_blocksize`` of them, plus ``nested_offset``; ``weight.quant_state.bitsandbytes__nf4`` (or ``…__fp4``), bytes of
a JSON object with these numbers. w = quant_map[code] * absmax.
8 bits: ``weight`` int8 [out, in], ``SCB`` float32 [out]: w = weight * SCB / 127.
Source: bitsandbytes ``functional.py`` (QuantState.as_dict), ``nn/modules.py``.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.formats.layout import Expected, wrong
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import Codebook, Dense, GroupInt
    from toolkit.artifacts.checkpoint import Checkpoint

METHOD = "bitsandbytes"
BLOCKS = (64, 32, 128, 256, 512, 1024, 2048, 4096)
KINDS = ("nf4", "fp4")
STATE = "weight.quant_state.bitsandbytes__"
_STORED = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4}  # types that bytes of codes may stand in
_DTYPES = ("float16", "bfloat16", "float32")


def check_config(quantization: dict[str, Any]) -> None:
    """Raise ToolkitError for what this reader cannot read."""
    four, eight = (quantization.get(name) is True for name in ("load_in_4bit", "load_in_8bit"))
    if four == eight:
        raise wrong("load_in_4bit", "true, or load_in_8bit: one of the two", quantization.get("load_in_4bit"))


def is_quantized(checkpoint: Checkpoint, name: str) -> bool:
    return any(f"{name}.{end}" in checkpoint for end in ("weight.absmax", "SCB"))


def expected(quantization: dict[str, Any], name: str, shape: tuple[int, ...]) -> list[Expected]:
    """The tensors of a linear with dense shape [out, in]."""
    if quantization.get("load_in_8bit"):
        return [Expected(f"{name}.weight", shape, ("I8",)), Expected(f"{name}.SCB", shape[:1], ("F32",))]
    count = math.prod(shape)
    packed = [(-(-count // 2) // size, 1) for size in dict.fromkeys(_STORED.values())]
    blocks = [(-(-count // size),) for size in BLOCKS]
    return [
        Expected(f"{name}.weight", packed[0], tuple(_STORED), also=tuple(packed[1:])),
        Expected(f"{name}.weight.absmax", blocks[0], ("F32", "U8"), also=tuple(blocks[1:])),
        Expected(f"{name}.weight.quant_map", (16,), ("F32",)),
    ]


def read_linear(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Codebook | Dense | GroupInt:
    """The linear ``name`` of dense shape [out, in] in canonical form: dense where blocks do not end with rows."""
    import torch

    from toolkit.artifacts.canonical import Codebook, Dense, GroupInt

    weight = checkpoint.tensor(f"{name}.weight")
    n_out, n_in = shape
    if f"{name}.SCB" in checkpoint:
        scales = (checkpoint.tensor(f"{name}.SCB") / 127).reshape(n_out, 1)
        codes = (weight.to(torch.int16) + 128).to(torch.uint8)
        return GroupInt(codes, scales, torch.full_like(scales, 128, dtype=torch.uint8), 8, n_in)
    state = _state(checkpoint, name, shape)
    packed = weight.contiguous().view(torch.uint8).reshape(-1)
    if packed.is_meta:
        codes = torch.empty(shape, dtype=torch.uint8, device="meta")
    else:
        codes = torch.stack([packed >> 4, packed & 15], -1).reshape(-1)[: n_out * n_in].reshape(shape)
    table, scales = checkpoint.tensor(f"{name}.weight.quant_map"), _scales(checkpoint, name, state)
    block = state["blocksize"]
    if scales.numel() != -(-n_out * n_in // block):
        raise _wrong(checkpoint, name, "blocksize", f"one that gives {scales.numel()} blocks", block)
    if n_in % block == 0:
        return Codebook(codes, table, scales.reshape(n_out, -1), 4, block)
    each = scales.repeat_interleave(block)[: n_out * n_in].reshape(shape)
    values = torch.empty(shape, device="meta") if codes.is_meta else table[codes.long()] * each
    return Dense(values.to(getattr(torch, state["dtype"])))


def _scales(checkpoint: Checkpoint, name: str, state: dict[str, Any]) -> Tensor:
    """float32, one a block."""
    import torch

    found = checkpoint.tensor(f"{name}.weight.absmax")
    if found.dtype != torch.uint8:
        return found
    size = state.get("nested_blocksize")
    nested, table = (checkpoint.tensor(f"{name}.weight.{x}") for x in ("nested_absmax", "nested_quant_map"))
    if not isinstance(size, int) or isinstance(size, bool) or size < 1 or nested.numel() != -(-len(found) // size):
        raise _wrong(checkpoint, name, "nested_blocksize", f"one that gives {nested.numel()} blocks", size)
    offset = state.get("nested_offset")
    if not isinstance(offset, int | float) or isinstance(offset, bool) or not math.isfinite(offset):
        raise _wrong(checkpoint, name, "nested_offset", "a number", offset)
    if table.numel() != 256:
        raise _wrong(checkpoint, name, "nested_quant_map", "256 numbers", table.numel())
    each = nested.float().reshape(-1).repeat_interleave(size)[: len(found)]
    return table.float()[found.long()] * each + offset


def _state(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """What stands as JSON beside the codes, checked."""
    whole = next((f"{name}.{STATE}{kind}" for kind in KINDS if f"{name}.{STATE}{kind}" in checkpoint), None)
    if whole is None:
        raise ToolkitError(
            f"{checkpoint.where(f'{name}.weight')}: tensor {name}.{STATE}{KINDS[0]} is missing, which says how "
            f"{name}.weight is stored; fetch the model again"
        )
    try:
        found = json.loads(bytes(checkpoint.tensor(whole).reshape(-1).tolist()))
    except (ValueError, TypeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ToolkitError(f"{checkpoint.where(whole)}: tensor {whole}: expected a JSON object; fetch the model again")
    if found.get("blocksize") not in BLOCKS:
        raise _wrong(
            checkpoint, name, "blocksize", f"one of {', '.join(map(str, sorted(BLOCKS)))}", found.get("blocksize")
        )
    if found.get("shape") != list(shape):
        raise _wrong(checkpoint, name, "shape", str(list(shape)), found.get("shape"))
    if found.get("dtype") not in _DTYPES:
        raise _wrong(checkpoint, name, "dtype", f"one of {', '.join(_DTYPES)}", found.get("dtype"))
    return found


def _wrong(checkpoint: Checkpoint, name: str, field: str, wanted: str, found: object) -> ToolkitError:
    file = checkpoint.where(f"{name}.weight")
    return ToolkitError(f"{file}: quant_state of {name}: {field}: expected {wanted}, found {found!r:.60}")
