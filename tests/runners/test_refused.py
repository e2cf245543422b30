"""What runners say of options and artifacts that do not go together: the whole line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.refused import refusing
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import build, get
from toolkit.models.tiny import tiny_config
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native import key_means

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
