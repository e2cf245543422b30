"""What ``tool batch --ray`` tells its actors, with another module in Ray's place: nothing here needs it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from toolkit.batch.options import BatchSettings
from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.configs.on_ray import OnRay
from toolkit.serve.http.limits import Limits


class FakeRay(ModuleType):
    """``made``: what each actor was made with."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.made: list[tuple[Any, ...]] = []

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **more: SimpleNamespace(remote=self._begin))

    def _begin(self, *arguments: Any) -> Any:
        self.made.append(arguments)
        about = {"model_name": "tiny", "session_len": 64, "places": 1}
        return SimpleNamespace(about=SimpleNamespace(remote=lambda: about))

    def get(self, found: Any) -> Any:
        return found

    def shutdown(self) -> None: ...


def test_paths_are_told_from_the_root_on(tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor's working directory is another."""
    fake, errors = FakeRay(), ModuleType("ray.exceptions")
    for name in ("RayError", "RayActorError", "RayTaskError"):
        setattr(errors, name, type(name, (Exception,), {}))
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.exceptions", errors)
    spec = importlib.util.find_spec("toolkit.batch.ray_actor")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "connect", lambda *given, **more: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sampling").mkdir()
    given = BatchSettings(generation_config="sampling", allowed_local_media_path=Path("pictures"))
    config, cluster = TurbomindEngineConfig(), OnRay(ray=2, ray_address="auto")
    model = str(tiny_models("llama"))
    with module.on_ray(model, given, Limits(), cluster, config=config, chat_template=None, progress=str):
        pass
    assert len(fake.made) == 2
    for _, settings, _ in fake.made:
        assert settings["generation_config"] == str(tmp_path / "sampling")
        assert settings["allowed_local_media_path"] == str(tmp_path / "pictures")
