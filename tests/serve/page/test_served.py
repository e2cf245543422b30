"""The page's files as the server hands them out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from toolkit.serve.fields.protocol import ChatCompletionRequest
from toolkit.serve.page.routes import FILES


def test_each_file_is_served_to_anyone_under_a_strict_policy(start: Callable[..., Any]) -> None:
    url = start(api_keys=["k"]).url
    for path in FILES:
        with urlopen(url + path) as reply:
            text, policy = reply.read().decode(), reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert not re.search(r"(?:src|href|import|url)\W{1,3}(?:https?:)?//", text), "nothing from elsewhere"
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(| on\w+=", text)
        for used in re.findall(r'(?:src|href)="(page/[^"]+)"', text) + re.findall(r'from "\./([^"]+)"', text):
            assert f"/page/{used.removeprefix('page/')}" in FILES
    with urlopen(f"{url}/docs") as reply:
        assert b"swagger" in reply.read()


def test_it_needs_no_font_of_symbols() -> None:
    """A sign that no installed font has shows as an empty box: icons are drawn, letters are those of every font."""
    for path, answer in FILES.items():
        signs = {c for c in bytes(answer.body).decode() if not c.isascii()}
        assert signs <= set("·…²"), path
    page = bytes(FILES["/"].body).decode()
    for name in ("attach", "side-open", "side-close", "settings-close"):
        assert re.search(rf'<button id="{name}"[^>]* aria-label="[^"]+"[^>]*><svg class="icon"', page), name


def test_the_names_of_its_fields_are_the_server_s(start: Callable[..., Any]) -> None:
    with urlopen(start().url) as reply:
        names = set(re.findall(r'name="(\w+)"', reply.read().decode())) - {"viewport", "color-scheme"}
    assert names - {"system", "key"} <= set(ChatCompletionRequest.model_fields)


def test_it_can_be_switched_off(start: Callable[..., Any]) -> None:
    url = start(no_page=True).url
    with urlopen(url) as reply:
        assert b"swagger" in reply.read()  # as LMDeploy has it
    with pytest.raises(HTTPError, match="404"):
        urlopen(f"{url}/page/page.js")
