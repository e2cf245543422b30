"""Pictures of strangers: counted by their headers, decoded in a box, within a room of bytes, beside texts."""

from __future__ import annotations

import base64
import io
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from toolkit import PytorchEngineConfig, pipeline
from toolkit.box.box import Ticket
from toolkit.errors import BusyError, UsageError
from toolkit.models.eyes.pictures import Recipe
from toolkit.serve.app import create_app
from toolkit.serve.http.limits import Limits
from toolkit.serve.http.sharing import lanes
from toolkit.serve.options import ServerSettings
from toolkit.vision import decoder, images
from toolkit.vision.decoder import Decoder
from toolkit.vision.eyes import Eyes
from toolkit.vision.headers import COSTS, Header, header
from toolkit.vision.images import Rules, open_image
from toolkit.vision.kept import Kept
from toolkit.vision.recipes import prepare
from toolkit.vision.room import Room

CONFIG = PytorchEngineConfig(session_len=400, max_batch_size=4, dtype="float32", device_type="cpu", block_size=16)
SIZE = (61, 47)
HALF = (0.5,) * 3
TILES = Recipe("tiles", (28, 28), 14, HALF, HALF, least=1, most=4, per_tile=4)
PADDED = Recipe("crop", (28, 28), 14, HALF, HALF, short=28, pad=True, per_tile=4)
FLOATS = Recipe("overlap", (56, 56), 14, HALF, HALF, most=4, overlap=1, per_tile=16)


def noise(mode: str = "RGB", size: tuple[int, int] = SIZE, seed: int = 0) -> Image.Image:
    draw = np.random.default_rng(seed)
    if mode == "I;16":
        return Image.fromarray(draw.integers(0, 65536, size[::-1], np.uint16))
    return Image.fromarray(draw.integers(0, 256, (*size[::-1], 4), np.uint8)).convert(mode)


def file(image: Image.Image, kind: str, **options: Any) -> bytes:
    made = io.BytesIO()
    image.save(made, kind, **options)
    return made.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x112] = orientation
    return exif


FILES = {
    "png": file(noise(), "PNG"),
    "png with alpha": file(noise("RGBA"), "PNG"),
    "png of one bit": file(noise("1"), "PNG", transparency=0),
    "png of 16 bits": file(noise("I;16"), "PNG"),
    "palette": file(noise("P"), "PNG", transparency=bytes(range(256))),
    "jpeg": file(noise(), "JPEG"),
    "progressive": file(noise(), "JPEG", progressive=True, subsampling=0),
    "turned": file(noise(), "JPEG", exif=turned(6)),
    "with a long profile": file(noise(), "JPEG", icc_profile=bytes(150_000)),
    "cmyk": file(noise("CMYK"), "JPEG"),
    "webp": file(noise(), "WEBP"),
    "webp with alpha": file(noise("RGBA"), "WEBP"),
    "lossless": file(noise("RGBA"), "WEBP", lossless=True),
    "gif": file(noise("P"), "GIF"),
    "bmp": file(noise(), "BMP"),
    "tiff": file(noise(), "TIFF"),
    "packed tiff": file(noise("RGBA"), "TIFF", compression="tiff_deflate"),
}


@pytest.fixture(scope="module")
def boxed() -> Decoder:
    return Decoder.of()


@pytest.mark.parametrize("name", FILES)
def test_a_header_tells_the_size(name: str) -> None:
    opened = Image.open(io.BytesIO(FILES[name]))
    found = header(FILES[name])
    assert found is not None and (found.format, found.size) == (opened.format, opened.size)
    assert found.cost == SIZE[0] * SIZE[1] * COSTS[found.format]


@pytest.mark.parametrize("name", FILES)
def test_a_header_that_ends_before_its_size_tells_nothing(name: str) -> None:
    for length in range(16):
        assert header(FILES[name][:length]) is None


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("recipe", [TILES, PADDED, FLOATS], ids=lambda recipe: recipe.kind)
def test_in_the_box_pictures_become_the_same_numbers(boxed: Decoder, name: str, recipe: Recipe) -> None:
    expected = prepare(recipe, open_image(FILES[name], Rules()), True)
    found = boxed.picture(FILES[name], recipe, Rules(), True, "image")
    assert (found.digest, found.grid, found.size, found.tokens) == (
        expected.digest, expected.grid, expected.size, expected.tokens,
    )  # fmt: skip
    assert all(np.array_equal(a, b) for a, b in zip(found.parts, expected.parts, strict=True))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBa", "CMYK", "I;16"])
def test_strips_are_what_the_whole_is(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "STRIP", SIZE[0] * 7)
    picture = noise(mode) if mode not in ("PA", "RGBa") else noise("LA" if mode == "PA" else "RGBA").convert(mode)
    if mode == "I;16":
        grey = (np.asarray(picture) / 257).clip(0, 255).round().astype(np.uint8)
        expected = np.repeat(grey[..., None], 3, 2)
    elif "A" in mode or "a" in mode:
        clear = picture.convert("RGBA")
        expected = np.asarray(Image.alpha_composite(Image.new("RGBA", SIZE, "white"), clear).convert("RGB"))
    else:
        expected = np.asarray(picture.convert("RGB"))
    assert np.array_equal(np.asarray(open_image(picture, Rules())), expected)


def test_what_cannot_be_is_refused_by_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a process sees it."""
    monkeypatch.setattr(decoder.Box, "run", lambda *_, **__: pytest.fail("it was decoded"))
    boxed = Decoder.of()
    huge = bytearray(FILES["png"])
    huge[16:24] = struct.pack(">II", 100_000, 100_000)
    with pytest.raises(UsageError, match=r"^image: expected at most .* pixels, found 100000 x 100000"):
        boxed.picture(bytes(huge), TILES, Rules(), True, "image")
    with pytest.raises(UsageError, match=r"^image: expected at most 10 bytes"):
        boxed.picture(bytes(huge), TILES, Rules(max_bytes=10), True, "image")


def test_who_has_more_pixels_than_the_header_said_is_refused(boxed: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "header", lambda data: Header("PNG", (3, 3)))
    with pytest.raises(UsageError, match="expected at most 9 pixels, found 61 x 47"):
        boxed.picture(FILES["png"], TILES, Rules(), True, "image")


@pytest.mark.parametrize("data", [b"", b"nothing", FILES["png"][:60], FILES["jpeg"][:700], FILES["webp"][:80]])
def test_what_is_broken_is_one_line(boxed: Decoder, data: bytes) -> None:
    with pytest.raises(UsageError) as told:
        boxed.picture(data, TILES, Rules(), True, "image of mine")
    assert str(told.value).startswith("image of mine: ") and "\n" not in str(told.value)


def test_what_is_decoded_at_once_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six pictures two fit; what they cost is told by their pixels, not by their bytes."""
    one = len(FILES["png"]) + 61 * 47 * COSTS["PNG"]
    narrow = Decoder.of(Rules(max_decoding_bytes=2 * one + 100))
    together, most, gate = 0, 0, threading.Barrier(2)
    lock = threading.Lock()

    class Counted:
        def run(self, value: Any, data: bytes, ticket: Any) -> Any:
            nonlocal together, most
            with lock:
                together += 1
                most = max(most, together)
            gate.wait(60)  # both are there, and the others would be
            with lock:
                together -= 1
            raise ValueError("seen")

    monkeypatch.setattr(decoder.Box, "run", Counted.run)
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(narrow.picture, FILES["png"], TILES, Rules(), True, "image") for _ in range(6)]
        assert {str(one.exception(60)) for one in waiting} == {"seen"}
    assert most == 2 and narrow.room.held == 0 and narrow.room.highest == 2 * one


def test_a_room_lets_in_by_turns_and_the_largest_alone() -> None:
    room, order, inside, release = Room(10, "--some-limit"), [], threading.Event(), threading.Event()

    def first() -> None:
        with room.of(8, 60, "a"):
            inside.set()
            release.wait(60)

    def then(size: int) -> None:
        with room.of(size, 60, "b"):
            order.append(size)

    with ThreadPoolExecutor(4) as pool:
        pool.submit(first)
        assert inside.wait(60)
        pool.submit(then, 99)  # more than there is
        while len(room._waiting) < 1:
            pass
        pool.submit(then, 1)  # it would fit, and does not go before
        while len(room._waiting) < 2:
            pass
        assert not order
        with pytest.raises(BusyError, match=r"^c: others fill the server's --some-limit"):
            room._enter(1, 0.0, "c")
        release.set()
    assert order == [99, 1] and room.held == 0
    room.take(10, "d")
    with pytest.raises(BusyError, match=r"^e: others fill"):
        room.take(1, "e")


def test_what_needs_more_than_all_may_hold_is_refused(boxed: Decoder) -> None:
    """As a file of 34 bytes may: lossless WebP of one colour."""
    tiny = file(Image.new("RGBA", (1000, 1000)), "WEBP", lossless=True)
    assert len(tiny) < 100
    with pytest.raises(
        UsageError, match=r"^image: found WEBP of 1000 x 1000 pixels.*16 MiB.*at most 9 \(--max-decoding"
    ):
        Decoder.of(Rules(max_decoding_bytes=10_000_000)).picture(tiny, TILES, Rules(), True, "image")
    assert boxed.picture(tiny, TILES, Rules(), True, "image").tokens


def test_work_that_is_called_off_ends(boxed: Decoder) -> None:
    """Nobody waits for the picture any more: its process is ended with it, and the next one gets another."""
    ticket = Ticket()
    ticket.cancel()
    with pytest.raises(BusyError, match=r"^image: it was given up$"):
        boxed.picture(FILES["png"], TILES, Rules(), True, "image", ticket)
    assert boxed.room.held == 0 and boxed.picture(FILES["png"], TILES, Rules(), True, "image").tokens


# -- of the server


@pytest.fixture(scope="module")
def pipe(tiny_models: Any) -> Any:
    with pipeline(str(tiny_models("llava")), CONFIG) as opened:
        yield opened


@pytest.fixture
def client(pipe: Any) -> Any:
    settings = ServerSettings(model_name="tiny", limits=Limits(max_fetched_bytes=60_000))
    with TestClient(create_app(pipe.engine, pipe.chat_template, settings)) as opened:
        yield opened


def asked(*urls: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    text = {"type": "text", "text": "What?"}
    return {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": [*parts, text]}]}


def data_url(seed: int, size: tuple[int, int] = SIZE) -> str:
    return f"data:image/png;base64,{base64.b64encode(file(noise(size=size, seed=seed), 'PNG')).decode()}"


class Held:
    """``Decoder.picture`` that waits until it is let go; who was where, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.release = threading.Semaphore(0), threading.Event()
        self.seen: list[tuple[str, int]] = []
        decode = Decoder.picture

        def held(decoder: Decoder, data: bytes, *rest: Any) -> Any:
            width = Image.open(io.BytesIO(data)).width
            self.seen.append((threading.current_thread().name.rpartition("_")[0], width))
            self.began.release()
            self.release.wait(60)
            return decode(decoder, data, *rest)

        monkeypatch.setattr(Decoder, "picture", held)


def test_pictures_hold_up_no_text(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        bodies = [asked(*(data_url(8 * i + k) for k in range(3))) for i in range(6)]
        waiting = [pool.submit(client.post, "/v1/chat/completions", json=body) for body in bodies]
        try:
            assert all(held.began.acquire(timeout=60) for _ in range(lanes.PICTURES))
            for _ in range(3):
                assert client.post("/v1/chat/completions", json=asked()).status_code == 200
            assert len(held.seen) == lanes.PICTURES and not any(one.done() for one in waiting)
        finally:
            held.release.set()
        assert {one.result().status_code for one in waiting} == {200}
    assert {name for name, _ in held.seen} == {"toolkit-pictures"}


def test_large_pictures_hold_up_no_small_one(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "LARGE_PICTURE", 10_000)
    held = Held(monkeypatch)
    large = [asked(data_url(i, (200, 100))) for i in range(4)]
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(client.post, "/v1/chat/completions", json=body) for body in large]
        try:
            assert held.began.acquire(timeout=60)
            small = pool.submit(client.post, "/v1/chat/completions", json=asked(data_url(9)))
            assert held.began.acquire(timeout=60)
            assert sorted(held.seen) == [("toolkit-large-pictures", 200), ("toolkit-pictures", SIZE[0])]
        finally:
            held.release.set()
        assert {one.result().status_code for one in (small, *waiting)} == {200}


def test_who_sends_many_waits_between_them(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of one request are turns by themselves."""
    monkeypatch.setattr(lanes, "LARGE_PICTURE", 0)  # one thread
    held, stands = Held(monkeypatch), threading.Semaphore(0)
    decode = lanes.Lanes.decode

    async def decoding(*given: Any, **more: Any) -> Any:
        stands.release()  # the loop's thread goes on to the queue without a pause
        return await decode(*given, **more)

    monkeypatch.setattr(lanes.Lanes, "decode", decoding)
    many = asked(*(data_url(20 + i, (100 + i, 50)) for i in range(4)))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.post, "/v1/chat/completions", json=many)
        assert held.began.acquire(timeout=60) and stands.acquire(timeout=60)
        second = pool.submit(client.post, "/v1/chat/completions", json=asked(data_url(30)))
        assert stands.acquire(timeout=60)
        held.release.set()
        assert {first.result().status_code, second.result().status_code} == {200}
    assert [width for _, width in held.seen] == [100, SIZE[0], 101, 102, 103]


def test_fetching_is_not_decoding(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    held.release.set()
    fetched: list[str] = []

    def fetch(url: str, most: int, rules: Any, what: str, arrived: Any) -> bytes:
        fetched.append(threading.current_thread().name.rpartition("_")[0])
        arrived(40_000)
        return FILES["png"]

    monkeypatch.setattr(images, "fetch", fetch)
    body = asked("http://some.example/a.png", data_url(40), "http://some.example/b.png")
    assert client.post("/v1/chat/completions", json=body).status_code == 200, "one file is held at a time"
    assert fetched == ["toolkit-fetching"] * 2 and {name for name, _ in held.seen} == {"toolkit-pictures"}


def test_fetched_files_that_wait_have_a_limit(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)

    def fetch(url: str, most: int, rules: Any, what: str, arrived: Any) -> bytes:
        arrived(40_000)
        return FILES["png"]

    monkeypatch.setattr(images, "fetch", fetch)
    body = asked("http://some.example/a.png")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.post, "/v1/chat/completions", json=body)
        try:
            assert held.began.acquire(timeout=60)
            refused = client.post("/v1/chat/completions", json=body)
            assert refused.status_code == 503 and "--max-fetched-bytes" in refused.text
            assert "messages" in refused.text
        finally:
            held.release.set()
        assert first.result().status_code == 200
    assert client.post("/v1/chat/completions", json=body).status_code == 200, "and is free again"


def test_memory_goes_back_by_what_pictures_took(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(lanes.Lanes, "give_back", lambda _: given.append(1))
    assert client.post("/v1/chat/completions", json=asked(data_url(50))).status_code == 200
    assert not given
    monkeypatch.setattr(lanes, "USED", 100)
    assert client.post("/v1/chat/completions", json=asked(data_url(51))).status_code == 200
    assert len(given) == 1
    assert client.post("/v1/chat/completions", json=asked()).status_code == 200
    assert len(given) == 1


def test_a_recipe_of_videos_crosses_too(boxed: Decoder) -> None:
    from toolkit.models.eyes.videos import Video

    recipe = replace(TILES, video=Video(changes={"kind": "square"}))
    assert boxed.picture(FILES["png"], recipe, Rules(), True, "image").tokens


def test_what_is_prepared_has_a_limit_until_nobody_has_it() -> None:
    rules = Rules(max_prepared_bytes=100_000)
    eyes = Eyes(replace(TILES, most=1), rules, decoder=Decoder.of(rules), kept=Kept(most=0))
    room = eyes.decoder.prepared
    message = [{"role": "user", "content": [{"type": "image_url", "image_url": data_url(60)}]}]
    first = eyes.look(message)
    assert room is not None and room.held == sum(part.nbytes for part in first[0].parts) > 0
    held = [first]
    with pytest.raises(BusyError, match=r"content\[0\]: image \(data URL\): others fill the server's --max-prepared"):
        while len(held) < 100:
            held.append(eyes.look(message))
    assert len(held) > 1
    view = held[0][0].pixels[0]
    del first
    held.clear()
    assert room.held == view.base.nbytes, "a view holds it too"
    del view
    assert room.held == 0


def test_with_what_is_kept_none_is_counted_twice() -> None:
    rules = Rules(max_prepared_bytes=100_000)
    eyes = Eyes(replace(TILES, most=1), rules, decoder=Decoder.of(rules))
    message = [{"role": "user", "content": [{"type": "image_url", "image_url": data_url(61)}]}]
    room = eyes.decoder.prepared
    (first,) = eyes.look(message)
    assert room is not None and room.held == first.pixels.nbytes
    for _ in range(50):
        assert eyes.look(message)[0] is first
    assert room.held == first.pixels.nbytes


def test_a_request_that_has_waited_long_enough_calls_its_work_off(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Ticket] = []
    ended = threading.Event()

    def slow(decoder: Decoder, data: bytes, *rest: Any) -> Any:
        given.append(rest[-1])
        while not given[0].cancelled:
            ended.wait(0.01)
        ended.set()
        raise BusyError("given up")

    monkeypatch.setattr(Decoder, "picture", slow)
    settings = ServerSettings(model_name="tiny", limits=Limits(prompt_timeout=1.0))
    with TestClient(create_app(pipe.engine, pipe.chat_template, settings)) as impatient:
        found = impatient.post("/v1/chat/completions", json=asked(data_url(70)))
        assert found.status_code == 400 and "--prompt-timeout" in found.text
        assert ended.wait(60) and len(given) == 1
