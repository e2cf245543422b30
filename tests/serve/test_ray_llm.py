"""Our server class under a real ``ray.serve.llm``, whose requests and answers are vLLM's: ``pip install ray[llm]``."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.serve.asking import ended

pytest.importorskip("ray.serve.llm", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]

DRIVER = """
import json, sys, time
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app
from toolkit.base.ray_cluster import connect

connect(None, 4)
serve.start(http_options={"host": "127.0.0.1", "port": 0})
config = LLMConfig(**json.loads(sys.argv[1]))
ingress = {"autoscaling_config": {"min_replicas": 1, "max_replicas": 1}, "ray_actor_options": {"num_cpus": 0}}
try:
    serve.run(build_openai_app({"llm_configs": [config], "ingress_deployment_config": ingress}))
except Exception as error:
    sys.exit(f"FAILED {error}")
from ray.serve.api import get_application_url
print("ready at", get_application_url(), flush=True)
time.sleep(3600)
"""
OPTIONS = {"session_len": 1024, "max_batch_size": 8, "cache_max_entry_count": 256}


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
    log = tmp_path_factory.mktemp("llm") / "driver.log"
    with log.open("wb") as out:
        command = [sys.executable, "-c", DRIVER, config(packed, **OPTIONS)]
        process = subprocess.Popen(command, stdout=out, stderr=out)
    with ended(process):
        end = time.monotonic() + 400
        while "ready at " not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.5)
        url = log.read_text().rpartition("ready at ")[2].split()[0]
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
            yield client


def test_answers_come_whole_and_as_streams(http: httpx.Client) -> None:
    asked = {"model": "m", "prompt": "abc", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    whole = http.post("/v1/completions", json=asked).json()
    assert whole["usage"]["completion_tokens"] == 12 and whole["model"] == "m"
    parts = []
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


def test_what_we_refuse_comes_with_our_words_and_status(http: httpx.Client) -> None:
    asked = {"model": "m", "prompt": "abc " * 2000, "max_tokens": 4}
    refused = http.post("/v1/completions", json=asked)
    assert refused.status_code == 400 and "1,024" in refused.text, refused.text


def test_an_option_that_there_is_not_is_named(packed: Path) -> None:
    command = [sys.executable, "-c", DRIVER, config(packed, mystery=1)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1 and "engine_kwargs: mystery" in done.stdout + done.stderr
