"""What is said of engine artifacts and manifests that are not as they were written: the whole line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.refused import refusing
from toolkit.artifacts.engine.files import open_engine
from toolkit.artifacts.engine.torch_target import torch_weights
from toolkit.artifacts.manifest import check_files, read_manifest
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing

AGAIN = "convert the model again"
EMBED = "model.embed_tokens"


@pytest.fixture(scope="module")
def engines(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One artifact for each target."""
    folder, model = tmp_path_factory.mktemp("engines"), str(tiny_models("llama"))
    return {target: convert(model, folder / target, Packing(target=target)).path for target in ("cpu", "torch")}


def edited(engine: Path, target: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of the artifact, one of its JSON files changed."""
    shutil.copytree(engine, target)
    data = json.loads((target / name).read_text())
    change(data)
    (target / name).write_text(json.dumps(data))
    return target


def up(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda data: data.update(fields)


refused = refusing()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (up(schema_version=99), "schema_version: expected at most 1, found 99; upgrade, or convert the model again"),
        (up(target=5), f"expected target and params; {AGAIN}"),
        (up(params=[]), f"expected target and params; {AGAIN}"),
        (up(spec={}), f"spec: DecoderSpec: field 'cache_groups' is missing; {AGAIN}"),
        (up(mtp=5), f"mtp: expected spec and params; {AGAIN}"),
        (up(mtp={"params": {}, "spec": {}}), f"mtp: MtpSpec: field 'join' is missing; {AGAIN}"),
        (up(ranks=[5]), f"ranks: expected tiles of each rank; {AGAIN}"),
        (up(note="mine"), f"was changed since it was written; {AGAIN}"),
    ],
)
def test_descriptions(engines: dict[str, Path], tmp_path: Path, change: Any, told: str) -> None:
    path = edited(engines["cpu"], tmp_path / "e", "engine.json", change)
    assert refused(lambda: open_engine(path)) == f"{path}/engine.json: {told}"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda params: params[EMBED].update(shape=[1]),
            f"engine.json: params: {EMBED}: expected shape [320, 64], found [1]",
        ),
        (
            lambda params: params.pop(EMBED),
            f"engine.json: params: {EMBED}: expected shape [320, 64], found 'nothing'",
        ),
        (
            lambda params: params[EMBED].update(form="odd"),
            f"engine.json: params: {EMBED}: unknown form {{'shape': [320, 64], 'form': 'odd'}}",
        ),
        (
            lambda params: params.update(extra={"shape": [1], "form": "tensor"}),
            "engine.safetensors: array extra: expected F32 or F16 or BF16 [1], found nothing",
        ),
    ],
)
def test_parameters_for_torch(engines: dict[str, Path], tmp_path: Path, change: Any, told: str) -> None:
    path = edited(engines["torch"], tmp_path / "e", "engine.json", lambda data: change(data["params"]))
    assert refused(lambda: open_engine(path)) == f"{path}/{told}; {AGAIN}"


def test_weights_of_another_target(engines: dict[str, Path]) -> None:
    path = engines["cpu"]
    told = refused(lambda: torch_weights(open_engine(path)))
    assert told == f"{path}: packed for cpu, expected target torch; {AGAIN} with --target torch"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (up(kind=5), "kind: expected a text, found 5"),
        (up(files=[{"name": "config.json"}]), "files[0]: field 'sha256' is missing"),
        (
            up(schema_version=99),
            "schema_version 99 is newer than 1, the newest this version reads; upgrade (it was written by ",
        ),
    ],
)
def test_manifests(engines: dict[str, Path], tmp_path: Path, change: Any, told: str) -> None:
    path = edited(engines["cpu"], tmp_path / "e", "manifest.json", change)
    assert refused(lambda: read_manifest(path)).startswith(f"{path}/manifest.json: {told}")


def test_a_file_that_is_gone(engines: dict[str, Path], tmp_path: Path) -> None:
    path = edited(engines["cpu"], tmp_path / "e", "config.json", lambda data: None)
    (path / "config.json").unlink()
    manifest = read_manifest(path)
    assert manifest is not None
    told = f"{path}/config.json: missing, though manifest.json lists it; make the artifact again"
    assert refused(lambda: check_files(path, manifest)) == told


def test_weights_that_cannot_be_read(engines: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = next(iter(engines.values()))
    real = Path.open

    def broken(file: Path, *args: Any, **options: Any) -> Any:
        if file.suffix == ".safetensors":
            raise OSError(5, "Input/output error")
        return real(file, *args, **options)

    monkeypatch.setattr(Path, "open", broken)
    manifest = read_manifest(path)
    assert manifest is not None
    told = refused(lambda: check_files(path, manifest))
    assert told == f"{path / 'engine.safetensors'}: cannot be read: Input/output error"
