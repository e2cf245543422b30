"""From logits to tokens. Everything is computed in float32, row by row: rows never meet.

Nucleus: Holtzman et al. (2020); min-p: Nguyen et al. (2024); repetition penalty: Keskar et al., "CTRL" (2019).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..op import Case
from ..registry import op
from .kept import kept_mass


def _penalty_cases() -> Iterator[Case]:
    def make(dtype, device, g) -> dict[str, Any]:
        logits = (torch.randn(4, 33, generator=g) * 4).to(device)
        rows = torch.tensor([0, 0, 2, 3, 3]).to(device)
        return {
            "logits": logits,
            "rows": rows,
            "ids": torch.tensor([3, 7, 0, 32, 7]).to(device),
            "counts": torch.tensor([0.0, 2.0, 1.0, 3.0, 0.0]).to(device),
            "repetition": (torch.rand(4, generator=g) + 0.5).to(device),
            "presence": torch.randn(4, generator=g).to(device),
            "frequency": torch.randn(4, generator=g).to(device),
        }

    yield Case("rows", make)


@op(_penalty_cases, mutates=("logits",), dtypes=("float32",))
def penalize(
    logits: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> None:
    """Penalise tokens that a row has seen, in place.

    ``logits``: float32 [N, V]; entry j says that row ``rows[j]`` has seen token ``ids[j]``, ``counts[j]`` times in
    its output (pairs are distinct). First l / p if l > 0 else l·p with p = ``repetition`` [N]; then
    l -= frequency·count + presence·(count > 0).
    """
    seen = logits[rows, ids]
    p = repetition[rows]
    seen = torch.where(seen > 0, seen / p, seen * p)
    logits[rows, ids] = seen - (frequency[rows] * counts + presence[rows] * (counts > 0))


def _mask_cases() -> Iterator[Case]:
    for vocab in (64, 70):

        def make(dtype, device, g, vocab=vocab) -> dict[str, Any]:
            words = torch.randint(-(2**31), 2**31 - 1, (3, -(-vocab // 32)), generator=g).int()
            return {"logits": torch.randn(3, vocab, generator=g).to(device), "bitmask": words.to(device)}

        yield Case(f"vocab{vocab}", make)


@op(_mask_cases, mutates=("logits",), dtypes=("float32",))
def apply_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    """Ban (-inf) every id whose bit is clear, in place: bit (id & 31) of word id >> 5.

    ``logits``: float32 [N, V]; ``bitmask``: int32 [N, ceil(V/32)].
    """
    bit = torch.arange(32, device=logits.device, dtype=torch.int32)
    allowed = ((bitmask[..., None] >> bit) & 1).flatten(1)[:, : logits.shape[1]]
    logits.masked_fill_(allowed == 0, float("-inf"))


def _sample_cases() -> Iterator[Case]:
    settings = (  # label; temperature, top_k, top_p, min_p
        ("plain", (0.7, 0, 1.0, 0.0)),
        ("top_k", (1.0, 5, 1.0, 0.0)),
        ("top_p", (1.3, 0, 0.6, 0.0)),
        ("min_p", (1.0, 0, 1.0, 0.2)),
        ("all", (0.9, 12, 0.8, 0.05)),
        ("greedy", (0.0, 3, 0.5, 0.0)),
    )
    one = [(label, (setting,)) for label, setting in settings]
    every = tuple(setting for _, setting in settings)
    for label, rows in (*one, ("ties", ((1.0, 4, 0.9, 0.0),)), ("mixed", every)):  # the settings of rows, in turn

        def make(dtype, device, g, label=label, rows=rows) -> dict[str, Any]:
            n = 16
            logits = torch.randn(n, 300, generator=g) * 3
            if label == "ties":
                logits = (logits / 3).round()
            columns = list(zip(*(rows[i % len(rows)] for i in range(n)), strict=True))
            return {
                "logits": logits.to(device),
                "temperature": torch.tensor(columns[0], dtype=torch.float32).to(device),
                "top_k": torch.tensor(columns[1], dtype=torch.int64).to(device),
                "top_p": torch.tensor(columns[2], dtype=torch.float32).to(device),
                "min_p": torch.tensor(columns[3], dtype=torch.float32).to(device),
                "u": torch.rand(n, generator=g).to(device),
            }

        yield Case(label, make)


@op(_sample_cases, dtypes=("float32",), gate=("top_p", "ties", "mixed"))
def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    """Draw one token a row. ``logits``: float32 [N, V], not changed; the rest: [N].

    Temperature 0 takes the argmax, the lowest id on a tie. Else softmax of logits / temperature; kept are the
    ``top_k`` (0 = all) most probable, of those the smallest set that has ``top_p`` of their mass, of those the ones
    with at least ``min_p`` times the top probability (ties at a border: lowest id first). ``u`` in [0, 1) picks by
    walking the kept ids in ascending order over their renormalised mass, summed in float64. Returns int64 [N].
    """
    mass = kept_mass(logits, temperature, top_k, top_p, min_p)
    drawn = (mass <= u.double()[:, None] * mass[:, -1:]).sum(-1).clamp(max=logits.shape[1] - 1)
    return torch.where(temperature == 0, logits.argmax(-1), drawn)
