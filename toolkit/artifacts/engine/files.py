"""The engine artifact: a spec as JSON and weights packed for one target, in a file that a runner maps.

    engine.json          schema_version, target, spec, params: name → how its arrays make a weight
    engine.safetensors   the arrays, each at a page border
    manifest.json, tokenizer files, config.json, generation_config.json, chat template

``torch_target`` packs for target ``torch``, other targets pack with their runner. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from toolkit.artifacts.engine.artifact import ENGINE_ARRAYS, ENGINE_JSON, ENGINE_SCHEMA, TORCH_TARGET, EngineArtifact
from toolkit.artifacts.engine.torch_check import check_torch
from toolkit.artifacts.json_file import read_json_object, write_json_object
from toolkit.artifacts.manifest import Manifest, check_tensors, file_digest, require_kind
from toolkit.artifacts.weight_files.safetensors_file import read_header, write_arrays
from toolkit.errors import ToolkitError
from toolkit.models.spec import DecoderSpec


def write_engine(
    directory: Path,
    spec: DecoderSpec,
    arrays: Iterable[tuple[str, Any, str | None]],
    *,
    target: str,
    params: Mapping[str, dict[str, Any]],
) -> None:
    """Write engine.safetensors and engine.json to ``directory`` (a stage's).

    ``arrays``: a stream as ``write_arrays`` takes it; ``params`` is read after it, so the packer that makes the stream
    may fill it on the way. OSError passes through.
    """
    write_arrays(directory / ENGINE_ARRAYS, arrays, {"format": "toolkit-engine", "target": target})
    data = {"schema_version": ENGINE_SCHEMA, "target": target, "spec": spec.to_json(), "params": dict(params)}
    write_json_object(directory / ENGINE_JSON, data)


def open_engine(path: Path) -> EngineArtifact:
    """Open an engine artifact from its JSON and the header of its arrays.

    Raises ToolkitError, one line, if it is none, is broken, or is of a newer schema.
    """
    manifest = require_kind(path, ("engine",), "the engine")
    json_path = path / ENGINE_JSON
    data = read_json_object(json_path)
    version = data.get("schema_version")
    if not isinstance(version, int) or version > ENGINE_SCHEMA or version < 1:
        raise ToolkitError(
            f"{json_path}: schema_version: expected at most {ENGINE_SCHEMA}, found {version!r:.40}; "
            "upgrade, or convert the model again"
        )
    target, params = data.get("target"), data.get("params")
    if not isinstance(target, str) or not isinstance(params, dict):
        raise ToolkitError(f"{json_path}: expected target and params; convert the model again")
    try:
        spec = DecoderSpec.from_json(data.get("spec") or {})
    except (ValueError, TypeError) as error:
        raise ToolkitError(f"{json_path}: spec: {error}; convert the model again") from error
    artifact = EngineArtifact(path, spec, target, params, read_header(path / ENGINE_ARRAYS))
    if target == TORCH_TARGET:
        check_torch(artifact)
    _check_digest(json_path, manifest)
    if manifest is not None:
        check_tensors(path, manifest)
    return artifact


def _check_digest(json_path: Path, manifest: Manifest | None) -> None:
    """An engine.json that is not the one written may hold a spec that no model has: refuse it rather than run it."""
    recorded = {entry.name: entry.sha256 for entry in manifest.files} if manifest is not None else {}
    if recorded.get(ENGINE_JSON) != file_digest(json_path):
        raise ToolkitError(f"{json_path}: was changed since it was written; convert the model again")
