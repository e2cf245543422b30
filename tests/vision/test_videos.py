"""Videos: the frames that a file has, the pictures they become, and what models say of them: the oracle is
transformers, its class on the same float32 weights and its own sizes, positions and words."""

from __future__ import annotations

import base64
import io
import json
import shutil
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from starlette.testclient import TestClient
from typer.testing import CliRunner

from toolkit import GenerationConfig, PytorchEngineConfig, pipeline
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.base import extras
from toolkit.box.box import Box, Crowded
from toolkit.chat.conversation import Conversation
from toolkit.commands.main import app as tool
from toolkit.engine.core import EngineCore
from toolkit.engine.options import EngineOptions
from toolkit.engine.pictures.spans import axes_of, find_spans
from toolkit.engine.process.records import pack_add, read_request, unpack
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.errors import UsageError
from toolkit.models.eyes.pictures import Picture
from toolkit.models.eyes.videos import Frame, Video
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native.library import available
from toolkit.serve.app import create_app
from toolkit.serve.options import ServerSettings
from toolkit.vision.clip import Clip
from toolkit.vision.eyes import Eyes
from toolkit.vision.images import Rules, Sampling
from toolkit.vision.kept import Kept
from toolkit.vision.sampling import media_sampling
from toolkit.vision.video_job import choose
from toolkit.vision.videos import Reader, of_frames
from toolkit.vl import load_video

BACKENDS = ("pytorch", "turbomind") if available() is None else ("pytorch",)
CONFIG = PytorchEngineConfig(session_len=400, max_batch_size=2, dtype="float32", device_type="cpu", block_size=16)
SHORT = GenerationConfig(max_new_tokens=4)
TIMED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")
WHOLE = ("qwen3_vl", "glm4v")  # where limits are of all frames
RATE = 10  # frames a second of the files


READER = Reader()


def loaded(source: Any, **options: Any) -> Clip:
    return READER.open(source, Rules(), Sampling(**options), Video())


def written(file: Path, frames: int, size: tuple[int, int] = (64, 48), codec: str = "mpeg4") -> Path:
    """A video whose frames grow brighter."""
    import av

    with av.open(str(file), "w") as container:
        stream = container.add_stream(codec, rate=RATE, options={"g": "12"} | ({"bf": "2"} if codec == "mpeg4" else {}))
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p"
        for i in range(frames):
            picture = np.full((size[1], size[0], 3), i * 255 // frames, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return file


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("videos")
    codecs = {"mp4": "mpeg4", "mkv": "mpeg4", "avi": "mpeg4", "webm": "libvpx-vp9"}
    return {name: written(folder / f"a.{name}", 45, codec=codec) for name, codec in codecs.items()}


def clip(frames: int, width: int, height: int, rate: float = 2.0) -> Clip:
    rng = np.random.default_rng(frames * 1000 + width)
    made = []
    for _ in range(frames):
        coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), np.uint8))
        made.append(np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)))
    return of_frames(np.stack(made), Rules(), rate)


# -- files


@pytest.mark.parametrize("kind", ["mp4", "mkv", "avi", "webm"])
def test_frames_are_those_of_the_file(files: dict[str, Path], kind: str) -> None:
    """Found by jumping from key frame to key frame, equal to those found by decoding all."""
    import av

    with av.open(str(files[kind])) as container:
        every = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    for options, count in (({}, 9), ({"num_frames": 4}, 4), ({"fps": 1.0}, 4), ({"num_frames": 99}, 45)):
        found = loaded(str(files[kind]), **options)
        assert len(found) == count and found.rate == pytest.approx(count / 4.5, rel=0.03)
        assert found.seconds == pytest.approx([i / RATE for i in choose(45, 4.5, count, None, 1, False)], abs=0.01)
        expected = [every[i] for i in choose(45, 4.5, count, None, 1, False)]
        np.testing.assert_array_equal(found.frames, expected)


@given(
    st.integers(1, 10_000), st.floats(0.1, 1e4), st.integers(1, 256), st.none() | st.floats(0.01, 120), st.booleans()
)
def test_chosen_frames_rise_and_are_there(
    total: int, duration: float, count: int, fps: float | None, middle: bool
) -> None:
    found = choose(total, duration, count, fps, 4, middle)
    assert 1 <= len(found) <= min(count, total)
    assert found == sorted(set(found)) and 0 <= found[0] and found[-1] < total
    assert fps is not None or len(found) == min(count, total)


@pytest.mark.parametrize(("field", "ticks"), [("duration", 2000), ("start", 8192)])
def test_frames_that_an_edit_list_cuts_away_are_none(tmp_path: Path, field: str, ticks: int) -> None:
    """Phones trim a video by its edit list alone: what is cut away stays in the file, and is decoded for the rest."""
    import av

    data = bytearray(written(tmp_path / "a.mp4", 45, codec="libx264").read_bytes())
    at = data.index(b"elst") + 12  # its first entry: duration in thousandths of a second, start in the track's ticks
    struct.pack_into(">I", data, at + (0 if field == "duration" else 4), ticks)
    with av.open(io.BytesIO(data)) as container:
        shown = [(float(frame.time), frame.to_ndarray(format="rgb24")) for frame in container.decode(video=0)]
    assert 10 < len(shown) < 45, "nothing is cut away, or everything"
    found = loaded(bytes(data), num_frames=99)
    np.testing.assert_array_equal(found.frames, [pixels for _, pixels in shown])
    np.testing.assert_allclose(found.seconds, [time - shown[0][0] for time, _ in shown], atol=1e-6)
    assert len(loaded(bytes(data), num_frames=5)) == 5


def test_a_turned_video_is_shown_upright(tmp_path: Path) -> None:
    import av

    written(tmp_path / "a.mp4", 3)
    with av.open(str(tmp_path / "a.mp4")) as source, av.open(str(tmp_path / "b.mp4"), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                target.mux(packet)
    data = bytearray((tmp_path / "b.mp4").read_bytes())
    at = data.index(b"tkhd") + 44  # the matrix of version 0: a quarter turn
    quarter = [0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30]
    data[at : at + 36] = b"".join(x.to_bytes(4, "big", signed=True) for x in quarter)
    assert loaded(str(tmp_path / "a.mp4")).frames.shape[1:3] == (48, 64)
    assert loaded(bytes(data)).frames.shape[1:3] == (64, 48)


def test_what_is_wrong_with_a_file_is_one_line(files: dict[str, Path], tmp_path: Path) -> None:
    data = files["mp4"].read_bytes()
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG")
    playlist = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"
    for source, rules, message in (
        (data[: len(data) // 2], {}, "broken or cut off"),
        (image.getvalue(), {}, r"expected a video \(MP4"),
        (playlist, {}, r"expected a video \(MP4"),
        (b"", {}, "found 0 bytes"),
        (data, {"max_video_bytes": 100}, "at most 100 bytes"),
        (data, {"max_video_seconds": 2.0}, "at most 2 s, found 4 s"),
        (data, {"max_pixels": 1000}, "at most 1,000 pixels, found 64 x 48"),
        (str(files["mp4"]), {"files": ()}, "files are not read here"),
        ("http://127.0.0.1:9/a.mp4", {}, "not public"),
        ("data:video/mp4;base64,####", {}, "expected base64"),
        ("/nowhere.mp4", {}, "no such file"),
        (7, {}, "expected a URL, a path, bytes or frames"),
        ([], {}, "1 to 256 frames, found 0"),
        (np.zeros((2, 3), np.uint8), {}, r"uint8 \[frames, height, width, 3\]"),
        (Clip(np.zeros((0, 8, 8, 3), np.uint8), (), 2.0), {}, r"uint8 \[frames, height, width, 3\], found uint8 \[0"),
        (Clip(np.zeros((1, 8, 8, 3), np.float32), (0.0,), 2.0), {}, r"found float32"),
        (Clip(np.zeros((2, 8, 8, 3), np.uint8), (0.0,), 2.0), {}, "a second for each frame.*found 1 for 2 frames"),
        (Clip(np.zeros((1, 8, 8, 3), np.uint8), (0.0,), 0.0), {}, "a rate above 0.*0.0 a second"),
    ):
        with pytest.raises(UsageError, match=message) as told:
            READER.open(source, Rules(**rules), Sampling(), Video())
        assert "\n" not in str(told.value)
    with pytest.raises(UsageError, match="num_frames: expected 1 to 256, found 257"):
        loaded(data, num_frames=257)


def test_without_pyav_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, files: dict[str, Path]) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UsageError, match=r"videos: av is not installed.*pip install .*\[vision\]"):
        load_video(str(files["mp4"]))


@pytest.mark.parametrize(
    "given", ["{", "[]", "[" * 100_000, '{"video": 1}', '{"video": {"frames": 3}}', '{"sound": {}}']
)
def test_media_options_that_are_none(given: str) -> None:
    with pytest.raises(UsageError, match="media_io_kwargs: expected"):
        media_sampling(given)
    found = CliRunner().invoke(tool, ["chat", "/no/model", "--prompt", "x", "--media-io-kwargs", given])
    assert isinstance(found.exception, UsageError) and str(found.exception).startswith("--media-io-kwargs: expected")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ('{"video": {"fps": 0}}', "--media-io-kwargs: fps: expected a number above 0, 120 at most, found 0"),
        (
            '{"video": {"num_frames": 129}}',
            r"--media-io-kwargs: expected num_frames of at most 128 \(--max-video-frames\), found 129",
        ),
    ],
)
def test_a_server_does_not_start_with_media_options_that_no_request_could_have(given: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}$"):
        ServerSettings(media_io_kwargs=given).check()


# -- what a model is shown


def eyes_of(tiny_models: Any, family: str) -> Eyes:
    found = Eyes.open(tiny_models(family))
    assert found is not None
    if family in TIMED:  # sizes of theirs are of whole models
        area = found.recipe.unit**2
        video = replace(found.recipe.video, least=area * 4, most=area * (80 if family in WHOLE else 30))
        return replace(found, recipe=replace(found.recipe, video=video))
    return found


def shown(source: Any, **options: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "video_data", "video_data": {"data": source, **options}}]}]


@pytest.mark.parametrize("family", TIMED)
@pytest.mark.parametrize("size", [(5, 50, 37), (1, 31, 62), (8, 140, 9), (3, 300, 200)], ids=str)
def test_sizes_and_numbers_are_transformers(tiny_models: Any, family: str, size: tuple[int, int, int]) -> None:
    """Their processors resize by torch's kernel, which rounds some numbers of 0 to 255 otherwise, by 2 at most."""
    import torch
    from transformers.models.glm4v.video_processing_glm4v import smart_resize as of_all
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as of_each

    count, width, height = size
    eyes, made = eyes_of(tiny_models, family), clip(*size)
    video, recipe = eyes.recipe.video, eyes.recipe
    pictures = eyes.look(shown(made))
    assert video is not None and len(pictures) == -(-count // 2)
    limits = {"factor": recipe.unit, "min_pixels": video.least, "max_pixels": video.most}
    if video.whole:
        wanted = of_all(max(count, 2), height, width, **limits)
    else:
        wanted = of_each(height, width, **limits)
    frames = torch.from_numpy(made.frames).permute(0, 3, 1, 2).contiguous()
    frames = torch.nn.functional.interpolate(frames, wanted, mode="bicubic", antialias=True).numpy()
    found = np.concatenate([p.pixels.reshape(3, 2, *wanted).transpose(1, 0, 2, 3) for p in pictures])
    mean, std = (np.array(x, np.float32).reshape(3, 1, 1) for x in (recipe.mean, recipe.std))
    np.testing.assert_allclose(found[:count] * std + mean, frames / 255, atol=2.01 / 255)
    if count % 2:
        np.testing.assert_array_equal(found[count], found[count - 1])


def test_the_models_own_file_counts(tiny_models: Any, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(tiny_models("qwen3_vl"), own)
    given = {"size": {"shortest_edge": 14 * 14, "longest_edge": 14 * 14 * 20}, "fps": 1, "image_mean": [0.1, 0.2, 0.3]}
    (own / "video_preprocessor_config.json").write_text(json.dumps(given))
    found = Eyes.open(own)
    assert found is not None and found.recipe.video is not None
    assert (found.recipe.video.least, found.recipe.video.most, found.recipe.video.fps) == (196, 3920, 1.0)
    assert found.recipe.video.changes["mean"] == (0.1, 0.2, 0.3)
    assert sum(p.tokens for p in found.look(shown(clip(8, 300, 200)))) <= 20 // 2


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen2_vl", "<|vision_start|>{0}{1}<|vision_end|>"),
        ("qwen2_5_vl", "<|vision_start|>{0}{1}<|vision_end|>"),
        (
            "qwen3_vl",
            "<0.2 seconds><|vision_start|>{0}<|vision_end|><1.0 seconds><|vision_start|>{1}<|vision_end|>",
        ),
        (
            "glm4v",
            "<|begin_of_video|><|begin_of_image|>{0}<|end_of_image|>0<|begin_of_image|>{1}<|end_of_image|>1"
            "<|end_of_video|>",
        ),
        ("llava_onevision", "{0}{1}{2}\n"),
        ("internvl", "Frame1: <img>{0}</img>\nFrame2: <img>{1}</img>\nFrame3: <img>{2}</img>\n"),
        ("gemma4", "00:00 <|image>{0}<image|> 00:00 <|image>{1}<image|> 00:01 <|image>{2}<image|>"),
        ("gemma4_unified", "00:00 <|image>{0}<image|> 00:00 <|image>{1}<image|> 00:01 <|image>{2}<image|>"),
        ("minicpmv", "<image>{0}</image>\n<image>{1}</image>\n<image>{2}</image>\n"),
    ],
)
def test_videos_are_spelled_as_the_authors_do(tiny_models: Any, family: str, expected: str) -> None:
    eyes, made = eyes_of(tiny_models, family), clip(3, 30, 28)
    messages = [{"role": "user", "content": [*shown(made)[0]["content"], {"type": "image_data", "image_data": _PNG}]}]
    pictures = eyes.look(messages)
    token = eyes.recipe.token
    text = eyes.spell(f"{eyes.recipe.written}what{eyes.recipe.written}", pictures)
    video = [token * p.tokens for p in pictures if p.frame is not None]
    assert text.startswith(expected.format(*video) + "what")
    assert text.count(token) == sum(p.tokens for p in pictures)
    with pytest.raises(UsageError, match="found 2 images and 1 places"):
        eyes.spell(eyes.recipe.written, pictures)


def test_times_are_those_of_the_second(tiny_models: Any) -> None:
    for family, rate, expected in (
        ("qwen2_vl", 2.0, [0, 1, 2]),
        ("qwen2_5_vl", 2.0, [0, 4, 8]),  # 4 a second
        ("qwen2_5_vl", 24.0, [0, 0, 0]),
        ("qwen2_5_vl", 6.0, [0, 1, 2]),
        ("qwen3_vl", 2.0, [None] * 3),
    ):
        pictures = eyes_of(tiny_models, family).look(shown(clip(5, 30, 28, rate)))
        assert [p.frame.time for p in pictures] == expected
        assert [p.frame.follows for p in pictures] == [False, True, True]


def test_a_video_is_decoded_once(tiny_models: Any, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """By its content, however it comes; with other options anew."""
    decoded: list[int] = []
    run = Box.run

    def counted(self: Box, value: Any, *given: Any, **more: Any) -> Any:
        decoded.extend([] if value.get("measure") else [1])
        return run(self, value, *given, **more)

    monkeypatch.setattr(Box, "run", counted)
    eyes = eyes_of(tiny_models, "internvl")
    data = files["mp4"].read_bytes()
    first = eyes.look(shown(str(files["mp4"])))
    again = eyes.look(shown(data) + shown(f"data:video/mp4;base64,{base64.b64encode(data).decode()}"))
    assert len(decoded) == 1 and [p.digest for p in again] == [p.digest for p in first] * 2
    assert all(a.pixels is b.pixels for a, b in zip(again, first, strict=False))
    assert len(eyes.look(shown(str(files["mp4"]), num_frames=2))) == 2 < len(first)
    assert len(eyes.taking({"video": {"num_frames": 3}}).look(shown(data))) == 3 and len(decoded) == 3
    eyes.look(shown(files["mkv"].read_bytes()))
    assert len(decoded) == 4


def test_what_is_kept_is_bounded() -> None:
    """The least used go first; what is larger than all that may be kept passes through; limits hold again and again."""

    def one(name: int, count: int = 1) -> list[Picture]:
        return [Picture(np.full((1, 3, 10, 10), name, np.float32), (1, 1), (1, 1), 1, bytes([name]))] * count

    kept = Kept(most=3 * 1200)
    for name in range(3):
        assert [p.digest for p in kept.keeping(bytes([name]), iter(one(name)))] == [bytes([name])]
    assert kept.get(b"\0") is not None
    list(kept.keeping(b"\3", iter(one(3))))
    assert kept.get(b"\1") is None and all(kept.get(bytes([i])) for i in (0, 2, 3))
    assert len(list(kept.keeping(b"\4", iter(one(4, 4))))) == 4 and kept.get(b"\4") is None
    broken = kept.keeping(b"\5", (x / 0 for x in (1,)))  # type: ignore[arg-type, misc]
    with pytest.raises(ZeroDivisionError):
        list(broken)
    assert kept.get(b"\5") is None
    some = kept.keeping(b"\6", iter(one(6, 2)))
    next(some)
    some.close()  # what nobody takes to the end is not whole
    assert kept.get(b"\6") is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), max_size=40))
def test_what_is_kept_is_what_was_made(asked: list[tuple[int, int]]) -> None:
    kept, sizes = Kept(most=400), dict[int, int]()
    for name, size in asked:
        size = sizes.setdefault(name, size)
        made = [Picture(np.zeros((1, 1, size, 10), np.float32), (1, 1), (1, 1), size, bytes([name]))]
        found = kept.get(bytes([name]))
        assert found is None or found[0].tokens == size
        if found is None:
            list(kept.keeping(bytes([name]), iter(made)))
        assert kept._bytes == sum(p.pixels.nbytes for some in kept._found.values() for p in some) <= 400


def test_a_model_without_videos_says_so(tiny_models: Any) -> None:
    with pytest.raises(UsageError, match=r"content\[0\]: this model takes no videos; send frames of it as images"):
        eyes_of(tiny_models, "llava").look(shown(clip(2, 30, 28)))


@pytest.mark.parametrize("options", [{"num_frames": 0}, {"num_frames": 1.5}, {"fps": 0}, {"fps": "a"}, {"fps": 1000}])
def test_sampling_has_limits(tiny_models: Any, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"(num_frames|fps): expected a"):
        eyes_of(tiny_models, "internvl").look(shown(clip(2, 30, 28), **options))


# -- positions


@pytest.mark.parametrize("rate", [24.0, 8.0, 6.0])
def test_positions_of_videos_are_transformers(rate: float) -> None:
    """A video between texts and a picture: where its time stays within its rows and columns."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    step = np.float32(4 * 2 / rate)
    frames = [Picture(_BLANK, (2, 4), (1, 1), 8, b"", frame=Frame(i > 0, int(i * step))) for i in range(3)]
    pictures = [*frames, Picture(_BLANK, (3, 1), (1, 1), 3, b"")]
    ids = [1, 2, *[5] * 24, 3, 3, *[5] * 3, 4, 4]
    axes, shift = axes_of(len(ids), find_spans(ids, pictures, 5))
    model = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen2_5_VLConfig(vision_config={"spatial_merge_size": 2, "tokens_per_second": 4})
    kinds = (torch.tensor([ids]) == 5).int()
    kinds[0, 2:26] = 2
    expected, delta = model.get_rope_index(
        torch.tensor([ids]),
        kinds,
        image_grid_thw=torch.tensor([[1, 6, 2]]),
        video_grid_thw=torch.tensor([[3, 4, 8]]),
        second_per_grid_ts=[2 / rate],
    )
    np.testing.assert_array_equal(axes, expected[:, 0].numpy())
    assert shift == int(delta)


def test_text_goes_on_behind_the_time_of_a_long_video() -> None:
    """As the models' authors and the paper have it: behind the largest position there is."""
    frames = [Picture(_BLANK, (1, 2), (1, 1), 2, b"", frame=Frame(i > 0, 4 * i)) for i in range(4)]
    ids = [1, *[5] * 8, 3, 3]
    axes, shift = axes_of(len(ids), find_spans(ids, frames, 5))
    assert axes[0].tolist() == [0, 1, 1, 5, 5, 9, 9, 13, 13, 14, 15]
    assert axes[2].tolist() == [0, 1, 2, 1, 2, 1, 2, 1, 2, 14, 15] and shift == 16 - len(ids)


# -- answers


@pytest.fixture(scope="module", params=[*TIMED, "llava_onevision", "internvl"])
def asked(request: Any, tiny_models: Any) -> Any:
    """(path, ids, pictures, transformers' logits) of a question about a video, between two texts."""
    import torch
    from transformers import AutoModelForImageTextToText

    family, path = request.param, tiny_models(request.param)
    eyes, tokenizer = eyes_of(tiny_models, family), Tokenizer.open(path)
    pictures = eyes.look(shown(clip(5, 50, 37, rate=6.0)))
    text = eyes.spell(f"what {eyes.recipe.written} is it", pictures)
    ids = tokenizer.encode(text, add_special_tokens=False)
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    image, video = model.config.image_token_id, 8
    theirs = torch.tensor([ids])
    inputs: dict[str, Any] = {}
    if family in TIMED:
        patches = [blocks(p.pixels[0], model.config.vision_config.patch_size) for p in pictures]
        rows, columns = (2 * n for n in pictures[0].grid)
        inputs["pixel_values_videos"] = torch.from_numpy(np.concatenate(patches))
        inputs["video_grid_thw"] = torch.tensor([[len(pictures), rows, columns]])
        inputs["mm_token_type_ids"] = (theirs == image).int() * 2
        if family == "qwen2_5_vl":
            inputs["second_per_grid_ts"] = [2 / 6]
    else:
        pixels = torch.from_numpy(np.concatenate([p.pixels for p in pictures]))
        inputs |= {"pixel_values": pixels} if family == "internvl" else {"pixel_values_videos": pixels[None]}
    if family not in ("internvl", "glm4v"):
        model.config.video_token_id = video
        theirs = torch.where(theirs == image, video, theirs)
    with torch.inference_mode():
        logits = model(input_ids=theirs, use_cache=False, **inputs).logits[0].numpy()
    return path, ids, pictures, logits


def blocks(pixels: np.ndarray, side: int) -> np.ndarray:
    """[3 x 2, height, width] as flat patches in the order of blocks of two by two, as their processors have it."""
    _, height, width = pixels.shape
    x = pixels.reshape(3, 2, height // side // 2, 2, side, width // side // 2, 2, side)
    return x.transpose(2, 5, 3, 6, 0, 1, 4, 7).reshape(height // side * (width // side), -1)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_are_transformers(asked: Any, backend: Any) -> None:
    """In chunks that cut the video; a request goes to the engine's process as bytes."""
    path, ids, pictures, expected = asked
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16, threads=1)
    runner, _ = open_runner(path, backend=backend, options=options)
    runner.load_weights()
    blocks = (64,) * len(runner.spec.cache_groups)
    runner.allocate_cache(blocks)
    limits: Any = {"session_len": 512, "max_batch_size": 2, "max_prefill_token_num": 13, "num_blocks": blocks}
    core = EngineCore(runner, EngineOptions(**limits, check=True), None)
    sent = EngineRequest("a", ids, SamplingParams(max_new_tokens=1, logits="all"), pictures=pictures)
    message, data = unpack(pack_add(sent))
    core.add(read_request(message, data, {}))
    found = []
    while core.has_work:
        for out in core.step():
            assert out.error is None, out.error
            found += [] if out.logits is None else [out.logits]
    assert expected.std() > 0.2
    got = np.concatenate(found)[: len(ids), : expected.shape[1]]
    np.testing.assert_allclose(got, expected, rtol=3e-4, atol=3e-4)


_BLANK = np.zeros((1, 3, 1, 1), np.float32)
_PNG = {"data": Image.new("RGB", (40, 30), "red")}


# -- fronts


@pytest.fixture(scope="module")
def pipe(tiny_models: Any) -> Any:
    with pipeline(str(tiny_models("internvl")), CONFIG, media_io_kwargs={"video": {"num_frames": 3}}) as opened:
        yield opened


@pytest.fixture(scope="module")
def client(pipe: Any) -> Any:
    settings = ServerSettings(model_name="tiny", media_io_kwargs='{"video": {"num_frames": 3}}')
    with TestClient(create_app(pipe.engine, pipe.chat_template, settings)) as opened:
        yield opened


def test_pipeline_and_server_see_the_same_frames(pipe: Any, client: Any, files: dict[str, Path]) -> None:
    url = f"data:video/mp4;base64,{base64.b64encode(files['mp4'].read_bytes()).decode()}"
    frames = choose(45, 4.5, 3, None, 1, middle=True)  # as InternVL's authors take them
    cut = list(load_video(str(files["mp4"]), num_frames=45).frames[frames])
    text = {"type": "text", "text": "what"}

    def message(part: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [part, text]}]

    forms: list[Any] = [
        message({"type": "video_url", "video_url": {"url": str(files["mp4"])}}),
        message({"type": "video", "video": url}),
        (of_frames(np.stack(cut), Rules(), 1.0), "what"),
    ]
    answers = pipe(forms, gen_config=SHORT)
    assert not any(a.error_message for a in answers)
    assert len({tuple(a.token_ids) for a in answers}) == 1 and len({a.input_token_len for a in answers}) == 1
    part = {"type": "video_url", "video_url": {"url": url}}
    body = {"model": "tiny", "max_tokens": 4, "temperature": 0, "messages": message(part)}
    found = client.post("/v1/chat/completions", json=body).json()
    assert found["choices"][0]["message"]["content"] == answers[0].text
    assert found["usage"]["prompt_tokens"] == answers[0].input_token_len

    def tokens(**more: Any) -> int:
        return client.post("/v1/chat/completions", json=body | more).json()["usage"]["prompt_tokens"]

    one = tokens(media_io_kwargs={"video": {"num_frames": 1}})
    assert one < found["usage"]["prompt_tokens"] < tokens(media_io_kwargs={"video": {"num_frames": 5}})
    part["video_url"]["num_frames"] = 1  # the part's own goes before
    assert tokens(media_io_kwargs={"video": {"num_frames": 5}}) == one


@pytest.mark.parametrize(
    ("given", "more", "message"),
    [
        ({"url": "/etc/passwd"}, {}, "files are not read here"),
        ({"url": "http://127.0.0.1:9/a.mp4"}, {}, "not public"),
        ({"url": "data:video/mp4;base64,aGVsbG8="}, {}, "expected a video (MP4"),
        (
            {"url": "data:video/mp4;base64,aGVsbG8=", "num_frames": 4096},
            {},
            "num_frames: expected 1 to 128, found 4096",
        ),
        ({"link": 1}, {}, "video_url"),
        ("data:,", {"media_io_kwargs": {"video": {"frames": 1}}}, "media_io_kwargs"),
    ],
    ids=str,
)
def test_the_server_refuses_in_one_line(client: Any, given: Any, more: dict[str, Any], message: str) -> None:
    content = [{"type": "video_url", "video_url": given}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], **more}
    found = client.post("/v1/chat/completions", json=body)
    told = found.json()["error"]["message"]
    assert found.status_code == 400 and message in told and "\n" not in told, found.text


def test_videos_that_take_long_hold_up_no_other_prompt(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    began, release = threading.Semaphore(0), threading.Event()
    given: list[float] = []

    run = Box.run

    def slow(self: Box, value: Any, data: bytes = b"", ticket: Any = None, cpu_seconds: float = 0.0) -> Any:
        if "num_frames" not in value:  # a template is rendered
            return run(self, value, data)
        given.append(cpu_seconds)
        began.release()
        release.wait(60)
        raise Crowded("try again")

    monkeypatch.setattr(Box, "run", slow)
    part = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAAAGZ0eXA="}}
    text = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "what"}]}
    body = text | {"messages": [{"role": "user", "content": [part]}]}
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(client.post, "/v1/chat/completions", json=body) for _ in range(6)]
        try:
            assert all(began.acquire(timeout=60) for _ in range(2))
            assert (other := client.post("/v1/chat/completions", json=text)).status_code == 200, other.text
            assert len(given) == 2 and not any(one.done() for one in waiting)  # two have frames in memory at once
        finally:
            release.set()
        found = [one.result() for one in waiting]
    assert {one.status_code for one in found} == {503} and "Retry-After" in found[0].headers
    assert "cannot be decoded now: try again" in found[0].json()["error"]["message"]
    assert max(given) <= ServerSettings().limits.prompt_timeout


def test_the_videos_of_a_request_have_one_deadline(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def ran(self: Box, value: Any, data: bytes, ticket: Any, cpu_seconds: float) -> Any:
        if value.get("measure"):
            return {"bytes": 28 * 28 * 3}, b""
        given.append(cpu_seconds)
        return {"shape": [28, 28, 3], "seconds": [0.0], "rate": 1.0}, bytes(28 * 28 * 3)

    monkeypatch.setattr(Box, "run", ran)
    files = (base64.b64encode(b"\0\0\0\0ftyp" + bytes([i])).decode() for i in range(2))
    parts = [{"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{file}"}} for file in files]
    messages = [{"role": "user", "content": parts}]
    pipe.reader.eyes.look(messages, decoding=50.0)
    assert 50 > given[0] > given[1] > 0
    other = base64.b64encode(b"\0\0\0\0ftyp other").decode()
    messages[0]["content"] = [{"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{other}"}}]
    with pytest.raises(UsageError, match=r"content\[0\]: video.*no time left to decode"):
        pipe.reader.eyes.look(messages, decoding=0.0)


def test_the_terminal_shows_videos(pipe: Any, files: dict[str, Path], tmp_path: Path) -> None:
    talk = Conversation(SHORT)
    talk.show(pipe.checked_video(str(files["mp4"])), "video_url")
    talk.say("user", "what")
    part = {"type": "video_url", "video_url": {"url": str(files["mp4"])}}
    expected = pipe([{"role": "user", "content": [part, {"type": "text", "text": "what"}]}], gen_config=SHORT)
    assert pipe(talk.messages(), gen_config=SHORT).token_ids == expected.token_ids
    talk.save(tmp_path / "talk.json", "m")
    other = Conversation(SHORT)
    other.load(tmp_path / "talk.json")
    assert other.messages() == talk.messages()
    with pytest.raises(UsageError, match="expected a video"):
        pipe.checked_video(__file__)


def test_models_that_take_none_say_so(tiny_models: Any, files: dict[str, Path]) -> None:
    part = {"type": "video_url", "video_url": {"url": str(files["mp4"])}}
    for family, message in (("llava", "this model takes no videos"), ("llama", "this model reads text alone")):
        with pipeline(str(tiny_models(family)), CONFIG) as opened:
            answer = opened([{"role": "user", "content": [part]}], gen_config=SHORT)
            assert message in answer.error_message and "\n" not in answer.error_message
            with pytest.raises(UsageError, match="takes no videos"):
                opened.checked_video(str(files["mp4"]))
