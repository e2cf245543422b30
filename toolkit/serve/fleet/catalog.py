"""Which models a server of several has: those named, those that lie in a directory, and their adapters."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import field
from pathlib import Path

from toolkit.artifacts.adapters.config import CONFIG
from toolkit.artifacts.json_file import read_json_object
from toolkit.artifacts.manifest import EYES
from toolkit.artifacts.source import resolve_model
from toolkit.artifacts.weight_files.find import gguf_name
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.user_path import user_path
from toolkit.errors import ToolkitError, UsageError
from toolkit.serve.model_cards import weight_files

MODEL_MARKS = ("config.json", "engine.json")
_LATER_PART = re.compile(r".+-(?!0*1-)\d{5}-of-\d{5}\.gguf")  # of a model in several files; the first stands for all


@dataclass(frozen=True)
class Listed:
    """One model. ``adapters``: name -> directory; ``aliases``: other names of it."""

    name: str
    path: str
    adapters: dict[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """What a request's ``model`` may be to be answered by it."""
        return self.name, *self.aliases, *self.adapters

    def weight_bytes(self) -> int:
        """Bytes of its files of weights."""
        return sum(file.stat().st_size for file in weight_files(Path(self.path)))


def listed(models: Sequence[str], models_dir: Path | None, aliases: Sequence[str] = ()) -> list[Listed]:
    """The named ``models``, then those in ``models_dir`` by name. ``aliases``: OTHER=NAME each; an OTHER alone is the
    first model's. Raises UsageError for what is none, and for two of one name."""
    found = {}
    for model in models:
        path = resolve_model(model)
        name = gguf_name(path.resolve()).removesuffix(".gguf") if user_path(model).exists() else model
        if name in found:
            raise UsageError(f"MODEL {model}: another model is called {name}, too; rename one of the directories")
        found[name] = Listed(name, str(path.resolve()))
    in_dir, adapters = _scanned(models_dir) if models_dir is not None else ({}, {})
    for name, path in in_dir.items():
        found.setdefault(name, Listed(name, str(path)))
    for name, (path, base) in adapters.items():
        owner = next((m for m in found.values() if base in (m.name, m.path)), None)
        if owner is not None and name not in found:
            owner.adapters[name] = str(path)
    if not found:
        raise UsageError("MODEL: expected at least one model, or --models-dir with models in it")
    return _with_aliases(found, aliases)


def _with_aliases(found: dict[str, Listed], aliases: Sequence[str]) -> list[Listed]:
    more: dict[str, list[str]] = {name: [] for name in found}
    taken = {name for model in found.values() for name in model.names}
    for entry in aliases:
        other, equals, name = entry.partition("=")
        name = name if equals else next(iter(found))
        if not other or name not in found:
            raise UsageError(f"--alias {entry}: expected OTHER=NAME, NAME one of {', '.join(found)}")
        if other in taken:
            raise UsageError(f"--alias {entry}: {other} is the name of a model or adapter already")
        taken.add(other)
        more[name].append(other)
    return [Listed(m.name, m.path, m.adapters, tuple(more[m.name])) for m in found.values()]


def _scanned(directory: Path) -> tuple[dict[str, Path], dict[str, tuple[Path, str]]]:
    """(models by name, adapters by name with the name or path of their base) in a directory; hidden files, what
    models see with and later parts of a file left out."""
    if not directory.is_dir():
        raise UsageError(f"--models-dir {directory}: expected a directory")
    models: dict[str, Path] = {}
    adapters: dict[str, tuple[Path, str]] = {}
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        raise UsageError(f"--models-dir {directory}: cannot be read ({error.strerror})") from error
    for path in paths:
        if path.name.startswith(".") or path.match(EYES) or _LATER_PART.fullmatch(path.name):
            continue
        if os.path.isfile(path) and path.suffix == ".gguf":  # which one that may not be looked into does not fail
            whole = gguf_name(path)
            models[path.stem if os.path.exists(directory / whole) else Path(whole).stem] = path.resolve()
        elif os.path.isfile(path / CONFIG):
            adapters[path.name] = (path.resolve(), _base_of(path / CONFIG))
        elif any(os.path.isfile(path / mark) for mark in MODEL_MARKS):
            models[path.name] = path.resolve()
    return models, adapters


def _base_of(config: Path) -> str:
    """The model that an adapter is for: a path as it is, of OWNER/NAME the name."""
    try:
        base = str(read_json_object(config).get("base_model_name_or_path") or "")
    except ToolkitError:
        return ""
    there = os.path.isdir(base)  # which a name that is too long does not fail
    return str(Path(base).resolve()) if there else base.rpartition("/")[2]
