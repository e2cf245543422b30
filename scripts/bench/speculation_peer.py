"""llama.cpp's server and vLLM with their guesses and without, for speculation.py."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from llama_server import server

from toolkit import GenerationConfig

VLLM = Path(__file__).parent / "peers" / "peer_vllm_answers.py"
Ask = Callable[[str, GenerationConfig], tuple[str, int, float]]


@contextmanager
def peers(python: str, gguf: str, ways: list[str], draft: str | None, slots: int) -> Iterator[dict[str, Ask]]:
    """Servers in the environment of ``python``, the one that guesses nothing first. ``draft``: a smaller model."""
    with ExitStack() as stack:
        more = [] if draft is None else ["--draft", draft]
        options = {way: ["--speculative", way, *more] if way else [] for way in ("", *ways)}
        running = {
            way: stack.enter_context(server(python, gguf, "--slots", str(slots), *more))
            for way, more in options.items()
        }
        yield {f"llama.cpp {way or 'off'}": _ask(one.url) for way, one in running.items()}


@contextmanager
def vllm(python: str, model: str) -> Iterator[dict[str, Ask]]:
    """vLLM in the environment of ``python``, without guesses and with those that it finds in the text."""
    with ExitStack() as stack:
        found = {}
        for way in ("off", "ngram"):
            command = [python, str(VLLM), model, *(["--speculative", way] if way != "off" else [])]
            process = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            found[f"vllm {way}"] = _ask_lines(process)
        yield found


def _ask_lines(process: subprocess.Popen[str]) -> Ask:
    """As ``_ask``, of a program that answers each line by one. One request at a time."""

    def ask(prompt: str, config: GenerationConfig) -> tuple[str, int, float]:
        assert process.stdin is not None and process.stdout is not None
        fields = {"prompt": prompt, "max_tokens": config.max_new_tokens, "response_format": config.response_format}
        print(json.dumps(fields), file=process.stdin, flush=True)
        line = process.stdout.readline()
        if not line:
            raise SystemExit("vLLM has ended; what it said stands above")
        text, count, seconds = json.loads(line)
        return text, count, seconds

    return ask


def _ask(url: str) -> Ask:
    """As ``speculation.ask``: (answer, tokens behind the first ones, seconds that they took)."""

    def ask(prompt: str, config: GenerationConfig) -> tuple[str, int, float]:
        fields: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], "stream": True, "temperature": 0}
        fields |= {"max_tokens": config.max_new_tokens, "timings_per_token": True}
        if config.response_format is not None:
            fields["response_format"] = config.response_format
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(fields).encode())
        request.add_header("Content-Type", "application/json")
        text, first, begun, count = "", 0, 0.0, 0
        with urllib.request.urlopen(request, timeout=600) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
                count = max(count, event.get("timings", {}).get("predicted_n", 0))
                if not first and count:
                    first, begun = count, time.perf_counter()
        return text, count - first, time.perf_counter() - begun

    return ask
