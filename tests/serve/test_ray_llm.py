"""Our engine as the ``server_cls`` of a real ``ray.serve.llm`` (which wants vLLM or SGLang to be installed)."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

pytest.importorskip("ray.serve.llm", exc_type=ImportError)
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]

APPLICATION = """
import json, signal, sys
import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app
model, port = sys.argv[1], int(sys.argv[2])
ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200 << 20)
serve.start(http_options={"host": "127.0.0.1", "port": port})
config = LLMConfig(
    model_loading_config={"model_id": "m", "model_source": model},
    engine_kwargs=json.loads(sys.argv[3]),
    accelerator_config={"kind": "cpu"},
    server_cls="toolkit.serve.ray.llm.ToolkitServer",
)
serve.run(build_openai_app({"llm_configs": [config]}), blocking=False)
print("READY", flush=True)
signal.sigwait({signal.SIGTERM})
serve.shutdown()
ray.shutdown()
"""
KWARGS = {"session_len": 256, "max_batch_size": 4, "cache_max_entry_count": 64}


@pytest.fixture(scope="module")
def url(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = int(sock.getsockname()[1])
    log = tmp_path_factory.mktemp("llm") / "log"
    command = [sys.executable, "-c", APPLICATION, str(packed), str(port), json.dumps(KWARGS)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        end = time.monotonic() + 300
        while "READY" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()


def test_answers_are_those_of_our_own_server(url: str, packed: Path, server_on: Any) -> None:
    from toolkit import TurbomindEngineConfig
    from toolkit.engine.process.frontend import AsyncEngine

    theirs = httpx.Client(base_url=url, timeout=120, trust_env=False)
    assert [card["id"] for card in theirs.get("/v1/models").json()["data"]] == ["m"]
    with AsyncEngine.open(packed, backend_config=TurbomindEngineConfig(**KWARGS)) as engine, server_on(engine) as own:
        ours = httpx.Client(base_url=own.url, timeout=60, trust_env=False)
        for more in ({"temperature": 0}, {"temperature": 1.0, "seed": 4, "n": 2}):
            body = {"prompt": "abc " * 8, "max_tokens": 9, **more}
            found, right = (
                http.post("/v1/completions", json=body | extra).json()
                for http, extra in ((theirs, {"model": "m"}), (ours, {}))
            )
            assert [c["text"] for c in found["choices"]] == [c["text"] for c in right["choices"]]
            assert found["usage"]["completion_tokens"] == right["usage"]["completion_tokens"]
        body = {"model": "m", "prompt": "abc", "max_tokens": 9, "temperature": 0}
        text = theirs.post("/v1/completions", json=body).json()["choices"][0]["text"]
        with theirs.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
            lines = [line for line in reply.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == text
    refused = theirs.post("/v1/completions", json={"model": "m", "prompt": "a " * 600, "max_tokens": 2})
    assert refused.status_code == 400 and "session" in refused.text
    assert theirs.post("/v1/completions", json={"model": "x", "prompt": "a"}).status_code == 404
