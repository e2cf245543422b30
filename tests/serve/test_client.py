from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.serve.background import Server
from toolkit.serve.client import APIClient


def test_answers(start: Any) -> None:
    client = APIClient(start(api_keys=["k"]).url + "/", api_key="k")
    assert client.available_models == ["echo"]
    (whole,) = client.chat_completions_v1(model="echo", messages="hé", max_tokens=100)
    assert whole["choices"][0]["message"]["content"].startswith("[user]h")
    (text,) = client.completions_v1(model="echo", prompt="abc")
    assert text["choices"][0]["text"] == "abc"
    chunks = list(client.completions_v1(model="echo", prompt="abc", stream=True))
    assert "".join(c["choices"][0]["text"] for c in chunks) == "abc"


def test_errors(start: Any) -> None:
    server = start(engine={"fail_after": 1})
    client = APIClient(server.url)
    with pytest.raises(ToolkitError, match="404: model: 'x' is not served here"):
        list(client.completions_v1(model="x", prompt="abc"))
    with pytest.raises(ToolkitError, match="500: the runner broke"):
        list(client.completions_v1(model="echo", prompt="abc"))
    with pytest.raises(ToolkitError, match="ended the answer: the runner broke"):
        list(client.completions_v1(model="echo", prompt="abc", stream=True))
    with pytest.raises(ToolkitError, match="cannot be reached"):
        _ = APIClient("http://127.0.0.1:1").available_models


def test_a_proxy_of_the_environment_is_not_asked_for_ones_own_server(start: Any, monkeypatch: Any) -> None:
    """It does not reach this machine, and would learn the key."""
    server = start(api_keys=["k"])
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)

    class Own(APIClient):
        direct = Server.direct

    assert Own(server.url, "k").available_models == ["echo"]
    with pytest.raises(ToolkitError, match="cannot be reached"):
        _ = APIClient(server.url, "k").available_models


@contextmanager
def saying(answer: bytes) -> Iterator[APIClient]:
    """A client of a program that says ``answer`` to whoever comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def say() -> None:
            while True:
                try:
                    one, _ = server.accept()
                except OSError:
                    return
                with one:
                    one.recv(1 << 16)
                    one.sendall(answer)
                    one.shutdown(socket.SHUT_WR)
                    while one.recv(1 << 16):  # else what is unread would break off the answer
                        pass

        threading.Thread(target=say, daemon=True).start()
        yield APIClient(f"http://127.0.0.1:{server.getsockname()[1]}")


def test_signs_of_life_in_a_stream_are_no_part_of_it() -> None:
    events = b': ping\n\ndata: {"choices": []}\n\n: ping\n\ndata: [DONE]\n\n'
    with saying(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + events) as client:
        assert list(client.completions_v1(model="m", prompt="a", stream=True)) == [{"choices": []}]


@pytest.mark.parametrize("chunked", [False, True])
def test_an_answer_that_breaks_off_is_no_whole_one(chunked: bool) -> None:
    event = b'data: {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": null}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    if chunked:
        head = head.replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n")
    with saying(head + (b"%x\r\n%b\r\n" % (len(event), event) if chunked else event)) as client:
        pieces = client.chat("a", 1, model="m")
        assert next(pieces)[0] == "hi"
        with pytest.raises(ToolkitError, match="broke off"):
            list(pieces)


def test_an_answer_that_says_why_it_ends_is_whole() -> None:
    event = b'data: {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]}\n\n'
    with saying(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + event) as client:
        assert list(client.chat("a", 1, model="m")) == [("hi", 1, None), ("", 1, "stop")]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"SSH-2.0-x\r\n", r"cannot be reached \(SSH-2.0-x"),
        (b"HTTP/1.1 200 OK\r\n\r\n<html>hi</html>", r"no server of OpenAI's API answers there, found b'<html>hi"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"models": []}', r"""found b'{"models": \[\]}'"""),
    ],
)
def test_another_program_at_the_address(said: bytes, told: str) -> None:
    with saying(said) as client, pytest.raises(ToolkitError, match=told):
        _ = client.available_models
    if b"models" not in said:
        for stream in (False, True):
            with saying(said) as client, pytest.raises(ToolkitError, match=told):
                list(client.completions_v1(model="m", prompt="a", stream=stream))


def test_a_proxy_without_nodes_has_no_model() -> None:
    with saying(b'HTTP/1.1 200 OK\r\n\r\n{"data": []}') as client, pytest.raises(ToolkitError, match="found no models"):
        list(client.chat("hi"))


def test_an_address_with_v1_is_the_same(start: Any) -> None:
    url = start().url
    for address in (url, f"{url}/", f"{url}/v1", f"{url}/v1/"):
        assert APIClient(address).available_models == ["echo"]


def test_chat_keeps_the_history(start: Any) -> None:
    client = APIClient(f"{start(engine={'session_len': 4096}).url}/v1")
    first = list(client.chat("hi", 1))
    text = "".join(piece[0] for piece in first)
    assert text == "[user]hi" and first[-1] == ("", len(text), "stop") and first[0][2] is None
    second = "".join(piece[0] for piece in client.chat("more", 1, temperature=0))
    assert second == f"[user]hi[assistant]{text}[user]more"
    assert "".join(piece[0] for piece in client.chat("hi", 2)) == text
    client.end_session(1)
    assert "".join(piece[0] for piece in client.chat("hi", 1)) == text
    assert list(client.completion("abcd", max_tokens=2))[-1] == ("", 2, "length")
    with pytest.raises(ToolkitError, match="temperature"):
        list(client.completion("abcd", temperature=9))


def test_lmdeploy_s_paths() -> None:
    import toolkit
    from toolkit.messages import PytorchEngineConfig, TurbomindEngineConfig, VisionConfig
    from toolkit.serve.openai.api_client import APIClient as TheirPath

    assert TheirPath is APIClient and isinstance(toolkit.client("http://127.0.0.1:1"), APIClient)
    assert {PytorchEngineConfig, TurbomindEngineConfig, VisionConfig} == {
        toolkit.PytorchEngineConfig,
        toolkit.TurbomindEngineConfig,
        toolkit.VisionConfig,
    }
