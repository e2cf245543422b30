"""Ahead-of-time compilation of the manifest, without a GPU, and what must hold of the result."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ..registry import Target, load
from .launch import INTERPRETED, Launch, recording, shared_limit
from .manifest import CLAIMS, calls

ARCHITECTURES = (80, 86, 89, 90)
_REGISTERS, _THREADS = 65536, {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}  # of a multiprocessor
_SHARED = {80: 164 * 1024, 86: 100 * 1024, 89: 100 * 1024, 90: 228 * 1024, 100: 228 * 1024, 120: 100 * 1024}
_TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
_EVIDENCE = {
    "vector": re.compile(r"ld\.global(\.\w+|::\w+)*\.v4\.b32|ld\.global(\.\w+|::\w+)*\.v2\.b64"),
    "stores": re.compile(r"st\.global(\.\w+|::\w+)*\.v4\.b32"),
    "async": re.compile(r"cp\.async"),
    "mma": re.compile(r"mma\.sync|wgmma\.mma_async"),
    "wgmma": re.compile(r"wgmma\.mma_async"),
}
_CONVERSION = re.compile(r"cvt\.rn\.(f16|bf16|f32)\.[us](8|16|32)")


@dataclass(frozen=True)
class Built:
    """One variant on one architecture. ``blocks``: how many fit a multiprocessor; ``faults``: what does not hold."""

    op: str
    label: str
    dtype: str
    kernel: str
    architecture: int
    seconds: float
    registers: int
    stack: int
    shared: int
    warps: int
    stages: int
    blocks: int
    shows: tuple[str, ...]
    faults: tuple[str, ...]


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
        load()[op].implementations["triton"].run(**call.make(getattr(torch, dtype)))
    unique: dict[str, Launch] = {}
    for launched in found:
        unique.setdefault(_key(launched), launched)
    return list(unique.values())


def _key(launched: Launch) -> str:
    signature, constants, attributes = specialise(launched)
    return f"{launched.kernel.__name__} {signature} {constants} {attributes} {launched.warps} {launched.stages}"


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
        options={"num_warps": launched.warps, "num_stages": launched.stages},
    )
    seconds = time.perf_counter() - start
    registers, stack, local = _usage(compiled.asm["cubin"])
    shared, ptx, name = compiled.metadata.shared, compiled.asm["ptx"], launched.kernel.__name__
    shows = tuple(key for key, pattern in _EVIDENCE.items() if pattern.search(ptx))
    shows += () if _CONVERSION.search(ptx) else ("no conversion",)
    faults = [f"{claim} missing" for claim in sorted(CLAIMS.get(name, frozenset()) - set(shows))]
    if stack or local:
        faults.append(f"spills: {stack} bytes of stack, {local} of local memory")
    if shared > shared_limit(architecture):
        faults.append(f"{shared} bytes of shared memory, more than {shared_limit(architecture)}")
    blocks = occupancy(architecture, 32 * launched.warps, registers, shared)
    return Built(
        variant.op,
        variant.label,
        variant.dtype,
        name,
        architecture,
        round(seconds, 2),
        registers,
        stack + local,
        shared,
        launched.warps,
        launched.stages,
        blocks,
        shows,
        tuple(faults),
    )


def occupancy(architecture: int, threads: int, registers: int, shared: int) -> int:
    """How many blocks fit a multiprocessor. ``registers``: a thread's; ``shared``: bytes of a block."""
    return min(
        _THREADS[architecture] // threads,
        _REGISTERS // max(1, threads * -(-registers // 8) * 8),
        _SHARED[architecture] // (shared + 1024),
    )


def _usage(cubin: bytes) -> tuple[int, int, int]:
    """(registers a thread, bytes of stack, bytes of local memory) from triton's own cuobjdump."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2]), int(found[3])


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


def as_json(built: Built) -> dict[str, Any]:
    """``built`` as plain values."""
    return asdict(built)
