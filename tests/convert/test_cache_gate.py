"""What bits of the KV cache cost is measured, kept, chosen by, and told before a model is started."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import numpy as np
import pytest

from toolkit.artifacts.cache_cost import FORM, CacheCost, Choice, keep_cost, read_cost, to_json
from toolkit.artifacts.engine.files import open_engine
from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.convert import cache_cost as measure
from toolkit.convert.cache_gate import check_cache
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing
from toolkit.engine.load.runner import cache_policy
from toolkit.errors import UsageError
from toolkit.runners.native.packing.artifact import open_packed


class Words:
    """A tokenizer for tiny models."""

    def encode(self, text: str) -> list[int]:
        return [3 + len(word) for word in text.split()]


@pytest.fixture
def artifact(tiny_models, tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path / "home"))
    return convert(str(tiny_models("llama")), tmp_path / "engine", Packing(target="cpu")).path


def made(policies: tuple[int, ...], size: int, loss: float) -> Choice:
    return Choice(policies, 5.0, size, 1 + loss, 0.0)


COST = CacheCost(
    1016,
    (made((8, 8), 80, 0.001), made((4, 4), 40, 0.012), made((44, 44), 30, 0.3), made((8, 4), 60, 0.004)),
    ({}, {}),
    form=FORM,
)


def test_the_least_bytes_within_the_loss_are_chosen() -> None:
    assert [COST.least(x).policies for x in (0.11, 0.5, 1.25, 40)] == [(8, 8), (8, 4), (4, 4), (44, 44)]
    assert COST.least(0.05) is None
    assert [CacheCost(1016, COST.choices[i:]).instead() for i in (0, 2)] == [4, 0]  # a mix is no policy for all layers
    assert COST.of(4).bytes == 40 and COST.of(0) is None
    assert dataclasses.replace(COST.choices[0], kl=0.5).loss == pytest.approx(np.expm1(0.5))  # a lucky few tokens


def test_layers_are_measured_as_they_run(artifact) -> None:
    opened, seen = open_engine(artifact), list[tuple[int, int]]()
    found = measure.cache_cost(
        opened.spec, open_packed(opened), Words(), by_layer=True, progress=lambda *x: seen.append(x)
    )
    layers = len(opened.spec.paged())
    assert len(found.layers) == layers and all(set(x) == {"8", "65", "4", "55", "54", "44"} for x in found.layers)
    assert all(x["8"] < x["44"] for x in found.layers)
    assert found.of(8).kl < found.of(4).kl < found.of(44).kl
    assert [found.of(p).bits for p in (8, 65, 55, 4, 44)] == [8, 5.5, 5, 5, 4]
    assert all(len(choice.policies) == layers for choice in found.choices)
    assert seen[-1][0] >= 5 + 6 * layers
    keep_cost(artifact, found)
    assert read_cost(artifact) == found
    again = measure.cache_cost(opened.spec, open_packed(opened), Words(), by_layer=False)
    assert again.choices == found.choices[:5] and again.key_means == found.key_means


def test_auto_runs_what_was_chosen_and_asks_for_a_measure(artifact) -> None:
    config = TurbomindEngineConfig(quant_policy="auto")
    with pytest.raises(UsageError, match="has not been measured; `tool convert MODEL --quant-policy auto"):
        cache_policy(artifact, config)
    keep_cost(artifact, COST)
    keep_cost(artifact, dataclasses.replace(COST, key_means="AAAA"))
    assert cache_policy(artifact, config)[0] == {"kv_layers": (8, 4), "key_means": "AAAA"}
    assert cache_policy(artifact, dataclasses.replace(config, kv_loss=0.01))[0] == {}
    assert cache_policy(artifact, TurbomindEngineConfig(quant_policy=4))[0] == {"quant_policy": 4, "key_means": "AAAA"}
    assert cache_policy(artifact, TurbomindEngineConfig(quant_policy=8))[0] == {"quant_policy": 8}


def test_figures_that_are_no_numbers_are_none(artifact) -> None:
    """One that is NaN counted as no loss at all. Infinity is what older versions wrote of one that breaks the model."""
    for kl, expected in ((math.nan, None), (math.inf, 0)):
        worst = dataclasses.replace(COST.choices[1], kl=kl)
        keep_cost(artifact, dataclasses.replace(COST, choices=(worst,)))
        found = read_cost(artifact)
        assert expected == (None if found is None else found.instead())


def test_what_breaks_a_model_is_refused_with_what_it_costs(artifact, tiny_models) -> None:
    keep_cost(artifact, COST)
    told: list[str] = []
    check_cache(artifact, TurbomindEngineConfig(quant_policy=4), told.append, force=False)
    assert "+1.20 % perplexity" in told.pop()
    broken = TurbomindEngineConfig(quant_policy=44)
    with pytest.raises(UsageError, match=r"44 costs this model \+30.00 % .* --quant-policy 4, or add --force"):
        check_cache(artifact, broken, told.append, force=False)
    check_cache(artifact, broken, told.append, force=True)
    assert not told  # the engine warns
    check_cache(tiny_models("llama"), broken, told.append, force=False)  # not packed: nothing quick to measure by
    assert "not known: the model is not packed" in told.pop()


def test_what_cannot_be_kept_is_refused_all_the_same(artifact, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("toolkit.convert.cache_gate._measured", lambda *given, **more: COST)
    told: list[str] = []
    with pytest.raises(UsageError, match=r"44 costs this model \+30.00 %"):
        check_cache(artifact, TurbomindEngineConfig(quant_policy=44), told.append, force=False)
    assert "cannot be written" in told[-1]


def test_python_is_warned_of_what_the_command_line_refuses(artifact, caplog) -> None:
    for known, policy, warned in (
        (None, 4, "quant_policy 4: what it costs this model was not measured"),
        (COST, 44, r"44 costs this model \+30.00 % perplexity .*; use quant_policy='auto' or 4"),
        (COST, 4, None),
        (COST, 8, None),
    ):
        if known is not None:
            keep_cost(artifact, known)
        caplog.clear()
        cache_policy(artifact, TurbomindEngineConfig(quant_policy=policy))
        if warned is None:
            assert not caplog.messages
        else:
            assert re.search(warned, caplog.text)


def test_a_broken_file_at_home_is_no_measure(artifact, tmp_path) -> None:
    keep_cost(artifact, COST)
    (file,) = (tmp_path / "home" / "kv-cost").iterdir()
    older = json.dumps(to_json(dataclasses.replace(COST, form=1)))
    for text in ("", "[]", json.dumps({"tokens": "x"}), older):
        file.write_text(text)
        assert read_cost(artifact) is None


@pytest.mark.parametrize("name, policy", [("int8", 8), ("none", 0), ("4", 4), ("auto", "auto"), ("fp8", 16)])
def test_policies_have_lmdeploy_s_names_too(name, policy) -> None:
    assert TurbomindEngineConfig(quant_policy=name).quant_policy == policy


def test_other_names_are_refused() -> None:
    with pytest.raises(UsageError, match=r"quant_policy: expected 0, 4 or 8 .* or auto, found 'turbo_quant'"):
        TurbomindEngineConfig(quant_policy="turbo_quant")
