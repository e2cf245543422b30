"""What stands behind the hidden states of models that score texts, by their config.json."""

from __future__ import annotations

from toolkit.models.config.fields import Fields
from toolkit.models.spec import HeadLayer, Pooling, TextHead


def pooled_classifier(config: Fields, *models: str) -> TextHead:
    """BERT's: the first token's state through a linear and tanh, then the labels'. ``models``: how names of the model
    inside may begin."""
    name, *others = (f"{model}pooler.dense" for model in (*models, ""))
    hidden = HeadLayer(name, activation="tanh", others=tuple(others))
    return classifier_head(config, "cls", hidden, HeadLayer("classifier"))


def classifier_head(config: Fields, pooling: Pooling, *layers: HeadLayer) -> TextHead:
    """``layers``, of which the last one has a row for each label that the config names."""
    labels = _labels_of(config)
    apart = config.values.get("problem_type") == "multi_label_classification"
    return TextHead(pooling, layers, labels, _told_sigmoid(config), _names_of(config, labels), apart)


def reward_head(config: Fields, *layers: HeadLayer) -> TextHead:
    """The last token's state through ``layers``, of which the last one has one row: a reward, of any size."""
    end = config.integer("reward_token_id", default=None, low=0)
    return TextHead("last", layers, 1, sigmoid=False, end=end)


def _labels_of(config: Fields) -> int:
    """How many a config of a classifier names; two where it names none."""
    named = config.values.get("id2label")
    count: int = config.integer("num_labels", default=len(named) if isinstance(named, dict) and named else 2)
    return count


def _names_of(config: Fields, labels: int) -> tuple[str, ...]:
    """What a config calls them, () where not each has a name."""
    named = config.values.get("id2label")
    found = [named.get(str(i)) for i in range(labels)] if isinstance(named, dict) and len(named) == labels else []
    return tuple(name for name in found if isinstance(name, str)) if all(isinstance(x, str) for x in found) else ()


def _told_sigmoid(config: Fields) -> bool:
    """Whether scores are sigmoids, as sentence-transformers says it: but for the word Identity in its config they
    are."""
    inner = config.inner("sentence_transformers").values
    told = inner.get("activation_fn") or config.values.get("sbert_ce_default_activation_function")
    return not (isinstance(told, str) and told.endswith("Identity"))
