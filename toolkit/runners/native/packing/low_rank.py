"""Matrices of adapters in 8 bits, for linears whose own weights are integers. Imports torch.

Such a linear reads its input as integers in groups of columns, and so does A: codes in those groups, with a scale for
each group of a row. B has one scale a column, by which A's product is multiplied before it is rounded to 8 bits too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from toolkit.artifacts.scales import UNSCALED, Scales
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.threads import usable_cores
from toolkit.runners.native import library
from toolkit.runners.native.packing.pack import TYPES
from toolkit.runners.native.packing.packed import BF16, INT, LANES, ONES, VECTOR, PackedMeta, PackedTensor
from toolkit.runners.native.packing.side_by_side import side_by_side

MOST_ERROR = 0.02  # root mean square of what rounding changes, of a matrix; beyond it stays as it is
_GROUPS = (64, 48, 32, 16)  # columns of B whose inputs are rounded together
_MOST_THREADS = 8  # to start more takes as long as the work


@dataclass(frozen=True)
class Pair:
    """What is added to a linear: ``scale * b @ a``, with ``folded``. ``a``: [rank, in], ``b``: [out, rank], float32 or
    of 16 bits. ``group`` and ``perm``: how the linear reads its input, see ``PackedTensor``."""

    a: Tensor
    b: Tensor
    scale: float
    group: int
    perm: NDArray[np.int32] | None
    folded: Scales = UNSCALED

    def factors(self) -> tuple[Tensor | None, Tensor | None]:
        """What columns of a are multiplied by, and rows of b, float32."""
        columns, divisors = self.folded.columns, self.folded.divisors
        rows = None if divisors is None else (self.scale / divisors).float()
        return None if columns is None else columns.float().contiguous(), rows


Packed = tuple[PackedTensor, PackedTensor, PackedTensor]


def pack_pairs(pairs: Sequence[Pair]) -> list[Packed | None]:
    """A, B and B's scales of each, in one piece of memory; None where 8 bits would change one of the matrices by more
    than ``MOST_ERROR``. One call of the library reads what is stored and writes what is packed."""
    metas = [meta for pair in pairs for meta in _metas(pair)]
    data = side_by_side([meta.nbytes for meta in metas])
    made = [PackedTensor(*one) for one in zip(data, metas, strict=True)]
    held = [(pair.a.contiguous(), pair.b.contiguous(), *pair.factors()) for pair in pairs]  # until they are read
    asked: list[library.CodeRun] = []
    for i, (pair, (a, b, *each)) in enumerate(zip(pairs, held, strict=True)):
        a_codes, b_codes, steps = (x.ctypes.data for x in data[3 * i : 3 * i + 3])
        perm = None if pair.perm is None else pair.perm.ctypes.data
        columns, rows = (None if x is None else x.data_ptr() for x in each)
        asked += [
            library.CodeRun(a.data_ptr(), perm, columns, a_codes, None, *a.shape, 1, 0, TYPES[a.dtype], pair.group),
            library.CodeRun(b.data_ptr(), None, rows, b_codes, steps, *b.shape, pair.scale, 0, TYPES[b.dtype], 0),
        ]
    runs = (library.CodeRun * len(asked))(*asked)
    library.run_op("code_rows", runs, len(runs), min(usable_cores(), _MOST_THREADS))
    fine = [run.error < MOST_ERROR for run in runs]
    return [
        (made[3 * i], made[3 * i + 1], made[3 * i + 2]) if fine[2 * i] and fine[2 * i + 1] else None
        for i in range(len(pairs))
    ]


def _metas(pair: Pair) -> tuple[PackedMeta, PackedMeta, PackedMeta]:
    (rank, inputs), outputs = pair.a.shape, pair.b.shape[0]
    wide = -(-rank // LANES) * LANES
    group = next(g for g in (wide, *_GROUPS) if g <= 64 and wide % g == 0)
    return (
        PackedMeta(INT, wide, inputs, BF16, 8, pair.group),
        PackedMeta(INT, outputs, wide, ONES, 8, group),
        PackedMeta(VECTOR, wide),
    )
