"""What a front end needs for a model that sees: the pictures of a conversation, and their places in its prompt."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from toolkit.artifacts.recipe import open_recipe
from toolkit.artifacts.text.written import Written
from toolkit.base import extras
from toolkit.base.lazy_dataclass import dataclass
from toolkit.box.box import Ticket
from toolkit.configs.option import spelled as flag
from toolkit.errors import BusyError, UsageError
from toolkit.models.eyes.pictures import MOST_TILES, Picture, Recipe
from toolkit.models.eyes.videos import Video
from toolkit.vision.asked import Asked, Fetched
from toolkit.vision.clip import Clip
from toolkit.vision.decoder import Decoder
from toolkit.vision.decoding import GIVEN_UP
from toolkit.vision.images import Rules, is_url, open_image
from toolkit.vision.kept import Kept, key
from toolkit.vision.parts import is_picture, is_video, parts_of, source_of
from toolkit.vision.recipes import prepare
from toolkit.vision.sampling import media_sampling, sampling_of
from toolkit.vision.spelling import spelled
from toolkit.vision.videos import watch

# Tiles, as LMDeploy has them; OpenAI's "original" keeps all that there is.
DETAIL = {"low": 6, "medium": 12, "high": MOST_TILES, "original": MOST_TILES}
LIMIT = flag("limit_mm_per_prompt")
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
    of a conversation, None: any; ``decoder``: of files; ``kept``: what it has prepared."""

    recipe: Recipe
    rules: Rules = field(default_factory=Rules)
    max_tokens: int | None = None
    decoder: Decoder = field(default_factory=Decoder.of)
    kept: Kept = field(default_factory=Kept)

    @classmethod
    def open(cls, directory: Path, rules: Rules | None = None, max_tokens: int | None = None) -> Eyes | None:
        """Those of the model in a directory; None where it reads text alone. Raises ToolkitError for a config that
        cannot be."""
        recipe = open_recipe(directory)
        return None if recipe is None else cls.of(recipe, rules or Rules(), max_tokens)

    @classmethod
    def of(cls, recipe: Recipe, rules: Rules, max_tokens: int | None = None) -> Eyes:
        """Those of a model whose pictures are prepared so."""
        return cls(recipe, rules, max_tokens, Decoder.of(rules))

    def taking(self, media: Any) -> Eyes:
        """These, for a request that says itself how its videos are read (``media_sampling``)."""
        return replace(self, rules=replace(self.rules, sampling=media_sampling(media, self.rules.sampling)))

    def asked(self, messages: Any) -> list[Asked]:
        """The pictures and videos of OpenAI messages, in order. Raises UsageError where there are too many."""
        found = _pictures(messages)
        videos = [is_video(part) for _, part in found]
        self._check_count(videos)
        if found:
            extras.require("torch", "messages: images")  # towers run in it, whatever runs the language model
        few = videos.count(False) <= self.recipe.few
        return [Asked(where, *source_of(part), is_video(part), few) for where, part in found]

    def fetches(self, one: Asked) -> bool:
        """Whether ``one`` is another host's."""
        return self.rules.fetching is not None and is_url(one.source)

    def fetch(self, one: Asked, seconds: float = math.inf) -> Fetched:
        """``one`` of another host with its file, whose bytes count until it is closed. Raises UsageError where it is
        not fetched in so many ``seconds``, BusyError where those of others leave it no room."""
        with one.named():
            return Fetched(one, self.rules.within(seconds), self.decoder.fetched)

    def see(
        self, one: Asked, tokens: int = 0, decoding: float = math.inf, ticket: Ticket | None = None
    ) -> list[Picture]:
        """The picture that ``one`` is, or those that stand for its video, which has ``decoding`` seconds until its
        turn is over. ``tokens``: of the pictures before; ``ticket``: by which it may be called off. Raises
        UsageError, one line that says where it stands, and BusyError where others left it no time or no room."""
        pictures = []
        with one.named():
            for picture in self._seen(one, decoding, ticket):
                if ticket is not None and ticket.cancelled:
                    raise BusyError(f"{one.where}: {one.called}: {GIVEN_UP}")
                pictures.append(picture)
                tokens += picture.tokens
                self._check_room(tokens)
        return pictures

    def look(self, messages: Any, seconds: float = math.inf, decoding: float = math.inf) -> list[Picture]:
        """The pictures of OpenAI messages, in order. Raises UsageError that names the part at fault; also where not all
        are fetched in so many ``seconds``, or a video's turn to be decoded comes after ``decoding`` seconds; BusyError
        where other videos left one no time."""
        pictures: list[Picture] = []
        began = time.monotonic()
        for one in self.asked(messages):
            tokens = sum(picture.tokens for picture in pictures)
            if self.fetches(one):
                with self.fetch(one, seconds - (time.monotonic() - began)) as fetched:
                    pictures += self.see(fetched.asked, tokens, decoding - (time.monotonic() - began))
            else:
                pictures += self.see(one, tokens, decoding - (time.monotonic() - began))
        return pictures

    def _seen(self, one: Asked, decoding: float, ticket: Ticket | None) -> Iterator[Picture]:
        video = self._video_of(one)
        if isinstance(one.source, str | Path):
            one = one.read(self.rules)
        made = self.decoder.counted(self._made(one, video, decoding, ticket), f"{one.where}: {one.called}")
        if not isinstance(one.source, bytes | Clip):
            return made
        told = (one.alone,) if video is None else (self.rules.sampling,)
        name = key(one.source, one.kind, sorted(one.options.items(), key=str), *told)
        found = self.kept.get(name)
        return self.kept.keeping(name, made) if found is None else iter(found)

    def _made(self, one: Asked, video: Video | None, decoding: float, ticket: Ticket | None) -> Iterator[Picture]:
        rules, options, shown = self.rules, one.options, one.called
        if video is not None:
            sampling = sampling_of(options, rules.sampling)
            with ExitStack() as holding:
                clip = self.decoder.videos.open(one.source, rules, sampling, video, decoding, shown, holding, ticket)
                yield from watch(self.recipe, video, clip)
            return
        recipe = _adjusted(self.recipe, rules, options)
        if isinstance(one.source, bytes):
            yield self.decoder.picture(one.source, recipe, rules, one.alone, shown, ticket)
        else:
            yield prepare(recipe, open_image(one.source, rules, shown), one.alone)

    def _video_of(self, one: Asked) -> Video | None:
        """How the model is shown it, where it is a video."""
        if one.video and self.recipe.video is None:
            raise UsageError("this model takes no videos; send frames of it as images")
        return self.recipe.video if one.video else None

    def _check_count(self, videos: Sequence[bool]) -> None:
        if len(videos) > self.rules.max_images:
            raise UsageError(f"messages: expected at most {_some(self.rules.max_images, 'image')}, found {len(videos)}")
        for kind, found in (("image", videos.count(False)), ("video", videos.count(True))):
            if found > (most := self.rules.of_a_kind.get(kind, found)):
                raise UsageError(f"messages: expected at most {_some(most, kind)} ({LIMIT}), found {found}")

    def _check_room(self, tokens: int) -> None:
        if self.max_tokens is not None and tokens > self.max_tokens:
            limit = f"a conversation may have {self.max_tokens} tokens in all; send fewer or smaller images"
            raise UsageError(f"the images up to this one take {tokens} tokens, {limit}")

    def spell(self, text: str, pictures: Sequence[Picture]) -> str:
        """A prompt whose marks are spelled as the tokens of the pictures they stand for. Raises UsageError where there
        are more or fewer of them."""
        if isinstance(text, Written):
            return text.through(lambda marked: self.spell(marked, pictures))
        between, shown = text.split(self.recipe.mark), _by_place(pictures)
        if len(between) != len(shown) + 1:
            raise UsageError(
                f"messages: expected as many images as places for them, found {len(shown)} images and "
                f"{len(between) - 1} places ({self.recipe.mark} in the prompt)"
            )
        if self.recipe.leads:
            whole = "".join(between)
            lead = next((lead for lead in self.recipe.leads if whole.startswith(lead)), "")
            between = [lead, *[""] * (len(shown) - 1), whole.removeprefix(lead)] if shown else between
        if (video := self.recipe.video) is not None:
            before, _, behind = self.recipe.written.partition(self.recipe.mark)
            for i in (i for i, (first, *_) in enumerate(shown) if first.frame is not None):
                between[i] = between[i].removesuffix(before) + video.around[0]
                between[i + 1] = video.around[1] + between[i + 1].removeprefix(behind)
        texts = [
            "".join((p.frame and p.frame.said) or spelled(self.recipe, p, number) for p in some)
            for number, some in enumerate(shown)
        ]
        return between[0] + "".join(a + b for a, b in zip(texts, between[1:], strict=True))


def _some(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _by_place(pictures: Sequence[Picture]) -> list[list[Picture]]:
    """Those of each place: one, or all of a video."""
    found: list[list[Picture]] = []
    for picture in pictures:
        if picture.frame is not None and picture.frame.follows:
            found[-1].append(picture)
        else:
            found.append([picture])
    return found


def _pictures(messages: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """(where it stands, the part) of each."""
    return [
        (f"messages[{i}].content[{j}]", part)
        for i, message in enumerate(messages if isinstance(messages, list) else ())
        for j, part in enumerate(parts_of(message))
        if is_picture(part)
    ]


def media_limits(given: str | None) -> dict[str, int]:
    """What vLLM calls ``--limit-mm-per-prompt`` says, as JSON. Raises UsageError."""
    try:
        found = {} if given is None else json.loads(given)
        if {type(count) for count in found.values()} <= {int} and set(found) <= {"image", "video"}:
            if min(found.values(), default=0) >= 0:
                return dict(found)
    except (ValueError, RecursionError, AttributeError):
        pass
    wanted = '{"image": …, "video": …}'
    raise UsageError(f"{LIMIT}: expected {wanted}, whole numbers from 0 on, found {given!r:.80}")


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
