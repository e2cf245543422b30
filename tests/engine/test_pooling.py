"""Pooled hidden states equal transformers', whatever the steps were; and what a model's own config says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit import PytorchEngineConfig, TurbomindEngineConfig, pipeline
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.side_files import copy_side_files
from toolkit.engine.pooling import open_head, vector
from toolkit.errors import ToolkitError, UsageError

PROMPTS = [[5], [5, 77, 200, 13, 260, 33, 91], list(range(3, 143))]
# Steps of 16 tokens: the longest prompt goes through in nine chunks, beside others'.
CONFIGS = {
    "pytorch": PytorchEngineConfig(device_type="cpu", dtype="float32", max_prefill_token_num=16, block_size=16),
    "turbomind": TurbomindEngineConfig(device="cpu", dtype="float32", max_prefill_token_num=16, cache_block_seq_len=16),
}


@pytest.fixture(scope="module", params=CONFIGS)
def pipe(tiny_models: Any, request: Any) -> Any:
    with pipeline(str(tiny_models("qwen3")), CONFIGS[request.param]) as found:
        yield found


@pytest.fixture(scope="module")
def reference(tiny_models: Any) -> Any:
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(tiny_models("qwen3"), dtype=torch.float32)

    def states(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([ids])).last_hidden_state[0].double().numpy()

    return states


def pooling(wanted: str, model: Path) -> str:
    return open_head(model, wanted).pooling


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("pooling", ["cls", "last", "mean"])
def test_equal_to_transformers(pipe: Any, reference: Any, pooling: str) -> None:
    for _ in range(2):  # the second time the prefix cache knows them
        found = pipe.get_embeddings(PROMPTS, pooling=pooling)
        assert found.dtype == np.float32 and np.linalg.norm(found, axis=1) == pytest.approx(1)
        for ids, row in zip(PROMPTS, found, strict=True):
            states = reference(ids)
            expected = {"cls": states[0], "last": states[-1], "mean": states.mean(0)}[pooling]
            assert cosine(row.astype(float), expected) > 0.9999
    raw = pipe.get_embeddings(PROMPTS[1], pooling=pooling, normalize=False)
    states = reference(PROMPTS[1])
    wanted = {"cls": states[0], "last": states[-1], "mean": states.mean(0)}[pooling]
    assert raw[0] == pytest.approx(wanted, rel=2e-2, abs=2e-2)


def test_beside_generation(pipe: Any, reference: Any) -> None:
    """A request that draws tokens and one that does not share steps and the cache."""
    text = pipe.tokenizer.decode(PROMPTS[2])
    answer = pipe(text, do_preprocess=False)
    ids = pipe.tokenizer.encode(text)
    row = pipe.get_embeddings(text)[0]
    assert cosine(row.astype(float), reference(ids)[-1]) > 0.9999
    assert pipe(text, do_preprocess=False).token_ids == answer.token_ids
    assert pipe.engine.score(ids).shape == (len(ids) - 1,)


def test_fewer_dimensions(pipe: Any) -> None:
    whole, cut = (pipe.get_embeddings("Hello", dimensions=n)[0] for n in (None, 8))
    assert cut == pytest.approx(whole[:8] / np.linalg.norm(whole[:8]), abs=1e-6)


@pytest.mark.parametrize(
    ("inputs", "options", "says"),
    [
        ([], {}, "inputs"),
        ([[5], [1 << 20]], {}, r"inputs\[1\]"),
        ([[1, 2], []], {}, r"inputs\[1\]"),
        ("a", {"pooling": "max"}, "pooling"),
        ("a", {"dimensions": 65}, "dimensions"),
        ("a", {"adapter_name": "x"}, "adapter_name"),
        ([[5] * 600], {}, "512"),
    ],
)
def test_misuse(pipe: Any, inputs: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ToolkitError, match=says):
        pipe.get_embeddings(inputs, **options)


def test_a_model_says_how_it_pools(tiny_models: Any, tiny_checkpoint: Any, tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model")
    assert pooling("auto", model) == "last" and pooling("mean", model) == "mean"
    (model / "1_Pooling").mkdir()
    config = model / "1_Pooling" / "config.json"
    config.write_text(json.dumps({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}))
    assert pooling("auto", model) == "mean"
    assert pooling("last", model) == "last"
    (tmp_path / "next").mkdir()
    assert "pooling_config.json" in copy_side_files(open_checkpoint(model), tmp_path / "next")
    assert pooling("auto", tmp_path / "next") == "mean"
    config.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(ToolkitError, match="found max_tokens"):
        pooling("auto", model)
    assert pooling("cls", model) == "cls"


def test_how_a_model_pools_is_read_once(tiny_checkpoint: Any, tmp_path: Path) -> None:
    """What is loaded stays, whatever becomes of its folder."""
    model = tiny_checkpoint("llama", tmp_path / "model")
    (model / "1_Pooling").mkdir()
    config = model / "1_Pooling" / "config.json"
    config.write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with pipeline(str(model), TurbomindEngineConfig(device="cpu", dtype="float32")) as pipe:
        mean = pipe.get_embeddings("A ship at sea.")
        config.write_text(json.dumps({"pooling_mode_cls_token": True}))
        (model / "config_sentence_transformers.json").write_text("broken")
        assert pipe.get_embeddings("A ship at sea.") == pytest.approx(mean, abs=1e-6)
        assert abs(pipe.get_embeddings("A ship at sea.", pooling="cls") - mean).max() > 1e-3


def test_what_is_no_number_is_refused() -> None:
    assert vector(np.zeros(3, np.float32), None, True).tolist() == [0, 0, 0]
    with pytest.raises(ToolkitError, match="NaN"):
        vector(np.array([1.0, np.nan], np.float32), None, True)
    with pytest.raises(UsageError):
        vector(np.ones(3, np.float32), 4, True)


def test_a_model_saved_without_its_head(tiny_checkpoint: Any, tmp_path: Path) -> None:
    """As embedding models are: another class in config.json, names of tensors without "model."."""
    import torch
    from transformers import AutoModel

    path = tiny_checkpoint("qwen3", tmp_path / "model", tie_word_embeddings=True)
    config = TurbomindEngineConfig(device="cpu", dtype="float32")
    with pipeline(str(path), config) as pipe:
        whole = pipe.get_embeddings(PROMPTS)
    model = AutoModel.from_pretrained(path, dtype=torch.float32)
    model.save_pretrained(path)
    assert json.loads((path / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    assert "embed_tokens.weight" in model.state_dict()
    with pipeline(str(path), config) as pipe:
        assert pipe.get_embeddings(PROMPTS) == pytest.approx(whole, abs=1e-6)
