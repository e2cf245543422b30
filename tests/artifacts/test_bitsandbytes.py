"""bitsandbytes' checkpoints. ``bitsandbytes_0_50_2.safetensors`` has linears as that version wrote them, each beside
what it made of them again: nf4 and fp4, with absmax rounded once more, in bfloat16 words, in rows that are no multiple
of a block, and int8."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from toolkit.artifacts.canonical import Codebook, Dense, GroupInt
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.weights import load_stored, validate_checkpoint
from toolkit.errors import ToolkitError
from toolkit.models.spec import Part, StoredTensor

WRITTEN = load_file(Path(__file__).with_name("bitsandbytes_0_50_2.safetensors"))
NAME = "model.layers.0.mlp.up_proj"
FORMS = {"nf4": Codebook, "nested": Codebook, "fp4": Codebook, "wide": Codebook, "odd": Dense, "int8": GroupInt}
IDS = np.random.default_rng(4).integers(7, 300, 30).tolist()
STATE = f"{NAME}.weight.quant_state.bitsandbytes__nf4"


def stated(case: str) -> dict[str, Any]:
    eight = case == "int8"
    return {"quant_method": "bitsandbytes", "load_in_4bit": not eight, "load_in_8bit": eight}


def tensors_of(case: str) -> dict[str, torch.Tensor]:
    return {
        name.replace(case, NAME, 1): tensor
        for name, tensor in WRITTEN.items()
        if name.startswith(f"{case}.") and not name.endswith("expected")
    }


def read(path: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any], shape: tuple[int, ...]) -> Any:
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    item = StoredTensor(NAME, "linear", shape, (Part(NAME),))
    checkpoint = open_checkpoint(path)
    validate_checkpoint(checkpoint, [item])
    return load_stored(checkpoint, item)[0]


@pytest.mark.parametrize("case", FORMS)
def test_numbers_are_those_of_bitsandbytes(case: str, tmp_path: Path) -> None:
    wanted = WRITTEN[f"{case}.expected"]
    weight = read(tmp_path, tensors_of(case), stated(case), tuple(wanted.shape))
    assert type(weight) is FORMS[case]
    if case == "int8":
        torch.testing.assert_close(weight.dequantize(), wanted, rtol=1e-6, atol=0)
    else:
        assert torch.equal(weight.dequantize(wanted.dtype), wanted)


def test_a_config_of_old_does_not_name_it(tmp_path: Path) -> None:
    wanted = WRITTEN["nf4.expected"]
    weight = read(tmp_path, tensors_of("nf4"), {"load_in_4bit": True}, tuple(wanted.shape))
    assert torch.equal(weight.dequantize(wanted.dtype), wanted)


def state(**changes: Any) -> torch.Tensor:
    found = json.loads(bytes(WRITTEN["nested.weight.quant_state.bitsandbytes__nf4"].tolist()))
    return torch.tensor(list(json.dumps(found | changes).encode()), dtype=torch.uint8)


SPOILT: dict[str, tuple[dict[str, Any], str]] = {
    "no state": ({STATE: None}, f"tensor {STATE} is missing, which says how {NAME}.weight is stored; fetch"),
    "no object": ({STATE: torch.tensor([1, 200, 7], dtype=torch.uint8)}, f"tensor {STATE}: expected a JSON object"),
    "block": ({STATE: state(blocksize=48)}, "quant_state of .*: blocksize: expected one of 32, 64, .* found 48"),
    "too few": ({STATE: state(blocksize=128)}, "blocksize: expected one that gives 300 blocks, found 128"),
    "shape": ({STATE: state(shape=[64, 300])}, r"shape: expected \[300, 64\], found \[64, 300\]"),
    "dtype": ({STATE: state(dtype="int4")}, "dtype: expected one of float16, bfloat16, float32, found 'int4'"),
    "offset": ({STATE: state(nested_offset=None)}, "nested_offset: expected a number, found None"),
    "nested": ({STATE: state(nested_blocksize=0)}, "nested_blocksize: expected one that gives 2 blocks, found 0"),
    "short": ({f"{NAME}.weight": torch.zeros(9, 1, dtype=torch.uint8)}, r"weight: expected shape \[9600, 1\], found"),
    "map": ({f"{NAME}.weight.quant_map": torch.zeros(8)}, r"quant_map: expected shape \[16\], found \[8\]"),
    "nested map": ({f"{NAME}.weight.nested_quant_map": torch.zeros(8)}, "nested_quant_map: expected 256 numbers"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_what_cannot_be_read_is_told(case: str, tmp_path: Path) -> None:
    changes, words = SPOILT[case]
    tensors = {name: t for name, t in (tensors_of("nested") | changes).items() if t is not None}
    with pytest.raises(ToolkitError, match=words) as error:
        read(tmp_path, tensors, stated("nested"), (300, 64))
    assert "\n" not in str(error.value)


def test_bits_are_stated_once(tmp_path: Path) -> None:
    both = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": True}
    with pytest.raises(ToolkitError, match="load_in_4bit: expected true, or load_in_8bit: one of the two"):
        read(tmp_path, tensors_of("nf4"), both, (6, 128))


def as_nf4(dense: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors by what stands behind the linear's name, and what they are worth."""
    table, blocks = WRITTEN["nf4.weight.quant_map"], dense.float().reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    codes = (blocks / absmax[:, None])[..., None].sub(table).abs().argmin(-1)
    pairs = codes.to(torch.uint8).reshape(-1, 2)
    told = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(dense.shape)}
    tensors = {
        "weight": (pairs[:, :1] << 4) | pairs[:, 1:],
        "weight.absmax": absmax,
        "weight.quant_map": table.clone(),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8),
    }
    return tensors, (table[codes] * absmax[:, None]).reshape(dense.shape)


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_model_runs_and_becomes_others(family: str, tiny_models: Any, support: Any, tmp_path: Path) -> None:
    found = {}
    for kind in ("nf4", "dense"):
        path = found[kind] = shutil.copytree(tiny_models(family), tmp_path / kind)
        tensors = load_file(path / "model.safetensors")
        for name in [n for n in tensors if n.endswith("_proj.weight") and tensors[n].shape[1] % 64 == 0]:
            made, worth = as_nf4(tensors.pop(name))
            tensors |= (
                {name: worth} if kind == "dense" else {name.replace("weight", "") + end: t for end, t in made.items()}
            )
        save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
        config = json.loads((path / "config.json").read_text())
        more = {"quantization_config": stated(kind)} if kind == "nf4" else {}
        (path / "config.json").write_text(json.dumps(config | more))
    support("beside_dense").check(found["nf4"], found["dense"], tmp_path, IDS)
