"""Linears compiled by themselves (``NativeOps``): what this processor would not choose is tested, too."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from toolkit.runners.native import build


def compiled(folder: Path, isa: str, *sources: str) -> ctypes.CDLL | None:
    """A library for ``isa``'s instructions, of files of tests/native and of the kernels; None: no C++ compiler."""
    compiler, kernels = build.compiler(), build.kernel_folder()
    if compiler is None:
        return None
    tests, file = Path(__file__).parents[1] / "native", folder / "model.so"
    files = [next(at / name for at in (tests, kernels) if (at / name).exists()) for name in sources]
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", f"-I{kernels}", "-DTK_ISA=model"]
    more = build.ISAS.get(build.architecture(compiler), build.GENERIC)[isa].flags.split()
    subprocess.run([*compiler.split(), *flags, *more, *files, "-o", file], check=True)
    return ctypes.CDLL(str(file))
