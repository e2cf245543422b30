"""What `tool convert` says of options that cannot be: the whole line."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.refused import refusing
from toolkit.artifacts.engine.files import open_engine
from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.convert.cache_cost import cache_cost
from toolkit.convert.cache_gate import check_cache
from toolkit.convert.convert import Packing, convert
from toolkit.convert.pack_cache import remove
from toolkit.errors import ToolkitError, UsageError
from toolkit.runners.base import RunnerError
from toolkit.runners.native import library
from toolkit.runners.native.packing.artifact import open_packed

refused = refusing(UsageError)
FORCES = "leave the option out"


@pytest.mark.parametrize(
    ("family", "given", "told"),
    [
        ("llama", {"load_format": "odd"}, "--load-format: expected auto, int8, int4, found 'odd'"),
        ("llama", {"quant_policy": 8}, "--quant-policy: expected auto, found 8; others need no measure"),
        (
            "bert",
            {"quant_policy": "auto"},
            f"--quant-policy: this model keeps nothing of a text; {FORCES}",
        ),
        (
            "llama",
            {"quant_policy": "auto", "target": "torch"},
            f"--quant-policy: for target cpu, this is torch; {FORCES}",
        ),
        (
            "llama",
            {"tp": 2, "target": "torch"},
            f"--tp: files of ranks are for target cpu, this is torch; {FORCES}: ranks cut the artifact when they "
            "load it",
        ),
        ("llama", {"tp": 9}, "--tp 9: layer 0: 4 heads are fewer than 9 ranks; up to 4 would do"),
        (
            "mamba2",
            {"quant_policy": "auto"},
            "quant_policy auto: the model keeps no keys of single tokens; give 0 or 8",
        ),
        ("sdar", {"quant_policy": "auto"}, "quant_policy auto: the model keeps no keys of single tokens; give 0 or 8"),
        ("llama", {"target": "odd"}, "--target: expected auto, "),
        ("llama", {"vision": "int8"}, f"--vision int8: the model reads text alone; {FORCES}"),
        (
            "qwen2_5_vl",
            {"vision": "int8", "target": "torch"},
            f"--vision int8: for target cpu, this is torch; {FORCES}",
        ),
    ],
)
def test_options(family: str, given: dict[str, Any], told: str, tiny_models: Any, tmp_path: Path) -> None:
    def run() -> None:
        convert(str(tiny_models(family)), tmp_path / "out", options=Packing(**given), quiet=True)

    assert refused(run, None).startswith(told)
    assert not (tmp_path / "out").exists()


def test_a_machine_without_the_native_library(
    tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "available", lambda: "no compiler")
    told = refused(lambda: convert(str(tiny_models("llama")), tmp_path / "out", Packing(target="cpu"), quiet=True))
    assert told == "--target cpu: no compiler; use --target auto"


@pytest.mark.parametrize(
    ("packing", "why"),
    [
        (None, "the model is not packed for this CPU; `tool convert` packs it"),
        (Packing(target="torch"), "measured on CPUs alone, and this artifact is for torch"),
        (
            Packing(target="cpu", tp=2),
            "it is packed for ranks; `tool convert --quant-policy auto` measures before it cuts",
        ),
    ],
)
def test_models_whose_cache_is_not_measured(
    packing: Packing | None, why: str, tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path / "home"))
    model: Path = tiny_models("llama")
    if packing is not None:
        model = convert(str(model), tmp_path / "engine", packing, quiet=True).path
    told: list[str] = []
    check_cache(model, TurbomindEngineConfig(quant_policy=4), told.append, force=False)
    assert told == [f"--quant-policy 4: what it costs is not known: {why}"]


def test_a_cache_that_cannot_be_measured(tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine(convert(str(tiny_models("llama")), tmp_path / "e", Packing(target="cpu"), quiet=True).path)
    weights = open_packed(engine)

    def measured(ids: list[int]) -> None:
        cache_cost(engine.spec, weights, SimpleNamespace(encode=lambda text: ids), by_layer=False)  # type: ignore[arg-type]

    told = "quant_policy auto: the model's tokenizer does not read the text it is measured on"
    for ids in ([], [engine.spec.vocab_size] * 4096):
        assert refused(lambda ids=ids: measured(ids), ToolkitError) == told  # type: ignore[misc]

    def full(*_: Any, **__: Any) -> None:
        raise RunnerError("no memory")

    monkeypatch.setattr("toolkit.convert.cache_cost.NativeRunner", full)
    told = "the precision of the KV cache cannot be measured: no memory"
    assert refused(lambda: measured([1] * 4096), ToolkitError) == told


def test_a_packed_model_that_stays(tmp_path: Path) -> None:
    (entry := tmp_path / "entry").mkdir()
    (tmp_path / f".entry.removed-{os.getpid()}" / "something").mkdir(parents=True)
    assert refused(lambda: remove(entry), ToolkitError) == f"{entry}: cannot be deleted: Directory not empty"
    assert entry.is_dir()
