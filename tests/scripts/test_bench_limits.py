"""``scripts/bench/machine/limits``: what a token needs of a model's weights."""

from __future__ import annotations

import importlib
from pathlib import Path

from toolkit.runners.choose import open_model

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "machine"


def test_what_sees_pictures_is_not_read_for_a_token(tiny_models, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    needs_of = importlib.import_module("limits").needs_of
    whole, blind = (needs_of(open_model(tiny_models("llava"), blind=blind)) for blind in (False, True))
    assert whole == blind
    assert blind.bytes > 0 and blind.operations > 0
