"""Build the native library with the C++ compiler at hand: ``python -m toolkit.runners.native.build [FILE]``.

With ``--debug`` or ``--sanitize`` it builds another one beside it. With ``--commands`` it writes
``compile_commands.json``, for clangd and the like, to the current directory instead.
``setup.py`` runs it too, by file name, so this file imports nothing of the toolkit. The op families of
``kernels/cpu`` are compiled once for every instruction set, the executor once; objects that are newer than all sources
and headers are kept. ``TOOLKIT_NATIVE_ISAS=here`` compiles for this processor alone, a quarter of the work. A cross
compiler in ``CXX`` (``aarch64-linux-gnu-g++``) makes the library for its processors. It links to the C++ standard
library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
LIBRARY = "_native.so"

ISAS_VARIABLE = "TOOLKIT_NATIVE_ISAS"  # all (the default) or here
FAMILIES = (
    "linear/int",
    "linear/dense",
    "linear/trellis",
    "rowwise",
    "quantize/round_rows",
    "quantize/code_rows",
    "quantize/fit_scales",
    "quantize/trellis",
    "attention/kv_cache",
    "attention/kv_codes",
    "attention/attention",
    "state",
    "table",
)


class Isa(NamedTuple):
    """An instruction set: the compiler's flags, what /proc/cpuinfo must show for it (kernels/cpu/dispatch.cpp asks
    the processor itself), the sources compiled for it, and the instruction set whose kernels do the rest."""

    flags: str
    needs: frozenset[str]
    families: tuple[str, ...] = FAMILIES
    rest: str | None = None


AVX2 = frozenset({"avx2", "fma", "f16c"})
AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16"})
GENERIC = {"generic": Isa("", frozenset())}
X512 = (
    "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx512bf16 "
    # g++ 12 warns inside its own intrinsics
    "-mprefer-vector-width=512 -Wno-uninitialized -Wno-maybe-uninitialized"
)
# Architecture, as compilers call it -> its instruction sets, best first.
ISAS = {
    "x86_64": {
        "amx": Isa(
            f"{X512} -mamx-tile -mamx-int8 -mamx-bf16",
            AVX2 | AVX512 | {"amx_tile", "amx_int8", "amx_bf16"},
            ("amx/linear", "amx/loose", "attention/attention", "amx/attention", "amx/codes", "amx/table"),
            "avx512vnni",
        ),
        "avx512vnni": Isa(X512, AVX2 | AVX512),
        "avxvnni": Isa("-mavx2 -mfma -mf16c -mavxvnni", AVX2 | {"avx_vnni"}),
        "avx2": Isa("-mavx2 -mfma -mf16c", AVX2),
        **GENERIC,
    },
    "aarch64": {
        "i8mm": Isa("-DTK_NEON -march=armv8.2-a+dotprod+i8mm+bf16", frozenset({"asimddp", "i8mm", "bf16"})),
        "dotprod": Isa("-DTK_NEON -march=armv8.2-a+dotprod", frozenset({"asimddp"})),
        "neon": Isa("-DTK_NEON -march=armv8-a", frozenset({"asimd"})),
        **GENERIC,
    },
}
COMMON = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-ffp-contract=off",
    "-fno-math-errno",
]
CHECKS = "address,bounds,shift,signed-integer-overflow,integer-divide-by-zero,float-cast-overflow,alignment,null"
# variable tracking takes minutes in the unrolled kernels
SANITIZE = [
    "-g1",
    "-O1",
    "-fno-var-tracking",
    f"-fsanitize={CHECKS}",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
]
DEBUG = ["-g", "-O0"]  # behind COMMON's -O3: the last one counts
# What is built besides the library itself, each into a file of its own, and its flags.
OTHERS = {"sanitized": SANITIZE, "debug": DEBUG}

Unit = tuple[Path, str, list[str]]  # source, object name, extra flags


class BuildError(Exception):
    """No compiler, or it failed; the message holds its first lines."""


def compiler() -> str | None:
    """The C++ compiler: ``$CXX``, else g++, c++ or clang++; None where there is none."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if name and shutil.which(name.split()[0]):
            return name
    return None


def kernel_folder() -> Path:
    """``kernels/cpu``, in the source tree or installed."""
    for root in (HERE.parents[1] / "kernels", HERE.parents[2] / "kernels"):
        if (root / "cpu" / "ops.h").exists():
            return root / "cpu"
    raise BuildError(f"{HERE}: the kernel sources (kernels/cpu) are missing")


def newer_source(library: Path) -> Path | None:
    """A source of the source tree that changed after ``library`` was built; times of installed sources tell nothing."""
    kernels = HERE.parents[2] / "kernels" / "cpu"
    sources = [file for folder in (kernels, HERE) for end in ("*.h", "*.cpp") for file in folder.rglob(end)]
    newest = max(sources, key=lambda file: file.stat().st_mtime)
    return newest if kernels.is_dir() and newest.stat().st_mtime > library.stat().st_mtime else None


def _units(kernels: Path, isas: dict[str, Isa]) -> list[Unit]:
    """Every compilation."""
    # The longest first, so that no core waits for the last one: compilers without vector instructions unroll a lot.
    wanted = ((f, i) for i, isa in isas.items() for f in isa.families)
    slowest_first = sorted(wanted, key=lambda unit: unit[1] != "generic")
    units = [
        (kernels / f"{f}.cpp", f"{f.replace('/', '-')}.{i}", [f"-DTK_ISA={i}", *isas[i].flags.split()])
        for f, i in slowest_first
    ]
    dispatch = (kernels / "dispatch.cpp", "dispatch." + "-".join(isas), [f"-DTK_HAVE_{isa}" for isa in isas])
    once = [kernels / "single_ops.cpp", *sorted(HERE.rglob("*.cpp"))]
    return [*units, dispatch, *((s, s.stem, []) for s in once)]


def architecture(cxx: str) -> str:
    """What the compiler makes code for: x86_64, aarch64, …; without a compiler what this machine is."""
    try:
        done = subprocess.run([*cxx.split(), "-dumpmachine"], capture_output=True, text=True)
    except OSError:
        return os.uname().machine
    return done.stdout.partition("-")[0].strip() or os.uname().machine


def wanted_isas(cxx: str) -> dict[str, Isa]:
    """The instruction sets to compile for: all of the architecture that the compiler makes code for, or with
    ``TOOLKIT_NATIVE_ISAS=here`` the best that this processor has, as far as /proc/cpuinfo tells, and what does the rest
    for it. Raises BuildError for another value, and for ``here`` with a compiler for other processors."""
    asked, machine = os.environ.get(ISAS_VARIABLE) or "all", architecture(cxx)
    isas = dict(ISAS.get(machine, GENERIC))
    if "amx" in isas and not _knows(cxx, isas["amx"].flags):
        del isas["amx"]
    if asked == "all":
        return isas
    if asked != "here":
        raise BuildError(f"{ISAS_VARIABLE}: expected all or here, found {asked!r}")
    if machine != os.uname().machine:
        raise BuildError(f"{ISAS_VARIABLE}=here: {cxx} compiles for {machine}, this machine is {os.uname().machine}")
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    flags = next((set(line.split()) for line in lines if line.startswith(("flags", "Features"))), None)
    if flags is None:
        return isas
    return _with_rest(isas, next(name for name, isa in isas.items() if isa.needs <= flags))


def _with_rest(isas: dict[str, Isa], name: str) -> dict[str, Isa]:
    """One instruction set, and what does the rest for it."""
    rest = isas[name].rest
    return {name: isas[name]} | ({rest: isas[rest]} if rest else {})


def _knows(cxx: str, flags: str) -> bool:
    """Whether the compiler, if there is one, takes the flags."""
    command = [*cxx.split(), *flags.split(), "-fsyntax-only", "-x", "c++", os.devnull]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return True


def build(target: Path | None = None, objects: Path | None = None, *, other: str | None = None, jobs: int = 0) -> Path:
    """Compile and link, with the flags of OTHERS too where one is named; returns the library's path. Raises
    BuildError."""
    cxx = compiler()
    if cxx is None:
        raise BuildError("no C++ compiler found (set CXX or install g++)")
    kernels = kernel_folder()
    more = OTHERS[other] if other else []
    target = target or HERE / (f"_native_{other}.so" if other else LIBRARY)
    flags = [*COMMON, *more, *_includes(kernels)]
    if objects is None:
        key = hashlib.sha256(f"{kernels} {cxx} {flags}".encode()).hexdigest()[:12]
        objects = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "toolkit" / "build" / key
    objects.mkdir(parents=True, exist_ok=True)
    headers = max(h.stat().st_mtime for h in [*kernels.rglob("*.h"), *HERE.rglob("*.h"), Path(__file__)])
    units = _units(kernels, wanted_isas(cxx))

    def compile_one(unit: Unit) -> Path:
        source, name, _ = unit
        out = objects / f"{name}.o"
        if not out.exists() or out.stat().st_mtime < max(headers, source.stat().st_mtime):
            partial = objects / f"{name}.{os.getpid()}.o"
            _run(_command(cxx, flags, unit, partial))
            partial.replace(out)
        return out

    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        built = list(pool.map(compile_one, units))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    link = ["-shared", "-pthread", *more]
    _run([*cxx.split(), *link, *map(str, built), "-o", str(partial)])
    partial.replace(target)
    return target


def _includes(kernels: Path) -> list[str]:
    return [f"-I{kernels}", f"-I{HERE}"]


def _command(cxx: str, flags: list[str], unit: Unit, out: Path) -> list[str]:
    source, _, extra = unit
    return [*cxx.split(), *flags, *extra, "-c", str(source), "-o", str(out)]


def write_commands(file: Path) -> None:
    """The database of compilations, one for each source: that of the best instruction set."""
    kernels, cxx = kernel_folder(), compiler() or "c++"
    flags, isas = [*COMMON, *_includes(kernels)], wanted_isas(cxx)
    best = next(iter(isas))
    entries = [
        {"directory": str(HERE), "file": str(unit[0]), "arguments": _command(cxx, flags, unit, Path(f"{unit[1]}.o"))}
        for unit in _units(kernels, _with_rest(isas, best))
    ]
    file.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.stderr.strip():
        print(done.stderr, file=sys.stderr)
    if done.returncode:
        raise BuildError(f"{command[0]} failed on {command[-3]}: {done.stderr.strip()[:400]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the native library with the C++ compiler at hand.")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="the library (default: beside the package)")
    kinds = parser.add_mutually_exclusive_group()
    for flag, name, told in (
        ("--sanitize", "sanitized", "with the address and undefined behaviour sanitizers"),
        ("--debug", "debug", "without optimization, for gdb"),
    ):
        told += f", to _native_{name}.so unless FILE is given"
        kinds.add_argument(flag, dest="other", action="store_const", const=name, help=told)
    kinds.add_argument("--commands", action="store_true", help="write compile_commands.json here instead, for clangd")
    options = parser.parse_args()
    try:
        if options.commands:
            write_commands(Path("compile_commands.json"))
        else:
            print(build(options.file, other=options.other))
    except BuildError as e:
        raise SystemExit(str(e)) from e


if __name__ == "__main__":
    main()
