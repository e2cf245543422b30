"""The paged KV cache of one model: a tensor or two a layer and side, blocks named alike in all layers of a group.

Of a state group the blocks are slots, a state each.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.base.lazy_dataclass import dataclass
from toolkit.kernels.reference.cache import key_bits, value_bits
from toolkit.models.spec import DecoderSpec, Kept
from toolkit.runners.base import RunnerError

FLOAT8 = {16: torch.float8_e4m3fn, 17: torch.float8_e5m2}  # by quant_policy


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of a layer as the ops lay them out; ``*_params`` (scale, zero) where ``bits`` is not 0. A row
    that is key and value at once stands in one tensor, which is both.
    """

    k: Tensor
    v: Tensor
    k_params: Tensor | None
    v_params: Tensor | None
    bits: int

    @property
    def is_float8(self) -> bool:
        """Whether it is stored divided by the layer's scales."""
        return self.k.dtype in FLOAT8.values()

    def tensors(self) -> list[Tensor]:
        found = {id(t): t for t in (self.k, self.v, self.k_params, self.v_params) if t is not None}
        return list(found.values())


Shape = tuple[tuple[int, ...], torch.dtype]


def movable(tensor: Tensor) -> Tensor:
    """``tensor`` in a dtype that every device gathers and scatters: float8, which not all do, as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype in FLOAT8.values() else tensor


def cache_bits(policy: int) -> int:
    """``bits`` as the ops take them; 0 for floating point."""
    return policy if policy in (4, 8, 44) else 0


def cache_traits(policy: int) -> dict[str, Any]:
    """What kernels are told of the cache when they are chosen."""
    kind = str(FLOAT8[policy]).removeprefix("torch.") if policy in FLOAT8 else None
    return {"bits": cache_bits(policy), "cache": kind}


def _shapes(kept: Kept, block_size: int, policy: int, dtype: torch.dtype) -> tuple[list[Shape], list[Shape]]:
    """Shape and dtype of one block of keys and of values, or of rows that are both, and of their (scale, zero) pairs
    where they have some; of a slot its parts.
    """
    if kept.kind == "state":
        return [(part.shape, torch.float32 if part.wide else dtype) for part in kept.parts], []
    dim, bits = kept.head_dim, cache_bits(policy)
    widths = [dim * key_bits(bits) // 8, dim * value_bits(bits) // 8] if bits else [dim, dim]
    row = (block_size, kept.heads)
    kind = torch.uint8 if bits else FLOAT8.get(policy, dtype)
    data: list[Shape] = [((*row, width), kind) for width in widths]
    params: list[Shape] = [((*row, 2), torch.float16)] * 2 if bits else []
    return (data[:1], params[:1]) if kept.kind == "latent" else (data, params)


def block_bytes(spec: DecoderSpec, block_size: int, policy: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Bytes of one block of each cache group, over all its layers; ``policy``: see ``RunnerOptions.quant_policy``."""
    total = [0] * len(spec.cache_groups)
    for _, group, kept in spec.keepers():
        for shapes in _shapes(kept, block_size, policy, dtype):
            total[group] += sum(int(np.prod(shape)) * kind.itemsize for shape, kind in shapes)
    return tuple(total)


@dataclass(frozen=True)
class _Pages:
    """Anonymous memory behind a tensor on a CPU; it is taken as it is written to."""

    memory: mmap.mmap
    block: int  # bytes

    def discard(self, start: int, stop: int) -> None:
        """Give the whole pages of blocks ``start`` to ``stop`` - 1 back to the system; they are zeros then."""
        size = mmap.PAGESIZE
        first, last = -(-start * self.block // size) * size, stop * self.block // size * size
        if last > first:
            self.memory.madvise(mmap.MADV_DONTNEED, first, last - first)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, _Pages | None]:
    """Zeros; on a CPU with the pages they lie in, which are not touched before they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device), None
    size = int(np.prod(shape)) * dtype.itemsize
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    raw = np.frombuffer(memory, np.uint8, size)
    return torch.from_numpy(raw).view(dtype).view(shape), _Pages(memory, size // shape[0])


class KVCache:
    """All layers' caches. Every group has one block more than asked for, which no request has: zeros to read beyond a
    sequence's end, and where the sequences that pad a graph's steps write.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        num_blocks: Sequence[int],
        block_size: int,
        policy: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = tuple(num_blocks)
        self.block_size = block_size
        self.layers: dict[tuple[int, int], LayerCache] = {}  # by layer and group
        self.states: dict[tuple[int, int], list[Tensor]] = {}  # likewise, of state groups: the parts [slots, …]
        self._groups: list[list[Tensor]] = [[] for _ in self.num_blocks]
        self._pages: list[list[_Pages]] = [[] for _ in self.num_blocks]
        for layer, group, kept in spec.keepers():
            blocks = self.num_blocks[group] + 1
            made = [
                [_zeros((blocks, *shape), kind, device) for shape, kind in shapes]
                for shapes in _shapes(kept, block_size, policy, dtype)
            ]
            self._pages[group] += [pages for part in made for _, pages in part if pages is not None]
            data, params = ([tensor for tensor, _ in part] for part in made)
            if kept.kind == "state":
                self.states[layer, group] = data
                self._groups[group].extend(data)
                continue
            kp, vp = (params[0], params[-1]) if params else (None, None)
            self.layers[layer, group] = LayerCache(data[0], data[-1], kp, vp, cache_bits(policy))
            self._groups[group].extend(self.layers[layer, group].tensors())

    def copy(self, group: int, source: Tensor, target: Tensor) -> None:
        """Blocks ``source`` to blocks ``target`` (int64); all are read before any is written."""
        for tensor in map(movable, self._groups[group]):
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    def discard(self, group: int, blocks: Sequence[int]) -> None:
        """Give the memory of blocks that no step uses back to the system, on a CPU; they are zeros then."""
        for block in blocks:
            self._check(group, block)
        numbers = np.unique(blocks)  # blocks in a row go together: one alone may be smaller than a page
        for run in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1):
            for pages in self._pages[group]:
                pages.discard(int(run[0]), int(run[-1]) + 1)

    def export_block(self, group: int, block: int) -> bytes:
        """The block's bytes: layer after layer; keys, values, then their parameters."""
        self._check(group, block)
        parts = [t[block].contiguous().cpu().reshape(-1).view(torch.uint8).numpy() for t in self._groups[group]]
        return np.concatenate(parts).tobytes()

    def import_block(self, group: int, block: int, data: bytes | memoryview) -> None:
        """Inverse of ``export_block``. Raises RunnerError where the size is another."""
        self._check(group, block)
        want = sum(t[block].numel() * t.element_size() for t in self._groups[group])
        if len(data) != want:
            raise RunnerError(f"block of group {group}: expected {want} bytes, found {len(data)}")
        raw, start = torch.frombuffer(bytearray(data), dtype=torch.uint8), 0
        for t in self._groups[group]:
            size = t[block].numel() * t.element_size()
            t[block] = raw[start : start + size].view(t.dtype).view(t.shape[1:]).to(t.device)
            start += size

    def _check(self, group: int, block: int) -> None:
        if not 0 <= group < len(self.num_blocks) or not 0 <= block < self.num_blocks[group]:
            raise RunnerError(
                f"block {block} of group {group} does not exist; the groups have {self.num_blocks} blocks"
            )
