"""Kernels of latent rows and of states, at the manifest's shapes: 64 sequences that decode, and prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from gpu.checking.manifest import filled
from gpu.measuring.kernels import Row, Where, measured

from toolkit.kernels.op import Case, Implementation
from toolkit.kernels.registry import load
from toolkit.kernels.triton.ahead_of_time.call import Call
from toolkit.kernels.triton.ahead_of_time.manifest import calls

# Row: op, label of the manifest's call, label of the op's own case, which a dry run takes.
MEASURED = {
    "latent decode, 128 heads": ("paged_attention", "latent-decode-x128", "latent"),
    "latent decode, 16 heads": ("paged_attention", "latent-decode-x16", "latent"),
    "latent decode 8, 128 heads": ("paged_attention", "latent-decode-x128-int8", "latent-int8"),
    "causal_conv decode": ("causal_conv", "granite-decode", "decode"),
    "causal_conv prompt": ("causal_conv", "granite-prompt", "ragged"),
    "state_scan decode": ("state_scan", "decode", "decode"),
    "state_scan prompt": ("state_scan", "prompt", "ragged"),
    "delta_rule decode": ("delta_rule", "decode", "decode"),
    "delta_rule prompt": ("delta_rule", "prompt", "ragged"),
}

TRAFFIC = ("k_cache", "k_params", "states", "x", "v")  # what most bytes are of; of states and tokens both ways


def kept(where: Where) -> Iterator[Row]:
    """A row each."""
    known: dict[tuple[str, str], Call] = {(call.op, call.label): call for call in calls()}
    for name, (op, label, small) in MEASURED.items():
        call = known[op, label]
        case = next(case for case in load()[op].cases() if case.label == small)
        traits = case.traits if where.device == "cpu" else call.traits
        able = list(where.ours(op, str(where.half).removeprefix("torch."), **traits))
        found = next((implementation for implementation, _ in able if implementation is not None), None)
        if found is None:
            yield {"name": name, "error": "; ".join(reason for _, reason in able) or "none of ours is there"}
            continue
        yield _timed(name, found, _arguments(call, case, where), where)


def _arguments(call: Call, case: Case, where: Where) -> dict[str, Any]:
    if where.device == "cpu":
        return case.make(where.half, "cpu", torch.Generator().manual_seed(0))
    made = call.make(where.half)
    return made if where.device == "meta" else filled(made, where.device)


def _timed(name: str, found: Implementation, arguments: dict[str, Any], where: Where) -> Row:
    if found.plan is not None:
        told = (arguments[name] for name in ("block_table", "cu_seqlens", "seq_lens"))
        blocks, size = arguments["k_cache"].shape[:2]
        arguments["plan"] = found.plan(*told, size, blocks, None, torch.device(where.device))
    touched = {id(t): t.nbytes for n, t in arguments.items() if isinstance(t, torch.Tensor) and n in TRAFFIC}
    moved = sum(touched.values()) * (2 if "states" in arguments else 1)
    return measured(name, lambda: [lambda: found.run(**arguments)], where, bytes=moved)
