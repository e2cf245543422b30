"""What a file of ``families/`` says of its family: everything that the rest of the house has to know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built
from toolkit.models.eyes.mmproj import Mmproj
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.videos import Video
from toolkit.models.gguf import Gguf
from toolkit.models.spec import HeadLayer, TextHead

# ``Family.spellings`` of a language model that also comes as a part of one that sees.
WITHIN = (("model.", "model.language_model.", "language_model.model."), ("lm_head", "language_model.lm_head"))


@dataclass(frozen=True)
class Tiny:
    """The config of a tiny random model that tests make and run through everything.

    ``fields``: what it has beside the sizes that all have (``tiny.py``), chosen so that the family's
    peculiarities matter within a few dozen tokens. ``twin``: the same for ``Family.twin``, sizes too. Of a family that
    sees: ``preprocessor``, its preprocessor_config.json, and ``tokens``, the special tokens that its prompts have for
    pictures; their ids are 5, 6, …
    """

    fields: Mapping[str, Any]
    twin: Mapping[str, Any] | None = None
    preprocessor: Mapping[str, Any] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """``name``: the ``model_type`` of its ``config.json``, and the file's name.

    ``architectures``: class names in ``config.json``, today's first. ``known_as``: what people call its models.
    ``build``: the spec and the tensors of a checkpoint. ``tiny``: one model or two. ``gguf``: its spelling there, of
    one that sees that of its tower too or of its language model alone, or why there is none. ``twin``: for a family
    that transformers has no class for, the model_type of one that computes the same from the same weights under
    canonical names. ``recipe``: how pictures are prepared, from config.json and preprocessor_config.json; None: the
    family does not see. ``video``: how videos are shown, by config.json, video_preprocessor_config.json and that
    recipe; None: not at all. ``spellings``: how names of tensors begin, first as ``build`` has it, then as other files
    have it. ``token_fields``: fields that config.json may lack, and the special token whose id each is. ``others``:
    fields of a config of these architectures that tell of another family, and which. ``blind``: the family of its
    language model, which a config without ``vision_config`` is read as. ``encodes``: it reads texts for embeddings and
    scores, and writes none. ``classifier``: what stands behind its hidden states in a model whose class ends in
    ``ForSequenceClassification``; None: the last token's through the linear ``score``. ``reward``: what the last
    token's goes through in a model whose class ends in ``ForRewardModel``; None: there is none.
    """

    name: str
    known_as: str
    architectures: tuple[str, ...]
    build: Callable[[Fields], Built]
    tiny: tuple[Tiny, ...]
    gguf: Gguf | Mmproj | str
    twin: str | None = None
    recipe: Callable[[Fields, Fields], Recipe] | None = None
    video: Callable[[Fields, Fields, Recipe], Video] | None = None
    spellings: tuple[tuple[str, ...], ...] = ()
    token_fields: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    blind: str | None = None
    encodes: bool = False
    classifier: Callable[[Fields], TextHead] | None = None
    reward: tuple[HeadLayer, ...] | None = None
