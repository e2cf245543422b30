"""The ``tensor`` runner: any spec, by the ops of ``toolkit.kernels`` on any device that torch has.

With graphs, on a GPU, ``submit`` returns as soon as the step is queued: its arrays go over in one pinned copy, tokens
of the step before are read where they are, and what it gives is copied to pinned memory behind it; only ``result``
waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.artifacts.canonical import BlockFp8, ChannelInt8, Dense, Fp4, GroupInt, Weight
from toolkit.errors import UsageError
from toolkit.kernels import KernelError
from toolkit.models.eyes.pictures import Picture
from toolkit.models.eyes.vision import patch_numbers
from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import (
    QUANT_POLICIES,
    QUANT_POLICIES_TOLD,
    Backend,
    MemoryNeed,
    RunnerError,
    RunnerOptions,
    StepHandle,
)
from toolkit.runners.step import StepBatch
from toolkit.runners.tensor.alike import check_alike, check_alike_device
from toolkit.runners.tensor.build import build_decoder, with_experts
from toolkit.runners.tensor.cache import KVCache, block_bytes, cache_traits
from toolkit.runners.tensor.decoder import Decoder
from toolkit.runners.tensor.devices.device import Device, GraphDevice
from toolkit.runners.tensor.devices.find import find_dtype, mixed_gpus, on_device, open_device
from toolkit.runners.tensor.footprint import activation_bytes, dense_bytes, expands, first_linear, stored_dtype
from toolkit.runners.tensor.held import weight_bytes
from toolkit.runners.tensor.layers.linear import Placement, becomes_dense
from toolkit.runners.tensor.layers.lora import Adapters, AdapterStep
from toolkit.runners.tensor.ops import Ops, choose_ops, not_needed
from toolkit.runners.tensor.split import Split
from toolkit.runners.tensor.step.pending import Failed
from toolkit.runners.tensor.step.prompts import most_tokens
from toolkit.runners.tensor.step.steps import Steps
from toolkit.runners.tensor.step.tiles import partial_bytes
from toolkit.runners.tensor.towers.encoders import encoder_of
from toolkit.runners.tensor.towers.vision import Encoder
from toolkit.runners.tensor.traits import model_traits
from toolkit.runners.weights.info import info_of
from toolkit.runners.weights.integers import IntegerWeights


class TensorRunner:
    """Executes a spec; implements ``toolkit.runners.base.Runner``.

    ``weights``: called at every load; names as ``canonical_weights`` gives them. ``adapters``: what
    ``StepBatch.adapter`` counts, by canonical names of linears. ``graphs``: the device, where decode steps are captured
    and no step is waited for, for a model that ``support.unsupported`` has no word against; None: the device that
    ``options`` name runs kernel by kernel. ``ops``: found for the device where they are not given. ``notes``: what
    "auto" became and how quantized weights are held. ``split``: the ranks of which it is one, whose ``spec`` and
    ``weights`` are given; ``dense``: whether quantized weights are held dense, None: as is best here. ``lender``: of
    the model whose embedding and head this one's are; ``beside``: whose cache it reads, so that it has none. The
    weights of either are loaded first. Raises UsageError for a device, dtype or quant_policy that cannot be.
    """

    name = "tensor"

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Callable[[], Mapping[str, Weight | Tensor]],
        options: RunnerOptions,
        adapters: Adapters = (),
        *,
        graphs: GraphDevice | None = None,
        ops: Ops | None = None,
        split: Split | None = None,
        dense: bool | None = None,
        lender: TensorRunner | None = None,
        beside: TensorRunner | None = None,
    ) -> None:
        _check(spec, options)
        if options.batch_invariant:
            check_alike(spec, split)
        if options.threads > 0:
            torch.set_num_threads(options.threads)
        self.spec, self.options = spec, options
        self.backend: Backend = "pytorch" if graphs is None else "turbomind"
        self.batch_invariant, self.asynchronous = options.batch_invariant, graphs is not None
        self._weights = _known_to_kernels(weights)
        self._graphs, self._split = graphs, split
        self._on: Device = graphs or open_device(options.device)
        self._adapters, self._adapter_step = adapters, AdapterStep(len(adapters))
        self._lender, self._beside = lender, beside
        self._readers: weakref.WeakSet[TensorRunner] = weakref.WeakSet()  # of its cache
        if beside is not None:
            beside._readers.add(self)
        stored = self._weights()
        roomy = dense_bytes(spec, torch.float32) <= self._free() // 2
        kept = stored_dtype(stored[spec.embed]) if lender is None else lender._dtype
        self._dtype: torch.dtype = find_dtype(options.dtype, kept, self._on.torch, roomy, spec.float16)
        self.device, self.dtype = str(self._on.torch), str(self._dtype).removeprefix("torch.")
        sample = first_linear(spec, stored)
        with on_device(self._on.torch):
            self._ops = ops or self._choose_ops(sample, stored)
        self._place = self._placement(sample, dense)
        expanding = not options.batch_invariant and expands(spec, stored, self._place)
        self._prompts = 0 if graphs is None else most_tokens(spec, expanding)
        self._weight_bytes = weight_bytes(spec, stored, self._place, adapters)
        self.notes = self._describe(sample)
        self._decoder: Decoder | None = None
        self._encoder: Encoder | None = None
        self._cache: KVCache | None = None
        self._steps: Steps | None = None  # where there are weights and a cache
        self._expected: tuple[int, int] | None = None  # sequences and their tokens, as ``warm_up`` had them

    def _choose_ops(self, sample: Weight, stored: Mapping[str, Weight | Tensor]) -> Ops:
        dims = {kept.head_dim for _, _, kept in self.spec.paged()} | {m.head_dim for m in self.spec.borrowers()}
        latent = any(kept.kind == "latent" for _, _, kept in self.spec.paged())
        codes = "int8" if isinstance(sample, ChannelInt8) else "fp8"
        traits = cache_traits(self.options.quant_policy) | model_traits(self.spec)
        shape, without = {"head_dim": max(dims, default=64), "latent": latent}, frozenset[str]()
        if self.batch_invariant:
            if self._graphs is None:
                check_alike_device(self._on.torch)
            traits |= {"alike": True}
            without = not_needed({type(info_of(stored, linear.name)) for linear in self.spec.linears()})
        return choose_ops(self._on.torch, self._dtype, without, codes=codes, **shape, **traits)

    @property
    def dense(self) -> bool:
        """Whether quantized weights are held dense."""
        return self._place.dequantize

    def _free(self) -> int:
        """Bytes, of which other ranks on this host have their part."""
        free, _ = self._on.memory()
        return free if self._split is None or self._on.torch.type != "cpu" else free // self._split.world

    def _placement(self, sample: Weight, dense: bool | None) -> Placement:
        """Integer weights become dense where that is faster and they then take at most half of the free memory."""
        if dense is not None:
            return Placement(self._on.torch, self._dtype, dense, self.batch_invariant)
        dense = self._on.dense
        if dense and isinstance(sample, (GroupInt, BlockFp8, Fp4)):
            dense = dense_bytes(self.spec, self._dtype) <= self._free() // 2
        return Placement(self._on.torch, self._dtype, dense, self.batch_invariant)

    def _describe(self, sample: Weight) -> list[str]:
        notes = [f"dtype auto is {self.dtype}"] if self.options.dtype == "auto" else []
        notes += mixed_gpus(self.options.device, self._on.torch)
        if self._on.dense and not isinstance(sample, Dense):
            held = "dequantized at load" if becomes_dense(sample, self._place) else "kept packed"
            notes.append(f"quantized weights are {held} ({self._weight_bytes / 2**20:.0f} MiB)")
        return notes

    # -- memory

    def memory(self) -> MemoryNeed:
        """What weights, activations and blocks take, and what is free beside the device's and attention's own needs."""
        size, policy, loaded = self.options.block_size, self.options.quant_policy, self._decoder is not None
        blocks = block_bytes(self.spec, size, policy, self._dtype)
        weights, element = self._weight_bytes, self._dtype.itemsize
        free = self._free()
        rest = max(0, free - (0 if loaded else weights))
        own = self._on.reserved
        if self._graphs is None:
            element = max(element, 4)  # norms and softmax make float32 copies
        else:
            own += partial_bytes(self.spec, blocks, size, rest)
            own += self._prompts * activation_bytes(self.spec, element)  # graphs' own
        patch = 0 if self.spec.vision is None else patch_numbers(self.spec.vision) * element
        looked_at = sum(mixer.row for _, mixer in self.spec.mixers() if mixer.kind == "cross") * self._dtype.itemsize
        activations = activation_bytes(self.spec, element)
        return MemoryNeed(weights, activations, blocks, free - min(own, rest // 4), loaded, patch, looked_at)

    # -- weights and cache

    def load_weights(self) -> None:
        """Build the model; does nothing where it is there. Raises RunnerError where memory runs out."""
        if self._decoder is None:
            with self._working("while loading weights"):
                weights = self._weights()
                self._decoder = build_decoder(
                    self.spec,
                    weights,
                    self._place,
                    self._ops,
                    self._adapters,
                    self._adapter_step,
                    self._split,
                    None if self._lender is None else self._lender.lent(),
                    None if self._beside is None else self._beside.lent(),
                )
                if self.spec.vision is not None:
                    self._encoder = encoder_of(self.spec.vision)(self.spec.vision, weights, self._on.torch, self._dtype)

    def lent(self) -> Decoder:
        """The model as it is loaded, of which another has parts."""
        if self._decoder is None:
            raise RunnerError("the runner has no weights; call load_weights first")
        return self._decoder

    def use_weights(self, weights: Callable[[], Mapping[str, Any]]) -> Callable[[], Mapping[str, Any]]:
        """What ``load_weights`` is to load from now on; returns what it would have loaded."""
        before, self._weights = self._weights, _known_to_kernels(weights)
        return before

    def place_experts(self, spec: DecoderSpec, layers: Collection[int]) -> None:
        """Load those of ``spec`` in some layers in place of what is there, between two steps. Raises RunnerError where
        memory runs out."""
        self.spec = spec
        if self._decoder is not None:
            with self._working("while experts were moved"):
                self._decoder = with_experts(self._decoder, spec, layers, self._weights(), self._place)
                self._steps = None

    def chosen(self) -> dict[int, list[int]]:
        """Of each layer with whole experts how often each was chosen here, since this was last called."""
        found = {}
        with torch.inference_mode(), self._on.working():
            for layer, placed in () if self._decoder is None else self._decoder.placed():
                if placed.load is not None:
                    found[layer] = placed.load.tolist()
                    placed.load.zero_()
        return found

    def settle(self) -> None:
        """Nothing is done beside steps."""

    def release_weights(self) -> None:
        """Forget the model; ``load_weights`` brings it back."""
        self._steps = self._decoder = self._encoder = None
        self._on.trim()

    def allocate_cache(self, num_blocks: tuple[int, ...]) -> None:
        """A fresh cache of ``num_blocks`` for each group. Raises RunnerError for a wrong number of groups, and where
        memory runs out.
        """
        if len(num_blocks) != len(self.spec.cache_groups) or min(num_blocks) < 1:
            raise RunnerError(f"num_blocks: expected {len(self.spec.cache_groups)} counts above 0, found {num_blocks}")
        self.release_cache()
        size, policy = self.options.block_size, self.options.quant_policy
        with self._working(f"while allocating {num_blocks} KV blocks"):
            self._cache = KVCache(self.spec, num_blocks, size, policy, self._dtype, self._on.torch)

    def release_cache(self) -> None:
        """Forget the cache."""
        self._steps = self._cache = None
        for reader in self._readers:
            reader._steps = None  # else its memory would stay
        self._on.trim()

    def look(self) -> None:
        """Nothing that it needs is elsewhere."""

    def discard_blocks(self, group: int, blocks: Sequence[int]) -> None:
        """On a CPU: give the memory of blocks that no step uses back to the system; they are zeros then."""
        self._ready().cache.discard(group, blocks)

    def warm_up(self, most: int, length: int, tokens: int) -> None:
        """Compile and capture what steps of up to ``most`` sequences of up to ``length`` tokens need, with ``tokens``
        new ones at most, so that no request waits for it; without graphs that is nothing. Raises RunnerError where
        memory runs out.
        """
        self._expected = most, length
        with self._working(f"while steps of {most} sequences were tried"):
            self._ready().warm_up(most, length, tokens)

    def _ready(self) -> Steps:
        cache = self._cache if self._beside is None else self._beside._ready().cache
        if self._steps is None or self._steps.cache is not cache:
            if self._decoder is None or cache is None:
                raise RunnerError("the runner has no weights or no cache; call load_weights and allocate_cache first")
            self._steps = Steps(
                self.spec, self._decoder, cache, self._on, self._graphs, self._adapter_step, self._prompts
            )
            if self._expected is not None and self._graphs is not None:
                self._steps.expect(*self._expected)
        return self._steps

    @contextmanager
    def _working(self, what: str) -> Iterator[None]:
        """Inside, the device works; its want of memory is a RunnerError with the numbers that names ``what`` it did."""
        with torch.inference_mode(), self._on.working():
            try:
                yield
            except self._on.trouble() as error:
                raise RunnerError(self._out_of_memory(what)) from error

    # -- steps

    def encode(self, pictures: Sequence[Picture]) -> list[NDArray[np.float32]]:
        """The rows that pictures become in a prompt, [tokens, hidden] each. Raises RunnerError where it fails."""
        if self._encoder is None:
            raise RunnerError("the runner has no weights, or the model does not see")
        with self._working(f"while {len(pictures)} pictures were encoded"):
            together = [[picture] for picture in pictures] if self.batch_invariant else [pictures]
            return [rows.float().cpu().numpy() for some in together for rows in self._encoder.encode(some)]

    def submit(self, batch: StepBatch) -> StepHandle:
        """Run a step, or with graphs queue it and return. ``result`` raises RunnerError where it failed."""
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
        told = RunnerError(f"the step failed: {type(error).__name__}: {lines[0] if lines else 'no reason given'}")
        told.__cause__ = error  # so that the log shows where; for want of memory not, whose frames would hold tensors
        return told

    def _out_of_memory(self, where: str) -> str:
        free, total = self._on.memory()
        return (
            f"{self.device} ran out of memory {where}: {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free; use a "
            "smaller --max-prefill-token-num, --max-batch-size or --cache-max-entry-count"
        )

    def embed(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """The embeddings of tokens, [len(ids), hidden]."""
        with torch.inference_mode(), self._on.working():
            rows = self.lent().embed(torch.from_numpy(ids.astype(np.int64)).to(self._on.torch))
            found: NDArray[np.float32] = rows.float().cpu().numpy()
            return found

    # -- blocks

    @property
    def layout(self) -> str:
        """torch's version, the device and what chooses kernels: others round otherwise."""
        kind = self._on.torch.type
        named = getattr(getattr(torch, kind, None), "get_device_name", None)
        told = f"torch {torch.__version__} {kind} {named(self._on.torch) if named else ''} dense {self.dense}"
        return f"{told} alike" if self.batch_invariant else told

    def export_block(self, group: int, block: int, into: memoryview | None = None) -> bytes:
        """The block's content in stored form, all layers of the group."""
        with torch.inference_mode(), self._on.working():
            return self._ready().cache.export_block(group, block)

    def import_block(self, group: int, block: int, data: bytes | memoryview) -> None:
        """Inverse of ``export_block``."""
        with torch.inference_mode(), self._on.working():
            self._ready().cache.import_block(group, block, data)

    def close(self) -> None:
        """Release weights and cache."""
        self.release_cache()
        self.release_weights()


def _known_to_kernels(
    weights: Callable[[], Mapping[str, Weight | Tensor]],
) -> Callable[[], Mapping[str, Weight | Tensor]]:
    return lambda: IntegerWeights(weights())


def _check(spec: DecoderSpec, options: RunnerOptions) -> None:
    if any(group.sink_tokens for group in spec.cache_groups):
        raise UsageError("kv_window: the tensor runner keeps no first tokens; give kv_sinks 0, or --backend turbomind")
    if options.kv_layers:
        raise UsageError("quant_policy auto: the tensor runner has one precision for all layers; give 0, 8 or 4")
    if options.quant_policy not in QUANT_POLICIES:
        raise UsageError(f"quant_policy: expected {QUANT_POLICIES_TOLD}, found {options.quant_policy!r}")
    for _, _, kept in spec.keepers():
        if reason := kept.refuses(options.quant_policy):
            raise UsageError(f"quant_policy: {reason}")
