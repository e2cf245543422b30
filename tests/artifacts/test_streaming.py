"""Weights written and read a tensor at a time: the files are those that writing them whole gives."""

from __future__ import annotations

import errno
import json
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from toolkit.artifacts.checkpoint import INDEX
from toolkit.artifacts.output.checkpoint_writer import write_model
from toolkit.artifacts.output.stage import open_stage
from toolkit.artifacts.weight_files import safetensors_file
from toolkit.artifacts.weight_files.safetensors_file import read_header, read_metadata, write_tensors
from toolkit.artifacts.weight_files.tensor_file import TensorFile
from toolkit.errors import ToolkitError

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float8_e4m3fn, torch.bool)
SHAPES = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3).map(tuple)), min_size=1, max_size=12
)


def tensor(index: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(index)).to(dtype)


class Stream:
    """Tensors made one after another; ``most`` of them were alive at once."""

    def __init__(self, shapes: list[tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self.shapes, self.alive, self.most = shapes, 0, 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, (dtype, shape) in enumerate(self.shapes):
            yield f"t{i % 7}.{i}", self.make(i, dtype, shape)

    def make(self, index: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        found = tensor(index, dtype, shape)
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(found, self.gone)
        return found

    def gone(self) -> None:
        self.alive -= 1


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.float(), b.float())


@given(shapes=SHAPES)
@settings(max_examples=60, deadline=None)
def test_a_stream_is_written_as_the_reference_library_writes_it_whole(shapes: Any) -> None:
    expected = dict(Stream(shapes))
    with tempfile.TemporaryDirectory() as directory:
        path, reference = Path(directory) / "x.safetensors", Path(directory) / "reference.safetensors"
        stream = Stream(shapes)
        write_tensors(path, stream)
        assert stream.most == 1, "one tensor in memory at a time"
        save_file(expected, reference, {"format": "pt"})
        assert sorted(p.name for p in Path(directory).iterdir()) == ["reference.safetensors", "x.safetensors"]
        infos, theirs = read_header(path), read_header(reference)
        sizes = [info.nbytes // max(1, torch.Size(info.shape).numel()) for info in infos.values() if info.nbytes]
        assert sizes == sorted(sizes, reverse=True), "every tensor is aligned to its element size"
        assert {k: (v.dtype, v.shape) for k, v in infos.items()} == {k: (v.dtype, v.shape) for k, v in theirs.items()}
        found, lazily = load_file(path), TensorFile(path)
        assert set(found) == set(lazily) == set(expected) and len(lazily) == len(expected)
        assert all(same(found[k], v) and same(lazily[k], v) for k, v in expected.items())


@given(shapes=SHAPES, limit=st.integers(1, 3000))
@settings(max_examples=60, deadline=None)
def test_shards_hold_every_tensor_once_and_no_more_than_they_should(shapes: Any, limit: int) -> None:
    expected = dict(Stream(shapes))
    with tempfile.TemporaryDirectory() as directory:
        target, stream = Path(directory), Stream(shapes)
        write_model(target, stream, shard_bytes=limit)
        assert stream.most == 1
        files = sorted(target.glob("*.safetensors"))
        held = [load_file(file) for file in files]
        assert sorted(name for shard in held for name in shard) == sorted(expected)
        assert all(same(shard[name], expected[name]) for shard in held for name in shard)
        bytes_of = [sorted(x.numel() * x.element_size() for x in shard.values()) for shard in held]
        assert all(sum(sizes) <= limit or sum(sizes) == sizes[-1] for sizes in bytes_of)
        if len(files) == 1:
            assert [p.name for p in target.iterdir()] == ["model.safetensors"]
        else:
            index = json.loads((target / INDEX).read_text())
            assert index["metadata"]["total_size"] == sum(map(sum, bytes_of))
            assert index["weight_map"] == {n: f.name for f, shard in zip(files, held, strict=True) for n in shard}


def test_metadata_is_read_after_the_last_tensor(tmp_path: Path) -> None:
    metadata: dict[str, str] = {}

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        metadata["count"] = "1"

    write_tensors(tmp_path / "x", stream(), metadata)
    assert read_metadata(tmp_path / "x") == {"count": "1"}


@pytest.mark.parametrize("where", ["stream", "copy"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(2)
        if where == "stream":
            full()

    if where == "copy":
        monkeypatch.setattr(safetensors_file.os, "replace", full)
    out = tmp_path / "out"
    with (
        pytest.raises(ToolkitError, match="out: disk full while writing; free some space"),
        open_stage(out, kind="quantized", stage="x", parent={"digest": "d"}, options={}) as stage,
    ):
        write_model(stage.dir, stream())
    assert not list(tmp_path.iterdir())


def test_saved_state_may_be_a_stream_and_a_torn_file_is_as_good_as_absent(tmp_path: Path) -> None:
    meta: dict[str, Any] = {}

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for i in range(3):
            yield f"w{i}", torch.full((40,), float(i))
        meta["made"] = 3

    with (
        pytest.raises(KeyboardInterrupt),
        open_stage(tmp_path / "out", kind="quantized", stage="x", parent={"digest": "d"}, options={}) as stage,
    ):
        stage.save("a", stream(), meta)
        assert stage.done("a") and stage.load_meta("a") == {"made": 3}
        assert [x.mean().item() for _, x in sorted(stage.load("a").items())] == [0.0, 1.0, 2.0]
        file = stage.partial / "state" / "a.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        assert not stage.done("a")
        raise KeyboardInterrupt
