"""What the engine asks of a runner. Two exist: ``torch`` (any spec, any device torch has) and ``native``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from toolkit.models.spec import DecoderSpec
from toolkit.runners.step import StepBatch, StepOutput

QUANT_POLICIES = (0, 4, 8, 16, 17)


@dataclass(frozen=True)
class RunnerOptions:
    """How to run. ``dtype``: of activations, "auto" = the checkpoint's; ``quant_policy``: the KV cache, 0 as ``dtype``,
    8 or 4 bits, 16 float8_e4m3fn, 17 float8_e5m2.
    """

    device: str = "auto"  # auto, cpu, cuda, cuda:1 …
    dtype: str = "auto"  # auto, float16, bfloat16, float32
    quant_policy: int = 0
    block_size: int = 64
    threads: int = 0  # 0 = all the machine allows
    adapters: tuple[tuple[str, str], ...] = ()  # (name, directory) of LoRA adapters; StepBatch.adapter counts them


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes, before anything is allocated."""

    weights: int  # resident once loaded (mapped files included)
    activations_per_token: int  # peak, for each token of a step
    block_bytes: tuple[int, ...]  # one KV block of each cache group
    free: int  # what the device or cgroup has free now, weights not yet subtracted unless loaded
    loaded: bool  # whether ``free`` was read after the weights were loaded


class StepHandle(Protocol):
    def result(self) -> StepOutput:
        """Wait for the step and return its output. Raises RunnerError when it failed."""


class RunnerError(Exception):
    """A step failed inside the runner; the requests in it fail, the engine may restart the runner."""


class Runner(Protocol):
    """Executes the steps of one model. Not thread-safe: one engine loop owns it."""

    name: str  # "torch" or "native"
    spec: DecoderSpec
    device: str
    dtype: str
    options: RunnerOptions

    def memory(self) -> MemoryNeed: ...

    def load_weights(self) -> None:
        """Idempotent; ``release_weights`` undoes it (sleep)."""

    def release_weights(self) -> None: ...

    def allocate_cache(self, num_blocks: tuple[int, ...]) -> None:
        """KV blocks for each cache group; replaces an earlier cache. ``release_cache`` undoes it."""

    def release_cache(self) -> None: ...

    def submit(self, batch: StepBatch) -> StepHandle: ...

    def export_block(self, group: int, block: int) -> bytes:
        """The block's content in stored form, all layers of the group."""

    def import_block(self, group: int, block: int, data: bytes) -> None: ...

    def close(self) -> None: ...
