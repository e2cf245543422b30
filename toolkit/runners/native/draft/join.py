"""A linear by itself on the native library: what joins hidden states of a model, or a state and an embedding."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from toolkit.artifacts.canonical import Dense
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.threads import usable_cores
from toolkit.models.spec import LinearSpec
from toolkit.runners.base import RunnerError
from toolkit.runners.drafts.head import F32
from toolkit.runners.native import library
from toolkit.runners.native.mixers import flat
from toolkit.runners.native.packing.pack_model import pack_head
from toolkit.runners.native.packing.packed import PackedTensor
from toolkit.runners.native.runner import NativeRunner
from toolkit.runners.native.tensors import Tensors

BITS = 8  # as the layers of a draft have; a wrong guess costs time alone


def pack_join(weight: Tensor, dtype: str) -> PackedTensor:
    """A matrix [out, in] in 8 bits, beside a model that computes in float32 as it is."""
    return pack_head("the join of a draft", Dense(weight), 16 if dtype == "float32" else BITS, []).in_memory()


def join_bytes(join: LinearSpec, dtype: str) -> int:
    """Of what ``pack_join`` makes of float32 numbers."""
    return pack_join(torch.empty(join.out_features, join.in_features, device="meta"), dtype).meta.nbytes


def threads_of(runner: NativeRunner) -> int:
    """As many as its steps have."""
    return runner.options.threads or usable_cores()


@dataclass(frozen=True)
class Normed:
    """RMS norm of ``sets`` parts of a row, each by its own of the ``weight`` numbers of all."""

    weight: F32
    sets: int
    eps: float


class NativeJoin:
    """``matrix``: [out, in], packed; ``norm``: what a row goes through before. Raises RunnerError where that cannot
    be."""

    def __init__(self, matrix: PackedTensor, threads: int, bias: F32 | None = None, norm: Normed | None = None) -> None:
        self._in, self._out = matrix.meta.cols, matrix.meta.rows
        self._library = library.load(library.library_path())
        tensors = Tensors({})
        record = {
            "parts": 1 if norm is None else norm.sets,
            "join": {"matrix": tensors.add(matrix), "bias": None if bias is None else tensors.numbers(bias)},
            "norm": None
            if norm is None
            else {
                "size": norm.weight.size // norm.sets,
                "sets": norm.sets,
                "layer": False,
                "weight": tensors.numbers(norm.weight),
                "eps": norm.eps,
            },
        }
        names, values = zip(*flat(record), strict=True)
        self._held = tensors.found  # which the library points into
        self._join = library.create(self._library.tk_join_create, names, values, self._held, threads)
        if not self._join:
            raise RunnerError(f"the join of a draft cannot be made: {library.error(self._library)}")

    def __call__(self, x: F32) -> F32:
        """[rows, in] → [rows, out]. Raises RunnerError where it fails."""
        given = np.ascontiguousarray(x, np.float32).reshape(-1, self._in)
        to = np.empty((len(given), self._out), np.float32)
        if not len(given):
            return to
        if self._library.tk_join_run(self._join, given.ctypes.data, len(given), to.ctypes.data):
            raise RunnerError(f"the join of a draft: {library.error(self._library)}")
        return to

    def __del__(self) -> None:
        if getattr(self, "_join", None):
            self._library.tk_join_free(self._join)
