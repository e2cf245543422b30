"""The ``native`` runner: one call into the C++ library a step. Imports neither torch nor transformers to run."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.artifacts.manifest import file_digest
from toolkit.artifacts.weight_files.huge_pages import Mover, forget_pages
from toolkit.base.threads import usable_cores
from toolkit.errors import UsageError
from toolkit.models.eyes.pictures import Picture
from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import (
    QUANT_POLICIES,
    QUANT_POLICIES_TOLD,
    Backend,
    MemoryNeed,
    RunnerError,
    RunnerOptions,
)
from toolkit.runners.host_memory import free_host_bytes
from toolkit.runners.native import library
from toolkit.runners.native.adapters import PackedAdapter, Shelf, pack_adapter, put_adapter
from toolkit.runners.native.arrays import Arrays, outputs_for
from toolkit.runners.native.library import StepResults
from toolkit.runners.native.load import DTYPES, outlines_of, packed_of, stored_dtype
from toolkit.runners.native.need import activation_bytes, block_bytes, picture_bytes
from toolkit.runners.native.packing.artifact import of_first_alone
from toolkit.runners.native.packing.packed import PackedTensor
from toolkit.runners.native.program import Program, build_program
from toolkit.runners.native.share import Parts, Share
from toolkit.runners.native.stepper import Running, Stepper
from toolkit.runners.native.support import no_adapters, unsupported
from toolkit.runners.native.towers.tower import NativeEncoder, uncovered
from toolkit.runners.routes import by_layer
from toolkit.runners.step import StepBatch, StepOutput
from toolkit.runners.weights.info import info_of, scales_of

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from toolkit.artifacts.adapters.adapter import Change
    from toolkit.artifacts.canonical import Weight
    from toolkit.artifacts.scales import AllScales
    from toolkit.runners.native.towers.torch_tower import TorchEncoder

ALONE = Share()


class NativeRunner:
    """Executes a spec on the CPU; implements ``toolkit.runners.base.Runner``.

    ``weights``: called at every load; either packed (``Mapping[str, PackedTensor]``, used where it lies) or canonical
    (then packed in memory, which imports torch). ``changes``: reads the adapter in a directory. ``lender``: of the
    model whose embedding and head this one's are; ``beside``: whose cache it reads, so that it has none. The weights of
    either are loaded first. Raises UsageError for an option that cannot be.
    """

    name = "native"
    backend: Backend = "turbomind"
    device = "cpu"
    batch_invariant = asynchronous = True

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Callable[[], Mapping[str, Weight | Tensor] | Mapping[str, PackedTensor]],
        options: RunnerOptions,
        dtype: str | None = None,
        share: Share = ALONE,
        changes: Callable[[Path], Mapping[str, Change]] | None = None,
        lender: NativeRunner | None = None,
        beside: NativeRunner | None = None,
    ) -> None:
        if options.quant_policy not in QUANT_POLICIES:
            raise UsageError(f"quant_policy: expected {QUANT_POLICIES_TOLD}, found {options.quant_policy!r}")
        if reason := unsupported(spec, options):
            raise UsageError(f"the native runner does not run here: {reason}")
        self.spec, self.options, self.share = spec, options, share
        self._weights = weights
        self.notes: list[str] = []
        self.dtype = dtype or options.dtype
        if self.dtype == "auto":
            found: Mapping[str, Any] = weights()
            self.dtype = stored_dtype(info_of(found, spec.embed))
        if self.dtype not in DTYPES:
            raise UsageError(f"dtype: expected one of {', '.join(DTYPES)}, found {self.dtype!r}")
        self._library = library.load(library.library_path())
        self._stepper = Stepper()
        self._arrays: Arrays | None = None  # of the last step
        self._model: int | None = None
        self._program: Program | None = None  # holds the tensors that the model points into
        self._weight_bytes = self._cache_bytes = 0
        self._mover: Mover | None = None  # of what it points into
        self._encoder: NativeEncoder | TorchEncoder | None = None
        self._changes, self._lender, self._beside = changes, lender, beside
        self._scales: AllScales | None = None  # of the weights that are loaded
        self._adapter_paths = {i: Path(path) for i, (_, path) in enumerate(options.adapters) if path}
        self._coming_adapters: dict[int, Path] = {}  # read ahead of ``add_adapter``
        self._adapter_digests: dict[int, bytes] = {}  # as they were first read: the cache is of those
        self._shelf = Shelf(self._read_adapter, self._put_adapter, self._drop_adapter, options.adapter_memory)

    # -- memory

    def memory(self) -> MemoryNeed:
        """What weights, activations and blocks take, and what is free now."""
        loaded = self._model is not None
        weights = self._weight_bytes if loaded else self._estimate_weights()
        blocks = block_bytes(self.spec, self.options, self.dtype, self.share)
        activations, pictures = activation_bytes(self.spec), picture_bytes(self.spec)
        return MemoryNeed(weights, activations, blocks, free_host_bytes(), loaded, *pictures)

    def _estimate_weights(self) -> int:
        packed = outlines_of(self.spec, self._weights())
        lent = () if self._lender is None else (self.spec.embed, self.spec.head)
        parts = Parts(self.spec, packed, self.share)
        return sum(parts.bytes_of(name, packed[name]) for name in packed if name not in lent)

    # -- weights and cache

    def load_weights(self) -> None:
        """Pack or map the weights and make the model; does nothing where it is there. RunnerError if they are bad."""
        if self._model is not None:
            return
        packed, options = self._packed(), self.options
        parts = None if self.share.ranks == 1 else Parts(self.spec, packed, self.share)
        program = build_program(
            self.spec,
            packed,
            dtype=self.dtype,
            quant_policy=options.quant_policy,
            block_size=options.block_size,
            parts=parts,
            kv_layers=options.kv_layers,
            key_means=options.key_means,
            beside=None if self._beside is None else self._beside.spec,
        )
        threads = options.threads or usable_cores()
        make = self._library.tk_model_create
        cache_of = None if self._beside is None else self._beside._loaded()
        model = library.create(make, program.names, program.values, program.tensors, threads, cache_of)
        if not model:
            raise RunnerError(f"the native model cannot be made: {library.error(self._library)}")
        if self.spec.vision is not None and (reason := uncovered(self.spec.vision)):
            self.notes = [*self.notes, f"pictures are read in torch: {reason}"]
        self._model, self._program = model, program
        if parts is None:
            self._weight_bytes = sum(t.data.nbytes for t in program.tensors)
        else:
            self._weight_bytes = sum(parts.bytes_of(name, packed[name]) for name in packed)
            self._check(self._library.tk_model_join(model, self.share.file))
        alive = weakref.ref(self)  # the mover shall keep nobody
        room = lambda: 0 if (runner := alive()) is None else runner._room()  # noqa: E731
        self._mover = Mover([t.data for t in program.tensors], self._weight_bytes, room)
        for number in self._adapter_paths:  # each is read once: what is wrong with it is said now
            self._shelf.need([number])

    def settle(self) -> None:
        """Wait until the weights lie in huge pages, where they are to."""
        if self._mover is not None:
            self._mover.wait()

    def _room(self) -> int:
        """Bytes of memory that nothing here will want."""
        return free_host_bytes() - self._cache_bytes

    # -- adapters

    @property
    def adapter_numbers(self) -> Collection[int]:
        """Of the adapters that it has."""
        return self._adapter_paths.keys()

    def read_adapter(self, number: int, path: Path | str) -> bool:
        """Whether ``add_adapter`` with the same arguments has not to wait for files; until then they are being read
        beside steps. What is wrong with them, it will tell."""
        self._coming_adapters[number] = Path(path)
        return self.adapter_ready(number)

    def add_adapter(self, number: int, path: Path | str) -> None:
        """The adapter in a directory, which ``StepBatch.adapter`` names ``number`` from now on. Raises ToolkitError
        where it cannot be read or is of another model, UsageError where the model takes none."""
        self._adapter_paths[number] = Path(path)
        self._coming_adapters.pop(number, None)
        try:
            if reason := no_adapters(self.spec):
                raise UsageError(f"adapter {path}: the native runner cannot use it: {reason}")
            if self._model is not None:
                self._shelf.need([number])
        except Exception:
            self.remove_adapter(number)
            raise

    def adapter_ready(self, number: int, seconds: float = 0.0) -> bool:
        """Whether a step can use it without reading its files, perhaps within this time; else they are being read."""
        return self._model is None or self._shelf.ready(number, seconds)

    def remove_adapter(self, number: int) -> None:
        """Forget it; no step uses it any more."""
        self._adapter_paths.pop(number, None)
        self._coming_adapters.pop(number, None)
        self._adapter_digests.pop(number, None)
        self._shelf.forget(number)

    def _read_adapter(self, number: int) -> PackedAdapter:
        path, program = self._adapter_paths.get(number) or self._coming_adapters.get(number), self._program
        if path is None or program is None or self._changes is None:
            raise RunnerError(f"adapter: there is none of number {number}")
        from toolkit.artifacts.adapters.adapter import fold

        changes = fold(self._changes(path), self._scales)
        found = pack_adapter(changes, self.spec, program, self.dtype, known=self._scales is not None)
        if self._adapter_digests.setdefault(number, digest := found.digest) != digest:
            again = "unload it and load it once more, or restart the server"
            raise RunnerError(f"adapter {path}: its files are not those that were loaded; {again}")
        return found

    def _put_adapter(self, number: int, adapter: PackedAdapter) -> None:
        self._stepper.finish()
        put_adapter(self._library, self._loaded(), number, adapter)

    def _drop_adapter(self, number: int) -> None:
        self._stepper.finish()
        if self._model is not None:
            self._library.tk_adapter_drop(self._model, number)

    def _packed(self) -> Mapping[str, PackedTensor]:
        found = self._weights()
        packed, self.notes = packed_of(self.spec, found, self.share, self.notes)
        self._scales = scales_of(found)
        lent = {} if self._lender is None else self._lender.lent()
        return {**packed, **lent} if lent else packed

    def lend(self) -> None:
        """Hold embedding and head whole from the next load on: another borrows them. Raises UsageError where the files
        have but this rank's part."""
        if self.share.ranks == 1:
            return
        spec = self.spec
        found: Mapping[str, Any] = self._weights()
        head: Any = info_of(found, spec.embed if spec.tied else spec.head)
        if isinstance(head, PackedTensor) and head.data.nbytes < head.meta.nbytes:
            raise UsageError(
                "the model is packed for ranks, each with a part of the head; convert it without --tp, or leave it out"
            )
        self.share = replace(self.share, lends=True)

    def lent(self) -> dict[str, PackedTensor]:
        """Embedding, head and final norm, as they are loaded, by their names; the norm with its offset."""
        program = self._program
        if program is None:
            raise RunnerError("the runner has no weights; call load_weights first")
        at = dict(zip(program.names, program.values, strict=True))
        return {
            name: program.tensors[int(at[matrix])]
            for name, matrix in (
                (self.spec.embed, "embed.matrix"),
                (self.spec.head, "head.matrix"),
                (self.spec.final_norm.name, "final_norm.weight"),
            )
        }

    def use_weights(self, weights: Callable[[], Mapping[str, Any]]) -> Callable[[], Mapping[str, Any]]:
        """What ``load_weights`` is to load from now on; returns what it would have loaded."""
        before, self._weights = self._weights, weights
        return before

    def release_weights(self) -> None:
        """Forget the model and its cache; ``load_weights`` brings the model back. Of a mapped file the pages go."""
        self._stepper.finish()
        if self._mover is not None:
            self._mover.close()
        self._shelf.empty()
        self._adapter_digests.clear()
        if self._model is not None:
            self._library.tk_model_free(self._model)
        if self._program is not None:
            forget_pages(tensor.data for tensor in self._program.tensors)
        if self._encoder is not None:
            self._encoder.close()
            forget_pages(tensor.data for tensor in self._encoder.held)
        self._model = self._program = self._encoder = None

    def allocate_cache(self, num_blocks: tuple[int, ...]) -> None:
        """A fresh cache of ``num_blocks`` for each group. Raises RunnerError for counts that cannot be."""
        self._stepper.finish()
        counts = np.asarray(num_blocks, np.int64)
        self._check(self._library.tk_cache_allocate(self._loaded(), counts.ctypes.data, counts.size))
        self._cache_bytes = sum(n * size for n, size in zip(num_blocks, self.memory().block_bytes, strict=True))

    def release_cache(self) -> None:
        """Forget the cache."""
        self._stepper.finish()
        if self._model is not None:
            self._library.tk_cache_release(self._model)

    def warm_up(self, most: int, length: int, tokens: int) -> None:
        """Where the model sees, what it sees with is made; all else is compiled beforehand."""
        if self.spec.vision is not None and self._encoder is None:
            with suppress(ModuleNotFoundError):  # texts are answered without torch; who sends a picture is told
                self._encoder = self._open_encoder()

    def look(self) -> None:
        """Nothing that it needs is elsewhere."""

    def discard_blocks(self, group: int, blocks: Sequence[int]) -> None:
        """Give the memory of blocks that no step uses back to the system; they are zeros then."""
        numbers = np.asarray(blocks, np.int64)
        self._check(self._library.tk_cache_discard(self._loaded(), group, numbers.ctypes.data, numbers.size))

    def _loaded(self) -> int:
        if self._model is None:
            raise RunnerError("the runner has no weights; call load_weights first")
        return self._model

    def _check(self, code: int) -> None:
        if code:
            raise RunnerError(library.error(self._library))

    # -- steps

    def encode(self, pictures: Sequence[Picture]) -> list[NDArray[np.float32]]:
        """The rows that pictures become in a prompt, [tokens, hidden] each; with dtype float32 computed in it, else in
        bfloat16 where the processor multiplies that. Raises RunnerError where it fails."""
        self._stepper.finish()
        if self._encoder is None:
            self._encoder = self._open_encoder()
        try:
            return self._encoder.encode(pictures)
        except MemoryError as e:
            raise RunnerError(f"{len(pictures)} pictures cannot be encoded: {e}") from e

    def _open_encoder(self) -> NativeEncoder | TorchEncoder:
        vision = self.spec.vision
        if vision is None:
            raise RunnerError("the model does not see")
        exact = self.dtype == "float32"
        found: Mapping[str, Any] = self._weights()
        packed = isinstance(found[self.spec.embed], PackedTensor)
        if uncovered(vision):
            from toolkit.runners.native.towers.torch_tower import TorchEncoder

            return TorchEncoder(vision, found, packed=packed, exact=exact)
        if not packed:
            from toolkit.runners.native.packing.pack_model import pack_model

            held = found
            seeing = ((name, held[name]) for name in held if of_first_alone(name))
            tower = pack_model(self.spec, seeing, None, [], 32 if exact else 16)
            found = {name: tensor.in_memory() for name, tensor in tower}
        from toolkit.runners.native.towers.encoders import open_encoder

        return open_encoder(vision, found, bf16=not exact, threads=self.options.threads or usable_cores())

    def submit(self, batch: StepBatch) -> Running:
        """Start a step and return; steps run one after the other. ``result`` raises RunnerError where it failed.

        The arrays are made ready here, while the step before it runs, so that its thread goes from step to step.
        """
        try:
            slots = batch.adapter if batch.adapter.size and batch.adapter.max() >= 0 else None
            if slots is not None:
                self._shelf.need(sorted({int(n) for n in slots if n >= 0}))
            arrays = self._arrays = Arrays(batch, self.spec, self._arrays, slots)
            output, results, bad = outputs_for(batch, self.spec)
        except Exception as error:
            return self._stepper.start(partial(_fail, error))
        # Ranks that wait for this one began when they were told.
        waited = batch.waited and self.share.ranks == 1
        return self._stepper.start(partial(self._run, arrays, output, results, bad), waited)

    def _run(
        self, arrays: Arrays, output: StepOutput, results: StepResults, bad: ctypes.Array[ctypes.c_int32]
    ) -> StepOutput:
        self._check(self._library.tk_step(self._loaded(), ctypes.byref(arrays.structure), ctypes.byref(results)))
        if any(bad):  # between two steps numpy's own code is no longer in the cache
            output.bad_rows = np.flatnonzero(bad).astype(np.int32)
        if len(output.routes):
            output.routes = by_layer(output.routes, self.spec)
        return output

    def embed(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """The embeddings of tokens, [len(ids), hidden]; no step runs. RunnerError for one that does not exist."""
        ids = np.ascontiguousarray(ids, np.int32)
        rows = np.empty((len(ids), self.spec.hidden_size), np.float32)
        self._check(self._library.tk_embed(self._loaded(), ids.ctypes.data, len(ids), rows.ctypes.data))
        return rows

    # -- one of several ranks

    def meetings(self) -> int:
        """How often it has taken what the others have made, since weights were loaded."""
        return 0 if self._model is None else int(self._library.tk_model_meetings(self._model))

    # -- blocks

    @property
    def layout(self) -> str:
        """The library's own bytes: another build may round otherwise; and the instructions that it takes here."""
        return f"{file_digest(library.library_path())} {library.instructions()}"

    def export_block(self, group: int, block: int, into: memoryview | None = None) -> memoryview:
        """The block's bytes in stored form: layer after layer, head after head."""
        size = self._library.tk_block_bytes(self._loaded(), group)
        data = np.empty(max(size, 0), np.uint8) if into is None else np.frombuffer(into, np.uint8)
        self._check(self._library.tk_block_export(self._model, group, block, data.ctypes.data))
        return data.data

    def import_block(self, group: int, block: int, data: bytes | memoryview) -> None:
        """Inverse of ``export_block``, when no step runs. Raises RunnerError where the size is another."""
        self._stepper.finish()
        given = np.frombuffer(data, np.uint8)
        self._check(self._library.tk_block_import(self._loaded(), group, block, given.ctypes.data, given.size))

    def close(self) -> None:
        """Free model and cache, and end the thread. With TOOLKIT_NATIVE_PROFILE=1 the library prints its profile."""
        self.release_weights()
        self._stepper.close()

    def __del__(self) -> None:
        if hasattr(self, "_stepper"):
            self.close()


def _fail(error: Exception) -> StepOutput:
    raise error
