"""Weights of an open checkpoint that are read before they are asked for, and by layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from toolkit.artifacts.canonical import Dense
from toolkit.artifacts.checkpoint import Checkpoint, open_checkpoint
from toolkit.artifacts.weight_files import read_ahead
from toolkit.models.registry import load_spec
from toolkit.runners.weights import checkpoint as checkpoint_weights
from toolkit.runners.weights.checkpoint import CheckpointWeights
from toolkit.runners.weights.info import info_of, reading_ahead
from toolkit.runners.weights.rounded import rounded

Models = Callable[[str], Path]


def numbers(weights: CheckpointWeights, name: str) -> torch.Tensor:
    found = weights[name]
    return (found.weight if isinstance(found, Dense) else found).clone()  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral"])
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("most", [0, checkpoint_weights.MOST])
def test_what_is_read_ahead_is_what_is_mapped(family, by_layer, most, tiny_models: Models, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint_weights, "MOST", most)
    monkeypatch.setattr(Checkpoint, "is_cached", lambda self: False)
    checkpoint = open_checkpoint(tiny_models(family))
    spec, stored = load_spec(checkpoint)
    mapped = CheckpointWeights(checkpoint, stored)
    expected = {name: numbers(mapped, name) for name in mapped}
    weights = CheckpointWeights(checkpoint, stored, spec if by_layer else None)
    left_out = list(weights)[3]
    asked = [name for name in weights if name != left_out]
    with weights.reading_ahead(set(asked)):
        for name in asked:
            assert torch.equal(numbers(weights, name), expected[name]), name


def test_a_layer_is_read_once(tiny_models: Models, monkeypatch) -> None:
    """Although 4 bits go over it twice."""
    monkeypatch.setattr(Checkpoint, "is_cached", lambda self: False)
    mapped: list[str] = []
    exact = Checkpoint.tensor
    checkpoint = open_checkpoint(tiny_models("llama"))
    spec, stored = load_spec(checkpoint)
    weights = rounded(CheckpointWeights(checkpoint, stored, spec), spec, "int4")
    outlines = [info_of(weights, name) for name in weights]  # these read a vector
    assert outlines and checkpoint._maps
    checkpoint.release()
    monkeypatch.setattr(Checkpoint, "tensor", lambda self, name: mapped.append(name) or exact(self, name))
    with reading_ahead(weights, set(weights)):
        for name in weights:
            assert weights[name] is not None
        assert checkpoint._maps == {}
    assert sorted(mapped) == sorted(set(mapped)) and len(mapped) == len(checkpoint.names())


def test_a_file_in_memory_is_known(tmp_path: Path) -> None:
    path = tmp_path / "some"
    path.write_bytes(b"x" * 100_000)
    assert path.read_bytes() and read_ahead.is_cached([path])
    assert not read_ahead.is_cached([tmp_path / "none"])
