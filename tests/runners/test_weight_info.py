"""Weights tell from headers what they are, and memory plans what they take once they are held."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from toolkit.artifacts.canonical import Dense, Fp8, GroupInt
from toolkit.artifacts.formats.describe import layout_of
from toolkit.artifacts.formats.writers import WRITERS
from toolkit.artifacts.rounding import to_block_fp8, to_channel_int8, to_group_int, to_mxfp4
from toolkit.convert.convert import convert
from toolkit.convert.formats import rewrite
from toolkit.convert.options import Packing
from toolkit.models.registry import names
from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_model
from toolkit.runners.native.packing.pack_model import gathered, outlines, pack_model
from toolkit.runners.tensor.devices import device
from toolkit.runners.tensor.ops import Ops
from toolkit.runners.tensor.runner import TensorRunner


def _ordered(weight: torch.Tensor, bits: int) -> GroupInt:
    plain = to_group_int(weight, 8 if bits == 8 else 4, 32)
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0)) // 32
    codes, zeros = plain.codes % (1 << bits), plain.zeros % (1 << bits)
    return GroupInt(codes, plain.scales, zeros, bits, 32, None, order.int())


# Format → what every linear becomes, layer after layer another.
KINDS: dict[str, tuple[Callable[[torch.Tensor], Any], ...]] = {
    "awq": (lambda w: to_group_int(w, 4, 32),),
    "gptq_v2": (lambda w: to_group_int(w, 4, 32), lambda w: to_group_int(w, 8, 32), lambda w: _ordered(w, 3)),
    "compressed-tensors": (
        to_channel_int8,
        lambda w: Fp8(w.to(torch.float8_e4m3fn), torch.ones(len(w))),
        lambda w: to_block_fp8(w, block=(32, 32)),
        to_mxfp4,
        lambda w: to_group_int(w, 4, 32),
    ),
    "w8a8": (to_channel_int8,),
    "fp8": (to_block_fp8,),
    "mxfp4": (to_mxfp4,),
}


@pytest.fixture
def written(tiny_models: Any, tmp_path: Path) -> Callable[..., Path]:
    """``written(format, family)``: a checkpoint whose linears are of ``KINDS[format]`` in turn."""

    def make(name: str, family: str = "llama") -> Path:
        if name in ("dense", "cpu", "torch", "cuda-sm80"):
            return tiny_models(family)
        if name.startswith("gguf "):
            rewrite(str(tiny_models(family)), tmp_path / "m.gguf", to="gguf", gguf_type=name.removeprefix("gguf "))
            return tmp_path / "m.gguf"
        source, target = tiny_models(family, num_hidden_layers=3), tmp_path / "m"
        target.mkdir()
        tensors, layouts, kinds = {}, {}, KINDS[name]
        for key, tensor in load_file(source / "model.safetensors").items():
            stem = key.removesuffix(".weight")
            if "_proj" not in stem or key.endswith("bias"):
                tensors[key] = tensor
                continue
            weight = kinds[len(layouts) % len(kinds)](tensor)
            tensors |= WRITERS[name].write(stem, weight)
            layouts[stem] = layout_of(weight)
        save_file(tensors, target / "model.safetensors")
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] = WRITERS[name].config(layouts)
        (target / "config.json").write_text(json.dumps(config))
        return target

    return make


CASES = [
    *((name, "llama") for name in (*KINDS, "dense", "gguf Q4_0", "gguf Q5_1", "gguf Q8_0")),
    *(("dense", family) for family in names() if family != "llama"),
    ("awq", "qwen2"),
]


@pytest.mark.parametrize("name, family", CASES)
def test_weights_are_what_their_headers_say(name: str, family: str, written: Any) -> None:
    weights = open_model(written(name, family)).weights()
    _same_form(weights)


@pytest.mark.parametrize("target", ["cpu", "torch", "cuda-sm80"])
@pytest.mark.parametrize("name", ["dense", "awq", "gptq_v2", "compressed-tensors", "gguf Q5_1"])
def test_so_are_those_of_artifacts(name: str, target: str, written: Any, tmp_path: Path) -> None:
    from toolkit.runners.choose import canonical

    convert(str(written(name)), tmp_path / "engine", Packing(target=target))
    _same_form(canonical(open_model(tmp_path / "engine"))())


def test_so_are_rounded_and_made_up_ones(written: Any, tiny_models: Any) -> None:
    for name in ("dense", "awq"):
        for how in ("int8", "dummy"):
            if how == "int8" and name == "dense":
                _same_form(open_model(written(name), load_format=how).weights())
    _same_form(open_model(tiny_models("mixtral"), load_format="dummy").weights())


def _same_form(weights: Any) -> None:
    for name in weights:
        told, real = weights.info(name), weights[name]
        assert type(told) is type(real)
        if isinstance(real, torch.Tensor):
            assert (told.shape, told.dtype) == (real.shape, real.dtype), name
        else:
            assert _facts(told) == _facts(real), name


def _facts(value: Any) -> Any:
    """Numbers as they are, tensors by shape and dtype; what super-blocks hold beside does not matter here."""
    found = {f.name: getattr(value, f.name) for f in fields(value)}
    return {
        n: (tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else _facts(v) if is_dataclass(v) else v
        for n, v in found.items()
    }


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "packed"])
@pytest.mark.parametrize("name, family", CASES)
def test_the_tensor_runner_s_plan_is_exact(
    name: str, family: str, dense: bool, written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.Cpu, "dense", dense)
    opened = open_model(written(name, family))
    runner = TensorRunner(opened.spec, opened.weights, RunnerOptions(device="cpu"))
    planned = runner.memory().weights
    runner.load_weights()
    tower = runner._encoder.weights if runner._encoder is not None else None
    held = {id(t): t.nbytes for t in _tensors([runner._decoder, tower])}
    assert planned == sum(held.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif getattr(value, "__closure__", None):
        yield from _tensors([cell.cell_contents for cell in value.__closure__])
    elif is_dataclass(value) and not isinstance(value, (type, Ops, DecoderSpec)):
        yield from _tensors([getattr(value, f.name) for f in fields(value)])


@pytest.mark.parametrize("name, family", CASES)
def test_the_native_runner_s_plan_is_exact(name: str, family: str, written: Any) -> None:
    opened = open_model(written(name, family))
    weights: Any = opened.weights()
    packed = dict(pack_model(opened.spec, weights.items(), None, []))
    most = sum(p.data.nbytes for p in packed.values())
    planned = sum(p.meta.nbytes for p in outlines(opened.spec, weights).values())
    if name == "gptq_v2":  # zero points of 8-bit codes are stored: they might lie anywhere
        assert most <= planned < 1.1 * most
    else:
        assert planned == most


def test_what_grows_is_told_once_for_all_that_are_alike(written: Any) -> None:
    opened = open_model(written("compressed-tensors"))
    notes: list[str] = []
    weights: Any = opened.weights()
    packed = dict(pack_model(opened.spec, weights.items(), None, notes))
    for name, tensor in packed.items():
        grew = not isinstance(weights[name], (torch.Tensor, Dense)) and tensor.meta.origin["form"] == "dense"
        assert grew == any(note.startswith(f"{name}: ") for note in notes), name
    told = gathered(notes)
    assert len(told) < len(notes) and all("held as bfloat16" in note for note in told)
    for note in told:
        what = note.partition(": ")[2]
        more = sum(n.endswith(f": {what}") for n in notes) - 1
        assert f" and {more} more: " in note if more else " more: " not in note
