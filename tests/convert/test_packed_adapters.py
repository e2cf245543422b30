"""Adapters that an artifact holds: those of the checkpoint, wherever the artifact goes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from toolkit import GenerationConfig, TurbomindEngineConfig, pipeline
from toolkit.artifacts.manifest import read_manifest
from toolkit.commands.main import main
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing
from toolkit.errors import ToolkitError, UsageError

ASKED = GenerationConfig(max_new_tokens=12, ignore_eos=True, do_sample=False)


@pytest.fixture(scope="module")
def made(tiny_models: Any, support: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(tiny_models("llama"), folder / "model")
    for name, linears in (("tales", "q_proj|v_proj"), ("verse", "o_proj|down_proj")):
        support("adapters").write_adapter(folder / name, folder / "model", linears)
    return folder


def said(path: Path, adapter: str | None, **config: Any) -> list[int]:
    with pipeline(str(path), TurbomindEngineConfig(device="cpu", dtype="float32", **config)) as pipe:
        found = pipe("The quick brown fox", ASKED, do_preprocess=False, adapter_name=adapter)
    ids: list[int] = found.token_ids
    return ids


def test_an_artifact_answers_by_the_adapters_that_it_holds(made: Path, tmp_path: Path) -> None:
    given = {"tales": str(made / "tales"), "verse": str(made / "verse")}
    done = convert(str(made / "model"), tmp_path / "out", Packing(adapters=given, head_bits=16))
    assert set(done.manifest.options["adapters"]) == set(given)
    again = convert(str(made / "model"), tmp_path / "out", Packing(adapters=given, head_bits=16))
    assert again.already_there
    away = tmp_path / "elsewhere" / "copied"
    shutil.copytree(tmp_path / "out", away)
    shutil.rmtree(tmp_path / "out")
    manifest = read_manifest(away)
    assert manifest is not None and {"adapters/tales/adapter_config.json"} < {file.name for file in manifest.files}
    answers = {name: said(made / "model", name, adapters=given) for name in (None, "tales", "verse")}
    assert len({tuple(ids) for ids in answers.values()}) == 3
    for name, ids in answers.items():
        assert said(away, name) == ids
    # one more from outside, and one in the place of one that it holds
    assert said(away, "more", adapters={"more": str(made / "verse")}) == answers["verse"]
    assert said(away, "tales", adapters={"tales": str(made / "verse")}) == answers["verse"]


def test_a_chat_names_one_that_the_artifact_holds(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--adapters", f"tales={made / 'tales'}", f"verse={made / 'verse'}", "--head-bits", "16"]
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(made / "model"), "--dst-path", str(tmp_path / "out"), *flags])
    assert not ended.value.code
    capsys.readouterr()
    told = {}
    for name in ("tales", "verse"):
        for model, where in ((tmp_path / "out", name), (made / "model", made / name)):
            asked = ["--adapters", f"{name}={where}", "--prompt", "fox", "--max-new-tokens", "8", "--dtype", "float32"]
            with pytest.raises(SystemExit):
                main(["chat", str(model), *asked])
            told[name, model] = capsys.readouterr().out
    for name in ("tales", "verse"):
        assert told[name, tmp_path / "out"] == told[name, made / "model"] != ""


def test_what_does_not_fit_is_refused_before_anything_is_written(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "tales", tmp_path / "other")
    config = json.loads((tmp_path / "other" / "adapter_config.json").read_text())
    (tmp_path / "other" / "adapter_config.json").write_text(json.dumps(config | {"r": 3}))
    for given, error, told in (
        ({"a/b": str(made / "tales")}, UsageError, "--adapters: expected a name"),
        ({"..": str(made / "tales")}, UsageError, "--adapters: expected a name"),
        ({"x": str(tmp_path / "none")}, UsageError, "^adapters: x: .*none: no such directory"),
        ({"demo": "demo"}, UsageError, "^adapters: demo: no such directory"),  # a model, no adapter
        ({"x": str(tmp_path / "other")}, ToolkitError, "other"),
    ):
        with pytest.raises(error, match=told):
            convert(str(made / "model"), tmp_path / "out", Packing(adapters=given))
    assert not (tmp_path / "out").exists()
