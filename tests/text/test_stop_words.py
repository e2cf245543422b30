"""Stop words against a naive search over the whole text."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.engine.text.stop_words import StopWords

AB = st.text(alphabet="ab\n", max_size=40)
WORDS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=6), max_size=4)


def naive(text: str, words: list[str], least: int = 0) -> tuple[int, str | None]:
    """(end, word) of the word that is complete first, behind ``least`` characters; the longest of those that end
    there."""
    for end in range(least + 1, len(text) + 1):
        ending = [w for w in words if text[:end].endswith(w)]
        if ending:
            return end, max(ending, key=len)
    return len(text), None


def run(text: str, words: list[str], cuts: list[int], include: bool) -> tuple[list[str], StopWords]:
    stop = StopWords(words, include)
    edges = [0, *sorted({c % (len(text) + 1) for c in cuts}), len(text)]
    shown = [stop.add(text[a:b])[0] for a, b in itertools.pairwise(edges)]
    return shown, stop


@settings(max_examples=500, deadline=None)
@given(text=AB, words=WORDS, cuts=st.lists(st.integers(0, 60)), include=st.booleans())
def test_equals_a_search_over_the_whole_text(text: str, words: list[str], cuts: list[int], include: bool) -> None:
    shown, stop = run(text, words, cuts, include)
    end, word = naive(text, words)
    assert stop.hit == word
    expected = text[:end] if include or word is None else text[: end - len(word)]
    assert "".join(shown) + stop.flush() == expected


@settings(max_examples=500, deadline=None)
@given(text=AB, words=WORDS, least=st.integers(0, 40), cuts=st.lists(st.integers(0, 60)))
def test_words_that_may_not_end_yet_are_passed_by(text: str, words: list[str], least: int, cuts: list[int]) -> None:
    """Those that begin before and are complete later are not."""
    stop, least = StopWords(words), min(least, len(text))
    edges = sorted({0, least, len(text), *(c % (len(text) + 1) for c in cuts)})
    shown = [stop.add(text[a:b], b > least)[0] for a, b in itertools.pairwise(edges)]
    end, word = naive(text, words, least)
    assert stop.hit == word
    assert "".join(shown) + stop.flush() == text[: end - len(word or "")]


@settings(max_examples=300, deadline=None)
@given(text=AB, words=WORDS)
def test_holds_back_exactly_the_longest_beginning_of_a_word(text: str, words: list[str]) -> None:
    stop = StopWords(words)
    shown = ""
    for i, char in enumerate(text, start=1):
        shown += stop.add(char)[0]
        if stop.hit is not None:
            return
        held = max((k for w in words for k in range(len(w)) if text[:i].endswith(w[:k])), default=0)
        assert len(shown) == i - held


def test_a_hit_is_reported_once_found_and_ends_the_text() -> None:
    stop = StopWords(["###"])
    assert stop.add("abc#") == ("abc", None)
    assert stop.add("#") == ("", None)
    assert stop.add("# more") == ("", "###")
    assert stop.add("later") == ("", "###")
    assert stop.flush() == ""


def test_include_shows_the_word_and_holds_nothing_back() -> None:
    stop = StopWords(["</s>"], include=True)
    assert stop.add("a</") == ("a</", None)
    assert stop.add("s>b") == ("s>", "</s>")


def test_without_words_everything_passes() -> None:
    stop = StopWords([])
    assert stop.add("anything") == ("anything", None)
    assert stop.flush() == ""


def test_a_long_word_costs_constant_work_a_character() -> None:
    """A word of 20 000 equal characters over a text that nearly matches it: quadratic work would not end in time."""
    word = "a" * 20_000 + "b"
    stop = StopWords([word])
    for _ in range(200):
        assert stop.add("a" * 200)[1] is None
    assert stop.add("b")[1] == word


def test_long_words_cost_nothing_before_the_text_comes_near_them() -> None:
    words = [chr(97 + i) * 100_000 for i in range(16)]
    choices = [StopWords(words) for _ in range(32)]
    for stop in choices:
        assert stop.add("aaab") == ("aaa", None)
    tables = [len(w._borders) for stop in choices for w in stop._words]
    assert sum(tables) <= len(choices) * (len(words) + 3)
