from __future__ import annotations

from typing import Any

import pytest

from toolkit.errors import ToolkitError
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
