"""What editors and ``help`` show of the public names: every argument, and what it is for."""

from __future__ import annotations

import inspect
import pydoc
from dataclasses import fields
from typing import Any

import pytest

import toolkit
from toolkit import PytorchEngineConfig, TurbomindEngineConfig, vl
from toolkit.configs.option import option_of
from toolkit.serve.client import APIClient
from toolkit.serve.http.limits import Limits
from toolkit.serve.options import ServerSettings

NAMES = {name: getattr(toolkit, name) for name in toolkit.__all__ if name != "__version__"}
NAMES |= {f"vl.{name}": getattr(vl, name) for name in vl.__all__} | {"APIClient": APIClient}
METHODS = {
    f"{name}.{attribute}": value
    for name, kind in NAMES.items()
    if isinstance(kind, type)
    for attribute, value in vars(kind).items()
    if callable(value) and not attribute.startswith("_")
}


@pytest.mark.parametrize("name", [*NAMES, *METHODS])
def test_every_public_name_shows_its_arguments(name: str) -> None:
    """Further ones by name alone, and the text says which."""
    called: Any = (NAMES | METHODS)[name]
    told = inspect.getdoc(called) or ""
    assert len(told.split()) > 2, "no docstring"
    for parameter in inspect.signature(called).parameters.values():
        assert parameter.kind is not parameter.VAR_POSITIONAL, parameter
        if parameter.kind is parameter.VAR_KEYWORD:
            assert parameter.name in told, f"{parameter}: not described"


def test_pipeline_and_serve_have_lmdeploy_s_signatures() -> None:
    """They are packages too."""
    made = inspect.signature(toolkit.pipeline)
    ours = list(made.parameters)
    assert ours[:5] == ["model_path", "backend_config", "chat_template_config", "log_level", "max_log_len"]
    assert {"speculative_config", "trust_remote_code", "allowed_media_domains", "gen_config"} < set(ours)
    assert made.parameters["log_level"].default == "WARNING" and made.return_annotation == "Pipeline"

    served = inspect.signature(toolkit.serve).parameters
    first = ["model_path", "model_name", "backend", "backend_config", "chat_template_config"]
    more = ["server_name", "server_port", "log_level", "api_keys", "ssl"]
    assert list(served)[:10] == first + more
    options = {f.name for f in fields(ServerSettings) if option_of(f)} | {f.name for f in fields(Limits)}
    engines = {f.name for kind in (TurbomindEngineConfig, PytorchEngineConfig) for f in fields(kind)}
    assert set(served) == options | engines | set(first)
    assert served["cache_max_entry_count"].default == 0.8 and served["max_choices"].default == Limits().max_choices


@pytest.mark.parametrize("name", ["pipeline", "serve"])
def test_help_shows_them(name: str) -> None:
    package = getattr(toolkit, name)
    shown = pydoc.render_doc(package, renderer=pydoc.plaintext)
    for parameter in inspect.signature(package).parameters.values():
        assert f"        {parameter.name}" in shown or f"**{parameter.name}" in shown, parameter
    assert "PACKAGE CONTENTS" in shown
