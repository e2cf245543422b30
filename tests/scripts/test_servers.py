"""``scripts/traffic/servers.py``: servers and proxies are found where their logs say that they are ready."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
    return importlib.import_module("traffic.servers")


def test_a_server(servers: ModuleType, tiny_models: Any, tmp_path: Path) -> None:
    words = ["api_server", str(tiny_models("llama")), "--backend", "pytorch", "--device", "cpu", "--server-port", "0"]
    with servers.Served(words, tmp_path / "log") as served:
        assert served.get("/v1/models")["data"]


def test_a_proxy_without_servers(servers: ModuleType, tmp_path: Path) -> None:
    with servers.Served(["proxy", "--server-port", "0"], tmp_path / "log", idle=True) as served:
        assert served.get("/v1/models")["data"] == []
