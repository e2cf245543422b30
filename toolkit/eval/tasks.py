"""Four small tasks that come with the package and need no network: what a model loses when it is made small.

A task is a list of items. ``Choice``: the model says which of four endings it finds likeliest. ``Answer``: it writes
an answer, which is right or not. Items depend on nothing but their number, so two models get the same ones.
``write_lm_eval`` gives the same items to lm-evaluation-harness, and the numbers are the same.
"""

from __future__ import annotations

import glob
import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.measure.text import heldout_text

COUNT = 100  # items of a task where no limit is given
BATCH = 16  # answers asked for at once
GARBAGE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
PEOPLE = ("Maria", "Chen", "Amara", "Lukas", "Priya", "Omar", "Ingrid", "Diego", "Yuki", "Nadia")
CITIES = ("Lima", "Oslo", "Kyoto", "Cairo", "Quito", "Dublin", "Hanoi", "Accra", "Turin", "Bergen")
TRADES = ("baker", "pilot", "nurse", "carpenter", "judge", "farmer", "singer", "plumber", "teacher", "sailor")


@dataclass(frozen=True)
class Choice:
    """``gold``: which of ``options`` stands in the text after ``context`` and a blank."""

    context: str
    options: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class Answer:
    """What the user asks, and what the task's judge compares the answer with."""

    prompt: str
    expected: Any


Judge = Callable[[str, Any], bool]  # (the model's answer, Answer.expected) -> whether it is right


@dataclass(frozen=True)
class Task:
    """``item``: of a number. ``judge``: of answers, None where the model chooses. ``max_tokens``: of an answer."""

    about: str
    item: Callable[[int], Choice | Answer]
    judge: Judge | None = None
    max_tokens: int = 0


def cloze(number: int) -> Choice:
    """A sentence of the packaged book without its last word, and three other words of the same length or nearly."""
    words = heldout_text().split()
    draw = random.Random(f"cloze {number}")
    while True:
        end = draw.randrange(80, len(words))
        word = words[end].rstrip(".,;!?")
        if len(word) >= 5 and word.isalpha() and word.islower() and word != words[end]:
            break
    pool = sorted({w for w in words if w.isalpha() and w.islower() and abs(len(w) - len(word)) <= 1} - {word})
    options = [word, *draw.sample(pool, 3)]
    draw.shuffle(options)
    return Choice(" ".join(words[end - 64 : end]), tuple(options), options.index(word))


def passkey(number: int) -> Answer:
    """A number of five digits somewhere in 0.2 to 6 thousand characters that say nothing."""
    draw = random.Random(f"passkey {number}")
    key = str(draw.randrange(10_000, 100_000))
    lines = draw.choice((2, 8, 24, 64))
    before = draw.randrange(lines + 1)
    text = " ".join([*[GARBAGE] * before, hidden_key(key), *[GARBAGE] * (lines - before)])
    return Answer(f"{text} \n\nWhat is the pass key? Answer with the number alone.", key)


def hidden_key(key: str) -> str:
    """What is to be found again."""
    return f"The pass key is {key}. Remember it. {key} is the pass key."


def _person(draw: random.Random) -> dict[str, Any]:
    return {
        "name": draw.choice(PEOPLE),
        "age": draw.randrange(20, 80),
        "city": draw.choice(CITIES),
        "trade": draw.choice(TRADES),
        "married": draw.random() < 0.5,
    }


def _sentence(who: dict[str, Any]) -> str:
    state = "married" if who["married"] else "not married"
    return f"{who['name']} is {who['age']} years old, lives in {who['city']}, works as a {who['trade']} and is {state}."


def json_schema(number: int) -> Answer:
    """One sentence about a person and the keys that an object taken from it has; an example of both before."""
    draw = random.Random(f"json {number}")
    before, who = _person(draw), _person(draw)
    keys = sorted(draw.sample(sorted(who), draw.randrange(2, len(who) + 1)))
    kinds = {str: "string", int: "integer", bool: "boolean"}
    schema = {
        "type": "object",
        "properties": {key: {"type": kinds[type(who[key])]} for key in keys},
        "required": keys,
        "additionalProperties": False,
    }
    example = json.dumps({key: before[key] for key in keys})
    prompt = (
        f"Write what a sentence says as one JSON object of this schema, and nothing else:\n{json.dumps(schema)}\n\n"
        f"Sentence: {_sentence(before)}\nObject: {example}\n\nSentence: {_sentence(who)}\nObject:"
    )
    return Answer(prompt, {key: kinds[type(who[key])] for key in keys})


TOOLS: dict[str, dict[str, str]] = {
    "get_weather": {"city": "string", "day": "string"},
    "set_alarm": {"hour": "integer", "minute": "integer"},
    "send_message": {"to": "string", "text": "string"},
}


def tool_calls(number: int) -> Answer:
    """A wish that one of three functions fulfils."""
    draw = random.Random(f"tools {number}")
    city, day = draw.choice(CITIES), draw.choice(("today", "tomorrow"))
    hour, minute, to = draw.randrange(5, 12), draw.choice((0, 15, 30, 45)), draw.choice(PEOPLE)
    wish, name, arguments = draw.choice(
        (
            (f"What will the weather be in {city} {day}?", "get_weather", {"city": city, "day": day}),
            (f"Wake me at {hour}:{minute:02d}.", "set_alarm", {"hour": hour, "minute": minute}),
            (f'Write to {to}: "I am late".', "send_message", {"to": to, "text": "I am late"}),
        )
    )
    prompt = (
        f"These are functions and the types of their arguments:\n{json.dumps(TOOLS)}\n\n"
        "Write the call that fulfils a wish as one JSON object, and nothing else.\n\n"
        'Wish: Wake me at 4:05.\nCall: {"name": "set_alarm", "arguments": {"hour": 4, "minute": 5}}\n\n'
        f"Wish: {wish}\nCall:"
    )
    return Answer(prompt, {"name": name, "arguments": arguments})


def first_object(text: str) -> Any:
    """The first JSON object in a text; None where there is none."""
    for start in (m.start() for m in re.finditer("{", text)):
        try:
            return json.JSONDecoder().raw_decode(text[start:])[0]
        except (ValueError, RecursionError):
            continue
    return None


def is_key(text: str, expected: Any) -> bool:
    """Whether the first number of an answer is the one that was hidden."""
    return re.findall(r"\d+", text)[:1] == [expected]


def _adheres(text: str, expected: Any) -> bool:
    """``expected``: the type of each key."""
    found = first_object(text)
    kinds: dict[Any, str] = {str: "string", int: "integer", bool: "boolean"}
    return isinstance(found, dict) and {k: kinds.get(type(v)) for k, v in found.items()} == expected


def _is_call(text: str, expected: Any) -> bool:
    return bool(first_object(text) == expected)


TASKS: dict[str, Task] = {
    "cloze": Task("the last word of a sentence from a book, out of four", cloze),
    "passkey": Task("a number found again in up to 6,000 characters", passkey, is_key, 16),
    "json_schema": Task("a JSON object that keeps to a schema", json_schema, _adheres, 128),
    "tool_calls": Task("the right function called with the right arguments", tool_calls, _is_call, 96),
}


@dataclass(frozen=True)
class Model:
    """What tasks ask of a model: token ids of a text, log p of every token of ids but the first, and answers to user
    messages, greedy, of at most so many tokens."""

    encode: Callable[[str], list[int]]
    score: Callable[[list[int]], Sequence[float]]
    answer: Callable[[list[str], int], list[str]]


def run_task(name: str, model: Model, count: int = COUNT, progress: Callable[[int], None] = lambda done: None) -> Any:
    """Share of ``count`` items that are right, with its standard error: {"task", "items", "accuracy", "stderr"}.

    ``progress`` is called with the number of items done.
    """
    task = TASKS[name]
    right = 0
    for done, good in enumerate(_outcomes(task, model, count), 1):
        right += good
        progress(done)
    share = right / count
    return {
        "task": name,
        "items": count,
        "accuracy": share,
        "stderr": math.sqrt(share * (1 - share) / max(count - 1, 1)),
    }


def _outcomes(task: Task, model: Model, count: int) -> Iterator[bool]:
    items = [task.item(i) for i in range(count)]
    if task.judge is None:
        yield from (_chosen(item, model) == item.gold for item in items if isinstance(item, Choice))
        return
    asked = [item for item in items if isinstance(item, Answer)]
    for start in range(0, len(asked), BATCH):
        part = asked[start : start + BATCH]
        answers = model.answer([item.prompt for item in part], task.max_tokens)
        yield from (task.judge(text, item.expected) for item, text in zip(part, answers, strict=True))


def _chosen(item: Choice, model: Model) -> int:
    """The option with the largest sum of log-probabilities."""
    before = len(model.encode(item.context))
    sums = []
    for option in item.options:
        ids = model.encode(f"{item.context} {option}")
        sums.append(sum(model.score(ids)[before - 1 :]))
    return sums.index(max(sums))


def write_lm_eval(folder: Path, names: Sequence[str], count: int = COUNT) -> None:
    """Put the tasks into ``folder`` as lm-evaluation-harness reads them (``--include_path``): ``toolkit_<name>.yaml``,
    and the items beside it as JSON lines.
    """
    for name in names:
        task = TASKS[name]
        lines = [json.dumps(_row(task.item(i)), ensure_ascii=False) for i in range(count)]
        data = folder / f"{name}.jsonl"
        data.write_text("\n".join(lines) + "\n", encoding="utf-8")
        settings: dict[str, Any] = {
            "task": f"toolkit_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": glob.escape(str(data.resolve()))}},
            "test_split": "test",
            "num_fewshot": 0,
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
        if task.judge is None:
            settings |= {"output_type": "multiple_choice", "doc_to_text": "{{context}}"}
            settings |= {"doc_to_choice": "{{options}}", "doc_to_target": "{{gold}}"}
            rules = ""
        else:
            settings |= {"output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": "{{expected}}"}
            settings["generation_kwargs"] = {"until": [], "max_gen_toks": task.max_tokens, "do_sample": False}
            rules = f"process_results: !function toolkit_tasks.{name}\n"
        # JSON is YAML, but for the one line that names a function
        (folder / f"toolkit_{name}.yaml").write_text(
            "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items()) + rules, encoding="utf-8"
        )
    (folder / "toolkit_tasks.py").write_text(JUDGES, encoding="utf-8")


def _row(item: Choice | Answer) -> dict[str, Any]:
    row = asdict(item)
    if isinstance(item, Answer):
        row["expected"] = json.dumps(item.expected)  # a column of a table has one type
    return row


JUDGES = '''"""How lm-eval judges answers to the tasks beside this file: as `tool eval tasks` does."""

import functools
import json

from toolkit.eval.tasks import TASKS


def _judge(name, doc, results):
    return {"acc": float(TASKS[name].judge(results[0], json.loads(doc["expected"])))}


passkey, json_schema, tool_calls = (functools.partial(_judge, n) for n in ("passkey", "json_schema", "tool_calls"))
'''
