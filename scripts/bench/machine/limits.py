"""What binds the native runner: how fast this machine multiplies int8 and reads memory, and what a token needs of both.

    python scripts/bench/machine/limits.py MODEL

The rate of products is that of a loop of nothing but them and their sums in registers, by all threads at once, with the
instruction set that the runner takes.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from toolkit.base.threads import usable_cores
from toolkit.check_env.machine import read_bandwidth
from toolkit.models.eyes.vision import PREFIX
from toolkit.runners.choose import Opened, open_model
from toolkit.runners.native import library
from toolkit.runners.native.packing.pack_model import pack_model
from toolkit.runners.native.packing.packed import PackedTensor
from toolkit.runners.weights.info import info_of

PROBE = 1 << 30  # bytes: beyond every cache
PASS = 0.05  # seconds: longer than a turn that the system gives a process


def product_rate(seconds: float = 0.5, threads: int = 0, isa: str = "") -> float:
    """Operations on int8 a second, each product and each sum one, best of the passes within ``seconds``."""
    lib, name = library.load(library.library_path()), (isa or library.wanted_isa()).encode()
    threads = threads or usable_cores()

    def work(rounds: int) -> int:
        done = ctypes.c_int64()
        if lib.tk_op_int_products(name, ctypes.c_int64(rounds), ctypes.byref(done)):
            raise SystemExit(library.isa_unsupported(name.decode()))
        return done.value

    begin = time.perf_counter()
    work(rounds := 100_000)
    rounds = max(1, round(rounds * PASS / (time.perf_counter() - begin)))
    best, end = 0.0, time.perf_counter() + seconds
    with ThreadPoolExecutor(threads) as pool:
        while (begin := time.perf_counter()) < end:
            done = sum(pool.map(work, [rounds] * threads))
            best = max(best, done / (time.perf_counter() - begin))
    return best


class Needs(NamedTuple):
    """Of a token: bytes of weights that a request alone reads when it decodes; operations of a prompt's linears."""

    bytes: int
    operations: int


def needs_of(opened: Opened) -> Needs:
    """Of experts those count that a token is given to; of the embedding and of what sees pictures nothing, and of
    products those of the head neither, which a prompt needs once."""
    spec, weights = opened.spec, opened.weights()
    if isinstance(weights[spec.embed], PackedTensor):
        metas = {name: weights[name].meta for name in weights}
    else:
        outlines = ((name, info_of(weights, name)) for name in weights)
        metas = {name: packed.meta for name, packed in pack_model(spec, outlines, None, [])}
    unread = set() if spec.tied else {spec.embed}
    read: float = sum(m.nbytes for name, m in metas.items() if name not in unread and not name.startswith(PREFIX))
    products: float = 0

    def of(linears: Any) -> tuple[int, int]:
        held = [metas[x.name] for x in linears]
        return sum(m.nbytes for m in held), sum(m.rows * m.cols for m in held)

    for _, mixer in spec.mixers():
        products += of(mixer.linears())[1]
        if mixer.kind == "moe":
            size, made = of(x for expert in mixer.experts for x in expert.linears())
            idle = 1 - mixer.top_k / len(mixer.experts)
            read -= size * idle
            products -= made * idle
    return Needs(round(read), round(2 * products))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--load-format", default="auto")
    args = parser.parse_args()
    needs = needs_of(open_model(args.model, load_format=args.load_format))
    read, made = read_bandwidth(0.5, PROBE)["gb_per_s"] * 1e9, product_rate()
    print(f"memory {read / 1e9:.1f} GB/s, {needs.bytes / 1e6:.0f} MB a token: at most {read / needs.bytes:.0f} tok/s")
    share = f"{needs.operations / 1e9:.3f} G a token of a prompt"
    print(f"int8 {made / 1e9:.0f} GOPS, {share}: at most {made / needs.operations:.0f} tok/s")


if __name__ == "__main__":
    main()
