"""Decoders whose positions are learned: a text ends where they do."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit import GenerationConfig, TurbomindEngineConfig, pipeline
from toolkit.errors import UsageError
from toolkit.runners.native.library import available

FAMILIES = ("gpt2", "gpt_bigcode", "gpt_neo", "opt")
MOST = 48
PROMPT = "a b c a b c a b"  # which guesses go on with


@pytest.mark.skipif(available() is not None, reason="the native library is not there")
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_goes_on_to_the_last_position(family: str, tiny_models: Any) -> None:
    path = str(tiny_models(family, max_position_embeddings=MOST))
    asked = GenerationConfig(max_new_tokens=200, ignore_eos=True, do_sample=False)
    found = []
    for speculative in ("auto", "off"):
        with pipeline(path, backend_config=TurbomindEngineConfig(speculative=speculative)) as pipe:
            answer = pipe(PROMPT, gen_config=asked, do_preprocess=False)
            assert (answer.generate_token_len, answer.finish_reason) == (MOST - answer.input_token_len, "length")
            found.append(answer.token_ids)
    assert found[0] == found[1]


def test_what_would_go_beyond_is_refused(tiny_models: Any) -> None:
    path = str(tiny_models("gpt2", max_position_embeddings=MOST))
    with pytest.raises(UsageError, match=f"session_len: found 64, expected at most {MOST}: this model reads {MOST}"):
        pipeline(path, backend_config=TurbomindEngineConfig(session_len=64))
    with pytest.raises(UsageError, match="kv_window: this model's positions are learned"):
        pipeline(path, backend_config=TurbomindEngineConfig(kv_window=16))
