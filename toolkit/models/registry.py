"""Which family reads which checkpoint: ``architectures`` (or ``model_type``) of ``config.json`` → its file.

Every file of ``families/`` holds one ``FAMILY``. A config names its file by ``model_type``, so that as a rule one file
is imported; only where it does not are all of them looked through.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Protocol

from toolkit.errors import ToolkitError, UsageError
from toolkit.models import families as folder
from toolkit.models.config_fields import Fields, check_dtype, check_token_ids
from toolkit.models.decoder import Built
from toolkit.models.family import Family


class HasConfig(Protocol):
    """What ``load_spec`` needs of a checkpoint."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def generation_config(self) -> dict[str, Any]: ...


def names() -> list[str]:
    """Of the families, in alphabetical order; none is imported."""
    return sorted(module.name for module in pkgutil.iter_modules(folder.__path__))


def get(name: str) -> Family:
    """The family called so; it must be one of ``names()``."""
    family: Family = importlib.import_module(f"{folder.__name__}.{name}").FAMILY
    assert family.name == name, name
    return family


def families() -> list[Family]:
    """All of them, imported."""
    return [get(name) for name in names()]


def find_family(config: dict[str, Any], source: str = "config.json") -> Family:
    """The family of a config. Raises ToolkitError that names those that are spelled nearly so."""
    model_type = config.get("model_type")
    named = model_type if isinstance(model_type, str) and model_type in names() else None
    architectures = config.get("architectures")
    if not architectures:
        if named is None:
            _unknown(config, source, model_type)
        return get(named)
    architecture = architectures[0] if isinstance(architectures, list) else architectures
    for family in _nearest_first(named):
        if architecture in family.architectures:
            return family
    _unknown(config, source, architecture)


def _nearest_first(name: str | None) -> Iterator[Family]:
    if name is not None:
        yield get(name)
    yield from families()


def _unknown(config: dict[str, Any], source: str, found: object) -> NoReturn:
    known = [a for family in families() for a in family.architectures]
    near = difflib.get_close_matches(str(found)[:100], known, 3, 0.75) or ["LlamaForCausalLM"]
    Fields(config, source).fail("architectures", found, f"one that `tool list models` shows, such as {', '.join(near)}")


def build(config: dict[str, Any], source: str = "config.json") -> Built:
    """The spec of a model and the tensors its checkpoint must hold.

    ``config``: a parsed ``config.json``; ``quantization_config`` in it is left to the weight readers. ``source`` is
    named in error messages. Raises ToolkitError for an unknown architecture or a value that cannot be.
    """
    if not isinstance(config, dict):
        raise ToolkitError(f"{source}: found {type(config).__name__}, expected a JSON object")
    fields = Fields(config, source)
    family = find_family(config, source)
    spec, stored = family.build(fields)
    check_dtype(fields)
    check_token_ids(fields, spec.vocab_size)
    return replace(spec, family=family.name), stored


def load_spec(checkpoint: HasConfig, config: dict[str, Any] | None = None) -> Built:
    """``build`` for an open checkpoint, of ``config`` instead of its own where given.

    Token ids in its generation_config.json are checked too.
    """
    built = build(checkpoint.config if config is None else config, f"{checkpoint.path}: config.json")
    check_token_ids(
        Fields(checkpoint.generation_config, f"{checkpoint.path}: generation_config.json"), built[0].vocab_size
    )
    return built


def apply_overrides(
    config: dict[str, Any], hf_overrides: dict[str, Any] | None = None, rope_scaling_factor: float = 0.0
) -> dict[str, Any]:
    """A copy of ``config`` with the user's changes.

    ``hf_overrides`` replaces fields; objects are merged key by key. ``rope_scaling_factor`` above 0 switches to dynamic
    NTK rope with that factor. Raises UsageError for arguments that cannot be.
    """
    if hf_overrides is not None and not isinstance(hf_overrides, dict):
        raise UsageError(f"hf_overrides: found {type(hf_overrides).__name__}, expected a dict of config fields")
    if isinstance(rope_scaling_factor, bool) or not isinstance(rope_scaling_factor, (int, float)):
        raise UsageError(f"rope_scaling_factor: found {rope_scaling_factor!r:.40}, expected a number")
    if rope_scaling_factor and not 1 <= rope_scaling_factor <= 1e6:
        raise UsageError(f"rope_scaling_factor: found {rope_scaling_factor}, expected 0 (off) or a number from 1 up")
    result = copy.deepcopy(config)
    for key, value in (hf_overrides or {}).items():
        old = result.get(key)
        result[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else copy.deepcopy(value)
    if rope_scaling_factor:
        old = result.pop("rope_parameters", None)
        if isinstance(old, dict) and "rope_theta" in old:
            result.setdefault("rope_theta", old["rope_theta"])
        result["rope_scaling"] = {"rope_type": "dynamic", "factor": float(rope_scaling_factor)}
    return result
