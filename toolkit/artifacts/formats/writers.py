"""What can be written: a format's name on the command line → how a canonical weight becomes its tensors.

Every writer takes weights that already have a form that it holds, and may widen others without changing a number
(``adapt``); rounding is a step of its own. GGUF, being one file with a layout of its own, is not among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.formats import auto_round, awq, blocked_fp8, compressed_tensors, gptq, mxfp4, trellis, w8a8
from toolkit.artifacts.formats.describe import Layout
from toolkit.artifacts.formats.layout import WRITES_STACKS
from toolkit.base.lazy_dataclass import dataclass

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import Weight
    from toolkit.models.spec import StoredTensor


@dataclass(frozen=True)
class Writer:
    """``cannot_hold(weight)``: why not, or None; ``write(name, weight)``: its tensors; ``config(layouts)``:
    ``quantization_config`` for linears by name, None for those left dense. ``bits``: widths of codes that it holds.
    """

    name: str
    cannot_hold: Callable[[Weight], str | None]
    write: Callable[[str, Weight], dict[str, Tensor]]
    config: Callable[[Mapping[str, Layout | None]], dict[str, Any]]
    bits: tuple[int, ...] = ()

    def takes(self, item: StoredTensor) -> bool:
        """Whether the format has the module as it is stored, which for stacks of experts few formats do."""
        return not item.stacked or self.name in WRITES_STACKS

    def write_module(self, item: StoredTensor, weight: Weight) -> Iterator[tuple[str, Tensor]]:
        """The tensors of ``weight``, which is ``item.matrix``, as ``item`` is shaped and named."""
        for name, tensor in self.write(item.name, weight).items():
            if item.stacked:  # as gpt-oss names its stacks, whatever this one is called while dense
                name = item.name + name.removeprefix(f"{item.name}.weight")
            yield name, tensor if len(item.shape) < 3 else tensor.reshape(*item.straight[:-1], *tensor.shape[1:])


WRITERS: dict[str, Writer] = {
    writer.name: writer
    for writer in (
        Writer("awq", awq.cannot_hold, awq.write_linear, awq.config_of, (4,)),
        Writer("gptq", gptq.cannot_hold, gptq.write_linear, gptq.config, gptq.BITS),
        Writer(
            "gptq_v2",
            partial(gptq.cannot_hold, version=2),
            partial(gptq.write_linear, version=2),
            partial(gptq.config, version=2),
            gptq.BITS,
        ),
        Writer(
            "compressed-tensors",
            compressed_tensors.cannot_hold,
            compressed_tensors.write_linear,
            compressed_tensors.config,
            (2, 3, 4, 5, 6, 7, 8),
        ),
        Writer("auto_round", auto_round.cannot_hold, auto_round.write_linear, auto_round.config, gptq.BITS),
        Writer("w8a8", w8a8.cannot_hold, w8a8.write_linear, w8a8.config_of),
        Writer("fp8", blocked_fp8.cannot_hold, blocked_fp8.write_linear, blocked_fp8.config),
        Writer("mxfp4", mxfp4.cannot_hold, mxfp4.write_linear, mxfp4.config),
        Writer("trellis", trellis.cannot_hold, trellis.write_linear, trellis.config),
    )
}


def vision_linears(stored: Iterable[StoredTensor]) -> list[str]:
    """What other tools might take for quantized unless they are told: matrices that a model sees with."""
    matrices = (item.name for item in stored if item.kind == "vision" and len(item.shape) == 2)
    return [name.removesuffix(".weight") for name in matrices if name.endswith(".weight")]


def adapt(weight: Weight, writer: Writer) -> tuple[Weight, str | None]:
    """(the weight in a form that ``writer`` holds, with the same numbers; None), or (as it was; why that cannot be)."""
    from toolkit.artifacts.canonical import GroupInt, Trellis

    candidate = weight.integers() if isinstance(weight, Trellis) and writer.name != trellis.METHOD else weight
    if isinstance(candidate, GroupInt) and writer.bits:
        candidate = _as_plain_group_int(candidate, writer.bits)
    elif writer.name == "fp8":
        candidate = _as_tiles(weight)
    reason = writer.cannot_hold(candidate)
    if reason is None and isinstance(candidate, GroupInt) and _wide_scales(candidate):
        reason = "its scales need float32, and readers of this format take 16 bits"
    return (candidate, None) if reason is None else (weight, reason)


def _wide_scales(weight: Any) -> bool:
    import torch

    return weight.scales.dtype == torch.float32


def _as_plain_group_int(weight: Any, bits: tuple[int, ...]) -> Any:
    """Wider codes where the width is not held, 16-bit scales where they are exact, no super-scales."""
    import torch

    scales = weight.scales
    if scales.dtype == torch.float32:
        for dtype in (torch.float16, torch.bfloat16):
            if torch.equal(scales.to(dtype).float(), scales):
                scales = scales.to(dtype)
                break
    width = next((b for b in bits if b >= weight.bits), weight.bits)
    return replace(weight, scales=scales, bits=width, super_scales=None)


def _as_tiles(weight: Weight) -> Weight:
    """float8 with a scale a row as tiles of 128 × 128, where the rows of a tile share their scale."""
    import torch

    from toolkit.artifacts.canonical import BlockFp8, Fp8

    if not isinstance(weight, Fp8):
        return weight
    rows, columns = blocked_fp8.BLOCK
    scales = torch.stack([part[0] for part in weight.scales.split(rows)])
    if not torch.equal(scales.repeat_interleave(rows)[: weight.shape[0]], weight.scales):
        return weight
    return BlockFp8(
        weight.weight, scales[:, None].expand(-1, -(-weight.shape[1] // columns)).contiguous(), (rows, columns)
    )
