"""GGUF's types of two bits and fewer, and of three on a lattice, against the ``gguf`` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from toolkit import GenerationConfig, PytorchEngineConfig, TurbomindEngineConfig, pipeline
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.gguf.lattices import COLUMNS, LATTICES
from toolkit.convert.formats import rewrite
from toolkit.errors import ToolkitError

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}


def blocks(kind: str, rows: int, count: int, seed: int = 0, scale: float = 1.0) -> NDArray[np.uint8]:
    """Random bytes [rows, bytes] of so many blocks a row, all of one scale."""
    raw = np.random.default_rng(seed).integers(0, 256, (rows, count, LATTICES[kind].size), dtype=np.uint8)
    bits = np.float16(scale).view(np.uint16)
    if kind == "IQ1_M":  # four bits of it in each of four words
        words = raw[..., 48:].copy().view("<u2")
        words[:] = words & 0x0FFF | (bits >> np.array([0, 4, 8, 12], np.uint16) & 15) << 12
        raw[..., 48:] = words.view(np.uint8)
    else:
        at = slice(-2, None) if kind.startswith("TQ") else slice(0, 2)
        raw[..., at] = np.array([bits], "<u2").view(np.uint8)
    return raw.reshape(rows, -1)


@pytest.mark.parametrize("kind", LATTICES)
def test_numbers_are_those_of_the_gguf_package(kind: str) -> None:
    import gguf

    raw = blocks(kind, 7, 3)
    found = LATTICES[kind].read(raw.reshape(7, 3, -1))
    right = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(found.dequantize(torch.float32).numpy(), right)


@pytest.mark.parametrize("kind", LATTICES)
def test_a_model_of_them_runs_as_its_numbers_do(kind: str, tiny_models: Any, tmp_path: Path) -> None:
    """On both runners, beside the same in float32."""
    import gguf

    rewrite(
        str(tiny_models("llama", **SIZES)), plain := tmp_path / "plain.gguf", to="gguf", gguf_type="f32", quiet=True
    )
    of = gguf.GGMLQuantizationType[kind]
    scale = 256**-0.5 / float(gguf.quants.dequantize(blocks(kind, 64, 1), of).std())
    reader, paths = gguf.GGUFReader(plain), {name: tmp_path / f"{name}.gguf" for name in ("few", "f32")}
    for name, path in paths.items():
        made = gguf.GGUFWriter(path, "llama")
        for key, entry in reader.fields.items():
            if not key.startswith("GGUF.") and key != "general.architecture":
                inner = entry.types[-1] if len(entry.types) > 1 else None
                made.add_key_value(key, entry.contents(), entry.types[0], sub_type=inner)
        for seed, tensor in enumerate(reader.tensors):
            data = tensor.data
            if tensor.name.startswith("blk.") and data.ndim == 2:
                raw = blocks(kind, data.shape[0], data.shape[1] // COLUMNS, seed, scale)
                data = raw if name == "few" else gguf.quants.dequantize(raw, of)
                made.add_tensor(tensor.name, data, raw_dtype=of if name == "few" else None)
            else:
                made.add_tensor(tensor.name, data)
        made.write_header_to_file()
        made.write_kv_data_to_file()
        made.write_tensors_to_file()
        made.close()
    few, whole = (open_checkpoint(path) for path in paths.values())
    assert all(few.tensor(name).equal(whole.tensor(name)) for name in whole.names())
    config, found = GenerationConfig(max_new_tokens=1, ignore_eos=True, logprobs=1), {}
    for name, path in paths.items():
        for backend in (TurbomindEngineConfig, PytorchEngineConfig):
            with pipeline(str(path), backend_config=backend(dtype="float32", session_len=64)) as pipe:
                reply = pipe("Once upon", gen_config=config)
                chances = [max(one.values()) for one in reply.logprobs]
                found[name, backend.__name__] = np.array(chances)
    right = found["f32", "PytorchEngineConfig"]
    for key, chances in found.items():
        assert abs(chances[0] - right[0]) < (0.1 if "Turbo" in key[1] else 1e-3), key


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    import gguf

    made = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    made.add_tensor("x", np.zeros((2, 4), np.int32))
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    with pytest.raises(ToolkitError, match=r"tensor x: type I32 cannot be read; expected one of F32, .*IQ2_XXS, "):
        open_checkpoint(tmp_path / "m.gguf")
