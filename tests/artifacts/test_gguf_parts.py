"""Models in several GGUF files, split by gguf-py as llama.cpp's tools do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from toolkit import TurbomindEngineConfig
from toolkit.artifacts.alike import files_of_all
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.inspect import inspect
from toolkit.artifacts.manifest import content_digest, title
from toolkit.convert.convert import convert
from toolkit.convert.formats import rewrite
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.errors import ToolkitError
from toolkit.serve.fleet.catalog import Listed, listed
from toolkit.serve.ollama.cards import Listed as Card


@pytest.fixture(scope="module", params=[False, True])
def split(request: Any, tiny_models: Any, tmp_path_factory: Any) -> tuple[Path, list[Path]]:
    """A file, and the same in parts; the first with tensors, or without."""
    import gguf

    folder = tmp_path_factory.mktemp("parts")
    rewrite(str(tiny_models("mixtral")), whole := folder / "whole.gguf", to="gguf", gguf_type="q4_k_m", quiet=True)
    reader = gguf.GGUFReader(whole)
    arch = str(reader.fields["general.architecture"].contents())
    made = gguf.GGUFWriter(folder / "m.gguf", arch, split_max_tensors=9, small_first_shard=request.param)
    for name, entry in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = entry.types[-1] if len(entry.types) > 1 else None
            made.add_key_value(name, entry.contents(), entry.types[0], sub_type=inner)
    for tensor in reader.tensors:
        made.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    parts = sorted(folder.glob("m-*-of-*.gguf"))
    assert len(parts) > 2
    return whole, parts


def test_parts_are_the_model_that_they_were(split: tuple[Path, list[Path]], tmp_path: Path) -> None:
    whole, parts = split
    one, several = open_checkpoint(whole), open_checkpoint(parts[0])
    assert one.config == several.config and one.names() == several.names()
    for name in one.names():
        assert one.tensor(name).equal(several.tensor(name)), name
    packed = [convert(str(path), tmp_path / path.stem, quiet=True).path for path in (whole, parts[0])]
    assert len({(path / "engine.safetensors").read_bytes() for path in packed}) == 1


def test_the_size_is_that_of_all_parts(split: tuple[Path, list[Path]]) -> None:
    size = sum(part.stat().st_size for part in split[1])
    assert inspect(split[1][0]).record["size_bytes"] == size
    assert Card("m", path=split[1][0]).card()["size"] == size


def test_a_tensor_is_said_to_be_in_the_part_that_has_it(split: tuple[Path, list[Path]]) -> None:
    import gguf

    whole, parts = split
    one, several = open_checkpoint(whole), open_checkpoint(parts[0])
    assert set(one.files.values()) == {whole}
    assert several.gguf is not None and set(several.files) == set(several.names())
    held = {part: {tensor.name for tensor in gguf.GGUFReader(part).tensors} for part in parts}
    for name, (source, _) in several.gguf.sources.items():
        assert source in held[several.where(name)], name


def test_a_model_in_parts_is_called_as_it_were_whole(split: tuple[Path, list[Path]], tmp_path: Path) -> None:
    for part in split[1]:
        shutil.copy(part, tmp_path)
    first = tmp_path / split[1][0].name
    assert [model.name for model in listed([str(first)], None)] == ["m"]
    assert [model.name for model in listed([], tmp_path)] == ["m"]
    with AsyncEngine.open(first, backend_config=TurbomindEngineConfig(device="cpu", session_len=64)) as engine:
        assert engine.model_name == "m.gguf"
    assert title(first) == "m"
    shutil.copy(split[0], tmp_path / "m.gguf")  # another one, which has that name
    assert {model.name: Path(model.path).name for model in listed([], tmp_path)} == {
        "m": "m.gguf",
        first.stem: first.name,
    }


def test_each_part_counts_as_content(split: tuple[Path, list[Path]], tmp_path: Path) -> None:
    for part in split[1]:
        shutil.copy(part, tmp_path)
    first = tmp_path / split[1][0].name
    assert Listed("m", str(first)).weight_bytes() == sum(part.stat().st_size for part in split[1])
    assert [file.name for file in files_of_all(first)] == [part.name for part in split[1]]
    before = content_digest(first)
    last = tmp_path / split[1][-1].name
    last.write_bytes(last.read_bytes()[:-1] + b"\x01")
    assert content_digest(first) != before


def test_a_broken_file_beside_parts_is_theirs(split: tuple[Path, list[Path]], tmp_path: Path) -> None:
    """As it is one file's alone: they are no models of their own, whose it might be."""
    parts = [Path(shutil.copy(part, tmp_path)) for part in split[1]]
    (tmp_path / "mmproj-f16.gguf").write_bytes(b"GGUF" * 20)
    with pytest.raises(ToolkitError, match=r"mmproj-f16\.gguf"):
        open_checkpoint(parts[0])


def test_what_lacks_or_is_none_of_them_is_told(split: tuple[Path, list[Path]], tmp_path: Path) -> None:
    parts = [Path(shutil.copy(part, tmp_path)) for part in split[1]]
    with pytest.raises(ToolkitError, match=rf"is file 2 of the {len(parts)} of a model; open {parts[0].name}"):
        open_checkpoint(parts[1])
    shutil.copy(parts[1], parts[2])
    with pytest.raises(ToolkitError, match=rf"{parts[2]}: expected file 3 of {len(parts)}, found one with split.no 1"):
        open_checkpoint(parts[0])
    parts[2].unlink()
    with pytest.raises(ToolkitError, match=rf"{parts[2]}: cannot be read: No such file"):
        open_checkpoint(parts[0])
    parts[0].rename(other := tmp_path / "x.gguf")
    with pytest.raises(ToolkitError, match=r"x.gguf: is file 1 .* expected …-00001-of-"):
        open_checkpoint(other)
