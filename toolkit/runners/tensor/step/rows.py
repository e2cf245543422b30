"""The rows that a step was asked for: sampled tokens, logits, hidden states, log-probabilities of targets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from toolkit.runners.step import NO_EXPERT, StepBatch
from toolkit.runners.tensor.decoder import Decoder
from toolkit.runners.tensor.devices.device import Device
from toolkit.runners.tensor.step.sampler import log_sum, sample_rows

TARGET_ROWS = 256  # targets whose logits exist at one time


def produce(decoder: Decoder, x: Tensor, delta: Tensor | None, batch: StepBatch, device: Device) -> dict[str, Tensor]:
    """Run the final norm and the head on the rows asked for, and sample; results by name, on the device."""
    asked = (batch.sample_index, batch.logits_index, batch.hidden_index, batch.target_index)
    rows, places = np.unique(np.concatenate(asked), return_inverse=True)
    if not len(rows):
        return {}
    names = ("sample", "logits", "hidden", "target")
    split = np.split(places.astype(np.int64), np.cumsum([len(a) for a in asked])[:-1])
    arrays = dict(zip(names, split, strict=True)) | {"rows": rows.astype(np.int64)}
    t = device.put(arrays | {"target_ids": batch.target_ids.astype(np.int64)})
    h = decoder.hidden(x, delta, None if len(rows) == x.shape[0] else t["rows"])
    found: dict[str, Tensor] = {}
    if len(batch.sample_index):
        logits = decoder.logits(h.index_select(0, t["sample"]))
        found |= sample_rows(logits, batch.sampling, decoder.ops, device).tensors()
    if len(batch.logits_index):
        found["logits"] = decoder.logits(h.index_select(0, t["logits"]))
    if len(batch.hidden_index):
        found["hidden"] = h.index_select(0, t["hidden"]).float()
    if len(batch.target_index):
        found["targets"] = _targets(decoder, h, t["target"], t["target_ids"])
    return found


def chosen_experts(routes: Sequence[tuple[Tensor, Tensor]], index: np.ndarray, device: Device) -> Tensor:
    """int32 [len(index), mixtures, width]: the experts that flat tokens ``index`` chose, those of the largest weights
    first. ``routes``: of each mixture (experts, weights), [T, chosen] each."""
    rows = device.put({"rows": index.astype(np.int64)})["rows"]
    width, found = max(experts.shape[1] for experts, _ in routes), []
    for experts, weights in routes:
        mine, order = experts.index_select(0, rows).sort(dim=1)  # the lower one where weights are the same
        heavy = weights.index_select(0, rows).gather(1, order).sort(dim=1, descending=True, stable=True).indices
        filled = torch.full((len(rows), width), NO_EXPERT, dtype=torch.int32, device=rows.device)
        filled[:, : mine.shape[1]] = mine.gather(1, heavy).int()
        found.append(filled)
    return torch.stack(found, 1)


def _targets(decoder: Decoder, h: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """log p(ids[i]) after row rows[i], a few hundred rows of logits at a time."""
    found = []
    for some, targets in zip(rows.split(TARGET_ROWS), ids.split(TARGET_ROWS), strict=True):
        logits = decoder.logits(h.index_select(0, some))
        found.append(logits.gather(1, targets[:, None])[:, 0] - log_sum(logits))
    return torch.cat(found)
