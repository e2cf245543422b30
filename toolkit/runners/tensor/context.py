"""What all the layers of one step share, made once a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from toolkit.models.rope import inv_freq
from toolkit.models.spec import DecoderSpec, RopeSpec
from toolkit.runners.step import StepBatch
from toolkit.runners.tensor.cache import KVCache
from toolkit.runners.tensor.ops import Ops


@dataclass
class StepContext:
    """``rope``: cos and sin of the step's tokens [T, rotary_dim/2] for each rope; ``plans`` by (cache group,
    window).
    """

    batch: StepBatch
    cache: KVCache
    slots: list[Tensor]
    rope: dict[RopeSpec, tuple[Tensor, Tensor]]
    plans: dict[tuple[int, int | None], object]


class RopeTables:
    """cos and sin of every position so far needed, short frequencies first, then the long ones."""

    def __init__(self, ropes: set[RopeSpec], device: torch.device) -> None:
        self._device = device
        self._ropes = ropes
        self._length = 0
        self._tables: dict[RopeSpec, tuple[Tensor, Tensor]] = {}

    def take(self, positions: np.ndarray, long: np.ndarray) -> dict[RopeSpec, tuple[Tensor, Tensor]]:
        """For each rope the rows of ``positions`` [T]; ``long`` [T] says which set."""
        top = int(positions.max()) + 1
        if top > self._length:
            self._grow(max(1024, 1 << (top - 1).bit_length()))
        row = torch.from_numpy(positions.astype(np.int64) + long.astype(np.int64) * self._length).to(self._device)
        return {r: (cos.index_select(0, row), sin.index_select(0, row)) for r, (cos, sin) in self._tables.items()}

    def _grow(self, length: int) -> None:
        self._length = length
        position = torch.arange(length, dtype=torch.float32)
        for rope in self._ropes:
            cos, sin = [], []
            for long in (False, True):
                frequencies, factor = inv_freq(rope, long)
                angle = torch.outer(position, torch.from_numpy(np.ascontiguousarray(frequencies)))
                cos.append(angle.cos() * factor)
                sin.append(angle.sin() * factor)
            self._tables[rope] = torch.cat(cos).to(self._device), torch.cat(sin).to(self._device)


def make_context(
    spec: DecoderSpec, batch: StepBatch, cache: KVCache, tables: RopeTables, ops: Ops, device: torch.device
) -> StepContext:
    """Index tensors, rotations and attention plans of a step."""
    slots = [torch.from_numpy(s).to(device) for s in batch.slot_mapping]
    rope_set = np.repeat(batch.rope_set, np.diff(batch.cu_seqlens))
    plans: dict[tuple[int, int | None], object] = {}
    for index, attention in spec.attention_layers():
        key = (attention.group, attention.window)
        if key not in plans:
            blocks = cache.layers[index].k.shape[0]
            plans[key] = ops.plan_attention and ops.plan_attention(
                batch.block_tables[attention.group],
                batch.cu_seqlens,
                batch.seq_lens,
                cache.block_size,
                blocks,
                attention.window,
                device,
            )
    return StepContext(batch, cache, slots, tables.take(batch.positions[0], rope_set), plans)
