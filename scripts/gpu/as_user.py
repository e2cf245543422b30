"""What a user does with a model, on a GPU: convert, chat, serve many at once, profile.

    scripts/gpu_user work/demo-awq --json as_user.json

Each step is the command itself, in a process of its own. The JSON is written again after every row. A step that fails
is a row with an error, and the others run. A server's answers to many at once stand beside those given one by one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(SCRIPTS))
from traffic.servers import TOOL, Served  # noqa: E402

Row = dict[str, Any]
PROMPTS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write a short poem about rain.",
    "Why is the sky blue?",
    "Explain what a compiler does.",
    "How do I boil an egg?",
    "What is 12 times 12?",
    "Tell me about the Romans.",
    "Write a Python function that adds two numbers.",
    "What does a heart do?",
    "List the planets.",
    "What is photosynthesis?",
    "Give me advice for an interview.",
    "Who wrote Hamlet?",
    "What is a prime number?",
    "Describe a forest in autumn.",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "people": {"type": "integer", "minimum": 0, "maximum": 99999999},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}


def tool(*arguments: str) -> list[str]:
    """The command line of ``tool``."""
    return [*TOOL, *arguments]


def timed(name: str, command: list[str], limit: float) -> Row:
    """A row with the seconds of ``command``; of a chat what it printed."""
    begun = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {"name": name, "error": f"took longer than {limit:.0f} s"}
    row: Row = {"name": name, "value": round(time.perf_counter() - begun, 2), "unit": "s"}
    if name.startswith("chat"):
        row["said"] = done.stdout[-1500:]
    if done.returncode:
        row["error"] = f"exit code {done.returncode}: {done.stderr[-600:]}"
    return row


def ask(server: Served, prompt: str, **more: Any) -> Row:
    """The whole answer to a chat request. Raises OSError for a status that is none of success."""
    body = {"model": "", "messages": [{"role": "user", "content": prompt}], "max_tokens": 64, "temperature": 0} | more
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        found: Row = json.load(reply)
    return found


def text(answer: Row) -> str:
    """Of its first choice."""
    return str(answer["choices"][0]["message"]["content"])


def alike(server: Served, name: str, streams: int, **sampling: Any) -> Row:
    """How many of ``streams`` answers at once are those that came one after another."""
    asked = [(PROMPTS[i % len(PROMPTS)], {"seed": i} if sampling else {}) for i in range(streams)]
    alone = {}
    for prompt, seed in asked:
        key = (prompt, seed.get("seed"))
        if key not in alone:
            alone[key] = text(ask(server, prompt, **sampling, **seed))
    begun = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        found = list(pool.map(lambda one: text(ask(server, one[0], **sampling, **one[1])), asked))
    seconds = time.perf_counter() - begun
    same = sum(answer == alone[prompt, seed.get("seed")] for (prompt, seed), answer in zip(asked, found, strict=True))
    return {
        "name": name,
        "value": same,
        "unit": f"of {streams} as alone",
        "seconds": round(seconds, 2),
        "first": found[0],
    }


def rules(server: Served) -> Row:
    """A schema, several answers, log-probabilities and a stop string; what each gave."""
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    made = text(ask(server, "Name a city and how many people live there, as JSON.", response_format=form))
    several = ask(server, PROMPTS[2], n=3, temperature=1.0, seed=1)
    likely = ask(server, PROMPTS[0], logprobs=True, top_logprobs=2, max_tokens=4)
    stopped = ask(server, PROMPTS[10], stop=["\n"])
    row: Row = {"name": "rules", "unit": "of 4 kept"}
    kept = (
        set(json.loads(made)) == {"city", "people"},
        len({choice["message"]["content"] for choice in several["choices"]}) == 3,
        len(likely["choices"][0]["logprobs"]["content"]) == 4,
        "\n" not in text(stopped),
    )
    return row | {"value": sum(kept), "json": made}


def all_alike(row: Row) -> Row:
    """``row`` of ``alike``, with an error where some answer was another."""
    return row if row["unit"] == f"of {row['value']} as alone" else row | {"error": "answers depend on others"}


def served(engine: Path, folder: Path, options: argparse.Namespace, invariant: bool = False) -> Iterator[Row]:
    """A server's start, its answers, its speed and its end; ``invariant``: with ``--batch-invariant``."""
    begun = time.perf_counter()
    words = ["api_server", str(engine), "--server-port", "0", "--device", options.device]
    server = Served([*words, "--batch-invariant"] if invariant else words, folder / "server.txt")
    judge: Callable[[Row], Row] = all_alike if invariant else lambda row: row
    try:
        yield {"name": "server, start", "value": round(time.perf_counter() - begun, 2), "unit": "s"}
        yield profiled("api_server", server.url, folder, options)
        for make in (
            lambda: judge(alike(server, "greedy", options.streams)),
            lambda: judge(alike(server, "sampled", options.streams, temperature=0.8, top_p=0.9)),
            lambda: rules(server),
        ):
            yield guarded(make)
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as reply:
            yield {"name": "metrics", "value": len(reply.read().splitlines()), "unit": "lines"}
    finally:
        begun = time.perf_counter()
        server.close()
    row: Row = {"name": "server, end", "value": round(time.perf_counter() - begun, 2), "unit": "s"}
    yield row | ({"error": f"exit code {code}"} if (code := server.process.returncode) else {})


def profiled(what: str, target: str, folder: Path, options: argparse.Namespace, more: Sequence[str] = ()) -> Row:
    """``tool profile`` of ``target`` with as many at once as ``options`` say: a row with its figures."""
    load = ["--concurrency", str(options.streams), "--num-prompts", str(4 * options.streams)]
    load += ["--dataset-name", "random", "--random-input-len", "128", "--random-output-len", "128"]
    path = folder / f"{what}.json"
    row = timed(f"profile {what}", tool("profile", what, target, *load, *more, "--json", str(path)), options.limit)
    if "error" not in row:
        found = json.loads(path.read_text())
        row["found"] = found[0] if isinstance(found, list) else found
        row |= {"value": round(row["found"]["output_throughput"]), "unit": "tok/s"}
    return row


def guarded(make: Callable[[], Row]) -> Row:
    """What ``make`` gives, or a row with what was wrong."""
    try:
        return make()
    except Exception as error:
        return {"name": "failed", "error": f"{type(error).__name__}: {error}"[:600]}


def steps(options: argparse.Namespace) -> Iterator[Row]:
    """All rows."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = folder / "engine"
        target = ["--target", "cuda-sm80"] if options.device.startswith("cuda") else []
        yield timed("convert", tool("convert", str(options.model), "--dst-path", str(engine), *target), options.limit)
        ask = ("chat", str(engine), "--device", options.device, "--temperature", "0", "--prompt")
        for label in ("chat", "chat again"):  # what the first compiles, the second finds
            yield timed(label, tool(*ask, PROMPTS[0]), options.limit)
        for prefix, invariant in (("", False), ("batch-invariant ", True)):
            try:
                for row in served(engine, folder, options, invariant):
                    yield row | {"name": prefix + row["name"]}
            except (Exception, SystemExit) as error:  # the latter where it does not start
                yield {"name": f"{prefix}server", "error": f"{type(error).__name__}: {error}"[:1000]}
        yield profiled("throughput", str(engine), folder, options, ["--device", options.device])


def main() -> int:
    """Run the steps; the exit code is 1 where one failed."""
    parser = argparse.ArgumentParser("gpu_user", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a checkpoint, or what `tool lite` made of one")
    parser.add_argument("--json", type=Path, default=Path("as_user.json"), help="where rows go, one after another")
    parser.add_argument("--device", default="cuda", help="as `tool chat` takes it; cpu tries this script")
    parser.add_argument("--streams", type=int, default=64, help="requests at once")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that a command may take")
    options = parser.parse_args()
    from gpu.process import write_json

    options.json.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for row in steps(options):
        rows.append(row)
        write_json(options.json, {"rows": rows})
        print(json.dumps(row)[:400], flush=True)
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
