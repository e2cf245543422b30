"""Kept blocks of real runners: after a restart an answer has the bits that it has without, and computes little."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.engine.load.setup import find
from toolkit.engine.load.start import start
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.errors import UsageError

# full attention; windows in some layers; short convolutions; delta rule; Mamba; one row as key and value
FAMILIES = ("llama", "gemma2", "lfm2", "qwen3_5_text", "falcon_h1", "deepseek_v2")
PROMPT = np.random.default_rng(5).integers(3, 300, 90).tolist()


def answer(model: Path, backend: str, kept: Path | None, **more: Any) -> tuple[list[int], list[Any], dict[str, Any]]:
    """(tokens, log-probabilities, figures) of one request to an engine that is closed behind it."""
    common: dict[str, Any] = {"dtype": "float32", "session_len": 128, "threads": 1, "device": "cpu"}
    common |= {"kv_cache_dir": None if kept is None else str(kept), "cache_max_entry_count": 40} | more
    config: Any = TurbomindEngineConfig(cache_block_seq_len=16, **common)
    if backend == "pytorch":
        common["device_type"] = common.pop("device")
        config = PytorchEngineConfig(block_size=16, **common)
    core, facts = start(find(str(model), config, None), None, lambda line: None)
    tokens, probabilities = [], []
    try:
        core.add(EngineRequest("r", PROMPT, SamplingParams(12, logprobs=3)))
        while core.has_work:
            for output in core.step():
                assert output.error is None
                tokens += output.token_ids
                probabilities += output.logprobs
        return tokens, probabilities, core.stats() | {"runner": facts.runner, "cached": output.cached_tokens}
    finally:
        core.close()


@pytest.mark.parametrize("backend", ["turbomind", "pytorch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_restart_changes_no_bit(
    family: str, backend: str, tiny_models: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path / "home"))
    model, kept = tiny_models(family), tmp_path / "kv"
    cold = answer(model, backend, None)
    first = answer(model, backend, kept)
    again = answer(model, backend, kept)
    assert first[:2] == cold[:2] and list(kept.rglob("*.kv")) and not first[2]["kept_hit_tokens"]
    assert again[2]["kept_hit_tokens"] == 80 == again[2]["cached"] and not again[2]["kept_refused_files"]
    assert again[0] == cold[0]
    if again[2]["runner"] == "native":
        assert again[1] == cold[1]
    else:  # a product of ten rows is rounded otherwise than one of ninety
        for ours, theirs in zip(again[1], cold[1], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-3)


def test_what_numbers_depend_on_tells_models_apart(
    tiny_models: Callable[..., Path], tiny_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path / "home"))
    kept = tmp_path / "kv"
    own = tiny_checkpoint("llama", tmp_path / "own")
    ways: list[tuple[Path, dict[str, Any]]] = [
        (own, {}),
        (own, {"quant_policy": 8}),
        (own, {"dtype": "bfloat16"}),
        (own, {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}}),
        (tiny_checkpoint("llama", tmp_path / "other", seed=1), {}),
    ]
    for count, (model, more) in enumerate(ways, 1):
        assert answer(model, "turbomind", kept, **more)[2]["kept_hit_tokens"] == 0
        assert len(list(kept.iterdir())) == count
        assert answer(model, "turbomind", kept, **more)[2]["kept_hit_tokens"] == 80
    weights = own / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert answer(own, "turbomind", kept)[2]["kept_hit_tokens"] == 0


@pytest.mark.parametrize("more", [{"load_format": "dummy"}])
def test_random_weights_are_not_kept(
    more: dict[str, Any], tiny_models: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path / "home"))
    assert "kept_hit_tokens" not in answer(tiny_models("llama"), "turbomind", tmp_path / "kv", **more)[2]
    assert not (tmp_path / "kv").exists()


def test_room_for_less_than_a_block_is_refused(
    tiny_models: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would ever be kept, and nobody be told."""
    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path / "home"))
    with pytest.raises(
        UsageError, match=r"^kv_cache_disk: expected at least \d+ bytes, a block of this model, found 1024"
    ):
        answer(tiny_models("llama"), "turbomind", tmp_path / "kv", kv_cache_disk="1KiB")
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize(
    "fields, says",
    [
        ({"kv_cache_dir": ""}, "kv_cache_dir: expected a path"),
        ({"kv_cache_dir": "x", "enable_prefix_caching": False}, "kv_cache_dir: keeps what the prefix cache has"),
        ({"kv_cache_key": "x"}, "kv_cache_key: nothing is kept without kv_cache_dir"),
        ({"kv_cache_dir": "x", "kv_cache_disk": "much"}, "kv_cache_disk: expected a size"),
        ({"kv_cache_dir": "x", "kv_cache_seconds": 0}, "kv_cache_seconds"),
    ],
)
def test_options_that_cannot_be(fields: dict[str, Any], says: str) -> None:
    for config in (TurbomindEngineConfig, PytorchEngineConfig):
        with pytest.raises(UsageError, match=says):
            config(**fields)
