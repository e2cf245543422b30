"""A small model that drafts for a larger one and reads its keys and values: it keeps none of its own (Gemma 4)."""

from __future__ import annotations

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec.decoder import DecoderSpec
from toolkit.models.spec.parts import LinearSpec, NormSpec


@dataclass(frozen=True)
class AssistantSpec:
    """Of the newest token, which the cache does not hold yet, ``layer`` reads ``join([embedding, state])``, both the
    larger model's: the state is that of the token before, behind ``model_norm``, its final norm. What comes behind the
    own final norm is the next token's likeliest by the head, and through ``back`` the state that its pass reads. All
    tokens of a guess have the position of the first, for the cache ends there.

    ``layer``: the small model, every attention of it ``outside`` (``ReuseSpec``). ``chosen``: where above 0 its head
    has a row for each cluster of the vocabulary, and of so many clusters the tokens' own rows are looked at.
    Source: transformers ``Gemma4AssistantForCausalLM``.
    """

    layer: DecoderSpec
    model_norm: NormSpec
    join: LinearSpec
    back: LinearSpec
    chosen: int = 0
