"""What is to be deployed, as a config file of Ray Serve holds it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from typing import Any, TypeVar

from toolkit.artifacts.alike import fingerprint
from toolkit.artifacts.source import resolve_model
from toolkit.artifacts.weight_files.find import gguf_name
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import plain, read
from toolkit.base.user_path import user_path
from toolkit.chat.origin import JINJA, JSON
from toolkit.configs.engine import EngineConfig
from toolkit.configs.option import OR_NAME, PATH, option_of
from toolkit.engine.load.setup import CONFIGS
from toolkit.errors import ToolkitError, UsageError
from toolkit.serve.ray.options import RaySettings
from toolkit.serve.run import check

NAME = "toolkit"  # of the application
# Without it a replica that hangs keeps its place, and those who wait for it, for the whole grace period.
CONTROLLER = {"runtime_env": {"env_vars": {"RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1"}}}
R = TypeVar("R", bound=Any)
_NAMES = ("demo", "auto", "toolkit")
_NOT_WRITTEN = ("api_keys", "write_config", "ray_address")


@dataclass(frozen=True)
class Model:
    """``name``: what requests call it; ``model``: where each machine finds it; ``backend``: which engine config
    ``config`` is. ``fingerprint``: of the files that it is to have everywhere, None = whatever is there."""

    name: str
    model: str
    backend: str
    config: dict[str, Any]
    chat_template: str | None = None
    fingerprint: str | None = None

    @staticmethod
    def of(model: str, config: EngineConfig, chat_template: str | None, name: str | None = None) -> Model:
        """As this machine has it. Raises UsageError and ToolkitError where there is none."""
        path = resolve_model(model)
        own, here = path.resolve(), user_path(model).exists()
        called = name or (gguf_name(own).removesuffix(".gguf") if here else model.rpartition("/")[2])
        backend = next(name for name, kind in CONFIGS.items() if isinstance(config, kind))
        if chat_template is not None and chat_template.endswith((JSON, *JINJA)):
            chat_template = _rooted(chat_template)
        told = _with_roots(type(config), given(config))
        return Model(called, str(own) if here else model, backend, told, chat_template, fingerprint(path))

    @property
    def engine(self) -> EngineConfig:
        """Raises UsageError."""
        if self.backend not in CONFIGS:
            raise UsageError(f"backend: expected {' or '.join(CONFIGS)}, found {self.backend!r}")
        try:
            return read(CONFIGS[self.backend], self.config)
        except ValueError as error:
            raise UsageError(f"models.config.{error}") from None

    def check_files(self) -> None:
        """Raise ToolkitError where this machine's files are others."""
        if self.fingerprint is not None and (found := fingerprint(resolve_model(self.model))) != self.fingerprint:
            raise ToolkitError(
                f"{self.model}: not what it is where the deployment was made (fingerprint {found[:12]}, expected "
                f"{self.fingerprint[:12]}); replicas that differ would give different answers: copy it anew"
            )


@dataclass(frozen=True)
class Plan:
    models: list[Model]
    settings: RaySettings

    @staticmethod
    def of(models: Sequence[str], config: EngineConfig, chat_template: str | None, settings: RaySettings) -> Plan:
        """Raises UsageError and ToolkitError for what cannot be deployed, before anything is started."""
        settings.check()
        check(settings.of_replica(settings.model_name), chat_template)
        if not models:
            raise UsageError("MODEL: expected at least one model")
        if len(models) > 1 and settings.model_name is not None:
            raise UsageError(f"model_name: expected one model, found {len(models)}; leave it out")
        found: dict[str, Model] = {}
        for model in models:
            one = Model.of(model, config, chat_template, settings.model_name)
            if one.name in found:
                text = f"another model is called {one.name}, too; rename one of the directories"
                raise UsageError(f"MODEL {model}: {text}")
            found[one.name] = one
        return Plan(list(found.values()), rooted(settings))

    def to_json(self) -> dict[str, Any]:
        """Inverse of ``of_json``; without what is at its default."""
        settings = {name: value for name, value in given(self.settings).items() if name not in _NOT_WRITTEN}
        if "limits" in settings:
            settings["limits"] = given(self.settings.limits)
        return {"models": [given(model) for model in self.models], "settings": settings}

    @staticmethod
    def of_json(value: Any) -> Plan:
        """Raises UsageError."""
        try:
            plan = read(Plan, value)
        except ValueError as error:
            raise UsageError(f"args: {error}") from None
        plan.settings.check()
        if not plan.models:
            raise UsageError("args: models: expected at least one")
        return plan

    def config_file(self) -> str:
        """For ``serve deploy``: JSON, which is YAML too."""
        told: dict[str, Any]
        http = {"host": self.settings.server_name, "port": self.settings.server_port}
        application = {
            "name": NAME,
            "route_prefix": "/",
            "import_path": "toolkit.serve.ray:build",
            "args": self.to_json(),
        }
        told = {"proxy_location": "EveryNode", "http_options": http, "controller_options": CONTROLLER}
        told["applications"] = [application]
        return json.dumps(told, indent=2, ensure_ascii=False) + "\n"


def given(record: Any) -> dict[str, Any]:
    """A record's JSON without the fields that are at their defaults."""
    values = plain(record)
    found = {}
    for f in fields(record):
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        if f.name in values and getattr(record, f.name) != default:
            found[f.name] = values[f.name]
    return found


def rooted(record: R) -> R:
    """``record`` as other processes take it, whose working directory is another: with its paths from the root on."""
    options = {f.name: getattr(record, f.name) for f in fields(record)}
    return replace(record, **_with_roots(type(record), options))


def _with_roots(record: type, options: dict[str, Any]) -> dict[str, Any]:
    """With the paths among ``record``'s from the root on: a replica's working directory is another."""
    found = dict(options)
    for f in fields(record):
        told, value = option_of(f), found.get(f.name)
        if told is None or told.path is None or value is None:
            continue
        if isinstance(value, dict):
            found[f.name] = {key: _rooted(one, told.path) for key, one in value.items()}
        else:
            found[f.name] = _rooted(value, told.path)
    return found


def _rooted(value: Any, kind: str = PATH) -> Any:
    path = user_path(value)
    named = kind == OR_NAME and (value in _NAMES or not path.exists())
    return value if named else type(value)(path.absolute())
