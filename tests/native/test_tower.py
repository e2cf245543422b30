"""What models see with, on the native library, against the same in torch in float32."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from toolkit.convert.convert import convert
from toolkit.convert.options import Packing
from toolkit.errors import UsageError
from toolkit.models.eyes.patches import resized
from toolkit.models.eyes.pictures import Picture
from toolkit.models.eyes.vision import PREFIX
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_model
from toolkit.runners.native import library
from toolkit.runners.native.packing.pack_model import pack_model
from toolkit.runners.native.packing.packed import INT
from toolkit.runners.native.runner import NativeRunner
from toolkit.runners.native.towers.encoders import open_encoder
from toolkit.runners.native.towers.tower import NativeEncoder
from toolkit.runners.tensor.towers.encoders import encoder_of
from toolkit.vision.eyes import Eyes

pytestmark = pytest.mark.skipif(library.available() is not None, reason="the native library does not run here")
FAMILIES = [(name, 0) for name in ("llava", "qwen2_5_vl", "mistral3", "qwen_vl", "glm4v_9b", "cogvlm", "mllama")]
FAMILIES += [
    ("deepseek_vl_hybrid", 0),
    ("molmo", 0),
    ("mgm", 0),
    ("mgm", 1),
    ("internvl_chat", 2),
    ("gemma4", 0),
    ("gemma4", 1),
    ("gemma4_unified", 0),
    ("gemma4_unified", 1),
]


class Towers:
    """A tiny model's tower in torch, and on the library in ``bits``."""

    def __init__(self, path: Path) -> None:
        self.path, self.spec = path, (opened := open_model(path)).spec
        self.weights = opened.weights()
        assert self.spec.vision is not None
        self.vision = self.spec.vision

    def expected(self, pictures: list[Picture]) -> list[np.ndarray]:
        encoder = encoder_of(self.vision)(self.vision, self.weights, torch.device("cpu"), torch.float32)
        return [rows.numpy() for rows in encoder.encode(pictures)]

    def native(self, bits: int, threads: int = 2) -> NativeEncoder:
        seeing = ((name, self.weights[name]) for name in self.weights if name.startswith(PREFIX))
        packed = dict(pack_model(self.spec, seeing, None, [], bits))
        return open_encoder(self.vision, packed, bf16=bits != 32, threads=threads)


def pictures(towers: Towers) -> list[Picture]:
    """Of different sizes where the tower takes them."""
    tower, rng, found = towers.vision.tower, np.random.default_rng(0), list[Picture]()
    if towers.vision.high or towers.vision.fine or towers.vision.overlap:
        return photos(towers, (75, 40), (31, 62), (20, 20))
    merge = towers.vision.merge
    for i, (rows, columns) in enumerate(((4, 6), (12, 8), (2, 2))):
        if tower.positions == "learned" and not tower.sides:
            rows, columns = tower.grid
        grid = tower.shapes[-i] if tower.tiles else (rows, columns)  # of tiles that see each other, or of patches
        tiles = grid[0] * grid[1] if tower.tiles else 1
        size = (tiles, 3, rows * tower.patch, columns * tower.patch)
        tokens = tiles * rows * columns // merge**2
        found.append(Picture(rng.normal(size=size).astype(np.float32), grid, size[2:], tokens, b""))
    return found


def photos(towers: Towers, *sizes: tuple[int, int]) -> list[Picture]:
    """As the model's own recipe prepares them: in several sizes, or in tiles that overlap."""
    eyes, content = Eyes.open(towers.path), []
    assert eyes is not None
    for size in sizes:
        coarse = np.random.default_rng(size[0]).integers(0, 256, (5, 5, 3), np.uint8)
        file = io.BytesIO()
        Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(file, "PNG")
        content.append({"type": "image", "image": file.getvalue()})
    return eyes.look([{"role": "user", "content": content}])


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda x: f"{x[0]}-{x[1]}")
def towers(request: Any, tiny_models: Any) -> Towers:
    family, shape = request.param
    return Towers(tiny_models(family, shape=shape, dtype="bfloat16"))


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("isa", library.isas() if library.unloadable() is None else [])
def test_rows_are_those_of_torch(isa: str, towers: Towers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    several = pictures(towers)
    expected = towers.expected(several)
    errors = {}
    for bits in (32, 16, 8):
        found = towers.native(bits).encode(several)
        assert [rows.shape for rows in found] == [rows.shape for rows in expected]
        errors[bits] = distance(np.concatenate(found), np.concatenate(expected))
    close = 0.04 if towers.vision.tower.clipped else 0.02  # where scores are large; torch's bfloat16 is off by 0.046
    assert errors[32] < 1e-5 and errors[16] < close and (5e-4 < errors[8] < 0.1 or not towers.vision.tower.taken)


@pytest.mark.parametrize("bits", [16, 8])
def test_a_picture_is_the_same_beside_others_and_on_any_threads(bits: int, towers: Towers) -> None:
    several = pictures(towers)
    together = towers.native(bits).encode(several)
    for threads in (1, 3):
        encoder = towers.native(bits, threads)
        for found, picture in zip(together, several, strict=True):
            np.testing.assert_array_equal(encoder.encode([picture])[0], found)
        encoder.close()


def test_a_broken_picture_spoils_no_other(towers: Towers) -> None:
    """Neither one beside it nor one that comes afterwards."""
    first, second, *_ = pictures(towers)
    more = None if second.more is None else np.full_like(second.more, np.nan)
    bad = replace(second, pixels=np.full_like(second.pixels, np.nan), more=more)
    encoder = towers.native(16)
    expected = encoder.encode([first])[0]
    for at, batch in ((0, [first, bad]), (1, [bad, first]), (0, [first])):
        np.testing.assert_array_equal(encoder.encode(batch)[at], expected)


@pytest.mark.parametrize("smooth, edges", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("shape", [(3, 8), (5, 7), (1, 1), (13, 4)])
def test_places_are_resized_as_torch_does(shape: tuple[int, int], smooth: bool, edges: bool) -> None:
    values = np.random.default_rng(0).normal(size=(5, 7, 3)).astype(np.float32)
    mode, channels = "bicubic" if smooth else "bilinear", torch.from_numpy(values).permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(channels, shape, mode=mode, align_corners=edges)[0].permute(1, 2, 0)
    np.testing.assert_allclose(resized(values, shape, smooth, edges), expected.numpy(), rtol=1e-4, atol=1e-5)


def test_an_artifact_may_see_in_8_bits(tiny_models: Any, tmp_path: Path) -> None:
    path = tiny_models("llava", dtype="bfloat16")
    convert(str(path), tmp_path / "eight", Packing(target="cpu", vision="int8"), quiet=True)
    kinds = json.loads((tmp_path / "eight" / "engine.json").read_text())["params"]
    layers = [n for n in kinds if n.startswith("vision.layers.") and kinds[n]["kind"] == INT]
    assert len(layers) == 6 * open_model(path).spec.vision.tower.layers  # type: ignore[union-attr]
    towers = Towers(path)
    several = pictures(towers)
    opened = open_model(tmp_path / "eight")
    runner = NativeRunner(opened.spec, opened.weights, RunnerOptions(device="cpu", threads=1))
    for found, rows in zip(runner.encode(several), towers.native(8).encode(several), strict=True):
        np.testing.assert_array_equal(found, rows)
    runner.close()


def test_options_that_cannot_be(tiny_models: Any, tmp_path: Path) -> None:
    for family, options, complaint in (
        ("llava", Packing(vision="int4"), "--vision: expected auto or int8, found 'int4'"),
        ("llama", Packing(vision="int8"), "--vision int8: the model reads text alone"),
        ("llava", Packing(vision="int8", target="torch"), "--vision int8: for target cpu, this is torch"),
    ):
        with pytest.raises(UsageError, match=complaint):
            convert(str(tiny_models(family)), tmp_path / "out", options, quiet=True)
