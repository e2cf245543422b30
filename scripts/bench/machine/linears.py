"""Linears of quantized weights with two instruction sets, or two builds of the library, in turn: billions of operations
a second of one thread.

    python scripts/bench/machine/linears.py --isas avx512vnni amx --bits 4 --group 64
    python scripts/bench/machine/linears.py --isas avx2 avx2 --libraries before.so after.so

Times are of the thread's own clock, the smallest of many, so that the ratio holds on a busy machine too.
"""

from __future__ import annotations

import argparse
import sys
import time
from ctypes import byref, c_int64
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests" / "support"))

from native_ops import NativeOps, Store

from toolkit.runners.native.library import library_path
from toolkit.runners.native.packing.packed import INT, PackedMeta, PackedTensor

SHAPES = ((1536, 576), (576, 1536), (49152, 576), (8192, 2048), (2048, 8192), (4096, 4096), (4096, 14336))
TOKENS = (8, 16, 32, 64, 256, 1024)
F16 = 2


def weight(rows: int, cols: int, bits: int, group: int) -> PackedTensor:
    """Random codes; scales of one, and zeros as the codes have them."""
    meta = PackedMeta(INT, rows, cols, F16, bits, group)
    data = np.random.default_rng(0).integers(0, 256, (meta.tiles, cols // group, meta.group_bytes), np.uint8)
    data[:, :, :32] = np.ones(16, np.float16).view(np.uint8)
    data[:, :, 32:48] = 8
    return PackedTensor(data.reshape(-1), meta)


def rates(ops: list[NativeOps], p: PackedTensor, tokens: int, seconds: float) -> list[float]:
    x = np.random.default_rng(1).standard_normal((tokens, p.meta.cols), np.float32)
    rows, _held = ops[0]._rows(p, x)
    tiles = max(2, min(p.meta.tiles, int(1e9 / (tokens * p.meta.cols * 16))))  # a call takes milliseconds
    out = np.zeros((tokens, p.meta.tiles * 16), np.float32)
    store = Store(out.ctypes.data, out.shape[1], None, None, 0, 1.0, -1, 1.0)
    best, end = [np.inf] * len(ops), time.monotonic() + seconds
    while time.monotonic() < end:
        for i, one in enumerate(ops):
            before = time.thread_time()
            one._call(
                "tk_op_linear",
                byref(one.matrix(p)),
                byref(rows),
                c_int64(tokens),
                c_int64(0),
                c_int64(tiles),
                byref(store),
            )
            best[i] = min(best[i], time.thread_time() - before)
    return [2e-9 * tokens * p.meta.cols * tiles * 16 / s for s in best]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--isas", nargs=2, default=["avx512vnni", "amx"])
    options.add_argument("--libraries", nargs=2, type=Path, default=[library_path()] * 2, help="default: the package's")
    options.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    options.add_argument("--bits", type=int, choices=(4, 8), default=4)
    options.add_argument("--group", type=int, default=64)
    options.add_argument("--seconds", type=float, default=0.3, help="for each figure")
    o = options.parse_args()
    ops = [NativeOps(isa, path) for isa, path in zip(o.isas, o.libraries, strict=True)]
    print(f"{o.bits} bits, groups of {o.group}; {' | '.join(o.isas)} | ratio")
    for rows, cols in SHAPES:
        p = weight(rows, cols, o.bits, o.group)
        for tokens in o.tokens:
            a, b = rates(ops, p, tokens, o.seconds)
            print(f"{rows} x {cols}, {tokens} tokens: {a:.0f} | {b:.0f} | {b / a:.2f}", flush=True)


if __name__ == "__main__":
    main()
