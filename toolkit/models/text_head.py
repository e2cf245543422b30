"""What is made of a text's hidden states: one vector, or scores."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from toolkit.models.config.fields import Fields

Pooling = Literal["cls", "mean", "last"]
POOLINGS: tuple[Pooling, ...] = ("cls", "mean", "last")
HeadActivation = Literal["none", "tanh", "gelu", "relu", "silu", "sigmoid"]


@dataclass(frozen=True)
class HeadLayer:
    """A linear with its activation, or a layer norm, of one vector.

    ``name``: of its tensors in the folder, without ``.weight`` and ``.bias``; ``others``: further spellings. ``file``:
    the only one in which they are, "" = among the model's.
    """

    name: str
    kind: Literal["linear", "norm"] = "linear"
    activation: HeadActivation = "none"
    eps: float = 1e-5
    file: str = ""
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class TextHead:
    """``pooling``: which hidden state is taken, the first token's, the last one's or the mean of all. ``layers``: what
    it goes through. ``labels``: what it then has a number for each of, 0 = it is an embedding; ``sigmoid``: whether
    a score is the sigmoid of that number."""

    pooling: Pooling
    layers: tuple[HeadLayer, ...] = field(default=())
    labels: int = 0
    sigmoid: bool = True


def pooled_classifier(config: Fields, *models: str) -> TextHead:
    """BERT's: the first token's state through a linear and tanh, then the labels'. ``models``: how names of the model
    inside may begin."""
    name, *others = (f"{model}pooler.dense" for model in (*models, ""))
    hidden = HeadLayer(name, activation="tanh", others=tuple(others))
    return TextHead("cls", (hidden, HeadLayer("classifier")), labels_of(config), told_sigmoid(config))


def labels_of(config: Fields) -> int:
    """How many a config of a classifier names; two where it names none."""
    named = config.values.get("id2label")
    count: int = config.integer("num_labels", default=len(named) if isinstance(named, dict) and named else 2)
    return count


def told_sigmoid(config: Fields) -> bool:
    """Whether scores are sigmoids, as sentence-transformers says it: but for the word Identity in its config they
    are."""
    inner = config.inner("sentence_transformers").values
    told = inner.get("activation_fn") or config.values.get("sbert_ce_default_activation_function")
    return not (isinstance(told, str) and told.endswith("Identity"))
