"""Linears that tokens of pictures have otherwise, on the native runner: the oracle is the tensor runner on the same
weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing
from toolkit.errors import UsageError
from toolkit.models.registry import load_spec
from toolkit.models.routed import ROUTED
from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import RunnerError, RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native import library
from toolkit.runners.native.packing.packed import INT
from toolkit.runners.native.program import unsupported

pytestmark = pytest.mark.skipif(library.available() is not None, reason="the native library does not run here")
MODELS = [("cogvlm", 0), ("cogvlm", 1), ("internlmxcomposer2", 0), ("internlmxcomposer2", 2), ("internvl_chat", 2)]
KINDS: list[dict[str, Any]] = [
    {},
    {"load_format": "int8"},
    {"load_format": "int4"},
    {"vision": "int8"},
    {"vision": "int8", "load_format": "int4"},
]


def rows(spec: DecoderSpec, count: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, spec.hidden_size)).astype(np.float32)


def logits(path: Path, backend: Any, support: Any, threads: int = 1, seen: bool = True) -> np.ndarray:
    """Of a prompt with pictures beside one without, and a token more of each; in two chunks that cut a picture."""
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16, threads=threads)
    runner, _ = open_runner(path, backend=backend, options=options)
    driver = support("steps").Driver(runner)
    rng = np.random.default_rng(1)
    a, b = driver.add(), driver.add()
    text = [[int(x) for x in rng.integers(5, 300, n)] for n in (300, 40)]
    places = np.asarray([*range(5, 9), *range(30, 260)], np.int32)
    given, found = rows(runner.spec, len(places)), []

    for first, stop in ((0, 47), (47, 299)):
        inside = (places >= first) & (places < stop)
        index = places[inside] - np.int32(first)
        shown = {"embeds": given[inside], "embed_index": index, "routed": index[: len(index) * seen]}
        cut = {a: text[0][first:stop]} | ({b: text[1][:-1]} if first else {})
        found.append(driver.step(cut, want="all", **shown).logits)
    found.append(driver.step({a: text[0][-1:], b: text[1][-1:]}, want="all").logits)
    runner.close()
    return np.concatenate(found)


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("options", KINDS, ids=lambda x: "-".join(map(str, x.values())) or "dense")
@pytest.mark.parametrize("family, shape", MODELS)
def test_rows_of_pictures_have_their_own(
    family: str, shape: int, options: dict[str, Any], tiny_models: Any, tmp_path: Path, support: Any
) -> None:
    path, out = tiny_models(family, shape=shape), tmp_path / "engine"
    convert(str(path), out, Packing(target="cpu", dtype="float32", head_bits=16, **options), quiet=True)
    kinds = json.loads((out / "engine.json").read_text())["params"]
    own = {kinds[name]["kind"] == INT for name in kinds if name.startswith(ROUTED) and name.endswith(".weight")}
    assert own <= {"vision" in options}  # none of low rank ends so
    expected = logits(out, "pytorch", support)
    found = logits(out, "turbomind", support)
    assert distance(found, expected) < (0.05 if options else 1e-5)  # activations of 8 bits
    np.testing.assert_array_equal(logits(out, "turbomind", support, threads=3), found)
    assert distance(logits(out, "turbomind", support, seen=False), found) > 0.1


def test_what_the_runner_lacks_is_said(tiny_models: Any) -> None:
    spec = load_spec(open_checkpoint(tiny_models("cogvlm")))[0]
    assert unsupported(spec) is None and spec.vision is not None
    routed = spec.vision.routed
    alone = replace(spec.vision, routed=tuple(x for x in routed if not x.linear.endswith("up_proj")))
    odd = replace(spec.vision, routed=(replace(routed[0], linear="model.elsewhere"), *routed[1:]))
    assert "for a gate and not for what it multiplies" in str(unsupported(replace(spec, vision=alone)))
    assert "outside of attention and MLPs: model.elsewhere" in str(unsupported(replace(spec, vision=odd)))


@pytest.mark.parametrize("family, shape", [("cogvlm", 0), ("internlmxcomposer2", 2)])
def test_instruction_sets_agree(
    family: str, shape: int, tiny_models: Any, tmp_path: Path, support: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing = Packing(target="cpu", dtype="float32", head_bits=16, load_format="int4")
    convert(str(tiny_models(family, shape=shape)), tmp_path / "engine", packing, quiet=True)
    found = []
    for isa in library.isas():
        monkeypatch.setenv(library.ISA_VARIABLE, isa)
        found.append(logits(tmp_path / "engine", "turbomind", support))
    assert all(distance(other, found[0]) < 0.02 for other in found[1:])  # a code of an activation apart, here and there


def test_tokens_that_are_not_there_are_refused(tiny_models: Any, support: Any) -> None:
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16, threads=1)
    runner, _ = open_runner(tiny_models("cogvlm"), backend="turbomind", options=options)
    driver = support("steps").Driver(runner)
    with pytest.raises(RunnerError, match="routed"):
        driver.step({driver.add(): [7, 8]}, routed=np.asarray([2], np.int32))
    runner.close()


def test_adapters_that_come_later_are_refused_too(tiny_models: Any, support: Any, tmp_path: Path) -> None:
    """Beside a row that has one, pictures' tokens would be computed as words."""
    model = tiny_models("cogvlm")
    made = support("adapters").write_adapter(tmp_path / "made", model, "language_mlp.down_proj")
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16, threads=1)
    runner, _ = open_runner(model, backend="turbomind", options=options)
    runner.load_weights()
    with pytest.raises(UsageError, match="whose pictures have linears of their own"):
        runner.add_adapter(0, made)
    assert not runner.adapter_numbers
    runner.close()
