"""The matrices of a draft head in 8 bits, its layer's in 4: the fewer bytes, the sooner a token is guessed."""

from __future__ import annotations

from ctypes import byref

import numpy as np
import torch

from toolkit.artifacts.canonical import Dense
from toolkit.runners.base import RunnerError
from toolkit.runners.head import F32, Linear
from toolkit.runners.native import library
from toolkit.runners.native.packing.pack_model import pack_head
from toolkit.runners.native.packing.packed import LANES, PackedTensor

BITS = 8  # a wrong guess costs time alone
GROUP = 32  # inputs that have a scale in 4 bits; where they make no groups there are 8
LAYER_BITS = 4  # of its layer, most of a large head: a trained one guesses as well so, but not with all in 4


def packed_bytes(name: str, shape: tuple[int, ...]) -> int:
    """Of a matrix [out, in] of a head."""
    return _packed(name, torch.empty(shape, device="meta")).meta.nbytes


def _packed(name: str, weight: torch.Tensor) -> PackedTensor:
    few = name.startswith("layers.") and weight.shape[1] % GROUP == 0
    return pack_head("draft head", Dense(weight), LAYER_BITS if few else BITS, [])


class Linears:
    """Makes functions of matrices, which ``threads`` threads compute."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._lib, self._isa = library.load(library.library_path()), library.wanted_isa().encode()

    def __call__(self, name: str, weight: F32) -> Linear:
        """What multiplies rows by a matrix [out, in], float32; where its inputs make no groups its numbers stay."""
        packed = _packed(name, torch.from_numpy(np.ascontiguousarray(weight))).in_memory()
        record, out = library.tensor_records([packed])[0], packed.meta.tiles * LANES

        def linear(x: F32) -> F32:
            x = np.ascontiguousarray(x, np.float32)
            to = np.empty((len(x), out), np.float32)
            where = x.ctypes.data, len(x), to.ctypes.data
            if self._lib.tk_linear(self._isa, byref(record), *where, self._threads):
                raise RunnerError(f"the draft head: {library.error(self._lib)}")
            return to[:, : packed.meta.rows]

        return linear
