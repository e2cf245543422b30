"""Streaming detokenizing equals decoding at once, wherever the stream is cut."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.engine.text.detokenizer import Detokenizer

CHARS = st.text(alphabet="aexTq .,\n'▁éü你好🙂👍🏽\u200d", max_size=30)
PROPERTY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
EXACT = ["byte_level", "sentencepiece", "metaspace"]


@pytest.fixture(scope="module", params=EXACT)
def tok(request: pytest.FixtureRequest, tokenizer_dirs: dict[str, Path]) -> Tokenizer:
    return Tokenizer.open(tokenizer_dirs[request.param])


def stream(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    edges = [0, *sorted({c % (len(ids) + 1) for c in cuts}), len(ids)]
    return [detokenizer.add(ids[a:b]) for a, b in itertools.pairwise(edges)] + [detokenizer.flush()]


@PROPERTY
@given(text=CHARS, cuts=st.lists(st.integers(0, 200)), skip=st.booleans())
def test_any_split_of_a_text(tok: Tokenizer, text: str, cuts: list[int], skip: bool) -> None:
    ids = tok.encode(text)
    assert "".join(stream(Detokenizer(tok, skip), ids, cuts)) == tok.decode(ids, skip)


@PROPERTY
@given(data=st.data(), cuts=st.lists(st.integers(0, 200)), skip=st.booleans())
def test_any_ids_at_all(tok: Tokenizer, data: st.DataObject, cuts: list[int], skip: bool) -> None:
    """Ids no text encodes to: broken characters, special tokens in their midst, ids beyond the vocabulary."""
    ids = data.draw(st.lists(st.integers(0, tok.vocab_size + 3), max_size=40))
    assert "".join(stream(Detokenizer(tok, skip), ids, cuts)) == tok.decode(ids, skip)


@PROPERTY
@given(text=CHARS.filter(bool), at=st.integers(0, 200))
def test_continuing_a_prompt(tok: Tokenizer, text: str, at: int) -> None:
    """Prompt and answer together are the whole text, blanks at the seam included."""
    ids = tok.encode(text)
    cut = at % (len(ids) + 1)
    prompt = tok.decode(ids[:cut])
    if "\ufffd" in prompt:  # cut inside a character: the prompt alone has no faithful text
        prompt = prompt.rstrip("\ufffd")
    answer = "".join(stream(Detokenizer(tok, prompt_ids=ids[:cut]), ids[cut:], list(range(len(ids)))))
    assert prompt + answer == tok.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_special_tokens_that_are_to_be_shown(kind: str, tokenizer_dirs: dict[str, Path]) -> None:
    """The others stay out, whatever the decoder."""
    tok = Tokenizer.open(tokenizer_dirs[kind])
    shown, *hidden = sorted(tok.special_ids)
    mark = tok.decode([shown], skip_special_tokens=False)
    words = tok.encode("a b", add_special_tokens=False)
    ids = [*words, shown, *hidden, *words]
    text = "".join(stream(Detokenizer(tok, shown=[mark]), ids, [1, 3, 4]))
    assert text.count(mark) == 1 and all(tok.decode([i], False) not in text for i in hidden)
    assert text.replace(mark, "") == tok.decode([*words, *words])


def test_a_character_split_over_tokens_is_held_back(tokenizer_dirs: dict[str, Path]) -> None:
    tok = Tokenizer.open(tokenizer_dirs["sentencepiece"])
    ids = tok.encode("好", add_special_tokens=False)
    assert len(ids) == 4  # the dummy blank and three bytes
    detokenizer = Detokenizer(tok)
    assert [detokenizer.add([i]) for i in ids] == ["", "", "", "好"]
    assert detokenizer.flush() == ""


def test_an_unfinished_character_shows_at_the_end_only(tokenizer_dirs: dict[str, Path]) -> None:
    tok = Tokenizer.open(tokenizer_dirs["sentencepiece"])
    ids = tok.encode("x好", add_special_tokens=False)[:-1]
    detokenizer = Detokenizer(tok)
    assert "".join(detokenizer.add([i]) for i in ids) == "x"
    assert detokenizer.flush() == "\ufffd"


def test_leading_blank_is_kept_after_a_prompt_and_dropped_without(tokenizer_dirs: dict[str, Path]) -> None:
    tok = Tokenizer.open(tokenizer_dirs["sentencepiece"])
    ids = tok.encode("return", add_special_tokens=False)
    assert Detokenizer(tok).add(ids) == "return"
    assert Detokenizer(tok, prompt_ids=[1]).add(ids) == "return"
    assert Detokenizer(tok, prompt_ids=tok.encode("x")).add(ids) == " return"


def test_special_tokens_show_when_asked_for(tokenizer_dirs: dict[str, Path]) -> None:
    tok = Tokenizer.open(tokenizer_dirs["byte_level"])
    ids = tok.encode("a<|im_end|>b")
    assert Detokenizer(tok).add(ids) == "ab"
    assert Detokenizer(tok, skip_special_tokens=False).add(ids) == "a<|im_end|>b"


def test_bytes_that_never_form_a_character_do_not_stall(tokenizer_dirs: dict[str, Path]) -> None:
    tok = Tokenizer.open(tokenizer_dirs["byte_level"])
    bad = next(i for i, b in enumerate(tok.token_bytes) if b == b"\xff")
    detokenizer = Detokenizer(tok)
    assert [detokenizer.add([bad]) for _ in range(3)] == ["\ufffd"] * 3


@pytest.mark.parametrize("text", ["The quick brown fox", "over the sea ; naïve"])
def test_decoders_that_are_not_byte_exact(tokenizer_dirs: dict[str, Path], text: str) -> None:
    tok = Tokenizer.open(tokenizer_dirs["wordpiece"])
    ids = tok.encode(text)
    for cut in range(len(ids)):
        detokenizer = Detokenizer(tok, prompt_ids=ids[:cut])
        answer = "".join(detokenizer.add([i]) for i in ids[cut:]) + detokenizer.flush()
        assert tok.decode(ids[:cut]) + answer == tok.decode(ids)
