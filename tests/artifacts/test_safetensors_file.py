"""The safetensors container: what we write others read, and no file, however broken, does worse than one line."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from toolkit.artifacts.weight_files.huge_pages import forget_pages
from toolkit.artifacts.weight_files.safetensors_file import (
    PAGE,
    map_arrays,
    read_header,
    read_metadata,
    write_arrays,
    write_tensors,
)
from toolkit.errors import ToolkitError

TENSORS = {
    "a": torch.arange(15, dtype=torch.float32).view(3, 5).bfloat16(),
    "b": torch.arange(7, dtype=torch.uint8),
    "c": torch.linspace(-3, 3, 16).view(4, 4),
    "d": torch.tensor(2.5, dtype=torch.float16),
    "e": torch.zeros(0, 3),
    "f": torch.linspace(-3, 3, 6).to(torch.float8_e4m3fn),
    "g": torch.tensor([True, False, True]),
    "h": torch.arange(-4, 4, dtype=torch.int64),
}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    one, other = (x.contiguous().view(bits[x.element_size()]) for x in (a, b))
    return a.dtype == b.dtype and torch.equal(one, other)


@pytest.mark.parametrize("room", [PAGE, 1 << 20], ids=["header moved", "header fits"])
def test_the_reference_library_reads_what_we_write(tmp_path: Path, room: int) -> None:
    many = {**TENSORS, **{f"long.name.of.tensor.{i}": torch.full((5,), float(i)) for i in range(100)}}
    path = tmp_path / "x.safetensors"
    write_arrays(path, ((k, v, None) for k, v in many.items()), {"who": "me"}, header_room=room)
    found = load_file(path)
    assert all(same(found[name], tensor) for name, tensor in many.items())
    assert read_metadata(path) == {"who": "me"}
    assert not [p for p in tmp_path.iterdir() if p != path]


def test_written_arrays_are_page_aligned_and_mapped_read_only(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_arrays(path, ((k, v, None) for k, v in TENSORS.items()))
    arrays = map_arrays(path)
    assert set(arrays) == set(TENSORS) == set(read_header(path))
    for name, array in arrays.items():
        assert array.size == 0 or array.ctypes.data % PAGE == 0, name
        assert not array.flags.writeable
    assert np.array_equal(arrays["c"], TENSORS["c"].numpy())
    assert np.array_equal(arrays["a"].view(np.int16), TENSORS["a"].view(torch.int16).numpy())


def test_numpy_arrays_are_written_as_tensors_are(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.int8).reshape(3, 4)
    bits = np.arange(6, dtype=np.uint16)
    write_arrays(tmp_path / "x", [("a", array, None), ("b", array[:, ::2], None), ("c", bits, "BF16")])
    found = load_file(tmp_path / "x")
    assert np.array_equal(found["a"].numpy(), array)
    assert np.array_equal(found["b"].numpy(), array[:, ::2])
    assert found["c"].dtype == torch.bfloat16
    assert np.array_equal(found["c"].view(torch.int16).numpy(), bits.view(np.int16))


def test_write_tensors_gives_the_ecosystems_layout(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors(path, TENSORS)
    found = load_file(path)
    assert all(same(found[name], tensor) for name, tensor in TENSORS.items())
    assert read_metadata(path) == {"format": "pt"}
    sizes = [np.dtype("u1").itemsize * TENSORS[name].element_size() for name in read_header(path)]
    assert sizes == sorted(sizes, reverse=True)  # every tensor aligned to its element size


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def broken() -> Any:
        yield "a", TENSORS["a"], None
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError):
        write_arrays(tmp_path / "x", broken())
    assert not list(tmp_path.iterdir())


def write_raw(path: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BROKEN = {
    "not json": b"\xff\xfe{{{",
    "a list": [],
    "no dtype": {"a": {"shape": [2], "data_offsets": [0, 8]}},
    "an entry that is none": {"a": 3},
    "unknown dtype": {"a": entry("Q4")},
    "dtype of wrong type": {"a": entry(["F32"])},
    "negative shape": {"a": entry(shape=[-2])},
    "shape of floats": {"a": entry(shape=[2.0])},
    "shape of booleans": {"a": entry(shape=[True, 2])},
    "huge shape": {"a": entry(shape=[1 << 61, 1 << 61])},
    "one offset": {"a": entry(offsets=[0])},
    "reversed offsets": {"a": entry(offsets=[8, 0])},
    "size at odds with shape": {"a": entry(shape=[3])},
    "offsets past the end": {"a": entry(offsets=[8, 16])},
    "overlap": {"a": entry(), "b": entry(offsets=[4, 12])},
    "hole": {"a": entry(), "b": entry(offsets=[12, 20])},
    "same place twice": {"a": entry(), "b": entry()},
    "name twice": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":3}',
    "nested too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("header", BROKEN.values(), ids=BROKEN.keys())
def test_broken_headers_are_refused_in_one_line(tmp_path: Path, header: Any) -> None:
    path = write_raw(tmp_path / "broken.safetensors", header, bytes(8))
    with pytest.raises(ToolkitError, match=r"broken\.safetensors") as caught:
        read_header(path)
    assert "\n" not in str(caught.value)


def test_what_is_cut_names_the_tensor_and_both_sizes(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    save_file({"a": torch.ones(100), "b": torch.ones(100)}, path)
    whole = path.read_bytes()
    for gone, name in ((1, "b"), (399, "b"), (401, "a")):
        path.write_bytes(whole[:-gone])
        sizes = f"expected {len(whole)} bytes, found {len(whole) - gone}"
        with pytest.raises(ToolkitError, match=f"truncated within tensor {name}: {sizes}; fetch it again"):
            read_header(path)


@pytest.mark.parametrize("size", [0, 3, 8, 40, -1, -100])
def test_truncated_files_are_refused(tmp_path: Path, size: int) -> None:
    path = tmp_path / "cut.safetensors"
    save_file({"a": torch.ones(100)}, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ToolkitError, match=r"cut\.safetensors.*(expected|truncated)"):
        read_header(path)


def test_a_header_length_beyond_reason_allocates_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(ToolkitError, match="not a safetensors file"):
        read_header(path)


def test_trailing_bytes_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_file({"a": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes() + b"!")
    with pytest.raises(ToolkitError, match="trailing bytes"):
        read_header(path)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_no_mutation_of_a_file_gets_past_as_anything_but_an_error_line(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    save_file({"a": torch.ones(4, 4), "b": torch.ones(3, dtype=torch.int8)}, path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        infos = read_header(path)
    except ToolkitError:
        return
    assert all(info.end <= path.stat().st_size for info in infos.values())
    map_arrays(path)


def test_pages_of_a_mapped_file_are_forgotten_and_read_again(tmp_path: Path) -> None:
    def mapped_mib() -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssFile:")[1].split()[0]) / 1024

    size = 64 << 20
    write_arrays(tmp_path / "x", [("a", np.arange(size // 4, dtype=np.int32), None)])
    arrays = map_arrays(tmp_path / "x")
    own = np.arange(5)
    before, total = mapped_mib(), int(arrays["a"].sum(dtype=np.int64))
    assert mapped_mib() > before + 50
    forget_pages([arrays["a"], own])
    assert mapped_mib() < before + 10
    assert int(arrays["a"].sum(dtype=np.int64)) == total and own.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("room", [4096, 3 << 20])
@pytest.mark.parametrize("sizes", [(1,), ((2 << 20) - 4096, 1), (5, 9 << 20, 7), ((4 << 20) + 1, 4 << 20)])
def test_files_of_several_huge_pages_end_where_their_last_array_does(
    tmp_path: Path, sizes: tuple[int, ...], room: int
) -> None:
    arrays = {f"a{i}": np.random.default_rng(i).integers(0, 256, n).astype(np.uint8) for i, n in enumerate(sizes)}
    write_arrays(tmp_path / "x", ((k, v, None) for k, v in arrays.items()), header_room=room)
    found = map_arrays(tmp_path / "x")
    assert all(np.array_equal(found[k], v) for k, v in arrays.items())
    assert (tmp_path / "x").stat().st_size == max(info.end for info in read_header(tmp_path / "x").values())
