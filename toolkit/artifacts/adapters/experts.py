"""Low-rank matrices of experts that one parameter holds together, as PEFT writes them (``target_parameters``).

Source: ``ParamWrapper`` in https://github.com/huggingface/peft (tuners/lora/layer.py). transformers 5 stacks experts,
whatever the checkpoint does: ``MODULE.experts`` has ``gate_up_proj`` and ``down_proj``. A wrapper of the second
parameter lies around that of the first, whose name gets ``.base_layer``; neither says which of the two it is, but
sizes do. lora_A is [experts · r, in], an expert's rows together; lora_B [out, r · experts], an expert's columns apart.
Of matrices that are stored [in, out], and whose class does not say so (Llama 4), the two change places.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import DecoderSpec, MoeSpec, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

_MODULE = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:.*\.)?experts((?:\.base_layer)*)")


@dataclass(frozen=True)
class Stack:
    """A parameter that PEFT adapts: ``name``, as patterns call it; its ``shape`` [out, in], of each expert; in
    ``parts`` the linears of each expert, with their rows in it (None = all). ``swapped``: A is of what it gives, B of
    what it reads."""

    name: str
    shape: tuple[int, int]
    parts: tuple[tuple[tuple[str, list[int] | None], ...], ...]
    swapped: bool = False

    @property
    def names(self) -> set[str]:
        """Of all linears in it."""
        return {name for linears in self.parts for name, _ in linears}

    def split(self, a: Tensor, b: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(linear, its [r, in], its [out, r]) of ``a`` [experts · r, …] and ``b`` […, r · experts]."""
        count = len(self.parts)
        each_a, each_b = a.view(count, -1, a.shape[1]), b.view(b.shape[0], -1, count)
        for expert, linears in enumerate(self.parts):
            reads, gives = each_a[expert], each_b[:, :, expert]
            if self.swapped:
                reads, gives = gives.T, reads.T
            for name, rows in linears:
                yield name, reads.contiguous(), (gives if rows is None else gives[rows]).contiguous()


def stack_of(
    module: str, a: tuple[int, ...], b: tuple[int, ...], spec: DecoderSpec, stored: Sequence[StoredTensor]
) -> Stack | None:
    """What a module with matrices of these shapes adapts; None where that are no stacked experts of the model."""
    match = _MODULE.fullmatch(module)
    moe = None if match is None else next((m for i, m in spec.mixers() if i == int(match[1]) and m.kind == "moe"), None)
    if match is None or moe is None:
        return None
    plain, first = module.removesuffix(match[2]), moe.experts[0]
    joined = "up_proj" if first.gate is None else "gate_up_proj"
    rows = _joined_rows(moe, stored)
    found = (
        Stack(
            f"{plain}.{joined}",
            (sum(x.out_features for x in first.readers()), first.up.in_features),
            tuple(tuple(zip((x.name for x in e.readers()), rows, strict=True)) for e in moe.experts),
        ),
        Stack(
            f"{plain}.down_proj",
            (first.down.out_features, first.down.in_features),
            tuple(((e.down.name, None),) for e in moe.experts),
        ),
    )
    if a[0] != b[1] or a[0] % len(moe.experts):
        return None
    straight = next((s for s in found if s.shape == (b[0], a[1])), None)
    return straight or next((replace(s, swapped=True) for s in found if s.shape == (a[1], b[0])), None)


def _joined_rows(moe: MoeSpec, stored: Sequence[StoredTensor]) -> list[list[int]]:
    """Rows of each of an expert's readers where they are one matrix: as a checkpoint that stacks experts has them, else
    one below the other."""
    names = [x.name for x in moe.experts[0].readers()]
    for item in stored:
        own = {part.name: item.rows_of(part) for part in item.parts if part.name in names}
        if item.stacked and len(own) == len(names):
            return [own[name] for name in names]
    sizes = [x.out_features for x in moe.experts[0].readers()]
    return [list(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes))]
