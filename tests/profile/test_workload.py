from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.base.arrivals import poisson_starts
from toolkit.errors import UsageError
from toolkit.profile.drawings import drawings
from toolkit.profile.http_client import Client
from toolkit.profile.options import Prompts, Traffic
from toolkit.profile.serving import asks_of
from toolkit.profile.workload import dataset_asks, dataset_texts, random_asks, random_prompts


class Words:
    """One token a character."""

    vocab_size = 100
    special_ids = {0, 1, 50}  # noqa: RUF012

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) % 100 for c in text]


def test_random_prompts_are_fresh_and_plain() -> None:
    rng = np.random.default_rng(0)
    first, second = random_prompts(rng, Words(), 8, 64), random_prompts(rng, Words(), 8, 64)
    assert len({tuple(p[:16]) for p in first + second}) == 16
    flat = {t for p in first + second for t in p}
    assert flat <= set(range(100)) - Words.special_ids and len(flat) > 80
    assert all(isinstance(t, int) and len(p) == 64 for p in first for t in p)


def test_a_seed_gives_the_same_load() -> None:
    assert random_asks(3, Words(), 4, 10, 5) == random_asks(3, Words(), 4, 10, 5)
    assert random_asks(3, Words(), 4, 10, 5) != random_asks(4, Words(), 4, 10, 5)
    assert poisson_starts(3, 50, 2.0) == poisson_starts(3, 50, 2.0) != poisson_starts(4, 50, 2.0)


def test_poisson_arrivals() -> None:
    starts = poisson_starts(0, 20_000, 4.0)
    gaps = np.diff(starts)
    assert len(starts) == 20_000 and starts[0] == 0.0 and (gaps > 0).all()
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)  # an exponential's deviation is its mean
    assert poisson_starts(0, 3, float("inf")) == [0.0, 0.0, 0.0]


SHAREGPT = [
    {"conversations": [{"from": "human", "value": "question one"}, {"from": "gpt", "value": "answers"}]},
    {"conversations": [{"from": "human", "value": "alone"}]},
    {"conversations": []},
    {"nothing": 1},
]


def write(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_sharegpt(tmp_path: Path) -> None:
    asks = dataset_asks(write(tmp_path / "a.json", SHAREGPT), 0, Words(), 5, 1000, None)
    assert len(asks) == 5  # two usable entries, over again
    assert sorted({(len(a.token_ids), a.output_len) for a in asks}) == [(5, 128), (12, 7)]
    for length in (9, 1):  # 1: prompts alone are measured
        assert {a.output_len for a in dataset_asks(tmp_path / "a.json", 0, Words(), 2, 1000, length)} == {length}


def test_what_does_not_fit_is_left_out(tmp_path: Path) -> None:
    file = write(tmp_path / "a.json", SHAREGPT)
    assert {len(a.token_ids) for a in dataset_asks(file, 0, Words(), 4, 19, None)} == {12}
    with pytest.raises(UsageError, match="none has"):
        dataset_asks(file, 0, Words(), 4, 18, None)


def test_other_forms(tmp_path: Path) -> None:
    lines = [
        {"messages": [{"role": "user", "content": "hello you"}, {"role": "assistant", "content": "hello me"}]},
        {"prompt": "a prompt", "completion": "its end"},
        {"question": "a question?"},
        {"text": "some text here"},
        "bare string",
    ]
    file = write(tmp_path / "a.jsonl", "\n".join(json.dumps(line) for line in lines))
    got = {(len(a.token_ids), a.output_len) for a in dataset_asks(file, 0, Words(), 5, 1000, None)}
    assert got == {(9, 8), (8, 7), (11, 128), (14, 128), (11, 128)}
    text = write(tmp_path / "a.txt", "first prompt\nwith two lines\n\n\nsecond prompt")
    assert {len(a.token_ids) for a in dataset_asks(text, 0, Words(), 2, 1000, None)} == {27, 13}


@pytest.mark.parametrize("name", ["role", "from"])
def test_the_question_is_the_user_s_and_lines_end_where_json_lines_do(name: str, tmp_path: Path) -> None:
    turns = [("system", "You are kind."), ("user", "two\u2028lines\x85"), ("assistant", "an answer")]
    line = json.dumps({"messages": [{name: who, "content": text} for who, text in turns]}, ensure_ascii=False)
    file = write(tmp_path / "a.jsonl", f"\ufeff{line}\r\n\n{line}")
    assert dataset_texts(file, 0, Words(), 1, 9)[0][0] == "two\u2028lines\x85"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", "{", "not valid JSON"),
        ("a.json", {"a": 1}, "expected a JSON list"),
        ("a.json", [1, None, {}], "no prompts found"),
        ("a.jsonl", "{}\n{", "not valid JSON"),
        ("a.txt", "", "no prompts found"),
        ("a.csv", "a,b", "expected .json, .jsonl or .txt"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        dataset_asks(write(tmp_path / name, content), 0, Words(), 1, 100, None)
    assert name in str(error.value) and "\n" not in str(error.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        dataset_asks(tmp_path / "none.json", 0, Words(), 1, 100, None)
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UTF-8"):
        dataset_asks(tmp_path / "b.json", 0, Words(), 1, 100, None)


def test_drawings_are_those_of_their_seed() -> None:
    one, two = drawings(3, 2, (40, 30)), drawings(3, 2, (40, 30))
    assert [image.size for image in one] == [(40, 30)] * 2
    assert [image.tobytes() for image in one] == [image.tobytes() for image in two]
    assert one[0].tobytes() != one[1].tobytes() != drawings(4, 1, (40, 30))[0].tobytes()


@pytest.mark.parametrize("size", ["", "640", "0x30", "axb", "640x480x3"])
def test_sizes_that_are_none(size: str) -> None:
    with pytest.raises(UsageError, match="--image-size: expected width x height"):
        Prompts(dataset="image", image_size=size).check()


def test_requests_to_a_server_show_drawings() -> None:
    traffic = Traffic(dataset="image", num_prompts=3, images_per_request=2, image_size="20x10", random_input_len=4)
    asks = asks_of(traffic, 0)
    assert [len(ask.images) for ask in asks] == [2] * 3 and len({url for ask in asks for url in ask.images}) == 6
    content = Client("http://a", "m", "chat")._body(asks[0])["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "image_url", "text"]
    assert content[0]["image_url"]["url"].startswith("data:image/png;base64,")
