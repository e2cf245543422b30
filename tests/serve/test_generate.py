"""LMDeploy's own endpoints: /generate, /get_ppl, and /v1/chat/interactive, against the stand-in engine."""

from __future__ import annotations

import json
import math
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.serve.asking import ask
from toolkit.serve.client import APIClient
from toolkit.serve.http.limits import Limits


def lines(url: str, path: str, body: Any) -> list[str]:
    with urllib.request.urlopen(urllib.request.Request(url + path, json.dumps(body).encode()), timeout=60) as reply:
        return [line for line in reply.read().decode().split("\n") if line]


def test_generate(start: Any) -> None:
    server = start()
    status, got = ask(server.url, "/generate", {"prompt": "hello", "max_tokens": 3})
    assert status == 200 and (got["text"], got["output_ids"]) == ("hel", list(b"hel"))
    meta = got["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["finish_reason"]) == (5, 3, {"type": "length"})
    assert "output_token_logprobs" not in meta
    assert server.engine.seen[-1][1].stop_words is None  # no chat template
    _, same = ask(server.url, "/generate", {"input_ids": list(b"hello"), "max_tokens": 3})
    assert same["text"] == "hel"
    ask(server.url, "/generate", {"prompt": "x" * 300})
    assert server.engine.seen[-1][1].max_new_tokens == 128


def test_generate_streams_pieces(start: Any) -> None:
    got = lines(start().url, "/generate", {"prompt": "hello", "stream": True, "priority": 3})
    assert got[-1] == "data: [DONE]"
    pieces = [json.loads(line.removeprefix("data: ")) for line in got[:-1]]
    assert "".join(p["text"] for p in pieces) == "hello"
    assert [i for p in pieces for i in p["output_ids"]] == list(b"hello")
    assert pieces[-1]["meta_info"]["finish_reason"] == {"type": "stop"} and not pieces[0]["meta_info"]["finish_reason"]


def test_generate_tells_log_probabilities(start: Any) -> None:
    server = start()
    body = {"prompt": "hello", "max_tokens": 2, "return_logprob": True, "logprob_start_len": 3, "top_logprobs_num": 2}
    meta = ask(server.url, "/generate", body)[1]["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, ord("h")], [-0.5, ord("e")]]
    assert meta["output_top_logprobs"][0] == [[-0.5, ord("h")], [-1.0, 0]]
    assert meta["input_token_logprobs"] == [[-0.25, ord("l")], [-0.25, ord("o")]]
    scored = ask(server.url, "/generate", {**body, "max_tokens": 0, "logprob_start_len": 0})[1]
    assert scored["text"] == "" and scored["meta_info"]["completion_tokens"] == 0
    assert scored["meta_info"]["input_token_logprobs"][0] == [None, ord("h")]
    assert len(scored["meta_info"]["input_token_logprobs"]) == 5


def test_tokens_that_a_format_rules_out_have_a_number(start: Any, monkeypatch: Any) -> None:
    server = start()
    generate = server.engine.generate

    async def ruled(*args: Any, **more: Any) -> AsyncIterator[Any]:
        async for response in generate(*args, **more):
            response.logprobs = response.logprobs and [{ord("h"): 0.0, 7: -math.inf, 5: -math.inf}]
            yield response

    monkeypatch.setattr(server.engine, "generate", ruled)
    body = {"prompt": "h", "max_tokens": 1, "return_logprob": True, "top_logprobs_num": 3}
    (told,) = ask(server.url, "/generate", body)[1]["meta_info"]["output_top_logprobs"]
    assert told == [[0.0, ord("h")], [-9999.0, 5], [-9999.0, 7]]


def test_perplexity(start: Any) -> None:
    server = start()
    assert ask(server.url, "/get_ppl", {"input": "hello"}) == (200, {"ppl": 0.25})
    assert ask(server.url, "/get_ppl", {"input": [1, 2, 3], "model": "echo"}) == (200, {"ppl": 0.25})


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {}, "prompt"),
        ("/generate", {"prompt": "a", "input_ids": [1]}, "prompt"),
        ("/generate", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("/generate", {"prompt": "a", "n": 2}, "n"),
        ("/generate", {"prompt": "a", "top_logprobs_num": 2}, "return_logprob"),
        ("/generate", {"prompt": "a", "image_data": "x"}, "image_data"),
        ("/generate", {"prompt": "a", "priority": 1 << 40}, "priority"),
        ("/generate", {"input_ids": [9999]}, "input_ids"),
        ("/generate", {"prompt": "a", "tools": [1]}, "tools"),
        ("/get_ppl", {"input": "a"}, "input"),
        ("/get_ppl", {"input": []}, "input"),
        ("/v1/chat/interactive", {"prompt": "a", "interactive_mode": True}, "session_id"),
        ("/v1/chat/interactive", {"prompt": []}, "prompt"),
        ("/v1/chat/interactive", {"prompt": "a", "image_url": "x"}, "image_url"),
        ("/v1/chat/interactive", {"prompt": "a", "image_url": ["x"]}, "image_url"),
        ("/v1/chat/interactive", {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ("/v1/chat/interactive", {"prompt": "a", "max_tokens": 3, "request_output_len": 4}, "max_tokens"),
        ("/v1/chat/interactive", {"prompt": "a", "session_id": 1 << 70}, "session_id"),
    ],
)
def test_bad_fields_are_named(start: Any, path: str, body: dict[str, Any], param: str) -> None:
    status, told = ask(start().url, path, body)
    assert status == 400 and (told["error"]["param"] or "").partition(".")[0] == param, told


def test_an_interactive_session_remembers(start: Any) -> None:
    server = start()

    def turn(prompt: Any, **fields: Any) -> dict[str, Any]:
        fields = {"prompt": prompt, "session_id": 7, "interactive_mode": True, **fields}
        return ask(server.url, "/v1/chat/interactive", fields)[1]

    first = turn("hi")
    assert first == {
        "text": "[user]hi",
        "tokens": 8,
        "input_tokens": 8,
        "history_tokens": 0,
        "finish_reason": "stop",
    }
    second = turn("and?")
    assert second["text"] == "[user]hi[assistant][user]hi[user]and?" and second["history_tokens"] == 16
    assert second["input_tokens"] == len(second["text"]) - 16
    assert len({s for s in server.engine.sessions}) == 1 and server.engine.sessions[0]  # kept in the KV cache
    other = turn("who", session_id=8)
    assert other["history_tokens"] == 0 and other["text"] == "[user]who"
    once = turn("bye", interactive_mode=False)  # starts it anew, and keeps nothing
    assert once["text"] == "[user]bye" and server.engine.ended_sessions == [server.engine.sessions[0]]
    assert turn("hi")["history_tokens"] == 0
    long = turn([{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], session_id=9)
    assert long["text"] == "[system]s[user]q"


def test_an_answer_that_goes_on_with_a_message_is_one_with_it(start: Any) -> None:
    """Else there are two of the assistant's in a row, which many templates refuse."""
    url, begun = start().url, {"role": "assistant", "content": "Once"}
    talk = {"session_id": 7, "interactive_mode": True}
    first = ask(url, "/v1/chat/interactive", talk | {"prompt": [{"role": "user", "content": "q"}, begun]})[1]["text"]
    then = ask(url, "/v1/chat/interactive", talk | {"prompt": "r"})[1]["text"]
    assert then == f"[user]q[assistant]Once{first}[user]r"
    kept = ask(url, "/v1/responses", {"input": [{"role": "user", "content": "q"}, begun]})[1]
    (said,) = kept["output"][0]["content"]
    after = ask(url, "/v1/responses", {"input": "r", "previous_response_id": kept["id"]})[1]["output"][0]["content"]
    assert after[0]["text"] == f"[user]q[assistant]Once{said['text']}[user]r"


def test_interactive_takes_lmdeploy_s_fields(start: Any) -> None:
    """Each at its default, as a generated client sends them; OpenAI's name of the length; images are sent on."""
    url = start().url
    lmdeploy = {
        "prompt": "hi", "image_url": None, "session_id": -1, "interactive_mode": False, "stream": False, "stop": None,
        "request_output_len": None, "top_p": 0.8, "top_k": 40, "temperature": 0.8, "repetition_penalty": 1.0,
        "ignore_eos": False, "skip_special_tokens": True, "spaces_between_special_tokens": True, "cancel": False,
        "adapter_name": None, "seed": None, "min_new_tokens": None, "min_p": 0.0,
    }  # fmt: skip
    assert ask(url, "/v1/chat/interactive", lmdeploy)[1]["text"] == "[user]hi"
    short = ask(url, "/v1/chat/interactive", lmdeploy | {"max_tokens": 3})[1]
    assert (short["tokens"], short["finish_reason"]) == (3, "length")
    told = ask(url, "/v1/chat/interactive", lmdeploy | {"image_url": "https://a.org/a.png"})[1]["error"]["message"]
    assert "/v1/chat/completions" in told
    assert ask(url, "/v1/chat/interactive", lmdeploy | {"image_url": []})[0] == 200


def test_a_full_conversation_says_how_to_begin_anew(start: Any) -> None:
    """The prompt is short; what is too long is the history."""
    url = start().url
    turn = {"prompt": "hi" * 60, "session_id": 7, "interactive_mode": True, "request_output_len": 4}
    for _ in range(99):
        status, told = ask(url, "/v1/chat/interactive", turn)
        if status != 200:
            break
    error = told["error"]
    assert status == 400 and error["param"] == "prompt" and error["code"] == "context_length_exceeded"
    assert "interactive_mode=false" in error["message"] and "history" in error["message"]
    assert ask(url, "/v1/chat/interactive", turn | {"interactive_mode": False})[0] == 200
    assert ask(url, "/v1/chat/interactive", turn)[0] == 200
    alone = ask(url, "/v1/chat/interactive", turn | {"prompt": "hi" * 9999})[1]["error"]["message"]
    assert "history" not in alone and "--session-len" in alone


def test_interactive_streams_lines(start: Any) -> None:
    server = start()
    body = {"prompt": "hi", "session_id": 3, "interactive_mode": True, "stream": True, "request_output_len": 4}
    pieces = [json.loads(line) for line in lines(server.url, "/v1/chat/interactive", body)]
    assert "".join(p["text"] for p in pieces) == "[use" and pieces[-1]["finish_reason"] == "length"
    assert pieces[-1]["tokens"] == 4


def test_lmdeploy_s_client_has_it(start: Any) -> None:
    client = APIClient(start().url)
    (whole,) = client.chat_interactive_v1("hi", session_id=1, interactive_mode=True)
    assert whole["text"] == "[user]hi"
    pieces = list(client.chat_interactive_v1("hi", session_id=1, interactive_mode=True, stream=True))
    assert "".join(p["text"] for p in pieces) == "[user]hi[assistant][user]hi[user]hi"


def test_sessions_of_different_keys_are_apart(start: Any) -> None:
    server = start(api_keys=["a", "b"])
    body = {"prompt": "hi", "session_id": 1, "interactive_mode": True}
    ask(server.url, "/v1/chat/interactive", body, key="a")
    assert ask(server.url, "/v1/chat/interactive", body, key="b")[1]["history_tokens"] == 0
    assert ask(server.url, "/v1/chat/interactive", body, key="a")[1]["history_tokens"] > 0


def test_a_busy_session_is_refused_and_can_be_cancelled(start: Any) -> None:
    server = start(engine={"delay": 0.05})
    body = {"prompt": "x" * 200, "session_id": 1, "interactive_mode": True}
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(ask(server.url, "/v1/chat/interactive", body)))
    thread.start()
    server.wait(lambda: bool(server.engine.running))
    assert ask(server.url, "/v1/chat/interactive", {**body, "prompt": "y"})[0] == 409
    status, told = ask(server.url, "/v1/chat/interactive", {**body, "cancel": True})
    assert status == 200 and told["text"] == ""
    thread.join(60)
    assert got[0][0] == 499
    assert ask(server.url, "/v1/chat/interactive", {**body, "prompt": "y"})[1]["history_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_that_waits_for_its_turn_can_be_cancelled(start: Any, stream: bool) -> None:
    server = start(engine={"delay": 0.05}, max_concurrent_requests=1)
    first = {"prompt": "x" * 400, "session_id": 1, "interactive_mode": True}
    second = {"prompt": "y", "session_id": 2, "interactive_mode": True}
    got: list[Any] = []
    holds = threading.Thread(target=lambda: ask(server.url, "/v1/chat/interactive", first))
    holds.start()
    server.wait(lambda: bool(server.engine.running))
    waits = threading.Thread(
        target=lambda: got.append(ask(server.url, "/v1/chat/interactive", {**second, "stream": stream}))
    )
    waits.start()
    talks = server.app.state.server.talks
    server.wait(lambda: any(key[1] == 2 and talk.waiting for key, talk in talks._talks.items()))
    assert ask(server.url, "/v1/chat/interactive", {**second, "cancel": True})[0] == 200
    waits.join(60)
    assert got and (got[0][0] == 499 or "aborted" in str(got[0])), got
    assert server.engine.running and len(server.engine.seen) == 1
    ask(server.url, "/v1/chat/interactive", {**first, "cancel": True})
    holds.join(60)
    assert ask(server.url, "/v1/chat/interactive", second)[0] == 200


def test_the_oldest_session_makes_room(start: Any) -> None:
    server = start(limits=Limits(max_sessions=2))
    for session in (1, 2, 1, 3):
        ask(server.url, "/v1/chat/interactive", {"prompt": "hi", "session_id": session, "interactive_mode": True})
    assert server.engine.ended_sessions == [server.engine.sessions[1]]
    kept = [
        ask(server.url, "/v1/chat/interactive", {"prompt": "hi", "session_id": s, "interactive_mode": True})[1]
        for s in (1, 3)
    ]
    assert all(answer["history_tokens"] for answer in kept)


def test_a_session_is_forgotten_in_time(start: Any) -> None:
    server = start(limits=Limits(session_timeout=0.0))
    body = {"prompt": "hi", "session_id": 1, "interactive_mode": True}
    assert ask(server.url, "/v1/chat/interactive", body)[1]["history_tokens"] == 0
    status, told = ask(server.url, "/v1/chat/interactive", body)
    assert status == 410 and "--session-timeout" in told["error"]["message"]
    assert ask(server.url, "/v1/chat/interactive", body)[1]["history_tokens"] == 0  # a new one
    assert (
        ask(server.url, "/v1/chat/interactive", {**body, "interactive_mode": False})[0] == 200
    )  # goes on from nothing


def test_a_session_s_blocks_are_given_back_in_time_though_nobody_asks_again(start: Any) -> None:
    server = start(limits=Limits(session_timeout=0.01))
    body = {"prompt": "hi", "session_id": 1, "interactive_mode": True}
    ask(server.url, "/v1/chat/interactive", body)
    server.wait(lambda: bool(server.engine.ended_sessions))


def test_priority_reaches_the_engine(start: Any) -> None:
    server = start(lowest_priority=-5)
    ask(server.url, "/v1/completions", {"model": "echo", "prompt": "a", "priority": 5})
    chat = {"model": "echo", "messages": "a", "priority": -5}
    ask(server.url, "/v1/chat/completions", chat)
    assert server.engine.priorities == [5, -5]
