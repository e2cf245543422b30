"""/v1/files and /v1/batches with the official client: what comes of a batch, whose it is, what a crash leaves of it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from toolkit.serve.generation.turn import LAST
from toolkit.serve.http.errors import ApiError
from toolkit.serve.http.limits import Limits
from toolkit.serve.openai.batches import lines as lines_module
from toolkit.serve.openai.batches import loop, results
from toolkit.serve.openai.batches.lines import Bounds, JsonLines
from toolkit.serve.openai.batches.results import Results
from toolkit.serve.openai.batches.routes import _seconds as kept_for
from toolkit.serve.openai.batches.seen import Seen
from toolkit.serve.openai.batches.store import FileStore
from toolkit.serve.proxy.paths import forwarded

COMMAND = [sys.executable, "-c", "import sys; from toolkit.commands.main import main; main(sys.argv[1:])"]


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0)


def line(name: str, url: str = "/v1/chat/completions", **body: Any) -> str:
    body = {"model": "echo", "messages": [{"role": "user", "content": name}]} if not body else body
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def upload(client: openai.OpenAI, lines: list[str]) -> Any:
    return client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")


def create(client: openai.OpenAI, lines: list[str], endpoint: str = "/v1/chat/completions", **more: Any) -> Any:
    given = {"completion_window": "24h", **more}
    return client.batches.create(input_file_id=upload(client, lines).id, endpoint=endpoint, **given)  # type: ignore[arg-type]


def ended(client: openai.OpenAI, id: str, seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while (batch := client.batches.retrieve(id)).status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < end, batch
        time.sleep(0.02)
    return batch


def read(client: openai.OpenAI, id: str | None) -> dict[str, Any]:
    """The lines of a file by their custom_id, of which there is one each."""
    rows = [] if id is None else [json.loads(text) for text in client.files.content(id).text.splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.fixture
def server(start: Any) -> Any:
    return start()


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return client_of(server.v1)


def test_a_batch_from_upload_to_answers(server: Any, client: openai.OpenAI) -> None:
    lines = [line(f"r{i}") for i in range(19)]
    lines.append(line("r19", messages="r19"))  # the model may be left out
    batch = ended(client, create(client, lines, metadata={"job": "nightly"}).id)
    assert (batch.status, batch.errors, batch.error_file_id) == ("completed", None, None)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 20, 0)
    assert batch.metadata == {"job": "nightly"} and batch.expires_at - batch.created_at == 24 * 3600
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    answers = read(client, batch.output_file_id)
    assert answers.keys() == {f"r{i}" for i in range(20)}
    told = answers["r7"]
    assert told["error"] is None and told["response"]["status_code"] == 200 and told["response"]["request_id"]
    body = openai.types.chat.ChatCompletion.model_validate(told["response"]["body"])
    assert body.choices[0].message.content == "[user]r7"
    assert set(server.engine.priorities) == {LAST}
    file = client.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert file.bytes == len(client.files.content(file.id).content)


@pytest.mark.parametrize(
    ("url", "body", "told"),
    [
        ("/v1/completions", {"prompt": "abc"}, "text_completion"),
        ("/v1/embeddings", {"input": "abc"}, "list"),
        ("/v1/responses", {"input": "abc"}, "response"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "method": "embedding"}, "list"),
    ],
)
def test_every_url_is_the_servers_own_route(client: openai.OpenAI, url: str, body: dict[str, Any], told: str) -> None:
    batch = ended(client, create(client, [line("a", url, model="echo", **body)], url).id)
    assert read(client, batch.output_file_id)["a"]["response"]["body"]["object"] == told


def test_a_bad_line_stops_no_other(client: openai.OpenAI) -> None:
    lines = [
        line("good"),
        "no json",
        line("good"),
        line("elsewhere", "/v1/completions", model="echo", prompt="a"),
        line("unknown", "/v1/images", model="echo"),
        line("refused", model="echo", messages=[], mystery=1),
        line("streams", model="echo", messages="a", stream=True),
        json.dumps({"custom_id": "get", "method": "GET", "url": "/v1/chat/completions", "body": {}}),
        json.dumps({"method": "POST", "url": "/v1/chat/completions", "body": {}}),
        "",
        line("last"),
    ]
    batch = ended(client, create(client, lines).id)
    assert batch.status == "completed" and batch.request_counts.total == 10
    assert read(client, batch.output_file_id).keys() == {"good", "last"}
    rows = [json.loads(text) for text in client.files.content(batch.error_file_id).text.splitlines()]
    assert batch.request_counts.failed == len(rows) == 8
    found = {(row["error"] or {}).get("code"): row for row in rows}
    assert found.keys() == {
        "invalid_json",
        "duplicate_custom_id",
        "mismatched_url",
        "invalid_url",
        "invalid_body",
        "invalid_method",
        "invalid_custom_id",
        None,
    }
    assert "line 2:" in found["invalid_json"]["error"]["message"]
    refused = found[None]
    assert refused["custom_id"] == "refused" and refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["param"]


def test_an_empty_file_and_one_of_too_many_lines_fail(start: Any) -> None:
    client = client_of(start(limits=Limits(max_batch_lines=2)).v1)
    for lines, code in (([""], "empty_file"), ([line(f"{i}") for i in range(3)], "too_many_requests")):
        batch = ended(client, create(client, lines).id)
        assert batch.status == "failed" and [error.code for error in batch.errors.data] == [code]
        assert batch.output_file_id is batch.error_file_id is None
    assert "--max-batch-lines" in batch.errors.data[0].message


def test_files_and_batches_are_listed_page_by_page(client: openai.OpenAI) -> None:
    ids = [upload(client, [line("a")]).id for _ in range(5)]
    assert [file.id for file in client.files.list(limit=2)] == ids[::-1]  # the client turns pages itself
    assert [file.id for file in client.files.list(order="asc", purpose="batch")] == ids
    assert list(client.files.list(purpose="batch_output")) == []
    batches = [
        client.batches.create(input_file_id=id, endpoint="/v1/chat/completions", completion_window="24h") for id in ids
    ]
    assert [batch.id for batch in client.batches.list(limit=2)] == [batch.id for batch in batches[::-1]]
    with pytest.raises(openai.BadRequestError, match="limit"):
        client.batches.list(limit=101)
    with pytest.raises(openai.BadRequestError, match="after"):
        client.files.list(after="file-nosuch")
    for batch in batches:
        ended(client, batch.id)


def test_a_key_sees_its_own_alone(start: Any) -> None:
    server = start(api_keys=("one", "two"))
    one, two = client_of(server.v1, "one"), client_of(server.v1, "two")
    batch = ended(one, create(one, [line("a")]).id)
    file = batch.output_file_id
    assert [b.id for b in one.batches.list()] == [batch.id] and list(two.batches.list()) == list(two.files.list()) == []
    for ask in (two.files.retrieve, two.files.content, two.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(file)
    for ask in (two.batches.retrieve, two.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            ask(batch.id)
    with pytest.raises(openai.BadRequestError, match="no such file"):
        two.batches.create(input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h")
    assert one.files.delete(file).deleted
    with pytest.raises(openai.NotFoundError):
        one.files.content(file)
    texts = kept_texts(server)
    assert texts and not any(key in text for key in ("one", "two") for text in texts)


def kept_texts(server: Any) -> list[str]:
    """The records that a server keeps."""
    return [path.read_text() for path in server.app.state.batches.store.root.rglob("*.json")]


def test_cancelling_keeps_what_is_answered(start: Any) -> None:
    server = start(engine={"max_batch_size": 4})
    client = client_of(server.v1)
    batch = create(client, [line(f"r{i}") for i in range(500)])
    held = wait_for(client, batch.id, lambda b: b.request_counts.completed > 3)
    server.engine.held = True
    with pytest.raises(openai.ConflictError, match="cancel it first"):
        client.files.delete(held.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch.id)
    assert batch.status == "cancelled" and batch.cancelling_at <= batch.cancelled_at
    assert 3 < len(read(client, batch.output_file_id)) == batch.request_counts.completed < 500
    server.wait(lambda: not server.engine.running)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    assert client.files.delete(batch.input_file_id).deleted


def wait_for(client: openai.OpenAI, id: str, true: Callable[[Any], bool]) -> Any:
    end = time.monotonic() + 120
    while not true(batch := client.batches.retrieve(id)):
        assert time.monotonic() < end and batch.status in ("validating", "in_progress"), batch
        time.sleep(0.01)
    return batch


def test_others_requests_find_places(start: Any) -> None:
    """A batch takes three quarters of the places, and fewer where others are there."""
    server = start(engine={"max_batch_size": 8, "held": True})
    client = client_of(server.v1)
    batch = create(client, [line(f"r{i}") for i in range(50)])
    server.wait(lambda: len(server.engine.running) == 6)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(client.completions.create, model="echo", prompt="ab") for _ in range(4)]
        server.wait(lambda: len(server.engine.running) == 10)
        assert server.app.state.batches._room() == 2
        server.engine.held = False
        assert {future.result().choices[0].text for future in asked} == {"ab"}
    assert ended(client, batch.id).request_counts.completed == 50
    assert server.engine.most_running == 10
    assert sorted(set(server.engine.priorities)) == [0, LAST]


def test_several_batches_take_turns(start: Any) -> None:
    server = start(engine={"max_batch_size": 2, "delay": 0.001})
    client = client_of(server.v1)
    long, short = (create(client, [line(f"{n}-{i}") for i in range(n)]) for n in (200, 3))
    assert ended(client, short.id).status == "completed"
    assert client.batches.retrieve(long.id).request_counts.completed < 200
    client.batches.cancel(long.id)
    ended(client, long.id)


def test_a_batch_whose_time_is_over_expires(start: Any, tmp_path: Path) -> None:
    server = start(engine={"held": True}, batch_dir=tmp_path / "kept")
    client = client_of(server.v1)
    batches = server.app.state.batches
    file = upload(client, [line(f"r{i}") for i in range(10)] + ["no json"])
    begin = batches.create

    async def soon(*given: Any) -> Any:
        made = await begin(*given)
        made.expires_at = int(time.time()) + 1
        return made

    batches.create = soon
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="1h")
    batch = ended(client, batch.id)
    assert batch.status == "expired" and batch.request_counts.failed == 11 and batch.output_file_id is None
    rows = [json.loads(text) for text in client.files.content(batch.error_file_id).text.splitlines()]
    assert sorted(row["error"]["code"] for row in rows) == ["batch_expired"] * 10 + ["invalid_json"]
    assert {row["custom_id"] for row in rows} == {f"r{i}" for i in range(10)} | {None}


LIMITED = {
    "max_file_bytes": (Limits(max_file_bytes=100), openai.APIStatusError),
    "max_files": (Limits(max_files=1), openai.BadRequestError),
    "max_files_bytes": (Limits(max_files_bytes=3000), openai.BadRequestError),
}


@pytest.mark.parametrize("name", LIMITED)
def test_what_is_kept_is_bounded(start: Any, name: str) -> None:
    limits, error = LIMITED[name]
    client = client_of(start(limits=limits).v1)
    small = "x" * 90
    assert upload(client, [small]).bytes == 90
    with pytest.raises(error, match="--" + name.replace("_", "-")):
        upload(client, ["x" * 2990 if name == "max_files_bytes" else "x" * 30_000])
    if name == "max_file_bytes":
        assert upload(client, ["x" * 100]).bytes == 100
    else:
        client.files.delete(next(iter(client.files.list())).id)
        assert upload(client, [small]).bytes == 90


def test_uploads_side_by_side_are_bounded_too(tmp_path: Path) -> None:
    async def go() -> list[Any]:
        store = FileStore(tmp_path, Limits(max_files_bytes=1000))
        both = (store.add(io.BytesIO(b"x" * 700), "k", "f", "batch", 60.0) for _ in range(2))
        try:
            return await asyncio.gather(*both, return_exceptions=True)
        finally:
            store.close()

    found = asyncio.run(go())
    assert sorted(type(one).__name__ for one in found) == ["ApiError", "Stored"]
    assert len(list((tmp_path / "files").iterdir())) == 2  # a text and its record


def test_what_is_kept_is_looked_at_in_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may be kept or go at any time."""
    store, here, seen = FileStore(tmp_path, Limits()), threading.get_ident(), set()
    looked = store._check
    monkeypatch.setattr(store, "_check", lambda *what: (seen.add(threading.get_ident()), looked(*what)))
    asyncio.run(store.add(io.BytesIO(b"x"), "k", "f", "batch", 60.0))
    store.close()
    assert seen == {here}


def test_what_is_kept_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a name may stand for an empty file after a loss of power. The loop that all answers come from waits for no
    disk."""
    here, synced, replace = threading.get_ident(), dict[int, int](), os.replace

    def sync(file: int) -> None:
        assert threading.get_ident() != here or not synced.get(-1)
        found = os.fstat(file)
        synced[found.st_ino] = found.st_size

    def renamed(part: Any, path: Any) -> None:
        found = os.stat(part)
        assert found.st_size and synced[found.st_ino] == found.st_size, f"{path} is not on disk"
        replace(part, path)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", renamed)
    store = FileStore(tmp_path, Limits())
    synced[-1] = 1  # from now on there is a loop
    file = asyncio.run(store.add(io.BytesIO(b"x"), "k", "f", "batch", 60.0))
    store.save_later("files", file)
    store.close()
    assert json.loads((tmp_path / "files" / f"{file.id}.json").read_bytes())["bytes"] == 1
    assert (tmp_path / "files" / file.id).read_bytes() == b"x"
    assert len(list((tmp_path / "files").iterdir())) == 2


def test_a_file_whose_record_cannot_be_written_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes, mode: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = FileStore(tmp_path, Limits())
    monkeypatch.setattr("toolkit.serve.openai.batches.store.write_whole", full)
    with pytest.raises(ApiError, match="No space left on device"):
        asyncio.run(store.add(io.BytesIO(b"x"), "k", "f", "batch", 60.0))
    assert store.files("k") == [] and not list((tmp_path / "files").iterdir())
    store.close()


def test_a_byte_order_mark_is_none_of_the_first_line(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_bytes(BOM_UTF8 + b'{"a": 1}\n\n' + BOM_UTF8 + b'{"b": 2}\n')
    found = [one.data for one in JsonLines(file, Bounds(Limits()))]
    assert found == [b'{"a": 1}', BOM_UTF8 + b'{"b": 2}']


def test_empty_lines_hold_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, read = tmp_path / "in.jsonl", []
    file.write_bytes(b"one" + b"\n" * 300_000 + b" \r\n" * 100_000 + b"\n\ttwo\n \nthree")
    split = lines_module.split

    def counted(*given: Any) -> Iterator[Any]:
        for found in split(*given):
            read.append(found)
            yield found

    monkeypatch.setattr(lines_module, "split", counted)
    found = [(one.number, one.data) for one in JsonLines(file, Bounds(Limits()))]
    assert found == [(1, b"one"), (400_002, b"\ttwo"), (400_004, b"three")]
    assert len(read) < 100


def test_a_full_disk_leaves_no_half_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Results(tmp_path / "out.jsonl")
    kept.write(good := results.answered(1, "0" * 16, "a", 200, "x", b"{}"))
    room, write = [20], os.write

    def full(file: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: room.pop()])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        kept.write(results.answered(2, "0" * 16, "b", 200, "x", b"{}"))
    monkeypatch.undo()
    kept.close()
    assert (tmp_path / "out.jsonl").read_bytes() == good


def test_answers_that_fill_the_store_end_the_batch(start: Any) -> None:
    client = client_of(start(limits=Limits(max_files_bytes=12_000)).v1)
    batch = ended(client, create(client, [line(f"r{i}") for i in range(40)]).id)
    assert batch.status == "failed" and batch.errors.data[0].code == "storage_full"
    assert "--max-files-bytes" in batch.errors.data[0].message
    assert 0 < len(read(client, batch.output_file_id)) < 40


def test_batches_that_run_are_counted(start: Any) -> None:
    server = start(engine={"held": True}, limits=Limits(max_batches=1))
    client = client_of(server.v1)
    first = create(client, [line("a")])
    with pytest.raises(openai.RateLimitError, match="--max-batches"):
        create(client, [line("a")])
    server.engine.held = False
    assert ended(client, first.id).status == "completed"
    assert ended(client, create(client, [line("a")]).id).status == "completed"


def test_old_files_and_batches_go(start: Any) -> None:
    client = client_of(start(limits=Limits(file_seconds=4.0)).v1)  # enough for a batch
    batch = ended(client, create(client, [line("a")]).id)
    end = time.monotonic() + 60
    while list(client.files.list()) or list(client.batches.list()):
        assert time.monotonic() < end
        time.sleep(0.05)
    for ask, id in ((client.files.content, batch.output_file_id), (client.batches.retrieve, batch.id)):
        with pytest.raises(openai.NotFoundError):
            ask(id)


def test_wrong_fields_are_named(server: Any, client: openai.OpenAI) -> None:
    for purpose in ("fine-tune", "vision"):
        with pytest.raises(openai.BadRequestError, match="purpose: expected 'batch'"):
            client.files.create(file=b"x", purpose=purpose)  # type: ignore[arg-type]
    file = upload(client, [line("a")])
    good = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    for name, value in {
        "endpoint": "/v1/images",
        "completion_window": "soon",
        "input_file_id": "file-../../etc",
        "metadata": {"a": "x" * 513},
    }.items():
        with pytest.raises(openai.BadRequestError, match=name):
            client.batches.create(**{**good, name: value})
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve("..%2f..%2fsalt")
    with pytest.raises(openai.APIStatusError) as told:
        client.post("/files", body={"file": "x"}, cast_to=object)
    assert told.value.status_code == 415


def test_a_temporary_store_goes_with_its_server() -> None:
    store = FileStore(None, Limits())
    root = store.root
    assert (root / "salt").stat().st_mode & 0o777 == 0o600 and root.stat().st_mode & 0o777 == 0o700
    store.close()
    assert not root.exists()


def test_a_directory_is_one_servers(tmp_path: Path) -> None:
    first = FileStore(tmp_path / "kept", Limits())
    with pytest.raises(Exception, match="another server uses it"):
        FileStore(tmp_path / "kept", Limits())
    first.close()
    FileStore(tmp_path / "kept", Limits()).close()
    (tmp_path / "file").write_text("x")
    with pytest.raises(Exception, match=r"--batch-dir .*file: cannot be used"):
        FileStore(tmp_path / "file", Limits())


@contextlib.contextmanager
def serving(model: Path, directory: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [*COMMAND, "serve", "api_server", str(model), "--server-port", "0", "--batch-dir", str(directory)]
    flags = ["--max-batch-size", "4", "--session-len", "256", "--model-name", "echo", "--api-keys", "sesame"]
    process = subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True, cwd="/", start_new_session=True)
    try:
        assert process.stderr is not None
        url = next(found[1] for text in process.stderr if (found := re.search(r"running on (http\S+)", text)))
        yield url + "/v1", process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_batch_goes_on_after_its_server_was_killed(packed: Path, tmp_path: Path) -> None:
    body = {"model": "echo", "prompt": "Once", "max_tokens": 24, "ignore_eos": True}
    lines = [line(f"r{i}", "/v1/completions", **body, seed=i) for i in range(120)]
    with serving(packed, tmp_path) as (url, _):
        client = client_of(url, "sesame")
        batch = create(client, lines, "/v1/completions")
        wait_for(client, batch.id, lambda b: b.request_counts.completed >= 8)
    (written,) = (p for p in (tmp_path / "files").iterdir() if p.suffix == "" and b"batch_req_" in p.read_bytes()[:20])
    before = written.read_bytes()
    written.write_bytes(before + before[:70])  # as if the kill had torn a line
    with serving(packed, tmp_path) as (url, _):
        client = client_of(url, "sesame")
        batch = ended(client, batch.id)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.total) == ("completed", 120, 120)
        assert read(client, batch.output_file_id).keys() == {f"r{i}" for i in range(120)}
        assert client.files.content(batch.output_file_id).content.startswith(before)


def test_a_file_may_be_larger_than_other_bodies(start: Any) -> None:
    limits = Limits(max_body_bytes=500, max_pending_bytes=600)
    client = client_of(start(limits=limits).v1)
    lines = [line(f"r{i}") for i in range(12)] + [line("long", model="echo", messages="x" * 500)]
    batch = ended(client, create(client, lines).id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (12, 1)
    assert "--max-body-bytes" in read(client, batch.error_file_id)[None]["error"]["message"]  # type: ignore[index]


@pytest.mark.parametrize("path", ["/v1/files", "/v1/files/file-1/content", "/v1/batches"])
def test_what_one_server_keeps_is_not_asked_through_another(path: str) -> None:
    with pytest.raises(ApiError, match="kept by a server of one model") as told:
        forwarded({"path": path, "query_string": b""})
    assert told.value.status == 404


@pytest.mark.parametrize("code", ["engine_unavailable", "shutting_down"])
def test_a_line_that_cannot_be_taken_now_is_asked_again(tmp_path: Path, monkeypatch: Any, code: str) -> None:
    """As when the engine is started anew; of a server that ends, nothing is written."""
    monkeypatch.setattr(loop, "AGAIN", (0.0, 0.0))
    source, written, asked = tmp_path / "in.jsonl", [], []
    source.write_text("\n".join(line(f"r{i}") for i in range(3)))
    tasks: dict[bytes, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append((await receive())["body"])
        before, tasks[asked[-1]] = tasks.get(asked[-1]), asyncio.current_task()
        assert before is None or before.done()  # between two tries the server has no request
        status = 503 if asked.count(asked[-1]) < 3 else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b'{"error":{"code":"%s"}}' % code.encode()})

    async def run() -> loop.Tally:
        tally, seen = loop.Tally(), Seen()
        lines = JsonLines(source, Bounds(Limits()))
        turns = loop.Turns(lambda: 2)
        await loop.run(app, lines, b"", seen, tally, turns, lambda text, good: written.append(text))
        return tally

    if code == "shutting_down":
        with pytest.raises(loop.Stopped):
            asyncio.run(run())
        assert not written
        return
    tally = asyncio.run(run())
    assert (tally.completed, tally.failed, len(written), len(asked)) == (3, 0, 3, 9)


@pytest.mark.parametrize("queue", [True, False])
def test_a_line_waits_as_long_as_others_fill_the_queue(
    queue: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what else there is too much of, the line itself may be the reason: it is asked a few times."""
    monkeypatch.setattr(loop, "AGAIN", (0.0, 0.0))
    (source := tmp_path / "in.jsonl").write_text(line("r1"))
    asked: list[str] = []
    why = "9 requests wait already (the server's --max-queue)" if queue else "the server's --max-held-bytes"

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await send({"type": "http.response.start", "status": 429 if len(asked) < 9 else 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps({"error": {"message": why}}).encode()})

    tally = loop.Tally()
    lines, turns = JsonLines(source, Bounds(Limits())), loop.Turns(lambda: 2)
    asyncio.run(loop.run(app, lines, b"", Seen(), tally, turns, lambda text, good: None))
    assert (tally.completed, tally.failed, len(asked)) == ((1, 0, 9) if queue else (0, 1, 3))


def test_no_line_is_asked_while_new_weights_wait(start: Any) -> None:
    server = start()
    assert server.app.state.batches._room() > 0
    server.app.state.server.draining = True
    assert server.app.state.batches._room() == 0


@pytest.mark.parametrize("what", ["starlette.formparsers.SpooledTemporaryFile.write", "write_whole"])
def test_what_a_full_disk_refuses_is_told_as_such(start: Any, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A file on its way in, which is a temporary one meanwhile; the record of a batch."""
    client = client_of(start().v1)
    file = upload(client, [line("r1")])

    def full(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(what if "." in what else f"toolkit.serve.openai.batches.store.{what}", full)
    with pytest.raises(openai.InternalServerError, match=r"kept .*No space left on device") as told:
        if what == "write_whole":
            client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        else:
            upload(client, [line("r2")])
    assert told.value.code == "storage_full"
    monkeypatch.undo()
    assert not client.batches.list().data and ended(client, create(client, [line("r3")]).id).status == "completed"


def test_a_client_that_hangs_up_while_it_uploads_is_no_fault_of_ours(start: Any, caplog: Any) -> None:
    server = start()
    head = "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    part = '--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nabc'
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as sock:
        sock.sendall(f"{head}Content-Length: 5000\r\n\r\n{part}".encode())
        server.wait(lambda: bool(server.server_state.tasks))
    server.wait(lambda: not server.server_state.tasks)
    assert "Traceback" not in caplog.text


def test_a_batch_that_breaks_off_gives_all_its_places_back(tmp_path: Path) -> None:
    """Also that of a line which was to be asked, and had not begun when another one's answer could not be kept."""
    source, turns = tmp_path / "in.jsonl", loop.Turns(lambda: 2)
    source.write_text("\n".join(line(f"r{i}") for i in range(6)))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def full(text: bytes, good: bool) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        asyncio.run(loop.run(app, JsonLines(source, Bounds(Limits())), b"", Seen(), loop.Tally(), turns, full))
    assert turns.running == 0


def test_a_key_leaves_as_much_room_as_it_takes(start: Any) -> None:
    """However much it brings: the next key's files are taken."""
    server = start(api_keys=["a", "b", "c"], limits=Limits(max_files=8, max_files_bytes=9000))
    greedy, others = client_of(server.v1, "a"), [client_of(server.v1, key) for key in ("b", "c")]
    for text, most, option in (("x" * 90, 4, "--max-files "), ("x" * 1500, 3, "--max-files-bytes ")):
        for _ in range(most):
            upload(greedy, [text])
        with pytest.raises(openai.BadRequestError, match=f"of this key, expected at most .*{option}.*delete some"):
            upload(greedy, [text])
        for other in others:
            upload(other, [text])
        for client in (greedy, *others):
            for file in client.files.list():
                client.files.delete(file.id)


def test_a_single_key_has_the_whole_store(start: Any) -> None:
    client = client_of(start(api_keys=["a"], limits=Limits(max_files=5, max_files_bytes=9000)).v1, "a")
    for _ in range(5):
        upload(client, ["x" * 90])
    with pytest.raises(openai.BadRequestError, match="expected at most 5"):
        upload(client, ["x"])


def test_answers_of_a_batch_leave_room_for_others_files(start: Any) -> None:
    server = start(api_keys=["a", "b"], limits=Limits(max_files_bytes=24_000))
    greedy, other = client_of(server.v1, "a"), client_of(server.v1, "b")
    batch = ended(greedy, create(greedy, [line(f"r{i}") for i in range(60)]).id)
    assert batch.status == "failed" and batch.errors.data[0].code == "storage_full"
    assert "of this key" in batch.errors.data[0].message
    upload(other, ["x" * 5000])


def test_folders_of_killed_servers_are_removed_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old = time.time() - 3600

    def left(name: str, lock: bool = True, mode: int = 0o700, **more: str) -> Path:
        folder = tmp_path / f"toolkit-batches-{name}"
        (folder / "files").mkdir(parents=True)
        (folder / "files" / "file-1").write_text("x")
        for name, text in ({"lock": ""} if lock else {}).items() | more.items():
            (folder / name).write_text(text)
            os.utime(folder / name, (old, old))
        folder.chmod(mode)
        return folder

    young = left("young")
    os.utime(young / "lock")
    linked = tmp_path / "toolkit-batches-linked"
    linked.symlink_to(left("target", lock=False))
    kept = [young, linked, left("unlocked", lock=False), left("open", mode=0o755), left("more", notes="x")]
    killed = left("killed", salt="x")
    living = FileStore(None, Limits())
    os.utime(living.root / "lock", (old, old))
    FileStore(None, Limits()).close()
    assert (living.root / "salt").exists() and all(folder.exists() for folder in kept)
    living.close()
    assert not killed.exists()


def test_a_server_that_ends_takes_no_batch(start: Any, tmp_path: Path) -> None:
    server = start(batch_dir=tmp_path / "kept")
    server.app.state.server.closing = True
    with pytest.raises(openai.APIStatusError) as error:
        create(client_of(server.v1), [line("r")])
    assert error.value.status_code == 503 and "the server is shutting down; ask again later" in str(error.value)


@pytest.mark.parametrize("seconds", ["3599", "000003600999999", "000003600" + "0" * 5000, "3600.0", "", None])
def test_a_file_says_how_long_it_is_kept_or_is_refused(seconds: str | None) -> None:
    assert kept_for("created_at", "3600") == 3600
    with pytest.raises(ApiError, match="seconds"):
        kept_for("created_at", seconds)
