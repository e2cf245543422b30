"""Build the CUDA kernels: with nvcc into one fatbin, ``python -m toolkit.kernels.cuda.build``; with g++ for the CPU.

``setup.py`` runs it too, by file name, so this file imports nothing of the toolkit. Results are kept by a digest of
sources and flags.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
FATBIN = "_kernels.fatbin"
SOURCE = "linear.cu"
# Machine code for these; PTX of the oldest for all others. "a": with instructions that only this generation has.
ARCHITECTURES = {80: "80", 86: "86", 89: "89", 90: "90a", 100: "100", 120: "120"}
FLAGS = ("-O3", "-std=c++17")
HOST_FLAGS = ("-std=c++17", "-O1", "-g0", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas")


class BuildError(Exception):
    """No compiler, or it failed; the message holds its first lines."""


def nvcc() -> str | None:
    """``$CUDACXX``, else nvcc on the path or under ``$CUDA_HOME``; None where there is none."""
    home = os.environ.get("CUDA_HOME")
    for name in (os.environ.get("CUDACXX"), "nvcc", home and str(Path(home) / "bin" / "nvcc")):
        if name and shutil.which(name):
            return name
    return None


def version(compiler: str) -> int:
    """The CUDA version of nvcc, as 13000."""
    found = re.search(r"release (\d+)\.(\d+)", _run([compiler, "--version"]))
    if found is None:
        raise BuildError(f"{compiler} does not tell its version")
    return 1000 * int(found[1]) + 10 * int(found[2])


def known_architectures(compiler: str) -> dict[int, str]:
    """Those of ``ARCHITECTURES`` that this compiler can build for."""
    known = set(re.findall(r"sm_(\w+)", _run([compiler, "--list-gpu-code"])))
    return {number: name for number, name in ARCHITECTURES.items() if number < 100 or name in known}


def build(target: Path | None = None, cache: Path | None = None, only: int | None = None) -> Path:
    """Compile the fatbin and a JSON file beside it that says what is in it; returns its path. Raises BuildError.

    ``only``: machine code for this compute capability alone, as 90, which takes less time; others have the PTX.
    """
    compiler = _nvcc()
    target = target or HERE / FATBIN
    architectures = known_architectures(compiler)
    if only is not None:
        architectures = {number: name for number, name in architectures.items() if number == only}
    flags = [*FLAGS, "-fatbin", "-gencode", "arch=compute_80,code=compute_80"]
    for name in architectures.values():
        flags += ["-gencode", f"arch=compute_{name},code=sm_{name}"]
    more = ("--threads", str(len(os.sched_getaffinity(0))))
    shutil.copyfile(_compiled([compiler], flags, FATBIN, cache, more), target)
    note = {"cuda": version(compiler), "architectures": sorted(architectures), "sources": sources()}
    target.with_suffix(".json").write_text(json.dumps(note) + "\n")
    return target


def build_cubin(architecture: int, cache: Path | None = None) -> Path:
    """The machine code for one architecture alone, for inspection."""
    return _build_one("cubin", "sm", architecture, cache)


def build_ptx(architecture: int, cache: Path | None = None) -> Path:
    """The same in PTX, which the assembler makes machine code of, as text."""
    return _build_one("ptx", "compute", architecture, cache)


def _build_one(kind: str, prefix: str, architecture: int, cache: Path | None) -> Path:
    flags = [*FLAGS, f"-{kind}", f"-arch={prefix}_{ARCHITECTURES[architecture]}"]
    return _compiled([_nvcc()], flags, f"kernels.sm_{architecture}.{kind}", cache)


def build_host(cache: Path | None = None) -> Path:
    """The same source for the CPU, a shared library that tests call."""
    compiler = os.environ.get("CXX", "g++").split()
    if shutil.which(compiler[0]) is None:
        raise BuildError("no C++ compiler found (set CXX or install g++)")
    return _compiled(compiler, list(HOST_FLAGS), "kernels_host.so", cache, ("-x", "c++"))


def sources() -> str:
    """A digest of the kernels' sources."""
    digest = hashlib.sha256()
    for source in sorted([*HERE.glob("*.cu"), *HERE.glob("*.cuh"), *HERE.glob("*.h")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _nvcc() -> str:
    if (compiler := nvcc()) is None:
        raise BuildError("no nvcc found (set CUDACXX or CUDA_HOME, or install the CUDA toolkit)")
    return compiler


def _compiled(compiler: list[str], flags: list[str], name: str, cache: Path | None, more: Sequence[str] = ()) -> Path:
    """The file ``name`` that ``compiler`` makes of the sources with ``flags``, kept in ``cache``. ``more``: flags that
    a kept file need not agree in.
    """
    digest = hashlib.sha256(f"{_run([*compiler, '--version'])} {flags} {sources()}".encode())
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "toolkit" / "build"
    kept = cache / f"cuda-{digest.hexdigest()[:16]}" / name
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_name(f".{name}.{os.getpid()}")
        _run([*compiler, *flags, *more, "-o", str(partial), str(HERE / SOURCE)])
        partial.replace(kept)
    return kept


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[:800]}")
    return done.stdout


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the CUDA kernels.")
    parser.add_argument("--arch", type=int, help="machine code for this compute capability alone, as 90")
    try:
        print(build(only=parser.parse_args().arch))
    except BuildError as error:
        sys.exit(f"toolkit: the CUDA kernels are not built: {error}")
