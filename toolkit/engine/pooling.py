"""One vector for a text, or scores: which hidden state a model's embeddings are, and what is made of it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.text_head import (
    Arrays,
    asks_nobody,
    default_pooling,
    find_head,
    head_numbers,
    pooling_config,
    reads_alone,
)
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.spec import POOLINGS, HeadLayer, Pooling, TextHead

_erf = np.frompyfunc(math.erf, 1, 1)


class Head:
    """What becomes of hidden states. ``pooling``: of embeddings; ``told``: whether the model's folder says how they are
    made; ``scores``: whether it was trained to score texts, by the state that ``spec.pooling`` takes;
    ``writes``: whether it reads texts as those that write do, pairs as a question in a chat; ``asks``: whether the
    model can be asked for its judgement."""

    def __init__(
        self,
        spec: TextHead,
        numbers: Arrays,
        pooling: Pooling,
        told: bool,
        where: str,
        writes: bool = True,
        asks: bool = True,
    ) -> None:
        self.spec, self.pooling, self.told, self.writes, self.asks = spec, pooling, told, writes, asks
        self._numbers = numbers
        self._where = where
        if self.scores and len(numbers[f"{len(spec.layers) - 1}.weight"]) != spec.labels:
            found = len(numbers[f"{len(spec.layers) - 1}.weight"])
            raise ToolkitError(f"{where}: config.json names {spec.labels} labels, the classifier has {found}")

    @property
    def scores(self) -> bool:
        return self.spec.labels > 0

    def embedding(self, hidden: NDArray[np.float32], dimensions: int | None, normalize: bool) -> NDArray[np.float32]:
        """The vector that a pooled hidden state [hidden] becomes, see ``vector``."""
        return vector(hidden if self.scores else self.through(hidden), dimensions, normalize)

    def score(self, hidden: NDArray[np.float32]) -> float:
        """How much a pair of texts have to do with each other. Raises UsageError for a model of several labels."""
        if self.spec.labels != 1:
            raise UsageError(f"{self._where}: expected a model with one label to rank by, found {self.spec.labels}")
        return float(self.probabilities(hidden)[0])

    def check_labels(self, rewards: bool = False) -> None:
        """Raise UsageError for a model that has no classifier, or several labels where a reward is wanted."""
        if not self.scores:
            raise UsageError(f"{self._where}: expected a model with a classifier (…ForSequenceClassification)")
        if rewards and self.spec.labels != 1:
            found = self.spec.labels
            raise UsageError(f"{self._where}: expected a reward model, which has one label, found {found}; classify")

    def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float64]:
        """A number for each label of a classifier."""
        found = self.through(hidden).astype(np.float64)
        if not np.isfinite(found).all():
            raise ToolkitError("the scores are NaN or infinite: check the model's weights and dtype")
        return found

    def probabilities(self, hidden: NDArray[np.float32]) -> NDArray[np.float64]:
        """How likely each label is: of several one is true, unless the model says that each is so by itself. Of one
        label the score."""
        found = self.logits(hidden)
        if self.spec.labels > 1 and not self.spec.apart:
            shares = np.exp(found - found.max())
            return np.asarray(shares / shares.sum())
        each = self.spec.labels > 1 or self.spec.sigmoid
        return 1 / (1 + np.exp(-found.clip(min=-700.0))) if each else found

    @property
    def labels(self) -> tuple[str, ...]:
        """What the labels are called: as transformers does where the model does not say."""
        return self.spec.names or tuple(f"LABEL_{i}" for i in range(self.spec.labels))

    def ended(self, token_ids: list[int], most: int | None = None) -> list[int]:
        """``token_ids`` with the token behind them by which the model scores, if it has one and they have not; of a
        text that is cut to ``most`` tokens the last one gives way to it."""
        end = self.spec.end
        if end is None or token_ids[-1:] == [end]:
            return token_ids
        return [*(token_ids if most is None else token_ids[: most - 1]), end]

    def through(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """A pooled hidden state [hidden] behind all layers."""
        for i, layer in enumerate(self.spec.layers):
            weight, bias = self._numbers[f"{i}.weight"], self._numbers.get(f"{i}.bias")
            if len(x) != weight.shape[-1]:
                raise ToolkitError(f"{self._where}: {layer.name}: expected {len(x)} inputs, found {weight.shape[-1]}")
            x = _layer(layer, x, weight, bias)
        return x


def _layer(
    layer: HeadLayer, x: NDArray[np.float32], weight: NDArray[np.float32], bias: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    if layer.kind == "norm":
        wide = x.astype(np.float64)
        y = ((wide - wide.mean()) / np.sqrt(wide.var() + layer.eps)).astype(np.float32) * weight
    else:
        y = weight @ x
    y = y if bias is None else y + bias
    match layer.activation:
        case "tanh":
            y = np.tanh(y)
        case "relu":
            y = np.maximum(y, 0)
        case "gelu":
            y = y * (0.5 * (1 + _erf(y / math.sqrt(2)).astype(np.float64)))
        case "silu":
            y = y / (1 + np.exp(-y))
        case "sigmoid":
            y = 1 / (1 + np.exp(-y))
    return y.astype(np.float32)


def check_pooling(wanted: str, option: str = "pooling") -> None:
    """Raise UsageError for a name that is none. ``option``: where it was given."""
    if wanted not in ("auto", *POOLINGS):
        raise UsageError(f"{option}: expected auto, {', '.join(POOLINGS)}, found {wanted!r}")


def open_head(directory: Path, wanted: str = "auto") -> Head:
    """What a model's folder says; ``wanted``: the pooling instead of its own. Raises UsageError for a name that is
    none, ToolkitError for a model that pools in a way not built here."""
    check_pooling(wanted)
    named = next((pooling for pooling in POOLINGS if pooling == wanted), None)
    found = find_head(directory, named)
    told = found is not None and not found.labels and pooling_config(directory) is not None
    spec = found or TextHead(named or default_pooling(directory))
    numbers = head_numbers(directory, spec) if spec.layers else {}
    return Head(
        spec,
        numbers,
        named or spec.pooling,
        told,
        str(directory),
        not reads_alone(directory),
        not asks_nobody(directory),
    )


def vector(hidden: NDArray[np.float32], dimensions: int | None, normalize: bool) -> NDArray[np.float32]:
    """The first ``dimensions`` (None: all) of a pooled hidden state [hidden], of length 1 if ``normalize``.

    Raises UsageError for more dimensions than there are, ToolkitError for values that are no numbers.
    """
    if dimensions is not None and dimensions > len(hidden):
        raise UsageError(f"dimensions: expected at most {len(hidden)}, found {dimensions}")
    found = hidden[:dimensions].astype(np.float64)
    if not np.isfinite(found).all():
        raise ToolkitError("the hidden states are NaN or infinite: check the model's weights and dtype")
    length = float(np.sqrt(found @ found)) if normalize else 1.0
    return (found / (length or 1.0)).astype(np.float32)
