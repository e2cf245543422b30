"""Checkpoints packed once and kept: the same answers, no second packing, a size that is not passed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from toolkit import GenerationConfig, Pipeline, TurbomindEngineConfig
from toolkit.artifacts import manifest
from toolkit.commands.main import main
from toolkit.convert import pack_cache, settle
from toolkit.engine.load.verify import verify_tensors
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.errors import ToolkitError, UsageError
from toolkit.models import registry
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


def where(path: Path, said: list[str] | None = None) -> Path:
    """Where it lies packed; nobody uses it afterwards."""
    found, lock = pack_cache.packed(path, (said if said is not None else []).append)
    if lock is not None:
        lock.close()
    return found


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
    first = where(model)
    assert where(model) == first != model
    assert where(first) == first  # packed already
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"_note": "changed"}))
    assert where(model) not in (first, model)
    assert len(pack_cache.entries()) == 2


def test_a_changed_family_makes_another_one(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = shutil.copytree(Path(registry.__file__).parent, tmp_path / "code")
    monkeypatch.setattr(registry, "__file__", str(code / "registry.py"))
    first = where(model)
    assert where(model) == first
    with (code / "families" / "llama.py").open("a") as file:
        file.write("# changed\n")
    assert where(model) not in (first, model)


def test_what_was_used_longest_ago_goes_first_and_what_is_in_use_stays(
    tiny_models: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    first, lock = pack_cache.packed(model)
    size = pack_cache.entries()[0].size
    monkeypatch.setenv(pack_cache.VARIABLE, str(1.1 * size / pack_cache.GIB))
    age(3600)
    assert where(tiny_models("qwen2"), said) == tiny_models("qwen2")
    assert "in use" in said[-1] and [e.path for e in pack_cache.entries()] == [first]
    assert lock is not None
    lock.close()
    second = where(tiny_models("qwen2"))
    assert [e.path for e in pack_cache.entries()] == [second]
    monkeypatch.setenv(pack_cache.VARIABLE, "0.0000001")
    assert where(tiny_models("mistral"), said) == tiny_models("mistral")
    assert "too large for the cache" in said[-1]
    monkeypatch.setenv(pack_cache.VARIABLE, "0")
    assert where(model) == model
    monkeypatch.setenv(pack_cache.VARIABLE, "many")
    with pytest.raises(UsageError, match="TOOLKIT_PACK_CACHE: expected GiB"):
        where(model)


@pytest.mark.parametrize("harm", ["truncated", "another header", "no manifest"])
def test_a_broken_copy_is_made_anew(model: Path, harm: str) -> None:
    entry = where(model)
    arrays = entry / "engine.safetensors"
    whole = arrays.read_bytes()
    if harm == "no manifest":
        (entry / "manifest.json").unlink()
    else:
        arrays.write_bytes(whole[:-1] if harm == "truncated" else whole[:20] + b"?" + whole[21:])
    said: list[str] = []
    assert where(model, said) == entry and "packed once" in said[0]
    assert arrays.read_bytes() == whole and (entry / "manifest.json").is_file()


def test_the_layout_is_part_of_the_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = where(model)
    monkeypatch.setattr(pack_cache, "LAYOUT_VERSION", 1000)
    assert where(model) not in (first, model)


def test_a_cache_that_may_only_be_read_is_used(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    entry = where(model)
    monkeypatch.setattr(os, "utime", refuse)
    assert where(model) == entry


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES])
def test_a_copy_that_cannot_be_written_is_no_hindrance(
    model: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr("toolkit.convert.convert.write_engine", fail)
    said: list[str] = []
    assert where(model, said) == model
    assert "packed in memory" in said[-1] and not pack_cache.entries()


def test_trouble_of_the_checkpoint_itself_is_told(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ToolkitError, match=r"model\.safetensors"):
        where(model)


def test_a_user_without_a_home_packs_in_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TOOLKIT_HOME")
    monkeypatch.setattr(Path, "expanduser", homeless)
    said: list[str] = []
    assert where(model, said) == model and "packed in memory" in said[0]


def test_its_digest_is_known_when_all_of_it_is_on_disk(model: Path) -> None:
    entry = where(model)
    settled(entry)
    found = manifest.read_manifest(entry)
    assert found is not None
    manifest.check_files(entry, found, verify=True)
    assert all(file.digest == manifest.file_digest(entry / file.name) for file in found.files)
    assert where(model) == entry


def settled(entry: Path) -> None:
    """Wait until no digest of the packed model is pending."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = manifest.read_manifest(entry)
        if found is not None and (thread := settle.settle(entry, found)) is None:
            return
        thread.join()
    raise AssertionError("pending still")


@pytest.mark.parametrize("when", ["before it was on disk", "afterwards"])
def test_what_the_machine_may_have_lost_is_packed_again(
    model: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    if when == "before it was on disk":
        monkeypatch.setattr(pack_cache, "settle", lambda entry, manifest: None)
    entry = where(model)
    if when == "afterwards":
        settled(entry)
    monkeypatch.setattr(settle, "boot", lambda: "another start")
    monkeypatch.setattr(pack_cache, "boot", settle.boot)
    said: list[str] = []
    assert where(model, said) == entry
    assert bool(said) == (when == "before it was on disk")


def test_a_checkpoint_that_is_not_as_its_manifest_has_it_is_told_of_at_every_start(model: Path) -> None:
    files = [manifest.describe_file(model, file) for file in sorted(model.iterdir())]
    size = sum(file.size for file in files)
    manifest.write_manifest(model, manifest.Manifest("checkpoint", "lite", "0", "", {}, {}, {}, files, size))
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    for _ in range(2):
        entry = where(model)
        found = manifest.read_manifest(entry)
        assert found is not None
        thread = settle.settle(entry, found)
        assert thread is not None
        thread.join()
        told: list[str] = []
        thread = verify_tensors(entry, told.append)
        assert thread is not None
        thread.join()
        assert told and "model.safetensors: was changed since it was written" in told[0]


def run(script: str, model: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-c", script, str(model)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=500)


_PACK = "from toolkit.convert.pack_cache import packed; print(packed(Path(sys.argv[1]), print)[0])"


def test_who_is_killed_while_it_writes_leaves_nothing_that_counts(model: Path, home: Path) -> None:
    whole = where(model)
    expected = (whole / "engine.safetensors").read_bytes()
    assert pack_cache.remove(whole)
    script = (
        "import os, signal, sys; from pathlib import Path; from toolkit.runners.native.packing.pack import Unpacked\n"
        "write, calls = Unpacked.write_to, []\n"
        "def once(self, file, at):\n"
        "    calls.append(at) or write(self, file, at)\n"
        "    if len(calls) == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"Unpacked.write_to = once; {_PACK}"
    )
    assert run(script, model).returncode == -signal.SIGKILL
    assert not pack_cache.entries() and list((home / "packed").glob(".*.partial"))
    assert where(model) == whole and (whole / "engine.safetensors").read_bytes() == expected
    assert not list((home / "packed").glob(".*.partial"))


def test_a_file_that_may_not_grow_is_packed_in_memory(model: Path, home: Path) -> None:
    size = (model / "model.safetensors").stat().st_size
    script = (
        "import resource, sys; from pathlib import Path; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size // 4},) * 2); {_PACK}"
    )
    found = run(script, model)
    assert found.returncode == 0 and "packed in memory" in found.stdout
    assert found.stdout.splitlines()[-1] == str(model) and not list((home / "packed").glob("*/engine.safetensors"))


def test_two_processes_pack_it_once(model: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from toolkit.convert.pack_cache import packed; said = []; "
        "found, lock = packed(Path(sys.argv[1]), said.append); "
        "assert (found / 'engine.safetensors').is_file(); print(found)"
    )
    command = [sys.executable, "-P", "-c", script, str(model)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    found = {process.communicate(timeout=500)[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0] and len(found) == 1
    assert len(pack_cache.entries()) == 1


def test_a_home_that_cannot_be_written_is_no_hindrance(model: Path, home: Path) -> None:
    home.write_text("a file")
    said: list[str] = []
    assert where(model, said) == model
    assert "packed in memory" in said[0]


@pytest.mark.parametrize(
    "config",
    [{"load_format": "int8"}, {"hf_overrides": {"rope_theta": 1.0}}, {"model_format": "hf"}, {"device": "cuda"}],
)
def test_a_model_that_is_opened_otherwise_is_not_kept(config: dict[str, Any]) -> None:
    assert pack_cache.is_for(TurbomindEngineConfig(device="cpu"), None)
    assert not pack_cache.is_for(TurbomindEngineConfig(**{"device": "cpu"} | config), None)
    assert not pack_cache.is_for(TurbomindEngineConfig(device="cpu"), "pytorch")


def test_what_a_family_of_the_users_reads_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_CUSTOM_MODULE_MAP", "mine.py")
    assert not pack_cache.is_for(TurbomindEngineConfig(device="cpu"), None)


def tool(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(list(args))
    return (int(left.value.code or 0), *capsys.readouterr())


def test_the_command_shows_paths_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOOLKIT_HOME", home := str(tmp_path / "a[/b]"))
    assert f"GiB in {home}/packed" in tool(capsys, "cache", "list")[1]


def test_the_command_lists_and_clears(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "0.00 of 20 GiB" in tool(capsys, "cache", "list")[1]
    path, lock = pack_cache.packed(model)
    (row,) = json.loads(tool(capsys, "cache", "list", "--json", "-")[1])
    assert row["packed_from"] == str(model) and abs(row["last_used"] - time.time()) < 600
    code, _, err = tool(capsys, "cache", "clear", "nothing")
    assert code == 2 and "nothing: nothing of that name is kept" in err
    notes = model / "notes.txt"
    notes.write_text("my thesis")
    code, _, err = tool(capsys, "cache", "list", "--json", str(notes))
    assert code == 2 and "never replaced" in err and notes.read_text() == "my thesis"
    assert tool(capsys, "cache", "list", "--json", str(model / "new.json"))[1] == ""
    assert path.name in tool(capsys, "cache", "list")[1]  # not folded
    assert "in use" in tool(capsys, "cache", "clear", path.name)[1] and path.exists()
    assert lock is not None
    lock.close()
    left = [path.with_name(f".{name}") for name in ("k.partial", "k.removed-1")]
    for folder in left:
        folder.mkdir()
        (folder / "lock").touch()
    assert "deleted" in tool(capsys, "cache", "clear", path.name)[1]
    assert not path.exists() and not any(folder.exists() for folder in left)
    assert not path.exists() and model.is_dir() and not pack_cache.entries()


def test_chat_uses_it_unless_told_not_to(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["chat", str(model), "--device", "cpu", "--session-len", "64", "--max-new-tokens", "2", "-p", "hello"]
    code, answer, _ = tool(capsys, *ask, "--no-pack-cache")
    assert code == 0 and not pack_cache.entries()
    assert tool(capsys, *ask)[:2] == (0, answer)
    assert len(pack_cache.entries()) == 1


def test_perplexity_uses_it_unless_told_not_to(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox " * 20)
    ask = [
        "eval",
        "ppl",
        str(model),
        "--data",
        str(tmp_path / "text.txt"),
        "--window",
        "32",
        "--stride",
        "16",
        "--json",
        "-",
    ]
    ask += ["--backend", "turbomind", "--device", "cpu", "--session-len", "64"]
    code, found, _ = tool(capsys, *ask, "--no-pack-cache")
    assert code == 0 and not pack_cache.entries()
    assert tool(capsys, *ask)[:2] == (0, found)
    assert len(pack_cache.entries()) == 1


def test_what_a_server_runs_stays_and_is_there_when_its_engine_starts_again(model: Path) -> None:
    config = TurbomindEngineConfig(device="cpu", session_len=64)
    with AsyncEngine.open(model, backend_config=config, process=True, packed=pack_cache.packed) as engine:
        (entry,) = pack_cache.entries()
        assert not pack_cache.remove(entry.path) and entry.path.is_dir()
        loop: Any = engine._loop
        os.kill(first := loop.pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while (loop.pid == first or not engine.healthy) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert loop.pid != first and engine.healthy and not pack_cache.remove(entry.path)
    assert pack_cache.remove(entry.path)


def test_the_command_knows_kept_kv_caches(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, name = tmp_path / "kv", "a" * 32
    (kept / name).mkdir(parents=True)
    kept.chmod(0o700)
    file = kept / name / f"{'0' * 64}.0.kv"
    file.write_bytes(bytes(2_000_000))
    (kept / "notes.txt").write_text("my thesis")
    entry = where(model)  # not in that folder
    (row,) = json.loads(tool(capsys, "cache", "list", "--kv-cache-dir", str(kept), "--json", "-")[1])
    assert row["name"] == name and row["blocks"] == 1 and row["kv_cache_dir"] == str(kept)
    shown = tool(capsys, "cache", "list", "--kv-cache-dir", str(kept))[1]
    assert name in shown and entry.name not in shown and "Packed" not in shown
    assert "2 MB of KV cache" in tool(capsys, "cache", "clear", "--kv-cache-dir", str(kept))[1]
    assert [f.name for f in kept.iterdir()] == ["notes.txt"] and entry.exists()
    code, _, err = tool(capsys, "cache", "clear", entry.name, "--kv-cache-dir", str(kept))
    assert code == 2 and "nothing of that name" in err
    assert f"no KV caches in {kept}" in tool(capsys, "cache", "list", "--kv-cache-dir", str(kept))[1]
    kept.chmod(0o777)
    code, _, err = tool(capsys, "cache", "clear", "--kv-cache-dir", str(kept))
    assert code == 2 and "others may write to it" in err
