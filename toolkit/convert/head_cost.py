"""What rounding the head and embedding of an artifact costs: the artifact against itself with both unrounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.checkpoint import Checkpoint
from toolkit.artifacts.engine.artifact import EngineArtifact
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.artifacts.weights import iter_canonical
from toolkit.errors import ToolkitError
from toolkit.measure.divergence import Divergence
from toolkit.measure.next_logits import make_ready, next_logits
from toolkit.measure.text import heldout_text
from toolkit.models.spec import DecoderSpec, StoredTensor
from toolkit.runners.base import RunnerOptions
from toolkit.runners.native.packing.artifact import open_packed
from toolkit.runners.native.packing.packed import PackedTensor
from toolkit.runners.native.runner import NativeRunner

MOST_TOKENS, FEWEST_TOKENS = 1024, 64
WORK = 2**38  # products of weights that may be spent on it: a few seconds
ROWS = 64  # positions whose logits are held at once


def head_cost(
    artifact: EngineArtifact, checkpoint: Checkpoint, stored: list[StoredTensor], tokenizer: Callable[[], Tokenizer]
) -> dict[str, Any]:
    """Figures over the first tokens of the held-out text that the package ships, by the native runner.

    bits: of the head. kl: mean over tokens of KL(unrounded ‖ rounded), nats; perplexity_ratio: rounded / unrounded,
    with its standard error; tokens: how many were scored, few for a large model. The layers are the artifact's on both
    sides. Where ``tokenizer`` raises ToolkitError or is none that reads the text: relative_error alone,
    ‖rounded - unrounded‖ / ‖unrounded‖ of the head. Empty where nothing was rounded.
    """
    packed, spec = open_packed(artifact), artifact.spec
    head = spec.embed if spec.tied else spec.head
    rounded = [name for name in {spec.embed, head} if packed[name].meta.bits]
    plain = _unrounded(checkpoint, stored, rounded)
    if head not in plain:
        return {}
    figures: dict[str, Any] = {"bits": packed[head].meta.bits}
    ids = _tokens(tokenizer, spec)
    if len(ids) < FEWEST_TOKENS:
        from toolkit.measure.errors import sampled_error
        from toolkit.runners.native.packing.unpack import unpack

        exact, code = (unpack(weights[head]) for weights in (plain, packed))
        return figures | {"relative_error": sampled_error(exact.dequantize(), code, None)}
    counted = Divergence(np.float32)
    runners = [_runner(spec, weights, len(ids)) for weights in (packed, {**packed, **plain})]
    try:
        for start in range(0, len(ids) - 1, ROWS):
            stop = min(start + ROWS, len(ids) - 1)
            rounded_ones, unrounded = (next_logits(runner, ids[start:stop], start) for runner in runners)
            counted.add(unrounded, rounded_ones, ids[start + 1 : stop + 1])
    finally:
        for runner in runners:
            runner.close()
    return figures | _figures(counted)


def few_seconds(spec: DecoderSpec) -> int:
    """How many tokens go through a model in a few seconds."""
    size = sum(x.in_features * x.out_features for x in spec.linears()) + 2 * spec.vocab_size * spec.hidden_size
    return WORK // size


def _unrounded(checkpoint: Checkpoint, stored: list[StoredTensor], names: list[str]) -> dict[str, PackedTensor]:
    """Dense head and embedding as the checkpoint has them; not what it has quantized itself."""
    from toolkit.artifacts.canonical import Dense
    from toolkit.runners.native.packing.pack import pack_dense

    outer = [item for item in stored if item.kind in ("embed", "head")]
    return {
        name: pack_dense(weight.weight)
        for name, weight in iter_canonical(checkpoint, outer)
        if name in names and isinstance(weight, Dense)
    }


def _tokens(tokenizer: Callable[[], Tokenizer], spec: DecoderSpec) -> NDArray[np.int32]:
    """As many tokens of the text as the model's size allows; none where the tokenizer is missing or another model's."""
    count = min(max(few_seconds(spec), FEWEST_TOKENS), MOST_TOKENS, spec.max_position)
    text = heldout_text(count)
    try:
        ids = np.asarray(tokenizer().encode(text)[:count], np.int32)
    except ToolkitError:
        return np.zeros(0, np.int32)
    return ids if ids.size == 0 or ids.max() < spec.vocab_size else np.zeros(0, np.int32)


def _runner(spec: DecoderSpec, weights: Mapping[str, PackedTensor], tokens: int) -> NativeRunner:
    runner = NativeRunner(spec, lambda: weights, RunnerOptions())
    make_ready(runner, tokens)
    return runner


def _figures(found: Divergence) -> dict[str, Any]:
    kl, lost = np.concatenate(found.kl), np.concatenate(found.lost_b) - np.concatenate(found.lost_a)
    ratio = math.exp(min(float(lost.mean()), 700.0))
    return {
        "kl": float(kl.mean()),
        "perplexity_ratio": ratio,
        "perplexity_ratio_stderr": ratio * float(lost.std()) / math.sqrt(len(lost)),
        "tokens": len(lost),
    }
