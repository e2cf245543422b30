"""The picture of the rooms is what the code imports."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "site"


def test_the_picture_is_drawn_from_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    rooms = importlib.import_module("rooms")
    assert rooms.PICTURE.read_text(encoding="utf-8") == rooms.picture(), "draw it anew: python scripts/site/rooms.py"


def test_an_arrow_that_others_lead_to_as_well_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    rooms = importlib.import_module("rooms")
    assert rooms.reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}
