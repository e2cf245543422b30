"""The chat by Gradio, asked as its own client asks it."""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import sys
import urllib.request
from typing import Any

import pytest
from typer.testing import CliRunner

from toolkit.commands.main import app as tool
from toolkit.errors import ToolkitError, UsageError
from toolkit.serve.client import APIClient
from toolkit.serve.gradio import app
from toolkit.serve.remote import RemoteModel


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["http://127.0.0.1:1", "--async", "0"], "--async"),
        (["http://127.0.0.1:1", "--quant-policy", "8"], "--quant-policy"),
        (["demo", "--api-key", "k"], "--api-key"),
    ],
)
def test_options_that_mean_nothing_are_refused(given: list[str], named: str) -> None:
    done = CliRunner().invoke(tool, ["serve", "gradio", *given])
    assert isinstance(done.exception, UsageError) and str(done.exception).startswith(f"{named}:")


def test_a_chat_through_a_server(start: Any) -> None:
    pytest.importorskip("gradio")
    from gradio_client import Client

    server = start()
    demo = app.build(RemoteModel(APIClient(server.url)))
    try:
        _, url, _ = demo.queue().launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True)
        client = Client(url, verbose=False)
        first = client.predict("hello", "Be.", 300, 0.5, None, 7, api_name="/chat")
        assert first == "[system]Be.[user]hello"
        config = server.engine.seen[-1][1]
        assert (config.temperature, config.top_k, config.max_new_tokens) == (0.5, 7, 300)
        assert client.predict("more", "", None, None, None, None, api_name="/chat").endswith("[user]more")
        with pytest.raises(Exception, match="temperature"):
            client.predict("x", "", None, 3, None, None, api_name="/chat")
    finally:
        demo.close()


SLOW = """
import sys, time
import gradio
from toolkit.serve.gradio.listen import listen
from toolkit.serve.run import bind
gradio.Blocks.run_startup_events = lambda self: time.sleep(6)
with gradio.Blocks() as blocks:
    gradio.Markdown("Here I am")
listen(blocks, bind("127.0.0.1", 0), lambda url: print(url, flush=True))
"""


def test_a_machine_that_takes_long_is_waited_for_and_a_signal_ends_it() -> None:
    """Gradio's own launch takes five seconds without an answer for a port in use."""
    if importlib.util.find_spec("gradio") is None:
        pytest.skip("needs gradio")
    with subprocess.Popen([sys.executable, "-P", "-c", SLOW], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(url, timeout=60) as page:
            assert page.status == 200 and b"Here I am" in page.read()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_port_in_use_is_told_before_a_model_is_looked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ToolkitError, match=f"^--server-port {port}: in use on 127.0.0.1"):
            app.run("no-such-model", server_port=port)


def test_thoughts_do_not_go_back_to_the_model() -> None:
    history = [
        {"role": "user", "content": "q", "metadata": None},
        {"role": "assistant", "content": "why", "metadata": {"title": "Reasoning", "status": "done"}},
        {"role": "assistant", "content": [{"type": "text", "text": "so"}]},
    ]
    assert app.said(history) == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "so"}]
