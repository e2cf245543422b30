"""Calibration on messages with pictures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from toolkit.artifacts.manifest import file_digest
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.errors import ToolkitError, UsageError
from toolkit.quant.layers.forward import embed
from toolkit.quant.layers.layerwise import Flow
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.lite import auto_awq, auto_gptq
from toolkit.quant.options import Awq, Common, Gptq
from toolkit.quant.text.calibration import CalibrationPlan, local_texts, read_samples, shown_files
from toolkit.quant.text.calibration_text import CalibrationText
from toolkit.quant.text.pictures import FIRST, Pictures
from toolkit.vision.parts import source_of
from toolkit.vl import load_image


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Talks about two pictures, which lie beside the file."""
    made = tmp_path_factory.mktemp("talks")
    rows = []
    for i in range(2):
        coarse = np.random.default_rng(i).integers(0, 256, (5, 5, 3), np.uint8)
        Image.fromarray(coarse).resize((40, 30), Image.Resampling.BICUBIC).save(made / f"{i}.png")
        shown = [{"type": "image_url", "image_url": {"url": f"{i}.png"}}, {"type": "text", "text": "What is it?"}]
        answer = "It was the best of times, it was the worst of times. " * 4
        rows.append({"messages": [{"role": "user", "content": shown}, {"role": "assistant", "content": answer}]})
    (made / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


def test_the_layers_see_what_the_model_sees(folder: Path, tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one sample, which is cut within the second picture: logits are those of transformers."""
    from transformers import LlavaForConditionalGeneration

    monkeypatch.setattr("toolkit.quant.layers.forward.fast_bf16", lambda device: False)  # figures of float32

    path = tiny_models("llava")
    source, tokenizer = LayerSource(path), Tokenizer.open(path)
    pictures = Pictures(source)
    whole = read_samples(CalibrationPlan(str(folder), 1, 160, 0), tokenizer, path, pictures)[0]
    ids, rows = pictures.rows(torch.tensor([whole]))
    shown = ids[0] >= source.spec.vocab_size
    assert 16 <= int(shown.sum()) == len(rows) and len(rows) <= 32
    assert source.spec.vision is not None
    plain = ids.masked_fill(shown[None], source.spec.vision.image_token)
    model = LlavaForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    files = [folder / f"{i}.png" for i in range(2)]
    seen = [pictures._eyes.look([_said(file)])[0] for file in files]  # type: ignore[union-attr]
    with torch.inference_mode():
        features = [model.get_image_features(torch.from_numpy(p.pixels)) for p in seen]
        every = [torch.as_tensor(getattr(f, "pooler_output", f)[0]).reshape(-1, rows.shape[1]) for f in features]
        begins = [int(shown.nonzero()[0]), int(shown.nonzero()[-1])]
        order = every if torch.allclose(rows[0], every[0][0], atol=1e-4) else every[::-1]
        expected = torch.cat(order)[: len(rows)]
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)
        embeds = model.get_input_embeddings()(plain)
        embeds[0, shown] = expected
        logits = model.model.language_model(inputs_embeds=embeds).last_hidden_state
    assert begins[0] < begins[1]
    source.rows = rows
    table = source.outer_weights(torch.device("cpu"))[source.spec.embed]
    torch.testing.assert_close(embed(source.spec, table, ids, rows), embeds, rtol=1e-4, atol=1e-4)
    flow = Flow(source, ids, table, torch.device("cpu"), 1)
    flow.through()
    norm = model.model.language_model.norm
    torch.testing.assert_close(norm(flow.hidden[0]), logits, rtol=1e-3, atol=1e-3)


def _said(file: Path) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image", "image": load_image(str(file))}]}


def test_only_what_is_left_of_pictures_is_encoded(folder: Path, tiny_models: Any) -> None:
    path = tiny_models("llava")
    source = LayerSource(path)
    pictures = Pictures(source)
    read_samples(CalibrationPlan(str(folder), 1, 160, 0), Tokenizer.open(path), path, pictures)
    ids, rows = pictures.rows(torch.tensor([[7, FIRST + 20, FIRST + 17, 8, FIRST + 20]]))
    size = source.spec.vocab_size
    assert ids.tolist() == [[7, size + 1, size, 8, size + 1]] and rows.shape == (2, source.spec.hidden_size)
    assert pictures.rows(torch.tensor([[7, 8]]))[1].shape == (0, source.spec.hidden_size)


@pytest.mark.parametrize("spelled", [{"image": "PICTURE"}, {"url": "PICTURE"}, {"image": {"data": "PICTURE"}}], ids=str)
def test_pictures_are_beside_their_file_however_they_are_named(spelled: Any, tmp_path: Path) -> None:
    shown = json.loads(json.dumps({"type": "image"} | spelled).replace("PICTURE", "0.png"))
    long = {"type": "image", "image": "iVBORw0K" * 99}
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": [shown, long]}]}))
    assert shown_files(tmp_path / "a.jsonl") == []
    Image.new("RGB", (4, 4)).save(tmp_path / "0.png")
    assert shown_files(tmp_path / "a.jsonl") == shown_files(tmp_path) == [tmp_path / "0.png"]
    ((message,),) = local_texts(tmp_path / "a.jsonl", 0)
    assert source_of(message["content"][0])[0] == str(tmp_path / "0.png")  # type: ignore[index]


def test_a_result_depends_on_the_pictures_that_are_shown(folder: Path, tiny_models: Any, tmp_path: Path) -> None:
    """By their content, wherever they lie; a model that reads text alone depends on the text."""
    (tmp_path / "talks").mkdir()
    talks = tmp_path / "talks" / "talks.jsonl"
    talks.write_text((folder / "talks.jsonl").read_text().replace("0.png", "../0.png"))
    for i, name in enumerate(("0.png", "talks/1.png")):
        shutil.copy(folder / f"{i}.png", tmp_path / name)

    def key(family: str, path: Path) -> str:
        plan = CalibrationPlan(str(path), 1, 64, 0)
        return str(CalibrationText(LayerSource(tiny_models(family)), plan).options()["calib_dataset"])

    before = {path: key("llava", path) for path in (talks, talks.parent)}
    assert before == {path: key("llava", path) for path in before}
    assert key("llama", talks) == f"{talks} sha256:{file_digest(talks)}"
    Image.new("RGB", (40, 30), "red").save(tmp_path / "0.png")
    for path, told in before.items():
        assert key("llava", path) != told and key("llava", path).startswith(f"{path} sha256:")


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_methods_calibrate_with_pictures(method: str, folder: Path, tiny_models: Any, tmp_path: Path) -> None:
    """Tuned scales too; other pictures give other weights, and a second run the same."""
    path = tiny_models("llava", dtype="float16")
    given: dict[str, Any] = {"calib_samples": 2, "calib_seqlen": 64, "eval_tokens": 64, "batch_size": 2}

    def made(name: str, data: Path) -> dict[str, Any]:
        common = Common(calib_dataset=str(data), **given)
        if method == "awq":
            auto_awq(str(path), tmp_path / name, Awq(w_group_size=32, tune_steps=2), common=common)
        else:
            auto_gptq(str(path), tmp_path / name, Gptq(w_group_size=32), common=common)
        source = sorted((tmp_path / name).glob("*.safetensors"))
        return {file.name: file.read_bytes() for file in source}

    other = tmp_path / "other"
    other.mkdir()
    (other / "talks.jsonl").write_text((folder / "talks.jsonl").read_text())
    for i in range(2):
        Image.new("RGB", (40, 30), "red").save(other / f"{i}.png")
    first = made("first", folder)
    assert first == made("again", folder) != made("else", other)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("llama", "this model reads text alone"),
        ("qwen2_vl", "images, whose tokens have positions of their own in this model"),
        ("gemma3", "images, whose tokens have sight of each other of their own"),
        ("mllama", "images, whose tokens have layers of their own"),
        ("cogvlm", "images, whose tokens have weights and positions of their own"),
    ],
)
def test_models_that_need_more_say_so(family: str, message: str, folder: Path, tiny_models: Any) -> None:
    path = tiny_models(family)
    with pytest.raises(UsageError, match=f"--calib-dataset .*: messages do not fit the model: .*{message}") as told:
        read_samples(CalibrationPlan(str(folder), 1, 64, 0), Tokenizer.open(path), path, Pictures(LayerSource(path)))
    assert "\n" not in str(told.value)


def test_a_text_calibrates_a_model_whose_pictures_cannot_be_prepared(
    folder: Path, tiny_checkpoint: Any, tmp_path: Path
) -> None:
    path = tiny_checkpoint("llava", tmp_path / "model")
    (path / "preprocessor_config.json").write_text('{"crop_size": 99}')
    (tmp_path / "a.txt").write_text("It was the best of times. " * 99)
    source, tokenizer = LayerSource(path), Tokenizer.open(path)
    assert len(read_samples(CalibrationPlan(str(tmp_path / "a.txt"), 1, 64, 0), tokenizer, path, Pictures(source))) == 1
    with pytest.raises(ToolkitError, match=r"preprocessor_config\.json: crop_size: found 99"):
        read_samples(CalibrationPlan(str(folder), 1, 64, 0), tokenizer, path, Pictures(source))
