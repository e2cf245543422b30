"""EuroBERT: Llama whose tokens see each other both ways. Source: transformers ``EuroBertModel``."""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.classifier import classifier_head
from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.encoder import NO_GGUF
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import EncoderSpec, HeadLayer, TextHead


def build(config: Fields) -> Built:
    return llama_like(
        config,
        replace(read_dims(config, eps=1e-5), tied=True),
        attention_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
        change=lambda i, own: replace(own, mutual=True),
        encoder=EncoderSpec(),
        rename=lambda name: name.removeprefix("model."),
    )


def _classifier(config: Fields) -> TextHead:
    """Its default, "late", scores each token and takes the mean of that: no score of one state."""
    pooling = config.values.get("classifier_pooling") or "late"
    if pooling not in ("bos", "mean"):
        config.fail("classifier_pooling", pooling, "bos or mean, the other ways to score are not built here")
    layers = (HeadLayer("dense", activation="gelu"), HeadLayer("classifier"))
    return classifier_head(config, "mean" if pooling == "mean" else "cls", *layers)


FAMILY = Family(
    "eurobert",
    "EuroBERT 210M, 610M, 2.1B",
    ("EuroBertModel", "EuroBertForMaskedLM", "EuroBertForSequenceClassification"),
    build,
    (Tiny(dict(num_key_value_heads=1)),),
    NO_GGUF,
    spellings=tuple((part, f"model.{part}") for part in ("embed_tokens", "layers.", "norm")),
    encodes=True,
    classifier=_classifier,
)
