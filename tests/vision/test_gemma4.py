"""Gemma 4 beside what every family that sees is tried with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.weights import left_out, validate_checkpoint
from toolkit.errors import ToolkitError
from toolkit.models.config.fields import Fields
from toolkit.models.registry import build, find_family, get, load_spec
from toolkit.models.tiny import SIZES, tiny_config
from toolkit.vision.clip import Clip
from toolkit.vision.recipes import prepare
from toolkit.vision.videos import watch

SOUND = dict(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, subsampling_conv_channels=[4, 2], output_proj_dims=32
)


def recipe(shape: int, **given: Any) -> Any:
    family = get("gemma4")
    assert family.recipe is not None
    tiny = family.tiny[shape]
    return family.recipe(Fields(dict(tiny.fields)), Fields({**tiny.preprocessor, **given}))


def test_what_it_hears_with_is_left_out(tiny_models: Any) -> None:
    checkpoint = open_checkpoint(tiny_models("gemma4", audio_config=SOUND))
    spec, stored = load_spec(checkpoint)
    validate_checkpoint(checkpoint, stored)
    told = left_out(checkpoint, stored)
    assert "model.audio_tower" in told and "model.embed_audio" in told and "vision" not in told
    assert spec == load_spec(open_checkpoint(tiny_models("gemma4")))[0]


def test_without_a_tower_it_reads_texts() -> None:
    config = tiny_config(get("gemma4")) | {"vision_config": None}
    assert find_family(config).name == "gemma4_text"
    spec = build(config)[0]
    assert spec.vision is None and spec.layers == build(tiny_config(get("gemma4")))[0].layers


def test_pictures_have_no_more_tokens_than_there_is_room_for() -> None:
    """For all that see each other in one step, or places learned by the tower."""
    assert recipe(1).most == 70 * 21**2
    for shape, tokens, named in (
        (1, 140, "at most 70, vision_config.default_output_length"),
        (0, 280, "the tower has 512 places"),
    ):
        with pytest.raises(ToolkitError, match=f"max_soft_tokens: .*{named}"):
            recipe(shape, max_soft_tokens=tokens)


def test_layers_without_a_window_look_at_nothing_behind() -> None:
    small, large = (build(tiny_config_of(shape))[0] for shape in (0, 1))
    assert not any(a.strict for _, a in small.attention_layers()) and small.together == 0
    assert all(a.strict == (a.window is None) for _, a in large.attention_layers()) and large.together == 70


def tiny_config_of(shape: int) -> dict[str, Any]:
    fields = dict(get("gemma4").tiny[shape].fields)
    fields["text_config"] = {**SIZES, **fields["text_config"]}
    return {**fields, "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4"}


def test_frames_of_a_video_have_fewer_tokens_and_their_times() -> None:
    """As transformers prepares pictures of so many tokens: its class for videos needs torchvision."""
    from transformers import Gemma4ImageProcessorPil

    family, whole = get("gemma4"), recipe(0, max_soft_tokens=140)
    assert family.video is not None
    video = family.video(Fields(dict(family.tiny[0].fields)), Fields({"patch_size": 7}), whole)
    frames = np.random.default_rng(0).integers(0, 256, (3, 6, 9, 3), np.uint8).repeat(9, 1).repeat(7, 2)
    made = list(watch(whole, video, Clip(frames, (0.0, 61.5, 122.0), 2.0)))
    given = Gemma4ImageProcessorPil(patch_size=7, max_soft_tokens=70)(images=list(frames), return_tensors="np")
    assert [p.tokens for p in made] == list(given["num_soft_tokens_per_image"])
    assert prepare(whole, Image.fromarray(frames[0])).tokens > 70 >= made[0].tokens
    for picture, patches in zip(made, given["pixel_values"], strict=True):
        _, _, height, width = picture.pixels.shape
        grid = patches[: height * width // 49].reshape(height // 7, width // 7, 7, 7, 3)
        expected = 2 * grid.transpose(4, 0, 2, 1, 3).reshape(picture.pixels.shape) - 1
        np.testing.assert_allclose(picture.pixels, expected, atol=1e-3)
    said = "".join(p.frame.said or "" for p in made if p.frame).replace("<|image|>", "")
    assert said == "00:00 <|image><image|> 01:01 <|image><image|> 02:02 <|image><image|>"
