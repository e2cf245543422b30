"""One rank's part of a model for the native runner: opened by each rank itself, and told apart from another model."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.errors import UsageError
from toolkit.models.registry import from_files
from toolkit.parallel.model import Model
from toolkit.runners.choose import Opened, native_unsupported, open_model
from toolkit.runners.native.runner import NativeRunner
from toolkit.runners.native.share import Share, unsupported
from toolkit.runners.weights.info import info_of


def open_native(model: Model, world: int) -> tuple[Opened, str | None]:
    """The model, without reading weights, and why the native runner does not split it over ``world`` ranks, or None.
    Raises ToolkitError or UsageError where it cannot be opened."""
    opened = open_model(Path(model.path), **model.how, device="cpu", families=from_files(model.family_files))
    if model.options.dtype == "float16" and not opened.spec.float16:
        raise UsageError("dtype: this model is not stable in float16, its authors say; use bfloat16, float32 or auto")
    if model.options.adapters:
        return opened, "it runs no LoRA adapters"
    return opened, native_unsupported(opened, model.options) or unsupported(opened.spec, world)


def rank_of(opened: Opened, model: Model, share: Share, dtype: str | None = None) -> NativeRunner:
    """The runner of one rank."""
    return NativeRunner(opened.spec, opened.weights, replace(model.options, device="cpu"), dtype, share)


def signature(opened: Opened, path: Path) -> int:
    """Of the model's spec, and of the names, forms and files of its weights: alike where ranks have opened the same."""
    weights: Mapping[str, Any] = opened.weights()
    forms = sorted((name, str(_form(info_of(weights, name)))) for name in weights)
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
    found = [
        opened.spec.to_json(),
        forms,
        [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files],
    ]
    return zlib.crc32(json.dumps(found, sort_keys=True, default=str).encode())


def _form(value: Any) -> Any:
    meta = getattr(value, "meta", None)
    return meta if meta is not None else (type(value).__name__, tuple(value.shape))
