"""Artifacts whose bytes change: noticed when they are opened, or beside the first requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from toolkit import TurbomindEngineConfig, pipeline
from toolkit.artifacts.engine.files import open_engine
from toolkit.artifacts.manifest import MANIFEST, content_digest
from toolkit.convert.convert import convert
from toolkit.engine.load.verify import verify_tensors
from toolkit.errors import ToolkitError

CONFIG = TurbomindEngineConfig(session_len=64, max_batch_size=2)


@pytest.fixture
def engine(tiny_models: Any, tmp_path: Path) -> Path:
    convert(str(tiny_models("llama")), tmp_path / "engine", quiet=True)
    return tmp_path / "engine"


def change(file: Path, at: int, by: int = 1) -> None:
    raw = bytearray(file.read_bytes())
    raw[at] ^= by
    file.write_bytes(raw)


def test_a_changed_header_is_found_when_the_artifact_is_opened(engine: Path) -> None:
    """Two arrays of one shape change their names: nothing else than the digest tells."""
    file = engine / "engine.safetensors"
    raw = file.read_bytes()
    one, other = b"layers.0.input_layernorm", b"layers.1.input_layernorm"
    assert one in raw and other in raw
    file.write_bytes(raw.replace(one, b"@" * len(one)).replace(other, one).replace(b"@" * len(one), other))
    with pytest.raises(ToolkitError, match=r"engine\.safetensors: was changed since it was written"):
        open_engine(engine)


def test_manifests_without_digests_of_headers_are_read(engine: Path) -> None:
    data = json.loads((engine / MANIFEST).read_text())
    assert any(entry.pop("header_sha256", None) for entry in data["files"])
    (engine / MANIFEST).write_text(json.dumps(data))
    open_engine(engine)


def test_changed_tensors_are_told_of_and_no_request_is_answered_with_them(engine: Path) -> None:
    change(engine / "engine.safetensors", -1)
    with pytest.raises(ToolkitError, match="was changed"):
        content_digest(engine)  # what convert and lite ask for
    with pipeline(str(engine), CONFIG) as pipe:
        deadline = time.monotonic() + 60
        answer = pipe("hi")
        while answer.finish_reason != "error" and time.monotonic() < deadline:
            time.sleep(0.02)
            answer = pipe("hi")
        assert answer.finish_reason == "error" and "engine.safetensors: was changed" in (answer.error_message or "")


def test_whole_tensors_are_not_complained_about(engine: Path, tmp_path: Path) -> None:
    told: list[str] = []
    thread = verify_tensors(engine, told.append)
    assert thread is not None
    thread.join(60)
    assert told == [] and verify_tensors(tmp_path, told.append) is None


def test_it_is_done_at_the_priority_of_the_rest(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others keep the processors busy a thread of the lowest one, which may hold Python's lock, gets no core for
    seconds, and the process ends no sooner than it."""
    found: list[int] = []
    look = lambda seconds: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))  # noqa: E731
    monkeypatch.setattr("toolkit.engine.load.verify.time.sleep", look)
    thread = verify_tensors(engine, lambda line: None)
    assert thread is not None
    thread.join(60)
    assert set(found) == {os.getpriority(os.PRIO_PROCESS, 0)}


def test_a_file_that_is_replaced_later_is_another_file(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    started = []
    monkeypatch.setattr("threading.Thread.start", lambda self: started.append(self))
    thread = verify_tensors(engine, told.append)
    monkeypatch.undo()
    (engine / "engine.safetensors").rename(engine / "old")
    (engine / "engine.safetensors").write_bytes(b"another")
    assert thread is not None
    thread.start()
    thread.join(60)
    assert told == []


SHRINKS = """
import os, sys
from toolkit.runners.native.library import explain_mapped_faults
from toolkit.artifacts.weight_files.safetensors_file import map_arrays
from pathlib import Path
explain_mapped_faults()
arrays = map_arrays(Path(sys.argv[1]))
os.truncate(sys.argv[1], 4096)
print(sum(int(a.view("u1").sum()) for a in arrays.values()))
"""


def test_a_mapped_file_that_shrinks_ends_in_one_line(engine: Path) -> None:
    file = engine / "engine.safetensors"
    done = subprocess.run([sys.executable, "-c", SHRINKS, file], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        f"tool: error: {file}: was cut short, or cannot be read any more, while it was in use; restore the file and "
        "start again\n"
    )
