"""``tool batch``: what comes out for what goes in, and what a kill leaves to do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit import pipeline
from toolkit.batch.filling import Filler, Filling
from toolkit.batch.rows import Table
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing
from toolkit.errors import ToolkitError, UsageError
from toolkit.serve.openai.batches.lines import Asked

TOOL = [sys.executable, "-c", "import sys; from toolkit.commands.main import main; main(sys.argv[1:])"]
ENGINE = ("--max-batch-size", "4", "--session-len", "256")


@pytest.fixture(scope="module")
def model(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "tiny"
    convert(str(tiny_models("llama")), path, Packing(target="cpu", dtype="float32", head_bits=16), quiet=True)
    return path


@pytest.fixture(scope="module")
def pipe(model: Path) -> Any:
    with pipeline(str(model)) as made:
        yield made


@pytest.fixture(scope="module")
def tool(support: Any) -> Callable[..., subprocess.CompletedProcess[str]]:
    return lambda *given: support("command").tool("batch", *given)


def line(name: str, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    body = {"prompt": name, "max_tokens": 4, "ignore_eos": True} if not body else body
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text.endswith("\n") or not text
    return [json.loads(row) for row in text.splitlines()]


def names(path: Path) -> list[str]:
    return sorted(row["custom_id"] for row in read(path))


def test_lines_are_answered_by_the_servers_routes(model: Path, tool: Any, tmp_path: Path) -> None:
    lines = [
        line("text"),
        line("talk", "/v1/chat/completions", messages="Hello", max_tokens=3),
        line("vector", "/v1/embeddings", input=["a", "b"], dimensions=4),
        line("response", "/v1/responses", input="Hello", max_output_tokens=3),
        line("refused", prompt="a", mystery=1),
        line("elsewhere", model="gpt-4", prompt="a"),
        "{torn",
        "",
        line("text"),
        line("image", "/v1/images", prompt="a"),
        line("streams", prompt="a", stream=True),
        "[]",
    ]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    done = tool(source, target, "--model", model, *ENGINE)
    assert done.returncode == 0, done.stderr
    assert "4 of 11 lines answered; 7 failed" in done.stderr and done.stdout == ""
    good = {row["custom_id"]: row["response"]["body"] for row in read(target) if row["error"] is None}
    assert [good[name]["object"] for name in ("text", "talk", "vector", "response")] == [
        "text_completion",
        "chat.completion",
        "list",
        "response",
    ]
    assert good["text"]["usage"]["completion_tokens"] == 4 and good["text"]["model"] == "tiny"
    assert [len(row["embedding"]) for row in good["vector"]["data"]] == [4, 4]
    status = {row["custom_id"]: row["response"]["status_code"] for row in read(target) if row["response"]}
    assert (status.pop("refused"), status.pop("elsewhere"), set(status.values())) == (400, 404, {200})
    faults = sorted(
        row["error"]["message"].partition(":")[0] + row["error"]["code"] for row in read(target) if row["error"]
    )
    assert faults == [
        "line 10invalid_url",
        "line 11invalid_body",
        "line 12invalid_json",
        "line 7invalid_json",
        "line 9duplicate_custom_id",
    ]
    before = target.read_bytes()
    again = tool(source, target, "--model", "/no/such/tiny")  # everything is done: nothing is loaded
    assert again.returncode == 0 and "11 of them by earlier runs" in again.stderr, again.stderr
    assert target.read_bytes() == before


def test_what_all_requests_get_may_name_the_model() -> None:
    filler = Filler(Filling(prompt="{text}", extra_body={"model": "tales"}))
    assert filler.body(Asked("1", "/v1/chat/completions", {}), "base")["model"] == "tales"
    assert filler.body(Asked("1", "/v1/chat/completions", {"model": "verse"}), "base")["model"] == "verse"
    assert Filler(Filling()).body(Asked("1", "/v1/chat/completions", {}), "base")["model"] == "base"


def test_a_killed_run_goes_on_where_it_was(model: Path, tmp_path: Path) -> None:
    lines: list[Any] = [line(f"r{i}", prompt="Once", max_tokens=40, ignore_eos=True, seed=i) for i in range(120)]
    lines[60:60] = ["no json", line("r3")]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    command = [*TOOL, "batch", str(source), str(target), "--model", str(model), *ENGINE]
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    for least in (5, 30):
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd="/", env=env, start_new_session=True) as process:
            while not target.exists() or target.read_bytes().count(b"\n") < least:
                assert process.poll() is None
                time.sleep(0.005)
            os.killpg(process.pid, signal.SIGKILL)
    before = target.read_bytes()
    whole = before[: before.rindex(b"\n") + 1]
    assert 30 <= whole.count(b"\n") < 122
    target.write_bytes(whole + whole[:50])  # as a line is torn
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=env)
    assert done.returncode == 0 and "120 of 122 lines answered; 2 failed" in done.stderr, done.stderr
    rows = read(target)
    assert target.read_bytes().startswith(whole) and len(rows) == 122
    answered = [row["custom_id"] for row in rows if row["response"]]
    assert sorted(answered) == sorted(f"r{i}" for i in range(120))
    assert sorted(row["error"]["code"] for row in rows if row["error"]) == ["duplicate_custom_id", "invalid_json"]


def test_two_runs_do_not_write_one_file(model: Path, tool: Any, pipe: Any, tmp_path: Path) -> None:
    from toolkit.serve.openai.batches.results import Results

    source, target = write(tmp_path / "in.jsonl", [line("a")]), tmp_path / "out.jsonl"
    held = Results(target)
    with pytest.raises(ToolkitError, match="another run is writing it"):
        pipe.batch(source, target)
    held.close()
    assert pipe.batch(source, target).completed == 1


def test_a_changed_input_is_noticed(pipe: Any, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [line("a"), line("b")]), tmp_path / "out.jsonl"
    pipe.batch(source, target)
    before = target.read_bytes()
    for lines, told in (
        ([line("a"), line("c")], "line 2"),
        ([line("b"), line("a")], "line 1"),
        ([line("a")], "line 2, which is gone"),
    ):
        write(source, lines)
        with pytest.raises(UsageError, match=told):
            pipe.batch(source, target)
    write(source, [line("a"), line("b")])
    with pytest.raises(UsageError, match="an option"):
        pipe.batch(source, target, temperature=0.5)
    assert target.read_bytes() == before
    write(source, [line("a"), line("b"), line("c")])  # what is added is only more to do
    tally = pipe.batch(source, target)
    assert (tally.total, tally.completed, tally.earlier) == (3, 3, 2)
    assert target.read_bytes().startswith(before) and names(target) == ["a", "b", "c"]
    assert pipe.batch(source, target, temperature=0.5, overwrite=True).earlier == 0
    assert names(target) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(line("a")),
        json.dumps(line("a")) + "\n",
        '{"id":"batch_req_1_0123456789abcdef","custom_id":"a","response":null}\nmine\n',
        "a diary",
    ],
)
def test_somebody_elses_file_is_left_alone(pipe: Any, tmp_path: Path, text: str) -> None:
    source, target = write(tmp_path / "in.jsonl", [line("b")]), tmp_path / "mine.jsonl"
    target.write_text(text)
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="expected answers of a batch"):
            pipe.batch(source, target, overwrite=overwrite)
    assert target.read_text() == text
    with pytest.raises(UsageError, match="another file for the answers"):
        pipe.batch(source, source)
    with pytest.raises(UsageError, match=r"^-: expected a file"):
        pipe.batch(source, "-")
    assert json.loads(source.read_text()) == line("b")


def test_a_torn_last_line_is_cut_wherever_it_is_torn(pipe: Any, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [line("a"), line("b")]), tmp_path / "out.jsonl"
    pipe.batch(source, target)
    first, second = target.read_bytes().splitlines(keepends=True)
    for kept in (1, 5, 16, 17, 30, 60, 150, len(second) - 1):
        target.write_bytes(first + second[:kept])
        assert pipe.batch(source, target).earlier == 1
        assert names(target) == ["a", "b"]


def test_a_line_that_is_too_much_is_stepped_over(pipe: Any, tmp_path: Path) -> None:
    from toolkit.serve.http.limits import Limits

    lines = [line("a"), line("long", prompt="x" * 40_000), json.dumps([0] * 9000), line("b")]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    tally = pipe.batch(source, target, limits=Limits(max_body_bytes=30_000, max_values=5000))
    assert (tally.completed, tally.failed) == (2, 2)
    told = {row["error"]["message"] for row in read(target) if row["error"]}
    assert any("--max-body-bytes" in text and "line 2" in text for text in told)
    assert any("--max-values" in text and "line 3" in text for text in told)


def test_the_input_is_read_as_it_is_needed(pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many lines there are, few are in memory."""
    from toolkit.serve.openai.batches.lines import JsonLines

    ahead, most, target = 0, 0, tmp_path / "out.jsonl"
    request = JsonLines.request

    def counted(self: Any, given: Any) -> Any:
        nonlocal ahead, most
        ahead += 1
        most = max(most, ahead - target.read_bytes().count(b"\n"))
        return request(self, given)

    monkeypatch.setattr(JsonLines, "request", counted)
    monkeypatch.setattr("toolkit.batch.run.AHEAD", 0)
    monkeypatch.setattr("toolkit.batch.run.FEW", 3)
    source = write(tmp_path / "in.jsonl", [line(f"r{i}", prompt="a", max_tokens=1) for i in range(60)])
    assert pipe.batch(source, target).completed == 60
    assert ahead == 60 and most <= 4


# Rows -----------------------------------------------------------------------------------------------------------------

ROWS = [{"text": "007", "note": "a, b"}, {"text": 'say "hi"\nnow', "note": ""}, {"text": "NA", "note": "ü"}]


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, Path]:
    """The same rows in every form."""
    import csv

    import pyarrow
    from pyarrow import parquet

    found = {kind: tmp_path / f"in.{kind}" for kind in ("csv", "tsv", "parquet", "jsonl")}
    for kind, sign in (("csv", ","), ("tsv", "\t")):
        with found[kind].open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["text", "note"], delimiter=sign)
            writer.writeheader()
            writer.writerows(ROWS)
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), found["parquet"])
    write(found["jsonl"], ROWS)
    return found


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "jsonl", "list", "data set"])
def test_rows_of_any_form_are_one_prompt(pipe: Any, tables: dict[str, Path], tmp_path: Path, kind: str) -> None:
    import datasets

    given: Any = {"list": ROWS, "data set": datasets.Dataset.from_list(ROWS)}.get(kind) or tables[kind]
    target = tmp_path / "out.jsonl"
    prompt = "{{x}} {text}|{note}"
    tally = pipe.batch(given, target, prompt=prompt, endpoint="/v1/completions", max_tokens=2, echo=True)
    assert (tally.completed, tally.failed) == (3, 0)
    found = {row["custom_id"]: row["response"]["body"]["choices"][0]["text"] for row in read(target)}
    want = {f"row-{i}": f"{{x}} {row['text']}|{row['note']}" for i, row in enumerate(ROWS, 1)}
    plain = {name: pipe.tokenizer.decode(pipe.tokenizer.encode(text), True) for name, text in want.items()}
    assert found.keys() == plain.keys() and all(found[name].startswith(plain[name]) for name in plain)
    assert pipe.batch(given, target, prompt=prompt, endpoint="/v1/completions", max_tokens=2, echo=True).earlier == 3
    with pytest.raises(UsageError, match="an option"):
        pipe.batch(given, target, prompt=prompt + "!", endpoint="/v1/completions", max_tokens=2, echo=True)


@pytest.mark.parametrize("name", ["rows[1].csv", "rows.csv"])
def test_rows_that_end_with_a_separator_keep_their_columns(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text("text,note\nhello,a,\nthere,b,\n")
    assert list(Table(file, "csv")) == [{"text": "hello", "note": "a"}, {"text": "there", "note": "b"}]
    file.write_text("text,note\n1,hello,a\n")
    with pytest.raises(UsageError, match="names 2 columns, its first row has 3"):
        Table(file, "csv")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_the_name_of_a_table_is_no_pattern(tables: dict[str, Path], kind: str) -> None:
    odd = tables[kind].rename(tables[kind].with_name(f"in [1]?*.{kind}"))
    assert [row["text"] for row in Table(odd, kind)] == [row["text"] for row in ROWS]


def test_rows_by_name_and_those_that_lack_something(pipe: Any, tmp_path: Path) -> None:
    rows = [
        {"id": 5, "text": "a"},
        {"id": 6, "text": None},
        {"id": 5, "text": "b"},
        {"text": "c"},
        {"id": 7, "text": [1]},
    ]
    target = tmp_path / "out.jsonl"
    tally = pipe.batch(rows, target, prompt="{text}", system="Brief.", id_column="id", max_tokens=1)
    assert (tally.completed, tally.failed) == (2, 3)
    codes = {(row["custom_id"], (row["error"] or {}).get("code")) for row in read(target)}
    assert codes == {
        ("5", None),
        ("7", None),
        ("6", "missing_value"),
        ("5", "duplicate_custom_id"),
        (None, "missing_value"),
    }


def test_a_schema_holds_every_answer(pipe: Any, tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    for given in (schema, json.dumps(schema), str(file)):
        for endpoint in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
            target = tmp_path / "out.jsonl"
            pipe.batch([{"a": "x"}], target, prompt="{a}", endpoint=endpoint, json_schema=given, overwrite=True)
            body = read(target)[0]["response"]["body"]
            text = body["output"][-1]["content"][0]["text"] if "output" in body else body["choices"][0]
            text = text if isinstance(text, str) else text.get("text") or text["message"]["content"]
            assert json.loads(text)["n"] in (1, 2)
    own = {"type": "choice", "choice": ["yes"]}
    lines = [line("own", "/v1/chat/completions", messages="a", response_format=own)]
    pipe.batch(lines, target, json_schema=schema, overwrite=True)  # what a request says goes first
    assert read(target)[0]["response"]["body"]["choices"][0]["message"]["content"] == "yes"


def test_defaults_fill_what_is_left_open(pipe: Any, tmp_path: Path) -> None:
    lines = [
        line("open", prompt="a"),
        line("own", prompt="a", max_tokens=2),
        line("talk", "/v1/chat/completions", messages="a"),
        line("newer", "/v1/chat/completions", messages="a", max_completion_tokens=2),
        line("response", "/v1/responses", input="a"),
        line("vector", "/v1/embeddings", input="a"),
    ]
    target = tmp_path / "out.jsonl"
    assert pipe.batch(lines, target, max_tokens=3, ignore_eos=True).completed == 6
    used = {row["custom_id"]: row["response"]["body"]["usage"] for row in read(target)}
    spent = {name: told.get("completion_tokens", told.get("output_tokens")) for name, told in used.items()}
    assert spent.pop("response") <= 3
    assert spent == {"open": 3, "own": 2, "talk": 3, "newer": 2, "vector": None}


def test_a_request_s_own_length_holds_by_either_name() -> None:
    for own in ("max_tokens", "max_completion_tokens"):
        for given in ("max_tokens", "max_completion_tokens"):
            for filling in (Filling(defaults={given: 9}), Filling(extra_body={given: 9})):
                body = Filler(filling).body(Asked("a", "/v1/chat/completions", {"messages": "a", own: 2}), "tiny")
                assert body == {"messages": "a", own: 2, "model": "tiny"}


REFUSED = {
    "no column": (["{missing}"], "there are text, note"),
    "a format": (["{text:>9}"], "names of columns in braces"),
    "an attribute": (["{text.__class__}"], "is no column"),
    "an open brace": (["{text"], "names of columns in braces"),
    "another endpoint": (["{text}", "--endpoint", "/v1/score"], "endpoint: expected"),
    "a system text nowhere": (["{text}", "--endpoint", "/v1/embeddings", "--system", "a"], "no place for it"),
    "an unknown id column": (["{text}", "--id-column", "id"], "--id-column: expected one of text, note"),
    "an unknown field": (["{text}", "--extra-body", '{"temprature": 1}'], "temprature: no request has such a field"),
    "no schema": (["{text}", "--json-schema", "nosuch.json"], "neither a JSON object nor a file"),
    "a schema that no grammar holds": (["{text}", "--json-schema", '{"not": {}}'], "json_schema"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_misuse_is_told_before_the_model_loads(tool: Any, tables: dict[str, Path], tmp_path: Path, name: str) -> None:
    more, told = REFUSED[name]
    done = tool(tables["csv"], tmp_path / "out.jsonl", "--model", "/no/such", "--prompt", *more)
    assert done.returncode == 2 and told.removeprefix("--") in done.stderr.replace("--", ""), done.stderr
    assert done.stderr.count("\n") == 1


def test_misuse_of_files_is_told(tool: Any, tables: dict[str, Path], tmp_path: Path) -> None:
    for source, target, told in (
        (tmp_path / "nosuch.jsonl", tmp_path / "out.jsonl", "no such file; expected a file of requests"),
        (tmp_path, tmp_path / "out.jsonl", "not a file; expected a file of requests"),
        (tables["jsonl"], tmp_path, "expected a file for the answers"),
        (tables["jsonl"], tmp_path / "no" / "out.jsonl", "cannot be written"),
        (tables["csv"], tmp_path / "out.jsonl", "needed for"),
        (tables["jsonl"], tmp_path / "out.csv", "ends in .jsonl or .parquet, found .csv"),
    ):
        done = tool(source, target, "--model", "/no/such")
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert told in done.stderr
    ragged = tmp_path / "ragged.csv"
    ragged.write_text("a,b\n1,2\n1,2,3,4\n")
    for text, told in (
        (ragged.read_text(), "cannot be read as csv"),
        ("a,a\n1,2\n", "names each column once"),
        ("", "names each"),
    ):
        ragged.write_text(text)
        done = tool(ragged, tmp_path / "new.jsonl", "--model", "/no/such", "--prompt", "{a}")
        assert done.returncode == 2 and told in done.stderr, done.stderr
    (tmp_path / "bad.parquet").write_text("no table")
    done = tool(tmp_path / "bad.parquet", tmp_path / "new.jsonl", "--model", "/no/such", "--prompt", "{a}")
    assert done.returncode == 2 and "cannot be read as parquet" in done.stderr


def test_it_works_where_a_loop_runs_already(pipe: Any, tmp_path: Path) -> None:
    import asyncio

    async def notebook() -> Any:
        return pipe.batch([line("a")], tmp_path / "out.jsonl")

    assert asyncio.run(notebook()).completed == 1
    assert pipe([line("a")["body"]["prompt"]])[0].text is not None


def test_an_input_that_can_be_read_but_once_is_refused(pipe: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a list or data set of dicts"):
        pipe.batch(iter([line("a")]), tmp_path / "out.jsonl")


def test_the_pipeline_s_name_for_sampling_is_answered_with_the_requests(pipe: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gen_config: no request has such a field; .* max_tokens"):
        pipe.batch([line("a")], tmp_path / "out.jsonl", gen_config=None)


def test_answers_as_a_table(model: Path, tool: Any, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [line("a"), "{torn", line("talk", "/v1/chat/completions", messages="Hi", max_tokens=2), line("z", mystery=1)]
    rows.append(line("told", "/v1/responses", input="Hi", max_output_tokens=2))
    source, target = write(tmp_path / "in.jsonl", rows), tmp_path / "out.parquet"
    done = tool(source, target, "--model", model, *ENGINE)
    assert done.returncode == 0, done.stderr
    found = parquet.read_table(target).to_pylist()
    kept = {row["custom_id"]: row for row in read(tmp_path / "out.parquet.jsonl")}
    assert [row["custom_id"] for row in found] == ["a", None, "talk", "z", "told"]
    assert [row["status_code"] for row in found] == [200, None, 200, 400, 200]
    assert found[0]["text"] == kept["a"]["response"]["body"]["choices"][0]["text"]
    assert found[2]["text"] == kept["talk"]["response"]["body"]["choices"][0]["message"]["content"]
    assert found[4]["text"] == kept["told"]["response"]["body"]["output"][-1]["content"][0]["text"]
    assert json.loads(found[1]["error"])["code"] == "invalid_json" and found[3]["text"] is None
    assert json.loads(found[0]["response"]) == kept["a"]["response"]["body"]
    target.unlink()
    assert tool(source, target, "--model", model, *ENGINE).returncode == 0  # nothing is asked again
    assert parquet.read_table(target).to_pylist() == found
