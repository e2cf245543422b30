"""MLX's checkpoints. ``mlx_0_32_4.safetensors`` has matrices as that version quantized them, each beside what it made
of them again in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from toolkit.artifacts.canonical import BlockFp8, Fp4, GroupInt
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.formats.bits import pack_words
from toolkit.artifacts.weights import load_stored, validate_checkpoint
from toolkit.errors import ToolkitError
from toolkit.models.spec import Part, StoredTensor

WRITTEN = load_file(Path(__file__).with_name("mlx_0_32_4.safetensors"))
NAME = "model.layers.0.mlp.up_proj"
CASES: dict[str, tuple[type, dict[str, Any]]] = {
    **{f"bits{bits}": (GroupInt, {"group_size": 32 if bits == 2 else 64, "bits": bits}) for bits in (2, 3, 4, 5, 6, 8)},
    "halves": (GroupInt, {"group_size": 64, "bits": 4, "mode": "affine"}),
    "mxfp4": (Fp4, {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    "mxfp8": (BlockFp8, {"group_size": 32, "bits": 8, "mode": "mxfp8"}),
    "nvfp4": (Fp4, {"group_size": 16, "bits": 4, "mode": "nvfp4"}),
}
IDS = np.random.default_rng(4).integers(7, 300, 30).tolist()


def read(path: Path, case: str, config: dict[str, Any], shape: tuple[int, ...]) -> Any:
    tensors = {
        name.replace(case, NAME, 1): tensor
        for name, tensor in WRITTEN.items()
        if name.startswith(f"{case}.") and not name.endswith("expected")
    }
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    item = StoredTensor(NAME, "linear", shape, (Part(NAME),))
    checkpoint = open_checkpoint(path)
    validate_checkpoint(checkpoint, [item])
    return load_stored(checkpoint, item)[0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("twice", [False, True])
def test_numbers_are_those_of_mlx(case: str, twice: bool, tmp_path: Path) -> None:
    kind, stated = CASES[case]
    wanted = WRITTEN[f"{case}.expected"]
    config = {"quantization": stated} | ({"quantization_config": stated} if twice else {})
    weight = read(tmp_path, case, config, tuple(wanted.shape))
    assert type(weight) is kind
    torch.testing.assert_close(weight.dequantize(), wanted, rtol=1e-6, atol=1e-6)


def test_a_linear_may_have_settings_of_its_own(tmp_path: Path) -> None:
    stated = {"group_size": 64, "bits": 4, NAME: {"group_size": 64, "bits": 6}, "lm_head": False}
    assert read(tmp_path, "bits6", {"quantization": stated}, (6, 128)).bits == 6


@pytest.mark.parametrize(
    "stated, words",
    [
        ({"group_size": 64, "bits": 7}, "quantization_config.bits: expected one of 2, 3, 4, 5, 6, 8, found 7"),
        ({"group_size": 48, "bits": 4}, "quantization_config.group_size: expected one of 16, 32, 64, 128, found 48"),
        (
            {"group_size": 64, "bits": 4, "mode": "log"},
            "config.mode: expected one of affine, mxfp4, nvfp4, mxfp8",
        ),
        ({"group_size": 64, "bits": 4, "mode": "mxfp4"}, "bits: expected 4 and group_size 32 for mxfp4, found"),
        ({"group_size": 64, "bits": 4, "x": {"bits": 1}}, "quantization_config.bits: expected one of"),
        ({"group_size": 64, "bits": 8}, r"up_proj.weight: expected shape \[6, 32\], found \[6, 16\]"),
        ({"group_size": 32, "bits": 4}, r"up_proj.scales: expected shape \[6, 4\], found \[6, 2\]"),
    ],
)
def test_what_cannot_be_read_is_told(stated: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match=words) as error:
        read(tmp_path, "bits4", {"quantization": stated}, (6, 128))
    assert "\n" not in str(error.value)


def affine(dense: torch.Tensor, bits: int, group: int = 32) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors by what stands behind the linear's name, and what they are worth."""
    groups = dense.float().unflatten(1, (-1, group))
    least, most = groups.amin(-1), groups.amax(-1)
    scales = (most - least) / ((1 << bits) - 1)
    codes = ((groups - least[..., None]) / scales[..., None]).round().clamp(0, (1 << bits) - 1)
    worth = (codes * scales[..., None] + least[..., None]).flatten(1)
    packed = pack_words(codes.flatten(1).to(torch.uint8), bits).view(torch.uint32)
    return {"weight": packed, "scales": scales, "biases": least}, worth


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_model_with_its_embedding_quantized_runs(family: str, tiny_models: Any, support: Any, tmp_path: Path) -> None:
    found, own = {}, {}
    for kind in ("mlx", "dense"):
        path = found[kind] = shutil.copytree(tiny_models(family), tmp_path / kind)
        tensors = load_file(path / "model.safetensors")
        for name in [n for n in tensors if tensors[n].dim() == 2 and tensors[n].shape[1] % 32 == 0]:
            bits = 6 if "down_proj" in name else 4
            made, worth = affine(tensors.pop(name), bits)
            module = name.removesuffix(".weight")
            own |= {module: {"group_size": 32, "bits": bits}} if bits == 6 else {}
            tensors |= {name: worth} if kind == "dense" else {f"{module}.{end}": t for end, t in made.items()}
        save_file({n: t.contiguous() for n, t in tensors.items()}, path / "model.safetensors")
        config = json.loads((path / "config.json").read_text())
        more = {"quantization": {"group_size": 32, "bits": 4, **own}} if kind == "mlx" else {}
        (path / "config.json").write_text(json.dumps(config | more))
    support("beside_dense").check(found["mlx"], found["dense"], tmp_path, IDS)
