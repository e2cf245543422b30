"""What one key can do to another's answers, conversations and models."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attacking.target import LONG, LOST, Target
from traffic import servers


@contextlib.contextmanager
def another(target: Target, *flags: str, models: tuple[Path, ...] = ()) -> Iterator[Callable[..., Any]]:
    """``ask(key, method, path, body) -> (status, JSON)`` of a server of its own with the keys "victim" and "greedy": of
    the model that is served, or of ``models``."""
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        named = [] if models else ["--model-name", "target"]
        keys = ["--api-keys", "victim,greedy", "--session-len", "512"]
        first, *others = models or (target.model,)
        with servers.Server(first, [*map(str, others), *named, *keys, *flags], Path(folder) / "log") as server:

            def ask(key: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
                data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
                told = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
                told |= {name.replace("_", "-"): value for name, value in headers.items()}
                request = urllib.request.Request(server.url + path, data, told, method=method)
                try:
                    with urllib.request.urlopen(request, timeout=LONG) as reply:
                        return reply.status, json.load(reply)
                except urllib.error.HTTPError as error:
                    return error.code, json.load(error)

            ask.url = server.url  # type: ignore[attr-defined]
            yield ask


def said(owner: str) -> dict[str, str]:
    """A header as a proxy sends it that asks for ``owner``."""
    return {"X_Toolkit_User": json.dumps({"id": owner, "owner": owner, "priority": -100})}


def others_responses(target: Target) -> Iterator[str]:
    """Read, gone on from and deleted by another key, under any name."""
    with another(target) as ask:
        body = {"model": "target", "input": "My secret.", "max_output_tokens": 4}
        id = ask("victim", "POST", "/v1/responses", body)[1]["id"]
        digest = hashlib.sha256(b"victim").hexdigest()
        for headers in ({}, said(digest), said(digest[:32])):
            tries: list[tuple[str, str, Any]] = [
                ("GET", "", None),
                ("GET", "/input_items", None),
                ("POST", "/cancel", {}),
                ("DELETE", "", None),
            ]
            found = [
                ask("greedy", method, f"/v1/responses/{id}{path}", data, **headers) for method, path, data in tries
            ]
            found.append(ask("greedy", "POST", "/v1/responses", {**body, "previous_response_id": id}, **headers))
            statuses = [status for status, _ in found]
            yield ("" if statuses == [404, 404, 404, 404, 400] else LOST) + f"another's response: {statuses}"
        status = ask("victim", "GET", f"/v1/responses/{id}")[0]
        yield ("" if status == 200 else LOST) + f"its own: {status}"


def pushed_out(target: Target) -> Iterator[str]:
    """300 turns and 1,060 responses of one key, each under another name, beside one of another."""
    with another(target) as ask:
        respond = {"model": "target", "input": "x", "max_output_tokens": 1}
        turn = {"model": "target", "prompt": "x", "interactive_mode": True, "max_tokens": 1}
        id = ask("victim", "POST", "/v1/responses", respond)[1]["id"]
        ask("victim", "POST", "/v1/chat/interactive", {**turn, "session_id": 7})
        for i in range(300):
            ask("greedy", "POST", "/v1/chat/interactive", {**turn, "session_id": i}, **said(f"{i:08x}"))
        for i in range(1060):
            ask("greedy", "POST", "/v1/responses", respond, **said(f"{i:08x}"))
        _, told = ask("victim", "POST", "/v1/chat/interactive", {**turn, "session_id": 7})
        yield ("" if told.get("history_tokens") else LOST) + f"the victim's conversation: {told}"
        status, _ = ask("victim", "GET", f"/v1/responses/{id}")
        yield ("" if status == 200 else LOST) + f"the victim's response: {status}"
        status, told = ask("greedy", "POST", "/v1/chat/interactive", {**turn, "session_id": 0}, **said(f"{0:08x}"))
        yield ("" if status == 410 else LOST) + f"the greedy key's first conversation: {status}: {told}"


def swapped(target: Target) -> Iterator[str]:
    """A long answer of one model and a request for another; meanwhile others ask the first."""
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        models = Path(folder, "one"), Path(folder, "two")
        for model in models:
            shutil.copytree(target.model, model, copy_function=os.link)
        memory = str(int(1.5 * sum(file.stat().st_size for file in target.model.iterdir())))
        with another(target, "--memory", memory, models=models) as ask, ThreadPoolExecutor(2) as threads:

            def text(model: str, tokens: int) -> tuple[float, int]:
                began = time.monotonic()
                body = {"model": model, "prompt": "x", "max_tokens": tokens, "ignore_eos": True}
                status, _ = ask("victim", "POST", "/v1/completions", body)
                return time.monotonic() - began, status

            text("one", 1)
            long = threads.submit(text, "one", 480)
            time.sleep(0.2)
            other = threads.submit(text, "two", 4)
            time.sleep(0.2)
            answers = []
            while not long.done():
                answers.append(text("one", 4))
            late = [seconds for seconds, _ in answers[:-1]]
            fine = len(late) > 1 and max(late) < long.result()[0] / 2 and other.result()[1] == 200
            yield ("" if fine else LOST) + (
                f"{len(answers)} chats beside an answer of {long.result()[0]:.1f} s, the slowest after "
                f"{max(late, default=0):.1f} s; the other model after {other.result()[0]:.1f} s"
            )
