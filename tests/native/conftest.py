"""The native library's single ops through ctypes, and native runners over tiny checkpoints.

``TOOLKIT_TEST_PYTHON`` may name another Python, whose library's ops are then tested (``scripts/testing/arm`` does so).
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch

from toolkit.runners.native import library

FAR = shlex.split(os.environ.get("TOOLKIT_TEST_PYTHON", ""))

if FAR:
    ASK = "from toolkit.runners.native import library; print(*library.isas())"
    ISAS = subprocess.run([*FAR, "-c", ASK], check=True, capture_output=True, text=True).stdout.split()
elif library.available() is not None:  # nothing here can run: collect nothing rather than skip
    collect_ignore_glob = ["test_*.py"]
    ISAS = []
else:
    ISAS = library.isas()


@pytest.fixture(scope="session")
def far(support: Any) -> Any:
    """The other Python, or None."""
    return support("native_ops").FarPython(FAR) if FAR else None


@pytest.fixture(params=ISAS)
def ops(request: Any, support: Any, far: Any) -> Any:
    """The ops of every instruction set that this machine, or the other Python's, has."""
    module = support("native_ops")
    return module.FarOps(far, request.param) if far else module.NativeOps(request.param)


@pytest.fixture(scope="session")
def steps(support: Any) -> Any:
    """The module ``tests/support/steps.py``."""
    return support("steps")


def rtn(weight: torch.Tensor, group: int, bits: int = 4, form: str = "zeros", dtype: torch.dtype = torch.float16):
    """Round to nearest in groups: a GroupInt with zeros, symmetric zeros or minima."""
    from toolkit.artifacts.canonical import GroupInt

    out, n = weight.shape
    x, top = weight.float().view(out, -1, group), (1 << bits) - 1
    low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    if form == "symmetric":
        high = torch.maximum(-low, high)
        low = -high
    scales = ((high - low) / top).to(dtype)
    step = scales.float()[..., None]
    if form == "minima":
        minima = low.to(dtype)
        codes = ((x - minima.float()[..., None]) / step).round().clamp(0, top)
        return GroupInt(codes.to(torch.uint8).view(out, n), scales, None, bits, group, minima)
    zeros = (
        torch.full_like(low, 1 << (bits - 1)) if form == "symmetric" else (-low / step[..., 0]).round().clamp(0, top)
    )
    codes = ((x / step).round() + zeros[..., None]).clamp(0, top)
    return GroupInt(codes.to(torch.uint8).view(out, n), scales, zeros.to(torch.uint8), bits, group)


@pytest.fixture(scope="session")
def quantize_groups() -> Callable[..., Any]:
    """``quantize_groups(weight, group, bits, form, dtype) -> GroupInt``; form: zeros, symmetric, minima."""
    return rtn


@pytest.fixture(scope="session")
def drive(tiny_models: Any, steps: Any) -> Any:
    """``drive(family, weights="dense" | "bf16" | "int4" | "int8", model={…}, **options) -> Driver``, native runner.

    ``stream``: (window, sink tokens) of ``kv_window`` and ``kv_sinks``.
    """
    from toolkit.artifacts.canonical import ChannelInt8, Dense
    from toolkit.runners.base import RunnerOptions
    from toolkit.runners.choose import open_model
    from toolkit.runners.native.runner import NativeRunner

    def change(value: Any, form: str) -> Any:
        if form == "bf16":
            return Dense(value.weight.bfloat16())
        if form == "int4":
            return rtn(value.weight, 32)
        scales = value.weight.float().abs().amax(1) / 127
        return ChannelInt8((value.weight.float() / scales[:, None]).round().to(torch.int8), scales)

    def make(
        family: str,
        *,
        weights: str = "dense",
        model: dict[str, Any] | None = None,
        blocks: int = 64,
        scattered: bool = True,
        stream: tuple[int, int] | None = None,
        **options: Any,
    ):
        settings = {"dtype": "float32", "block_size": 16, "threads": 2} | options
        kept = {} if stream is None else {"kv_window": stream[0], "kv_sinks": stream[1]}
        opened = open_model(tiny_models(family, **(model or {})), **kept)
        names = {x.name for x in opened.spec.linears() if x.shard != "replicated" or "gate" not in x.name}

        def load() -> dict[str, Any]:
            found = dict(opened.weights().items())
            return {k: change(v, weights) if weights != "dense" and k in names else v for k, v in found.items()}

        return steps.Driver(NativeRunner(opened.spec, load, RunnerOptions(**settings)), blocks, scattered)

    return make
