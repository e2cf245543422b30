"""LoRA adapters on the native runner, in float32: the oracles are models with the adapter merged into their weights by
torch, and the same requests alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native import library

pytestmark = pytest.mark.skipif(library.available() is not None, reason="the native library does not run here")
ATTENTION = "q_proj|v_proj"
ALL = r"(?:[qkvo]|gate|up|down|qkv|gate_up|wqkv|wo)_?(?:proj)?|w[123]"
EXPERTS = r"experts\.\d+\.w[123]|gate|[qkvo]_proj"


def runner_for(model: Path, *adapters: Path, **options: Any) -> Any:
    fields = {"device": "cpu", "dtype": "float32", "block_size": 16, "threads": 2} | options
    named = tuple((a.name, str(a)) for a in adapters)
    load_format = fields.pop("load_format", "auto")
    made = RunnerOptions(adapters=named, **fields)
    runner, why = open_runner(model, backend="turbomind", options=made, load_format=load_format)
    assert runner.name == "native", why
    return runner


def ids(count: int, seed: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(3, 300, count)]


def alone(support: Any, runner: Any, prompt: list[int], adapter: int = -1) -> np.ndarray:
    """[len(prompt), V]: all but the last tokens as a prompt, then one alone."""
    driver = support("steps").Driver(runner)
    number, use = driver.add(), {"adapter": np.array([adapter], np.int32)}
    first = driver.step({number: prompt[:-1]}, "all", **use).logits
    return np.concatenate([first, driver.step({number: prompt[-1:]}, "all", **use).logits])


def check_merged(support: Any, model: Path, made: Path, merged: Path, **options: Any) -> None:
    """An adapter gives what merged weights give, and rows without it the base's bits."""
    expected = alone(support, runner_for(merged, **options), ids(43, 0))
    runner = runner_for(model, made, **options)
    found = alone(support, runner, ids(43, 0), adapter=0)
    np.testing.assert_allclose(found, expected, rtol=3e-4, atol=3e-4)
    base = alone(support, runner_for(model, **options), ids(43, 0))
    np.testing.assert_array_equal(alone(support, runner, ids(43, 0)), base)
    assert np.abs(found - base).max() > 0.05


@pytest.mark.parametrize(
    "family, targets, config",
    [
        ("llama", ATTENTION, {}),
        ("llama", ALL, {"rank": 24, "use_rslora": True}),
        ("llama", ALL, {"rank_pattern": {"o_proj": 2}, "alpha_pattern": {"down_proj": 3}}),
        ("llama", f"{ALL}|lm_head", {"rank": 40}),
        ("llama", "embed_tokens", {}),
        ("llama", ALL, {"use_dora": True}),
        ("llama", "q_proj|down_proj", {"modules_to_save": ["lm_head", "embed_tokens"]}),
        ("phi3", ALL, {"use_dora": True}),
        ("internlm2", ALL, {}),
        ("gemma2", ALL, {}),
        ("deepseek_v3", "q_[ab]_proj|kv_a_proj_with_mqa|o_proj", {}),
        ("mixtral", EXPERTS, {}),
    ],
)
def test_an_adapter_gives_what_merged_weights_give(
    family: str, targets: str, config: Any, tiny_models: Any, support: Any, tmp_path: Path
) -> None:
    model, adapters = tiny_models(family), support("adapters")
    made = adapters.write_adapter(tmp_path / "one", model, targets, **config)
    check_merged(support, model, made, adapters.merge(model, made, tmp_path / "merged"))
