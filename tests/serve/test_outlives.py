"""Stored responses and conversations that outlive the server, where it has a directory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.limits import Limits
from toolkit.serve.lmdeploy.talks import Talks
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


def test_a_record_that_is_none_is_told(tmp_path: Path) -> None:
    FileStore(tmp_path, Limits()).close()
    (tmp_path / "responses" / f"{ONE}.json").write_text("{}")
    files = FileStore(tmp_path, Limits())
    with pytest.raises(ToolkitError, match="remove it"):
        Store(Limits(), files)
    files.close()


def test_without_a_directory_nothing_is_written(tmp_path: Path) -> None:
    files = FileStore(None, Limits())
    put(Store(Limits(), files), ONE)
    assert files._root is None
    files.close()
