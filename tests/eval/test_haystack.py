"""Pass keys and needles: what is hidden stands where it is said to, texts are as long as asked, scores tell."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.commands.main import main
from toolkit.errors import UsageError
from toolkit.eval.haystack import (
    ANSWER,
    NEAR,
    QUIZ,
    TASK,
    Asked,
    Grid,
    likeness,
    needle,
    passkey,
    score,
    search,
)
from toolkit.eval.tasks import GARBAGE
from toolkit.measure.text import heldout_text

TEMPLATE = 7  # words that the stand-in's template adds


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


@settings(deadline=None, max_examples=30)
@given(st.integers(150, 1500), st.sampled_from((0, 25, 50, 100)), st.integers(0, 5))
def test_a_key_stands_at_its_depth_in_the_script_s_words(room: int, depth: int, seed: int) -> None:
    asked = passkey(words, room, depth, Random(seed))
    assert asked.prompt.startswith(TASK) and asked.prompt.endswith(QUIZ)
    before, _, behind = asked.prompt.partition(asked.hidden)
    counts = before.count(GARBAGE), behind.count(GARBAGE)
    assert counts[0] == round(sum(counts) * depth / 100)
    assert room - len(GARBAGE.split()) < len(words(asked.prompt)) <= room
    assert 1 <= int(asked.keyword) < 50_000 and asked.prompt.count(asked.keyword) == 2


@settings(deadline=None, max_examples=20)
@given(st.integers(150, 3000), st.sampled_from((0, 10, 50, 100)), st.integers(0, 5))
def test_a_needle_stands_at_its_depth_between_sentences(room: int, depth: int, seed: int) -> None:
    asked = needle(words, heldout_text(), room, depth, Random(seed))
    before, _, behind = (
        asked.prompt.partition("document:\n")[2].rpartition("\n\nThe question")[0].partition(asked.hidden)
    )
    assert room - 2 < len(words(asked.prompt)) <= room
    counts = [len(words(part)) for part in (before, behind)]
    assert abs(counts[0] / sum(counts) - depth / 100) <= NEAR + 0.01
    if room > 2000:
        assert not before or before.rstrip()[-1] in ".!?"
    assert asked.prompt.count(asked.keyword) == 1 and asked.keyword in asked.hidden


def test_a_text_that_is_too_short_is_repeated() -> None:
    asked = needle(words, "A first sentence. A second one!", 500, 50, Random(0))
    assert len(words(asked.prompt)) > 480 and asked.prompt.count("A second one!") > 50


def test_a_text_of_few_or_long_sentences_fills_the_room_too() -> None:
    """As tables do: the needle stands at its depth nevertheless."""
    text = " ".join(f"| {i} | {i * i}" for i in range(700))
    for depth in (0, 30, 100):
        asked = needle(words, text, 600, depth, Random(2))
        before = asked.prompt.partition(asked.hidden)[0]
        assert 598 < len(words(asked.prompt)) <= 600
        assert len(before.split()) / len(asked.prompt.split()) == pytest.approx(depth / 100, abs=0.06)


def standing(knows: Any) -> Asked:
    def answer(prompts: list[str], most: int) -> list[tuple[str, int]]:
        return [(knows(prompt), len(words(prompt)) + TEMPLATE) for prompt in prompts]

    return Asked(words, answer)


def test_who_sees_half_of_the_text_finds_what_is_in_it() -> None:
    """The grid has a row a length and depth; a model that has forgotten the first half finds nothing there."""

    def second_half(prompt: str) -> str:
        found = re.findall(r"pass key is (\d+)", prompt[len(prompt) // 2 :])
        return f"It is {found[0]}." if found else "12345678"

    grid = Grid((300, 900), (0, 40, 60, 100), rounds=3)
    rows = list(search("passkey", standing(second_half), grid))
    assert [(row["length"], row["depth"]) for row in rows] == grid.cells
    assert [row["score"] for row in rows] == [0, 0, 100, 100] * 2
    assert [row["found"] for row in rows] == [0, 0, 3, 3] * 2
    for row in rows:
        assert row["length"] - 30 < row["tokens"] + ANSWER["passkey"] <= row["length"]
    again = list(search("passkey", standing(second_half), grid))
    assert [row | {"seconds": 0} for row in again] == [row | {"seconds": 0} for row in rows]


def test_needles_are_scored_as_needlebench_does() -> None:
    asked = needle(words, heldout_text(), 400, 50, Random(1))
    assert score("needle", f"In {asked.keyword}, I think.", asked) == 100
    assert score("needle", asked.hidden.replace(asked.keyword, ""), asked) == pytest.approx(20 * likeness(
        asked.hidden.replace(asked.keyword, ""), asked.hidden
    ))  # fmt: skip
    assert score("needle", "", asked) == 0
    assert likeness("kitten", "sitting") == pytest.approx(1 - 3 / 7) and likeness("a b", "ab") == 1


@pytest.mark.parametrize(
    ("lengths", "depths", "words"),
    [((0,), (0,), "--lengths"), ((10,), (101,), "--depths"), ((10,), (float("nan"),), "--depths")],
)
def test_a_grid_that_cannot_be(lengths: Any, depths: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Grid(lengths, depths)
    with pytest.raises(UsageError, match="--lengths 40: expected"):
        next(search("passkey", standing(str), Grid((40,), (0,))))


def test_the_commands(tiny_models: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny_models("llama", max_position_embeddings=512))
    (tmp_path / "book.txt").write_text("The harbour was quiet. Nobody asked where the boats had gone. " * 20)
    for kind, more in (("passkey", []), ("needle", ["--data", str(tmp_path / "book.txt")])):
        files = ["--json", str(tmp_path / f"{kind}.json"), "--plot", str(tmp_path / f"{kind}.png")]
        with pytest.raises(SystemExit) as ended:
            main(["eval", kind, model, "--lengths", "400,500", "--depths", "0,100", *files, *more])
        assert not ended.value.code, capsys.readouterr().err
        rows = json.loads((tmp_path / f"{kind}.json").read_text())
        assert [(row["length"], row["depth"]) for row in rows] == [(400, 0), (400, 100), (500, 0), (500, 100)]
        assert all(row["tokens"] <= row["length"] - ANSWER[kind] for row in rows)
        assert (tmp_path / f"{kind}.png").read_bytes()[:4] == b"\x89PNG"
        out = capsys.readouterr().out
        assert kind in out and "100 %" in out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--lengths", "1k"], "--lengths: expected whole numbers"),
        (["--lengths", "1000", "--session-len", "900"], "--session-len 900"),
        (["--rounds", "0"], "--rounds"),
        (["--depths", "-3"], "--depths"),
        (["--plot", "x.jpg"], "--plot"),
    ],
)
def test_options_that_cannot_be(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["eval", "passkey", "nosuch", *flags])
    err = capsys.readouterr().err
    assert ended.value.code == 2 and err.count("\n") == 1 and told in err
