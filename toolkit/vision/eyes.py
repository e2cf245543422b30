"""What a front end needs for a model that sees: the pictures of a conversation, and their places in its prompt."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolkit import extras
from toolkit.artifacts.recipe import open_recipe
from toolkit.errors import UsageError
from toolkit.models.pictures import MOST_TILES, Picture, Recipe
from toolkit.vision.images import Rules, is_url, open_image
from toolkit.vision.parts import is_picture, parts_of
from toolkit.vision.recipes import prepare

DETAIL = {"low": 6, "medium": 12, "high": MOST_TILES}  # tiles, as LMDeploy has them
# Options of a single picture → kind of recipe that knows them, its field.
OPTIONS = {
    "max_dynamic_patch": ("tiles", "most"),
    "min_pixels": ("area", "least"),
    "max_pixels": ("area", "most"),
    "max_slice_nums": ("slices", "most"),
}


@dataclass(frozen=True)
class Eyes:
    """``recipe``: how the model has its pictures prepared; ``rules``: what may be read; ``max_tokens``: of the pictures
    of a conversation, None: any."""

    recipe: Recipe
    rules: Rules = field(default_factory=Rules)
    max_tokens: int | None = None

    @classmethod
    def open(cls, directory: Path, rules: Rules | None = None, max_tokens: int | None = None) -> Eyes | None:
        """Those of the model in a directory; None where it reads text alone. Raises ToolkitError for a config that
        cannot be."""
        recipe = open_recipe(directory)
        return None if recipe is None else cls(recipe, rules or Rules(), max_tokens)

    def fetches(self, messages: Any) -> bool:
        """Whether ``look`` asks other hosts for pictures of these messages."""
        return self.rules.fetching is not None and any(is_url(_source(part)[0]) for _, part in _pictures(messages))

    def look(self, messages: Any, seconds: float = math.inf) -> list[Picture]:
        """The pictures of OpenAI messages, in order. Raises UsageError that names the part at fault; also where not all
        are there in so many ``seconds``."""
        until, found = time.monotonic() + seconds, _pictures(messages)
        if len(found) > self.rules.max_images:
            raise UsageError(f"messages: expected at most {self.rules.max_images} images, found {len(found)}")
        if found:
            extras.require("torch", "messages: images")  # towers run in it, whatever runs the language model
        pictures: list[Picture] = []
        tokens, few = 0, len(found) <= self.recipe.few
        for where, part in found:
            try:
                source, options = _source(part)
                image = open_image(source, self.rules.within(until - time.monotonic()))
                pictures.append(prepare(_adjusted(self.recipe, self.rules, options), image, alone=few))
            except UsageError as e:
                raise UsageError(f"{where}: {e}") from e
            tokens += pictures[-1].tokens
            if self.max_tokens is not None and tokens > self.max_tokens:
                limit = f"a conversation may have {self.max_tokens} tokens in all; send fewer or smaller images"
                raise UsageError(f"{where}: the images up to this one take {tokens} tokens, {limit}")
        return pictures

    def spell(self, text: str, pictures: Sequence[Picture]) -> str:
        """A prompt whose marks are spelled as the tokens of the pictures they stand for. Raises UsageError where there
        are more or fewer of them."""
        between = text.split(self.recipe.mark)
        if len(between) != len(pictures) + 1:
            raise UsageError(
                f"messages: expected as many images as places for them, found {len(pictures)} images and "
                f"{len(between) - 1} places ({self.recipe.mark} in the prompt)"
            )
        if self.recipe.leads:
            whole = "".join(between)
            lead = next((lead for lead in self.recipe.leads if whole.startswith(lead)), "")
            between = [lead, *[""] * (len(pictures) - 1), whole.removeprefix(lead)] if pictures else between
        spelled = [_tokens(self.recipe, picture, number) for number, picture in enumerate(pictures)]
        return between[0] + "".join(a + b for a, b in zip(spelled, between[1:], strict=True))


def _pictures(messages: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """(where it stands, the part) of each."""
    return [
        (f"messages[{i}].content[{j}]", part)
        for i, message in enumerate(messages if isinstance(messages, list) else ())
        for j, part in enumerate(parts_of(message))
        if is_picture(part)
    ]


def _source(part: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """(what names the picture, its options): OpenAI's ``image_url``, transformers' ``image``, LMDeploy's
    ``image_data``."""
    kind = part["type"]
    given = part.get(kind, part.get("url"))
    if not isinstance(given, Mapping):
        return given, {}
    options = {name: value for name, value in given.items() if name not in ("url", "data")}
    return given.get("url", given.get("data")), options


def _adjusted(recipe: Recipe, rules: Rules, options: Mapping[str, Any]) -> Recipe:
    """With the options of one picture. One that this model does not know is stepped over, as LMDeploy does; a
    ``detail`` of "auto" too."""
    changes: dict[str, Any] = {}
    if (detail := options.get("detail")) is not None and recipe.kind == "tiles":
        if detail not in (*DETAIL, "auto"):
            raise UsageError(f"detail: expected auto, {', '.join(DETAIL)}, found {detail!r:.40}")
        changes |= {} if detail == "auto" else {"most": DETAIL[detail]}
    most = {"tiles": MOST_TILES, "slices": recipe.most}.get(recipe.kind, min(recipe.most, rules.max_pixels))
    if isinstance(named := options.get("use_image_id"), bool) and recipe.kind == "slices" and not recipe.around:
        changes["numbered"] = named
    for name, (kind, changed) in OPTIONS.items():
        value = options.get(name)
        if value is None or recipe.kind != kind:
            continue
        if type(value) is not int or not 1 <= value <= most:
            raise UsageError(f"{name}: expected a whole number from 1 to {most}, found {value!r:.40}")
        changes[changed] = value
    made = replace(recipe, **changes)
    if made.kind == "area" and not max(made.unit**2, made.least) <= made.most:
        raise UsageError(f"max_pixels: expected at least {max(made.unit**2, made.least)}, found {made.most}")
    return made


def _tokens(recipe: Recipe, picture: Picture, number: int) -> str:
    if recipe.spelled == "plain":
        return recipe.before.replace("{}", str(number + 1)) + recipe.token * picture.tokens + recipe.after
    if recipe.spelled == "scan":
        one = recipe.before + recipe.token * recipe.per_tile + recipe.after
        parts = [one] * (len(picture.pixels) - 1)
        said = f"Here is the original image {one} and here are some crops to help you see better "
        return said + " ".join(parts) if parts else one
    if recipe.spelled == "named":
        tile = recipe.token * recipe.per_tile
        names = [f"TILE_{i}" for i in range(1, len(picture.pixels))]
        return recipe.before + "".join(name + tile for name in (*names, "TILE_GLOBAL")) + recipe.after
    rows, columns = picture.grid
    if recipe.spelled == "slices":
        return _sliced(recipe, rows, columns, f"<image_id>{number}</image_id>" if picture.numbered else "")
    if recipe.spelled == "parted":
        across, below = recipe.inner
        tile = recipe.token * recipe.per_tile
        grid = (across.join([tile] * columns) + below) * rows if rows * columns > 1 else ""
        return recipe.before + grid + recipe.mark + tile + recipe.after
    if recipe.spelled == "lines":
        return recipe.before.join([recipe.token * columns] * rows) + recipe.after
    tile = recipe.token * recipe.per_tile
    lines = [
        "".join(f"{recipe.before}<row_{r + 1}_col_{c + 1}>{tile}" for c in range(columns)) + "\n" for r in range(rows)
    ]
    return "".join(lines) + ("\n" if lines else "") + f"{recipe.before}{recipe.after}{tile}{recipe.before}"


def _sliced(recipe: Recipe, rows: int, columns: int, name: str) -> str:
    tile = recipe.token * recipe.per_tile
    whole, (begin, end) = recipe.before + tile + recipe.after, recipe.inner
    if not rows:
        return name + whole
    lines = "\n".join([(whole if recipe.around else begin + tile + end) * columns] * rows)
    return name + whole + (begin + lines + end if recipe.around else lines)
