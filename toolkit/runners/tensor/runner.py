"""The ``torch`` runner: any spec, on any device torch has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from toolkit.artifacts.canonical import BlockFp8, ChannelInt8, Dense, Fp4, GroupInt, Weight
from toolkit.errors import UsageError
from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import QUANT_POLICIES, MemoryNeed, RunnerError, RunnerOptions, StepHandle
from toolkit.runners.host_memory import free_host_bytes
from toolkit.runners.step import StepBatch
from toolkit.runners.tensor.build import build_decoder
from toolkit.runners.tensor.cache import KVCache, block_bytes, cache_traits
from toolkit.runners.tensor.checks import check_batch, check_sampling
from toolkit.runners.tensor.context import RopeTables, make_context
from toolkit.runners.tensor.decoder import Decoder
from toolkit.runners.tensor.find import find_device, find_dtype, mixed_gpus, on_device
from toolkit.runners.tensor.footprint import activation_bytes, dense_bytes, first_linear, stored_dtype, weight_bytes
from toolkit.runners.tensor.linear import Placement, becomes_dense
from toolkit.runners.tensor.lora import Adapters, AdapterStep
from toolkit.runners.tensor.ops import Ops, choose_ops
from toolkit.runners.tensor.output import Failed, Produced, produce


class TorchRunner:
    """Executes a spec with the ops of ``toolkit.kernels``; implements ``toolkit.runners.base.Runner``.

    ``weights``: called at every load; names as ``canonical_weights`` gives them. ``adapters``: what
    ``StepBatch.adapter`` counts, by canonical names of linears. ``notes``: what "auto" became and how quantized weights
    are held, one sentence each. Raises UsageError for a device, dtype or quant_policy that cannot be.
    """

    name = "torch"

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Callable[[], Mapping[str, Weight | Tensor]],
        options: RunnerOptions,
        adapters: Adapters = (),
    ) -> None:
        if options.quant_policy not in QUANT_POLICIES:
            raise UsageError(f"quant_policy: expected 0, 4, 8, 16 or 17, found {options.quant_policy!r}")
        if options.threads > 0:
            torch.set_num_threads(options.threads)
        self.spec, self.options = spec, options
        self._weights = weights
        self._adapters, self._adapter_step = adapters, AdapterStep(len(adapters))
        self._device = find_device(options.device)
        stored = weights()
        self._dtype = find_dtype(options.dtype, stored_dtype(stored[spec.embed]), self._device)
        self.device, self.dtype = str(self._device), str(self._dtype).removeprefix("torch.")
        for _, attention in spec.attention_layers():
            if options.quant_policy == 4 and attention.head_dim % 4:
                dim = attention.head_dim
                raise UsageError(f"quant_policy: 4 needs a head_dim in steps of 4, the model has {dim}; use 8")
        sample = first_linear(spec, stored)
        with on_device(self._device):
            self._ops = self._choose_ops(sample)
        self._place = self._placement(sample)
        self._weight_bytes = weight_bytes(spec, stored, self._place, adapters)
        self.notes = self._describe(sample)
        self._decoder: Decoder | None = None
        self._cache: KVCache | None = None
        ropes = {a.rope for _, a in spec.attention_layers() if a.rope is not None}
        self._tables = RopeTables(ropes, self._device)
        self._previous = torch.zeros(0, dtype=torch.int64, device=self._device)

    # -- memory

    def memory(self) -> MemoryNeed:
        """What weights, activations and blocks take, and what is free now."""
        free = torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else free_host_bytes()
        blocks = block_bytes(self.spec, self.options.block_size, self.options.quant_policy, self._dtype)
        loaded = self._decoder is not None
        # norms and softmax make float32 copies
        activations = activation_bytes(self.spec, max(self._dtype.itemsize, 4))
        return MemoryNeed(self._weight_bytes, activations, blocks, free, loaded)

    def _placement(self, sample: Weight) -> Placement:
        """Integer weights become dense on a CPU where they then take at most half of the free memory."""
        dequantize = self._device.type == "cpu"
        if dequantize and isinstance(sample, (GroupInt, BlockFp8, Fp4)):
            dequantize = dense_bytes(self.spec, self._dtype) <= free_host_bytes() // 2
        return Placement(self._device, self._dtype, dequantize)

    def _describe(self, sample: Weight) -> list[str]:
        notes = []
        if self.options.dtype == "auto":
            notes.append(f"dtype auto is {self.dtype}")
        notes += mixed_gpus(self.options.device, self._device)
        if not isinstance(sample, Dense):
            held = "dequantized at load" if becomes_dense(sample, self._place) else "kept packed"
            notes.append(f"quantized weights are {held} ({self._weight_bytes / 2**20:.0f} MiB)")
        return notes

    def _choose_ops(self, sample: Weight) -> Ops:
        dims = {a.head_dim for _, a in self.spec.attention_layers()}
        codes = "int8" if isinstance(sample, ChannelInt8) else "fp8"
        cache = cache_traits(self.options.quant_policy)
        return choose_ops(self._device, self._dtype, head_dim=max(dims), codes=codes, **cache)

    # -- weights and cache

    def load_weights(self) -> None:
        """Build the model; does nothing where it is there. Raises RunnerError where a GPU's memory runs out."""
        if self._decoder is None:
            with torch.inference_mode(), on_device(self._device), _memory_runs_out("while loading weights"):
                self._decoder = build_decoder(
                    self.spec, self._weights(), self._place, self._ops, self._adapters, self._adapter_step
                )

    def release_weights(self) -> None:
        """Forget the model; ``load_weights`` brings it back."""
        self._decoder = None
        self._empty_device()

    def allocate_cache(self, num_blocks: tuple[int, ...]) -> None:
        """A fresh cache of ``num_blocks`` for each group. Raises RunnerError for a wrong number of groups, and where a
        GPU's memory runs out.
        """
        if len(num_blocks) != len(self.spec.cache_groups) or min(num_blocks) < 1:
            raise RunnerError(f"num_blocks: expected {len(self.spec.cache_groups)} counts above 0, found {num_blocks}")
        self.release_cache()
        options = self.options
        with torch.inference_mode(), _memory_runs_out(f"while allocating {num_blocks} KV blocks"):
            self._cache = KVCache(
                self.spec, num_blocks, options.block_size, options.quant_policy, self._dtype, self._device
            )

    def release_cache(self) -> None:
        """Forget the cache."""
        self._cache = None
        self._empty_device()

    def discard_blocks(self, group: int, blocks: Sequence[int]) -> None:
        """On a CPU: give the memory of blocks that no step uses back to the system; they are zeros then."""
        self._ready()[1].discard(group, blocks)

    def _empty_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # -- steps

    def submit(self, batch: StepBatch) -> StepHandle:
        """Run a step. On a CPU it has ended on return; ``result`` raises RunnerError where it failed."""
        try:
            with torch.inference_mode(), on_device(self._device):  # kernels are tried at their first call
                return self._run(batch)
        except RunnerError as error:
            return Failed(error)
        except (RuntimeError, MemoryError, IndexError) as error:
            return Failed(RunnerError(f"the step failed: {type(error).__name__}: {_first_line(error)}"))

    def _run(self, batch: StepBatch) -> Produced:
        decoder, cache = self._ready()
        check_batch(batch, self.spec, cache.num_blocks, cache.block_size, self._previous.shape[0], len(self._adapters))
        check_sampling(batch, self.spec.vocab_size)
        for group, pairs in enumerate(batch.copy_blocks):
            if len(pairs):
                cache.copy(group, pairs)
        step = make_context(self.spec, batch, cache, self._tables, self._ops, self._device)
        self._adapter_step.begin(batch, self._ops, self._device)
        x, delta = decoder.run(self._embed(decoder, batch), step)
        produced = produce(decoder, x, delta, batch)
        self._previous = produced.sampled.tokens
        return produced

    def _ready(self) -> tuple[Decoder, KVCache]:
        if self._decoder is None or self._cache is None:
            raise RunnerError("the runner has no weights or no cache; call load_weights and allocate_cache first")
        return self._decoder, self._cache

    def _embed(self, decoder: Decoder, batch: StepBatch) -> Tensor:
        ids = torch.from_numpy(batch.token_ids).to(self._device, torch.int64)
        if (batch.from_previous >= 0).any():
            source = torch.from_numpy(batch.from_previous).to(self._device, torch.int64)
            taken = self._previous.index_select(0, source.clamp(min=0))
            ids = torch.where(source >= 0, taken, ids)
        x = decoder.embed(ids)
        if batch.embeds is not None and len(batch.embed_index):
            rows = torch.from_numpy(batch.embed_index).to(self._device, torch.int64)
            x = x.index_copy(0, rows, torch.from_numpy(batch.embeds).to(self._device, x.dtype))
        return x

    def export_block(self, group: int, block: int) -> bytes:
        """The block's content in stored form, all layers of the group."""
        return self._ready()[1].export_block(group, block)

    def import_block(self, group: int, block: int, data: bytes) -> None:
        """Inverse of ``export_block``."""
        with torch.inference_mode():
            self._ready()[1].import_block(group, block, data)

    def close(self) -> None:
        """Release weights and cache."""
        self.release_cache()
        self.release_weights()


@contextmanager
def _memory_runs_out(where: str) -> Iterator[None]:
    """A GPU's want of memory inside as RunnerError, one line with torch's numbers."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunnerError(f"out of memory {where}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    """What an exception says, without the lines of advice and traces that torch appends."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no reason given"
