"""Requests that ask for more work than they look like: sampling options, words, lengths, grammars."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterator
from typing import Any

from attacking.target import HEAD, LOST, Target

GREEDY_S = 3.0  # seconds that greedy requests run before somebody else's
LATE_S = 5.0  # seconds for the first token of a chat, after which it is told; 25 and more where one waits for all


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    rule = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"prompt": "x", "response_format": rule}


def _regex(pattern: str) -> dict[str, Any]:
    return {"prompt": "x", "response_format": {"type": "regex_schema", "regex_schema": pattern}}


def tiny_temperature(target: Target) -> Iterator[str]:
    for temperature in (1e-7, 1e-30, 1e-45, 5e-324):
        for field in ({"top_p": 0.5}, {"min_p": 0.5}):
            yield target.post({"prompt": "x", "temperature": temperature, "top_k": 0, **field})


def nested_pattern(target: Target) -> Iterator[str]:
    for depth in (60_000, 15_000, 2_000):
        pattern = "(" * depth + "a" + ")" * depth
        yield target.post(_schema({"type": "string", "pattern": pattern}))
        yield target.post(_schema({"type": "object", "patternProperties": {pattern: {}}}))


def tiny_penalty(target: Target) -> Iterator[str]:
    for value in (1e-46, 1e-38, 0.01):
        yield target.post({"prompt": "x", "repetition_penalty": value})


def many_bad_words(target: Target) -> Iterator[str]:
    words = [f"word{i:05d}" for i in range(30_000)]
    for count in (3_000, 4_096, 30_000):
        yield target.post({"prompt": "x", "bad_words": words[:count]})


def long_stops(target: Target) -> Iterator[str]:
    for count, length, n in ((16, 100_000, 32), (64, 4_096, 32)):
        yield target.post(
            {"prompt": "x", "stop": ["ab" * (length // 2) + f"{i:02d}"[:2] for i in range(count)], "n": n}
        )


def long_text(target: Target) -> Iterator[str]:
    draw = random.Random(1)
    words = [draw.choice(("the", "quick", "brown", "fox", "jumps", "over")) for _ in range(1_200_000)]
    for characters in (6_000_000, 3_000_000, 300_000):
        yield target.post({"prompt": " ".join(words)[:characters]})
    yield target.post({"prompt": "a" * 4_000_000})


def many_ids(target: Target) -> Iterator[str]:
    for count in (5_000_000, 1_000_000, 100_000):
        yield target.post({"prompt": [7] * count})


def long_message(target: Target) -> Iterator[str]:
    for characters in (20_000_000, 4_000_000):
        yield target.post({"messages": [{"role": "user", "content": "x" * characters}]}, "/v1/chat/completions")


def many_messages(target: Target) -> Iterator[str]:
    for count in (200_000, 4_096):
        yield target.post({"messages": [{"role": "user", "content": "x"}] * count}, "/v1/chat/completions")


def slow_grammars(target: Target) -> Iterator[str]:
    yield target.post(_regex("((a{1,300}){1,300}){1,300}"))
    yield target.post(_regex("[^x]{1,8000}"))
    yield target.post(_schema({"type": "string", "maxLength": 10**6}))
    yield target.post(_schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(990)}}))
    yield target.post({"prompt": "x", "guided_grammar": 'root ::= root root | "a" | ""'})
    yield target.post(_schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}}))
    for seed in range(4):
        draw = random.Random(seed)
        yield target.post(_regex("|".join(f"{draw.randrange(10**9)}[a-z]{{1,9}}" for _ in range(2_800))))


def abandoned_grammars(target: Target) -> Iterator[str]:
    """The client leaves while they are compiled."""
    body = {"model": "target", "max_tokens": 8, **_regex("((a{1,200}){1,200}){1,200}b")}
    data = json.dumps(body).encode()
    for _ in range(4):
        with target.connect() as connection:
            connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)
            time.sleep(0.3)
    yield "left"


def usage_errors(target: Target) -> Iterator[str]:
    """A route that refuses by itself; the log shall have no traceback of it."""
    for path in ("/wakeup?tags=x", "/sleep?level=x", "/abort_request"):
        yield target.post({}, path)


def held_answers(target: Target) -> Iterator[str]:
    """Log-probabilities of many answers, kept until the last is whole."""
    for n, tokens in ((64, 1500), (128, 1000), (96, 2000)):
        body = {"prompt": "x", "n": n, "logprobs": 20, "max_tokens": tokens, "ignore_eos": True}
        told = target.post(body)
        yield ("" if told.startswith("400") else LOST) + told


def greedy_requests(target: Target) -> Iterator[str]:
    """All within limits, each with work for minutes; the client leaves after a while. A chat has its first token."""
    draw = random.Random(3)
    texts = [" ".join(draw.choice(("the", "quick", "brown", "fox")) + str(i) for i in range(1_000)) for _ in range(100)]
    for path, body in (
        ("/v1/embeddings", {"input": texts[:40]}),
        ("/v1/completions", {"prompt": texts, "max_tokens": 16}),
        ("/v1/completions", {"prompt": "x", "n": 128, "max_tokens": 512, "ignore_eos": True}),
    ):
        data = json.dumps({"model": "target", **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        with contextlib.ExitStack() as stack:
            for connection in [stack.enter_context(target.connect()) for _ in range(8)]:
                connection.sendall(head.encode() + data)
            time.sleep(GREEDY_S)
            began = time.monotonic()
            told = target.post(
                {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}, "/v1/chat/completions"
            )
            late = f" only after {time.monotonic() - began:.0f} s" if time.monotonic() - began > LATE_S else ""
            yield told + late
