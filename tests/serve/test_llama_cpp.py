"""llama.cpp's own routes against the stand-in engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.serve.asking import ask
from tests.serve.test_generate import lines
from tests.serve.test_openapi import ask as get
from toolkit.messages import Response


def test_completion_whole(start: Any) -> None:
    server = start()
    body = {
        "prompt": "hello\n",
        "n_predict": 3,
        "cache_prompt": True,
        "id_slot": 2,
        "n_probs": 2,
        "return_tokens": True,
    }
    status, told = ask(server.url, "/completion", body)
    assert status == 200 and (told["content"], told["tokens"], told["stop_type"]) == ("hel", list(b"hel"), "limit")
    assert (told["tokens_evaluated"], told["tokens_predicted"], told["tokens_cached"]) == (6, 3, 3)
    assert told["stop"] and told["model"] == "echo" and told["prompt"] == "hello\n" and not told["has_new_line"]
    assert told["generation_settings"]["n_predict"] == 3 and told["generation_settings"]["temperature"] == 0
    first = told["completion_probabilities"][0]
    assert (first["id"], first["token"], first["logprob"]) == (ord("h"), "h", -0.5)
    assert [other["id"] for other in first["top_logprobs"]] == [ord("h"), 0]
    assert told["timings"]["predicted_n"] == 3 and told["timings"]["prompt_n"] == 3
    assert ask(server.url, "/completion", {"prompt": list(b"hi\n")})[1]["content"] == "hi\n"


def test_completion_in_a_stream(start: Any) -> None:
    got = lines(start().url, "/completion", {"prompt": "hello", "stream": True})
    pieces = [json.loads(line.removeprefix("data: ")) for line in got]  # without OpenAI's [DONE]
    assert "".join(piece["content"] for piece in pieces) == "hello"
    assert [piece["stop"] for piece in pieces] == [False] * 5 + [True]
    assert [piece["tokens"] for piece in pieces[:5]] == [[token] for token in b"hello"]
    assert pieces[-1]["stop_type"] == "eos" and pieces[-1]["tokens_predicted"] == 5


def test_the_prompt_takes_its_time_where_the_answer_is_empty(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start()

    async def ends_at_once(*given: Any, **more: Any) -> AsyncIterator[Response]:
        await asyncio.sleep(0.05)
        yield Response(finish_reason="stop", generate_token_len=1)

    monkeypatch.setattr(server.engine, "generate", ends_at_once)
    told = ask(server.url, "/completion", {"prompt": "hello"})[1]["timings"]
    assert told["prompt_ms"] >= 50 and told["prompt_per_second"] <= 100


def test_no_seed_as_llama_cpp_tells_it_is_none(start: Any) -> None:
    """Clients send back what /props or an answer tells as its settings."""
    server = start()
    seed = ask(server.url, "/completion", {"prompt": "a"})[1]["generation_settings"]["seed"]
    for path, body in (("/completion", {"prompt": "a", "seed": seed}),
                       ("/api/generate", {"prompt": "a", "options": {"seed": seed}})):  # fmt: skip
        assert ask(server.url, path, body | {"stream": False})[0] == 200
        config = server.engine.seen[-1][1]
        assert config.random_seed is None and config.greedy


def test_what_is_asked_for_reaches_the_engine(start: Any) -> None:
    server = start()
    drawn = {"temperature": 0.7, "top_k": 3, "min_p": 0.1, "seed": -1, "repeat_penalty": 1.1, "repeat_last_n": -1}
    more = {"logit_bias": [[65, 1.5], [66, False]], "ignore_eos": True, "grammar": "root ::= [a-z]", "stop": ["q"]}
    assert ask(server.url, "/completion", {"prompt": "a"} | drawn | more)[0] == 200
    config = server.engine.seen[-1][1]
    assert (config.temperature, config.top_k, config.min_p, config.random_seed) == (0.7, 3, 0.1, None)
    assert config.logit_bias == {65: 1.5, 66: -100.0} and config.ignore_eos and config.stop_words == ["q"]
    assert config.response_format == {"type": "grammar", "grammar": "root ::= [a-z]"}
    own = {"typical_p": 0.9, "top_n_sigma": 2.0, "xtc_probability": 0.5, "xtc_threshold": 0.2, "dynatemp_range": 0.3,
           "dynatemp_exponent": 1.5, "dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 3,
           "dry_penalty_last_n": 64, "dry_sequence_breakers": [";"]}  # fmt: skip
    assert ask(server.url, "/completion", {"prompt": "a", "temperature": 0.7} | own)[0] == 200
    config = server.engine.seen[-1][1]
    assert {name: getattr(config, name) for name in own} == own
    assert ask(server.url, "/completion", {"prompt": "a", "json_schema": {"type": "integer"}})[0] == 200
    assert server.engine.seen[-1][1].response_format["json_schema"]["schema"] == {"type": "integer"}


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"n_predict": 0}, "n_predict"),
        ({"mirostat": 2}, "mirostat"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"samplers": ["top_k"]}, "samplers"),
        ({"t_max_predict_ms": 5}, "t_max_predict_ms"),
        ({"logit_bias": [["a", 1]]}, "logit_bias"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora"),
        ({"mystery": 1}, "mystery"),
        ({"prompt": ["a", "b"]}, "prompt"),
    ],
)
def test_what_is_not_built_is_refused_by_name(start: Any, body: Any, named: str) -> None:
    status, told = ask(start().url, "/completion", {"prompt": "a"} | body)
    assert status == 400 and named in told["error"]["message"]


def test_gaps(start: Any) -> None:
    server = start()
    body = {
        "input_prefix": "a(",
        "input_suffix": ")",
        "prompt": "x",
        "input_extra": [{"filename": "f", "text": "other"}],
    }
    status, told = ask(server.url, "/infill", body)
    assert status == 400 and "not trained to fill gaps" in told["error"]["message"]
    server.engine.tokenizer.token_id = {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3}.get
    assert ask(server.url, "/infill", body)[1]["content"] == "other\n<fim_prefix>a(<fim_suffix>)<fim_middle>x"
    told = ask(server.url, "/v1/completions", {"model": "echo", "prompt": "a(", "suffix": ")"})[1]
    assert told["choices"][0]["text"] == "<fim_prefix>a(<fim_suffix>)<fim_middle>"
    body = {"model": "echo", "prompt": "a(", "suffix": ")", "echo": True}
    assert ask(server.url, "/v1/completions", body)[1]["choices"][0]["text"].startswith("a(<fim_prefix>")
    status, told = ask(server.url, "/v1/completions", body | {"logprobs": 1})
    assert status == 400 and told["error"]["message"].startswith("echo: not with suffix")
    body = {"model": "echo", "prompt": "a(", "suffix": ")", "stream": False}
    assert ask(server.url, "/api/generate", body)[1]["response"] == "<fim_prefix>a(<fim_suffix>)<fim_middle>"


def test_what_the_server_is(start: Any) -> None:
    server = start(engine={"max_batch_size": 2, "delay": 0.02})
    told = get(f"{server.url}/props", None)[1]
    assert told["chat_template"] == "{{ messages }}"  # that which is used
    assert told["total_slots"] == 2 and told["default_generation_settings"]["n_ctx"] == 512
    assert told["model_path"] == "echo" and told["modalities"] == {"vision": False, "audio": False}
    assert [slot["is_processing"] for slot in get(f"{server.url}/slots", None)[1]] == [False, False]
    told = ask(server.url, "/apply-template", {"messages": [{"role": "user", "content": "Hi"}]})[1]
    assert told == {"prompt": "[user]Hi"}


def test_tokens_in_llama_cpps_words(start: Any) -> None:
    server = start()
    assert ask(server.url, "/tokenize", {"content": "hé"})[1]["tokens"] == list("hé".encode())
    pieces = ask(server.url, "/tokenize", {"content": "hé", "with_pieces": True})[1]["tokens"]
    assert pieces == [{"id": 104, "piece": "h"}, {"id": 195, "piece": [195]}, {"id": 169, "piece": [169]}]
    assert ask(server.url, "/detokenize", {"tokens": [104, 105]})[1]["content"] == "hi"
    assert ask(server.url, "/tokenize", {"content": "a", "prompt": "a"})[0] == 400


def test_no_slot_is_free(start: Any) -> None:
    server = start()
    server.engine.max_batch_size = 0
    status, told = get(f"{server.url}/slots?fail_on_no_slot=1", None)
    assert (status, told["error"]["message"]) == (503, "no slot available; try again later")
