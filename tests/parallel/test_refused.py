"""What ranks say of devices and machines that cannot be: the whole line."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Any

import pytest

from tests.support.refused import refusing
from toolkit.errors import ToolkitError, UsageError
from toolkit.parallel import nodes as waiting
from toolkit.parallel.door import Door
from toolkit.parallel.layout import Layout
from toolkit.parallel.links import link_of
from toolkit.parallel.model import Model
from toolkit.parallel.nodes import Nodes, serve
from toolkit.runners.base import RunnerOptions

refused = refusing(UsageError)


def test_a_device_whose_ranks_cannot_speak() -> None:
    told = "device: ranks run on cpu and cuda, and nothing here says how they speak on xpu; use cpu"
    assert refused(lambda: link_of("xpu")) == told


def test_a_first_machine_that_hangs_up(tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "COME_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def hang_up() -> None:
            with suppress(OSError):  # the test has ended
                while True:
                    listener.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        nodes = Nodes(2, 1, "127.0.0.1", port, secret=b"secret")
        model = Model(str(tiny_models("llama")), RunnerOptions(), {})
        told = refused(lambda: serve(model, Layout(tp=2), nodes, lambda line: None), ToolkitError)
    assert told.startswith(f"nobody is at 127.0.0.1:{port} (")
    assert "hung up" in told or "reset by peer" in told


def test_a_store_of_torchrun_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(nodes: Nodes, seconds: float) -> None:
        raise OSError("nobody is there")

    monkeypatch.setattr(Nodes, "board", nobody)
    told = refused(lambda: Door(Nodes(2, 0, "127.0.0.1", 1, launched=1, store=True, secret=b"s")), ToolkitError)
    assert told == "torchrun's store at 127.0.0.1:1: nobody is there"
