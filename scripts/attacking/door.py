"""What one key can take of what stands before the engine: places to wait, threads, bodies, connections, batches."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from attacking.neighbours import another
from attacking.target import LOST, Target

LATE_S = 10.0  # seconds for a short answer, after which its asker has lost them; minutes where one waits for all
BODY: dict[str, Any] = {"model": "target", "prompt": "x", "max_tokens": 1}
Ask = Callable[..., tuple[int, Any]]


def taken_places(target: Target) -> Iterator[str]:
    """A key asks for all of something, in each of several ways; meanwhile another one asks for a little."""
    flags = ["--max-queue", "8", "--max-pending-bytes", "4000000", "--max-batch-size", "4", "--max-batches", "4"]
    with another(target, *flags, "--enable-abort-handling", "--max-connections", "200") as ask:
        tokens = list(range(100, 140)) * 50
        ways: dict[str, tuple[str, dict[str, Any], int]] = {
            "a full queue": ("/v1/completions", {**BODY, "max_tokens": 400, "ignore_eos": True}, 60),
            "bodies": ("/v1/completions", {**BODY, "max_tokens": 400, "ignore_eos": True, "user": "x" * 900_000}, 12),
            "texts to tokenize": ("/tokenize", {"model": "target", "prompt": "the quick brown fox " * 12_000}, 100),
            "texts to encode": ("/v1/encode", {"input": ["a"] * 2_000, "do_preprocess": True}, 30),
            "many texts to encode": ("/v1/encode", {"input": ["a"] * 60_000, "do_preprocess": True}, 30),
            "token ids": ("/detokenize", {"tokens": tokens}, 100),
            "wrong predictions": ("/v1/chat/completions", {**_chat(), "prediction": _prediction()}, 30),
        }
        for name, (path, body, count) in ways.items():
            with _greedy(ask, path, body, count):
                yield _modest(ask, name)
        yield from _ended(ask)
        yield from _no_key(ask)


def _chat() -> dict[str, Any]:
    talk = [{"role": "user", "content": "Count."}]
    return {"model": "target", "messages": talk, "max_tokens": 300, "ignore_eos": True}


def _prediction() -> dict[str, Any]:
    return {"type": "content", "content": "zq wrong " * 200}


@contextlib.contextmanager
def _greedy(ask: Ask, path: str, body: dict[str, Any], count: int) -> Iterator[None]:
    """So many requests of the key "greedy" at a time, as long as it lasts."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError, ValueError):
                if ask("greedy", "POST", path, body)[0] == 429:
                    time.sleep(0.1)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    time.sleep(1.5)
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _modest(ask: Ask, beside: str) -> str:
    statuses, longest = set(), 0.0
    for _ in range(3):
        began = time.monotonic()
        statuses.add(ask("victim", "POST", "/v1/completions", BODY)[0])
        longest = max(longest, time.monotonic() - began)
    fine = statuses == {200} and longest < LATE_S
    return ("" if fine else LOST) + f"beside {beside}: {sorted(statuses)}, the longest after {longest:.1f} s"


def _ended(ask: Ask) -> Iterator[str]:
    """Another key's request by the number of its session, and all."""
    found: list[int] = []
    body = {**BODY, "max_tokens": 400, "ignore_eos": True, "session_id": 1}
    thread = threading.Thread(target=lambda: found.append(ask("victim", "POST", "/v1/completions", body)[0]))
    thread.start()
    time.sleep(0.3)
    told = [ask("greedy", "POST", "/abort_request", how)[0] for how in ({"session_id": 1}, {"abort_all": True})]
    thread.join()
    yield ("" if found == [200] else LOST) + f"another's request, aborted: {told}; its answer: {found}"


def _no_key(ask: Ask) -> Iterator[str]:
    """More connections than there may be, of requests without a good key whose bodies do not come."""
    url = urlsplit(ask.url)  # type: ignore[attr-defined]
    half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer wrong\r\nContent-Length: 9\r\n\r\n{"
    with contextlib.ExitStack() as held:
        for i in range(600):
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_connection((url.hostname or "", url.port or 0), 60)).sendall(half)
            if i % 200 == 199:
                yield _modest(ask, f"{i + 1} requests without a key, half of each")


def batches(target: Target) -> Iterator[str]:
    """All places for batches, and all for files on their way in."""
    with another(target, "--max-batches", "4") as ask:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {**BODY, "max_tokens": 400}}
        told = [_batch(ask, "greedy", line) for _ in range(6)]
        status = _batch(ask, "victim", line)
        yield ("" if status == 200 else LOST) + f"a batch beside those of another: {told}, {status}"


def _batch(ask: Ask, key: str, line: dict[str, Any]) -> int:
    text = "\r\n".join((
        "--x", 'Content-Disposition: form-data; name="purpose"', "", "batch", "--x",
        'Content-Disposition: form-data; name="file"; filename="in.jsonl"', "", json.dumps(line), "--x--", "",
    ))  # fmt: skip
    kind = {"Content_Type": "multipart/form-data; boundary=x"}
    status, file = ask(key, "POST", "/v1/files", text.encode(), **kind)
    if status != 200:
        return status
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return ask(key, "POST", "/v1/batches", asked)[0]
