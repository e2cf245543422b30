"""Checkpoints packed once and kept: the same answers, no second packing, a size that is not passed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from toolkit import GenerationConfig, Pipeline, TurbomindEngineConfig
from toolkit.commands.main import main
from toolkit.convert import pack_cache
from toolkit.errors import UsageError
from toolkit.runners.native import library

pytestmark = pytest.mark.skipif(library.available() is not None, reason="there is no native runner here")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(pack_cache.VARIABLE, raising=False)
    return tmp_path / "home"


@pytest.fixture
def model(tiny_models: Any, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_models("llama"), tmp_path / "model")


def age(seconds: float) -> None:
    """Make all entries look used so long ago."""
    for entry in pack_cache.entries():
        then = entry.used - seconds
        os.utime(entry.path / "manifest.json", (then, then))


def test_a_model_is_packed_once_and_answers_as_it_did(model: Path) -> None:
    config, said = GenerationConfig(max_new_tokens=6), []
    ask = {"do_preprocess": False, "gen_config": config}
    engine = TurbomindEngineConfig(device="cpu", session_len=64)
    with Pipeline(str(model), engine) as plain:
        expected = plain("the fox", **ask).token_ids
    for _ in range(2):
        with Pipeline(str(model), engine, packed=lambda path: pack_cache.packed(path, said.append)) as pipe:
            assert pipe("the fox", **ask).token_ids == expected
            assert pipe.engine.model_name == "model"
    assert len(said) == 1 and "packed once for this processor" in said[0]
    assert len(pack_cache.entries()) == 1 and model.is_dir()


def test_a_changed_checkpoint_is_another_one(model: Path) -> None:
    first = pack_cache.packed(model)
    assert pack_cache.packed(model) == first != model
    assert pack_cache.packed(first) == first  # packed already
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"_note": "changed"}))
    assert pack_cache.packed(model) not in (first, model)
    assert len(pack_cache.entries()) == 2


def test_what_was_used_longest_ago_goes_first_and_what_is_in_use_stays(
    tiny_models: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    first = pack_cache.packed(model)
    size = pack_cache.entries()[0].size
    monkeypatch.setenv(pack_cache.VARIABLE, str(1.5 * size / pack_cache.GIB))
    second = pack_cache.packed(tiny_models("qwen2"))
    assert {e.path for e in pack_cache.entries()} == {first, second}  # the first was used a moment ago
    age(3600)
    pack_cache.packed(model)
    third = pack_cache.packed(tiny_models("qwen3"))
    assert {e.path for e in pack_cache.entries()} == {first, third}
    monkeypatch.setenv(pack_cache.VARIABLE, "0.0000001")
    assert pack_cache.packed(tiny_models("mistral"), said.append) == tiny_models("mistral")
    assert "too large for the cache" in said[-1]
    monkeypatch.setenv(pack_cache.VARIABLE, "0")
    assert pack_cache.packed(model) == model
    monkeypatch.setenv(pack_cache.VARIABLE, "many")
    with pytest.raises(UsageError, match="TOOLKIT_PACK_CACHE: expected GiB"):
        pack_cache.packed(model)


def test_two_processes_pack_it_once(model: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from toolkit.convert.pack_cache import packed; said = []; "
        "found = packed(Path(sys.argv[1]), said.append); "
        "assert (found / 'engine.safetensors').is_file(); print(found)"
    )
    command = [sys.executable, "-P", "-c", script, str(model)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = {process.communicate(timeout=120)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0] and len(found) == 1
    assert len(pack_cache.entries()) == 1


def test_a_home_that_cannot_be_written_is_no_hindrance(model: Path, home: Path) -> None:
    home.write_text("a file")
    said: list[str] = []
    assert pack_cache.packed(model, said.append) == model
    assert "packed in memory" in said[0]


@pytest.mark.parametrize(
    "config",
    [{"load_format": "int8"}, {"hf_overrides": {"rope_theta": 1.0}}, {"model_format": "hf"}, {"device": "cuda"}],
)
def test_a_model_that_is_opened_otherwise_is_not_kept(config: dict[str, Any]) -> None:
    assert pack_cache.is_for(TurbomindEngineConfig(device="cpu"), None)
    assert not pack_cache.is_for(TurbomindEngineConfig(**{"device": "cpu"} | config), None)
    assert not pack_cache.is_for(TurbomindEngineConfig(device="cpu"), "pytorch")


def tool(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(list(args))
    return (int(left.value.code or 0), *capsys.readouterr())


def test_the_command_lists_and_clears(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "0.00 of 20 GiB" in tool(capsys, "cache", "list")[1]
    path = pack_cache.packed(model)
    (row,) = json.loads(tool(capsys, "cache", "list", "--json", "-")[1])
    assert row["packed_from"] == str(model) and abs(row["last_used"] - time.time()) < 60
    code, _, err = tool(capsys, "cache", "clear", "nothing")
    assert code == 2 and "nothing: no packed model of that name" in err
    assert "deleted" in tool(capsys, "cache", "clear", path.name)[1]
    assert not path.exists() and model.is_dir() and not pack_cache.entries()


def test_chat_uses_it_unless_told_not_to(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["chat", str(model), "--device", "cpu", "--session-len", "64", "--max-new-tokens", "2", "-p", "hello"]
    code, answer, _ = tool(capsys, *ask, "--no-pack-cache")
    assert code == 0 and not pack_cache.entries()
    assert tool(capsys, *ask)[:2] == (0, answer)
    assert len(pack_cache.entries()) == 1
