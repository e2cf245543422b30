"""Layers that are read, and statistics that are taken, a part at a time: nothing depends on how small the parts are."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.models.sites import Site
from toolkit.models.spec import LinearSpec
from toolkit.quant.calibrate import calibrate
from toolkit.quant.layers import layerwise, statistics
from toolkit.quant.layers import source as layers
from toolkit.quant.layers.lazy import Lazy
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.layers.statistics import Gram, Taken, in_turns
from toolkit.quant.lite import Common, auto_awq, auto_gptq, blocked_fp8, mxfp4, search, smooth_quant
from toolkit.quant.methods import gptq
from toolkit.quant.methods.kv import kv
from toolkit.quant.options import Awq, Gptq, Search

METHODS: dict[str, Any] = {
    "awq": partial(auto_awq, options=Awq(tune_steps=0)),
    "awq+gptq": partial(auto_awq, options=Awq(rounding="gptq", tune_steps=0)),
    "gptq": partial(auto_gptq, options=Gptq(tune_steps=0)),
    "smooth_quant": smooth_quant,
    "search": partial(search, options=Search(bits=4.6)),
    "blocked_fp8": blocked_fp8,
    "mxfp4": mxfp4,
    "kv": kv,
    "calibrate": calibrate,
}
EXPERT = 4 * 3 * 64 * 128  # bytes of a tiny Mixtral's in float32


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> Common:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("It was a bright cold day in April, and the clocks were striking thirteen times. " * 60)
    return Common(calib_dataset=str(path), calib_samples=6, calib_seqlen=48, eval_tokens=200, batch_size=4)


def keep_nothing(patch: pytest.MonkeyPatch) -> None:
    """Every weight is read whenever it is used, statistics are taken for as few sites at a time as can be."""
    for module in (layers, layerwise):
        patch.setattr(module, "KEEP", 0)
    patch.setattr(layerwise, "module_bytes", lambda layer: 0)
    patch.setattr(statistics, "BESIDE", 0)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *((n, "mixtral") for n in METHODS if n != "search"),
        *(("awq", "qwen3_moe"), ("gptq", "internlm2")),
        pytest.param("search", "mixtral", marks=pytest.mark.slow),
    ],
)
def test_the_result_is_the_same_when_nothing_is_kept(
    name: str, family: str, tiny_models: Any, tmp_path: Path, common: Common, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tiny_models(family, dtype="bfloat16"))
    whole = METHODS[name](model, tmp_path / "whole", common=common)
    turns: list[int] = []
    keep_nothing(monkeypatch)
    monkeypatch.setattr(layerwise, "in_turns", lambda sites: _counted(in_turns(sites), turns))
    parts = METHODS[name](model, tmp_path / "parts", common=common)
    assert all(count > 1 for count in turns), "several passes of the text"
    assert bool(turns) == (name not in ("kv", "blocked_fp8", "mxfp4", "smooth_quant"))
    assert parts.quality == whole.quality
    files = sorted(p.name for p in (tmp_path / "whole").glob("*.safetensors"))
    for file in [*files, *(["config.json"] if name != "calibrate" else [])]:
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "parts" / file).read_bytes()


def _counted(groups: list[list[str]], turns: list[int]) -> list[list[str]]:
    turns.append(len(groups))
    return groups


@dataclass
class Watched(Mapping[str, torch.Tensor]):
    """Notes how many bytes of the weights that were read are alive at once."""

    weights: Mapping[str, torch.Tensor]
    alive: dict[int, int]
    most: list[int]

    def __getitem__(self, name: str) -> torch.Tensor:
        value = self.weights[name]
        self.alive[id(value)] = value.numel() * 4
        weakref.finalize(value, self.alive.pop, id(value), None)
        self.most.append(sum(self.alive.values()))
        return value

    def __iter__(self) -> Any:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "search"])  # its way back holds a layer
def test_one_expert_is_in_memory_at_a_time(
    name: str, tiny_models: Any, tmp_path: Path, common: Common, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_nothing(monkeypatch)
    monkeypatch.setattr(gptq, "ACROSS_BYTES", 0)
    alive: dict[int, int] = {}
    most: list[int] = []
    read = LayerSource.layer
    monkeypatch.setattr(LayerSource, "layer", lambda self, i, device: Watched(read(self, i, device), alive, most))
    options = getattr(METHODS[name], "keywords", {}).get("options")
    own = (
        {} if options is None else {"options": replace(options, guide_samples=0)}
    )  # gradients: their way back holds a layer
    METHODS[name](str(tiny_models("mixtral", dtype="bfloat16")), tmp_path / "out", common=common, **own)
    assert 0 < max(most) <= EXPERT
    assert not alive


@given(names=st.lists(st.sampled_from("abcdef"), max_size=20), room=st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_what_fits_is_kept_and_the_rest_made_again(names: list[str], room: int) -> None:
    made: list[str] = []

    def make(name: str) -> torch.Tensor:
        made.append(name)
        return torch.full((1 + "abcdef".index(name),), float(ord(name)))

    lazy = Lazy("abcdef", make, room)
    for name in names:
        assert lazy[name].tolist() == [float(ord(name))] * (1 + "abcdef".index(name))
    kept = {name for name in set(names) if made.count(name) == 1 < names.count(name)}
    assert sum(4 * (1 + "abcdef".index(name)) for name in kept) <= room
    assert all(made.count(name) in (1, names.count(name)) for name in set(names))
    assert list(lazy) == list("abcdef") and "g" not in lazy
    with pytest.raises(KeyError):
        lazy["g"]


@given(sizes=st.lists(st.integers(1, 20_000), max_size=12))
@settings(max_examples=100, deadline=None)
def test_every_site_has_its_turn_and_no_turn_holds_too_much(sizes: list[int]) -> None:
    sites = [Site(f"s{i}", n, (LinearSpec(f"l{i}", n, 4),), (), None) for i, n in enumerate(sizes)]
    groups = in_turns(sites)
    assert [name for group in groups for name in group] == [s.name for s in reversed(sites)]
    largest = max((4 * n * n for n in sizes), default=0)
    held = [sum(4 * sizes[int(name[1:])] ** 2 for name in group) for group in groups]
    assert all(x <= largest + max(largest // 2, 256 << 20) for x in held)
    assert all(a + b > largest for a, b in pairwise(held)), "no turn more than need be"


def test_statistics_are_handed_out_once() -> None:
    taken: list[list[str]] = []

    def take(names: Any) -> dict[str, Gram]:
        taken.append(list(names))
        found = {name: Gram.empty(2) for name in names if name != "unseen"}
        for gram in found.values():
            gram.add(torch.ones(3, 2))
        return found

    grams = Taken([["c", "unseen"], ["b", "a"]], take)
    assert taken == []
    assert grams("c") is not None and grams("unseen") is None and taken == [["c", "unseen"]]
    assert grams("b") is not None and grams("b") is None and grams("a") is not None
    assert taken == [["c", "unseen"], ["b", "a"]] and grams.dead == {"c": 0, "b": 0, "a": 0}
