"""One vector for a text, or scores: which hidden state a model's embeddings are, and what is made of it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.text_head import Arrays, default_pooling, find_head, head_numbers, pooling_config, reads_alone
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.spec import POOLINGS, HeadLayer, Pooling, TextHead

_erf = np.frompyfunc(math.erf, 1, 1)


class Head:
    """What becomes of hidden states. ``pooling``: of embeddings; ``told``: whether the model's folder says how they are
    made; ``scores``: whether it was trained to score texts, by the state that ``spec.pooling`` takes;
    ``writes``: whether the model writes texts, so that it can be asked for its judgement."""

    def __init__(
        self, spec: TextHead, numbers: Arrays, pooling: Pooling, told: bool, where: str, writes: bool = True
    ) -> None:
        self.spec, self.pooling, self.told, self.writes = spec, pooling, told, writes
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
        found = float(self.through(hidden)[0])
        if not math.isfinite(found):
            raise ToolkitError("the scores are NaN or infinite: check the model's weights and dtype")
        return 1 / (1 + math.exp(-max(found, -700.0))) if self.spec.sigmoid else found

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
    return Head(spec, numbers, named or spec.pooling, told, str(directory), not reads_alone(directory))


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
