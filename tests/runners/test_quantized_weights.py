"""Models whose weights are held in each canonical form, against the same model made dense."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from toolkit.artifacts.canonical import FP4_VALUES, BlockFp8, ChannelInt8, Dense, Fp4, Fp8, GroupInt
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.weights import canonical_weights
from toolkit.models.registry import load_spec
from toolkit.runners.base import RunnerOptions
from toolkit.runners.tensor import build, decoder
from toolkit.runners.tensor.devices import device as module
from toolkit.runners.tensor.runner import TensorRunner


def group_int(
    w: torch.Tensor, bits: int = 4, group: int = 16, minima: bool = False, act_order: bool = False
) -> GroupInt:
    """Round to nearest; with ``act_order`` the groups are of scattered inputs."""
    out, n_in = w.shape
    order = torch.randperm(n_in, generator=torch.Generator().manual_seed(n_in)) if act_order else torch.arange(n_in)
    index = torch.empty(n_in, dtype=torch.int32)
    index[order] = (torch.arange(n_in) // group).int()
    grouped = w[:, order].view(out, -1, group)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scales = ((high - low) / (2**bits - 1)).clamp(min=1e-6)
    zeros = (-low / scales).round().clamp(0, 2**bits - 1)
    offset = low / scales if minima else -zeros
    codes = torch.empty(out, n_in, dtype=torch.uint8)
    rounded = (grouped / scales[..., None] - offset[..., None]).round().clamp(0, 2**bits - 1)
    codes[:, order] = rounded.view(out, n_in).to(torch.uint8)
    return GroupInt(
        codes,
        scales.half(),
        None if minima else zeros.to(torch.uint8),
        bits,
        group,
        low.half() if minima else None,
        index if act_order else None,
    )


def channel_int8(w: torch.Tensor) -> ChannelInt8:
    scales = w.abs().amax(1) / 127
    return ChannelInt8((w / scales[:, None]).round().to(torch.int8), scales)


def fp8(w: torch.Tensor) -> Fp8:
    scales = w.abs().amax(1) / 448
    return Fp8((w / scales[:, None]).to(torch.float8_e4m3fn), scales)


def block_fp8(w: torch.Tensor, block: int = 32) -> BlockFp8:
    """Tiles of block x block; those at the border are smaller."""
    out, n_in = w.shape
    rows, columns = torch.arange(out) // block, torch.arange(n_in) // block
    scales = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for i, j in itertools.product(range(scales.shape[0]), range(scales.shape[1])):
        scales[i, j] = w[rows == i][:, columns == j].abs().max() / 448
    return BlockFp8((w / scales[rows][:, columns]).to(torch.float8_e4m3fn), scales, (block, block))


def fp4(w: torch.Tensor, group: int = 16, nv: bool = False, factor: float = 100.0) -> Fp4:
    """To the nearest value, in blocks; ``nv``: with scales in float8 and a global scale, else in powers of two."""
    grouped = w.unflatten(1, (-1, group))
    wanted = grouped.abs().amax(-1).clamp(min=1e-6) / 6
    whole = torch.tensor([factor]) if nv else None
    scales = (wanted * factor).to(torch.float8_e4m3fn) if nv else (wanted.log2().ceil() + 127).to(torch.uint8)
    factors = Fp4(torch.zeros_like(w, dtype=torch.uint8), scales, group, whole).float_scales()
    distance = grouped[..., None] / factors[..., None, None] - torch.tensor(FP4_VALUES)
    return Fp4(distance.abs().argmin(-1).flatten(1).to(torch.uint8), scales, group, whole)


FORMS = {
    "zeros4": group_int,
    "minima4": lambda w: group_int(w, minima=True),
    "order4": lambda w: group_int(w, act_order=True),
    "zeros8": lambda w: group_int(w, bits=8),
    "zeros3": lambda w: group_int(w, bits=3),
    "zeros2": lambda w: group_int(w, bits=2),
    "int8": channel_int8,
    "fp8": fp8,
    "block_fp8": block_fp8,
    "mxfp4": fp4,
    "nvfp4": lambda w: fp4(w, nv=True),
}
ROUNDING = ("int8", "fp8", "block_fp8")  # activations too; on a CPU block_fp8 only where memory is short


@pytest.fixture
def logits(tiny_models, steps):
    """``logits(family, convert, dtype) -> (logits of a prompt in two steps, runner)`` with every linear converted."""

    def run(family, convert, dtype):
        checkpoint = open_checkpoint(tiny_models(family))
        spec, stored = load_spec(checkpoint)
        weights = canonical_weights(checkpoint, stored)
        routers = {n for n in weights if n.endswith("mlp.gate")}
        for linear in spec.linears():
            if linear.name not in routers:
                weights[linear.name] = convert(weights[linear.name].dequantize())
        runner = TensorRunner(spec, lambda: weights, RunnerOptions(dtype=dtype, device="cpu", block_size=16))
        driver = steps.Driver(runner)
        number = driver.add()
        prompt = np.random.default_rng(0).integers(3, 300, 25).tolist()
        first = driver.step({number: prompt}, "all").logits
        return np.concatenate([first, driver.step({number: [7]}, "all").logits]), runner

    return run


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
@pytest.mark.parametrize("form", [f for f in FORMS if f not in ("int8", "fp8")])
def test_float32_runs_the_dequantized_model(family, form, logits):
    convert = FORMS[form]
    expected, _ = logits(family, lambda w: Dense(convert(w).dequantize()), "float32")
    found, runner = logits(family, convert, "float32")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert any("dequantized at load" in note for note in runner.notes)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
@pytest.mark.parametrize("form", [f for f in FORMS if f not in ROUNDING])
def test_weights_kept_packed_give_the_same(family, form, logits, monkeypatch):
    convert = FORMS[form]
    expected, dense = logits(family, convert, "float32")
    monkeypatch.setattr(module, "free_host_bytes", lambda: 1 << 10)
    found, packed = logits(family, convert, "float32")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert any("kept packed" in note for note in packed.notes)
    assert packed.memory().weights < dense.memory().weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form, error", [("int8", 0.08), ("fp8", 0.2), ("block_fp8", 0.2)])
def test_w8a8_rounds_activations_too(form, error, dtype, logits, monkeypatch):
    monkeypatch.setattr(module, "free_host_bytes", lambda: 1 << 10)
    convert = FORMS[form]
    weights_alone, _ = logits("llama", lambda w: Dense(convert(w).dequantize()), dtype)
    found, runner = logits("llama", convert, dtype)
    assert 1e-3 < _distance(found, weights_alone) < error
    assert runner.memory().weights < 60000 * 2 + 320 * 64 * 2 * (4 if dtype == "float32" else 2)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_norms_and_activations_round_what_w8a8_linears_read(family, form, logits, monkeypatch):
    fused, runner = logits(family, FORMS[form], "bfloat16")
    rounding = [s for s in runner._decoder.steps if isinstance(s.pre_norm, decoder.RoundingNorm)]
    assert len(rounding) == sum(not isinstance(s.mixer, decoder.Moe) for s in runner._decoder.steps) > 0
    for place in (build, decoder):
        monkeypatch.setattr(place, "codes_of", lambda linear: None)
    apart, runner = logits(family, FORMS[form], "bfloat16")
    assert not any(isinstance(s.pre_norm, decoder.RoundingNorm) for s in runner._decoder.steps)
    np.testing.assert_array_equal(fused, apart)


STACKED = {
    "zeros4": lambda w: group_int(w, 4, 32),
    "zeros8": lambda w: group_int(w, 8, 32),
    "mxfp4": fp4,
    "nvfp4": lambda w: fp4(w, nv=True, factor=100.0 if w[0, 0] > 0 else 70.0),  # gate and up with factors of their own
}


@pytest.mark.parametrize("form, stacks", [*((form, True) for form in STACKED), ("minima4", False), ("zeros2", False)])
def test_experts_kept_packed_run_together_where_they_can(form, stacks, logits, monkeypatch):
    convert = STACKED.get(form, FORMS[form])
    expected, _ = logits("mixtral", convert, "float32")
    monkeypatch.setattr(module, "free_host_bytes", lambda: 1 << 10)
    found, runner = logits("mixtral", convert, "float32")
    experts = [s.mixer for s in runner._decoder.steps if isinstance(s.mixer, decoder.Moe)]
    assert experts and all((m.stacked is not None) == stacks == (not m.experts) for m in experts)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_experts_in_tiles_run_together(logits, monkeypatch):
    monkeypatch.setattr(module, "free_host_bytes", lambda: 1 << 10)
    found, runner = logits("mixtral", FORMS["block_fp8"], "bfloat16")
    assert all(s.mixer.stacked for s in runner._decoder.steps if isinstance(s.mixer, decoder.Moe))
    monkeypatch.setattr(build, "stack_experts", lambda *_: None)
    apart, _ = logits("mixtral", FORMS["block_fp8"], "bfloat16")
    assert _distance(found, apart) < 0.02


def test_mixed_forms_in_one_layer(logits):
    exact = [convert for form, convert in FORMS.items() if form not in ("int8", "fp8")]
    seen: list[int] = []

    def convert(w):
        seen.append(0)
        return exact[len(seen) % len(exact)](w)

    def dense(w):
        return Dense(convert(w).dequantize())

    expected, _ = logits("llama", dense, "float32")
    seen.clear()
    found, _ = logits("llama", convert, "float32")
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_wrong_zero_point_would_show(logits):
    good, _ = logits("llama", group_int, "float32")

    def off_by_one(w):
        packed = group_int(w)
        return replace(packed, zeros=packed.zeros + 1)

    bad, _ = logits("llama", off_by_one, "float32")
    assert _distance(bad, good) > 0.1


@pytest.mark.parametrize("stacked", [True, False])
def test_a_stack_of_experts_is_read_once(stacked, tiny_models, monkeypatch):
    """Not once for each expert: of a large model that would be hours."""
    from toolkit.artifacts import weights
    from toolkit.artifacts.checkpoint import Checkpoint
    from toolkit.runners.choose import open_model

    if not stacked:
        monkeypatch.setattr(build, "stack_experts", lambda *args: None)
    opened, read = open_model(tiny_models("gpt_oss")), []
    load = weights.load_stored

    def spy(checkpoint, item):
        if type(checkpoint) is Checkpoint:  # not its headers alone
            read.append(item.name)
        return load(checkpoint, item)

    monkeypatch.setattr(weights, "load_stored", spy)
    made = TensorRunner(opened.spec, opened.weights, RunnerOptions(device="cpu", dtype="float32"))
    made.load_weights()
    stacks = [name for name in read if name.endswith("experts.down_proj")]
    assert len(set(stacks)) == len(opened.spec.layers) == len(stacks)
    made.close()
