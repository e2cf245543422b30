"""``rope_scaling`` over a model's config, by both engine configs and from the command line: transformers' numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.commands.main import main
from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.measure.text import heldout_text
from toolkit.pipeline.pipeline import pipeline

TRAINED, LENGTH = 32, 90
HALF = 8  # pairs of numbers that turn, in a head of the tiny model
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 1.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED, "beta_fast": 8.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0] * HALF,
        "long_factor": [1.0 + 0.5 * i for i in range(HALF)],
        "original_max_position_embeddings": TRAINED,
    },
}
CONFIGS = {
    "turbomind": TurbomindEngineConfig(dtype="float32", device="cpu", session_len=LENGTH),
    "pytorch": PytorchEngineConfig(dtype="float32", device_type="cpu", session_len=LENGTH),
}


@pytest.fixture(scope="module")
def model(tiny_models: Any) -> Path:
    """One with plain rotary positions."""
    return Path(tiny_models("llama", max_position_embeddings=TRAINED, head_dim=2 * HALF, rope_parameters=PLAIN))


def expected(model: Path, kind: str, ids: list[int]) -> np.ndarray:
    """log p of every token but the first, by transformers."""
    from transformers import AutoModelForCausalLM

    rope = {**PLAIN, "rope_type": kind, **SCALINGS[kind]}
    kept = {"max_position_embeddings": 4 * TRAINED} if kind == "longrope" else {}
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, rope_parameters=rope, **kept).eval()
    with torch.inference_mode():
        rows = oracle(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return rows[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()


@pytest.mark.parametrize("backend", CONFIGS)
@pytest.mark.parametrize("kind", SCALINGS)
def test_both_configs_take_every_kind(kind: str, backend: str, model: Path) -> None:
    ids = np.random.default_rng(0).integers(3, 100, LENGTH).tolist()
    scaling = {"rope_scaling": {"rope_type": kind, **SCALINGS[kind]}}
    with pipeline(str(model), replace(CONFIGS[backend], hf_overrides=scaling)) as pipe:
        found = pipe.engine.score(ids)
    wanted = expected(model, kind, ids)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("backend", CONFIGS)
def test_the_command_line_takes_them_too(
    backend: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(heldout_text()[:600])
    ids = Tokenizer.open(model).encode(heldout_text()[:600])[:LENGTH]
    for kind in ("yarn", "dynamic"):  # the second by the length alone
        scaling = json.dumps({"rope_scaling": {"type": kind, **SCALINGS[kind]}})
        asked = [] if kind == "dynamic" else ["--hf-overrides", scaling]
        file = tmp_path / f"{kind}.json"
        with pytest.raises(SystemExit) as ended:
            main([
                "eval", "ppl", str(model), "--data", str(tmp_path / "text.txt"), "--window", str(LENGTH),
                "--session-len", str(LENGTH), "--max-tokens", str(LENGTH), "--backend", backend, "--dtype", "float32",
                "--json", str(file), *asked,
            ])  # fmt: skip
        said = capsys.readouterr().err
        assert not ended.value.code, said
        assert ("dynamic NTK" in said) == (kind == "dynamic")
        found = json.loads(file.read_text())["perplexity"]
        assert found == pytest.approx(math.exp(-float(expected(model, kind, ids).mean())), rel=1e-3)
