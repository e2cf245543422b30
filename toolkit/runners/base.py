"""What the engine asks of a runner. Two exist: ``tensor`` (any spec, on any device of torch) and ``native``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.eyes.pictures import Picture
from toolkit.models.spec import DecoderSpec
from toolkit.runners.step import StepBatch, StepOutput

QUANT_POLICIES = (0, 4, 8, 16, 17, 44)
QUANT_POLICIES_TOLD = "0, 4, 8, 16, 17 or 44"
Backend = Literal["turbomind", "pytorch"]  # what users choose by: the fast way on this device, or kernel by kernel
BACKENDS: tuple[Backend, ...] = get_args(Backend)


@dataclass(frozen=True)
class RunnerOptions:
    """How to run. ``dtype``: of activations, "auto" = the checkpoint's; ``quant_policy``: the KV cache, 0 as ``dtype``,
    8 or 4 bits (keys then have 6), 44: 4 bits, those of keys too, 16 float8_e4m3fn, 17 float8_e5m2. ``kv_layers``: a
    policy for each of ``spec.paged()`` instead (0, 8, 65, 55, 54: bits of keys and of values, 4, 44), and ``key_means``
    what is taken off keys of fewer than 8 bits (``native/key_means.py``), native runner alone.
    """

    device: str = "auto"  # auto, cpu, cuda, cuda:1 …, xpu and whatever torch has here
    dtype: str = "auto"  # auto, float16, bfloat16, float32
    quant_policy: int = 0
    block_size: int = 64
    threads: int = 0  # 0 = all the machine allows
    # (name, directory) of LoRA adapters, "" of one that has gone; StepBatch.adapter counts them
    adapters: tuple[tuple[str, str], ...] = ()
    adapter_memory: int = 0  # bytes of adapters that are held at a time where the runner pages them, 0 = all
    eager: bool = False  # on a GPU capture no graphs
    batch_invariant: bool = False  # ask for it where it costs speed, see ``Runner``
    kv_layers: tuple[int, ...] = ()
    key_means: str = ""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes, before anything is allocated."""

    weights: int  # resident once loaded (mapped files included)
    activations_per_token: int  # peak, for each token of a step
    block_bytes: tuple[int, ...]  # one KV block of each cache group
    free: int  # what the device or cgroup has free now, weights not yet subtracted unless loaded
    loaded: bool  # whether ``free`` was read after the weights were loaded
    picture_patch: int = 0  # peak, for each patch of pictures that are encoded together
    picture: int = 0  # kept of each patch of a picture that is looked at


class StepHandle(Protocol):
    def result(self) -> StepOutput:
        """Wait for the step and return its output. Raises RunnerError when it failed."""


class RunnerError(Exception):
    """A step failed inside the runner; the requests in it fail, the engine may restart the runner."""


class RunnerLost(RunnerError):
    """What the runner held is gone, and no step will run any more: its engine ends, and may be started anew."""


class Runner(Protocol):
    """Executes the steps of one model. Not thread-safe: one engine loop owns it."""

    name: str  # "tensor" or "native", as its folder is called
    backend: Backend
    spec: DecoderSpec
    device: str
    dtype: str
    options: RunnerOptions
    batch_invariant: bool  # the bits of a row do not depend on what else its step has
    asynchronous: bool  # ``submit`` returns while the step runs, so that the caller can prepare the next one
    notes: list[str]  # what a user should hear of how the model runs, one line each; whole once weights are loaded

    @property
    def layout(self) -> str:
        """What, beside model and options, the bytes of its blocks depend on: who computes, and how they lie."""
        ...

    def memory(self) -> MemoryNeed: ...

    def load_weights(self) -> None:
        """Idempotent; ``release_weights`` undoes it (sleep)."""

    def settle(self) -> None:
        """Wait for what is done beside steps since ``load_weights``, after which steps take their usual time."""

    def release_weights(self) -> None: ...

    def use_weights(self, weights: Callable[[], Mapping[str, Any]]) -> Callable[[], Mapping[str, Any]]:
        """What ``load_weights`` is to load from now on, canonical weights of the same spec; called while none are
        loaded. Returns what it would have loaded."""

    def allocate_cache(self, num_blocks: tuple[int, ...]) -> None:
        """KV blocks for each cache group; replaces an earlier cache. ``release_cache`` undoes it."""

    def release_cache(self) -> None: ...

    def warm_up(self, most: int, length: int, tokens: int) -> None:
        """Prepare steps of up to ``most`` sequences of up to ``length`` tokens, with ``tokens`` new ones at most, so
        that no request waits for it. Raises RunnerError where memory runs out.
        """

    def discard_blocks(self, group: int, blocks: Sequence[int]) -> None:
        """Give the memory of blocks that no step uses back to the system where the device can; they are zeros then."""

    def encode(self, pictures: Sequence[Picture]) -> list[NDArray[np.float32]]:
        """The rows that pictures become in a prompt, [tokens, hidden] each. Raises RunnerError where it fails."""

    def look(self) -> float | None:
        """While nothing runs: whether all that steps need is there. Returns the seconds after which to look again, None
        where nothing can go. Raises RunnerLost."""

    def submit(self, batch: StepBatch) -> StepHandle: ...

    def export_block(self, group: int, block: int, into: memoryview | None = None) -> bytes | memoryview:
        """The content of a block that no step in flight writes to, in stored form, all layers of the group. ``into``:
        what an earlier call for this group gave, whose memory may be used again."""

    def import_block(self, group: int, block: int, data: bytes | memoryview) -> None:
        """Inverse of ``export_block``, into a block that nobody has; waits for steps in flight."""

    def close(self) -> None: ...


def check_texts(batch: StepBatch, spec: DecoderSpec) -> None:
    """Raise RunnerError where tokens that all see each other are not in one step, or positions or types are none that
    the model has."""
    encoder = spec.encoder
    types = 0 if batch.types is None else len(batch.types)
    if types not in (0, len(batch.token_ids)):
        raise RunnerError(f"types: expected {len(batch.token_ids)} entries, found {types}")
    if encoder is None:
        return
    if spec.mutual and (batch.seq_lens != np.diff(batch.cu_seqlens)).any():
        raise RunnerError("seq_lens: the tokens of a text see each other, so that all of them are in one step")
    last = int(batch.positions.max(initial=0)) + encoder.offset
    if encoder.positions is not None and last >= encoder.position_rows:
        raise RunnerError(f"positions: expected up to {encoder.position_rows - encoder.offset - 1}, found more")
    if batch.types is not None and types and not 0 <= batch.types.min() <= batch.types.max() < encoder.type_rows:
        raise RunnerError(f"types: expected 0 to {encoder.type_rows - 1}, found others")


def check_mutual(batch: StepBatch) -> None:
    """Raise RunnerError where tokens that see each other are not those of their sequence."""
    cu = batch.cu_seqlens
    for first, stop, sequence in batch.mutual.tolist():
        if not (0 <= sequence < len(batch.seq_lens) and cu[sequence] <= first < stop <= cu[sequence + 1]):
            raise RunnerError(f"mutual: tokens {first} to {stop} are none of sequence {sequence}")
