"""Compile the kernels of a stage before it begins, in as many processes as there are cores, into Triton's cache.

What to compile is recorded (``launches``). Each launch goes through ``JITFunction.run`` as on a GPU, with a driver that
only says what the GPU is: so Triton computes the key of its cache itself, and a launch finds what lies there. Each
variant is compiled in a process of its own, forked from one that holds all launches and no GPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from toolkit.kernels.triton.launch import Launch, settle
from toolkit.kernels.triton.tuning import tuned_for

VARIANT_SECONDS = 120.0


class TargetDriver:
    """In the place of Triton's active driver: says what to compile for, opens no GPU and launches nothing."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Done:
    """One variant. ``error``: one line, None where it is in the cache, in ``folder``; ``hit``: it was there before."""

    kernel: str
    error: str | None
    hit: bool
    folder: str
    seconds: float


def warm(launched: Launch) -> Any:
    """What Triton compiles for a launch; nothing is launched."""
    settle(launched.kernel)
    arguments = launched.arguments.values()
    return launched.kernel.warmup(*arguments, grid=launched.grid, **launched.options, **launched.constants)


def distinct(launches: list[Launch]) -> list[Launch]:
    """Each variant once, as Triton tells them apart. ``TargetDriver`` must be active."""
    found: dict[str, Launch] = {}
    for launched in launches:

        def seen(*, key: Any, fn: Any, launched: Launch = launched, **_: Any) -> bool:
            found.setdefault(f"{fn.module}.{fn.name} {key}", launched)
            return True  # as if it were cached: do not compile

        with triton.knobs.runtime.scope():
            triton.knobs.runtime.jit_cache_hook = seen
            warm(launched)
    return list(found.values())


def _compile(launched: Launch) -> tuple[bool, str]:
    """Compile a launch; whether it was in the cache, and the name of its folder there."""
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    compiled = warm(launched)
    _launcher(compiled)
    return all(hits), Path(next(iter(compiled.metadata_group.values()))).parent.name


def _launcher(compiled: Any) -> None:
    """Build what hands the arguments over: Triton before 3.7 compiles C for each signature, which needs the driver."""
    from triton.backends.nvidia import driver as nvidia

    if hasattr(nvidia, "make_launcher"):
        try:
            nvidia.library_dirs()
        except Exception:  # no libcuda on this machine
            return
        nvidia.CudaLauncher(compiled.src, compiled.metadata)


def _work(run: Callable[[], Any], out: Connection) -> None:
    """In a process of its own: send (error, result)."""
    try:
        out.send((None, run()))
    except BaseException as error:
        out.send((f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", None))


def in_processes(
    work: Sequence[tuple[int, Callable[[], Any]]], workers: int, limit: float
) -> Iterator[tuple[int, str | None, Any, float]]:
    """Call each in a process of its own, ``workers`` at a time: (its number, error, result, seconds) as they end.

    One that dies or takes longer than ``limit`` seconds is an error, one line; the others go on.
    """
    context, todo = multiprocessing.get_context("fork"), list(reversed(work))
    running: dict[Connection, tuple[Any, int, float]] = {}
    while todo or running:
        while todo and len(running) < workers:
            number, run = todo.pop()
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(run, there), daemon=True)
            process.start()
            there.close()
            running[here] = (process, number, time.perf_counter())
        ready = set(wait(list(running), timeout=1.0))
        for connection, (process, number, begun) in list(running.items()):
            seconds = time.perf_counter() - begun
            if connection not in ready and seconds < limit:
                continue
            if connection in ready:
                try:
                    error, result = connection.recv()
                except EOFError:
                    process.join(5)
                    error, result = f"the compiler died (exit code {process.exitcode})", None
            else:
                error, result = f"took longer than {limit:.0f} s", None
                process.kill()
            del running[connection]
            connection.close()
            process.join(5)
            yield number, error, result, seconds


def compile_all(launches: list[Launch], workers: int, limit: float = VARIANT_SECONDS) -> Iterator[Done]:
    """Compile each of ``launches`` in a process of its own, ``workers`` at a time; ``Done`` as they end."""
    from triton.runtime.cache import triton_key

    triton_key()  # reads all of Triton once: the processes inherit it
    work = [(i, functools.partial(_compile, launched)) for i, launched in enumerate(launches)]
    for i, error, found, seconds in in_processes(work, workers, limit):
        hit, folder = found or (False, "")
        yield Done(launches[i].kernel.__name__, error, hit, folder, round(seconds, 2))


def stages(capability: int) -> dict[str, Callable[[], list[Launch]]]:
    """What each stage of the scripts launches."""
    from gpu.checking.alike import FAMILIES as ALIKE
    from gpu.checking.items import SERVED_FIRST, SMOKE_OPS, runner_items
    from gpu.compiling import launches
    from gpu.measuring import engine

    return {
        "smoke": lambda: [
            *launches.of_ops(list(SMOKE_OPS), capability, "first"),
            *launches.of_check("llama", 0, capability),
        ],
        "runner": lambda: [
            *(x for family, policy in runner_items() for x in launches.of_check(family, policy, capability)),
            *(x for family in ALIKE for x in launches.of_alike(family, capability)),
        ],
        "ops": lambda: launches.of_ops(None, capability),
        "attention": lambda: launches.of_manifest(capability, SERVED_FIRST),
        "manifest": lambda: launches.of_manifest(capability),
        "self-test": lambda: launches.of_ops(None, capability, "gate"),
        "engine": lambda: [x for case in engine.CASES for x in launches.of_case(case, capability)],
        "kernels": lambda: launches.of_kernels(capability),
        "tune": lambda: launches.of_tuning(capability),
    }


def start_nvcc(capability: int) -> subprocess.Popen[str] | None:
    """The CUDA kernels' build for one GPU, in a process that leads a group, where those of these sources are not there
    and nvcc is.
    """
    from toolkit.kernels.cuda.build import nvcc, sources
    from toolkit.kernels.cuda.driver import FATBIN, fatbin_note

    if (fatbin_note(FATBIN) or {}).get("sources") == sources() or nvcc() is None:
        return None
    command = [sys.executable, "-m", "toolkit.kernels.cuda.build", "--arch", str(capability)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0)


def finish_nvcc(build: subprocess.Popen[str], limit: float) -> list[str]:
    """What went wrong with the CUDA kernels' build, which is ended after ``limit`` seconds more."""
    from gpu.process import kill

    try:
        _, said = build.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        kill(build)
        return ["CUDA kernels: nvcc was not ready in time"]
    return [f"CUDA kernels: {' '.join(said.split())[:600]}"] if build.returncode else []


def record(names: list[str], capability: int, device: str | None) -> tuple[list[Launch], list[str]]:
    """(each variant that the stages ``names`` launch once, errors). A stage that cannot be recorded costs compiling
    later; what is wrong with it it will say itself.
    """
    found: list[Launch] = []
    errors: list[str] = []
    with tuned_for(device):
        for name in names:
            try:
                found += stages(capability)[name]()
            except Exception as error:
                errors.append(f"{name} cannot be recorded: {type(error).__name__}: {error}")
    return distinct(found), errors


def precompile(
    names: list[str],
    capability: int,
    device: str | None,
    workers: int,
    seconds: float,
    folders: list[str] | None = None,
) -> dict[str, Any]:
    """Compile what the stages ``names`` launch within about ``seconds``; counts and errors. Stage "cuda" is the CUDA
    kernels.

    ``device``: the GPU's name in tuned/, None for the choices in code; ``folders``: gets the names of those in the
    cache.
    """
    begun, end = time.perf_counter(), time.perf_counter() + seconds
    cuda = start_nvcc(capability) if "cuda" in names else None
    driver.set_active(TargetDriver(capability))
    todo, errors = record([name for name in names if name != "cuda"], capability, device)
    print(f"precompile: {len(todo)} variants, {workers} processes", flush=True)
    compiled = cached = 0
    for i, done in enumerate(compile_all(todo, workers), 1):
        if done.error is not None:
            errors.append(f"{done.kernel}: {done.error}")
        cached += done.hit
        compiled += not done.hit and done.error is None
        if folders is not None and done.error is None:
            folders.append(done.folder)
        if i % 50 == 0:
            print(f"precompile: {i} of {len(todo)}, {time.perf_counter() - begun:.0f} s", flush=True)
        if time.perf_counter() > end and i < len(todo):
            errors.append(f"{len(todo) - i} variants are left for when they are launched: {seconds:.0f} s are over")
            break
    if cuda is not None:
        errors += finish_nvcc(cuda, max(5.0, end - time.perf_counter()))
    counts = {"variants": len(todo), "compiled": compiled, "cached": cached, "cuda": cuda is not None}
    return counts | {"errors": errors, "seconds": round(time.perf_counter() - begun, 1)}


def main() -> int:
    """Compile; prints the counts as JSON. The exit code is 1 where something did not compile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "stages",
        nargs="*",
        default=["smoke"],
        help="cuda, smoke, attention, runner, self-test, ops, manifest, kernels, engine, tune",
    )
    parser.add_argument("--arch", type=int, default=90, help="compute capability, as 90")
    parser.add_argument("--device", help="the GPU's name in kernels/triton/tuned, as nvidia-h200")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seconds", type=float, default=300.0, help="stop after so many")
    options = parser.parse_args()
    found = precompile(options.stages, options.arch, options.device, options.jobs, options.seconds)
    print(json.dumps(found), flush=True)
    return 1 if found["errors"] else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
