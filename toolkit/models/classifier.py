"""What stands behind the hidden states of models that score texts, by their config.json."""

from __future__ import annotations

from toolkit.models.config.fields import Fields
from toolkit.models.spec import HeadLayer, TextHead


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
