"""What runs on each GPU, and why not the rest: one line for each fact that decides about a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

GIB = 1 << 30
OWN_BYTES = 3 * GIB // 2  # of CUDA, kernels, graphs and a small KV cache, beside a model's weights
SHARE = 0.95  # of free memory that may be planned with
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256, 512, 640)
LATENT_ROWS = (288, 576)  # numbers of a row: MiniCPM 3; DeepSeek, Kimi K2 and GLM-4.7-Flash
GROUPS = (16, 32, 64, 96, 128, -1)  # -1: one scale a row
INPUTS = 4032 * 64  # of a linear that every size of group divides


def gpu_support(gpus: list[dict[str, Any]], why_none: str | None = None) -> list[dict[str, Any]]:
    """Rows of gpu (its number, None: there is none), what and here, one line each.

    ``gpus``: as ``machine.gpus`` lists them; ``why_none``: why torch uses none.
    """
    if not gpus:
        here = f"{why_none or 'none that torch can use'}; the CPU runs models"
        return [{"gpu": None, "what": "GPU", "here": here}]
    rows = []
    for gpu in gpus:
        major, minor = gpu["capability"].split(".")
        capability = 10 * int(major) + int(minor)
        found = [_runner(gpu, capability), _memory(gpu["free_gib"] * GIB)]
        if gpu["kernels"] == "cuda":
            found.append(_compiled(capability))
            found += _shapes("paged_attention", "head_dim", _dims(HEAD_DIMS), capability)
            found += _shapes("paged_attention", "latent rows of", _dims(LATENT_ROWS, latent=True), capability)
            found += _shapes("linear_group_int", "groups of", _groups(), capability)
        rows += [{"gpu": gpu["index"], "what": what, "here": here} for what, here in found]
    return rows


def _runner(gpu: dict[str, Any], capability: int) -> tuple[str, str]:
    from toolkit.runners.tensor.support import LEAST_CAPABILITY

    if gpu["kernels"] != "cuda":
        return "turbomind", f"its kernels are for NVIDIA's GPUs, this one runs by {gpu['kernels']}: pytorch runs models"
    if capability >= LEAST_CAPABILITY:
        return "turbomind", "runs"
    return "turbomind", f"needs compute capability 8.0 or newer, this GPU has {gpu['capability']}: pytorch runs models"


def _memory(free: float) -> tuple[str, str]:
    room = free * SHARE - OWN_BYTES
    if room <= 0:
        needed = OWN_BYTES / SHARE / GIB
        return (
            "memory",
            f"{free / GIB:.1f} GiB free is too little for any model: CUDA and a KV cache take {needed:.1f} GiB",
        )
    sizes = ", ".join(f"{room * 8 / bits / 1e9:.1f} B in {bits} bits" for bits in (16, 8, 4))
    return "memory", f"{free / GIB:.1f} GiB free: models of about {sizes}"


def _compiled(capability: int) -> tuple[str, str]:
    from toolkit.kernels.cuda.driver import unavailable

    return "CUDA kernels", unavailable(capability) or "run"


def _dims(dims: Iterable[int], **more: Any) -> Iterable[tuple[str, dict[str, Any]]]:
    return ((str(dim), {"head_dim": dim, "bits": 0, "cache": None} | more) for dim in dims)


def _groups() -> Iterable[tuple[str, dict[str, Any]]]:
    for size in GROUPS:
        traits = {"bits": 4, "group_size": INPUTS if size == -1 else size, "n_in": INPUTS}
        yield ("a whole row" if size == -1 else str(size)), traits


def _shapes(op: str, what: str, shapes: Iterable[tuple[str, dict[str, Any]]], capability: int) -> list[tuple[str, str]]:
    """Shapes for which the same kernel runs for the same reasons are one line."""
    lines: dict[str, list[str]] = {}
    for name, traits in shapes:
        here = _kernel(op, traits, capability).replace(f"not {name}", "not this").replace(f"not of {name}", "not this")
        lines.setdefault(here, []).append(name)
    return [(f"{op}, {what} {', '.join(names)}", here) for here, names in lines.items()]


def _kernel(op: str, traits: dict[str, Any], capability: int) -> str:
    """Which implementation runs, and why not those before it."""
    from toolkit.kernels import KernelError, Target, choose, load
    from toolkit.kernels.registry import PRIORITY

    target, declared = Target("cuda", "float16", capability, traits), load()[op]
    try:
        chosen = choose(declared, target).family
    except KernelError as error:
        return str(error)
    before = PRIORITY["cuda"][: PRIORITY["cuda"].index(chosen)]
    known = declared.implementations
    reasons = [f"{name} {known[name].unsupported(target)}" for name in before if name in known]
    return f"{chosen} ({'; '.join(reasons)})" if reasons else chosen
