"""The ``native`` runner on a GPU: a step is kernels of ``toolkit.kernels`` in one stream, decode steps captured graphs.

``submit`` returns as soon as the step is queued. Its arrays go over in one pinned copy, tokens of the step before are
read where they are, and what it gives is copied to pinned memory behind it; only ``result`` waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from toolkit.artifacts.canonical import ChannelInt8, Weight
from toolkit.errors import UsageError
from toolkit.kernels import KernelError
from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import QUANT_POLICIES, MemoryNeed, RunnerError, RunnerOptions, StepHandle
from toolkit.runners.step import StepBatch
from toolkit.runners.tensor import gpu_memory as memory
from toolkit.runners.tensor.build import build_decoder
from toolkit.runners.tensor.cache import KVCache, block_bytes, cache_traits
from toolkit.runners.tensor.decoder import Decoder, Moe
from toolkit.runners.tensor.device import CudaDevice, Device
from toolkit.runners.tensor.find import find_device, find_dtype, mixed_gpus, on_device
from toolkit.runners.tensor.footprint import activation_bytes, first_linear, stored_dtype, weight_bytes
from toolkit.runners.tensor.linear import Placement
from toolkit.runners.tensor.lora import Adapters, AdapterStep
from toolkit.runners.tensor.ops import Ops, choose_ops
from toolkit.runners.tensor.output import Failed
from toolkit.runners.tensor.steps import Steps

log = logging.getLogger(__name__)


class CudaRunner:
    """Executes a spec on a GPU; implements ``toolkit.runners.base.Runner``.

    ``weights``: called at every load; names as ``canonical_weights`` gives them. ``device`` and ``ops`` are found from
    ``options`` where they are not given. ``adapters``: what ``StepBatch.adapter`` counts, by canonical names of
    linears. ``notes``: what "auto" became. Raises UsageError for a device, dtype or quant_policy that cannot be.
    """

    name = "native"
    asynchronous = True  # submit returns while the step runs, so the caller can prepare the next one

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Callable[[], Mapping[str, Weight | Tensor]],
        options: RunnerOptions,
        device: Device | None = None,
        ops: Ops | None = None,
        adapters: Adapters = (),
    ) -> None:
        if options.quant_policy not in QUANT_POLICIES:
            raise UsageError(f"quant_policy: expected 0, 4, 8, 16 or 17, found {options.quant_policy!r}")
        self.spec, self.options = spec, options
        self._weights = weights
        self._adapters, self._adapter_step = adapters, AdapterStep(len(adapters))
        self._on = device or CudaDevice(find_device("cuda" if options.device == "auto" else options.device))
        stored = weights()
        self._dtype = find_dtype(options.dtype, stored_dtype(stored[spec.embed]), self._on.torch)
        self.device, self.dtype = str(self._on.torch), str(self._dtype).removeprefix("torch.")
        self._sample = first_linear(spec, stored)
        self._place = Placement(self._on.torch, self._dtype, False)
        self._weight_bytes = weight_bytes(spec, stored, self._place, adapters)
        with on_device(self._on.torch):
            self._ops = ops or self._choose_ops()
        self.notes = [f"dtype auto is {self.dtype}"] if options.dtype == "auto" else []
        self.notes += mixed_gpus(options.device, self._on.torch)
        self._decoder: Decoder | None = None
        self._cache: KVCache | None = None
        self._steps: Steps | None = None  # where there are weights and a cache

    def _choose_ops(self) -> Ops:
        dims = {a.head_dim for _, a in self.spec.attention_layers()}
        codes = "int8" if isinstance(self._sample, ChannelInt8) else "fp8"
        cache = cache_traits(self.options.quant_policy)
        return choose_ops(self._on.torch, self._dtype, head_dim=max(dims), codes=codes, **cache)

    # -- memory

    def memory(self) -> MemoryNeed:
        """What weights, activations and blocks take, and what is free beside CUDA's and attention's own needs."""
        size, policy, loaded = self.options.block_size, self.options.quant_policy, self._decoder is not None
        blocks = block_bytes(self.spec, size, policy, self._dtype)
        weights = self._weight_bytes
        free, _ = self._on.memory()
        rest = max(0, free - (0 if loaded else weights))
        own = memory.CONTEXT_BYTES + memory.attention_bytes(self.spec, blocks, size, rest)
        activations = activation_bytes(self.spec, self._dtype.itemsize)
        return MemoryNeed(weights, activations, blocks, free - min(own, rest // 4), loaded)

    # -- weights and cache

    def load_weights(self) -> None:
        """Build the model; does nothing where it is there. Raises RunnerError where memory runs out."""
        if self._decoder is not None:
            return
        with torch.inference_mode(), self._on.working():
            try:
                self._decoder = build_decoder(
                    self.spec, self._weights(), self._place, self._ops, self._adapters, self._adapter_step
                )
            except self._on.trouble() as error:
                raise RunnerError(self._out_of_memory("while loading weights")) from error

    def release_weights(self) -> None:
        """Forget the model; ``load_weights`` brings it back."""
        self._steps = self._decoder = None
        self._on.trim()

    def allocate_cache(self, num_blocks: tuple[int, ...]) -> None:
        """A fresh cache of ``num_blocks`` for each group. Raises RunnerError for a wrong number of groups."""
        if len(num_blocks) != len(self.spec.cache_groups) or min(num_blocks) < 1:
            raise RunnerError(f"num_blocks: expected {len(self.spec.cache_groups)} counts above 0, found {num_blocks}")
        self.release_cache()
        size, policy = self.options.block_size, self.options.quant_policy
        with torch.inference_mode(), self._on.working():
            try:
                self._cache = KVCache(self.spec, num_blocks, size, policy, self._dtype, self._on.torch)
            except self._on.trouble() as error:
                raise RunnerError(self._out_of_memory(f"while allocating {num_blocks} KV blocks")) from error

    def warm_up(self, most: int, length: int, tokens: int) -> None:
        """Compile and capture what steps of up to ``most`` sequences of up to ``length`` tokens need, with ``tokens``
        new ones at most, so that no request waits for it. Raises RunnerError where memory runs out.
        """
        with torch.inference_mode(), self._on.working():
            try:
                self._ready().warm_up(most, length, tokens)
            except self._on.trouble() as error:
                raise RunnerError(self._out_of_memory(f"while steps of {most} sequences were tried")) from error

    def release_cache(self) -> None:
        """Forget the cache."""
        self._steps = self._cache = None
        self._on.trim()

    def _ready(self) -> Steps:
        if self._steps is None:
            if self._decoder is None or self._cache is None:
                raise RunnerError("the runner has no weights or no cache; call load_weights and allocate_cache first")
            graphs = not any(isinstance(s.mixer, Moe) and s.mixer.experts for s in self._decoder.steps)
            if not graphs:
                log.warning("experts of a form that no kernel runs together: decode steps run kernel by kernel")
            self._steps = Steps(self.spec, self._decoder, self._cache, self._on, graphs, self._adapter_step)
        return self._steps

    # -- steps

    def submit(self, batch: StepBatch) -> StepHandle:
        """Queue a step and return; ``result`` waits for it and raises RunnerError where it failed."""
        try:
            with torch.inference_mode(), self._on.working():
                return self._ready().submit(batch, self._explain)
        except RunnerError as error:
            return Failed(error)
        except (RuntimeError, MemoryError, IndexError, KernelError) as error:
            return Failed(self._explain(error, batch))

    def _explain(self, error: Exception, batch: StepBatch) -> RunnerError:
        """Why a step failed, in one line; with the numbers where it was for want of memory."""
        if isinstance(error, self._on.trouble()):
            self._on.trim()
            what = f"in a step of {len(batch.seq_lens)} sequences and {len(batch.token_ids)} tokens"
            return RunnerError(self._out_of_memory(what))
        lines = str(error).strip().splitlines()
        return RunnerError(f"the step failed: {type(error).__name__}: {lines[0] if lines else 'no reason given'}")

    def _out_of_memory(self, where: str) -> str:
        free, total = self._on.memory()
        return (
            f"{self.device} ran out of memory {where}: {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free; use a "
            "smaller --max-prefill-token-num, --max-batch-size or --cache-max-entry-count"
        )

    # -- blocks

    def export_block(self, group: int, block: int) -> bytes:
        """The block's content in stored form, all layers of the group."""
        with torch.inference_mode(), self._on.working():
            return self._ready().cache.export_block(group, block)

    def import_block(self, group: int, block: int, data: bytes) -> None:
        """Inverse of ``export_block``."""
        with torch.inference_mode(), self._on.working():
            self._ready().cache.import_block(group, block, data)

    def close(self) -> None:
        """Release weights and cache."""
        self.release_cache()
        self.release_weights()
