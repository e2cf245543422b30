"""Artifacts that were tampered with, digests and all: every command says one line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.artifacts.engine.files import open_engine
from toolkit.artifacts.inspect import inspect
from toolkit.artifacts.manifest import MANIFEST
from toolkit.artifacts.weight_files.safetensors_file import map_arrays, write_arrays
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing
from toolkit.errors import ToolkitError


@pytest.fixture
def make(tiny_models: Any, tmp_path: Path) -> Callable[[str], Path]:
    def write(target: str) -> Path:
        convert(str(tiny_models("llama")), tmp_path / target, Packing(target=target), quiet=True)
        return tmp_path / target

    return write


def rewrite(engine: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change a JSON file, and the manifest so that it fits again."""
    data = json.loads((engine / name).read_text())
    change(data)
    (engine / name).write_text(json.dumps(data))
    refit(engine)


def refit(engine: Path) -> None:
    manifest = json.loads((engine / MANIFEST).read_text())
    for entry in manifest["files"]:
        raw = (engine / entry["name"]).read_bytes()
        entry |= {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        if "header_sha256" in entry:
            entry["header_sha256"] = hashlib.sha256(raw[: 8 + int.from_bytes(raw[:8], "little")]).hexdigest()
    (engine / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize("value", [None, 3, "x", [], [[1]], {"bits": 4}, {"form": {}, "bits": []}])
def test_inspect_where_a_description_is_no_description(make: Callable[[str], Path], value: Any) -> None:
    engine = make("cpu")
    rewrite(engine, "engine.json", lambda data: data["params"].update({"model.norm": value, "more": value}))
    assert dict(inspect(engine).facts)["target"] == "cpu"


@pytest.mark.parametrize("name", ["x" * 5000, "", "../x", "/etc/passwd", "a//b", "a/" * 20 + "b"])
def test_names_that_are_no_file_names(make: Callable[[str], Path], name: str) -> None:
    engine = make("cpu")
    manifest = json.loads((engine / MANIFEST).read_text())
    manifest["files"].append({"name": name, "size": 1, "sha256": ""})
    (engine / MANIFEST).write_text(json.dumps(manifest))
    for use in (inspect, open_engine):
        with pytest.raises(ToolkitError, match="files: expected names of files in the directory") as caught:
            use(engine)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize("how", ["turned", "flat", "integers", "gone"])
def test_tensors_of_another_shape_or_dtype(make: Callable[[str], Path], how: str) -> None:
    engine = make("torch")
    name = "model.layers.0.mlp.up_proj.weight"
    arrays = map_arrays(engine / "engine.safetensors")
    held = {key: array.copy() for key, array in arrays.items()}
    assert name in held
    change = {"turned": lambda a: a.T.copy(), "flat": lambda a: a.reshape(-1), "integers": lambda a: a.view("<i4")}
    if how == "gone":
        del held[name]
    else:
        held[name] = change[how](held[name])
    write_arrays(engine / "engine.safetensors", [(key, array, None) for key, array in held.items()])
    refit(engine)
    with pytest.raises(ToolkitError, match=r"up_proj\.weight: expected F32 or F16 or BF16 \[128, 64\], found"):
        open_engine(engine)
