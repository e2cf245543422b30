"""Perplexity: windows, agreement with transformers and with the figure that ``lite`` puts in the manifest."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.configs.engine import PytorchEngineConfig
from toolkit.errors import UsageError
from toolkit.measure.perplexity import perplexity
from toolkit.measure.text import heldout_text
from toolkit.measure.windows import scoring_windows
from toolkit.quant.options import Awq, SmoothQuant

FLOAT32 = PytorchEngineConfig(dtype="float32")  # what is measured against, on any machine


@given(st.integers(0, 300), st.integers(1, 60), st.integers(1, 60))
def test_each_token_is_scored_once(tokens: int, window: int, stride: int) -> None:
    stride = min(stride, window)
    seen: list[int] = []
    for start, stop, first in scoring_windows(tokens, window, stride):
        assert 0 <= start < first < stop <= tokens and stop - start <= window
        seen += range(first, stop)
    assert seen == sorted(set(seen))
    missed = set(range(tokens)) - set(seen)
    # without overlap the first token of every window has nothing before it
    assert missed == (set(range(0, tokens, stride)) if stride == window else {0} if tokens else set())


def transformers_perplexity(path: Path, ids: list[int], window: int, stride: int) -> tuple[float, int]:
    """The usual recipe: labels of tokens that an earlier window scored are masked."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    lost, count, previous = 0.0, 0, 0
    for start in range(0, len(ids), stride):
        stop = min(start + window, len(ids))
        with torch.no_grad():
            logits = model(torch.tensor([ids[start:stop]])).logits[0].float()
        labels = torch.tensor(ids[start:stop])
        labels[: max(previous - start, 0)] = -100
        lost += float(torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum"))
        count += int((labels[1:] != -100).sum())
        previous = stop
        if stop == len(ids):
            break
    return math.exp(lost / count), count


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize(("window", "stride"), [(64, 32), (50, 50), (33, 7), (512, 256)])
def test_equals_transformers(family: str, window: int, stride: int, tiny_models: Any, tmp_path: Path) -> None:
    from toolkit.artifacts.text.tokenizer import Tokenizer

    model = tiny_models(family)
    text = heldout_text()[:400]
    (tmp_path / "text.txt").write_text(text)
    found = perplexity(str(model), tmp_path / "text.txt", window=window, stride=stride, config=FLOAT32)
    expected, count = transformers_perplexity(model, Tokenizer.open(model).encode(text), window, stride)
    assert found["perplexity"] == pytest.approx(expected, rel=1e-3)
    assert found == {
        "perplexity": found["perplexity"],
        "tokens": count,
        "window": window,
        "stride": stride,
        "backend": "pytorch",
        "runner": "tensor",
        "dtype": "float32",
    }


def test_the_first_adapter_is_measured(tiny_models: Any, support: Any, tmp_path: Path) -> None:
    """As a checkpoint is that has it merged."""
    adapters, model = support("adapters"), tiny_models("llama")
    (tmp_path / "text.txt").write_text(heldout_text()[:400])
    made = adapters.write_adapter(tmp_path / "a", model, "q_proj|down_proj")
    other = adapters.write_adapter(tmp_path / "b", model, "v_proj", seed=2)
    config = replace(FLOAT32, adapters={"a": str(made), "b": str(other)})
    found = perplexity(str(model), tmp_path / "text.txt", window=64, config=config)
    merged = adapters.merge(model, made, tmp_path / "merged")
    expected = perplexity(str(merged), tmp_path / "text.txt", window=64, config=FLOAT32)
    base = perplexity(str(model), tmp_path / "text.txt", window=64, config=FLOAT32)
    assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-4)
    assert found["perplexity"] != pytest.approx(base["perplexity"], rel=1e-2)


@pytest.mark.parametrize(
    ("family", "tokens", "method", "options"),
    [
        ("qwen2", 1100, "auto_awq", Awq()),
        ("gemma2", 1024, "auto_awq", Awq()),
        ("qwen2", 1024, "smooth_quant", SmoothQuant(quant_dtype="int8")),
        ("llama", 1024, "smooth_quant", SmoothQuant(quant_dtype="fp8")),
    ],
)
def test_lite_s_figures_are_those_of_eval(
    family: str, tokens: int, method: str, options: Any, tiny_models: Any, tmp_path: Path
) -> None:
    """Also where activations are rounded at run time: what is stated is what is served."""
    from toolkit.quant import lite

    model = tiny_models(family)
    calibration = tmp_path / "calibration.txt"
    calibration.write_text("One two three four five six seven. " * 100)
    common = lite.Common(calib_dataset=str(calibration), calib_samples=4, calib_seqlen=64, eval_tokens=tokens)
    quality = getattr(lite, method)(str(model), tmp_path / "out", options, common=common).quality
    assert quality["window"] == quality["stride"] == 512  # the longest context of the tiny models
    for path, key in ((model, "perplexity_before"), (tmp_path / "out", "perplexity_after")):
        found = perplexity(str(path), "heldout", window=512, stride=512, max_tokens=tokens, config=FLOAT32)
        near = 1e-2 if method == "smooth_quant" else 1e-3  # activations between two codes fall to either
        assert found["perplexity"] == pytest.approx(quality[key], rel=near)
        assert found["tokens"] == quality["tokens"]
    assert quality["perplexity_before"] != pytest.approx(quality["perplexity_after"], rel=1e-4)
    assert 0 < quality["kl"] < 1 and 0.3 < quality["top1_agreement"] <= 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"window": 1, "stride": 1}, "--window: expected 2 or more"),
        ({"max_tokens": 1}, "--max-tokens: expected 2 or more"),
        ({"stride": 0}, "--stride: expected 1 to --window"),
        ({"window": 64, "stride": 65}, "--stride: expected 1 to --window"),
        ({"window": 513, "stride": 64}, "--window 513: longer than the longest context here, 512 tokens"),
    ],
)
def test_bad_windows(options: dict[str, int], complaint: str, tiny_models: Any, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text")
    with pytest.raises(UsageError, match=complaint):
        perplexity(str(tiny_models("llama")), tmp_path / "text.txt", **options)


def test_bad_text(tiny_models: Any, tmp_path: Path) -> None:
    model = str(tiny_models("llama"))
    with pytest.raises(UsageError, match=r"missing\.txt: cannot be read"):
        perplexity(model, tmp_path / "missing.txt")
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(UsageError, match=r"empty\.txt: the file is empty"):
        perplexity(model, tmp_path / "empty.txt")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="expected UTF-8 text"):
        perplexity(model, tmp_path / "bytes.txt")


def test_the_command_prints_json(tiny_models: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from toolkit.commands.main import main

    (tmp_path / "text.txt").write_text(heldout_text()[:300])
    argv = ["eval", "ppl", str(tiny_models("llama")), "--data", str(tmp_path / "text.txt"), "--json", "-"]
    with pytest.raises(SystemExit) as done:
        main([*argv, "--window", "64"])
    assert done.value.code == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["window"], found["stride"]) == (64, 32)
    assert set(found) == {"perplexity", "tokens", "window", "stride", "backend", "runner", "dtype"}
    assert (found["backend"], found["runner"]) == ("turbomind", "native"), "what serves the model here"
    with pytest.raises(SystemExit):
        main([*argv, "--window", "64", "--reference"])
    other = json.loads(capsys.readouterr().out)
    assert (other["backend"], other["runner"], other["dtype"]) == ("pytorch", "tensor", "float32")
    assert other["perplexity"] == pytest.approx(found["perplexity"], rel=0.02)
    for more in (["--backend", "turbomind"], ["--dtype", "bfloat16"]):
        with pytest.raises(SystemExit) as refused:
            main([*argv, "--reference", *more])
        assert refused.value.code == 2 and "--reference: " in capsys.readouterr().err
