"""Gemma 4 beside what every family that sees is tried with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.weights import left_out, validate_checkpoint
from toolkit.convert.formats import rewrite
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


def recipe(shape: int, name: str = "gemma4", **given: Any) -> Any:
    family = get(name)
    assert family.recipe is not None
    tiny = family.tiny[shape]
    return family.recipe(Fields(dict(tiny.fields)), Fields({**tiny.preprocessor, **given}))


def test_what_12b_hears_with_is_left_out(tiny_models: Any) -> None:
    checkpoint = open_checkpoint(tiny_models("gemma4_unified", audio_config=dict(audio_embed_dim=16)))
    spec, stored = load_spec(checkpoint)
    validate_checkpoint(checkpoint, stored)
    told = left_out(checkpoint, stored)
    assert "model.embed_audio" in told and "vision" not in told
    assert spec == load_spec(open_checkpoint(tiny_models("gemma4_unified")))[0]


def test_what_it_hears_with_is_left_out(tiny_models: Any) -> None:
    checkpoint = open_checkpoint(tiny_models("gemma4", audio_config=SOUND))
    spec, stored = load_spec(checkpoint)
    validate_checkpoint(checkpoint, stored)
    told = left_out(checkpoint, stored)
    assert "model.audio_tower" in told and "model.embed_audio" in told and "vision" not in told
    assert spec == load_spec(open_checkpoint(tiny_models("gemma4")))[0]


@pytest.mark.parametrize(("name", "blind"), [("gemma4", "gemma4_text"), ("gemma4_unified", "gemma4_unified_text")])
def test_without_a_tower_it_reads_texts(name: str, blind: str) -> None:
    config = tiny_config(get(name)) | {"vision_config": None}
    assert find_family(config).name == blind
    spec, seeing = build(config)[0], build(tiny_config(get(name)))[0]
    assert spec.vision is None and len(spec.layers) == len(seeing.layers)
    assert name == "gemma4_unified" or spec.layers == seeing.layers


def test_pictures_of_12b_see_each_other_where_nothing_is_said() -> None:
    config = tiny_config(get("gemma4_unified"))
    spec = build(config)[0]
    assert all(a.strict == (a.window is None) for _, a in spec.attention_layers()) and spec.together == 70
    silent = {**config, "text_config": {**config["text_config"], "use_bidirectional_attention": None}}
    assert build(silent)[0].together == 0


def test_pictures_have_no_more_tokens_than_there_is_room_for() -> None:
    """For all that see each other in one step, or places learned by the tower."""
    assert recipe(1).most == 70 * 21**2
    for shape, tokens, named in (
        (1, 140, "at most 70, vision_config.default_output_length"),
        (0, 280, "the tower has 512 places"),
    ):
        with pytest.raises(ToolkitError, match=f"max_soft_tokens: .*{named}"):
            recipe(shape, max_soft_tokens=tokens)
    with pytest.raises(ToolkitError, match=r"max_soft_tokens: .*at most 70, vision_config.num_soft_tokens"):
        recipe(0, "gemma4_unified", max_soft_tokens=140)


def test_the_second_file_of_12b_is_as_llama_cpp_writes_it(tiny_models: Any, tmp_path: Path) -> None:
    """Its converter's orders: colours before pixels, places of columns before those of rows."""
    from gguf import GGUFReader
    from safetensors.numpy import load_file

    path = tiny_models("gemma4_unified")
    rewrite(str(path), tmp_path / "m.gguf", to="gguf", gguf_type="f32")
    reader = GGUFReader(tmp_path / "mmproj-m.gguf")
    found = {tensor.name: tensor for tensor in reader.tensors}
    stored, side = load_file(path / "model.safetensors"), 21
    i = np.arange(3 * side**2)
    order = i % side**2 // side * side * 3 + i % side * 3 + i // side**2
    ours = {
        "v.patch_norm.1.weight": stored["model.vision_embedder.patch_ln1.weight"][order],
        "v.patch_norm.1.bias": stored["model.vision_embedder.patch_ln1.bias"][order],
        "v.patch_embd.weight": stored["model.vision_embedder.patch_dense.weight"][:, order],
        "v.patch_embd.bias": stored["model.vision_embedder.patch_dense.bias"],
        "v.patch_norm.2.weight": stored["model.vision_embedder.patch_ln2.weight"],
        "v.patch_norm.2.bias": stored["model.vision_embedder.patch_ln2.bias"],
        "v.position_embd.weight": stored["model.vision_embedder.pos_embedding"].transpose(1, 0, 2),
        "v.patch_norm.3.weight": stored["model.vision_embedder.pos_norm.weight"],
        "v.patch_norm.3.bias": stored["model.vision_embedder.pos_norm.bias"],
        "mm.input_projection.weight": stored["model.embed_vision.embedding_projection.weight"],
    }
    assert sorted(found) == sorted(ours)
    for name, numbers in ours.items():
        assert tuple(found[name].shape[::-1]) == numbers.shape
        np.testing.assert_array_equal(found[name].data.reshape(numbers.shape), numbers)
    said = {name: reader.fields[f"clip.vision.{name}"].contents() for name in ("patch_size", "block_count")}
    assert said == {"patch_size": 7, "block_count": 0}
    assert reader.fields["clip.vision.attention.layer_norm_epsilon"].contents() == pytest.approx(0.01)


def test_rows_of_another_width_than_they_are_projected_from() -> None:
    config = tiny_config(get("gemma4_unified"))
    config["vision_config"] = {**config["vision_config"], "output_proj_dims": 48}
    with pytest.raises(ToolkitError, match=r"vision_config.output_proj_dims: found 48, expected 32, as mm_embed_dim"):
        build(config)


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
