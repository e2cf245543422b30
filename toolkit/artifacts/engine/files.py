"""The engine artifact: a spec as JSON and weights packed for one target, in a file that a runner maps.

    engine.json          schema_version, target, spec, params: name → how its arrays make a weight; mtp: spec and params
                         of the layer for multi-token prediction, where the model has one
    engine.safetensors   the arrays, each at a page border; packed for N ranks, rank-R-of-N.safetensors instead
    manifest.json, tokenizer files, config.json, generation_config.json, chat template

``torch_target`` packs for target ``torch``, other targets pack with their runner. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from toolkit.artifacts.engine.artifact import (
    ENGINE_ARRAYS,
    ENGINE_JSON,
    ENGINE_SCHEMA,
    TORCH_TARGET,
    EngineArtifact,
    Tiles,
)
from toolkit.artifacts.engine.torch_check import check_torch
from toolkit.artifacts.json_file import read_json_object, write_json_object
from toolkit.artifacts.manifest import Manifest, check_tensors, file_digest, require_kind
from toolkit.artifacts.weight_files.safetensors_file import read_header, write_arrays
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.spec import DecoderSpec, MtpSpec


def write_engine(
    directory: Path,
    spec: DecoderSpec,
    arrays: Iterable[tuple[str, Any, str | None]],
    *,
    target: str,
    params: Mapping[str, dict[str, Any]],
    mtp: tuple[MtpSpec, Mapping[str, dict[str, Any]]] | None = None,
) -> None:
    """Write engine.safetensors and engine.json to ``directory`` (a stage's).

    ``arrays``: a stream as ``write_arrays`` takes it; ``params`` is read after it, so the packer that makes the stream
    may fill it on the way, and so are the params of ``mtp``. OSError passes through.
    """
    write_arrays(directory / ENGINE_ARRAYS, arrays, {"format": "toolkit-engine", "target": target})
    describe_engine(directory, spec, target, params, mtp=mtp)


def describe_engine(
    directory: Path,
    spec: DecoderSpec,
    target: str,
    params: Mapping[str, dict[str, Any]],
    tiles: Sequence[Tiles] = (),
    mtp: tuple[MtpSpec, Mapping[str, dict[str, Any]]] | None = None,
) -> None:
    """Write engine.json. ``tiles``: of each rank, where each has a file."""
    data = {"schema_version": ENGINE_SCHEMA, "target": target, "spec": spec.to_json(), "params": dict(params)}
    data |= {"ranks": [dict(one) for one in tiles]} if tiles else {}
    data |= {"mtp": {"spec": mtp[0].to_json(), "params": dict(mtp[1])}} if mtp is not None else {}
    write_json_object(directory / ENGINE_JSON, data)


def open_engine(path: Path, rank: tuple[int, int] | None = None) -> EngineArtifact:
    """Open an engine artifact from its JSON and the header of its arrays. ``rank``: which of how many opens it, None:
    it is not split, or only described; of an artifact that was packed for ranks that one's file is opened.

    Raises ToolkitError, one line, if it is none, is broken, or is of a newer schema; UsageError where it was packed for
    another number of ranks.
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
    mtp, mtp_params = _mtp(data.get("mtp"), json_path)
    tiles = _tiles(data.get("ranks", []), json_path)
    if tiles and rank is not None and rank[1] != len(tiles):
        raise UsageError(
            f"{path}: packed in files for --tp {len(tiles)}, found --tp {rank[1]}; give --tp {len(tiles)}, or convert "
            f"the model again with --tp {rank[1]} (without --tp any number of ranks can cut it)"
        )
    whose = rank[0] if tiles and rank is not None else None
    artifact = EngineArtifact(path, spec, target, params, {}, max(len(tiles), 1), whose, tiles, mtp, mtp_params)
    alone = whose is None and bool(tiles)  # described: no file of arrays is asked for
    artifact = artifact if alone else replace(artifact, infos=read_header(artifact.array_file))
    if target == TORCH_TARGET:
        check_torch(artifact)
    _check_digest(json_path, manifest)
    if manifest is not None:
        check_tensors(path, manifest, None if whose is None else artifact.array_file.name)
    return artifact


def _mtp(found: Any, json_path: Path) -> tuple[MtpSpec | None, dict[str, dict[str, Any]]]:
    if found is None:
        return None, {}
    if not isinstance(found, dict) or not isinstance(found.get("params"), dict):
        raise ToolkitError(f"{json_path}: mtp: expected spec and params; convert the model again")
    try:
        return MtpSpec.from_json(found.get("spec") or {}), found["params"]
    except (ValueError, TypeError) as error:
        raise ToolkitError(f"{json_path}: mtp: {error}; convert the model again") from error


def _tiles(found: Any, json_path: Path) -> tuple[Tiles, ...]:
    def pair(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 2 and all(type(x) is int for x in value)

    good = isinstance(found, list) and len(found) != 1
    if not good or not all(isinstance(one, dict) and all(map(pair, one.values())) for one in found):
        raise ToolkitError(f"{json_path}: ranks: expected tiles of each rank; convert the model again")
    return tuple({name: (first, end) for name, (first, end) in one.items()} for one in found)


def _check_digest(json_path: Path, manifest: Manifest | None) -> None:
    """An engine.json that is not the one written may hold a spec that no model has: refuse it rather than run it."""
    recorded = {entry.name: entry.sha256 for entry in manifest.files} if manifest is not None else {}
    if recorded.get(ENGINE_JSON) != file_digest(json_path):
        raise ToolkitError(f"{json_path}: was changed since it was written; convert the model again")
