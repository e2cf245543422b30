"""What runners say of options and artifacts that do not go together: the whole line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.refused import refusing
from toolkit.artifacts.engine.files import open_engine
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import build, get
from toolkit.models.tiny import tiny_config
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native import key_means
from toolkit.runners.native.packing.artifact import open_packed
from toolkit.runners.native.packing.mtp import check_numbers
from toolkit.runners.native.rank_files import open_rank
from toolkit.runners.tensor.drafts.mtp import open_canonical_mtp

refused = refusing(UsageError)


@pytest.mark.parametrize(
    ("family", "backend", "options", "how", "told"),
    [
        (
            "llama",
            "pytorch",
            {},
            {"kv_window": 64},
            "kv_window: the tensor runner keeps no first tokens; give kv_sinks 0, or --backend turbomind",
        ),
        (
            "llama",
            "pytorch",
            {"kv_layers": (8, 4)},
            {},
            "quant_policy auto: the tensor runner has one precision for all layers; give 0, 8 or 4",
        ),
        (
            "llama",
            None,
            {"quant_policy": 16},
            {"kv_window": 64},
            "kv_window: turbomind's native runner does not run here: its KV cache knows no float8 (quant_policy 16), "
            "only 0, 8, 4 and 44; leave it out, or give kv_sinks 0",
        ),
    ],
)
def test_options(family: str, backend: Any, options: Any, how: Any, told: str, tiny_models: Any) -> None:
    given = replace(RunnerOptions(), **options)
    assert refused(lambda: open_runner(tiny_models(family), backend=backend, options=given, **how)) == told


def test_means_of_another_model() -> None:
    spec, _ = build(tiny_config(get("llama")))
    told = "mean keys: not of this model; run `tool convert --quant-policy auto` again"
    for text in ("AAAA", "no base64"):
        assert refused(lambda text=text: key_means.read_means(spec, text), ToolkitError) == told  # type: ignore[misc]


def test_adapters_of_an_artifact_whose_config_was_changed(tiny_models: Any, tmp_path: Path) -> None:
    path = convert(str(tiny_models("llama")), tmp_path / "e", Packing(target="torch"), quiet=True).path
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    given = RunnerOptions(adapters=(("mine", str(tmp_path)),))
    told = f"{path / 'config.json'}: describes another model than the artifact's spec; convert the model again"
    assert refused(lambda: open_runner(path, backend="pytorch", options=given), ToolkitError) == told


Q, NORM = "model.layers.0.self_attn.q_proj", "model.layers.0.input_layernorm"


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        (Q, {"rows": 32, "cols": 128}, "expected 64 x 64, found 32 x 128"),
        (Q, {"rows": "many"}, "rows: expected "),
        (NORM, {"dtype": 1, "rows": 128}, "expected numbers of 32 bits, found another type"),
    ],
)
def test_parameters_of_an_artifact(name: str, fields: Any, told: str, tiny_models: Any, tmp_path: Path) -> None:
    path = convert(str(tiny_models("llama")), tmp_path / "e", Packing(target="cpu"), quiet=True).path
    whole = open_engine(path)
    odd = replace(whole, params=whole.params | {name: whole.params[name] | fields})
    found = refused(lambda: open_packed(odd), ToolkitError)
    assert found.startswith(f"{path / 'engine.json'}: params: {name}: {told}")
    assert found.endswith("; convert the model again")


def test_files_of_ranks(tiny_models: Any, tmp_path: Path) -> None:
    path = convert(str(tiny_models("llama")), tmp_path / "e", Packing(target="cpu", tp=2), quiet=True).path
    part = open_engine(path, (0, 2))
    (first, *others), again = part.tiles, "convert the model again"
    for tiles, told in (
        ((0, 999), f"{path / 'engine.json'}: params: {Q}: ranks: found tiles 0 to 999; {again}"),
        ((1, 3), f"{path}: cut for ranks by another version; {again}"),
    ):
        odd = replace(part, tiles=type(part.tiles)([first | {Q: tiles}, *others]))
        assert refused(lambda odd=odd: open_rank(odd), ToolkitError) == told  # type: ignore[misc]


def test_artifacts_whose_mtp_layer_lacks_something() -> None:
    spec: Any = SimpleNamespace(numbers=lambda: {"a": 3}, layer=SimpleNamespace(vectors=dict, linears=list))
    told = "m: a: expected 3 numbers, found nothing; convert the model again"
    assert refused(lambda: check_numbers(spec, {}, "m"), ToolkitError) == told
    artifact: Any = SimpleNamespace(mtp=spec, mtp_params={}, path=Path("m"))
    told = "m/engine.json: mtp: a is missing; convert the model again"
    assert refused(lambda: open_canonical_mtp(artifact, "cpu"), ToolkitError) == told
