"""What rounding the head and embedding of an artifact costs: the artifact against itself with both unrounded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.checkpoint import Checkpoint
from toolkit.artifacts.engine import EngineArtifact
from toolkit.artifacts.tokenizer import Tokenizer
from toolkit.artifacts.weights import iter_canonical
from toolkit.errors import ToolkitError
from toolkit.models.spec import DecoderSpec, StoredTensor
from toolkit.runners.base import RunnerOptions
from toolkit.runners.native.artifact import open_packed
from toolkit.runners.native.packed import PackedTensor
from toolkit.runners.native.runner import NativeRunner
from toolkit.runners.step import SamplingBatch, StepBatch

MOST_TOKENS, FEWEST_TOKENS = 1024, 64
WORK = 2**38  # products of weights that may be spent on it: a few seconds
ROWS = 64  # positions whose logits are held at once

F32 = NDArray[np.float32]


def head_cost(artifact: EngineArtifact, checkpoint: Checkpoint, stored: list[StoredTensor]) -> dict[str, Any]:
    """Figures over the first tokens of the held-out text that the package ships, by the native runner.

    bits: of the head. kl: mean over tokens of KL(unrounded ‖ rounded), nats; perplexity_ratio: rounded / unrounded,
    with its standard error; tokens: how many were scored, few for a large model. The layers are the artifact's on both
    sides. Where the checkpoint has no tokenizer that reads the text: relative_error alone,
    ‖rounded - unrounded‖ / ‖unrounded‖ of the head. Empty where nothing was rounded.
    """
    packed, spec = open_packed(artifact), artifact.spec
    head = spec.embed if spec.tied else spec.head
    rounded = [name for name in {spec.embed, head} if packed[name].meta.bits]
    plain = _unrounded(checkpoint, stored, rounded)
    if head not in plain:
        return {}
    figures: dict[str, Any] = {"bits": packed[head].meta.bits}
    ids = _tokens(checkpoint, spec)
    if len(ids) < FEWEST_TOKENS:
        return figures | {"relative_error": _relative_error(packed[head], plain[head])}
    tally = _Tally()
    runners = [_runner(spec, weights, len(ids)) for weights in (packed, {**packed, **plain})]
    try:
        for start in range(0, len(ids) - 1, ROWS):
            stop = min(start + ROWS, len(ids) - 1)
            found, wanted = (_logits(runner, ids, start, stop) for runner in runners)
            tally.add(wanted, found, ids[start + 1 : stop + 1])
    finally:
        for runner in runners:
            runner.close()
    return figures | tally.figures()


def _unrounded(checkpoint: Checkpoint, stored: list[StoredTensor], names: list[str]) -> dict[str, PackedTensor]:
    """Dense head and embedding as the checkpoint has them; not what it has quantized itself."""
    from toolkit.artifacts.canonical import Dense
    from toolkit.runners.native.pack import pack_dense

    outer = [item for item in stored if item.kind in ("embed", "head")]
    return {
        name: pack_dense(weight.weight)
        for name, weight in iter_canonical(checkpoint, outer)
        if name in names and isinstance(weight, Dense)
    }


def _relative_error(rounded: PackedTensor, plain: PackedTensor) -> float:
    from toolkit.runners.native.pack import unpack

    a, b = (unpack(p).dequantize() for p in (rounded, plain))
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def _tokens(checkpoint: Checkpoint, spec: DecoderSpec) -> NDArray[np.int32]:
    """As many tokens of the text as the model's size allows; none where the tokenizer is missing or another model's."""
    size = sum(x.in_features * x.out_features for x in spec.linears()) + 2 * spec.vocab_size * spec.hidden_size
    count = min(max(WORK // size, FEWEST_TOKENS), MOST_TOKENS, spec.max_position)
    text = resources.files("toolkit.eval").joinpath("heldout.txt").read_text(encoding="utf-8")
    try:
        ids = np.asarray(Tokenizer.open(checkpoint.tokenizer_dir).encode(text[: 16 * count])[:count], np.int32)
    except ToolkitError:
        return np.zeros(0, np.int32)
    return ids if ids.size == 0 or ids.max() < spec.vocab_size else np.zeros(0, np.int32)


def _runner(spec: DecoderSpec, weights: Mapping[str, PackedTensor], tokens: int) -> NativeRunner:
    runner = NativeRunner(spec, lambda: weights, RunnerOptions())
    runner.load_weights()
    runner.allocate_cache((-(-tokens // runner.options.block_size),) * len(spec.cache_groups))
    return runner


def _logits(runner: NativeRunner, ids: NDArray[np.int32], start: int, stop: int) -> F32:
    """Logits [stop - start, vocabulary] of tokens that follow those already in the cache."""
    groups, count = len(runner.spec.cache_groups), stop - start
    blocks = np.arange(-(-stop // runner.options.block_size), dtype=np.int32)[None]
    ints, floats, zero = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(1, np.int32)
    batch = StepBatch(
        token_ids=np.ascontiguousarray(ids[start:stop]),
        from_previous=np.full(count, -1, np.int32),
        positions=np.arange(start, stop, dtype=np.int32)[None],
        cu_seqlens=np.array([0, count], np.int32),
        seq_lens=np.array([stop], np.int32),
        block_tables=(blocks,) * groups,
        slot_mapping=(np.arange(start, stop, dtype=np.int64),) * groups,
        rope_set=np.zeros(1, np.int8),
        adapter=np.full(1, -1, np.int32),
        sample_index=ints,
        sampling=SamplingBatch(
            floats, ints, floats, floats, floats, floats, floats, np.zeros(0, np.uint64), np.zeros(0, np.int64),
            zero, ints, ints, zero, ints, floats, ints,
        ),
        logits_index=np.arange(count, dtype=np.int32),
        hidden_index=ints,
        target_index=ints,
        target_ids=ints,
    )  # fmt: skip
    return runner.submit(batch).result().logits


class _Tally:
    """Of every token: KL divergence, and how much less likely the one that followed became."""

    def __init__(self) -> None:
        self._kl: list[NDArray[np.float64]] = []
        self._lost: list[NDArray[np.float64]] = []

    def add(self, wanted: F32, found: F32, targets: NDArray[np.int32]) -> None:
        p, q = _log_softmax(wanted), _log_softmax(found)
        row = np.arange(len(targets))
        self._lost.append(p[row, targets].astype(np.float64) - q[row, targets])
        self._kl.append(np.einsum("tv,tv->t", np.exp(p), p - q, dtype=np.float64))

    def figures(self) -> dict[str, Any]:
        kl, lost = np.concatenate(self._kl), np.concatenate(self._lost)
        ratio = math.exp(min(float(lost.mean()), 700.0))
        error = ratio * float(lost.std()) / math.sqrt(len(lost))
        return {
            "kl": float(kl.mean()),
            "perplexity_ratio": ratio,
            "perplexity_ratio_stderr": error,
            "tokens": len(lost),
        }


def _log_softmax(x: F32) -> F32:
    wide = x - x.max(-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(-1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return wide
