"""Compile every choice that ``tune`` could try, without a GPU, and write those worth measuring to candidates.json.

env -u TRITON_INTERPRET .venv/bin/python -P scripts/gpu/compiling/prune.py --arch 90 --jobs 2
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

LEAST_WARPS = 8  # of a multiprocessor, in all blocks that fit: two a scheduler


@dataclass(frozen=True)
class Verdict:
    """One choice, compiled. ``why``: what speaks against it, None where it is worth measuring."""

    registers: int
    stack: int
    shared: int
    blocks: int
    why: str | None


def judge(usage: Any, shared: int, warps: int, capability: int) -> Verdict:
    """What a variant of ``usage`` (registers, stack and local bytes) and ``shared`` bytes is worth."""
    from toolkit.kernels.machine_code import occupancy
    from toolkit.kernels.triton.launch import shared_limit

    blocks, why = occupancy(capability, 32 * warps, usage.registers, shared), None
    if usage.stack or usage.local:
        why = f"spills {usage.stack + usage.local} bytes"
    elif shared > shared_limit(capability):
        why = f"{shared} bytes of shared memory, at most {shared_limit(capability)}"
    elif blocks * warps < LEAST_WARPS:
        why = f"{blocks * warps} warps a multiprocessor, at least {LEAST_WARPS}"
    return Verdict(usage.registers, usage.stack + usage.local, shared, blocks, why)


def trials(capability: int) -> Iterator[tuple[str, str, dict[str, int], list[Any]]]:
    """(kernel, key, choice, launches of that kernel) of everything to be compiled; one job for each key."""
    from gpu.compiling.launches import once
    from gpu.compiling.precompile import distinct
    from gpu.measuring import kernels, tune

    from toolkit.kernels.triton.launch import recording

    seen = set()
    with mock.patch.object(kernels, "seconds", once):
        for job in tune.jobs(kernels.Size(), kernels.meta(capability)):
            for choice in tune.ALL[job.kernel]:
                with recording(capability) as found:
                    row, key = job.tried(choice)
                assert "error" not in row, row
                if (job.kernel, key, str(choice)) not in seen:
                    seen.add((job.kernel, key, str(choice)))
                    ours = [x for x in found if x.kernel.__name__ == job.kernel]
                    yield job.kernel, key, choice, distinct(ours)


def verdict(launches: list[Any], capability: int) -> Verdict:
    """The worst of a choice's variants; compiles them."""
    from gpu.compiling.precompile import warm

    from toolkit.kernels.machine_code import listings

    worst: Verdict | None = None
    for launched in launches:
        compiled = warm(launched)
        ((usage, _),) = listings(compiled.asm["cubin"]).values()
        found = judge(usage, compiled.metadata.shared, launched.warps, capability)
        if worst is None or found.why is not None:
            worst = found
    assert worst is not None
    return worst


def main() -> int:
    """Compile and write; one line a choice."""
    from gpu.compiling.precompile import TargetDriver, in_processes
    from gpu.measuring.tune import CANDIDATES
    from triton.runtime import driver

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=CANDIDATES)
    options = parser.parse_args()
    driver.set_active(TargetDriver(options.arch))
    todo = list(trials(options.arch))

    def work(launches: list[Any]) -> Callable[[], dict[str, Any]]:
        return lambda: asdict(verdict(launches, options.arch))

    known = json.loads(options.out.read_text()) if options.out.is_file() else {}
    kept: dict[str, dict[str, list[Any]]] = {}
    results = in_processes([(i, work(launches)) for i, (*_, launches) in enumerate(todo)], options.jobs, 600.0)
    for i, error, found, _ in results:
        kernel, key, choice, _ = todo[i]
        why = error or found["why"]
        print(f"{kernel} {key} {choice}: {why or 'kept'} {found or ''}", flush=True)
        places = kept.setdefault(kernel, {}).setdefault(key, [])
        if why is None:
            places.append((i, choice))
    known[str(options.arch)] = {
        kernel: {key: [choice for _, choice in sorted(places, key=lambda p: p[0])] for key, places in keys.items()}
        for kernel, keys in kept.items()
    }
    options.out.write_text(as_text(known))
    return 0


def as_text(known: dict[str, Any]) -> str:
    """JSON with a key a line."""
    parts = []
    for arch, kernels in sorted(known.items()):
        inner = []
        for kernel, keys in sorted(kernels.items()):
            lines = [f"   {json.dumps(key)}: {json.dumps(choices)}" for key, choices in sorted(keys.items())]
            inner.append(f"  {json.dumps(kernel)}: {{\n" + ",\n".join(lines) + "\n  }")
        parts.append(f" {json.dumps(arch)}: {{\n" + ",\n".join(inner) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
