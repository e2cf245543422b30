"""Pictures among calibration messages: in the place of their tokens' embeddings stand rows of the model's tower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.base.user_path import user_path
from toolkit.errors import UsageError
from toolkit.models.eyes.vision import PREFIX, VisionSpec
from toolkit.quant.layers.source import LayerSource
from toolkit.runners.tensor.towers.encoders import encoder_of
from toolkit.vision.eyes import Eyes
from toolkit.vision.parts import is_picture, is_video, naming, parts_of, source_of

if TYPE_CHECKING:
    from toolkit.chat.template import ChatTemplate

FIRST = 1 << 40  # from here on ids are rows of pictures, counted through


class Pictures:
    """Those that the messages of a calibration text show the model of ``source``."""

    def __init__(self, source: LayerSource) -> None:
        self._source = source
        self._count = 0
        self._shown: list[tuple[int, int, list[Any]]] = []  # (first row, stop, pictures of a talk)

    @cached_property
    def _eyes(self) -> Eyes | None:
        return Eyes.open(self._source.checkpoint.tokenizer_dir)  # a text needs none, whatever is wrong with them

    @property
    def written(self) -> str | None:
        """What a chat template writes for one; None where the model reads text alone."""
        return None if self._eyes is None else self._eyes.recipe.written

    def encode(self, template: ChatTemplate, tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of messages; those of their pictures are rows from ``FIRST`` on. Raises ToolkitError."""
        text = template.render(messages, add_generation_prompt=False)
        parts = [part for message in messages for part in parts_of(message) if is_picture(part)]
        if self._eyes is None or not parts:
            return tokenizer.encode(text, add_special_tokens=False)
        vision = self._source.spec.vision
        assert vision is not None
        if any(map(is_video, parts)) or (why := _unsupported(vision)):
            raise UsageError(
                f"calibration data: expected texts, found {'a video' if any(map(is_video, parts)) else why}"
            )
        pictures = self._eyes.look(messages)
        ids = tokenizer.encode(self._eyes.spell(text, pictures), add_special_tokens=False)
        places = [i for i, token in enumerate(ids) if token == vision.image_token]
        if len(places) != sum(picture.tokens for picture in pictures):
            raise UsageError(f"expected {sum(p.tokens for p in pictures)} tokens of pictures, found {len(places)}")
        for i, place in enumerate(places):
            ids[place] = FIRST + self._count + i
        self._shown.append((self._count, self._count + len(places), parts))
        self._count += len(places)
        return ids

    def rows(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(``ids`` whose rows of pictures are counted from the vocabulary's size on, those rows [count, hidden] as if
        embedded, in float32). Only pictures that ``ids`` still have are encoded."""
        wanted, places = torch.unique(ids[ids >= FIRST] - FIRST, return_inverse=True)
        spec, found = self._source.spec, [torch.zeros(0, self._source.spec.hidden_size)]
        vision, eyes = spec.vision, self._eyes
        if len(wanted) and vision is not None and eyes is not None:
            device = torch.device("cpu")
            weights = {k: v for k, v in self._source.outer_weights(device).items() if k.startswith(PREFIX)}
            tower = encoder_of(vision)(vision, weights, device, torch.float32)
            for first, stop, parts in self._shown:
                if not bool(((wanted >= first) & (wanted < stop)).any()):
                    continue
                for picture in eyes.look([{"role": "user", "content": parts}]):
                    here = wanted[(wanted >= first) & (wanted < first + picture.tokens)] - first
                    if len(here):
                        found.append(tower.encode([picture])[0].float()[here] / spec.embed_scale)
                    first += picture.tokens
        ids = ids.clone()
        ids[ids >= FIRST] = spec.vocab_size + places
        return ids, torch.cat(found)


def placed(messages: Sequence[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """``messages`` whose pictures' names are relative to ``folder``."""
    return [
        {**message, "content": [_placed(part, folder) for part in parts]} if (parts := parts_of(message)) else message
        for message in messages
    ]


def _placed(part: Any, folder: Path) -> Any:
    file = _file(part)
    return part if file is None else naming(part, str(folder / file))


def files_of(messages: Sequence[dict[str, Any]]) -> Iterator[Path]:
    """Those that hold the pictures of ``messages``."""
    return (file for message in messages for part in parts_of(message) if (file := _file(part)) is not None)


def _file(part: Any) -> Path | None:
    """Where a part has its picture; None for no picture, and for one at a URL or in the part itself."""
    name = source_of(part)[0] if is_picture(part) else None
    return user_path(name) if isinstance(name, str) and ":" not in name[:8] else None


def _unsupported(vision: VisionSpec) -> str | None:
    """What tokens of pictures have besides their rows, without which they would not be what the model meets."""
    found = {
        "weights": vision.routed, "positions": vision.axes or vision.shared, "rows in later layers": vision.deep,
        "sight of each other": vision.mutual, "layers": vision.crossed,
    }  # fmt: skip
    named = " and ".join(name for name, there in found.items() if there)
    return f"images, whose tokens have {named} of their own in this model" if named else None
