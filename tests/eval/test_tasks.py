"""The packaged tasks: items that can be solved, judges that tell right from wrong, and lm-eval's copy of both."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from toolkit.commands.main import main
from toolkit.eval.tasks import TASKS, Answer, Choice, Model, first_object, run_task, write_lm_eval

RIGHT = {
    "passkey": lambda expected: f"It is {expected}.",
    "json_schema": lambda expected: (
        "```json\n" + json.dumps({k: {"string": "x", "integer": 3, "boolean": True}[v] for k, v in expected.items()})
    ),
    "tool_calls": lambda expected: f"Call: {json.dumps(expected)} and that is all {{",
}


def knowing(name: str, good: bool) -> Model:
    """A model that has the answers (or always another), whatever it is asked."""
    items = [TASKS[name].item(i) for i in range(30)]
    known = {item.prompt: item.expected for item in items if isinstance(item, Answer)}
    endings = {f"{i.context} {i.options[i.gold]}" for i in items if isinstance(i, Choice)}
    seen: list[str] = []

    def encode(text: str) -> list[int]:
        seen.append(text)
        return list(range(len(text)))

    def score(ids: list[int]) -> list[float]:
        likely = (seen[-1] in endings) == good
        return [-1.0] * (len(ids) - 1) if likely else [-9.0] * (len(ids) - 1)

    def answer(prompts: list[str], max_tokens: int) -> list[str]:
        return [RIGHT[name](known[p]) if good else "I do not know {" for p in prompts]

    return Model(encode, score, answer)


@pytest.mark.parametrize("name", TASKS)
def test_who_knows_gets_all_and_who_does_not_gets_none(name: str) -> None:
    counts: list[int] = []
    found = run_task(name, knowing(name, True), 30, counts.append)
    assert found == {"task": name, "items": 30, "accuracy": 1.0, "stderr": 0.0} and counts == list(range(1, 31))
    if name != "cloze":
        assert run_task(name, knowing(name, False), 30)["accuracy"] == 0


@pytest.mark.parametrize("name", TASKS)
def test_items_are_the_same_each_time_and_differ(name: str) -> None:
    items = [TASKS[name].item(i) for i in range(40)]
    assert items == [TASKS[name].item(i) for i in range(40)]
    assert len({str(item) for item in items}) > 30


def test_choices_stand_in_the_book() -> None:
    text = " ".join(Path("toolkit/measure/heldout.txt").read_text(encoding="utf-8").split())
    for number in range(40):
        item = TASKS["cloze"].item(number)
        assert isinstance(item, Choice)
        assert f"{item.context} {item.options[item.gold]}" in text and len(set(item.options)) == 4


def test_answers_are_in_what_is_asked() -> None:
    for number in range(40):
        key, call = TASKS["passkey"].item(number), TASKS["tool_calls"].item(number)
        assert isinstance(key, Answer) and isinstance(call, Answer)
        assert key.prompt.count(key.expected) == 2
        said = call.prompt.rpartition("Wish:")[2]
        assert all(str(value) in said for value in call.expected["arguments"].values())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("passkey", "no number"),
        ("passkey", "12 and then"),
        ("json_schema", "[]"),
        ("json_schema", "{}"),
        ("json_schema", '{"age": "40", "name": 3}'),
        ("tool_calls", '{"name": "get_weather"}'),
        ("tool_calls", "{" * 5000),
    ],
)
def test_wrong_answers_are_no_errors(name: str, text: str) -> None:
    task = TASKS[name]
    item = task.item(0)
    assert task.judge is not None and isinstance(item, Answer) and not task.judge(text, item.expected)


@given(st.text(max_size=40), st.dictionaries(st.text(max_size=5), st.integers() | st.booleans(), max_size=3))
def test_the_first_object_of_a_text_is_found(before: str, value: dict[str, Any]) -> None:
    assert first_object(before.replace("{", "") + json.dumps(value) + "}{") == value


def test_lm_eval_gets_the_same_items_and_judges(tmp_path: Path) -> None:
    write_lm_eval(tmp_path, list(TASKS), 12)
    for name, task in TASKS.items():
        head = (tmp_path / f"toolkit_{name}.yaml").read_text(encoding="utf-8").replace("!function ", "")
        settings = yaml.safe_load(head)
        (data,) = settings["dataset_kwargs"]["data_files"].values()
        rows = [json.loads(line) for line in Path(data).read_text(encoding="utf-8").splitlines()]
        items = [task.item(i) for i in range(12)]
        assert [row.get("prompt", row.get("context")) for row in rows] == [
            item.prompt if isinstance(item, Answer) else item.context for item in items
        ]
        if task.judge is None:
            continue
        sys.path.insert(0, str(tmp_path))
        try:
            module = __import__("toolkit_tasks")
        finally:
            sys.path.remove(str(tmp_path))
            sys.modules.pop("toolkit_tasks", None)
        judge = getattr(module, settings["process_results"].partition(".")[2])
        assert judge(rows[0], [RIGHT[name](json.loads(rows[0]["expected"]))]) == {"acc": 1.0}
        assert judge(rows[0], ["nothing"]) == {"acc": 0.0}


def test_command(tiny_models: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--limit", "2", "--task", "cloze", "--task", "tool_calls", "--json", str(tmp_path / "found.json")]
    with pytest.raises(SystemExit) as ended:
        main(["eval", "tasks", str(tiny_models("llama")), *flags])
    assert not ended.value.code
    rows = json.loads((tmp_path / "found.json").read_text())
    assert [row["task"] for row in rows] == ["cloze", "tool_calls"] and all(row["items"] == 2 for row in rows)
    with pytest.raises(SystemExit) as ended:
        main(["eval", "tasks", "demo", "--task", "chess"])
    assert ended.value.code == 2 and "--task chess: expected one of cloze" in capsys.readouterr().err
