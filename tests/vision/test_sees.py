"""Every family that sees, from a file with a picture to logits and tokens: the oracle is transformers, its processor
and its class on the same float32 weights."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.inspect import inspect
from toolkit.artifacts.manifest import content_digest
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.convert.convert import convert
from toolkit.convert.formats import rewrite
from toolkit.convert.options import Packing
from toolkit.engine.core import EngineCore
from toolkit.engine.in_flight import BROKEN_AFTER
from toolkit.engine.options import EngineOptions
from toolkit.engine.pictures.spans import axes_of, find_spans, runs_of
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.eyes.mmproj import Mmproj
from toolkit.models.eyes.pictures import Picture, Recipe
from toolkit.models.eyes.vision import PREFIX
from toolkit.models.registry import families, get, load_spec
from toolkit.quant.lite import Common, auto_awq
from toolkit.quant.options import Awq
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native.library import available
from toolkit.runners.native.packing.packed import BF16, DENSE, F32, VECTOR
from toolkit.runners.native.program import unsupported
from toolkit.vision.eyes import Eyes

SEEING = [(f.name, shape) for f in families() if f.recipe is not None for shape in range(len(f.tiny))]
# What the engine keeps of them differs: keys alone, of windows too, latent rows, states; positions in three axes, rows
# of several layers, of cross-attention, pictures whose tokens see each other, experts or adapters of their own.
APART = (
    "llava",
    "llama4",
    "deepseek_vl_v2",
    "qwen3_5_moe",
    "qwen2_vl",
    "qwen3_vl",
    "mllama",
    "gemma3",
    "cogvlm",
    "internlmxcomposer2",
)
ONE_EACH = [
    pytest.param((family, shape), marks=() if family in APART and shape == 0 else pytest.mark.slow)
    for family, shape in SEEING
]
BACKENDS = ("pytorch", "turbomind") if available() is None else ("pytorch",)
NEW = 5


def name_of(seen: tuple[str, int]) -> str:
    return f"{seen[0]}-{seen[1]}"


def png(width: int, height: int) -> bytes:
    rng = np.random.default_rng(width)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), np.uint8))
    file = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


PICTURES = (png(75, 40), png(31, 62))


class Seeing:
    """A tiny model and transformers' answer to prompts about pictures."""

    def __init__(self, family: str, shape: int, path: Path, support: Any, twin: Path | None = None) -> None:
        import torch
        from transformers import AutoModelForImageTextToText

        self.path, self.family, self.tiny = path, family, get(family).tiny[shape]
        found = Eyes.open(path)
        assert found is not None
        self.eyes = found
        self.tokenizer = Tokenizer.open(path)
        self.spec = load_spec(open_checkpoint(path))[0]
        stand_in = support("stand_ins").STAND_INS.get(f"{family}-{shape}")
        self.processors = support("stand_ins").PROCESSORS
        self.stand_in = None if stand_in is None else stand_in(path)
        if stand_in is None:
            support("upstream").mend()
            self.model = AutoModelForImageTextToText.from_pretrained(twin or path, dtype=torch.float32).eval()

    def prompt(self, files: tuple[bytes, ...], text: str = "a") -> tuple[list[int], list[Any]]:
        messages = [{"role": "user", "content": [{"type": "image", "image": file} for file in files]}]
        pictures = self.eyes.look(messages)
        whole = f"b{text}".join([self.eyes.recipe.mark] * len(files)) + "what is it"
        return self.tokenizer.encode(self.eyes.spell(whole, pictures), add_special_tokens=False), pictures

    def inputs(self, files: tuple[bytes, ...]) -> dict[str, Any]:
        import transformers

        if self.stand_in is not None:
            return {"files": files}
        given = dict(self.tiny.preprocessor)
        kind = given.pop("image_processor_type")
        processor = (self.processors.get(kind) or getattr(transformers, f"{kind}Pil"))(**given)
        recipe = self.eyes.recipe
        extra: dict[str, Any] = {"crop_to_patches": True} if recipe.kind == "tiles" else {}
        if recipe.kind == "fit":
            extra = {"patch_size": {"height": recipe.unit, "width": recipe.unit}}
        images = [Image.open(io.BytesIO(file)) for file in files]
        nested = [images] if "batch_num_images" in processor.model_input_names and len(images) > 1 else images
        nested = [images] if recipe.kind in ("split", "canvas") else nested
        found = dict(processor(images=nested, return_tensors="pt", **extra))
        for name in ("num_patches", "rows", "cols", "num_crops", "num_tiles", "num_soft_tokens_per_image"):
            found.pop(name, None)
        return found

    def logits(self, ids: list[int], inputs: dict[str, Any]) -> np.ndarray:
        import torch

        if self.stand_in is not None:
            return self.stand_in.logits(ids, inputs["files"])
        config = self.model.config
        if "image_grid_thw" in inputs or "image_position_ids" in inputs:
            inputs = {**inputs, "mm_token_type_ids": (torch.tensor([ids]) == config.image_token_id).int()}
        if self.family == "gemma4_unified":
            inputs = {**inputs, "attention_mask": self._masks(ids, inputs["mm_token_type_ids"])}
        if self.spec.vision.crossed:
            inputs = {**inputs, "cross_attention_mask": self._looks(ids, inputs["aspect_ratio_mask"])}
        if self.spec.vision.mutual and "image_position_ids" not in inputs:
            inputs = {**inputs, "token_type_ids": (torch.tensor([ids]) == config.image_token_id).int()}
        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([ids]), use_cache=False, **inputs).logits[0].numpy()

    def _masks(self, ids: list[int], kinds: Any) -> Any:
        """Of Gemma 4 12B as it writes: called by itself, its class lets pictures see each other in every layer."""
        import torch

        model, places = self.model, torch.arange(len(ids))[None]
        rows, whole = torch.zeros(1, len(ids), 1), torch.ones(1, len(ids), dtype=torch.long)
        return model.create_masks_for_generate(model.config, rows, whole, None, places, mm_token_type_ids=kinds)

    def _looks(self, ids: list[int], tiles: Any) -> Any:
        """Which tiles each token looks at, as transformers' processor has it."""
        import torch
        from transformers.models.mllama import processing_mllama as mllama

        spans = mllama.get_cross_attention_token_mask(ids, self.model.config.image_token_id)
        counts = [tiles[0].sum(-1).tolist()]
        mask = mllama.convert_sparse_cross_attention_mask_to_dense([spans], counts, tiles.shape[-1], len(ids))
        return torch.from_numpy(mask)


@pytest.fixture(scope="module", params=SEEING, ids=name_of)
def seeing(request: Any, tiny_models: Any, support: Any) -> Seeing:
    family, shape = request.param
    return Seeing(family, shape, tiny_models(family, shape=shape), support, tiny_models.twin(family, shape=shape))


def opened(
    path: Path, backend: Any, budget: int = 64, dtype: str = "float32", threads: int = 1, **options: Any
) -> EngineCore:
    runner, _ = open_runner(
        path, backend=backend, options=RunnerOptions(device="cpu", dtype=dtype, block_size=16, threads=threads)
    )
    runner.load_weights()
    blocks = (options.pop("blocks", 64),) * len(runner.spec.cache_groups)
    runner.allocate_cache(blocks)
    limits: Any = {"session_len": 512, "max_batch_size": 4, "max_prefill_token_num": budget, "num_blocks": blocks}
    return EngineCore(runner, EngineOptions(**limits, check=True, **options), None)


def run(core: EngineCore, *requests: EngineRequest) -> dict[str, Any]:
    """Tokens and logits of each request."""
    found: dict[str, Any] = {r.id: ([], []) for r in requests}
    for request in requests:
        core.add(request)
    while core.has_work:
        for out in core.step():
            assert out.error is None, out.error
            found[out.id][0].extend(out.token_ids)
            found[out.id][1].extend([] if out.logits is None else [out.logits])
    return found


def request(name: str, ids: list[int], pictures: list[Any], **more: Any) -> EngineRequest:
    return EngineRequest(name, ids, SamplingParams(max_new_tokens=NEW, **more), pictures=pictures)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_tokens_are_transformers(seeing: Seeing, backend: str) -> None:
    """In chunks that cut pictures, beside a text and another order of the pictures."""
    core = opened(seeing.path, backend, budget=13)
    ids, pictures = seeing.prompt(PICTURES)
    turned, others = seeing.prompt(PICTURES[::-1])
    found = run(
        core, request("a", ids, pictures, logits="all"), request("b", [7, 8, 9], []), request("c", turned, others)
    )
    for name, prompt, files in (("a", ids, PICTURES), ("c", turned, PICTURES[::-1])):
        inputs, whole = seeing.inputs(files), list(prompt)
        whole += found[name][0][:-1]
        expected = seeing.logits(whole, inputs)
        if name == "a":
            assert expected.std() > 0.2
            got = np.concatenate(found[name][1])[: len(ids), : expected.shape[1]]
            np.testing.assert_allclose(got, expected[: len(ids)], rtol=3e-4, atol=3e-4)
        assert expected[len(prompt) - 1 :].argmax(-1).tolist() == found[name][0]


def test_a_prompt_may_end_in_a_picture(seeing: Seeing) -> None:
    """Also where its last token is computed alone."""
    ids, pictures = seeing.prompt(PICTURES)
    ids = ids[: 1 + max(i for i, token in enumerate(ids) if token == seeing.spec.vision.image_token)]
    (got,) = run(
        opened(seeing.path, "pytorch", budget=len(ids) - 1), request("a", ids, pictures, logits="all")
    ).values()
    expected = seeing.logits(ids, seeing.inputs(PICTURES))
    last = np.concatenate(got[1])[len(ids) - 1, : expected.shape[1]]
    np.testing.assert_allclose(last, expected[len(ids) - 1], rtol=3e-4, atol=3e-4)


def test_a_second_question_encodes_nothing(seeing: Seeing) -> None:
    """Nor does it compute the picture's part of the prompt again; another picture of the same size is told apart."""
    core = opened(seeing.path, "pytorch")
    ids, pictures = seeing.prompt(PICTURES[:1])
    run(core, request("a", ids, pictures))
    longer = [*ids, 8]
    again = run(core, request("a", longer, pictures))["a"][0]
    stats = core.stats()
    assert stats["pictures_encoded"] == 1 and stats["prefix_hit_tokens"] >= len(ids) // 16 * 16
    whole = [*longer, *again[:-1]]
    assert seeing.logits(whole, seeing.inputs(PICTURES[:1]))[len(longer) - 1 :].argmax(-1).tolist() == again
    other = Image.open(io.BytesIO(PICTURES[0])).transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    file = io.BytesIO()
    other.save(file, "PNG")
    flipped, more = seeing.prompt((file.getvalue(),))
    assert flipped == ids
    got = run(core, request("a", flipped, more))["a"][0]
    whole = [*ids, *got[:-1]]
    assert seeing.logits(whole, seeing.inputs((file.getvalue(),)))[len(ids) - 1 :].argmax(-1).tolist() == got
    assert core.stats()["pictures_encoded"] == 2


@pytest.mark.parametrize("seeing", ONE_EACH, indirect=True, ids=name_of)
def test_preempted_requests_see_the_same(seeing: Seeing) -> None:
    ids, pictures = seeing.prompt(PICTURES)
    long = SamplingParams(max_new_tokens=40, stop_token_ids=[])
    alone = run(opened(seeing.path, "pytorch"), EngineRequest("a", ids, long, pictures=pictures))["a"][0]
    tight = opened(seeing.path, "pytorch", blocks=2 * (len(ids) // 16 + 1) + 2, prefix_caching=False)
    found = run(tight, *(EngineRequest(name, ids, long, pictures=pictures) for name in "abc"))
    assert all(found[name][0] == alone for name in "abc")
    assert tight.stats()["preemptions"]


def test_artifacts_see_the_same(seeing: Seeing, tmp_path: Path) -> None:
    ids, pictures = seeing.prompt(PICTURES)
    for backend, target in zip(BACKENDS, ("torch", "cpu"), strict=False):
        if target == "cpu" and unsupported(seeing.spec) is not None:
            continue
        options = Packing(target=target, dtype="float32", head_bits=16 if target == "cpu" else None)
        convert(str(seeing.path), tmp_path / target, options, quiet=True)
        expected = run(opened(seeing.path, backend), request("a", ids, pictures, logits="all"))["a"]
        core = opened(tmp_path / target, backend)
        found = run(core, request("a", ids, pictures, logits="all"))["a"]
        assert found[0] == expected[0]
        loose = 0.0 if target == "cpu" else 3e-5  # torch's products depend on where their operands lie
        np.testing.assert_allclose(np.concatenate(found[1]), np.concatenate(expected[1]), rtol=loose, atol=loose)
        facts = dict(inspect(tmp_path / target).facts)
        patch = seeing.spec.vision.tower.patch
        assert facts["family"] == seeing.family and f"patches of {patch} x {patch}" in facts["vision"]
        eyes = Eyes.open(tmp_path / target)
        assert eyes is not None and eyes.recipe == seeing.eyes.recipe


def without_colours(recipe: Recipe) -> Recipe:
    video = recipe.video
    if video is not None:
        video = replace(video, changes={k: v for k, v in video.changes.items() if k not in ("mean", "std")})
    return replace(recipe, mean=(), std=(), video=video)


def test_gguf_sees_the_same(seeing: Seeing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The language model and what it sees with, in two files, under names that llama.cpp has for both."""
    from gguf.constants import MODEL_ARCH, MODEL_TENSORS, TENSOR_NAMES
    from gguf.gguf_reader import GGUFReader

    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path))
    spelling = get(seeing.family).gguf
    vision = seeing.spec.vision
    small = seeing.family == "internvl_chat" and vision.tower.norm == "rms"  # llama.cpp has RMS norms in the large one
    if not isinstance(spelling, Mmproj) or vision.routed or small:
        with pytest.raises(ToolkitError, match="gguf: "):
            rewrite(str(seeing.path), tmp_path / "m.gguf", to="gguf")
        assert not list(tmp_path.glob("*.gguf"))
        return
    rewrite(str(seeing.path), tmp_path / "m.gguf", to="gguf")
    reader = GGUFReader(tmp_path / "mmproj-m.gguf")
    allowed = {TENSOR_NAMES[t] for t in MODEL_TENSORS[MODEL_ARCH.MMPROJ]}
    allowed = {re.sub(r"\{bid\}", r"\\d+", re.escape(name).replace(r"\{", "{").replace(r"\}", "}")) for name in allowed}
    allowed.add(r"v\.patch_norm\.\d+")  # of later tables
    allowed.add(re.escape("resampler.pos_embed_k"))  # as llama.cpp reads it; the table's name has no e
    end = "(.weight|.bias|.(in|out)put_(min|max))?(.1)?"
    for tensor in reader.tensors:
        assert any(re.fullmatch(name + end, tensor.name) for name in allowed), tensor.name
    ids, pictures = seeing.prompt(PICTURES)
    opened_file = open_checkpoint(tmp_path / "m.gguf")
    eyes = Eyes.open(opened_file.tokenizer_dir)
    assert eyes is not None
    for name in ("mean", "std"):  # which are float32 there
        assert getattr(eyes.recipe, name) == pytest.approx(getattr(seeing.eyes.recipe, name), rel=1e-6)
    assert without_colours(eyes.recipe) == without_colours(seeing.eyes.recipe)
    expected = run(opened(seeing.path, "pytorch"), request("a", ids, pictures, logits="all"))["a"]
    found = run(opened(tmp_path / "m.gguf", "pytorch"), request("a", ids, pictures, logits="all"))["a"]
    np.testing.assert_allclose(np.concatenate(found[1]), np.concatenate(expected[1]), rtol=1e-4, atol=1e-4)
    assert found[0] == expected[0]
    digest = content_digest(tmp_path / "m.gguf")
    (tmp_path / "mmproj-m.gguf").unlink()
    assert content_digest(tmp_path / "m.gguf") != digest
    assert load_spec(open_checkpoint(tmp_path / "m.gguf"))[0].vision is None


def test_an_artifact_keeps_the_towers_type(tiny_models: Any, tmp_path: Path, support: Any) -> None:
    """The language model's vectors come in the one that the native library reads."""
    path = tiny_models("llava", dtype="bfloat16")
    convert(str(path), tmp_path / "out", Packing(target="cpu"), quiet=True)
    engine = json.loads((tmp_path / "out" / "engine.json").read_text())
    types = {name: (entry["kind"], entry["dtype"]) for name, entry in engine["params"].items()}
    assert {types[name] for name in types if name.startswith(PREFIX)} == {(VECTOR, BF16), (DENSE, BF16)}
    assert {dtype for name, (kind, dtype) in types.items() if not name.startswith(PREFIX) and kind == VECTOR} == {F32}
    _, pictures = Seeing("llava", 0, path, support).prompt(PICTURES)
    expected = opened(path, "pytorch", dtype="bfloat16").runner.encode(pictures)
    found = opened(tmp_path / "out", "pytorch", dtype="bfloat16").runner.encode(pictures)
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))


def test_places_and_pictures_are_counted(tiny_models: Any, support: Any) -> None:
    seeing = Seeing("llava", 0, tiny_models("llava"), support)
    core = opened(seeing.path, "pytorch")
    ids, pictures = seeing.prompt(PICTURES)
    for wrong in (ids[1:], [*ids, ids[0]]):
        core.add(request("a", wrong, pictures))
        (output,) = core.step()
        assert output.error_code == 400 and "image tokens" in str(output.error)
    with pytest.raises(UsageError, match="found 2 images and 1 places"):
        seeing.eyes.spell("<image> what", pictures)


def test_positions_of_pictures_are_transformers() -> None:
    """Two pictures, text around them: positions in time, rows and columns, and where an answer goes on."""
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLModel

    grids = ((2, 3), (4, 1))
    pictures = [Picture(np.zeros((1, 3, 1, 1), np.float32), g, (1, 1), g[0] * g[1], b"") for g in grids]
    ids = [1, 2, *[5] * 6, 3, *[5] * 4, 4, 4]
    axes, shift = axes_of(len(ids), find_spans(ids, pictures, 5))
    model = Qwen2VLModel.__new__(Qwen2VLModel)
    torch.nn.Module.__init__(model)
    model.config = Qwen2VLConfig(vision_config={"spatial_merge_size": 2})
    thw = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids])
    kinds = (torch.tensor([ids]) == 5).int()
    expected, delta = model.get_rope_index(torch.tensor([ids]), kinds, image_grid_thw=thw)
    np.testing.assert_array_equal(axes, expected[:, 0].numpy())
    assert shift == int(delta)


def test_a_model_without_eyes_says_so(tiny_models: Any, support: Any) -> None:
    seeing = Seeing("llava", 0, tiny_models("llava"), support)
    ids, pictures = seeing.prompt(PICTURES[:1])
    core = opened(tiny_models("llama"), "pytorch")
    core.add(request("a", ids, pictures))
    (output,) = core.step()
    assert output.error_code == 400 and "reads text alone" in str(output.error)
    assert Eyes.open(tiny_models("llama")) is None


@pytest.mark.parametrize("family", ["llava", "llama4", "mgm", "qwen3_5_moe", "internlmxcomposer2", "gemma4"])
def test_quantizing_leaves_the_tower_as_it_is(family: str, tiny_models: Any, tmp_path: Path, support: Any) -> None:
    """And says so to other tools."""
    text = tmp_path / "calibration.txt"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen times. " * 20)
    common = Common(
        calib_dataset=str(text), calib_samples=4, calib_seqlen=32, eval_tokens=64, batch_size=4, quantize_lm_head=True
    )
    path = tiny_models(family, dtype="float16")
    auto_awq(str(path), tmp_path / "out", Awq(w_group_size=32, tune_steps=0), common=common)
    before, after = open_checkpoint(path), open_checkpoint(tmp_path / "out")
    towers = [item.name for item in load_spec(before)[1] if item.kind == "vision"]
    assert towers and all(after.tensor(name).equal(before.tensor(name)) for name in towers)
    assert any(name.endswith(".qweight") for name in after.names())
    if family == "llava":
        assert after.config["tie_word_embeddings"] is after.config["text_config"]["tie_word_embeddings"] is False
        skipped = (after.quantization or {})["modules_to_not_convert"]
        assert {"vision_tower.encoder.layers.0.mlp.fc1", "multi_modal_projector.linear_1"} <= set(skipped)
    ids, pictures = Seeing(family, 0, path, support).prompt(PICTURES)
    assert len(run(opened(tmp_path / "out", "pytorch"), request("a", ids, pictures))["a"][0]) == NEW


@pytest.mark.skipif(len(BACKENDS) < 2, reason="no native library")
@pytest.mark.parametrize(
    "family, shape",
    [
        ("gemma3", 0),
        ("gemma4", 0),
        ("gemma4", 1),
        ("gemma4_unified", 0),
        ("qwen3_vl", 0),
        ("mllama", 0),
        ("cogvlm", 0),
        ("internlmxcomposer2", 2),
        ("internvl_chat", 2),
    ],
)
def test_bits_do_not_depend_on_how_pictures_come(
    family: str, shape: int, tiny_models: Any, support: Any, tmp_path: Path
) -> None:
    """Of weights of 4 bits on the native runner: chunks, threads, neighbours, what is in the cache, preemption."""
    options = Packing(target="cpu", dtype="float32", load_format="int4")
    path = tiny_models(family, shape=shape)
    convert(str(path), tmp_path / "engine", options, quiet=True)
    seeing = Seeing(family, shape, path, support)
    ids, pictures = seeing.prompt(PICTURES, "all happy families are alike " * 4)
    others = seeing.prompt(PICTURES[::-1])
    asked = request("a", ids, pictures, logits="all")
    (expected,) = run(opened(tmp_path / "engine", "turbomind", prefix_caching=False), asked).values()
    for threads, budget in ((2, 13), (3, 5), (1, 128)):  # the last takes parts through whole layers
        core = opened(tmp_path / "engine", "turbomind", budget, threads=threads)
        assert core.runner.name == "native"
        for _ in range(2):  # the second time with a cache that has been filled
            found = run(core, request("a", ids, pictures), request("b", *others), request("c", [7, 8, 9], []))
            assert found["a"][0] == expected[0]
        found = run(core, request("b", *others), asked)
        np.testing.assert_array_equal(np.concatenate(found["a"][1]), np.concatenate(expected[1]))
        assert core.stats()["prefix_hit_tokens"]
    long = SamplingParams(max_new_tokens=40, stop_token_ids=[])
    tight = opened(tmp_path / "engine", "turbomind", blocks=2 * (len(ids) // 16 + 1) + 2, prefix_caching=False)
    found = run(tight, *(EngineRequest(name, ids, long, pictures=pictures) for name in "abc"))
    assert all(found[name][0] == found["a"][0] and found[name][0][:NEW] == expected[0] for name in "abc")
    assert tight.stats()["preemptions"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_looked_at_comes_and_goes(backend: str, tiny_models: Any, support: Any) -> None:
    """More pictures than are kept at once, and tokens before the first picture, which are as if there were none."""
    seeing = Seeing("mllama", 0, tiny_models("mllama"), support)
    prompts = [seeing.prompt(files) for files in (PICTURES, PICTURES[:1], PICTURES[1:], PICTURES[::-1])]
    alone = [run(opened(seeing.path, backend), request("a", *each))["a"][0] for each in prompts]
    tight = opened(seeing.path, backend, pictures_kept=1)
    found = run(tight, *(request(str(i), *each) for i, each in enumerate(prompts)))
    assert [found[str(i)][0] for i in range(len(prompts))] == alone
    ids, pictures = prompts[0]
    late = run(tight, request("a", [7, 8, 9, *ids], pictures, logits="all"))["a"][1]
    text = run(tight, request("a", [7, 8, 9], [], logits="all"))["a"][1]
    np.testing.assert_allclose(np.concatenate(late)[:3], np.concatenate(text)[:3], rtol=1e-5, atol=1e-5)
    assert backend != "pytorch" or len(tight.runner._steps._pictures) == 1  # of the two that the request before had


def test_pictures_that_touch_do_not_see_each_other(tiny_models: Any, support: Any) -> None:
    """Cached blocks of the first know nothing of the second; logits of a whole picture come though they are many."""
    pictures = [Picture(np.zeros((1, 3, 1, 1), np.float32), (1, 1), (1, 1), 4, bytes([i])) for i in range(2)]
    ids = [1, *[5] * 8, 2]
    assert runs_of(find_spans(ids, pictures, 5)).tolist() == [[1, 5], [5, 9]]
    split = [1, 5, 5, 2, 5, 5, *[5] * 4]
    assert runs_of(find_spans(split, pictures, 5)).tolist() == [[1, 3], [4, 6], [6, 10]]
    seeing = Seeing("gemma3", 0, tiny_models("gemma3"), support)
    core, each = opened(seeing.path, "pytorch", max_logit_bytes=1), seeing.prompt(PICTURES)
    found = run(core, request("a", *each, logits="all"))["a"][1]
    assert core.scheduler.max_rows_per_step == 4 and len(np.concatenate(found)) >= len(each[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_cache_loses_no_picture(
    backend: str, tiny_models: Any, support: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the runner kept of them is not counted on behind it, once it has run nothing for a while."""
    seeing = Seeing("mllama", 0, tiny_models("mllama"), support)
    core, each = opened(seeing.path, backend), seeing.prompt(PICTURES)
    expected = run(core, request("a", *each))["a"][0]
    submit = core.runner.submit
    monkeypatch.setattr(core.runner, "submit", lambda batch: 1 / 0)
    for i in range(BROKEN_AFTER):
        core.add(request(str(i), [7, 8, 9], []))
    while core.has_work:
        core.step()
    monkeypatch.setattr(core.runner, "submit", submit)
    assert run(core, request("b", *each))["b"][0] == expected
