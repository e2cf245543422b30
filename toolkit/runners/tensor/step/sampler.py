"""Sampling of rows that need more than a draw, on the device and without waiting; ``SamplingBatch`` has the rules."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.runners.step import SamplingBatch
from toolkit.runners.tensor.devices.device import Device
from toolkit.runners.tensor.ops import Ops
from toolkit.runners.tensor.step.draws import DRAWN_BY, columns, penalized

FEW_ROWS, WIDE, PART = 32, 1 << 15, 128  # of ``row_best``
# On a GPU a warp shares each of torch's sums that has up to WARP numbers, or where one row alone has SUMS of them: half
# a block of threads. Others are shared by what other rows leave of a block (torch 2.13: those of 64 to 127 numbers).
SUMS, WARP = 16, 32


@dataclass
class Sampled:
    """On the device. ``best``: the largest logit of each row, NaN where the row holds one."""

    tokens: Tensor  # int64 [N]
    best: Tensor  # float32 [N]
    logprob: Tensor | None = None  # float32 [N], nan where not asked for
    top_ids: Tensor | None = None  # int64 [N, P], -1 fills
    top_logprobs: Tensor | None = None  # float32 [N, P]

    def tensors(self) -> dict[str, Tensor]:
        """Those that are there, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def _arrays(s: SamplingBatch) -> dict[str, np.ndarray]:
    """Everything that the rows need, to go over in one copy."""
    arrays = columns(s)
    if penalized(s):
        arrays |= {
            "history_rows": _rows_of(s.history_ptr),
            "history_ids": s.history_ids.astype(np.int64),
            "history_count": s.history_count.astype(np.float32),
            "repetition": s.repetition_penalty,
            "presence": s.presence_penalty,
            "frequency": s.frequency_penalty,
        }
    if len(s.bias_ids):
        arrays |= {
            "bias_rows": _rows_of(s.bias_ptr),
            "bias_ids": s.bias_ids.astype(np.int64),
            "bias_values": s.bias_values,
        }
    if s.grammar is not None:
        arrays["grammar"] = s.grammar
    if s.logprobs.size and s.logprobs.max() >= 0:
        arrays["logprobs"] = s.logprobs.astype(np.int64)
    return arrays


def _rows_of(pointers: np.ndarray) -> np.ndarray:
    """The row of each CSR entry, int64."""
    return np.repeat(np.arange(len(pointers) - 1), np.diff(pointers))


def sample_rows(logits: Tensor, s: SamplingBatch, ops: Ops, device: Device) -> Sampled:
    """Draw a token for every row of ``logits`` (float32 [N, V]), which are changed in place."""
    t = device.put(_arrays(s))
    if "history_rows" in t:
        names = ("history_rows", "history_ids", "history_count", "repetition", "presence", "frequency")
        ops.penalize(logits, *(t[name] for name in names))
    if "bias_rows" in t:
        logits.index_put_((t["bias_rows"], t["bias_ids"]), t["bias_values"], accumulate=True)
    if "grammar" in t:
        ops.apply_bitmask(logits, t["grammar"])
    tokens = ops.sample(logits, *(t[name] for name in DRAWN_BY))
    result = Sampled(tokens, row_best(logits))
    if "logprobs" in t:
        _log_probabilities(logits, t["logprobs"], int(s.logprobs.max()), result)
    return result


def row_best(logits: Tensor) -> Tensor:
    """The largest of each row of float32 [N, V], NaN where it holds one: [N].

    In two steps where they can be: torch gives a row to one block of threads, which took 14 µs of an H200 for a
    vocabulary of 128256.
    """
    rows, width = logits.shape
    whole = rows <= FEW_ROWS and width >= WIDE and width % PART == 0
    return (logits.view(rows, width // PART, PART).amax(-1) if whole else logits).amax(-1)


def log_sum(logits: Tensor) -> Tensor:
    """``logsumexp`` of each row of float32 [N, V]: [N]. In steps of PART numbers while one row alone has SUMS of them,
    then of WARP: in an order that no number of rows changes, as that of a whole row does.
    """
    best = logits.amax(-1, keepdim=True)
    best = best.masked_fill_(best.isinf(), 0.0)
    total = (logits - best).exp_()
    while total.shape[1] > 1:
        size = PART if total.shape[1] > PART * (SUMS - 1) else WARP
        missing = -total.shape[1] % size if total.shape[1] > size else 0
        total = F.pad(total, (0, missing)) if missing else total
        total = total.unflatten(1, (-1, min(size, total.shape[1]))).sum(-1)
    return (best + total.log_())[:, 0]


def _log_probabilities(logits: Tensor, asked: Tensor, most: int, result: Sampled) -> None:
    """Of the chosen token and of the best ``most``; of all rows, those that did not ask are blanked out."""
    norm = log_sum(logits)[:, None]
    chosen = (logits.gather(1, result.tokens[:, None]) - norm)[:, 0]
    result.logprob = chosen.masked_fill_(asked < 0, float("nan"))
    width = min(most, logits.shape[1])
    if width == 0:
        return
    values, ids = logits.topk(width, dim=-1)
    unasked = torch.arange(width, device=logits.device) >= asked[:, None]
    result.top_logprobs = (values - norm).masked_fill_(unasked, float("-inf"))
    result.top_ids = ids.masked_fill_(unasked, -1)
