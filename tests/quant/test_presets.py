"""How much effort a run spends, and how long it says that this takes."""

from __future__ import annotations

import itertools
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.commands.lite_options import LiteFlags
from toolkit.errors import UsageError
from toolkit.quant import estimate
from toolkit.quant.calibrate import calibrate
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.lite import Common, auto_awq, smooth_quant
from toolkit.quant.methods.awq import SEARCH_ROWS, scale_candidates
from toolkit.quant.options import Awq
from toolkit.quant.presets import PRESETS

WORK = estimate.Work(
    "lite auto_awq", tokens=8192, seqlen=512, written=8192, layers=30, passes=1, products=True,
    guided=32, tune_steps=64, iters=0, eval_tokens=4096,
)  # fmt: skip
RATES = estimate.Rates(exact=1e-5, rough=5e-6, product=1e-11, rounding=1e-10)


def test_presets_are_one_table_and_options_go_before_them() -> None:
    common = Common()
    assert replace(LiteFlags().common(), notice=common.notice) == common
    assert replace(LiteFlags(preset="balanced").common(), notice=common.notice) == common
    fast = LiteFlags(preset="fast").common()
    assert (fast.effort.calib_samples, fast.measured, fast.effort.tune_steps) == (16, 4096, 0)
    given = LiteFlags(preset="fast", calib_samples=5, eval_tokens=24576).common()
    assert (given.calib_samples, given.measured, given.effort.tune_steps) == (5, 24576, 0)
    with pytest.raises(UsageError, match="--preset: expected fast, balanced, best, found 'slow'"):
        LiteFlags(preset="slow").common()


def test_a_run_without_words_is_the_balanced_one() -> None:
    usual, common = PRESETS["balanced"], Common()
    assert common.effort == usual and common.measured == usual.eval_tokens


@pytest.mark.parametrize(
    ("preset", "rounding", "method"),
    [("fast", None, "awq"), ("balanced", None, "awq+gptq"), ("best", None, "awq+gptq"), ("best", "nearest", "awq")],
)
def test_all_presets_but_fast_round_with_error_feedback(
    tiny_models: Any, tmp_path: Path, harbour: str, preset: str, rounding: str | None, method: str
) -> None:
    common = Common(preset=preset, calib_dataset=harbour, calib_samples=4, calib_seqlen=48, eval_tokens=64)
    found = auto_awq(str(tiny_models("llama")), tmp_path / "out", Awq(rounding=rounding, tune_steps=0), common=common)
    assert {linear["method"] for linear in found.quality["layers"]} == {method}


@pytest.mark.parametrize("more", ["tokens", "written", "guided", "tune_steps", "eval_tokens", "iters"])
def test_more_work_takes_longer_in_proportion(tiny_models: Any, more: str) -> None:
    source = LayerSource(tiny_models("llama"))

    def total(count: int) -> float:
        return sum(estimate.seconds(source, replace(WORK, **{more: count}), RATES).values())

    assert total(2000) - total(1000) == pytest.approx(total(1000) - total(0))
    assert total(1000) > total(0)


def test_awq_takes_a_product_for_every_scale_that_it_tries(tiny_models: Any) -> None:
    source = LayerSource(tiny_models("llama"))
    rates = estimate.Rates(exact=0.0, rough=0.0, product=1e-9, rounding=0.0)
    awq, other = (
        estimate.seconds(source, replace(WORK, stage=f"lite {method}", layers=len(source.spec.layers)), rates)["layers"]
        for method in ("auto_awq", "auto_gptq")
    )
    trials = sum(
        len(list(scale_candidates(torch.ones(x.in_features), torch.ones(x.in_features))))
        * 2
        * min(x.out_features, SEARCH_ROWS)
        * x.in_features**2
        for x in source.quantizable()
    )
    assert awq - other == pytest.approx(trials * 1e-9)


def test_the_time_is_said_before_the_work_and_resuming_too(
    tiny_models: Any, tmp_path: Path, harbour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    common = Common(calib_dataset=harbour, calib_samples=4, calib_seqlen=48, eval_tokens=128, notice=said.append)

    def killed(what: str, done: int, total: int) -> None:
        if what == "quantizing and measuring layers":
            assert any(line.startswith("time: about ") for line in said)
        if (what, done) == ("quantizing and measuring layers", 1):
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        auto_awq(str(tiny_models("llama")), tmp_path / "out", Awq(tune_steps=0), common=common, progress=killed)
    assert not any("going on" in line for line in said)
    said.clear()
    auto_awq(str(tiny_models("llama")), tmp_path / "out", Awq(tune_steps=0), common=common)
    assert any(re.fullmatch(r"going on where an earlier run was: 1 of \d+ layers are quantized", s) for s in said)
    said.clear()
    assert auto_awq(str(tiny_models("llama")), tmp_path / "out", Awq(tune_steps=0), common=common).already_there
    assert not any(line.startswith("time:") for line in said)


def test_rates_do_not_count_waiting_for_a_neighbour(tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 1e6)
    monkeypatch.setattr(
        estimate, "time", SimpleNamespace(perf_counter=lambda: next(clock), process_time=time.process_time)
    )
    with torch.inference_mode():
        rates = estimate.measure(LayerSource(tiny_models("llama")), torch.device("cpu"))
    assert rates.exact < 1 and rates.rounding < 1


def test_rates_are_those_of_this_machine(tiny_models: Any) -> None:
    source = LayerSource(tiny_models("llama"))
    with torch.inference_mode():
        rates = estimate.measure(source, torch.device("cpu"))
    assert all(0 < rate < 1 for rate in (rates.exact, rates.rough, rates.product, rates.rounding))
    assert re.fullmatch(r"time: about (6[0-9]|[0-9]) s on this machine.*", estimate.line({"layers": 0.2}))


def test_best_smooth_quant_tunes_where_there_is_text_and_memory_and_leaves_it_out_where_not(
    tiny_models: Any, tmp_path: Path, harbour: str
) -> None:
    model, said = str(tiny_models("llama")), list[str]()
    common = Common(calib_dataset=harbour, calib_samples=2, calib_seqlen=32, eval_tokens=64, notice=said.append)
    calibrate(model, tmp_path / "statistics", common=common)
    for name, tuned, more in (
        ("text", True, {}),
        ("saved", False, {"calibration": str(tmp_path / "statistics")}),
        ("narrow", False, {"cache_memory": 1e-6}),
    ):
        found = smooth_quant(model, tmp_path / name, common=replace(common, preset="best", **more))
        assert ("tuning" in found.quality) == ("tune_steps" in found.options) == tuned
    assert sum("--tune-steps 64 does it all the same" in line for line in said) == 1
