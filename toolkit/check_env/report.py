"""The whole report as one dictionary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from toolkit.base.extras import explain
from toolkit.check_env import machine
from toolkit.check_env.gpu import gpu_support
from toolkit.check_env.links import backends, links
from toolkit.check_env.native import native_variants
from toolkit.check_env.self_test import engine_self_test
from toolkit.runners.coverage import native_refuses

KERNEL_SECONDS = 4.0  # the whole self-test stays within ten seconds


def report(on_step: Callable[[str], None] = lambda step: None) -> dict[str, Any]:
    """Facts, kernels and self-tests; ``on_step`` is told what is being looked at.

    Keys: versions, cpu, memory (GiB), memory_bandwidth (GB/s), gpus, gpu_topology, gpu_support (rows of gpu, what,
    here), links (rows of name, up, mbit_per_s, loopback), ranks (rows of name, runs, why_not, between: what ranks of a
    model speak by), devices (rows of device, what, why_not, total_gib, free_gib), environment, native (rows of isa,
    runs, chosen, why_not), native_refuses (family → why pytorch runs it), kernels (rows of op, implementation, runs,
    chosen, why_not), self_test (rows of name, passed, detail, seconds), no_torch (why what needs torch was left out,
    None where it was not: GPUs, devices, kernels, self_test).
    """
    on_step("Measuring memory bandwidth")
    found: dict[str, Any] = {
        "versions": machine.versions(),
        "cpu": machine.cpu(),
        "memory": machine.memory(),
        "memory_bandwidth": machine.read_bandwidth(),
    }
    on_step("Looking for GPUs")
    no_torch = found["no_torch"] = _no_torch()
    found["gpus"] = [] if no_torch else machine.gpus()
    found["devices"] = [] if no_torch else machine.devices()
    found["gpu_topology"] = machine.gpu_topology()
    found["gpu_support"] = gpu_support(found["gpus"], no_torch or _why_no_gpu())
    found["environment"] = machine.environment()
    found["links"] = links()
    found["ranks"] = [] if no_torch else backends()
    found["native"] = native_variants()
    found["native_refuses"] = native_refuses()
    found["kernels"], found["self_test"] = [], []
    if no_torch:
        return found
    on_step("Testing kernels")
    here = [row["device"] for row in found["devices"] if row["why_not"] is None]
    target = _target(found["gpus"], here)
    found["kernels"] = kernel_rows(target)
    found["self_test"] = kernel_tests(target)
    on_step("Testing the engine")
    found["self_test"] += engine_tests(here)
    return found


def _no_torch() -> str | None:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if (told := explain(error)) is None:
            raise
        return told
    return None


def _why_no_gpu() -> str | None:
    from toolkit.runners.tensor.devices.find import why_no_gpu

    return why_no_gpu()


def _target(gpus: list[dict[str, Any]], devices: Sequence[str]) -> Any:
    """What kernels are tested on: the first GPU, else the first of ``devices``, else the CPU."""
    from toolkit.kernels import Target

    if not gpus:
        return Target(devices[0] if devices else "cpu", "float32")
    major, minor = gpus[0]["capability"].split(".")
    return Target(gpus[0]["kernels"], "float16", int(major) * 10 + int(minor))


def kernel_rows(target: Any) -> list[dict[str, Any]]:
    """Op by implementation on ``target``: does it run, is it what would run, and why not."""
    from toolkit.kernels import describe

    return [
        {
            "op": row.op,
            "implementation": row.implementation,
            "runs": row.reason is None,
            "chosen": row.chosen,
            "why_not": row.reason,
        }
        for row in describe(target)
    ]


def kernel_tests(target: Any) -> list[dict[str, Any]]:
    """Each implementation against the reference."""
    from toolkit.kernels import self_test

    return [
        {
            "name": f"{row.op}, {row.implementation}",
            "passed": row.error is None,
            "detail": row.error
            or ("ran" if row.implementation == "reference" else "agrees in") + f" {row.cases} cases",
            "seconds": round(row.seconds, 2),
        }
        for row in self_test(target, KERNEL_SECONDS)
    ]


def engine_tests(devices: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The engine on each backend that there is: the one chosen by default, and pytorch where that is another; and on
    each of ``devices``."""
    tests = [engine_self_test()]
    if tests[0]["detail"].startswith("turbomind"):
        tests.append(engine_self_test("pytorch"))
    return tests + [engine_self_test("pytorch", name) for name in devices]
