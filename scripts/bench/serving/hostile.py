#!/usr/bin/env python3
"""Hostile schemas, many at once, beside four streams and honest schemas: how soon each is told, what the streams see.

    python scripts/bench/serving/hostile.py demo --floods 8,32 --rounds 3

A round is: four streams alone for four seconds; the same with a flood of hostile formats, and an honest one every half
second, for as long at the least; alone again. Printed are the load of the machine, the times of the 400s and of the
honest answers, other answers by their status, and p50 and p99 of the gaps between a stream's pieces before, in the
first four seconds, and in all until the last answer.
Every format is new to the server.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from traffic.servers import Server

STREAMS, QUIET_S = 4, 4.0
draw = random.Random(0)


def schema(value: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex_schema", "regex_schema": pattern}


def properties(count: int) -> dict[str, Any]:
    return {f"p{draw.randrange(10**6)}_{i}": {"type": "string"} for i in range(count)}


def lengths(count: int) -> dict[str, Any]:
    """Texts of lengths that no schema had before."""
    pairs = [(draw.randrange(100), 150 + draw.randrange(10**4)) for _ in range(count)]
    return {f"t{i}": {"type": "string", "minLength": a, "maxLength": b} for i, (a, b) in enumerate(pairs)}


def hostile(number: int) -> dict[str, Any]:
    """One of several kinds, like no other."""
    some = draw.randrange(10**6)
    kinds = [
        lambda: regex(f"{some}[^x]{{1,{1000 + some % 7000}}}"),
        lambda: regex(f"{some}" + "(ab|cd)?" * 900),
        lambda: schema({"type": "object", "properties": properties(990)}),
        lambda: regex(f"{some}((a{{1,300}}){{1,300}}){{1,300}}"),
        lambda: schema({"type": "object", "properties": {f"x{some}": {"pattern": "a?" * 400}}}),
        lambda: regex(f"(a*)*b{some}"),
        lambda: regex(f"[^a]{{1,{60 + some % 60}}}{some}[^b]{{1,70}}[^c]{{1,70}}"),  # of those that have to be tried
        lambda: schema({"type": "object", "properties": lengths(6)}),
        lambda: {"type": "grammar", "grammar": f'root ::= "{some}" x\nx ::= {"[^y]? " * 300}'},
    ]
    return kinds[number % len(kinds)]()


def honest() -> dict[str, Any]:
    wanted = properties(12)
    return schema({"type": "object", "properties": wanted, "required": list(wanted)[:6]})


class Client:
    def __init__(self, url: str, model: str) -> None:
        self._address, self._model = url.removeprefix("http://"), model

    def ask(self, response_format: dict[str, Any]) -> tuple[int, float]:
        """Status, and seconds until it is there."""
        body = {"model": self._model, "prompt": "x", "max_tokens": 1, "response_format": response_format}
        connection, began = http.client.HTTPConnection(self._address, timeout=180), time.perf_counter()
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            return connection.getresponse().status, time.perf_counter() - began
        finally:
            connection.close()

    def stream(self, over: threading.Event, gaps: list[float]) -> None:
        body = {"model": self._model, "prompt": "Once", "max_tokens": 400, "ignore_eos": True, "stream": True}
        while not over.is_set():
            connection = http.client.HTTPConnection(self._address, timeout=180)
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            last = 0.0
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    now = time.perf_counter()
                    if last:
                        gaps.append(now - last)
                    last = now
                if over.is_set():
                    break
            connection.close()


def percentiles(values: list[float], *of: int) -> list[float]:
    ordered = sorted(values) or [0.0]
    return [round(1000 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 1) for p in of]


def one_round(client: Client, flood: int) -> dict[str, Any]:
    over, gaps, good = threading.Event(), list[float](), list[tuple[int, float]]()
    readers = [threading.Thread(target=client.stream, args=(over, gaps)) for _ in range(STREAMS)]
    for reader in readers:
        reader.start()
    time.sleep(QUIET_S / 2)
    gaps.clear()
    time.sleep(QUIET_S)
    before = percentiles(gaps, 50, 99)
    gaps.clear()
    told: list[tuple[int, float]] = []
    attack = [threading.Thread(target=lambda i=i: told.append(client.ask(hostile(i)))) for i in range(flood)]
    for thread in attack:
        thread.start()
    end, first = time.perf_counter() + QUIET_S, [0.0, 0.0]
    while any(thread.is_alive() for thread in attack) or time.perf_counter() < end:
        good.append(client.ask(honest()))
        time.sleep(0.5)
        if not first[0] and time.perf_counter() > end:
            first = percentiles(gaps, 50, 99)
    during = percentiles(gaps, 50, 99)
    first = first if first[0] else during
    gaps.clear()
    time.sleep(QUIET_S)
    after = percentiles(gaps, 50, 99)
    over.set()
    for reader in readers:
        reader.join()
    refused = [seconds for status, seconds in told if status == 400]
    return {
        "flood": flood,
        "load": round(os.getloadavg()[0], 1),
        "statuses": dict(Counter(status for status, _ in told)),
        "refused_ms_p50_p90_max": percentiles(refused, 50, 90, 100),
        "others_s": [round(seconds, 2) for status, seconds in told if status != 400],
        "honest": [(status, round(seconds, 2)) for status, seconds in good],
        "gap_ms_p50_p99": {"before": before, "first_4_s": first, "during": during, "after": after},
        "p99_times": [round(p99 / max(before[1], 0.1), 2) for _, p99 in (first, during)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--floods", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Server(args.model, [], Path(folder) / "server.log") as server:
        client = Client(server.url, server.get("/v1/models")["data"][0]["id"])
        client.ask(honest())
        for _ in range(args.rounds):
            for flood in args.floods.split(","):
                print(json.dumps(one_round(client, int(flood))), flush=True)


if __name__ == "__main__":
    main()
