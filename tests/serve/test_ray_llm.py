"""Our server class under a real ``ray.serve.llm``, whose requests and answers are vLLM's: ``pip install ray[llm]``."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fastapi
import httpx2 as httpx
import pytest

from tests.serve.asking import ended

pytest.importorskip("ray.serve.llm", exc_type=ImportError)
if tuple(map(int, fastapi.__version__.split(".")[:2])) >= (0, 137):
    pytest.skip(
        "Ray's own routes ask for a query field `self` with it, and vLLM takes none so new", allow_module_level=True
    )
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]

DRIVER = """
import json, sys, time
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app
from toolkit.base.ray_cluster import connect

connect(None, 4)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
config = LLMConfig(**json.loads(sys.argv[2]))
ingress = {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}, "ray_actor_options": {"num_cpus": 0}}
try:
    serve.run(build_openai_app({"llm_configs": [config], "ingress_deployment_config": ingress}))
except Exception as error:
    told = [one.message for app in serve.status().applications.values() for one in app.deployments.values()]
    sys.exit(f"FAILED {error} {told}")
print("it is ready", flush=True)
time.sleep(3600)
"""
OPTIONS = {"session_len": 1024, "max_batch_size": 8, "cache_max_entry_count": 256}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def config(model: Path, **engine: object) -> str:
    told = {
        "model_loading_config": {"model_id": "m", "model_source": str(model)},
        "server_cls": "toolkit.serve.ray.llm:Server",
        "engine_kwargs": engine,
        "deployment_config": {"num_replicas": 1, "max_ongoing_requests": 16},
    }
    return json.dumps(told)


@pytest.fixture(scope="module")
def http(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    log, port = tmp_path_factory.mktemp("llm") / "driver.log", free_port()
    with log.open("wb") as out:
        command = [sys.executable, "-c", DRIVER, str(port), config(packed, **OPTIONS)]
        process = subprocess.Popen(command, stdout=out, stderr=out)
    with ended(process):
        end = time.monotonic() + 400
        while "it is ready" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.5)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as client:
            yield client


def test_answers_come_whole_and_as_streams(http: httpx.Client) -> None:
    asked = {"model": "m", "prompt": "abc", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    whole = http.post("/v1/completions", json=asked).json()
    assert whole["usage"]["completion_tokens"] == 12 and whole["model"] == "m"
    with http.stream("POST", "/v1/completions", json=asked | {"stream": True}) as reply:
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]" and lines.count("[DONE]") == 1
    parts = [json.loads(line) for line in lines[:-1]]
    assert "".join(choice["text"] for part in parts for choice in part["choices"]) == whole["choices"][0]["text"]


def test_conversations_tokens_and_names(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]
    asked = {"model": "m", "messages": messages, "max_tokens": 4, "temperature": 0}
    told = http.post("/v1/chat/completions", json=asked).json()
    assert told["choices"][0]["message"]["role"] == "assistant" and told["usage"]["completion_tokens"] <= 4
    tokens = http.post("/tokenize", json={"model": "m", "prompt": "abc"}).json()["tokens"]
    assert "abc" in http.post("/detokenize", json={"model": "m", "tokens": tokens}).json()["prompt"]
    assert [card["id"] for card in http.get("/v1/models").json()["data"]] == ["m"]


def test_json_answers_keep_to_their_schema(http: httpx.Client) -> None:
    """vLLM calls the schema otherwise in Python than in JSON."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = {"model": "m", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 60, "response_format": form}
    told = http.post("/v1/chat/completions", json=asked)
    assert told.status_code == 200, told.text
    assert json.loads(told.json()["choices"][0]["message"]["content"])["a"] in (1, 2)


def test_what_we_refuse_comes_with_our_words_and_status(http: httpx.Client) -> None:
    asked = {"model": "m", "prompt": "abc " * 2000, "max_tokens": 4}
    refused = http.post("/v1/completions", json=asked)
    assert refused.status_code == 400 and "expected at most 1023" in refused.text, refused.text


def test_an_option_that_there_is_not_is_named(packed: Path) -> None:
    command = [sys.executable, "-c", DRIVER, str(free_port()), config(packed, mystery=1)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1 and "engine_kwargs: " in done.stderr and "mystery" in done.stderr
