"""The contract of a stage: whole or not at all, resumable, never destructive."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.artifacts.manifest import (
    MANIFEST,
    SCHEMA_VERSION,
    content_digest,
    describe_parent,
    read_manifest,
    require_kind,
)
from toolkit.artifacts.output import stage as stage_module
from toolkit.artifacts.output.partial import partial_dir
from toolkit.artifacts.output.replace import check_directory_target
from toolkit.artifacts.output.room import check_room
from toolkit.artifacts.output.stage import Stage, open_stage, write_file
from toolkit.errors import ToolkitError, UsageError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def run(target: Path, source: Path, text: str = "x", overwrite: bool = False, **options: Any) -> Stage:
    with open_stage(
        target, kind="quantized", stage="test", parent=describe_parent(source), options=options, overwrite=overwrite
    ) as stage:
        if not stage.already_there:
            (stage.dir / "file").write_text(text)
            stage.finish({"ppl": 1.5})
    return stage


def hidden(tmp_path: Path) -> list[str]:
    return [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_file_of_the_same_name_takes_nothing_of_what_a_killed_run_left(tmp_path: Path) -> None:
    left = tmp_path / ".x.gguf.partial"
    (left / "state").mkdir(parents=True)
    for name in ("lock", "state/layer.0.safetensors"):
        (left / name).write_text("")
    for _ in range(2):
        with write_file(tmp_path / "x.gguf") as file:
            file.write_text("tensors")
    assert (tmp_path / "x.gguf").read_text() == "tensors"
    assert [p.name for p in left.rglob("*") if p.is_file() and p.name != "lock"] == ["layer.0.safetensors"]
    with write_file(tmp_path / "y.gguf") as file:
        file.write_text("")
    assert not (tmp_path / ".y.gguf.partial").exists()


DYING = """
import os, sys
from pathlib import Path
from toolkit.artifacts.output import stage

target, calls = Path(sys.argv[1]), iter(range(9))
def dying(real):
    def call(*arguments):
        os._exit(9) if next(calls) == int(sys.argv[2]) else real(*arguments)
    return call
stage.os.rename, stage.os.replace = dying(os.rename), dying(os.replace)
with stage.write_file(target, ["m.scales", "mmproj-m", "m.more"]) as file:
    file.write_text("new")
    for name in ("m.scales", "m.more"):
        (file.with_name("beside") / name).write_text("new")
"""


@pytest.mark.parametrize("step", range(6))
def test_killed_while_it_replaces_files_that_belong_together(tmp_path: Path, step: int) -> None:
    """None is torn, and none of the old ones is gone while the old file is there; the next run tidies up."""
    files = ("m", "m.scales", "mmproj-m")
    for name in files:
        (tmp_path / name).write_text("old")
    done = subprocess.run([sys.executable, "-c", DYING, str(tmp_path / "m"), str(step)], check=False)
    assert done.returncode == (9 if step < 5 else 0)
    left = {str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    assert {"old", "new", ""} >= set(left.values())
    assert list(left.values()).count(left["m"]) == 3
    with pytest.raises(KeyError), write_file(tmp_path / "m"):
        raise KeyError
    new = {"m": "new", "m.scales": "new", "m.more": "new"}
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == (dict.fromkeys(files, "old") if step < 3 else new)


def test_a_finished_stage_leaves_artifact_and_manifest_alone(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "deep" / "er" / "out"
    run(target, source, bits=4)
    assert sorted(p.name for p in target.iterdir()) == ["file", MANIFEST]
    assert not hidden(target.parent)
    data = json.loads((target / MANIFEST).read_text())
    assert set(data) == {
        "kind", "stage", "schema_version", "tool_version", "created", "parent", "options", "quality", "files",
        "size_bytes",
    }  # fmt: skip
    assert (data["kind"], data["stage"], data["options"], data["quality"]) == (
        "quantized",
        "test",
        {"bits": 4},
        {"ppl": 1.5},
    )
    assert data["size_bytes"] == 1 and data["files"][0]["name"] == "file"
    assert data["parent"]["digest"] == content_digest(source)


def test_a_manifest_is_json_whatever_was_measured(tmp_path: Path, source: Path) -> None:
    """Python writes NaN and Infinity, which are none; those of older versions are read."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    target, parent = tmp_path / "out", describe_parent(source)
    with open_stage(target, kind="quantized", stage="t", parent=parent, options={}) as stage:
        stage.finish({"layers": [{"rel_error": math.nan}, {"rel_error": 0.5}], "kl": -math.inf})
    text = (target / MANIFEST).read_text()
    found = json.loads(text, parse_constant=refuse)["quality"]
    assert found == {"layers": [{"rel_error": None}, {"rel_error": 0.5}], "kl": None}
    (target / MANIFEST).write_text(text.replace('"kl": null', '"kl": Infinity'))
    manifest = read_manifest(target)
    assert manifest is not None and manifest.quality["kl"] == math.inf


def test_same_inputs_and_options_again_is_already_there(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "out"
    run(target, source, bits=4)
    before = (target / MANIFEST).read_bytes()
    assert run(target, source, text="y", bits=4).already_there
    assert (target / MANIFEST).read_bytes() == before and (target / "file").read_text() == "x"


def test_anything_else_needs_overwrite(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "out"
    run(target, source, bits=4)
    with pytest.raises(UsageError, match="--overwrite"):
        run(target, source, bits=8)
    (source / "model.safetensors").write_bytes(b"others!")
    with pytest.raises(UsageError, match="--overwrite"):
        run(target, source, bits=4)
    assert (target / "file").read_text() == "x"
    run(target, source, text="y", bits=8, overwrite=True)
    assert (target / "file").read_text() == "y" and not hidden(tmp_path)


def test_overwrite_redoes_even_the_same(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "out"
    run(target, source)
    assert not run(target, source, text="y", overwrite=True).already_there
    assert (target / "file").read_text() == "y"


def test_a_damaged_artifact_is_not_already_there(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "out"
    run(target, source)
    (target / "file").write_text("longer")
    with pytest.raises(UsageError, match="--overwrite"):
        run(target, source)


def test_an_empty_directory_may_be_filled(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out").mkdir()
    run(tmp_path / "out", source)
    assert (tmp_path / "out" / "file").exists()


def test_target_that_is_a_file_or_below_one(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(UsageError, match="file"):
            run(target, source, overwrite=True)
    assert (tmp_path / "file").read_text() == "mine" and not hidden(tmp_path)


def test_the_root_is_no_target(source: Path) -> None:
    with pytest.raises(UsageError, match="root"):
        run(Path("/"), source, overwrite=True)


def test_neither_the_input_nor_the_current_directory_goes(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for target in (source, tmp_path):
        with pytest.raises(UsageError, match="which is read"):
            run(target, source, overwrite=True)
    monkeypatch.chdir(source)
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="the current directory"):
        run(source, other, overwrite=True)
    assert (source / "model.safetensors").read_bytes() == b"weights"


def test_a_strangers_partial_directory_is_left_alone(tmp_path: Path, source: Path) -> None:
    mine = partial_dir(tmp_path / "out")
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="in the way"):
        run(tmp_path / "out", source)
    assert (mine / "thesis.txt").read_text() == "years of work"


def test_a_symlinked_target_is_written_through(tmp_path: Path, source: Path) -> None:
    real, link = tmp_path / "big-disk", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    run(link, source)
    assert link.is_symlink() and (real / "file").exists()


def test_failure_without_saved_state_leaves_nothing(tmp_path: Path, source: Path) -> None:
    with pytest.raises(ValueError, match="boom"):
        fail_after(tmp_path / "out", source, 0)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def fail_after(target: Path, source: Path, layers: int, **options: Any) -> None:
    with open_stage(target, kind="quantized", stage="test", parent=describe_parent(source), options=options) as stage:
        for i in range(layers):
            stage.save(f"layer {i}/x", {"w": torch.full((4,), float(i)).bfloat16()}, {"loss": i})
        (stage.dir / "half").write_text("half")
        raise ValueError("boom")


def test_saved_state_outlives_a_failure(tmp_path: Path, source: Path) -> None:
    with pytest.raises(ValueError, match="boom"):
        fail_after(tmp_path / "out", source, 2)
    assert not (tmp_path / "out").exists()
    with open_stage(
        tmp_path / "out", kind="quantized", stage="test", parent=describe_parent(source), options={}
    ) as stage:
        assert [stage.done(f"layer {i}/x") for i in range(3)] == [True, True, False]
        loaded = stage.load("layer 1/x")["w"]
        assert loaded.dtype == torch.bfloat16 and torch.equal(loaded, torch.ones(4).bfloat16())
        assert stage.load_meta("layer 1/x") == {"loss": 1}
        assert not list(stage.dir.iterdir())
        stage.finish()
    assert not hidden(tmp_path)


def test_state_of_other_options_is_not_taken_over(tmp_path: Path, source: Path) -> None:
    with pytest.raises(ValueError, match="boom"):
        fail_after(tmp_path / "out", source, 2, bits=4)
    with open_stage(
        tmp_path / "out", kind="quantized", stage="test", parent=describe_parent(source), options={"bits": 3}
    ) as stage:
        assert not stage.done("layer 0/x")
        stage.finish()


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_torn_state_is_ignored(tmp_path: Path, source: Path, damage: str) -> None:
    with pytest.raises(ValueError, match="boom"):
        fail_after(tmp_path / "out", source, 1)
    [file] = (partial_dir(tmp_path / "out") / "state").iterdir()
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes({"cut": bytes(raw[:-1]), "flip": bytes(raw), "empty": b""}[damage])
    with open_stage(
        tmp_path / "out", kind="quantized", stage="test", parent=describe_parent(source), options={}
    ) as stage:
        assert not stage.done("layer 0/x")
        stage.finish()


def test_a_second_process_is_told_of_the_first(tmp_path: Path, source: Path) -> None:
    with open_stage(
        tmp_path / "out", kind="quantized", stage="test", parent=describe_parent(source), options={}
    ) as stage:
        with pytest.raises(ToolkitError, match="another process"):
            run(tmp_path / "out", source)
        assert stage.dir.is_dir()
        stage.finish()


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "disk full"), (errno.EDQUOT, "disk full"), (errno.EFBIG, "a file grew beyond")]
)
def test_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, source: Path, code: int, words: str) -> None:
    with (
        pytest.raises(ToolkitError, match=f"out: {words}"),
        open_stage(tmp_path / "out", kind="quantized", stage="t", parent=describe_parent(source), options={}) as stage,
    ):
        (stage.dir / "half").write_text("half")
        raise OSError(code, os.strerror(code))
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_full_disk_while_finishing_keeps_the_old_artifact(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path / "out", source)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(stage_module, "write_manifest", full)
    with pytest.raises(ToolkitError, match="disk full"):
        run(tmp_path / "out", source, text="new", overwrite=True)
    assert (tmp_path / "out" / "file").read_text() == "x" and not hidden(tmp_path)


def test_killed_between_the_renames_the_old_artifact_comes_back(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "out"
    run(target, source)
    partial = partial_dir(target)
    partial.mkdir()
    (partial / "lock").touch()
    target.rename(partial / "old")
    assert run(target, source).already_there
    assert (target / "file").read_text() == "x" and not hidden(tmp_path)


def test_killed_after_the_rename_the_same_command_again_sweeps_up(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(stage_module, "drop_partial", lambda partial: None)
        run(tmp_path / "out", source)
    key = (partial_dir(tmp_path / "out") / "key.json").read_text()
    for left_by, left in (("another run", [".out.partial"]), (key, [])):
        (partial_dir(tmp_path / "out") / "key.json").write_text(left_by)
        assert run(tmp_path / "out", source).already_there
        assert hidden(tmp_path) == left


WORKER = """
import sys, time, torch
from pathlib import Path
from toolkit.artifacts.manifest import describe_parent
from toolkit.artifacts.weight_files.safetensors_file import write_tensors
from toolkit.artifacts.output.stage import open_stage

target, source, pause = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
with open_stage(target, kind="quantized", stage="work", parent=describe_parent(source), options={}) as stage:
    computed = 0
    for i in range(6):
        if not stage.done(str(i)):
            weights = torch.randn(1000, generator=torch.Generator().manual_seed(i))
            stage.save(str(i), {"w": weights})
            computed += 1
            print(i, flush=True)
            time.sleep(pause)
    write_tensors(stage.dir / "model.safetensors", {str(i): stage.load(str(i))["w"] for i in range(6)})
    stage.finish({"computed": computed})
"""


CROWD = """
import sys
import threading
from contextlib import suppress
from pathlib import Path
from toolkit.artifacts.output.stage import open_stage, write_file
from toolkit.errors import ToolkitError

target = Path(sys.argv[1])
for _ in range(100):
    with suppress(KeyError), open_stage(target, kind="quantized", stage="t", parent={}, options={}, wait=True) as stage:
        (stage.dir / "a").touch()
        raise KeyError
    try:
        with write_file(target.with_suffix(".json")) as scratch:
            scratch.write_text("x")
    except ToolkitError as error:
        assert "another process is writing it" in str(error), error
"""


def test_many_processes_write_one_target_in_turn(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", CROWD, str(tmp_path / "out")]
    crowd = [subprocess.Popen([*command, str(i)], stderr=subprocess.PIPE, text=True) for i in range(4)]
    assert [process.communicate(timeout=500)[1] for process in crowd] == [""] * 4
    assert os.listdir(tmp_path) == ["out.json"]


def test_killed_in_the_middle_the_next_run_goes_on_and_ends_bit_identical(tmp_path: Path, source: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)

    def start(target: str, pause: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(script), str(tmp_path / target), str(source), pause]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/")

    assert start("whole", "0").wait(120) == 0
    victim = start("out", "60")
    assert victim.stdout is not None and victim.stdout.readline() == "0\n"
    victim.send_signal(signal.SIGKILL)
    victim.wait(60)
    assert not (tmp_path / "out").exists()
    assert partial_dir(tmp_path / "out").is_dir()
    assert start("out", "0").wait(120) == 0
    found, expected = tmp_path / "out" / "model.safetensors", tmp_path / "whole" / "model.safetensors"
    assert found.read_bytes() == expected.read_bytes()
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None and manifest.quality == {"computed": 5}
    assert not hidden(tmp_path)


def test_interrupt_keeps_saved_state(tmp_path: Path, source: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, str(script), str(tmp_path / "out"), str(source), "60"]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd="/")
    assert victim.stdout is not None and victim.stdout.readline() == "0\n"
    victim.send_signal(signal.SIGINT)
    victim.wait(60)
    partial = partial_dir(tmp_path / "out")
    assert [p.name for p in (partial / "state").iterdir()] == ["0.safetensors"] and not (partial / "out").exists()


# --- manifests -----------------------------------------------------------------------------------------------------


def test_lineage_nests_without_file_lists(tmp_path: Path, source: Path) -> None:
    run(tmp_path / "a", source, bits=4)
    run(tmp_path / "b", tmp_path / "a", bits=2)
    manifest = read_manifest(tmp_path / "b")
    assert manifest is not None
    parent = manifest.parent
    assert parent["manifest"]["options"] == {"bits": 4} and parent["manifest"]["files"] == []
    assert parent["manifest"]["parent"]["path"] == str(source) and parent["manifest"]["parent"]["manifest"] is None


def test_hub_snapshots_are_recognised_by_their_path(tmp_path: Path) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    path = tmp_path / "models--Qwen--Qwen2.5-0.5B--x" / "snapshots" / revision
    path.mkdir(parents=True)
    parent = describe_parent(path)
    assert (parent["hub_id"], parent["revision"]) == ("Qwen/Qwen2.5-0.5B--x", revision)
    assert parent["path"] == parent["hub_id"]


def test_digest_is_of_content_not_of_place_or_time(tmp_path: Path, source: Path) -> None:
    before = content_digest(source)
    os.utime(source / "model.safetensors", (1, 1))
    (source / "README.md").write_text("about")
    with open_stage(tmp_path / "ours", kind="quantized", stage="test", parent={}, options={}) as stage:
        stage.finish()
    shutil.copyfile(tmp_path / "ours" / MANIFEST, source / MANIFEST)
    moved = source.rename(tmp_path / "moved")
    assert content_digest(moved) == before
    (moved / "model.safetensors").write_bytes(b"weightz")
    assert content_digest(moved) != before


@pytest.mark.parametrize("name", ["1_Pooling/config.json", "additional_chat_templates/tool_use.jinja"])
def test_what_a_model_has_in_folders_is_content_too(source: Path, name: str) -> None:
    (source / name).parent.mkdir()
    (source / name).write_text("one")
    before = content_digest(source)
    (source / name).write_text("two")
    assert content_digest(source) != before


@pytest.mark.parametrize("data", [{"manifest_version": 3, "files": ["model.safetensors"]}, {}, ["model.safetensors"]])
def test_another_program_s_manifest_makes_a_model_no_artifact(source: Path, data: Any) -> None:
    """Folders of the hub may have a file of that name: the model is read as any other, and never replaced."""
    (source / MANIFEST).write_text(json.dumps(data))
    assert read_manifest(source) is None and describe_parent(source)["manifest"] is None
    with pytest.raises(UsageError, match=rf"never replaced, for it holds .*{MANIFEST}"):
        check_directory_target(source, overwrite=True)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"schema_version": SCHEMA_VERSION + 1}, "newer"),
        ({"schema_version": "1"}, "schema_version"),
        ({"schema_version": None}, "schema_version"),
        ({"schema_version": True}, "schema_version"),
        ({"kind": "painting"}, "painting"),
        ({"kind": 3}, "kind"),
        ({"parent": []}, "parent"),
        ({"files": {}}, "files"),
        ({"files": [3]}, "files"),
        ({"size_bytes": "big"}, "size_bytes"),
    ],
)
def test_manifests_of_a_newer_schema_or_broken_are_refused(
    tmp_path: Path, source: Path, change: dict[str, Any], word: str
) -> None:
    run(tmp_path / "out", source)
    path = tmp_path / "out" / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ToolkitError, match=word) as caught:
        read_manifest(tmp_path / "out")
    assert str(path) in str(caught.value)


def test_artifact_of_the_wrong_kind_names_its_parent(tmp_path: Path, source: Path) -> None:
    run(tmp_path / "out", source)
    with pytest.raises(ToolkitError, match=r"lite takes checkpoint, found a quantized") as caught:
        require_kind(tmp_path / "out", ("checkpoint",), "lite")
    assert str(source) in str(caught.value)
    assert require_kind(source, ("checkpoint",), "lite") is None


def test_room_is_counted_while_another_run_takes_its_files_away(tmp_path: Path) -> None:
    state, ended = tmp_path / ".a.partial" / "state", threading.Event()

    def other() -> None:
        while not ended.is_set():
            state.mkdir(parents=True, exist_ok=True)
            for i in range(20):
                (state / str(i)).touch()
            shutil.rmtree(state.parent)

    thread = threading.Thread(target=other)
    thread.start()
    try:
        for _ in range(3000):
            check_room(tmp_path / "a", 1)
    finally:
        ended.set()
        thread.join()
