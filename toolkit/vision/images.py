"""From what a user names to a picture in RGB: data URL, URL, file, bytes or a Pillow image.

Pictures come from anyone: the kinds of files that are read are few, sizes are looked at before anything is decoded, and
whatever is wrong is one line. Pillow is imported when the first picture comes.
"""

from __future__ import annotations

import base64
import binascii
import io
import mimetypes
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from toolkit.base import extras
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.user_path import user_path
from toolkit.errors import UsageError
from toolkit.vision.fetch import Fetching, fetch, shortened

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
STILLS = ("MPO",)  # a JPEG with more pictures behind it, which cameras make: the first is meant
STRIP = 1 << 20  # pixels that are converted at once


@dataclass(frozen=True)
class Sampling:
    """Which frames of a video are taken: ``num_frames`` of them; ``fps`` a second, ``num_frames`` at most. None: as the
    model's processor has it."""

    num_frames: int | None = None
    fps: float | None = None


@dataclass(frozen=True)
class Rules:
    """What may be read, and how much. ``files``: folders whose files may be; None = any, () = none. ``max_pixels``:
    of a picture, and of a frame of a video; ``max_images``: videos count as one; ``of_a_kind``: images and videos
    each, where less is allowed of one. ``max_decoding_bytes``: that all hold while they are decoded;
    ``max_fetched_bytes``: of fetched files that wait for that; ``max_prepared_bytes``: of the numbers that are made
    of them, as long as there are any, None: any. ``sampling``: of videos that say nothing of it."""

    files: tuple[Path, ...] | None = None
    fetching: Fetching | None = field(default_factory=Fetching)  # None: no URL is fetched
    max_bytes: int = 20 << 20
    max_pixels: int = 64 << 20
    max_images: int = 64
    of_a_kind: Mapping[str, int] = field(default_factory=dict)
    max_video_bytes: int = 256 << 20
    max_video_seconds: float = 4 * 3600.0
    max_video_frames: int = 256
    max_decoding_bytes: int = 3 << 29  # as much as the box lets one have
    max_fetched_bytes: int = 256 << 20
    max_prepared_bytes: int | None = None
    sampling: Sampling = Sampling()

    def within(self, seconds: float) -> Rules:
        """These, with no more than so many seconds to fetch a picture."""
        if self.fetching is None:
            return self
        return replace(self, fetching=replace(self.fetching, seconds=min(self.fetching.seconds, seconds)))


def open_image(source: Any, rules: Rules, shown: str = "image") -> Image:
    """A picture in RGB, turned as its EXIF data say. ``source``: URL, data URL, path, bytes or Pillow image; ``shown``:
    what messages call the last two.

    Raises UsageError, one line, for one that may not be read, is broken, too large, or moves.
    """
    with extras.named():
        from PIL import Image as pillow

    if isinstance(source, pillow.Image):
        return to_rgb(source, rules, shown)
    if isinstance(source, str | Path):
        data, shown = read_bytes(str(source), rules, rules.max_bytes)
    elif isinstance(source, bytes):
        data = source
    else:
        raise UsageError(f"image: expected a URL, a path, bytes or a Pillow image, found {type(source).__name__}")
    if len(data) > rules.max_bytes:
        raise UsageError(f"{shown}: expected at most {rules.max_bytes:,} bytes, found {len(data):,}")
    try:
        image: Image = pillow.open(io.BytesIO(data), formats=FORMATS)
    except pillow.DecompressionBombError as e:
        raise UsageError(f"{shown}: expected at most {rules.max_pixels:,} pixels, found far more") from e
    except Exception as e:  # a broken header raises whatever its reader stumbles on
        raise UsageError(f"{shown}: expected a picture ({', '.join(FORMATS)}), found {_kind(data)}") from e
    check_size(image.width, image.height, rules, shown)  # before the second is looked for: GIF decodes the first for it
    if image.format not in STILLS and _has_more(image, shown):
        raise UsageError(f"{shown}: expected one picture, found several in it; save the one that is meant by itself")
    return to_rgb(image, rules, shown, ours=True)


def _has_more(image: Image, shown: str) -> bool:
    """Whether a file has a second picture. They are not counted: a small file may claim very many."""
    try:
        image.seek(1)
    except EOFError:
        image.seek(0)
        return False
    except Exception as e:
        raise UsageError(f"{shown}: the picture is broken or cut off: {str(e) or type(e).__name__}") from e
    return True


def as_url(source: str, rules: Rules = Rules()) -> str:
    """A URL as it is, once it has been read; of a file a data URL that holds it. Raises UsageError, one line."""
    open_image(source, rules)
    if _scheme(source) in ("http", "https", "data"):
        return source
    data, _ = read_bytes(source, rules, rules.max_bytes)
    return data_url(source, data, "image/png")


def data_url(path: str, data: bytes, usual: str) -> str:
    """A data URL of what ``path`` holds; ``usual``: its type where the name does not tell."""
    return f"data:{mimetypes.guess_type(path)[0] or usual};base64,{base64.b64encode(data).decode()}"


def is_url(source: Any) -> bool:
    """Whether it has to be fetched."""
    return isinstance(source, str) and _scheme(source) in ("http", "https")


def _scheme(source: str) -> str:
    return source[:8].partition(":")[0].lower()


def check_size(width: int, height: int, rules: Rules, shown: str) -> None:
    """Raises UsageError for a picture without pixels, or with more than may be."""
    if not width or not height:
        raise UsageError(f"{shown}: expected a picture, found {width} x {height} pixels")
    if (pixels := width * height) > rules.max_pixels:
        size = f"{width} x {height} = {pixels:,}"
        raise UsageError(f"{shown}: expected at most {rules.max_pixels:,} pixels, found {size}")


def to_rgb(image: Image, rules: Rules, shown: str, *, ours: bool = False) -> Image:
    """8 bits a colour, what is transparent over white, upright. ``ours``: it may be changed in its place.

    Beside the picture there is one in RGB in memory at most: what Pillow would make several whole copies for is done
    strip by strip.
    """
    check_size(image.width, image.height, rules, shown)
    try:
        image.load()
        image = image if ours else image.copy()
        _turn(image)
        if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off instead of scaling
            return _by_strips(image, _eight_bits)
        if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
            return _by_strips(image, _over_white)
        return image if image.mode == "RGB" else image.convert("RGB")
    except Exception as e:
        raise UsageError(f"{shown}: the picture is broken or cut off: {str(e) or type(e).__name__}") from e


def _turn(image: Image) -> None:
    """Turn it upright, where its EXIF data tell how it lies; what else they have, or that nobody can read them, is no
    reason to refuse the picture."""
    from PIL import ExifTags, ImageOps

    try:
        exif = image.getexif()
        for tag in set(exif) - {ExifTags.Base.Orientation}:  # Pillow writes them anew, and stumbles on odd ones
            del exif[tag]
    except Exception:
        return
    ImageOps.exif_transpose(image, in_place=True)


def _by_strips(image: Image, work: Callable[[Image], Image]) -> Image:
    """``work`` of all lines, some at a time, as one picture in RGB."""
    from PIL import Image as pillow

    found, lines = pillow.new("RGB", image.size), max(STRIP // image.width, 1)
    for top in range(0, image.height, lines):
        below = min(top + lines, image.height)
        found.paste(work(image.crop((0, top, image.width, below))), (0, top))
    return found


def _eight_bits(strip: Image) -> Image:
    import numpy as np
    from PIL import Image as pillow

    return pillow.fromarray((np.asarray(strip) / 257).clip(0, 255).round().astype(np.uint8)).convert("RGB")


def _over_white(strip: Image) -> Image:
    from PIL import Image as pillow

    clear = strip.convert("RGBA")
    return pillow.alpha_composite(pillow.new("RGBA", clear.size, "white"), clear).convert("RGB")


def read_bytes(
    source: str, rules: Rules, most: int, what: str = "image", arrived: Callable[[int], None] = lambda count: None
) -> tuple[bytes, str]:
    """The bytes of a file, ``most`` of them, by its URL, data URL or path, and what messages call it, who know it as
    ``what``. ``arrived`` is told how many bytes each piece has that is fetched, and may raise. Raises UsageError, one
    line."""
    scheme = _scheme(source)
    if not source.strip():
        raise UsageError(f"{what}: expected a URL or a path, found an empty one")
    if scheme == "data":
        shown = f"{what} (data URL)"
        return _decoded(source, most, what, shown), shown
    shown = f"{what} {shortened(source)}"
    if is_url(source):
        if rules.fetching is None:
            raise UsageError(f"{shown}: URLs are not fetched here; send the {what} as a data URL")
        return fetch(source, most, rules.fetching, what, arrived), shown
    if "://" in source and scheme != "file":
        raise UsageError(f"{shown}: expected a URL of http, https, data or file")
    from urllib.request import url2pathname  # it brings http.client: with the first picture

    try:
        path = Path(url2pathname(urlsplit(source).path) if scheme == "file" else source)
        return _of_file(path if rules.files is not None else user_path(path), rules, most, what, shown), shown
    except (OSError, ValueError, RuntimeError) as e:  # the last of links that go round in a circle
        raise UsageError(f"{shown}: cannot be read: {getattr(e, 'strerror', None) or e}") from e


def _decoded(source: str, most: int, what: str, shown: str) -> bytes:
    head, comma, body = source.partition(",")
    if not comma:
        raise UsageError(f"{what}: expected data:{what}/…;base64,…, found a data URL without a comma")
    if len(body) > 3 * most:  # as many characters as a byte may take
        raise UsageError(f"{shown}: expected at most {most:,} bytes, found more")
    try:
        based = head.lower().endswith(";base64")
        found = base64.b64decode("".join(unquote(body).split()), validate=True) if based else unquote_to_bytes(body)
    except (binascii.Error, ValueError) as e:
        raise UsageError(f"{shown}: expected base64, found something else ({e})") from e
    if len(found) > most:
        raise UsageError(f"{shown}: expected at most {most:,} bytes, found {len(found):,}")
    return found


def _of_file(path: Path, rules: Rules, most: int, what: str, shown: str) -> bytes:
    if rules.files is not None:
        where = path.resolve()
        if not any(where.is_relative_to(folder.resolve()) for folder in rules.files):
            why = "it is not below --allowed-local-media-path" if rules.files else "no --allowed-local-media-path"
            raise UsageError(f"{shown}: files are not read here ({why}); send the {what} as a data URL")
    if not path.is_file():
        raise UsageError(f"{shown}: no such file")
    if (size := path.stat().st_size) > most:
        raise UsageError(f"{shown}: expected at most {most:,} bytes, found {size:,}")
    return path.read_bytes()


def _kind(data: bytes) -> str:
    return "no bytes" if not data else f"{len(data):,} bytes that are none, or a broken one"
