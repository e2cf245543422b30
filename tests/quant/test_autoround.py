"""auto-round by its library: what it writes is what comes out, in its own format and in others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.weights import canonical_weights, validate_checkpoint
from toolkit.errors import ToolkitError
from toolkit.models.registry import load_spec
from toolkit.quant import autoround
from toolkit.quant.lite import Common, auto_round


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> Common:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("It was a bright cold day in April, and the clocks were striking thirteen times. " * 60)
    return Common(calib_dataset=str(path), calib_samples=6, calib_seqlen=48, eval_tokens=200, dtype="float32")


def read(path: Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(path)
    _, stored = load_spec(checkpoint)
    validate_checkpoint(checkpoint, stored)
    return canonical_weights(checkpoint, stored)


def test_the_library_s_codes_arrive_in_every_format(
    tiny_models: Any, tmp_path: Path, common: Common, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses
    import shutil

    kept = tmp_path / "kept"
    real = autoround.tune

    def once(source: Any, ids: Any, target: Path, *rest: Any) -> None:
        """Tune the first time, afterwards hand over what was found."""
        if kept.exists():
            shutil.copytree(kept, target)
        real(source, ids, target, *rest)
        shutil.copytree(target, kept, dirs_exist_ok=True)

    monkeypatch.setattr(autoround, "tune", once)
    model = str(tiny_models("qwen3"))
    found = {}
    for form in ("auto_round", "gptq", "compressed-tensors", "awq"):
        chosen = dataclasses.replace(common, format=form)
        result = auto_round(model, tmp_path / form, iters=2, w_group_size=32, common=chosen)
        found[form] = read(tmp_path / form)
    theirs = read(autoround.library_result(kept))
    names = [x["name"] for x in result.quality["layers"]]
    assert len(names) == 14 and all(x["method"] == "auto_round" for x in result.quality["layers"])
    for form, weights in found.items():
        for name in names:
            assert torch.equal(weights[name].dequantize(), theirs[name].dequantize()), (form, name)
    assert result.quality["kl"] < 0.3


def test_a_family_that_transformers_lacks(tiny_models: Any, tmp_path: Path, common: Common) -> None:
    with pytest.raises(ToolkitError, match="internlm2 is none; try auto_awq"):
        auto_round(str(tiny_models("internlm2")), tmp_path / "out", common=common)
    assert not (tmp_path / "out").exists()


def test_what_the_library_raises_is_one_line(
    tiny_models: Any, tmp_path: Path, common: Common, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(autoround, "_tune", broken)
    with pytest.raises(ToolkitError, match="auto-round failed: first line; try auto_awq") as caught:
        auto_round(str(tiny_models("llama")), tmp_path / "out", common=common)
    assert "second" not in str(caught.value)
