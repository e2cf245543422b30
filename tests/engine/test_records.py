"""Requests and outputs survive the way to another process unchanged."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.engine.process import records
from toolkit.engine.request import EngineOutput, EngineRequest, SamplingParams
from toolkit.models.eyes.pictures import Picture

IDS = st.integers(0, 2**31 - 1)
LOGPROBS = st.dictionaries(IDS, st.floats(-100, 0), min_size=1, max_size=4)


@given(
    st.lists(IDS, max_size=20),
    st.integers(0, 2**64 - 1),
    st.dictionaries(IDS, st.floats(-100, 100)),
    st.lists(st.text(min_size=1), max_size=3),
    st.one_of(
        st.none(), st.integers().map(lambda n: {"type": "json_schema", "json_schema": {"schema": {"maximum": n << 60}}})
    ),
)
def test_requests(ids: list[int], seed: int, bias: dict[int, float], words: list[str], grammar: Any) -> None:
    words = [w for w in words if w.isprintable()]
    params = SamplingParams(7, seed=seed, logit_bias=bias, bad_words=words, grammar=grammar, temperature=0.3)
    request = EngineRequest("é", ids, params, session="s", only="score", adapter=2)
    message, rest = records.unpack(records.pack_add(request))
    assert records.read_request(message, rest, {}) == request and not len(rest)


def test_pictures_of_requests() -> None:
    pixels = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
    sent = [Picture(pixels[i:], (i, 2), (7, 9), 6 + i, bytes([i] * 32)) for i in range(2)]
    request = EngineRequest("a", [1, 2], SamplingParams(7), pictures=sent)
    held: dict[bytes, Picture] = {}
    whole = records.pack_add(request)
    found = records.read_request(*records.unpack(whole), held).pictures
    again = records.pack_add(request, held)
    assert len(again) < len(whole) - sum(picture.pixels.nbytes for picture in sent) + 100
    assert all(a is b for a, b in zip(records.read_request(*records.unpack(again), held).pictures, found, strict=True))
    for mine, theirs in zip(sent, found, strict=True):
        np.testing.assert_array_equal(theirs.pixels, mine.pixels)
        assert (theirs.grid, theirs.size, theirs.tokens, theirs.digest) == (
            mine.grid,
            mine.size,
            mine.tokens,
            mine.digest,
        )


@given(
    st.lists(
        st.builds(
            EngineOutput,
            st.text(max_size=5).filter(str.isprintable),
            st.lists(IDS, max_size=3),
            st.lists(LOGPROBS, max_size=3),
            st.sampled_from([None, "stop", "length", "error", "abort"]),
            prompt_logprobs=st.one_of(st.none(), st.lists(LOGPROBS, max_size=3).map(lambda x: [None, *x])),
            cached_tokens=st.integers(0, 100),
        ),
        max_size=4,
    ),
    st.integers(0, 3),
)
def test_outputs(outputs: list[EngineOutput], rows: int) -> None:
    for i, output in enumerate(outputs):
        if rows:
            output.logits = np.random.default_rng(i).normal(size=(rows, 7)).astype(np.float32)
        if rows == 2:
            output.hidden = np.arange(8, dtype=np.float32).reshape(2, 4) + i
    message, data = records.unpack(records.pack_outputs(outputs, {"running": 2}))
    found = records.read_outputs(message, data)
    assert message["stats"] == {"running": 2} and len(found) == len(outputs)
    for got, sent in zip(found, outputs, strict=True):
        for name in records.ARRAYS:
            a, b = getattr(got, name), getattr(sent, name)
            assert (a is None) == (b is None)
            if a is not None:
                np.testing.assert_array_equal(a, b)
                assert a.flags.writeable
        assert {k: v for k, v in asdict(got).items() if k not in records.ARRAYS} == {
            k: v for k, v in asdict(sent).items() if k not in records.ARRAYS
        }


def test_minus_infinity_survives_though_json_has_none() -> None:
    output = EngineOutput("a", [3], [{3: -math.inf, 4: -1.0}])
    message, data = records.unpack(records.pack_outputs([output], {}))
    assert records.read_outputs(message, data)[0].logprobs == [{3: -math.inf, 4: -1.0}]


def test_an_error_with_half_a_character_is_told() -> None:
    output = EngineOutput("a", finish_reason="error", error="/models/\udcff: is missing")
    output.logits = np.ones((1, 3), np.float32)
    (found,) = records.read_outputs(*records.unpack(records.pack_outputs([output], {})))
    assert found.error == "/models/\\udcff: is missing" and found.logits.shape == (1, 3)
    answer = {"op": "answer", "error": "\ud800", "usage": True}
    assert records.unpack(records.pack_told(answer))[0] == answer | {"error": "\\ud800"}


def test_what_is_no_json_is_refused() -> None:
    params = SamplingParams(1, grammar={"type": object()})
    with pytest.raises(TypeError):
        records.pack_add(EngineRequest("a", [1], params))
