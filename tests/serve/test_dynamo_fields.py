"""What Dynamo's front end asks for, as our engine is told, and our answers as its chunks; Dynamo is not needed."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.chat.settings import GREEDY
from toolkit.errors import UsageError
from toolkit.messages import GenerationConfig, Response
from toolkit.serve.dynamo.asked import chunk_of, config_of


def asked(**groups: Any) -> GenerationConfig:
    return config_of({"token_ids": [1], **groups}, GREEDY)


def test_what_is_not_said_is_the_model_s() -> None:
    nothing = {"n": None, "temperature": None, "seed": None, "guided_decoding": None, "use_beam_search": False}
    config = asked(sampling_options=nothing, stop_conditions={"max_tokens": None}, output_options={})
    assert config.max_new_tokens is None and not config.do_sample
    drawing = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.9)
    config = config_of({"token_ids": [1], "sampling_options": {"top_p": 0.5}}, drawing)
    assert (config.do_sample, config.temperature, config.top_p) == (True, 0.6, 0.5)


def test_every_field_arrives() -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": 7, "n": 1}
    sampling |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
    stops = {"max_tokens": 9, "min_tokens": 2, "ignore_eos": True, "stop_token_ids_hidden": [5], "stop": ["x"]}
    config = asked(
        sampling_options=sampling, stop_conditions=stops, output_options={"logprobs": 4, "prompt_logprobs": 1}
    )
    assert (config.do_sample, config.temperature, config.top_p, config.top_k, config.min_p) == (True, 0.5, 0.9, 0, 0.1)
    assert (config.repetition_penalty, config.presence_penalty, config.frequency_penalty) == (1.1, 0.2, 0.3)
    assert (config.random_seed, config.max_new_tokens, config.min_new_tokens) == (7, 9, 2)
    assert config.ignore_eos and config.stop_token_ids == [5] and config.stop_words is None  # texts are the front end's
    assert (config.logprobs, config.prompt_logprobs) == (4, 1)


def test_an_answer_ends_at_the_client_s_tokens_and_at_the_model_s() -> None:
    for stops, ends in (
        ({"stop_token_ids": [9, 2], "stop_token_ids_hidden": [5, 2]}, [2, 5, 9]),
        ({"stop_token_ids": [9]}, [9]),
        ({"stop_token_ids": [], "stop_token_ids_hidden": []}, None),
    ):
        assert asked(stop_conditions=stops).stop_token_ids == ends


@pytest.mark.parametrize(
    ("guided", "kind"),
    [
        ({"json": {"type": "object"}}, "json_schema"),
        ({"regex": "a+"}, "regex_schema"),
        ({"choice": ["a", "b"], "backend": None}, "choice"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
    ],
)
def test_guided_decoding(guided: dict[str, Any], kind: str) -> None:
    config = asked(sampling_options={"guided_decoding": guided})
    assert config.response_format is not None and config.response_format["type"] == kind
    assert kind in config.response_format


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ({"sampling_options": {"use_beam_search": True}}, "use_beam_search: not done here"),
        ({"sampling_options": {"best_of": 3}}, "best_of: not done here"),
        ({"sampling_options": {"allowed_token_ids": [1]}}, "allowed_token_ids: not done here"),
        ({"sampling_options": {"bad_words_token_ids": [[1, 2]]}}, "bad_words_token_ids: not done here"),
        ({"sampling_options": {"n": 2}}, "n: expected 1, for Dynamo"),
        ({"sampling_options": {"temperature": 9}}, "temperature"),
        ({"sampling_options": {"guided_decoding": {"structural_tag": {}}}}, "guided_decoding: expected json"),
        ({"multi_modal_data": {"image_url": [{}]}}, "pictures are not taken over Dynamo"),
    ],
)
def test_what_is_not_done_is_refused_by_name(groups: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        asked(**groups)


def test_who_has_computed_the_prompt() -> None:
    told = {"disaggregated_params": {"engine_id": "e" * 32, "address": "a:1", "tls": False, "in_common": {}}}
    assert asked(prefill_result=told).migration_request == {"remote_engine_id": "e" * 32}
    assert asked(prefill_result={}).migration_request is None


def test_chunks() -> None:
    first = Response(token_ids=[3, 4], logprobs=[{3: -1.0, 9: -0.5}, {4: -2.0}])
    chunk = chunk_of(first, str)
    assert (chunk["token_ids"], chunk["index"], chunk["log_probs"]) == ([3, 4], 0, [-1.0, -2.0])
    assert [(e["rank"], e["token_id"], e["token"]) for e in chunk["top_logprobs"][0]] == [(1, 9, "9"), (2, 3, "3")]
    assert "finish_reason" not in chunk
    last = Response(token_ids=[], finish_reason="abort", input_token_len=5, generate_token_len=2, cached_tokens=4)
    chunk = chunk_of(last, str)
    assert chunk["finish_reason"] == "cancelled"
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    assert chunk["completion_usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 4}}
    prompt = Response(prompt_logprobs=[None, {7: -1.0}])
    told = chunk_of(prompt, str)["engine_data"]["prompt_logprobs"]
    assert told == [None, {"7": {"logprob": -1.0, "rank": 1, "decoded_token": "7"}}]
