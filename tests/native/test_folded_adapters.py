"""Adapters of a model that scales have been folded into: as of the model that they were trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.artifacts.manifest import scales_file
from toolkit.artifacts.scales import read_scales
from toolkit.quant.merge import merge
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_model, open_runner
from toolkit.runners.native import library
from toolkit.runners.weights.info import scales_of

pytestmark = pytest.mark.skipif(library.available() is not None, reason="the native library does not run here")
ALL = "[qkvo]_proj|gate_proj|up_proj|down_proj"
DORA = {"use_dora": True}
SAVED = {"modules_to_save": ["v_proj", "o_proj", "down_proj", "up_proj"]}
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_attention_heads": 4}


@pytest.fixture
def folded(support: Any) -> Any:
    return support("folded")


def ids(count: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(0).integers(3, 300, count)]


def logits(support: Any, model: Path, *adapters: Path, backend: str = "turbomind", **how: Any) -> np.ndarray:
    """[40, V] of the last of ``adapters``, or of the model alone."""
    options = RunnerOptions(
        device="cpu", dtype="float32", block_size=16, adapters=tuple((a.name, str(a)) for a in adapters)
    )
    runner, why = open_runner(model, backend=backend, options=options, **how)  # type: ignore[arg-type]
    assert runner.name == ("native" if backend == "turbomind" else "tensor"), why
    driver = support("steps").Driver(runner)
    use = {"adapter": np.array([len(adapters) - 1], np.int32)}
    return np.asarray(driver.step({driver.add(): ids(40)}, "all", **use).logits)


@pytest.mark.parametrize(
    "family, backend, form",
    [("llama", "turbomind", form) for form in ({}, DORA, SAVED, {"use_rslora": True})]
    + [(family, "turbomind", DORA) for family in ("qwen3", "gemma2")]
    + [(family, "turbomind", {}) for family in ("qwen2_moe", "mixtral", "phi3", "deepseek_v3")]
    + [(family, "pytorch", {}) for family in ("llama", "qwen2", "gemma2", "phi3", "deepseek_v3")],
)
def test_what_was_folded_in_changes_nothing(
    family: str, backend: str, form: dict[str, Any], tiny_models: Any, support: Any, folded: Any, tmp_path: Path
) -> None:
    model = tiny_models(family)
    targets = {"phi3": "qkv_proj|o_proj|gate_up_proj|down_proj", "mixtral": "[qkvo]_proj|w[123]"}.get(family, ALL)
    targets = "q_[ab]_proj|kv_a_proj_with_mqa|o_proj" if family == "deepseek_v3" else targets
    made = support("adapters").write_adapter(tmp_path / "a", model, targets, **form)
    other = folded.fold_checkpoint(model, tmp_path / "folded")
    expected, found = (logits(support, m, made, backend=backend) for m in (model, other))
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert np.abs(expected - logits(support, model, backend=backend)).max() > 0.1

    scales_file(other).unlink()  # it is the scales that make it so
    wrong = logits(support, other, made, backend=backend)
    assert np.abs(wrong - expected).max() > 0.1


@pytest.fixture
def planted(tiny_models: Any, folded: Any, tmp_path: Path) -> Path:
    """A float model whose channels are of many sizes, as those of trained models are."""
    found: Path = folded.fold_checkpoint(tiny_models("llama", **SHAPE), tmp_path / "planted", known=False)
    return found


def check_near(
    support: Any, exact: Path, made: Path, folder: Path, model: Path, backend: str, rounds: bool, **how: Any
) -> None:
    """With the adapter ``model`` gives what the adapter merged into ``exact``, its own weights, gives; where it
    ``rounds`` activations, about so: without the scales the difference is more than all that the model gives."""
    merged = support("adapters").merge(exact, made, folder / "merged")
    expected, base = (logits(support, m) for m in (merged, exact))
    found = logits(support, model, made, backend=backend, **how)
    assert np.linalg.norm(found - expected) < (0.2 if rounds else 1e-4) * np.linalg.norm(expected)
    assert np.linalg.norm(expected - base) > 0.5 * np.linalg.norm(base)


@pytest.mark.parametrize("backend, form", [("turbomind", {}), ("turbomind", DORA), ("pytorch", {})])
def test_rounding_to_4_bits_while_a_model_is_read(
    backend: str, form: dict[str, Any], planted: Path, support: Any, folded: Any, tmp_path: Path
) -> None:
    made = support("adapters").write_adapter(tmp_path / "a", planted, ALL, **form)
    weights = open_model(planted, load_format="int4").weights()
    scales = scales_of(weights)
    assert scales is not None and max(float(s.columns.max()) for s in scales.values() if s.columns is not None) > 2
    exact = folded.unfold_checkpoint(planted, weights, scales, tmp_path / "exact")
    check_near(support, exact, made, tmp_path, planted, backend, backend == "turbomind", load_format="int4")


@pytest.mark.parametrize("method", ["awq", "awq+gptq", "smooth"])
def test_what_quantizers_fold_in_comes_along_to_artifacts(
    method: str,
    planted: Path,
    support: Any,
    folded: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Checkpoint, artifact of either target, and other formats; where it is not known, DoRA warns."""
    from toolkit.convert.convert import convert
    from toolkit.convert.formats import rewrite
    from toolkit.convert.options import Packing
    from toolkit.quant.lite import auto_awq, smooth_quant
    from toolkit.quant.options import Awq, Common, SmoothQuant

    support("lite").quicken(monkeypatch)
    text = tmp_path / "text.txt"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen times. " * 60)
    common = Common(calib_dataset=str(text), calib_samples=8, calib_seqlen=64, eval_tokens=256, dtype="float32")
    code = tmp_path / "code"
    if method == "smooth":
        smooth_quant(str(planted), code, SmoothQuant(tune_steps=0), common=common)
    else:
        rounding = "gptq" if method == "awq+gptq" else "nearest"
        auto_awq(str(planted), code, Awq(w_group_size=32, rounding=rounding, tune_steps=0), common=common)
    scales = read_scales(code)
    assert scales is not None
    for own in (own for name, own in scales.items() if "o_proj" in name or "down" in name or "q_proj" in name):
        assert own.columns is not None and float(own.columns.max() / own.columns.min()) > 2
    opened = open_model(code)
    exact = folded.unfold_checkpoint(planted, opened.weights(), scales, tmp_path / "exact")
    for kind, form in (("plain", {}), ("dora", DORA)):
        made = support("adapters").write_adapter(tmp_path / kind / "a", planted, ALL, **form)
        check_near(support, exact, made, tmp_path / kind, code, "turbomind", True)
    if method != "awq":
        return
    made = tmp_path / "plain" / "a"
    check_near(support, exact, made, tmp_path, code, "pytorch", False)
    for target, backend in (("cpu", "turbomind"), ("torch", "pytorch")):
        engine = tmp_path / target
        convert(str(code), engine, Packing(target=target, head_bits=None, adapters={"a": str(made)}))
        check_near(
            support, exact, engine / "adapters" / "a", tmp_path / f"of {target}", engine, backend, target == "cpu"
        )
    rewrite(str(code), tmp_path / "model.gguf", to="gguf")
    check_near(support, exact, made, tmp_path / "of gguf", tmp_path / "model.gguf", "pytorch", False)
    rewrite(str(code), tmp_path / "float", to="hf")
    check_near(support, exact, tmp_path / "dora" / "a", tmp_path / "of float", tmp_path / "float", "turbomind", False)

    def told() -> int:
        return sum("use_dora: " in record.getMessage() for record in caplog.records)

    assert not told()
    for name in ("folded.scales", "manifest.json"):  # a checkpoint of another tool
        (code / name).unlink()
    logits(support, code, tmp_path / "plain" / "a")
    assert not told()
    logits(support, code, tmp_path / "dora" / "a")
    assert told() == 1


@pytest.mark.parametrize("family, targets", [("llama", ALL), ("phi3", "qkv_proj|gate_up_proj|o_proj")])
@pytest.mark.parametrize("form", [{}, DORA])
def test_merging_into_a_model_that_something_was_folded_into(
    family: str, targets: str, form: dict[str, Any], tiny_models: Any, support: Any, folded: Any, tmp_path: Path
) -> None:
    model = tiny_models(family)
    made = support("adapters").write_adapter(tmp_path / "a", model, targets, **form)
    other = folded.fold_checkpoint(model, tmp_path / "folded")
    merge(str(other), str(made), tmp_path / "ours")
    expected = logits(support, support("adapters").merge(model, made, tmp_path / "expected"))
    assert np.abs(logits(support, tmp_path / "ours") - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("backend", ["turbomind", "pytorch"])
def test_new_weights_have_scales_of_their_own(
    backend: str, planted: Path, support: Any, folded: Any, tmp_path: Path
) -> None:
    other = folded.fold_checkpoint(planted, tmp_path / "other", known=False, seed=7)
    made = support("adapters").write_adapter(tmp_path / "a", planted, ALL)
    expected = logits(support, other, made, backend=backend, load_format="int4")
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16, adapters=(("a", str(made)),))
    runner, _ = open_runner(planted, backend=backend, options=options, load_format="int4")  # type: ignore[arg-type]
    runner.load_weights()
    runner.release_weights()
    runner.use_weights(open_model(other, load_format="int4").weights)
    driver = support("steps").Driver(runner)
    use = {"adapter": np.array([0], np.int32)}
    np.testing.assert_array_equal(driver.step({driver.add(): ids(40)}, "all", **use).logits, expected)
