"""What drafts of all kinds have of the model that they draft for."""

from __future__ import annotations

from dataclasses import replace

from toolkit.errors import UsageError
from toolkit.models.spec import DecoderSpec


def check_size(width: int, tokens: int, model: DecoderSpec) -> None:
    """Raise UsageError where what was read is a draft for a model of another width or vocabulary."""
    if (width, tokens) != (model.hidden_size, model.vocab_size):
        found = f"width {width} and {tokens} tokens"
        raise UsageError(f"is of a model of {found}, the model has {model.hidden_size} and {model.vocab_size}")


def with_head(layers: DecoderSpec, model: DecoderSpec) -> DecoderSpec:
    """``layers`` between the embedding and the head of ``model``."""
    return replace(
        layers,
        embed=model.embed,
        head=model.head,
        tied=model.tied,
        embed_scale=model.embed_scale,
        head_scale=model.head_scale,
        logit_softcap=model.logit_softcap,
        head_rows=model.head_rows,
    )
