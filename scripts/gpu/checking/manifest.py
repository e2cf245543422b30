"""The manifest's calls on a device: filled with numbers, and compared with torch's kernels there.

The cases of the ops are small, for the CPU's sake. These calls have the shapes of served models, so that the very
variants which serve them are run before anyone relies on them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from gpu.checking.faults import answers, said
from torch import Tensor

from toolkit.kernels.op import Case, Target
from toolkit.kernels.registry import load
from toolkit.kernels.tolerances import compare
from toolkit.kernels.triton.ahead_of_time.manifest import calls

Row = dict[str, Any]
# ops whose torch kernels round scores, keys and values to the activations' dtype before the softmax, which our kernels
# do not: where few keys decide (see ``_numbers``) that is more than the tolerance. Their reference is in float32.
REFERENCE = ("paged_attention",)
WRITTEN_BLOCKS = 32  # of caches that are written to
_SCALES = ("scales", "row_scales", "gate_up_scales", "down_scales")
_COLUMNS = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.02, "repetition": 1.1, "presence": 0.2, "frequency": 0.1}


def filled(arguments: Mapping[str, Any], device: str, seed: int = 0) -> dict[str, Any]:
    """``arguments`` of a call with tensors on ``device`` that hold what an op may be given: codes, scales, indices in
    range. Products of random numbers come out about 1.
    """
    generator = torch.Generator(device).manual_seed(seed)
    if "slot_mapping" in arguments:  # a smaller cache: all of it is compared
        caches = ("k_cache", "v_cache", "k_params", "v_params", "cache", "params")
        small = {n: arguments[n][:WRITTEN_BLOCKS] for n in caches if isinstance(arguments.get(n), Tensor)}
        arguments = {**arguments, **small}
    found = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            index = _index(name, value, arguments, device, generator)
            found[name] = _numbers(name, value, arguments, device, generator) if index is None else index
        elif name == "block_table":
            blocks = arguments["k_cache"].shape[0]
            order = np.random.default_rng(seed).permutation(max(blocks, value.size)) % blocks
            found[name] = order[: value.size].astype(np.int32).reshape(value.shape)
    if isinstance(arguments.get("latent"), int):  # rows are keys and values at once
        found |= {"v_cache": found["k_cache"], "v_params": found["k_params"]}
    return found


def _index(name: str, like: Tensor, call: Mapping[str, Any], device: str, generator: torch.Generator) -> Tensor | None:
    """What a tensor of indices holds; None where it holds none."""
    n = like.numel()

    def shuffled(count: int) -> Tensor:
        return torch.randperm(count, generator=generator, device=device)[:n]

    found: Tensor
    if name == "ids":
        found = shuffled(call["table"].shape[0] if "table" in call else call["logits"].shape[1])
    elif name == "slot_mapping":
        found = shuffled(call["cache" if "cache" in call else "k_cache"].shape[:2].numel())
    elif name == "rows":
        found = torch.arange(n, device=device) % call["logits"].shape[0]
    elif name == "experts":
        count = call["gate_up"].shape[0]
        found = torch.rand(like.shape[0], count, generator=generator, device=device).topk(like.shape[1]).indices
    elif name in ("row_blocks", "gate_up_rows", "down_rows"):
        found = torch.arange(n, device=device) // call["block"]
    elif name == "group_index":
        found = shuffled(n) // (n // call["scales"].shape[1])
    elif name == "adapter":
        found = torch.randint(-1, call["ranks"].numel(), (n,), generator=generator, device=device)
    elif name == "ranks":
        found = torch.full((n,), (call["a"].shape[2] if "a" in call else call["b"].shape[2]), device=device)
    elif name == "starts":
        found = torch.from_numpy(call["cu_seqlens"])
    elif name == "table" and "states" in call:  # each goes on in its slot
        slots = torch.randperm(call["states"].shape[0], generator=generator, device=device)
        found = slots[: like.shape[0], None].expand(like.shape)
    elif name == "top_k":
        found = torch.arange(n, device=device) % 2 * 40
    elif name == "bitmask":
        found = torch.randint(-(2**31), 2**31, like.shape, generator=generator, device=device)
    else:
        return None
    return found.to(device, like.dtype).reshape(like.shape)


def _numbers(name: str, like: Tensor, call: Mapping[str, Any], device: str, generator: torch.Generator) -> Tensor:
    """What a tensor of numbers or codes holds."""

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(like.shape, generator=generator, device=device) * (high - low) + low

    bits = call.get("bits") or 4
    if name in _COLUMNS:
        return torch.full(like.shape, _COLUMNS[name], dtype=like.dtype, device=device)
    if name in ("u", "weights", "counts", "beta", "dt"):
        return uniform(0.05, 0.95).to(like.dtype)
    if name == "fade" or (name == "a" and "dt" in call):
        return -uniform(0.05, 0.95).to(like.dtype)
    if name in ("cos", "sin"):
        angle = torch.linspace(0, 3, like.numel(), device=device).reshape(like.shape)
        return (angle.cos() if name == "cos" else angle.sin()).to(like.dtype)
    if name.endswith("zeros"):
        return torch.randint(0, 1 << bits, like.shape, generator=generator, device=device).to(like.dtype)
    if name in _SCALES and like.dtype == torch.uint8:  # powers of two, 127 standing for 1
        return torch.randint(117, 121, like.shape, generator=generator, device=device).to(like.dtype)
    if name in _SCALES or name == "minima":
        scale = 0.5 / _inputs(call) ** 0.5 / _spread(call, bits)
        values = uniform(0.5, 1.5) * scale
        return (values if name in _SCALES else -values * (1 << bits) / 2).to(like.dtype)
    if name in ("k_params", "v_params", "params"):
        return uniform(0.005, 0.015).to(like.dtype)
    if like.dtype in (torch.uint8, torch.int8):
        low, high = (0, 256) if like.dtype == torch.uint8 else (-127, 128)
        return torch.randint(low, high, like.shape, generator=generator, device=device, dtype=like.dtype)
    x = torch.empty(like.shape, dtype=torch.bfloat16, device=device).normal_(generator=generator)
    if "beta" in call and name in ("q", "k"):  # of length 1
        x *= like.shape[-1] ** -0.5
    if name in ("gate_up", "down", "a", "b") and like.dtype.itemsize == 2:
        x *= like.shape[-1] ** -0.5
    if name == "q" and "block_table" in call:
        x *= 4  # so that few keys decide
    return x.to(like.dtype)


def _inputs(call: Mapping[str, Any]) -> int:
    """Inputs of the product."""
    return int((call["codes"] if isinstance(call.get("codes"), Tensor) else call["x"]).shape[-1])


def _spread(call: Mapping[str, Any], bits: int) -> float:
    """How far the numbers that codes stand for lie from 0, before their scale."""
    weight = next(call[name] for name in ("gate_up", "weight", "packed") if name in call)
    if weight.dtype == torch.uint8:
        return (1 << bits) / 2.5
    return 73.0 if weight.dtype == torch.int8 else 1.0


def check_manifest(
    name: str,
    family: str,
    device: str,
    capability: int | None,
    wanted: Callable[[str], bool] = lambda case: True,
) -> Iterator[Row]:
    """Every call of one op: a row each, ``error`` None where ``family`` agrees with torch's kernels, where there are
    none, and for ``REFERENCE``, with the reference, on the same device. ``wanted`` is asked for each before it runs;
    one behind which the GPU does not answer any more is the last, which its row says under ``dead``.
    """
    op = load()[name]
    implementation = op.implementations[family]
    for call in calls():
        for dtype in call.dtypes if call.op == name else ():
            target, start = Target(device, dtype, capability, call.traits), time.perf_counter()
            reason = implementation.unsupported(target)
            row: Row = {"what": f"{name} [{family}], served", "case": f"{dtype} {call.label}", "skipped": reason}
            alive = True
            if reason is None:
                if not wanted(row["case"]):
                    continue
                case = Case(call.label, lambda d, on, _, call=call: filled(call.make(d), on), call.traits)
                other = None if name in REFERENCE else op.implementations.get("torch")
                run = other.run if other is not None and other.unsupported(target) is None else op.reference
                judge = dataclasses.replace(op, reference=run)
                try:
                    row["error"] = compare(judge, implementation, case, target, oracle=device)
                except Exception as error:
                    row["error"], alive = said(error), answers(device)
                    row |= {} if alive else {"dead": True}
            yield row | {"seconds": round(time.perf_counter() - start, 2)}
            if not alive:
                return
