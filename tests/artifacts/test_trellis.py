"""Trellis codes on disk and in memory, against streams that are read bit by bit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from toolkit.artifacts.canonical import GroupInt, Trellis
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.formats import format_of, trellis
from toolkit.artifacts.formats.describe import layout_of
from toolkit.artifacts.formats.writers import WRITERS, adapt
from toolkit.artifacts.join import join_rows
from toolkit.artifacts.streams import places, streams
from toolkit.errors import ToolkitError


def random(rows: int, cols: int, bits: int, group: int = 32, seed: int = 0) -> Trellis:
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(-(1 << 31), 1 << 31, (rows, cols * bits // 32), generator=draw).int()
    table = torch.randint(-128, 128, (256,), generator=torch.Generator().manual_seed(bits)).to(torch.int8)
    return Trellis(words, table, torch.rand(rows, cols // group, generator=draw).half(), bits, group)


def naive(weight: Trellis) -> np.ndarray:
    rows, cols = weight.shape
    out = np.zeros((rows, cols), np.float32)
    for r in range(rows):
        stream = [(int(word) >> i) & 1 for word in weight.words[r] for i in range(32)]
        padded = [0] * 8 + stream
        for c in range(cols):
            last = padded[(c + 1) * weight.bits : (c + 1) * weight.bits + 8]
            place = sum(bit << i for i, bit in enumerate(last))
            out[r, c] = np.float32(int(weight.table[place])) * np.float32(weight.scales[r, c // weight.group_size])
    return out


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 4), groups=st.integers(1, 3), bits=st.sampled_from([2, 3, 4]), seed=st.integers(0, 99))
def test_numbers_are_looked_up_by_the_last_eight_bits(rows: int, groups: int, bits: int, seed: int) -> None:
    weight = random(rows, 32 * groups, bits, seed=seed)
    np.testing.assert_array_equal(weight.dequantize().numpy(), naive(weight))
    assert torch.equal(weight.integers().dequantize(), weight.dequantize())
    assert torch.equal(streams(places(weight.words, bits), bits), weight.words)


def test_rows_and_columns_are_cut_and_joined() -> None:
    weight = random(40, 128, 3)
    dense = weight.dequantize()
    some = torch.tensor([3, 1, 20])
    for rows in (slice(5, 30), some):
        part = weight.take_rows(rows)
        assert isinstance(part, Trellis) and torch.equal(part.dequantize(), dense[rows])
    joined = join_rows([weight.take_rows(slice(0, 8)), weight.take_rows(slice(8, 40))])
    assert isinstance(joined, Trellis) and torch.equal(joined.dequantize(), dense)
    assert torch.equal(weight.take_columns(32, 96).dequantize(), dense[:, 32:96])


def written(folder: Path, weights: dict[str, Trellis], **changes: Any) -> Path:
    layouts = {name: layout_of(weight) for name, weight in weights.items()} | {"c": None}
    tensors = {k: v for name, weight in weights.items() for k, v in trellis.write_linear(name, weight).items()}
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "llama", "quantization_config": trellis.config(layouts) | changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_file_holds_layers_of_several_widths(tmp_path: Path) -> None:
    weights = {"a": random(48, 128, 3, 64), "b": random(16, 64, 2, 64), "d": random(32, 128, 3, 64, seed=3)}
    checkpoint = open_checkpoint(written(tmp_path, weights))
    assert format_of(checkpoint) is trellis
    assert checkpoint.quantization["modules"] == {"b": {"bits": 2, "group_size": -1}}
    for name, weight in weights.items():
        found = trellis.read_linear(checkpoint, name, weight.shape)
        assert (found.bits, found.group_size) == (weight.bits, weight.group_size)
        assert torch.equal(found.dequantize(), weight.dequantize())
        for want in trellis.expected(checkpoint.quantization, name, weight.shape):
            assert tuple(load_file(tmp_path / "model.safetensors")[want.name].shape) == want.shape


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"bits": 5}, "quantization_config.bits: expected one of 2, 3, 4, found 5"),
        ({"group_size": "64"}, "quantization_config.group_size: expected a whole number, found '64'"),
        ({"modules": [1]}, "quantization_config.modules: expected an object of objects, found [1]"),
        ({"modules": {"a": {"bits": 8}}}, "quantization_config.bits: expected one of 2, 3, 4, found 8"),
    ],
)
def test_a_configuration_that_cannot_be(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(written(tmp_path, {"a": random(16, 64, 3)}, **changes))
    with pytest.raises(ToolkitError, match=re.escape(told)):
        format_of(checkpoint)


def test_settings_of_many_modules_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, calls = open_checkpoint(written(tmp_path, {"a": random(16, 64, 3)})), list[Any]()
    monkeypatch.setattr(trellis, "check_config", calls.append)
    assert [format_of(checkpoint) for _ in range(9)] == [trellis] * 9 and len(calls) == 1


@pytest.mark.parametrize("to", ["gptq", "gptq_v2", "compressed-tensors"])
def test_other_formats_take_it_in_eight_bits(to: str) -> None:
    weight = random(32, 64, 4)
    found, reason = adapt(weight, WRITERS[to])
    assert reason is None and isinstance(found, GroupInt) and found.bits == 8
    assert torch.equal(found.dequantize(), weight.dequantize())
    assert adapt(weight, WRITERS["trellis"]) == (weight, None)
    assert adapt(weight, WRITERS["awq"])[1] is not None
