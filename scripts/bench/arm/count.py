"""How many instructions our ARM kernels execute, beside ggml's: linears and attention, under QEMU's user mode.

    CXX=aarch64-linux-gnu-g++ python -m toolkit.runners.native.build LIBRARY
    python scripts/bench/arm/count.py LIBRARY [--ggml DIR]

DIR is ggml's source. It needs aarch64-linux-gnu-g++, a C compiler, qemu-aarch64 (7.0 or later, with plugins) and, for
ggml, cmake. An operation's count is that of four calls less that of one, over three.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CXX = "aarch64-linux-gnu-g++"
ARCHITECTURES = {"i8mm": "armv8.2-a+dotprod+i8mm+bf16+fp16", "dotprod": "armv8.2-a+dotprod+fp16"}
ROWS = (1, 2, 4, 8, 64, 256)
TOKENS, DIM, SHARED = 1024, 64, 4  # of attention: keys, their width, and queries of one token that share a KV head


def counter(work: Path) -> list[str]:
    """The command before a program that counts its instructions."""
    plugin = work / "instructions.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", plugin, HERE / "instructions.c"], check=True)
    return ["qemu-aarch64", "-cpu", "max,sve=off", "-L", "/usr/aarch64-linux-gnu", "-plugin", str(plugin)]


def build_ours(work: Path) -> Path:
    kernels = HERE.parents[2] / "kernels" / "cpu"
    program = work / "ours"
    subprocess.run([CXX, "-std=c++17", "-O2", "-I", kernels, "-o", program, HERE / "ours.cpp", "-ldl"], check=True)
    return program


def build_theirs(work: Path, source: Path, name: str) -> Path:
    """ggml for one kind of processor, and the program with it."""
    folder, program = work / name, work / f"theirs-{name}"
    options = {
        "CMAKE_SYSTEM_NAME": "Linux", "CMAKE_SYSTEM_PROCESSOR": "aarch64", "CMAKE_C_COMPILER": "aarch64-linux-gnu-gcc",
        "CMAKE_CXX_COMPILER": CXX, "GGML_NATIVE": "OFF", "GGML_CPU_ARM_ARCH": ARCHITECTURES[name],
        "GGML_OPENMP": "OFF", "BUILD_SHARED_LIBS": "OFF", "GGML_BUILD_TESTS": "OFF", "GGML_BUILD_EXAMPLES": "OFF",
        "CMAKE_BUILD_TYPE": "Release",
    }  # fmt: skip
    flags = [f"-D{key}={value}" for key, value in options.items()]
    subprocess.run(["cmake", "-S", source, "-B", folder, *flags], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", folder, "-j"], check=True, stdout=subprocess.DEVNULL)
    headers = [f"-I{source / path}" for path in ("include", "src", "src/ggml-cpu")]
    libraries = [folder / "src" / f"lib{part}.a" for part in ("ggml", "ggml-cpu", "ggml-base")]
    build = [CXX, "-std=c++17", "-O2", "-static", *headers, "-o", program, HERE / "theirs.cpp", *libraries, "-lpthread"]
    subprocess.run(build, check=True)
    return program


def count(command: list[str], program: list[str], what: list[object]) -> float:
    """Instructions of one call. ``program`` takes how often before ``what``."""

    def of(times: int) -> int:
        told = [*command, *program, str(times), *map(str, what)]
        return int(subprocess.run(told, check=True, capture_output=True, text=True).stderr.split()[-1])

    return (of(4) - of(1)) / 3


def attention(command: list[str], ours: list[str], queries: int) -> float:
    """Ours of so many queries by one KV head, without the writing of its keys, which each call does too: of twice as
    many less of as many."""
    rows = SHARED * queries
    twice, once = (count(command, ours, ["attention", 1, n, TOKENS, DIM]) for n in (2 * rows, rows))
    return twice - once


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--ggml", type=Path, metavar="DIR")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        command, program = counter(work), build_ours(work)
        for name in ARCHITECTURES:
            ours = [str(program), str(options.library.resolve()), name]
            theirs = None if options.ggml is None else [str(build_theirs(work, options.ggml, name))]
            for rows in ROWS:
                told = [f"{name}, {rows} rows, 2048 x 2048:"]
                for bits, group, trellis in ((4, 64, 0), (4, 128, 0), (8, 64, 0), (3, 64, 1)):
                    found = count(command, ours, ["linear", bits, group, trellis, rows])
                    told.append(f"{'trellis' if trellis else 'int'}{bits} g{group} {found / 1e6:.2f} M")
                if theirs is not None:
                    told.append(f"ggml Q4_0 {count(command, theirs, ['linear', rows]) / 1e6:.2f} M")
                print(*told, sep="  ", flush=True)
            for queries in (1, 64):
                told = [
                    f"{name}, attention of {queries} tokens: bfloat16 {attention(command, ours, queries) / 1e6:.3f} M"
                ]
                if theirs is not None:
                    each = count(command, theirs, ["attention", queries, TOKENS, DIM]) / 8
                    told.append(f"ggml float16 {each / 1e6:.3f} M")
                print(*told, sep="  ", flush=True)


if __name__ == "__main__":
    main()
