"""Requests that another server may read differently: one answer too few, never one too many."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import h11
import pytest

from toolkit.serve.http.framing import HttpState


def _cases() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "scripts/attacking/smuggled.py"
    spec = importlib.util.spec_from_file_location("smuggled", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = _cases()


@pytest.fixture(scope="module")
def address(request: Any, tmp_path_factory: Any) -> Iterator[tuple[str, int]]:
    conftest = request.config.pluginmanager.get_plugin(str(request.path.parent / "conftest.py"))
    engine = conftest.FakeEngine(conftest.ByteTokenizer(tmp_path_factory.mktemp("model")))
    app = conftest.create_app(engine, conftest.PlainTemplate(), conftest.ServerSettings(model_name="echo"))
    with conftest.running(app, engine) as it:
        parts = urlsplit(it.url)
        yield parts.hostname, parts.port


def test_a_server_reads_them_one_way(address: tuple[str, int]) -> None:
    assert CASES.wrong(*address) == []


def targets(message: bytes, step: int) -> tuple[list[bytes], bool]:
    """What requests ask for in ``message``, which comes in pieces of ``step`` bytes; whether it was refused."""
    state, found = HttpState(lambda request: None), []
    try:
        for i in range(0, len(message), step):
            state.receive_data(message[i : i + step])
            while (event := state.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
                if isinstance(event, h11.Request):
                    found.append(event.target)
                if isinstance(event, h11.EndOfMessage) and state.their_state is h11.DONE:
                    for part in (h11.Response(status_code=200, headers=[("content-length", "0")]), h11.EndOfMessage()):
                        state.send(part)
                    state.start_next_cycle()
    except h11.RemoteProtocolError:
        return found, True
    return found, False


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1 << 20])
def test_in_whatever_pieces_they_come(step: int) -> None:
    one, two = b"/v1/completions", b"/smuggled"
    for name, message in CASES.REFUSED.items():
        found, refused = targets(message + CASES.SECOND, step)
        assert refused and found in ([], [one]), name
    for name, message in CASES.ONE.items():
        assert targets(message + CASES.SECOND, step) == ([one, two], False), name


def test_what_is_refused_at_once_is_told_why(address: tuple[str, int]) -> None:
    """Also where the rest of the head never comes."""
    assert CASES.answers(*address, b"GET / HTTP/1.1\nHost: x\n") == [400]


def test_after_a_refused_head_nothing_is_read() -> None:
    state = HttpState(lambda request: (503, "no"))
    state.receive_data(CASES.ONE["CL"] + CASES.SECOND)
    for _ in range(3):
        with pytest.raises(h11.RemoteProtocolError):
            state.next_event()
    assert state.refusal == (503, "no")
