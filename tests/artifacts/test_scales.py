"""The file of what was folded into a model: written, read, refused where it is damaged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from toolkit.artifacts.manifest import content_digest, scales_file
from toolkit.artifacts.scales import (
    Scales,
    check_scales_target,
    copy_scales,
    read_scales,
    write_scales,
)
from toolkit.errors import ToolkitError, UsageError

COLUMNS, ROWS = torch.tensor([0.5, 2.0, 3.0]), torch.tensor([[4.0], [0.25]])


@pytest.mark.parametrize("model", ["folder", "model.gguf"])
def test_what_is_written_is_read(model: str, tmp_path: Path) -> None:
    """Once where linears share it."""
    (tmp_path / "folder").mkdir()
    path = tmp_path / model
    assert read_scales(path) is None
    scales = {"a.q": Scales(COLUMNS), "a.k": Scales(COLUMNS.clone()), "a.v": Scales(COLUMNS, ROWS)}
    write_scales(path, scales)
    found = read_scales(path)
    assert found is not None and set(found) == set(scales)
    assert scales_file(path).stat().st_size < 600 and "a.o" not in found
    for name, own in scales.items():
        assert torch.equal(found[name].columns, COLUMNS)  # type: ignore[arg-type]
        assert (found[name].divisors is None) == (own.divisors is None)
    assert torch.equal(found["a.v"].divisors, ROWS)  # type: ignore[arg-type]
    write_scales(path, {})
    assert read_scales(path) == {}  # known: none


def test_they_change_a_matrix_and_are_taken_out_again() -> None:
    weight, scales = torch.randn(2, 3), Scales(COLUMNS, ROWS)
    folded = scales(weight)
    assert torch.allclose(folded, torch.diag(1 / ROWS[:, 0]) @ weight @ torch.diag(COLUMNS))
    assert torch.allclose(scales.inverse()(folded), weight)
    twice = Scales(COLUMNS).after(scales)
    assert torch.allclose(twice(weight), folded * COLUMNS)
    assert not Scales() and torch.equal(Scales()(weight), weight)


def test_they_are_part_of_a_models_content(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "config.json").write_text("{}")
    before = content_digest(tmp_path)
    write_scales(tmp_path, {"a": Scales(COLUMNS)})
    assert content_digest(tmp_path) != before
    copy_scales(tmp_path, tmp_path / "other")
    assert read_scales(tmp_path / "other") is not None
    copy_scales(tmp_path / "nothing", tmp_path / "other")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    before = content_digest(tmp_path / "model.gguf")
    copy_scales(tmp_path, tmp_path / "model.gguf")
    assert content_digest(tmp_path / "model.gguf") != before


def test_only_files_of_ours_give_way(tmp_path: Path) -> None:
    file = scales_file(tmp_path / "model.gguf")
    check_scales_target(file)
    write_scales(tmp_path / "model.gguf", {"a": Scales(COLUMNS)})
    check_scales_target(file)
    for data in (b"notes", save({"a": np.ones(3, np.float32)})):
        file.write_bytes(data)
        with pytest.raises(UsageError, match=r"model\.gguf\.scales: never replaced"):
            check_scales_target(file)
    file.unlink()
    file.symlink_to(tmp_path / "nothing")
    with pytest.raises(UsageError, match="never replaced"):
        check_scales_target(file)


@pytest.mark.parametrize(
    "tensors, metadata",
    [
        ({"a.columns": np.ones(3, np.float16)}, {}),
        ({"a.columns": np.ones((3, 1), np.float32)}, {}),
        ({"a.columns": np.array([1, np.nan], np.float32)}, {}),
        ({"a.columns": np.array([1, 0], np.float32)}, {}),
        ({"a.columns": np.ones(3, np.float32)}, {"shared": "["}),
        ({"a.columns": np.ones(3, np.float32)}, {"shared": "[1]"}),
        ({"a.columns": np.ones(3, np.float32)}, {"shared": '{"b.columns": "c"}'}),
        ({"a.columns": np.ones(3, np.float32)}, {"shared": '{"b.columns": ["a"]}'}),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(
    tensors: dict[str, np.ndarray], metadata: dict[str, str], tmp_path: Path
) -> None:
    scales_file(tmp_path).write_bytes(save(tensors, metadata))
    found = read_scales(tmp_path)
    assert found is not None
    with pytest.raises(ToolkitError, match=r"folded\.scales: .*; make the model again$"):
        found.get("a")
