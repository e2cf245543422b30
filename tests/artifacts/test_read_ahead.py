"""Tensors read by a thread before they are asked for: the same bytes, in whatever order somebody asks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from toolkit.artifacts.weight_files import read_ahead
from toolkit.artifacts.weight_files.read_ahead import ReadAhead
from toolkit.artifacts.weight_files.reused_memory import ReusedMemory
from toolkit.artifacts.weight_files.safetensors_file import read_header
from toolkit.errors import ToolkitError

COUNT = 12


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("ahead") / "model.safetensors"
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    save_file({f"t{i}": torch.randn(i + 1, 1000).to(kinds[i % 3]) for i in range(COUNT)}, path)
    return path


def opened(path: Path, names: list[str]) -> ReadAhead:
    infos = read_header(path)
    return ReadAhead((name, path, infos[name]) for name in names)


@settings(deadline=None, max_examples=40)
@given(
    order=st.permutations(range(COUNT)),
    asked=st.lists(st.integers(0, COUNT), max_size=2 * COUNT),
    ahead=st.sampled_from([1, 10_000, 1 << 20]),
    keep=st.booleans(),
)
def test_what_is_taken_is_what_the_file_holds(
    file: Path, order: list[int], asked: list[int], ahead: int, keep: bool
) -> None:
    from safetensors.torch import load_file

    expected, places = load_file(file), {i: place for place, i in enumerate(order)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read_ahead, "AHEAD", ahead)
        found = opened(file, [f"t{i}" for i in order])
        try:
            next_one, held = 0, []
            for i in asked:
                tensor = found.take(f"t{i}")
                if i not in places or places[i] < next_one:
                    assert tensor is None
                    continue
                next_one = places[i] + 1
                assert tensor is not None and tensor.dtype == expected[f"t{i}"].dtype
                held.append((i, tensor))
                for j, t in held if keep else held[-1:]:
                    assert torch.equal(t, expected[f"t{j}"])
                if not keep:
                    held.clear()
                del tensor
        finally:
            found.close()


def test_memory_is_used_again(file: Path) -> None:
    memory = ReusedMemory()
    first = memory.take(1000)
    first[:] = 1
    place = first.__array_interface__["data"][0]
    second = memory.take(1000)
    assert second.__array_interface__["data"][0] != place
    del first
    assert memory.take(900).__array_interface__["data"][0] == place


def test_a_file_that_is_cut_short_is_told(file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(file.read_bytes())
    names = list(read_header(cut))
    found = ReadAhead([(name, cut, info) for name, info in read_header(file).items()])
    found.close()
    infos = read_header(cut)
    cut.write_bytes(cut.read_bytes()[: infos[names[3]].start + 10])
    found = ReadAhead([(name, cut, infos[name]) for name in names])
    try:
        for name in names[:3]:
            assert found.take(name) is not None
        with pytest.raises(ToolkitError, match=r"cut\.safetensors: was cut short"):
            found.take(names[3])
    finally:
        found.close()


def test_trouble_of_another_kind_is_told_too(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(self: object, size: int) -> None:
        raise MemoryError

    monkeypatch.setattr(ReusedMemory, "take", none_left)
    found = opened(file, ["t0"])
    try:
        with pytest.raises(ToolkitError, match=r"model\.safetensors: cannot be read"):
            found.take("t0")
    finally:
        found.close()
