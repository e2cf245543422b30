"""Bad words against a search through the whole vocabulary, and what many of them cost."""

from __future__ import annotations

import itertools
import queue
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.box.box import Ticket
from toolkit.engine.constraints import bad_words
from toolkit.engine.constraints.bad_words import BadWords, BadWordState
from toolkit.engine.constraints.request import THREADS, Constraints
from toolkit.engine.request import SamplingParams
from toolkit.errors import BusyError

AB = st.binary(max_size=6).map(lambda b: bytes(97 + x % 3 for x in b))
VOCABULARY = [b"", *(bytes(t) for n in (1, 2, 3) for t in itertools.product(b"abc", repeat=n)), b"abcabc", b"\xff\xff"]


def naive(vocabulary: list[bytes], words: list[bytes], text: bytes) -> set[int]:
    """Ids whose bytes contain a word, or that complete one that ``text`` has begun."""
    found = set()
    for i, token in enumerate(vocabulary):
        for word in words:
            begun = any(text.endswith(word[:k]) and token.startswith(word[k:]) for k in range(1, len(word)))
            if word in token or begun:
                found.add(i)
    return found


@settings(max_examples=200, deadline=None)
@given(st.lists(AB.filter(bool), min_size=1, max_size=6), st.lists(st.integers(0, len(VOCABULARY) - 2), max_size=12))
def test_equals_a_search_through_the_vocabulary(words: list[bytes], tokens: list[int]) -> None:
    state = BadWordState(BadWords(VOCABULARY).list_of([w.decode() for w in words]))
    text = b""
    for token in [*tokens, 0]:
        banned = state.banned().tolist()
        assert len(set(banned)) == len(banned)
        assert set(banned) == naive(VOCABULARY, words, text)
        state.add(token)
        text += VOCABULARY[token]


def test_a_tokenizer_is_opened_once_and_not_before_it_is_needed() -> None:
    """It takes longer than all else of a start."""
    opened = []

    def open_tokenizer() -> Any:
        opened.append(1)
        return SimpleNamespace(token_bytes=VOCABULARY, special_ids=frozenset(), eos_ids=())

    constraints = Constraints(open_tokenizer, len(VOCABULARY))
    assert constraints.find(SamplingParams(1)) is not None and not opened
    assert constraints.build(SamplingParams(1, bad_words=["ab"]), Ticket()).words is not None
    constraints.prepare()
    assert len(opened) == 1


def test_one_grammar_beside_many_lists_of_words_takes_one_thread() -> None:
    """The others would wait for it, and what else has to be built for them."""
    constraints, go_on = Constraints(None, len(VOCABULARY)), threading.Event()
    begun: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def build(params: SamplingParams, ticket: Ticket) -> Any:
        begun.put(params.grammar)
        assert params.grammar == other or go_on.wait(60)

    constraints.build = build  # type: ignore[method-assign]
    same, other = ({"type": "choice", "choice": [c]} for c in "ab")
    many = [constraints.begin(SamplingParams(1, bad_words=[str(i)], grammar=same)) for i in range(2 * THREADS)]
    constraints.begin(SamplingParams(1, grammar=other)).wait(60)
    assert [begun.get(timeout=60), begun.get(timeout=60)].count(other) == 1 and begun.empty()
    go_on.set()
    for building in many:
        constraints.proceed()
        building.wait(60)
        assert building.done
    assert begun.qsize() == 2 * THREADS - 1


def test_threads_that_build_go_round_by_user() -> None:
    """However many lists of one user wait, another's is built."""
    constraints, go_on = Constraints(None, len(VOCABULARY)), threading.Event()
    begun: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def build(params: SamplingParams, ticket: Ticket) -> Any:
        begun.put(params.bad_words[0])
        assert params.bad_words == ["modest"] or go_on.wait(60)

    constraints.build = build  # type: ignore[method-assign]
    many = [constraints.begin(SamplingParams(1, bad_words=[str(i)]), "greedy") for i in range(3 * THREADS)]
    modest = constraints.begin(SamplingParams(1, bad_words=["modest"]), "modest")
    modest.wait(60)
    assert modest.done and not any(building.done for building in many)
    go_on.set()
    for building in many:
        while not building.started:
            constraints.proceed()
        building.wait(60)
    assert begun.qsize() == 3 * THREADS + 1


def test_where_the_system_has_no_thread_the_requests_end_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    constraints = Constraints(None, len(VOCABULARY))
    for _ in range(2):  # the second one finds nothing left of the first
        building = constraints.begin(SamplingParams(1, bad_words=["a"]))
        assert building.done
        with pytest.raises(BusyError, match="no thread"):
            building.result()


def test_hashes_that_meet_ban_nothing_too_much() -> None:
    """The words of Thue and Morse: any polynomial of an odd base gives both the same value modulo 2**64."""
    word, other = b"a", b"b"
    for _ in range(11):
        word, other = word + other, other + word
    vocabulary = [*VOCABULARY, other, b"c" + other, b"c" + word]
    state = BadWordState(BadWords(vocabulary).list_of([word.decode()]))
    banned = state.banned().tolist()
    assert set(banned) == naive(vocabulary, [word], b"") == {len(vocabulary) - 1}


def test_one_list_is_looked_up_once_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[Any] = []
    search = BadWords.containing
    monkeypatch.setattr(BadWords, "containing", lambda self, words: searches.append(words) or search(self, words))
    vocabulary = BadWords(VOCABULARY)
    for _ in range(5):
        assert len(BadWordState(vocabulary.list_of(["ab", "ca"])).banned())
    assert len(searches) == 1 and vocabulary.find(["ca", "ab"])
    for i in range(3 * bad_words.LISTS):
        vocabulary.list_of([f"x{i}"])
    assert len(vocabulary._lists) == bad_words.LISTS and not vocabulary.find(["ab", "ca"])


def test_thousands_of_words_take_as_many_passes_as_they_have_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    isin = np.isin
    monkeypatch.setattr(np, "isin", lambda *a: passes.append(1) or isin(*a))
    BadWords(VOCABULARY).list_of([f"{'abc'[i % 3]}{i:03d}" for i in range(4000)])
    assert len(passes) <= 2


def test_a_step_looks_at_what_is_begun_alone_and_once_for_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    words = BadWords(VOCABULARY).list_of(["abcab", "x" * 200])
    choices = [BadWordState(words) for _ in range(64)]
    looks: list[Any] = []
    find = bad_words.bisect_left
    monkeypatch.setattr(bad_words, "bisect_left", lambda *args: looks.append(1) or find(*args))
    for token in b"abc" * 20:
        for choice in choices:
            choice.add(VOCABULARY.index(bytes([token])))
            choice.banned()
    assert len(looks) < 8 * 60 * 64


def test_what_is_kept_of_beginnings_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_words, "KEPT_IDS", 1000)
    state = BadWordState(BadWords(VOCABULARY).list_of(["abc" * 80]))
    for _ in range(100):
        for token in b"abc":
            state.add(VOCABULARY.index(bytes([token])))
            state.banned()
            kept = state._words._completing
            assert 0 < len(kept) <= 8 and state._words._kept == sum(len(v) + bad_words._ENTRY for v in kept.values())
