"""What a user does with a model, on a GPU: convert, chat, serve many at once, profile.

    scripts/gpu_user work/demo-awq --json as_user.json

Each step is the command itself, in a process of its own. The JSON is written again after every row. A step that fails
is a row with an error, and the others run. A server's answers to many at once stand beside those given one by one.
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]
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
    return [sys.executable, "-m", "toolkit", *arguments]


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


class Server:
    """``tool serve api_server`` on a port of its own; ``log``: what it says."""

    def __init__(self, engine: Path, options: list[str], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._log = log.open("w")
        command = tool("serve", "api_server", str(engine), "--server-port", str(self.port), *options)
        self._process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def wait(self, limit: float) -> float:
        """Seconds until it is ready; TimeoutError or RuntimeError where it is not."""
        begun = time.perf_counter()
        while time.perf_counter() - begun < limit:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with exit code {self._process.returncode}")
            try:
                if self.get("/health")[0] == 200:
                    return time.perf_counter() - begun
            except OSError:
                pass
            time.sleep(0.1)
        raise TimeoutError(f"the server was not ready after {limit:.0f} s")

    def get(self, path: str) -> tuple[int, str]:
        """(status, body)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def ask(self, prompt: str, **more: Any) -> Row:
        """The whole answer to a chat request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        body = {"model": "", "messages": [{"role": "user", "content": prompt}], "max_tokens": 64, "temperature": 0}
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body | more), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        found: Row = json.loads(answer.read())
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {found}")
        return found

    def stop(self) -> float:
        """Seconds until SIGTERM ended it; RuntimeError where it does not end well."""
        begun = time.perf_counter()
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise RuntimeError("the server did not end within 20 s of SIGTERM") from None
        if code:
            raise RuntimeError(f"the server ended with exit code {code}")
        return time.perf_counter() - begun


def text(answer: Row) -> str:
    """Of its first choice."""
    return str(answer["choices"][0]["message"]["content"])


def alike(server: Server, name: str, streams: int, **sampling: Any) -> Row:
    """How many of ``streams`` answers at once are those that came one after another."""
    asked = [(PROMPTS[i % len(PROMPTS)], {"seed": i} if sampling else {}) for i in range(streams)]
    alone = {}
    for prompt, seed in asked:
        key = (prompt, seed.get("seed"))
        if key not in alone:
            alone[key] = text(server.ask(prompt, **sampling, **seed))
    begun = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        found = list(pool.map(lambda one: text(server.ask(one[0], **sampling, **one[1])), asked))
    seconds = time.perf_counter() - begun
    same = sum(answer == alone[prompt, seed.get("seed")] for (prompt, seed), answer in zip(asked, found, strict=True))
    return {
        "name": name,
        "value": same,
        "unit": f"of {streams} as alone",
        "seconds": round(seconds, 2),
        "first": found[0],
    }


def rules(server: Server) -> Row:
    """A schema, several answers, log-probabilities and a stop string; what each gave."""
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    made = text(server.ask("Name a city and how many people live there, as JSON.", response_format=form))
    several = server.ask(PROMPTS[2], n=3, temperature=1.0, seed=1)
    likely = server.ask(PROMPTS[0], logprobs=True, top_logprobs=2, max_tokens=4)
    stopped = server.ask(PROMPTS[10], stop=["\n"])
    row: Row = {"name": "rules", "unit": "of 4 kept"}
    kept = (
        set(json.loads(made)) == {"city", "people"},
        len({choice["message"]["content"] for choice in several["choices"]}) == 3,
        len(likely["choices"][0]["logprobs"]["content"]) == 4,
        "\n" not in text(stopped),
    )
    return row | {"value": sum(kept), "json": made}


def served(engine: Path, folder: Path, options: argparse.Namespace) -> Iterator[Row]:
    """A server's start, its answers, its speed and its end."""
    server = Server(engine, ["--device", options.device], folder / "server.txt")
    try:
        yield {"name": "server, start", "value": round(server.wait(options.limit), 2), "unit": "s"}
        yield profiled("api_server", f"http://127.0.0.1:{server.port}", folder, options)
        for make in (
            lambda: alike(server, "greedy", options.streams),
            lambda: alike(server, "sampled", options.streams, temperature=0.8, top_p=0.9),
            lambda: rules(server),
        ):
            yield guarded(make)
        yield {"name": "metrics", "value": len(server.get("/metrics")[1].splitlines()), "unit": "lines"}
    finally:
        ended = server.stop()
    yield {"name": "server, end", "value": round(ended, 2), "unit": "s"}


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
        try:
            yield from served(engine, folder, options)
        except Exception as error:
            log = (folder / "server.txt").read_text()[-600:]
            yield {"name": "server", "error": f"{type(error).__name__}: {error}; its log ends: {log}"}
        yield profiled("throughput", str(engine), folder, options, ["--device", options.device])


def main() -> int:
    """Run the steps; the exit code is 1 where one failed."""
    parser = argparse.ArgumentParser("gpu_user", description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a checkpoint, or what `tool lite` made of one")
    parser.add_argument("--json", type=Path, default=Path("as_user.json"), help="where rows go, one after another")
    parser.add_argument("--device", default="cuda", help="as `tool chat` takes it; cpu tries this script")
    parser.add_argument("--streams", type=int, default=64, help="requests at once")
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds that a command may take, or a server until it is ready"
    )
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
    sys.path.insert(0, str(SCRIPTS))
    sys.exit(main())
