"""``train_tiny_vlm``: the drawings always; the model, which takes its time to train, with the slow tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.artifacts.home import toolkit_home

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "tiny_vlm" / "train_tiny_vlm"
MODEL = toolkit_home() / "models" / "tiny-vlm"  # kept from one run of the tests to the next
ADAPTER = "model-00002-of-00002.safetensors"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the script that need no torch."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from tiny_vlm import ask, drawings

    return ask, drawings


def test_drawings_are_the_same_every_time_and_every_trait_is_asked(parts: Any) -> None:
    ask, drawings = parts
    some, again = (list(ask.held_out(300)) for _ in range(2))
    assert all((np.asarray(a.image) == np.asarray(b.image)).all() for a, b in zip(some, again, strict=True))
    assert {one.kind for one in some} == set(drawings.QUESTIONS)
    said = " ".join(one.answer for one in some)
    for word in (*drawings.SHAPES, *drawings.DIGITS, *drawings.COLOURS, *drawings.COUNTS, *drawings.WHERE.values()):
        assert word in said.lower(), word
    assert ask.shares(some, [one.answer for one in some]).keys() == set(drawings.QUESTIONS)
    right, asked = zip(*ask.shares(some, ["It is red."] * 300).values(), strict=True)
    assert 0 < sum(right) < 60 and sum(asked) == 300


@pytest.fixture(scope="module")
def trained() -> Path:
    command = [sys.executable, str(SCRIPT), str(MODEL), "--drawings", "100"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return MODEL


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_model_is_llava_with_the_demo_inside(trained: Path) -> None:
    from safetensors.torch import load_file

    from toolkit.artifacts.demo import ensure_demo

    assert (trained / ADAPTER).stat().st_size < 20 << 20
    demo = load_file(ensure_demo() / "model.safetensors")
    inside = load_file(trained / "model-00001-of-00002.safetensors")
    assert all(inside[f"language_model.{name}"].equal(tensor) for name, tensor in demo.items())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_transformers_answers_alike(trained: Path, parts: Any) -> None:
    import torch
    from transformers import AutoProcessor, AutoTokenizer, LlavaForConditionalGeneration

    asked = list(parts[0].held_out(8))
    model = LlavaForConditionalGeneration.from_pretrained(trained, dtype=torch.float32).eval()
    processor, tokenizer = AutoProcessor.from_pretrained(trained), AutoTokenizer.from_pretrained(trained)
    theirs = []
    for one in asked:
        talk = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": one.question}]}]
        text = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        inputs = processor(images=one.image, text=text, return_tensors="pt")
        found = model.generate(**inputs, max_new_tokens=24, do_sample=False)
        theirs.append(tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    assert [text.strip() for text in theirs] == [text.strip() for text in parts[0].answers(str(trained), asked)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_its_language_part_is_quantized_and_still_sees(trained: Path, parts: Any, tmp_path: Path) -> None:
    tool = [sys.executable, "-m", "toolkit"]
    awq = [*tool, "lite", "auto_awq", str(trained), "--work-dir", str(tmp_path / "awq"), "--calib-samples", "16"]
    awq += ["--calib-seqlen", "256", "--tune-steps", "0"]
    pack = [*tool, "convert", str(tmp_path / "awq"), "--dst-path", str(tmp_path / "engine")]
    for command in (awq, pack):
        subprocess.run(command, check=True, cwd=tmp_path)
    asked = list(parts[0].held_out(100))
    found = parts[0].shares(asked, parts[0].answers(str(tmp_path / "engine"), asked))
    assert sum(right for right, _ in found.values()) >= 25, found  # word for word; the wording suffers most
