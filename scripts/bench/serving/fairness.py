"""What a modest user waits for beside greedy ones: chats of 16 tokens, one after the other, while others' requests run.

    python scripts/bench/serving/fairness.py MODEL --only embeddings --json fairness.json
    python scripts/bench/serving/fairness.py --url http://127.0.0.1:8000   # one that runs, its model called target

A row a scenario: seconds to the first token of the chats (alone, then median and longest beside it), and tokens a
second of everything, until the greedy requests and all chats are answered: those that had no turn before come then.
Every request has a connection of its own: each is a user.
What a server does not do at all (vectors of a chat model, on others') is no row.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from traffic import servers

WORDS = "the a river lamp seven keeper old wrote of and bright storm house under glass winter letter quiet".split()
GOAL = (3.0, 0.3)  # times what it takes alone, and seconds more
PATIENCE = 900.0
Body = tuple[str, dict[str, Any]]  # path, and what is sent


def text(seed: Any, words: int) -> str:
    draw = random.Random(str(seed))
    return " ".join(draw.choice(WORDS) + str(draw.randrange(100)) * (draw.random() < 0.1) for _ in range(words))


def embeddings(user: int, scale: float) -> Body:
    return "/v1/embeddings", {"input": [text(("e", user, i), 1000) for i in range(round(40 * scale))]}


def completions(user: int, scale: float) -> Body:
    prompts = [text(("c", user, i), 1000) for i in range(round(100 * scale))]
    return "/v1/completions", {"prompt": prompts, "max_tokens": 16, "ignore_eos": True}


def choices(user: int, scale: float) -> Body:
    said = {"prompt": text(("n", user), 50), "n": 128, "max_tokens": max(8, round(128 * scale))}
    return "/v1/completions", {**said, "temperature": 1.0, "ignore_eos": True}


def prompts(user: int, scale: float) -> Body:
    asked = [text(("p", user, i), 300) for i in range(20)]
    return "/v1/completions", {"prompt": asked, "max_tokens": max(8, round(64 * scale)), "ignore_eos": True}


# name: (what a greedy user asks for, how many such users)
SCENARIOS: dict[str, tuple[Callable[[int, float], Body], int]] = {
    "embeddings": (embeddings, 1),
    "completions": (completions, 1),
    "n=128": (choices, 1),
    "8 x 20 prompts": (prompts, 8),
    "8 x embeddings": (embeddings, 8),
    "8 x completions": (completions, 8),
    "8 x n=128": (choices, 8),
}


class Refused(Exception):
    """A server answered with an error."""


def ask(address: str, path: str, body: dict[str, Any]) -> Any:
    """The answer to one request over a connection of its own."""
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        said = json.loads(reply.read())
    finally:
        connection.close()
    if reply.status != 200:
        raise Refused(f"{path}: {reply.status}: {said}")
    return said


def chat(address: str, number: int) -> tuple[float, int]:
    """Seconds to the first token of a chat, and all tokens that it cost."""
    body = {
        "model": "target",
        "messages": [{"role": "user", "content": f"Count to {number}."}],
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(address, timeout=PATIENCE)
    began, first, tokens = time.perf_counter(), 0.0, 0
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                piece = json.loads(line[6:])
                tokens = (piece.get("usage") or {}).get("total_tokens", tokens)
                delta = piece["choices"][0]["delta"] if piece["choices"] else {}
                if not first and any(delta.get(k) for k in ("content", "reasoning_content", "tool_calls")):
                    first = time.perf_counter()
    finally:
        connection.close()
    return first - began, tokens


def measure(address: str, name: str, args: argparse.Namespace, numbers: Any) -> dict[str, Any]:
    make, users = SCENARIOS[name]
    scale = args.scale if users == 1 else args.scale / 4
    bodies = [make(user, scale) for user in range(users)]
    alone = sorted(chat(address, next(numbers))[0] for _ in range(args.chats))
    answers: list[Any] = []
    refused: list[str] = []

    def be_greedy(path: str, body: dict[str, Any]) -> None:
        try:
            answers.append(ask(address, path, {"model": "target", **body}))
        except (OSError, http.client.HTTPException, Refused) as error:
            refused.append(str(error)[:300])

    began = time.perf_counter()
    greedy = [threading.Thread(target=be_greedy, args=body) for body in bodies]
    for thread in greedy:
        thread.start()
    time.sleep(args.first)
    waits, tokens = [], 0
    while any(thread.is_alive() for thread in greedy) and len(waits) < args.chats:
        waited, cost = chat(address, next(numbers))
        waits.append(waited)
        tokens += cost
        time.sleep(args.pause)
    for thread in greedy:
        thread.join()
    for _ in range(len(waits), args.chats):  # the same work, however long they had to wait
        tokens += chat(address, next(numbers))[1]
    seconds = time.perf_counter() - began
    tokens += sum(said["usage"]["total_tokens"] for said in answers)
    if refused:
        raise Refused(f"{name}: {len(refused)} of {users} greedy requests failed: {refused[0]}")
    waits.sort()
    median = alone[len(alone) // 2]
    return {
        "scenario": name,
        "alone": median,
        "median": waits[len(waits) // 2],
        "longest": waits[-1],
        "goal": GOAL[0] * median + GOAL[1],
        "tokens/s": tokens / seconds,
        "seconds": seconds,
        "chats beside": len(waits),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--url", help="of a server that runs already, instead of MODEL")
    parser.add_argument("--only", action="append", choices=list(SCENARIOS), help="repeat it for several")
    parser.add_argument("--chats", type=int, default=12, help="of each scenario")
    parser.add_argument("--first", type=float, default=1.0, help="seconds from the greedy requests to the first chat")
    parser.add_argument("--pause", type=float, default=0.3, help="seconds from one chat to the next")
    parser.add_argument("--scale", type=float, default=1.0, help="of the greedy requests' work; a quarter of it for 8")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--flag", action="append", default=[], help="of the server; repeatable")
    args = parser.parse_args()
    from toolkit.commands.output import stderr, stdout, table

    if bool(args.model) == bool(args.url):
        parser.error("expected MODEL or --url")
    rows = []
    with contextlib.ExitStack() as stack:
        url = args.url
        if not url:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fairness-")))
            flags = ["--model-name", "target", "--session-len", "4096", *args.flag]
            url = stack.enter_context(servers.Server(args.model, flags, folder / "log")).url
        address, numbers = url.removeprefix("http://"), iter(range(10, 1 << 20))
        path, body = completions(99, 0.04)
        ask(address, path, {"model": "target", **body})  # it learns its pace
        for name in args.only or SCENARIOS:
            try:
                rows.append(measure(address, name, args, numbers))
                stderr().print(str(rows[-1]))
            except Refused as error:
                stderr().print(str(error))
    shown = [
        (r["scenario"], *(f"{r[k]:.2f}" for k in ("alone", "median", "longest", "goal")), f"{r['tokens/s']:.0f}")
        for r in rows
    ]
    names = ("scenario", "alone, s", "beside, median", "beside, longest", "goal", "tokens/s")
    stdout().print(table("First token of a chat of 16 tokens", names, shown))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    return int(any(r["longest"] > r["goal"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
