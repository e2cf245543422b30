"""The native library's single ops on numpy arrays, here or on another machine. Needs numpy alone.

``FarOps`` asks a Python elsewhere, such as one that an emulator runs, which serves by running this file. Calls go to
its standard input and results come back from its standard output, pickled.
"""

from __future__ import annotations

import ctypes
import pickle
import subprocess
import sys
from collections.abc import Callable
from ctypes import Structure, byref, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.runners.native import library
from toolkit.runners.native.packing.packed import PackedTensor

LINEARS = ("tk_op_linear", "tk_op_gated")


class Matrix(Structure):
    _fields_ = (
        ("format", c_int32),
        ("dtype", c_int32),
        ("bits", c_int32),
        ("group", c_int32),
        ("minima", c_int32),
        ("trellis", c_int32),
        ("rows", c_int64),
        ("cols", c_int64),
        ("data", c_void_p),
    )


class Rows(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("ldx", c_int64),
        ("q", c_void_p),
        ("ldq", c_int64),
        ("scale", c_void_p),
        ("sum", c_void_p),
        ("lds", c_int64),
        ("round", c_int32),
        ("loose", c_int32),
    )


class Store(Structure):
    _fields_ = (
        ("out", c_void_p),
        ("ld", c_int64),
        ("bias", c_void_p),
        ("bias_up", c_void_p),
        ("add", c_int32),
        ("alpha", c_float),
        ("activation", c_int32),
        ("gate_scale", c_float),
        ("later", c_void_p),
        ("laters", c_int64),
    )


class ConvRun(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("ldx", c_int64),
        ("out", c_void_p),
        ("ldo", c_int64),
        ("tail", c_void_p),
        ("ld_tail", c_int64),
        ("w", c_void_p),
        ("ldw", c_int64),
        ("bias", c_void_p),
        ("tokens", c_int64),
        ("channels", c_int64),
        ("kernel", c_int64),
        ("silu", c_int32),
    )


class StateRun(Structure):
    _fields_ = (
        ("state", c_void_p),
        ("key", c_void_p),
        ("query", c_void_p),
        ("ld", c_int64),
        ("value", c_void_p),
        ("ldv", c_int64),
        ("out", c_void_p),
        ("ldo", c_int64),
        ("keep", c_void_p),
        ("weight", c_void_p),
        ("tokens", c_int64),
        ("rows", c_int64),
        ("cols", c_int64),
        ("delta", c_int32),
    )


def _ptr(a: np.ndarray | None) -> c_void_p:
    return c_void_p(None if a is None else a.ctypes.data)


class NativeOps:
    """Every op of one instruction set on numpy arrays. ``path``: another build of the library; ``linears``: one that
    has linears alone, for those."""

    def __init__(self, isa: str, path: Path | None = None, linears: ctypes.CDLL | None = None) -> None:
        self.isa = isa
        self._name = isa.encode()
        self._lib = library.load(path or library.library_path())
        self._linears = linears

    def _call(self, name: str, *arguments: Any) -> None:
        lib = self._linears if self._linears is not None and name in LINEARS else self._lib
        assert getattr(lib, name)(self._name, *arguments) == 0

    def matrix(self, p: PackedTensor) -> Matrix:
        m = p.meta
        return Matrix(m.kind, m.dtype, m.bits, m.group, int(m.minima), m.trellis, m.rows, m.cols, p.data.ctypes.data)

    def quantize(self, x: np.ndarray, group: int, perm: np.ndarray | None = None):
        rows, cols = x.shape
        q = np.zeros((rows, cols), np.int8)
        scale, total = np.zeros((rows, cols // group), np.float32), np.zeros((rows, cols // group), np.int32)
        for i in range(rows):
            self._call(
                "tk_op_quantize",
                _ptr(x[i]),
                _ptr(perm),
                c_int64(group),
                c_int64(cols // group),
                _ptr(q[i]),
                _ptr(scale[i]),
                _ptr(total[i]),
            )
        return q, scale, total

    def _rows(self, p: PackedTensor, x: np.ndarray) -> tuple[Rows, Any]:
        if p.meta.kind == 1:
            return Rows(x.ctypes.data, x.shape[1], None, 0, None, None, 0), x
        held = self.quantize(x, p.meta.group, p.perm)
        q, scale, total = held
        return Rows(None, 0, q.ctypes.data, q.shape[1], scale.ctypes.data, total.ctypes.data, scale.shape[1]), held

    def linear(
        self,
        p: PackedTensor,
        x: np.ndarray,
        *,
        bias=None,
        add=None,
        alpha=1.0,
        activation=-1,
        tiles=None,
        rounded=False,
        loose=False,
    ) -> np.ndarray:
        count, width = len(x), p.meta.tiles * 16
        out = np.zeros((count, width), np.float32)
        if add is not None:
            out[:, : p.meta.rows] = add
        if bias is not None:
            bias = np.pad(bias, (0, width - len(bias)))
        rows, _held = self._rows(p, x)
        rows.round, rows.loose = rounded, loose
        store = Store(out.ctypes.data, width, _ptr(bias), None, int(add is not None), alpha, activation, 1.0)
        first, last = tiles or (0, p.meta.tiles)
        self._call(
            "tk_op_linear",
            byref(self.matrix(p)),
            byref(rows),
            c_int64(count),
            c_int64(first),
            c_int64(last),
            byref(store),
        )
        return out[:, : p.meta.rows]

    def gated(
        self,
        gate: PackedTensor,
        up: PackedTensor,
        x: np.ndarray,
        activation: int,
        rounded=False,
        scale=1.0,
        loose=False,
    ):
        out = np.zeros((len(x), gate.meta.tiles * 16), np.float32)
        rows, _held = self._rows(gate, x)
        rows.round, rows.loose = rounded, loose
        store = Store(out.ctypes.data, out.shape[1], None, None, 0, 1.0, activation, scale)
        self._call(
            "tk_op_gated",
            byref(self.matrix(gate)),
            byref(self.matrix(up)),
            byref(rows),
            c_int64(len(x)),
            c_int64(0),
            c_int64(gate.meta.tiles),
            byref(store),
        )
        return out[:, : gate.meta.rows]

    def linear_back(self, p: PackedTensor, x: np.ndarray, first: int, rounded: bool = False) -> np.ndarray:
        """``x`` [count, rows of the tiles from ``first`` on] times those rows."""
        out = np.zeros((len(x), p.meta.cols), np.float32)
        tiles = c_int64(first), c_int64(first + x.shape[1] // 16)
        rows = Rows(x.ctypes.data, x.shape[1], None, 0, None, None, 0, rounded)
        self._call("tk_op_linear_back", byref(self.matrix(p)), byref(rows), c_int64(len(x)), *tiles, _ptr(out))
        return out

    def row(self, p: PackedTensor, index: int, scale: float = 1.0) -> np.ndarray:
        out = np.zeros(p.meta.cols, np.float32)
        self._call("tk_op_matrix_row", byref(self.matrix(p)), c_int64(index), c_float(scale), _ptr(out))
        return out

    def rms_norm(self, x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
        out = np.zeros(len(x), np.float32)
        self._call("tk_op_rms_norm", _ptr(x), _ptr(w), c_int64(len(x)), c_float(eps), _ptr(out))
        return out

    def layer_norm(self, x: np.ndarray, w: np.ndarray, b: np.ndarray | None, eps: float) -> np.ndarray:
        out = np.zeros(len(x), np.float32)
        self._call("tk_op_layer_norm", _ptr(x), _ptr(w), _ptr(b), c_int64(len(x)), c_float(eps), _ptr(out))
        return out

    def in_place(self, name: str, x: np.ndarray, *arguments: Any) -> np.ndarray:
        y = x.copy()
        self._call(name, _ptr(y), *[_ptr(a) if isinstance(a, np.ndarray) else a for a in arguments])
        return y

    def convolve(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, tail: np.ndarray, silu: bool):
        """``x`` [tokens, channels], ``weight`` [kernel, channels]; ``tail`` [kernel - 1, channels] goes on."""
        (tokens, channels), kernel = x.shape, len(weight)
        out = np.zeros_like(x)
        sizes = tokens, channels, kernel, int(silu)
        rows = [a if a is None else a.ctypes.data for a in (x, out, tail, weight, bias)]
        wide = [v for row in rows[:4] for v in (row, channels)]
        self._call("tk_op_convolve", byref(ConvRun(*wide, rows[4], *sizes)))
        return out

    def recur(self, state: np.ndarray, key, query, value, keep, weight, delta: bool) -> np.ndarray:
        """``state`` [rows, 32] goes on; keys and queries [tokens, rows], values [tokens, cols]."""
        out = np.zeros_like(value)
        (tokens, rows), cols = key.shape, value.shape[1]
        one = [a.ctypes.data for a in (state, key, query, value, out, keep, weight)]
        sizes = tokens, rows, cols, int(delta)
        self._call("tk_op_recur", byref(StateRun(*one[:3], rows, one[3], cols, one[4], cols, *one[5:], *sizes)))
        return out

    def row_stats(self, x: np.ndarray) -> tuple[float, int, bool, float]:
        top, index, nan, total = c_float(), c_int64(), c_int32(), ctypes.c_double()
        self._call("tk_op_row_stats", _ptr(x), c_int64(len(x)), byref(top), byref(index), byref(nan), byref(total))
        return top.value, index.value, bool(nan.value), total.value

    def int_products(self, rounds: int) -> int:
        done = c_int64()
        self._call("tk_op_int_products", c_int64(rounds), byref(done))
        return done.value

    def attention(
        self,
        keys: np.ndarray,
        values: np.ndarray | None,
        queries: np.ndarray,
        lo: np.ndarray,
        hi: np.ndarray,
        *,
        kv_type: int,
        bf16: bool,
        scale: float,
        softcap: float = 0.0,
        sinks: np.ndarray | None = None,
    ) -> np.ndarray:
        out = np.zeros_like(queries)
        tokens, dim = keys.shape
        self._call(
            "tk_op_attention",
            c_int32(kv_type),
            c_int32(bf16),
            c_int64(dim),
            c_int64(tokens),
            _ptr(keys),
            _ptr(values),
            c_int64(len(queries)),
            _ptr(queries),
            _ptr(lo),
            _ptr(hi),
            c_float(scale),
            c_float(softcap),
            _ptr(sinks),
            _ptr(out),
        )
        return out


class FarPython:
    """A process that runs this file; ``command`` starts the Python that does."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen([*command, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, isa: str, name: str, *arguments: Any, **options: Any) -> Any:
        """What the method ``name`` of its ``NativeOps(isa)`` returns; arrays that it changes are changed here too."""
        assert self._process.stdin is not None and self._process.stdout is not None
        sent = [a.in_memory() if isinstance(a, PackedTensor) else a for a in arguments]  # there is no torch there
        pickle.dump((isa, name, sent, options), self._process.stdin)
        self._process.stdin.flush()
        found, changed = pickle.load(self._process.stdout)
        for mine, theirs in zip(arguments, changed, strict=True):
            if isinstance(mine, np.ndarray):
                mine[...] = theirs
        return found


class FarOps:
    """``NativeOps`` of one instruction set of a far Python."""

    def __init__(self, far: FarPython, isa: str) -> None:
        self.isa, self._far = isa, far

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments, **options: self._far.ask(self.isa, name, *arguments, **options)


def serve() -> None:
    """Answer calls until standard input ends."""
    while True:
        try:
            isa, name, arguments, options = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        found = getattr(NativeOps(isa), name)(*arguments, **options)
        pickle.dump((found, arguments), sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
