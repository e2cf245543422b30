"""What profiles say of options and engines that cannot be: the whole line."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.refused import refusing
from toolkit import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.errors import ToolkitError, UsageError
from toolkit.profile import generation, ranks
from toolkit.profile.http_client import Client
from toolkit.profile.options import Grid, Load, Prompts, Texts, Traced, Traffic
from toolkit.profile.throughput import image_asks
from toolkit.profile.workload import random_prompts

refused = refusing(UsageError)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (Prompts(num_prompts=0), "num_prompts: expected at least 1, found 0"),
        (Prompts(seed=-1), "seed: expected at least 0, found -1"),
        (Texts(rounds=0), "rounds: expected at least 1, found 0"),
        (Traced(concurrency=0), "concurrency: expected at least 1, found 0"),
        (Traffic(concurrency=(4, 0)), "--concurrency: expected numbers of 1 or more, separated by commas"),
        (
            Traffic(metric_percentiles=(101,)),
            "--metric-percentiles: expected numbers from 0 to 100, separated by commas",
        ),
    ],
)
def test_options(options: Any, told: str) -> None:
    assert refused(options.check) == told


def test_a_vocabulary_of_special_tokens_alone() -> None:
    tokenizer: Any = SimpleNamespace(vocab_size=2, special_ids=frozenset({0, 1}))
    told = "tokenizer: all of its tokens are special, so that no random prompt can be drawn"
    assert refused(lambda: random_prompts(np.random.default_rng(0), tokenizer, 1, 4), ToolkitError) == told


def test_a_batch_that_memory_does_not_hold(tiny_models: Any) -> None:
    config, grid = TurbomindEngineConfig(cache_max_entry_count=2), Grid(1, (1, 4), 8, 4)
    told = "--concurrency 4: memory allows a batch of 2; measure smaller ones, or use --quant-policy 8"
    measured = refused(lambda: generation.measure(str(tiny_models("llama")), grid, engine_config=config), ToolkitError)
    assert measured == told


@pytest.mark.parametrize("kind", ["generation", "ranks"])
def test_a_model_that_fails(kind: str, tiny_models: Any, support: Any, tmp_path: Path) -> None:
    model = str(support("tiny").broken_copy(tiny_models("llama"), tmp_path / "broken"))
    if kind == "generation":
        grid = Grid(1, (2,), 8, 2)
        told = refused(lambda: generation.measure(model, grid, engine_config=TurbomindEngineConfig()), ToolkitError)
        assert told.startswith("concurrency 2: 2 of 2 requests failed: ")
    else:
        config = PytorchEngineConfig(tp=2, device_type="cpu")
        told = refused(
            lambda: ranks.measure(
                model, Traced(concurrency=2, prompt_tokens=8, completion_tokens=2), engine_config=config
            ),
            ToolkitError,
        )
        assert told.startswith("concurrency 2: 2 of 2 requests failed: ")


def test_pictures_that_pass_the_session(tiny_models: Any) -> None:
    from toolkit.artifacts.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.open(tiny_models("qwen2_vl"))
    engine: Any = SimpleNamespace(blind=False, tokenizer=tokenizer, session_len=64)
    load = Load(dataset="image", num_prompts=1, image_size="40x30", random_input_len=60, random_output_len=8)
    told = refused(lambda: image_asks(load, engine))
    assert told.endswith("tokens with its 1 image(s) + --random-output-len 8: they pass the session of 64 tokens")


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, Any]]]:
    """(url, what it answers: status and body)."""
    says: dict[str, Any] = {}

    class Odd(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(says["status"])
            self.end_headers()
            self.wfile.write(says["body"])

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Odd) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_address[1]}", says
        found.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (401, b'{"error": {"message": "no key"}}', "HTTP 401: no key"),
        (200, b"[]", "expected OpenAI's list of models"),
        (200, b"<html>", "expected OpenAI's list of models"),
    ],
)
def test_servers_that_name_no_models(server: Any, status: int, body: bytes, told: str) -> None:
    url, says = server
    says.update(status=status, body=body)
    assert refused(lambda: asyncio.run(Client(url).choose_model()), ToolkitError) == f"{url}/v1/models: {told}"
