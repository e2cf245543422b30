"""``toolkit.serve(model)``: a server in a process of its own, as LMDeploy has it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import toolkit
from toolkit import ChatTemplateConfig, PytorchEngineConfig
from toolkit.errors import ToolkitError, UsageError
from toolkit.profile.http_client import Client as LoadClient
from toolkit.profile.http_client import TextAsk
from toolkit.serve import background
from toolkit.serve.client import APIClient
from toolkit.serve.fleet.child import Spare
from toolkit.serve.options import ServerSettings


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture(scope="module")
def model(tiny_models: Any) -> str:
    return str(tiny_models("llama"))


def test_a_server_that_is_its_own_client(model: str, tmp_path: Path) -> None:
    """Over HTTPS, by a certificate that vouches for itself; its keys come by a pipe, which can be read but once."""
    config = PytorchEngineConfig(session_len=128, max_batch_size=4, device_type="cpu")
    template = ChatTemplateConfig("mine", user="<u>", assistant="<a>")
    file = tmp_path / "keys"
    os.mkfifo(file)
    threading.Thread(target=file.write_text, args=("secret\n",), daemon=True).start()
    more: Any = {"api_key_file": file, "allowed_local_media_path": tmp_path, "max_log_len": 9, "max_choices": 2}
    more["ssl_certfile"] = Path(__file__).parent / "localhost.pem"
    with toolkit.serve(
        model, "tiny", backend_config=config, chat_template_config=template, server_port=0, **more
    ) as server:
        assert server.available_models == ["tiny"]
        *pieces, last = server.chat("hi", 1, max_tokens=4, ignore_eos=True)
        assert last[1:] == (4, "length") and pieces
        with pytest.raises(ToolkitError, match="--max-choices"):
            list(server.chat("hi", 1, n=3))
        with pytest.raises(ToolkitError, match="401"):
            _ = APIClient(server.url, insecure=True).available_models
        with pytest.raises(ToolkitError, match=r"^https:.* cannot be reached .*certificate.*; name .* SSL_CERT_FILE"):
            _ = APIClient(server.url, "secret").available_models
        with pytest.raises(ToolkitError, match="SSL_CERT_FILE"):
            asyncio.run(LoadClient(server.url, api_key="secret").choose_model())
        load = LoadClient(server.url, "tiny", api_key="secret", insecure=True)
        assert load.record(asyncio.run(load.run(TextAsk("hi", 3)))).error is None
        process = server._process
    assert process.returncode == 0
    server.close()


def test_what_keeps_it_from_starting_is_told_here(model: str) -> None:
    with pytest.raises(ToolkitError, match="/no/such/model"):
        toolkit.serve("/no/such/model", server_port=0)
    with pytest.raises(
        UsageError, match="--api-key-file /no/such/file: cannot be read"
    ):  # before the model is looked at
        toolkit.serve("/no/such/model", api_key_file="/no/such/file", server_port=0)
    with pytest.raises(UsageError, match="nope"):
        toolkit.serve(model, chat_template_config="nope", server_port=0)
    for arguments, says in [
        ({"backend": "tensorrt"}, "backend: expected"),
        ({"workers": 3}, "unknown argument 'workers'"),
        ({"max_log_length": 3}, "did you mean 'max_log_len'"),
        ({"max_log_len": "all"}, "max_log_len: expected a whole number, found 'all'"),
        ({"max_concurrent_requests": 0}, "max_concurrent_requests: expected at least 1, found 0"),
        ({"max_tools": -1}, "max_tools: expected at least 1, found -1"),
        ({"api_keys": ""}, "^api_keys: expected non-empty keys, found an empty one"),
        ({"api_keys": ["a", "b,"]}, "^api_keys: expected non-empty keys, found an empty one"),
        ({"node_url": "http://a:1"}, "--node-url: only with --proxy-url"),
        ({"ssl_keyfile": "key.pem"}, "--ssl-keyfile: only with --ssl-certfile"),
        ({"ssl_certfile": __file__}, "--ssl-certfile: expected a certificate and its key"),
        ({"memory": "2GB"}, "memory: only for a server of several models"),
        ({"backend_config": 5}, "backend_config"),
        ({"cache_max_entry_count": 3.5}, "^cache_max_entry_count: expected a number"),
        ({"session_length": 9}, "did you mean 'session_len'"),
        ({"num_gpu_blocks": 9}, "PytorchEngineConfig has it: give backend='pytorch' too"),
        ({"tp": 1, "backend_config": PytorchEngineConfig()}, "tp: backend_config has a field of that name"),
    ]:
        with pytest.raises(UsageError, match=says):
            toolkit.serve(model, **arguments)


def test_engine_options_are_taken_beside_the_server_s(model: str) -> None:
    """In place of a backend_config, by the names of its fields."""
    more: Any = {"session_len": 96, "device_type": "cpu", "max_batch_size": 2}
    with toolkit.serve(model, "tiny", backend="pytorch", server_port=0, max_choices=2, **more) as server:
        with urllib.request.urlopen(f"{server.url}/v1/models") as reply:
            assert json.load(reply)["data"][0]["max_model_len"] == 96


def test_keys_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[background.Order] = []
    monkeypatch.setattr(background, "launch", lambda order, kind: (orders.append(order), None))
    for keys in ("a, b", ["a,b"], ["a", "b"]):
        toolkit.serve("model", api_keys=keys)
    assert [order.settings.api_keys for order in orders] == [["a", "b"]] * 3


def test_requests_get_their_grace_before_it_is_killed() -> None:
    """What would wait for the child notes how long it would have waited."""
    ours, theirs = socket.socketpair()
    theirs.sendall(b'{"url": "http://127.0.0.1:1", "key": null}\n')
    waits: list[float] = []
    child: Any = SimpleNamespace(link=ours, process=SimpleNamespace(wait=waits.append))
    order = background.Order.of("model", PytorchEngineConfig(), None, ServerSettings(grace_period=600))
    with theirs:
        background.launch(order, background.Server, child)[0].close()
    assert len(waits) == 1 and waits[0] > 602


@pytest.mark.parametrize("gone", [False, True])
def test_one_that_is_killed_as_it_starts(gone: bool, support: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    support("dying_children").kill_children(monkeypatch, gone)
    order = background.Order.of("model", PytorchEngineConfig(), None, ServerSettings())
    with pytest.raises(ToolkitError, match=r"^the server ended before it was ready; its log says why$"):
        background.launch(order, background.Server)


def test_one_for_which_there_is_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **more: Any) -> Any:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("toolkit.base.child_process.start", full)
    order = background.Order.of("model", PytorchEngineConfig(), None, ServerSettings())
    with pytest.raises(ToolkitError, match=r"^the server's process cannot be started: .*temporarily unavailable$"):
        background.launch(order, background.Server)
    (spare := Spare()).fill()
    assert spare.take() is None


def test_it_ends_with_the_program_that_started_it(packed: Path, tmp_path: Path) -> None:
    """Also one without the guard ``if __name__ == "__main__"``, one that is killed, and one that has forked."""
    program = textwrap.dedent(f"""
        import os, signal, sys, time, toolkit
        server = toolkit.serve({str(packed)!r}, server_port=0)
        print(server._process.pid, flush=True)
        if not (fork := os.fork()):
            sys.exit()  # which does not end the server
        os.waitpid(fork, 0)
        assert server.available_models
        if not (fork := os.fork()):  # it holds what the program holds
            os.closerange(0, 3)
            time.sleep(400)
            os._exit(0)
        print(fork, flush=True)
        if {{kill}}:
            os.kill(os.getpid(), signal.SIGKILL)
        server.close()
        assert server._process.returncode == 0, "it had to be killed"
    """)
    for kill in (False, True):
        file = tmp_path / "program.py"
        file.write_text(program.replace("{kill}", str(kill)))
        done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=500)
        assert done.returncode == (-9 if kill else 0), done.stderr
        pid, fork = map(int, done.stdout.split())
        for _ in range(1200):
            if not alive(pid):
                break
            time.sleep(0.05)
        assert not alive(pid) and alive(fork), "it did not wait for what holds its link"
        os.kill(fork, signal.SIGKILL)
