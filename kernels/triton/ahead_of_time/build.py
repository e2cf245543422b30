"""Ahead-of-time compilation of the manifest, without a GPU, and what must hold of the result."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ...machine_code import Built, faults, listings, occupancy, shown
from ...op import Target
from ...registry import load
from ..launch import INTERPRETED, Launch, recording, shared_limit
from .manifest import EXCUSED, calls, claims

ARCHITECTURES = (80, 86, 89, 90)
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Variant:
    """The ``index``-th launch of call ``op``/``label`` with activations of ``dtype``, on ``architecture``."""

    op: str
    label: str
    dtype: str
    index: int
    architecture: int


def record(op: str, label: str, dtype: str, architecture: int) -> list[Launch]:
    """The launches of one call of the manifest, each variant once."""
    call = next(c for c in calls() if (c.op, c.label) == (op, label))
    with recording(architecture) as found:
        target = Target("cuda", dtype, architecture, call.traits)
        load()[op].implementations["triton"].run_on(target)(**call.make(getattr(torch, dtype)))
    unique: dict[str, Launch] = {}
    for launched in found:
        unique.setdefault(_key(launched), launched)
    return list(unique.values())


def _key(launched: Launch) -> str:
    signature, constants, attributes = specialise(launched)
    return f"{launched.kernel.__name__} {signature} {constants} {attributes} {launched.options}"


def variants(architecture: int, only: str | None = None) -> Iterator[Variant]:
    """Every distinct launch of the manifest that ``architecture`` can run; ``only``: where op/label holds it."""
    seen = set()
    for call in calls():
        for dtype in call.dtypes:
            target = Target("cuda", dtype, architecture, call.traits)
            implementation = load()[call.op].implementations["triton"]
            if (only is not None and only not in f"{call.op}/{call.label}") or implementation.unsupported(
                target
            ) is not None:
                continue
            for index, launched in enumerate(record(call.op, call.label, dtype, architecture)):
                if (key := _key(launched)) not in seen:
                    seen.add(key)
                    yield Variant(call.op, call.label, dtype, index, architecture)


def specialise(launched: Launch) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list[list[Any]]]]:
    """(signature, compile-time constants, attributes) as a launch with these arguments would compile them."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(launched.constants)
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, parameter in enumerate(launched.kernel.params):
        name, value = parameter.name, launched.arguments.get(parameter.name)
        if name in launched.constants:
            signature[name] = "constexpr"
        elif isinstance(value, Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif value is None or (value == 1 and isinstance(value, int) and not parameter.do_not_specialize):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32"
    return signature, constants, attributes


def build_one(variant: Variant) -> Built:
    """Compile one variant and check it."""
    architecture = variant.architecture
    assert not INTERPRETED, "TRITON_INTERPRET is set: kernels cannot be compiled"
    launched = record(variant.op, variant.label, variant.dtype, architecture)[variant.index]
    signature, constants, attributes = specialise(launched)
    start = time.perf_counter()
    compiled = triton.compile(
        ASTSource(launched.kernel, signature, constants, attributes),
        target=GPUTarget("cuda", architecture, 32),
        options=launched.options,
    )
    seconds = time.perf_counter() - start
    name, shared = launched.kernel.__name__, compiled.metadata.shared
    usage, code = listings(compiled.asm["cubin"])[name]
    blocks = occupancy(architecture, 32 * launched.warps, usage.registers, shared)
    excused = frozenset(EXCUSED.get(name, {}))
    limit, claimed = shared_limit(architecture), claims(name, architecture, launched.constants.get("ROWS", 0))
    return Built(
        variant.op,
        variant.label,
        variant.dtype,
        name,
        architecture,
        round(seconds, 2),
        usage.registers,
        usage.stack + usage.local,
        shared,
        launched.warps,
        launched.stages,
        blocks,
        shown(code),
        faults(code, usage, shared, limit, blocks, claimed, excused),
    )


def build(
    architectures: Iterable[int] = ARCHITECTURES, only: str | None = None, workers: int = 1
) -> Iterator[Built | str]:
    """Compile every variant for every architecture that can run it. Yields results as they come; a str is an error."""
    jobs = [v for architecture in architectures for v in variants(architecture, only)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for v, future in [(v, pool.submit(build_one, v)) for v in jobs]:
            try:
                yield future.result()
            except Exception as error:  # a compiler's failure is a result to report
                where = f"{v.op} {v.label} {v.dtype} sm_{v.architecture}"
                yield f"{where}: {type(error).__name__}: {' '.join(str(error).split())[:600]}"
