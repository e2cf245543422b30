"""Stored responses and conversations that outlive the server, where it has a directory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.limits import Limits
from toolkit.serve.lmdeploy.talks import Talks
from toolkit.serve.openai.batches.batches import Batch
from toolkit.serve.openai.batches.store import FileStore
from toolkit.serve.openai.responses.kept import Store

ONE, TWO, GONE = (f"resp_{digit * 32}" for digit in "123")


def put(store: Store, id: str, owner: str = "me") -> None:
    store.put({"id": id, "output": [{"type": "message"}]}, [{"role": "user", "content": "Hi"}], [], 9, owner)


def talks(files: FileStore, limits: Limits) -> tuple[Talks, list[str]]:
    gone: list[str] = []
    found = Talks(limits, gone.append)
    found.restore(files)
    return found, gone


def test_responses_outlive_the_server(tmp_path: Path) -> None:
    limits = Limits(stored_response_seconds=50)
    files = FileStore(tmp_path, limits)
    store = Store(limits, files)
    for id in (ONE, TWO, GONE):
        put(store, id)
    assert store.drop(GONE, "me")
    files.close()
    assert {f.stat().st_mode & 0o777 for f in tmp_path.rglob("*.json")} == {0o600}
    files = FileStore(tmp_path, limits)
    again = Store(limits, files)
    found = again.get(ONE, "me")
    assert found is not None and found.messages == [{"role": "user", "content": "Hi"}] and found.size == 9
    assert found.response["output"] and 0 < found.expires_at - time.time() <= 50
    assert again.get(ONE, "you") is None and again.get(GONE, "me") is None
    files.close()
    files = FileStore(tmp_path, limits)
    few = Store(Limits(max_stored_responses=1), files)
    put(few, GONE)
    assert few.get(ONE, "me") is None and few.get(GONE, "me") is not None
    files.close()
    assert [f.stem for f in (tmp_path / "responses").iterdir()] == [GONE]


def test_old_responses_go_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(stored_response_seconds=50)
    files = FileStore(tmp_path, limits)
    put(Store(limits, files), ONE)
    files.close()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 100)
    files = FileStore(tmp_path, limits)
    assert Store(limits, files).get(ONE, "me") is None
    files.close()
    assert not list((tmp_path / "responses").iterdir())


async def turn(found: Talks, key: Any, text: str) -> None:
    talk = found.open(key, goes_on=True)
    talk.messages = [*talk.messages, {"role": "user", "content": text}]
    talk.tokens += 5
    found.close(key, keep=True)


async def end(found: Talks, key: Any) -> None:
    found.open(key)
    found.close(key, keep=False)


def test_conversations_outlive_the_server(tmp_path: Path) -> None:
    import asyncio

    limits = Limits(session_timeout=50)
    files = FileStore(tmp_path, limits)
    first, _ = talks(files, limits)
    for text in ("one", "two"):
        asyncio.run(turn(first, ("me", 7), text))
    asyncio.run(turn(first, ("you", 7), "other"))
    asyncio.run(turn(first, ("me", 8), "gone"))
    asyncio.run(end(first, ("me", 8)))
    files.close()
    files = FileStore(tmp_path, limits)
    again, _ = talks(files, limits)
    talk = again.find(("me", 7))
    assert talk is not None and [m["content"] for m in talk.messages] == ["one", "two"] and talk.tokens == 10
    assert again.find(("you", 7)) is not None and again.find(("me", 8)) is None
    names = {t.name for key in (("me", 7), ("you", 7)) if (t := again.find(key)) is not None}
    assert len(names) == 2
    files.close()
    files = FileStore(tmp_path, limits)
    late, _ = talks(files, Limits(session_timeout=1e-9))
    with pytest.raises(ApiError, match="forgotten"):
        asyncio.run(turn(late, ("me", 7), "late"))
    files.close()
    assert not list((tmp_path / "sessions").iterdir())


@pytest.mark.parametrize("damaged", [b"{}", b"", b"[1]", b"\xff", b'{"id": 3}'], ids=repr)
def test_a_record_that_is_none_is_told_and_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: bytes
) -> None:
    limits = Limits()
    files = FileStore(tmp_path, limits)
    put(Store(limits, files), TWO)
    files.close()
    broken = tmp_path / "responses" / f"{ONE}.json"
    broken.write_bytes(damaged)
    files = FileStore(tmp_path, limits)
    store = Store(limits, files)
    assert store.get(ONE, "me") is None and store.get(TWO, "me") is not None
    files.close()
    assert broken.read_bytes() == damaged
    assert [str(broken) in line and "remove it" in line for line in caplog.messages] == [True]


def test_a_shorter_time_counts_for_what_is_kept_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = FileStore(tmp_path, Limits())
    put(Store(Limits(stored_response_seconds=5000), files), ONE)
    files.close()
    files = FileStore(tmp_path, Limits())
    store = Store(Limits(stored_response_seconds=50), files)
    assert store.get(ONE, "me") is not None
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 51)
    assert store.get(ONE, "me") is None
    files.close()


def test_only_own_files_that_nothing_names_are_removed(tmp_path: Path) -> None:
    FileStore(tmp_path, Limits()).close()
    begun = f"file-{'a' * 24}"
    for name in ("letter.txt", "letter.json", "file-a", f"{begun}.part", begun):
        (tmp_path / "files" / name).write_text("x")
    (tmp_path / "files" / "folder").mkdir()
    broken = tmp_path / "batches" / f"batch_{'b' * 24}.json"
    broken.write_text("{}")
    for left in (6, 4):  # a record that cannot be read may be of a batch that writes them
        files = FileStore(tmp_path, Limits())
        assert files.records("batches", Batch) == []
        files.tidy(set())
        files.close()
        assert len(list((tmp_path / "files").iterdir())) == left
        broken.unlink(missing_ok=True)
    assert sorted(f.name for f in (tmp_path / "files").iterdir()) == ["file-a", "folder", "letter.json", "letter.txt"]


def test_without_a_directory_nothing_is_written(tmp_path: Path) -> None:
    files = FileStore(None, Limits())
    put(Store(Limits(), files), ONE)
    assert files._root is None
    files.close()
