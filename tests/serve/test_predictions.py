"""OpenAI's predicted outputs: the text goes to the engine as tokens, and the usage says what came of it."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.errors import ToolkitError
from toolkit.serve.client import APIClient


def ask(server: Any, **fields: Any) -> dict[str, Any]:
    (whole,) = APIClient(server.url).chat_completions_v1("echo", "hello", False, **fields)
    return dict(whole)


@pytest.mark.parametrize("content", ["abc", [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]])
def test_a_prediction_goes_to_every_choice(start: Any, content: Any) -> None:
    server = start()
    told = ask(server, n=2, prediction={"type": "content", "content": content})["usage"]
    assert server.engine.predicted == [list(b"abc")] * 2
    assert told["completion_tokens_details"] == {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2}


def test_without_one_nothing_is_told(start: Any) -> None:
    server = start()
    assert "completion_tokens_details" not in ask(server)["usage"] and server.engine.predicted == [[]]


def test_no_more_of_it_than_a_session_holds_is_read(start: Any) -> None:
    server = start()
    ask(server, prediction={"type": "content", "content": "x" * 100_000})
    assert len(server.engine.predicted[0]) == server.engine.session_len


@pytest.mark.parametrize("wrong", ["abc", {"type": "text", "content": "a"}, {"type": "content"}, {"content": [1]}])
def test_what_is_none_is_refused(start: Any, wrong: Any) -> None:
    with pytest.raises(ToolkitError, match=r"400.*prediction"):
        ask(start(), prediction=wrong)
