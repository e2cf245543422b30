"""What a batch says of options and files that cannot be: the whole line."""

from __future__ import annotations

import base64
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.refused import refusing
from toolkit import TurbomindEngineConfig
from toolkit.batch import run
from toolkit.batch.filling import MOST_SCHEMA, Filler, Filling
from toolkit.batch.options import BatchSettings
from toolkit.batch.vectors import answers_file, check_target, collect
from toolkit.engine.process.outage import Outage
from toolkit.errors import ToolkitError, UsageError
from toolkit.serve.http.limits import Limits
from toolkit.serve.openai.batches.lines import Asked
from toolkit.serve.openai.batches.loop import digest_of
from toolkit.serve.openai.batches.results import answered, failed
from toolkit.serve.openai.batches.urls import RESPONSES

refused = refusing(UsageError)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"system": "x"}, "system: only with prompt, for rows"),
        ({"id_column": "x"}, "id_column: only with prompt, for rows"),
        ({"endpoint": "/v1/completions"}, "endpoint: only with prompt, for rows; other lines name theirs as url"),
        ({"json_schema": "{"}, "json_schema: expected a JSON schema or a file of one, found '{' ("),
    ],
)
def test_what_lines_have_no_use_for(given: dict[str, Any], told: str) -> None:
    assert refused(lambda: Filler(Filling(**given))).startswith(told)


@pytest.mark.parametrize("text", ["x", 5, ["x"]])
def test_a_line_that_is_wrong_is_left_to_its_answer(text: Any) -> None:
    """A schema for all lines goes into it as well: it must not end the others."""
    asked = Asked("a", RESPONSES, {"input": "x", "text": text})
    assert Filler(Filling(json_schema="{}")).body(asked, "m") == {"input": "x", "text": text, "model": "m"}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"[1]", "json_schema: expected a JSON object, found '[1]'"),
        (b"{" + b" " * MOST_SCHEMA, f"json_schema: {{file}} has more than {MOST_SCHEMA:,} bytes"),
    ],
)
def test_a_file_of_a_schema(tmp_path: Path, data: bytes, told: str) -> None:
    file = tmp_path / "schema.json"
    file.write_bytes(data)
    assert refused(lambda: Filler(Filling(json_schema=str(file)))) == told.format(file=file)


@pytest.mark.parametrize("before", [None, b""])
def test_a_run_that_answers_nothing_leaves_the_files_that_there_were(before: bytes | None, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}) + "\n")
    if before is not None:
        target.write_bytes(before)
    for _ in range(2):
        files = run.open_files(source, target, Filling(), "demo", Limits())
        files.close()  # as when the model cannot be loaded
        assert target.exists() == (before is not None)
    files = run.open_files(source, target, Filling(), "demo", Limits())
    files.results.write(answered(1, "0" * 16, "a", 200, "r", b"{}"))
    files.close()
    assert target.read_bytes().count(b"\n") == 1


def test_a_file_for_vectors(tmp_path: Path) -> None:
    kinds = "expected a file that ends in .npy, .parquet, .jsonl"
    assert refused(lambda: check_target(tmp_path / "a.txt")) == f"{tmp_path / 'a.txt'}: {kinds}, found .txt"
    assert refused(lambda: check_target(tmp_path / "a")) == f"{tmp_path / 'a'}: {kinds}, found none"
    (folder := tmp_path / "a.npy").mkdir()
    assert refused(lambda: check_target(folder)) == f"{folder}: expected a file for the vectors, found something else"


WRONG = json.dumps({"error": {"message": "input: too long"}}).encode()


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"", "there is none"),
        (failed(1, "0" * 16, "a", "missing_value", "text: none"), "line 1: text: none"),
        (answered(1, "0" * 16, "a", 400, "r", WRONG), "input: too long"),
        (answered(1, "0" * 16, "a", 200, "r", b"{}"), "the answer holds none"),
    ],
)
def test_answers_without_a_vector(line: bytes, why: str, tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_bytes(line)
    told = f"no line has a vector: {why} (answers: {answers})"
    assert refused(lambda: collect(answers, tmp_path / "a.npy"), ToolkitError) == told


@pytest.mark.parametrize("name", ["a.npy", "a.jsonl", "a.parquet"])
def test_vectors_that_cannot_be_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    answers, target = tmp_path / "answers.jsonl", tmp_path / name
    vector = base64.b64encode(np.ones(2, "<f4").tobytes()).decode()
    body = json.dumps({"data": [{"embedding": vector}]}).encode()
    answers.write_bytes(answered(1, "0" * 16, "a", 200, "r", body))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    told = f"{target}: cannot be written (No space left on device); all answers are in {answers}"
    assert refused(lambda: collect(answers, target), ToolkitError) == told
    assert [file.name for file in tmp_path.iterdir()] == ["answers.jsonl"]


COLLECTS = """
import sys
from pathlib import Path
from toolkit.batch.options import BatchSettings
from toolkit.batch.vectors import collect
from toolkit.errors import ToolkitError
try:
    collect(*map(Path, sys.argv[1:]))
except ToolkitError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which needs root")
def test_vectors_on_a_full_disk(tmp_path: Path) -> None:
    """In a process of its own, which a file that is mapped would end."""
    answers, disk = tmp_path / "answers.jsonl", tmp_path / "disk"
    disk.mkdir()
    body = json.dumps({"data": [{"embedding": base64.b64encode(bytes(1 << 17)).decode()}]}).encode()
    answers.write_bytes(answered(1, "0" * 16, "a", 200, "r", body))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], check=True)
    try:
        command = [sys.executable, "-c", COLLECTS, answers, disk / "a.npy"]
        done = subprocess.run(command, capture_output=True, text=True)
        told = f"{disk / 'a.npy'}: cannot be written (No space left on device); all answers are in {answers}\n"
        assert (done.returncode, done.stdout) == (0, told) and not list(disk.iterdir())
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_vectors_do_not_take_the_place_of_their_texts(tmp_path: Path, support: Any) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "a"}\n')
    done = support("command").tool("embed", texts, texts, "--model", "/no/such", "--overwrite")
    told = f"{texts}: expected another file for the vectors than the input's"
    assert done.returncode == 2 and told in done.stderr and texts.read_text() == '{"text": "a"}\n'


def test_a_killed_run_does_not_go_on_with_another_pooling(tmp_path: Path, support: Any) -> None:
    """Its vectors would be of two kinds in one file."""
    texts, target = tmp_path / "texts.jsonl", tmp_path / "out.npy"
    texts.write_text('{"text": "a"}\n{"text": "b"}\n')
    fields = {"encoding_format": "base64", "normalize": True, "truncate_prompt_tokens": -1}
    filling = Filling(prompt="{text}", endpoint="/v1/embeddings", extra_body=fields)
    files = run.open_files(
        texts, answers_file(target), filling, "such", Limits(), settings=BatchSettings(pooling="mean")
    )
    first = next(iter(files.source))
    files.results.write(answered(1, digest_of(first, files.salt), "row-1", 200, "r", b"{}"))
    files.close()
    for pooling, changed in (("mean", False), ("cls", True), ("auto", True)):
        done = support("command").tool("embed", texts, target, "--model", "/no/such", "--pooling", pooling)
        assert done.returncode == 2 and ("line 1 is not what" in done.stderr) == changed, done.stderr


def test_a_killed_run_does_not_go_on_with_vectors_that_are_computed_otherwise(tmp_path: Path, support: Any) -> None:
    texts, target = tmp_path / "texts.jsonl", tmp_path / "out.npy"
    texts.write_text('{"text": "a"}\n{"text": "b"}\n')
    fields = {"encoding_format": "base64", "normalize": True, "truncate_prompt_tokens": -1}
    filling = Filling(prompt="{text}", endpoint="/v1/embeddings", extra_body=fields)
    config = TurbomindEngineConfig(load_format="int4", hf_overrides={"a": 1})
    files = run.open_files(texts, answers_file(target), filling, "such", Limits(), engine=config)
    first = next(iter(files.source))
    files.results.write(answered(1, digest_of(first, files.salt), "row-1", 200, "r", b"{}"))
    files.close()
    same = ["--load-format", "int4", "--hf-overrides", '{"a": 1}']
    others: list[list[str]] = [[], same[:2], [*same[:3], '{"a": 2}'], [*same, "--dtype", "float16"]]
    for options, changed in ((same, False), ([*same, "--tp", "2"], False), *((other, True) for other in others)):
        done = support("command").tool("embed", texts, target, "--model", "/no/such", *options)
        assert done.returncode == 2 and ("line 1 is not what" in done.stderr) == changed, done.stderr


@pytest.mark.parametrize("named", ["chatml", "own.jinja"])
def test_a_run_does_not_go_on_with_another_chat_template(named: str, tmp_path: Path, support: Any) -> None:
    """Its answers would be to two kinds of prompts; a file that has changed is another one too."""
    source, target, own = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "own.jinja"
    source.write_text('{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n')
    own.write_text("{{ messages }}")
    template = str(own) if named == own.name else named
    files = run.open_files(source, target, Filling(), "such", Limits(), chat_template=template)
    files.results.write(answered(1, digest_of(next(iter(files.source)), files.salt), "a", 200, "r", b"{}"))
    files.close()
    same = ["batch", source, target, "--model", "/no/such"]
    done = support("command").tool(*same, "--chat-template", template)
    assert done.returncode == 0, done.stderr
    own.write_text("{{ messages[0] }}")
    for other in ([], ["--chat-template", "base"], ["--chat-template", own]):
        done = support("command").tool(*same, *other)
        assert done.returncode == 2 and "line 1 is not what" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "option, value, other",
    [("--generation-config", "own.json", "toolkit"), ("--reasoning-parser", "deepseek-r1", "qwen-qwq")],
)
def test_a_run_does_not_go_on_with_another_setting(
    option: str, value: str, other: str, tmp_path: Path, support: Any
) -> None:
    """A generation_config.json is told by what it asks for, wherever it lies."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {}}\n')
    for name in ("own.json", "copy.json"):
        (tmp_path / name).write_text('{"do_sample": true, "top_k": 7}')
    own, copy = (str(tmp_path / name) if value == "own.json" else value for name in ("own.json", "copy.json"))
    settings = BatchSettings(**{option[2:].replace("-", "_"): own})
    files = run.open_files(source, target, Filling(), "such", Limits(), settings=settings)
    files.results.write(answered(1, digest_of(next(iter(files.source)), files.salt), "a", 200, "r", b"{}"))
    files.close()
    same = ["batch", source, target, "--model", "/no/such"]
    done = support("command").tool(*same, option, copy)
    assert done.returncode == 0, done.stderr
    for more in ([], [option, other]):
        done = support("command").tool(*same, *more)
        assert done.returncode == 2 and "line 1 is not what" in done.stderr, done.stderr


def test_answers_whose_table_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    (source := tmp_path / "in.jsonl").write_text("")
    target = tmp_path / "out.parquet"
    files = run.open_files(source, target, Filling(), "m", Limits(), overwrite=False)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run, "write_table", full)
    told = f"{target}: cannot be written (No space left on device); all answers are in {target}.jsonl"
    assert refused(files.finish, ToolkitError) == told
    files.close()


def test_a_table_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (source := tmp_path / "in.jsonl").write_text("")
    (target := tmp_path / "out.parquet").write_bytes(b"mine")
    told = f"{target}: is there already, and its answers, {target}.jsonl, are not; --overwrite replaces it"
    assert refused(lambda: run.open_files(source, target, Filling(), "m", Limits())) == told
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.jsonl", "out.parquet"]
    for overwrite in (True, False):  # the second time its answers are there
        files = run.open_files(source, target, Filling(), "m", Limits(), overwrite=overwrite)
        files.finish()
        files.close()


def test_an_engine_that_ended_for_good(tmp_path: Path) -> None:
    (source := tmp_path / "in.jsonl").write_text(
        '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}\n'
    )
    files = run.open_files(source, tmp_path / "out.jsonl", Filling(), "m", Limits(), overwrite=False)
    gone = run.Answerer(None, "m", 64, 1, Limits(), lambda: Outage("killed", restarting=False))  # type: ignore[arg-type]
    told = "the engine ended (killed); the same command goes on where it was"
    assert refused(lambda: run.answer(gone, files), ToolkitError) == told
    files.close()
