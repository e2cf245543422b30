"""Pictures are prepared as the authors' processors do it: those of transformers on the same picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from toolkit.artifacts.recipe import open_recipe
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.config.fields import Fields
from toolkit.models.config.preprocessor import fit_recipe
from toolkit.models.eyes.pictures import most_patches
from toolkit.models.eyes.towers import pixtral_tower
from toolkit.models.family import Family, Tiny
from toolkit.models.registry import LANGUAGE_PARTS, build, families, get
from toolkit.models.tiny import SIZES as SIZES_OF_TEXT
from toolkit.models.tiny import tiny_config
from toolkit.vision.eyes import Eyes
from toolkit.vision.recipes import prepare

PATCH = 7  # side of a patch of the tiny models
SIZES = ((1, 1), (50, 37), (37, 50), (61, 61), (300, 10), (10, 300), (640, 480), (29, 1000))  # width, height
SEEING = [family.name for family in families() if family.recipe is not None]
# What differs from a family's own preprocessor config, and is in its spirit.
SCANS = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 8,
    "pan_and_scan_max_num_crops": 3,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in SEEING),
    ("llava", {"do_pad": True}),
    ("llava", {"size": 28, "crop_size": 28}),
    ("gemma3", SCANS),
    ("gemma4", {"max_soft_tokens": 140, "do_normalize": True, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 1, 1]}),
    (
        "gemma4_unified",
        {"max_soft_tokens": 70, "do_normalize": True, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 1, 1]},
    ),
    ("internlmxcomposer2-1", {}),
    ("internlmxcomposer2-2", {}),
    ("mgm-1", {}),
]


def tiny_of(name: str) -> tuple[Family, Tiny]:
    """The family, and its first tiny model or the one whose number stands behind."""
    family, _, number = name.partition("-")
    return get(family), get(family).tiny[int(number or 0)]


def picture(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(width * 1000 + height)
    coarse = rng.integers(0, 256, (4, 4, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def processor(name: str, changes: dict[str, Any], own: Any) -> Any:
    import transformers

    given = {**get(name).tiny[0].preprocessor, **changes}
    kind = given.pop("image_processor_type")
    return (own.get(kind) or getattr(transformers, f"{kind}Pil"))(**given)


@pytest.mark.parametrize(("name", "changes"), VARIANTS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_numbers_are_the_authors(name: str, changes: dict[str, Any], size: tuple[int, int], support: Any) -> None:
    family, tiny = tiny_of(name)
    assert family.recipe is not None
    recipe = family.recipe(Fields(tiny.fields), Fields({**tiny.preprocessor, **changes}))
    mine = prepare(recipe, picture(*size))
    assert mine.size == (size[1], size[0])
    if stand_in := support("stand_ins").STAND_INS.get(f"{family.name}-{family.tiny.index(tiny)}"):
        tiles = stand_in.tiles(dict(tiny.fields), dict(tiny.preprocessor), picture(*size))
        for one, theirs in zip([tile for part in mine.parts for tile in part], tiles, strict=True):
            np.testing.assert_allclose(one, theirs, atol=1e-3, rtol=0)
        return
    extra = {"crop_to_patches": True} if recipe.kind == "tiles" else {}
    if recipe.kind == "fit":
        extra = {"patch_size": {"height": recipe.unit, "width": recipe.unit}}
    own = support("stand_ins").PROCESSORS
    theirs = processor(name, changes, own)(images=[picture(*size)], return_tensors="np", **extra)
    pixels = np.asarray(theirs["pixel_values"], np.float32)
    if recipe.kind == "canvas":
        pixels = pixels[0, 0, : theirs["num_tiles"][0][0]]
    if recipe.kind == "area":
        pixels = unfolded(pixels, theirs["image_grid_thw"][0], tiny.preprocessor.get("patch_size", 14))
    if recipe.kind == "fill":
        side, signed = (recipe.unit, False) if name == "gemma4_unified" else (tiny.preprocessor["patch_size"], True)
        pixels = laid_out(pixels[0], theirs["image_position_ids"][0], side)
        pixels = 2 * pixels - 1 if signed else pixels
    if mine.more is not None:
        np.testing.assert_allclose(mine.more, theirs["high_res_pixel_values"], atol=1e-3, rtol=0)
    np.testing.assert_allclose(mine.pixels, pixels.reshape(-1, *pixels.shape[-3:]), atol=1e-3, rtol=0)


def laid_out(patches: np.ndarray, places: np.ndarray, side: int) -> np.ndarray:
    """The picture of flat patches, colours last, by their (column, row)."""
    columns, rows = places.max(0) + 1
    grid = patches[: rows * columns].reshape(rows, columns, side, side, 3)
    return grid.transpose(4, 0, 2, 1, 3).reshape(1, 3, rows * side, columns * side)


def unfolded(patches: np.ndarray, grid: np.ndarray, side: int) -> np.ndarray:
    """The picture of patches: flat ones in the order of blocks of two by two, others in that of their rows."""
    _, rows, columns = grid
    if patches.ndim == 4:
        whole = patches.reshape(rows, columns, 3, side, side).transpose(2, 0, 3, 1, 4)
        return whole.reshape(1, 3, rows * side, columns * side)
    blocks = patches.reshape(rows // 2, columns // 2, 2, 2, 3, 2, side, side)[:, :, :, :, :, 0]
    return blocks.transpose(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, rows * side, columns * side)


@pytest.mark.parametrize("name", SEEING)
def test_no_picture_has_more_patches_than_are_planned_for(name: str) -> None:
    tiny, make = get(name).tiny[0], get(name).recipe
    assert make is not None
    recipe = make(Fields(tiny.fields), Fields(tiny.preprocessor))
    most = {"max_dynamic_patch": 24, "max_slice_nums": recipe.most, "max_pixels": recipe.most}
    for width, height in SIZES:
        given = {"type": "image_data", "image_data": {"data": picture(width, height), **most}}
        (made,) = Eyes(recipe).look([{"role": "user", "content": [given]}])
        patches = sum(part[:, 0].size // PATCH**2 for part in made.parts)
        assert patches <= most_patches(recipe, recipe.unit // PATCH)


@pytest.mark.parametrize("shape, named", [(0, True), (1, False)], ids=["2.6", "2.5"])
def test_numbers_stand_before_pictures_where_the_model_knows_them(shape: int, named: bool) -> None:
    tiny, make = get("minicpmv").tiny[shape], get("minicpmv").recipe
    assert make is not None
    eyes = Eyes(make(Fields(tiny.fields), Fields(tiny.preprocessor)))
    given = {"type": "image_data", "image_data": {"data": picture(50, 37), "use_image_id": True}}
    text = eyes.spell(eyes.recipe.mark, eyes.look([{"role": "user", "content": [given]}]))
    assert text.startswith("<image_id>0</image_id>") == named == ("image_id" in text)


@pytest.mark.parametrize(("kinds", "alone"), [(("image", "video"), True), (("image", "video", "image"), False)])
def test_a_video_beside_a_picture_leaves_it_the_only_one(kinds: tuple[str, ...], alone: bool) -> None:
    tiny, make = get("llava_onevision").tiny[0], get("llava_onevision").recipe
    assert make is not None
    parts = [{"type": f"{kind}_data", f"{kind}_data": {"data": b""}} for kind in kinds]
    asked = Eyes(make(Fields(tiny.fields), Fields(tiny.preprocessor))).asked([{"role": "user", "content": parts}])
    assert {one.alone for one in asked if not one.video} == {alone}


@pytest.mark.parametrize("name", ["llava_next", "llava_onevision"])
def test_canvases_are_cut_into_whole_tiles(name: str) -> None:
    make = get(name).recipe
    assert make is not None
    config = {"vision_config": {"image_size": 28, "patch_size": 7}, "image_grid_pinpoints": [[28, 28], [30, 56]]}
    with pytest.raises(ToolkitError, match=r"image_grid_pinpoints: found .* expected multiples of 28"):
        make(Fields(config), Fields({}))


@pytest.mark.parametrize(
    "name, part", [("phi3_v", "img_processor"), ("molmo", "vision_config"), ("glm4v_9b", "vision_config")]
)
def test_patches_that_become_one_token_are_all_there(name: str, part: str) -> None:
    tiny = get(name).tiny[0]
    config = {**SIZES_OF_TEXT, **tiny.fields, part: {**tiny.fields[part], "image_size": 35}}
    with pytest.raises(
        ToolkitError, match=f"{part}.image_size: found 35, expected a multiple of 2 patches of 7 pixels"
    ):
        get(name).build(Fields(config))


@pytest.mark.parametrize(
    "name", ["glm4v", "glm4v_moe", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe"]
)
def test_patches_are_of_the_size_that_the_tower_reads(name: str) -> None:
    """Of others a picture would have more rows than places, and some of them would be left out."""
    tiny, make = get(name).tiny[0], get(name).recipe
    assert make is not None
    given = {key: value for key, value in tiny.preprocessor.items() if key != "patch_size"}
    side = tiny.fields["vision_config"]["patch_size"]
    assert make(Fields(tiny.fields), Fields(given)).unit == 2 * side
    assert make(Fields({}), Fields({})).unit == (32 if "3" in name else 28)
    for field, theirs, found, wanted in (
        ("patch_size", "patch_size", 8, side),
        ("merge_size", "spatial_merge_size", 3, 2),
    ):
        with pytest.raises(ToolkitError, match=f"{field}: found {found}, expected {wanted}, the tower's {theirs}"):
            make(Fields(tiny.fields), Fields({**given, field: found}))


def test_where_nothing_is_cut_there_need_be_no_thumbnail() -> None:
    """As InternVL 1.1 and 1.2 say."""
    tiny, make = get("internvl_chat").tiny[0], get("internvl_chat").recipe
    assert make is not None
    config = {**tiny.fields, "dynamic_image_size": False, "use_thumbnail": False}
    assert len(prepare(make(Fields(config), Fields(tiny.preprocessor)), picture(300, 10)).pixels) == 1
    with pytest.raises(ToolkitError, match="use_thumbnail: found False, expected true"):
        make(Fields({**config, "dynamic_image_size": True}), Fields(tiny.preprocessor))


@pytest.mark.parametrize("family", ["internvl", "llava", "mistral3"])
def test_a_projector_s_activation_is_one_that_runs(family: str) -> None:
    config = tiny_config(get(family)) | {"projector_hidden_act": "silu"}
    with pytest.raises(ToolkitError, match="projector_hidden_act: found silu, expected one of gelu, gelu_pytorch_tanh"):
        build(config)


def test_a_canvas_is_one_that_the_tower_knows() -> None:
    make, tiny = get("mllama").recipe, get("mllama").tiny[0]
    assert make is not None
    vision = tiny.fields["vision_config"] | {"supported_aspect_ratios": [[1, 1], [1, 2]]}
    recipe = make(Fields({**tiny.fields, "vision_config": vision}), Fields(tiny.preprocessor))
    assert {prepare(recipe, picture(*size)).grid for size in SIZES} <= {(1, 1), (1, 2)}
    with pytest.raises(ToolkitError, match="max_image_tiles: found 1, expected as many as one of"):
        vision["supported_aspect_ratios"] = [[1, 2]]
        make(Fields({**tiny.fields, "vision_config": vision}), Fields({**tiny.preprocessor, "max_image_tiles": 1}))


@pytest.mark.parametrize("nested", [True, False])
def test_what_transformers_5_has_saved_counts_before_older_files(nested: bool, tmp_path: Path) -> None:
    tiny = get("qwen2_vl").tiny[0]
    image, video = {**tiny.preprocessor, "max_pixels": 14 * 14 * 20}, {"fps": 1}
    files = {
        "config": {**tiny.fields, "architectures": ["Qwen2VLForConditionalGeneration"]},
        "preprocessor_config": dict(tiny.preprocessor),
        "video_preprocessor_config": {"fps": 3},
        "processor_config": {"image_processor": image, "video_processor": video}
        if nested
        else {"video_processor": None},
    }
    for name, values in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    found = open_recipe(tmp_path)
    assert found is not None and found.video is not None
    assert (found.most, found.video.fps) == ((14 * 14 * 20, 1.0) if nested else (14 * 14 * 40, 3.0))


def test_an_absent_patch_size_of_pixtral_is_16() -> None:
    config = Fields({"model_type": "pixtral", "image_size": 1024})
    assert pixtral_tower(config).patch == fit_recipe(config, Fields({}), merge=1).unit == 16


@pytest.mark.parametrize("name", SEEING)
def test_null_is_as_good_as_nothing(name: str) -> None:
    """In each object of a config, and of a processor's."""
    family = get(name)

    def read(config: dict[str, Any], given: dict[str, Any]) -> Any:
        assert family.recipe is not None
        try:
            return family.build(Fields(config)), family.recipe(Fields(config), Fields(given))
        except ToolkitError as error:
            return str(error)

    for tiny in family.tiny:
        config: dict[str, Any] = {**SIZES_OF_TEXT, **tiny.fields}
        for inside in (None, *(name for name, value in tiny.fields.items() if isinstance(value, dict))):
            part = tiny.fields if inside is None else tiny.fields[inside]
            for field in set(part) - set(SIZES_OF_TEXT) if inside not in LANGUAGE_PARTS else ():
                null, absent = {**part, field: None}, {k: v for k, v in part.items() if k != field}
                both = [
                    {**SIZES_OF_TEXT, **(x if inside is None else {**tiny.fields, inside: x})} for x in (null, absent)
                ]
                assert read(both[0], dict(tiny.preprocessor)) == read(both[1], dict(tiny.preprocessor)), (inside, field)
        given = dict(tiny.preprocessor)
        for field in given:
            absent = {k: v for k, v in given.items() if k != field}
            assert read(config, {**given, field: None}) == read(config, absent), field


def test_digests_tell_pictures_and_options_apart() -> None:
    make = get("llava").recipe
    assert make is not None
    tiny = get("llava").tiny[0]
    plain, padded = (make(Fields(tiny.fields), Fields({**tiny.preprocessor, "do_pad": pad})) for pad in (False, True))
    one, other = picture(50, 37), picture(37, 50)
    digests = [prepare(r, p).digest for r in (plain, padded) for p in (one, other)]
    assert len(set(digests)) == 4 and prepare(plain, one.copy()).digest == digests[0]


@pytest.mark.parametrize(("name", "changes"), VARIANTS, ids=lambda x: x if isinstance(x, str) else "-".join(x))
def test_a_line_is_no_picture(name: str, changes: dict[str, Any]) -> None:
    """Models that take the short side to a length would make it thousands of times as large."""
    family, tiny = tiny_of(name)
    assert family.recipe is not None
    recipe = family.recipe(Fields(tiny.fields), Fields({**tiny.preprocessor, **changes}))
    assert prepare(recipe, Image.new("RGB", (200, 1))).tokens > 0
    for size in ((60_000, 1), (3, 1000)):
        with pytest.raises(UsageError, match="ratio of at most 200"):
            prepare(recipe, Image.new("RGB", size))
    if recipe.pad:
        with pytest.raises(UsageError, match="at most 10000 for this model"):
            prepare(recipe, Image.new("RGB", (10_001, 60)), alone=False)
