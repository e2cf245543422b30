"""GPTQ checkpoints (AutoGPTQ, GPTQModel, auto-round in its GPTQ packing): read only.

For a linear of ``in`` × ``out`` features: ``qweight`` int32 [in*bits/32, out], codes along *in*, in order; ``qzeros``
int32 [in/g, out*bits/32], in order, stored minus one (``checkpoint_format`` "gptq_v2": as they are); ``scales`` float
[in/g, out]; ``g_idx`` int32 [in], the group of each input feature (act-order), may be absent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.artifacts.formats.bits import unpack_words
from toolkit.artifacts.formats.layout import FLOATS, Expected, group_size, whole
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import GroupInt
    from toolkit.artifacts.checkpoint import Checkpoint

METHOD = "gptq"
BITS = (2, 3, 4, 8)
_FORMATS = ("gptq", "gptq_v2")


def check_config(quantization: dict[str, Any]) -> None:
    """Raise ToolkitError for what this reader cannot read."""
    whole(quantization, "bits", BITS)
    whole(quantization, "group_size")
    if quantization.get("dynamic"):
        raise ToolkitError("config.json: quantization_config.dynamic: bits that differ by module cannot be read")
    kind = quantization.get("checkpoint_format") or "gptq"
    if kind not in _FORMATS:
        raise ToolkitError(
            f"config.json: quantization_config.checkpoint_format: expected {' or '.join(_FORMATS)}, found {kind!r:.40}"
        )


def is_quantized(checkpoint: Checkpoint, name: str) -> bool:
    return f"{name}.qweight" in checkpoint


def expected(quantization: dict[str, Any], name: str, shape: tuple[int, ...]) -> list[Expected]:
    """The tensors of a linear with dense shape [out, in]."""
    n_out, n_in = shape
    bits = whole(quantization, "bits", BITS)
    size = group_size(quantization, name, n_in)
    for features, what in ((n_in, "input"), (n_out, "output")):
        if features * bits % 32:
            raise ToolkitError(f"{name}: {features} {what} features of {bits} bits do not fill whole 32-bit words")
    return [
        Expected(f"{name}.qweight", (n_in * bits // 32, n_out), ("I32",)),
        Expected(f"{name}.qzeros", (n_in // size, n_out * bits // 32), ("I32",)),
        Expected(f"{name}.scales", (n_in // size, n_out), FLOATS),
        Expected(f"{name}.g_idx", (n_in,), ("I32",), optional=True),
    ]


def read_linear(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> GroupInt:
    """The linear ``name`` of dense shape [out, in] in canonical form."""
    from toolkit.artifacts.canonical import GroupInt

    quantization = checkpoint.quantization or {}
    bits = whole(quantization, "bits", BITS)
    size = group_size(quantization, name, shape[1])
    zeros = unpack_words(checkpoint.tensor(f"{name}.qzeros"), bits)
    if quantization.get("checkpoint_format") != "gptq_v2":
        zeros = (zeros + 1) & ((1 << bits) - 1)  # zero point 0 was stored as all ones
    return GroupInt(
        codes=unpack_words(checkpoint.tensor(f"{name}.qweight").t(), bits),
        scales=checkpoint.tensor(f"{name}.scales").t().contiguous(),
        zeros=zeros.t().contiguous(),
        bits=bits,
        group_size=size,
        group_index=_group_index(checkpoint, name, shape[1], size),
    )


def _group_index(checkpoint: Checkpoint, name: str, n_in: int, size: int) -> Tensor | None:
    """``g_idx``, or None where the groups are consecutive."""
    import torch

    if f"{name}.g_idx" not in checkpoint:
        return None
    index = checkpoint.tensor(f"{name}.g_idx")
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= n_in // size:
        raise ToolkitError(
            f"{checkpoint.where(f'{name}.g_idx')}: tensor {name}.g_idx: expected groups 0…{n_in // size - 1}, "
            f"found {low if low < 0 else high}"
        )
    return None if torch.equal(index, torch.arange(n_in, dtype=index.dtype) // size) else index.clone()
