"""What rounding the KV cache costs: a packed model against itself with keys and values unrounded, on text of its own.

Whole models are measured first (8 bits to 4). By layer, each policy is then tried in one
layer alone: what that moves the predictions says where bits are spent best. Layers give bits up in the order of bytes
saved for KL added, and some points of that way are measured as they are, for what layers cost together is not the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.cache_cost import FORM, CacheCost, Choice
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.convert.head_cost import few_seconds
from toolkit.convert.own_text import write_on
from toolkit.errors import ToolkitError
from toolkit.measure.divergence import bounded, log_softmax, perplexity_of
from toolkit.measure.next_logits import make_ready, next_logits
from toolkit.measure.text import heldout_text
from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import RunnerError, RunnerOptions
from toolkit.runners.native.key_means import key_sums, slow_parts, write_means
from toolkit.runners.native.need import KV_BITS, kept_bytes
from toolkit.runners.native.packing.packed import PackedTensor
from toolkit.runners.native.runner import NativeRunner

PIECE, OPENING = 128, 16  # tokens of a text, and how many of them the model is given
MOST_PIECES, LAYER_PIECES = 8, 2  # texts for whole models, and for each layer
HELD = 2**26  # log-probabilities that may be held: a quarter of a GiB
LADDER = {"paged": (0, 8, 65, 4, 55, 54, 44), "latent": (0, 8)}
WHOLE = (8, 65, 55, 4, 44)
POINTS = (12, 10, 8, 7, 6.5, 6, 5.5, 5.25, 5, 4.75, 4.5)  # bits, on average, at which mixes are measured

Progress = Callable[[int, int], None]
F32 = NDArray[np.float32]


def cache_cost(
    spec: DecoderSpec,
    weights: Mapping[str, PackedTensor],
    tokenizer: Tokenizer,
    *,
    by_layer: bool,
    progress: Progress = lambda done, total: None,
) -> CacheCost:
    """``weights``: packed for the native runner. ``progress`` is called with (runs done, runs in all, about). Raises
    ToolkitError for a model that has no cache of tokens, draws blocks at once, or cannot run."""
    try:
        return _Bench(spec, weights, tokenizer, progress).measure(by_layer)
    except RunnerError as error:
        raise ToolkitError(f"the precision of the KV cache cannot be measured: {error}") from error


class _Bench:
    def __init__(
        self, spec: DecoderSpec, weights: Mapping[str, PackedTensor], tokenizer: Tokenizer, progress: Progress
    ) -> None:
        self.spec, self.weights, self.progress = spec, weights, progress
        self.kept = [kept for _, _, kept in spec.paged()]
        if not self.kept or spec.mask_token is not None:
            raise ToolkitError("quant_policy auto: the model keeps no keys of single tokens; give 0 or 8")
        self.done = self.total = 0
        length = min(PIECE, spec.max_position)
        room = min(few_seconds(spec), HELD // spec.vocab_size) // length
        starts = _openings(tokenizer, min(max(room, 1), MOST_PIECES), min(OPENING, length - 1), spec.vocab_size)
        with closing(NativeRunner(spec, lambda: weights, RunnerOptions())) as runner:
            runner.load_weights()
            self.dtype = runner.dtype
            self.texts = write_on(runner, starts, length)
            make_ready(runner, length)
            self.exact: list[F32] = []
            sums: list[list[F32]] = []
            for ids in self.texts:
                self.exact.append(log_softmax(next_logits(runner, ids, rows=length - 1), np.float32))
                sums.append(key_sums(runner, length))
            means = [np.sum(x, 0) / self.texts.size for x in zip(*sums, strict=True)]
            self.means = write_means(slow_parts(spec, means))

    def measure(self, by_layer: bool) -> CacheCost:
        ladders = [LADDER[kept.kind] for kept in self.kept]
        wholes = [tuple(policy if policy in ladder else 8 for ladder in ladders) for policy in WHOLE]
        wholes = list(dict.fromkeys(wholes))
        self.total = len(wholes) + (sum(len(ladder) - 1 for ladder in ladders) + len(POINTS) if by_layer else 0)
        choices = [self.choice(policies) for policies in wholes]
        layers: list[dict[str, float]] = []
        if by_layer:
            for i, ladder in enumerate(ladders):
                alone = lambda policy, i=i: tuple(policy if i == j else 0 for j in range(len(ladders)))  # noqa: E731
                layers.append({str(policy): self.run(alone(policy), LAYER_PIECES)[1] for policy in ladder[1:]})
            choices += [self.choice(mix) for mix in dict.fromkeys(self.mixes(layers)) if mix not in wholes]
        return CacheCost(self.texts.size - len(self.texts), tuple(choices), tuple(layers), self.means, FORM)

    def mixes(self, layers: list[dict[str, float]]) -> Iterator[tuple[int, ...]]:
        """The first of at most so many bits as each of POINTS says."""
        sizes = [{p: kept_bytes(kept, p, self.dtype) for p in LADDER[kept.kind]} for kept in self.kept]
        now = [0] * len(layers)
        points = list(POINTS)

        def cost(i: int, policy: int) -> float:
            return max(layers[i][str(policy)], 0.0) if policy else 0.0

        while True:
            moves = [
                ((sizes[i][now[i]] - size) / max(cost(i, policy) - cost(i, now[i]), 1e-9), i, policy)
                for i in range(len(layers))
                for policy, size in sizes[i].items()
                if size < sizes[i][now[i]]
            ]
            if not moves:
                break
            _, i, policy = max(moves)
            now[i] = policy
            if points and (bits := self.bits(tuple(now))) <= points[0]:
                points = [point for point in points if point < bits]
                yield tuple(now)

    def choice(self, policies: tuple[int, ...]) -> Choice:
        ratio, kl = self.run(policies, len(self.texts))
        return Choice(
            policies,
            self.bits(policies),
            sum(kept_bytes(kept, policy, self.dtype) for kept, policy in zip(self.kept, policies, strict=True)),
            ratio,
            kl,
        )

    def bits(self, policies: tuple[int, ...]) -> float:
        """Of a number, on average."""
        plain = 32 if self.dtype == "float32" else 16
        numbers = [kept.heads * kept.head_dim for kept in self.kept]
        bits = [sum(KV_BITS.get(policy, (plain, plain))) / 2 for policy in policies]
        return float(np.average(bits, weights=numbers))

    def run(self, policies: tuple[int, ...], pieces: int) -> tuple[float, float]:
        """Perplexity with these policies over that without, and KL, on the first ``pieces`` texts."""
        lost, kl = 0.0, 0.0
        texts = self.texts[:pieces]
        options = RunnerOptions(kv_layers=policies, key_means=self.means)
        with closing(NativeRunner(self.spec, lambda: self.weights, options)) as runner:
            make_ready(runner, texts.shape[1])
            for ids, exact in zip(texts, self.exact, strict=False):
                rounded = log_softmax(next_logits(runner, ids, rows=len(ids) - 1), np.float32)
                row = np.arange(len(ids) - 1)
                lost += float((exact[row, ids[1:]] - rounded[row, ids[1:]]).sum(dtype=np.float64))
                kl += float(np.einsum("tv,tv->", np.exp(exact), exact - rounded, dtype=np.float64))
        count = texts.size - len(texts)
        if not math.isfinite(lost) or not math.isfinite(kl):
            lost = kl = math.inf
        self.done += 1
        self.progress(self.done, self.total)
        return perplexity_of(lost / count), bounded(kl / count)


def _openings(tokenizer: Tokenizer, count: int, length: int, vocabulary: int) -> NDArray[np.int32]:
    """Beginnings of texts [count, length], from all over the held-out text that the package ships."""
    text = heldout_text()
    found = []
    for i in range(count):
        at = text.find("\n\n", len(text) * i // count) + 2
        ids = tokenizer.encode(text[at : at + 32 * length])[:length]
        if len(ids) < length or max(ids) >= vocabulary:
            raise ToolkitError("quant_policy auto: the model's tokenizer does not read the text it is measured on")
        found.append(ids)
    return np.asarray(found, np.int32)
