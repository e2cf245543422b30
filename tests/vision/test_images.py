"""Pictures come in many ways and shapes: read as meant, or refused in one line."""

from __future__ import annotations

import base64
import io
import struct
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from toolkit.errors import UsageError
from toolkit.vision.images import Rules, open_image

RED = (255, 0, 0)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def plain(color: Any = RED, mode: str = "RGB", size: tuple[int, int] = (6, 4)) -> Image.Image:
    return Image.new(mode, size, color)


def turned() -> bytes:
    image = plain(size=(6, 4))
    image.paste((0, 0, 255), (0, 0, 6, 1))  # the upper line
    exif = image.getexif()
    exif[0x0112] = 6  # to be turned to the right
    return saved(image, exif=exif.tobytes())


def palette() -> bytes:
    return saved(plain().quantize(4))


def sixteen_bits(value: int) -> bytes:
    return saved(Image.fromarray(np.full((4, 6), value, np.uint16)))


@pytest.mark.parametrize(
    ("data", "color"),
    [
        (saved(plain()), RED),
        (saved(plain(), "BMP"), RED),
        (saved(plain(), "TIFF"), RED),
        (saved(plain(), "GIF"), RED),
        (saved(plain(), "WEBP", lossless=True), RED),
        (palette(), RED),
        (saved(plain(200, "L")), (200,) * 3),
        (saved(plain(1, "1")), (255,) * 3),
        (saved(plain((255, 0, 0, 0), "RGBA")), (255,) * 3),
        (saved(plain((0, 0, 0, 128), "RGBA")), (127,) * 3),
        (saved(plain((10, 255), "LA")), (10,) * 3),
        (saved(plain((0, 255, 255, 0), "CMYK"), "TIFF"), RED),
        (sixteen_bits(65535), (255,) * 3),
        (sixteen_bits(32768), (128,) * 3),
    ],
    ids=str,
)
def test_every_kind_of_picture_becomes_rgb(data: bytes, color: tuple[int, ...]) -> None:
    image = open_image(data, Rules())
    assert image.mode == "RGB" and image.size == (6, 4)
    assert np.abs(np.asarray(image, int)[2, 3] - color).max() <= 1


def test_exif_turns() -> None:
    image = open_image(turned(), Rules())
    assert image.size == (4, 6)
    assert image.getpixel((3, 2)) == (0, 0, 255) and image.getpixel((0, 2)) == RED


ORIENTATION, WIDTH, RESOLUTION, UNIT = 0x112, 0x100, 0x11A, 0x128
SHORT, ASCII, LONG = 3, 2, 4
LIES = (ORIENTATION, SHORT, 1, b"\6\0")  # to be turned to the right


def exif_of(*fields: tuple[int, int, int, bytes]) -> bytes:
    entries = b"".join(struct.pack("<HHI4s", *field) for field in sorted(fields))
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", len(fields)) + entries + bytes(4)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    ("exif", "size"),
    [
        (exif_of(LIES, (WIDTH, ASCII, 4, b"abc\0")), (4, 6)),
        (exif_of(LIES, (RESOLUTION, ASCII, 4, b"abc\0")), (4, 6)),
        (exif_of(LIES, (UNIT, LONG, 1, b"\0\0\1\0")), (4, 6)),
        (b"Exif\0\0not a directory", (6, 4)),
    ],
    ids=["width", "resolution", "unit", "none"],
)
def test_odd_exif_data_are_no_reason_to_refuse_a_picture(kind: str, exif: bytes, size: tuple[int, int]) -> None:
    """Cameras and editors write fields of other types than the standard's, and what is no EXIF at all."""
    data = saved(plain(), kind, exif=exif)
    given = Image.open(io.BytesIO(data))
    assert open_image(data, Rules()).size == open_image(given, Rules()).size == size
    assert given.size == (6, 4), "the user's own picture was turned"


def test_sources(tmp_path: Path) -> None:
    data = saved(plain())
    file = tmp_path / "a b.png"
    file.write_bytes(data)
    encoded = base64.b64encode(data).decode()
    urls = [file.as_uri(), f"data:image/png;base64,{encoded}", f"data:image/png,{quote(data)}"]
    for source in (data, str(file), file, *urls, plain()):
        assert open_image(source, Rules()).getpixel((0, 0)) == RED


def animated() -> bytes:
    return saved(plain(), "GIF", save_all=True, append_images=[plain((0, 255, 0)), plain((0, 0, 255))])


def chained(following: int) -> bytes:
    """A TIFF whose directory says that another one follows there."""
    data = saved(plain(), "TIFF")
    first = int.from_bytes(data[4:8], "little")
    end = first + 2 + 12 * int.from_bytes(data[first : first + 2], "little")
    return data[:end] + following.to_bytes(4, "little") + data[end + 4 :]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "found no bytes"),
        (b"hello", "expected a picture"),
        (saved(plain(size=(64, 64)))[:120], "broken or cut off"),
        (saved(plain(size=(64, 64)), "JPEG")[:-40], "broken or cut off"),
        (animated(), "found several in it"),
        (saved(plain(size=(101, 100))), "expected at most 10,000 pixels, found 101 x 100"),
        (b"\0" * 5001, "expected at most 5,000 bytes"),
        ("data:image/png;base64,%%%", "expected base64"),
        ("data:image/png", "without a comma"),
        ("/nowhere/a.png", "no such file"),
        ("", "expected a URL or a path, found an empty one"),
        ("ftp://host/a.png", "expected a URL of http, https, data or file"),
        ("a\0b", "image a?b: "),
        ("~nosuchuser/x.png", "image ~nosuchuser/x.png: "),
        ("file://[x", "cannot be read"),
        (chained(1 << 20), "broken or cut off"),
        (7, "expected a URL, a path"),
        (None, "expected a URL, a path"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_what_cannot_be_is_one_line(source: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("?", r"\?")) as caught:
        open_image(source, Rules(max_bytes=5000, max_pixels=10_000))
    assert "\n" not in str(caught.value)
    if isinstance(source, str):
        with pytest.raises(UsageError):
            open_image(source, Rules(files=(), max_bytes=5000))


def test_a_bomb_is_not_decoded() -> None:
    """A picture of 400 million pixels in a small file."""
    bomb = saved(Image.new("1", (20_000, 20_000)))
    assert len(bomb) < 100_000
    with pytest.raises(UsageError, match="expected at most 67,108,864 pixels"):
        open_image(bomb, Rules())


def test_files_only_where_allowed(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a.png").write_bytes(saved(plain()))
    (inside / "link.png").symlink_to(outside / "a.png")
    rules = Rules(files=(inside,))
    assert open_image(str(inside / "a.png"), rules).size == (6, 4)
    for path in (outside / "a.png", inside / "link.png", inside / ".." / "out" / "a.png"):
        with pytest.raises(
            UsageError, match=r"files are not read here \((no|it is not below) --allowed-local-media-path"
        ):
            open_image(f"file://{path}", rules)
    with pytest.raises(UsageError, match=r"files are not read here \((no|it is not below) --allowed-local-media-path"):
        open_image(str(inside / "a.png"), Rules(files=()))
