"""What is said of pictures and videos that cannot be: the whole line."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.support.refused import refusing
from toolkit.errors import UsageError
from toolkit.models.config.fields import Fields
from toolkit.models.registry import get
from toolkit.vision.eyes import Eyes
from toolkit.vision.images import Rules, check_size, read_bytes
from toolkit.vision.videos import of_frames

refused = refusing(UsageError)


def eyes(family: str, **rules: Any) -> Eyes:
    tiny, make = get(family).tiny[0], get(family).recipe
    assert make is not None
    return Eyes(make(Fields(tiny.fields), Fields(tiny.preprocessor)), Rules(**rules))


def asking(count: int, **options: Any) -> list[dict[str, Any]]:
    """One message with so many drawings, and ``options`` for each."""
    file = io.BytesIO()
    Image.new("RGB", (40, 30)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    part = {"type": "image_url", "image_url": {"url": url, **options}}
    return [{"role": "user", "content": [part] * count}]


def test_pictures() -> None:
    assert refused(lambda: check_size(0, 3, Rules(), "image x")) == "image x: expected a picture, found 0 x 3 pixels"
    told = "image http://a/b.png: URLs are not fetched here; send the image as a data URL"
    assert refused(lambda: read_bytes("http://a/b.png", Rules(fetching=None), 9)) == told
    told = "messages: expected at most 1 image, found 2"
    assert refused(lambda: eyes("qwen2_vl", max_images=1).look(asking(2))) == told


@pytest.mark.parametrize(
    ("family", "options", "told"),
    [
        ("internvl", {"detail": "odd"}, "detail: expected auto, low, medium, high, original, found 'odd'"),
        ("qwen2_vl", {"max_pixels": 1}, "max_pixels: expected at least "),
    ],
)
def test_options_of_pictures(family: str, options: dict[str, Any], told: str) -> None:
    assert told in refused(lambda: eyes(family).look(asking(1, **options)))


def test_what_openai_calls_original_is_cut_into_the_most_tiles() -> None:
    tokens = {
        detail: eyes("internvl").look(asking(1, detail=detail))[0].tokens for detail in ("low", "high", "original")
    }
    assert tokens["low"] < tokens["high"] == tokens["original"]


def test_frames_of_several_sizes() -> None:
    frames = [Image.new("RGB", (width, 4)) for width in (4, 5)]
    assert refused(lambda: of_frames(frames, Rules(), 1.0)) == "video: expected frames of one size, found 2 sizes"


def test_files_that_are_too_large(tmp_path: Path) -> None:
    (file := tmp_path / "a.png").write_bytes(b"12345")
    assert refused(lambda: read_bytes(str(file), Rules(), 3)) == f"image {file}: expected at most 3 bytes, found 5"
    url = "data:image/png;base64,MTIzNDU="
    assert refused(lambda: read_bytes(url, Rules(), 3)).startswith("image (data URL): expected at most 3 bytes, found ")
