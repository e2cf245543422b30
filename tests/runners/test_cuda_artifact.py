"""Weights packed for GPUs: what is written is read back bit by bit, and runs anywhere."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest
import torch

from toolkit.artifacts.canonical import Dense, GroupInt
from toolkit.artifacts.engine.files import open_engine
from toolkit.artifacts.weight_files.safetensors_file import read_header
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing
from toolkit.errors import ToolkitError
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_model, open_runner
from toolkit.runners.tensor import cuda_artifact as module
from toolkit.runners.tensor.cuda_artifact import FORM, CudaWeights, pack_cuda
from toolkit.runners.tensor.runner import TensorRunner


def _weight(bits=4, group=32, order=False, symmetric=False, minima=False, dtype=torch.float16):
    g = torch.Generator().manual_seed(bits)
    n_out, n_in = 24, 128
    grid = (n_out, n_in // group)
    zeros = torch.randint(0, 1 << bits, grid, generator=g, dtype=torch.uint8)
    return GroupInt(
        codes=torch.randint(0, 1 << bits, (n_out, n_in), generator=g, dtype=torch.uint8),
        scales=(torch.rand(grid, generator=g) + 0.1).to(dtype),
        zeros=None if minima else torch.full(grid, 1 << (bits - 1), dtype=torch.uint8) if symmetric else zeros,
        bits=bits,
        group_size=group,
        minima=torch.randn(grid, generator=g).half() if minima else None,
        group_index=(torch.randperm(n_in, generator=g) // group).int() if order else None,
    )


@pytest.mark.parametrize(
    "change, packed",
    [
        ({}, True),
        ({"symmetric": True}, True),
        ({"order": True}, True),
        ({"group": 128, "dtype": torch.bfloat16}, True),
        ({"bits": 8, "group": 64}, True),
        ({"bits": 3}, False),
        ({"minima": True}, False),
    ],
)
def test_every_weight_comes_back_bit_by_bit(change, packed, tmp_path, tiny_models):
    """Through the packer, a file, and the reader; what no CUDA kernel takes goes as for target torch."""
    from toolkit.artifacts.engine.artifact import ENGINE_ARRAYS, EngineArtifact
    from toolkit.artifacts.weight_files.safetensors_file import write_arrays

    weight = _weight(**change)
    spec = open_model(tiny_models("llama")).spec
    params = {}
    items = [("w", weight), ("dense", Dense(torch.randn(3, 5))), ("norm", torch.ones(7))]
    write_arrays(tmp_path / ENGINE_ARRAYS, pack_cuda(spec, items, params), {})
    assert (params["w"]["form"] == FORM) == packed
    artifact = EngineArtifact(
        tmp_path, replace(spec, layers=()), "cuda-sm80", params, read_header(tmp_path / ENGINE_ARRAYS)
    )
    found = CudaWeights(artifact, torch.device("cpu"))
    for name in ("codes", "scales", "zeros", "minima", "group_index"):
        a, b = getattr(found["w"], name), getattr(weight, name)
        assert (a is None and b is None) or torch.equal(a, b.to(a.dtype)), name
    assert (found["w"].bits, found["w"].group_size) == (weight.bits, weight.group_size)
    assert torch.equal(found["dense"].weight, items[1][1].weight) and torch.equal(found["norm"], items[2][1])


@pytest.fixture(scope="module")
def converted(tiny_models, tmp_path_factory):
    """(checkpoint in AWQ, its artifact for cuda-sm80)."""
    from toolkit.artifacts.canonical import GroupInt
    from toolkit.artifacts.checkpoint import open_checkpoint
    from toolkit.artifacts.formats import awq
    from toolkit.artifacts.weights import iter_canonical
    from toolkit.models.registry import load_spec

    folder = tmp_path_factory.mktemp("cuda")
    path = folder / "awq"
    path.mkdir()
    checkpoint = open_checkpoint(tiny_models("llama", dtype="float16"))
    spec, stored = load_spec(checkpoint)
    linears, tensors = {x.name for x in spec.linears()}, {}
    g = torch.Generator().manual_seed(0)
    for name, value in iter_canonical(checkpoint, stored):
        if name in linears:
            n_out, n_in = value.shape
            codes = torch.randint(0, 16, (n_out, n_in), generator=g, dtype=torch.uint8)
            scales = torch.full((n_out, n_in // 64), 0.02, dtype=torch.float16)
            zeros = torch.full(scales.shape, 7, dtype=torch.uint8)
            tensors |= awq.write_linear(name, GroupInt(codes, scales, zeros, 4, 64))
        else:
            dense = value.weight if isinstance(value, Dense) else value
            tensors[f"{name}.weight"] = dense.contiguous()
    from safetensors.torch import save_file

    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors", metadata={"format": "pt"})
    config = dict(checkpoint.config) | {"quantization_config": awq.config(group_size=64, zero_point=True)}
    (path / "config.json").write_text(json.dumps(config))
    done = convert(str(path), folder / "engine", Packing(target="cuda-sm80"), quiet=True)
    assert done.target == "cuda-sm80"
    return path, folder / "engine"


def test_an_artifact_for_a_gpu_gives_the_checkpoints_logits_on_any_runner(converted, steps, support):

    path, engine = converted
    assert any(e["form"] == FORM for e in open_engine(engine).params.values())
    options, logits = RunnerOptions(device="cpu", dtype="float32", block_size=16), []
    for model in (path, engine):
        driver = steps.Driver(open_runner(model, backend="pytorch", options=options)[0])
        logits.append(driver.step({driver.add(): [3, 4, 5, 6]}, "all").logits)
    assert (logits[0] == logits[1]).all()
    graphs, opened = support("graphs"), open_model(engine)
    runner = TensorRunner(opened.spec, opened.weights, options, graphs=graphs.CpuDevice(), ops=graphs.interpreted_ops())
    driver = steps.Driver(runner)
    found = driver.step({driver.add(): [3, 4, 5, 6]}, "all").logits
    assert abs(found - logits[0]).max() < 1e-3


def test_an_artifact_for_a_gpu_runs_without_one_with_a_notice(converted, monkeypatch):
    from toolkit.runners import choose

    monkeypatch.setattr(choose, "native_unsupported", lambda opened, options: None)
    _, note = open_runner(converted[1], backend=None, options=RunnerOptions(device="cpu", dtype="float32"))
    assert note == "weights packed for cuda-sm80 are packed anew for this CPU"


def test_an_artifact_that_lacks_an_array_is_refused(converted):
    artifact = open_engine(converted[1])
    name = next(n for n, e in artifact.params.items() if e["form"] == FORM)
    infos = {k: v for k, v in artifact.infos.items() if k != f"{name}.scales"}
    with pytest.raises(ToolkitError, match=r"scales: expected .* found nothing; convert the model again"):
        CudaWeights(replace(artifact, infos=infos), torch.device("cpu"))
    params = {k: v for k, v in artifact.params.items() if k != name}
    with pytest.raises(ToolkitError, match="is missing; convert the model again"):
        CudaWeights(replace(artifact, params=params), torch.device("cpu"))
    assert module.FORM == FORM


# -- heads in 8 bits


@pytest.fixture(scope="module")
def rounded(tiny_models, tmp_path_factory):
    """``rounded(family, bits)``: (checkpoint in bfloat16, its artifact for cuda-sm90 with a head in ``bits``)."""

    @functools.cache
    def make(family, bits):
        path = tiny_models(family, dtype="bfloat16")
        folder = tmp_path_factory.mktemp("head") / "engine"
        convert(str(path), folder, Packing(target="cuda-sm90", head_bits=bits), quiet=True)
        return path, folder

    return make


@pytest.mark.parametrize("family, bits, most", [("llama", 8, 0.01), ("qwen2", 8, 0.01), ("qwen2", 4, 0.15)])
def test_a_head_in_few_bits_stands_beside_an_embedding_that_stays(family, bits, most, rounded):
    """llama's is its own, qwen2's is the embedding."""
    path, engine = rounded(family, bits)
    before, opened = open_model(path), open_model(engine)
    spec, weights, stored = opened.spec, opened.weights(), before.weights()
    assert torch.equal(weights[spec.embed].weight, stored[spec.embed].weight)
    head, dense = weights[spec.head], stored[spec.embed if spec.tied else spec.head].weight.float()
    assert isinstance(head, GroupInt) and head.bits == bits and head.group_size == 64
    error = (head.dequantize() - dense).abs().amax() / dense.abs().amax()
    assert 0 < error < most
    assert open_engine(engine).params[spec.head]["form"] == FORM


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_head_in_8_bits_gives_the_torch_runners_tokens_through_graphs(family, rounded, steps, support):
    graphs, opened = support("graphs"), open_model(rounded(family, 8)[1])
    options, device = RunnerOptions(device="cpu", dtype="float32", block_size=16), graphs.CpuDevice()
    runner = TensorRunner(opened.spec, opened.weights, options, graphs=device, ops=graphs.interpreted_ops())
    ours = steps.Driver(device.watch(runner))
    oracle = steps.Driver(open_runner(rounded(family, 8)[1], backend="pytorch", options=options)[0])
    plain = steps.Driver(open_runner(rounded(family, 8)[0], backend="pytorch", options=options)[0])
    assert "linear_group_int" in str(runner._decoder.head.kernel)
    prompt = [3, 4, 5, 6]
    found, expected, unrounded = (d.step({d.add(): prompt}, "all").logits for d in (ours, oracle, plain))
    assert abs(found - expected).max() < 1e-3 < abs(found - unrounded).max() < 0.03 * abs(unrounded).max()
    for token in (7, 8, 9):
        out = [d.step({0: [token]}).tokens.tolist() for d in (ours, oracle)]
        assert out[0] == out[1]
    assert device.replays == 2


def test_the_head_of_an_artifact_for_a_gpu_stays_unless_asked_for(rounded):
    path, engine = rounded("qwen2", None)
    assert json.loads((engine / "manifest.json").read_text())["options"]["head_bits"] == 16
    assert "lm_head" not in open_engine(engine).params
    a, b = open_model(path), open_model(engine)
    assert torch.equal(a.weights()[a.spec.embed].weight, b.weights()[b.spec.embed].weight)


def test_a_head_that_cannot_be_rounded_is_refused(rounded):
    with pytest.raises(ToolkitError, match="lm_head has 40 inputs, no multiple of 32; use --head-bits 16"):
        module.round_head(Dense(torch.zeros(8, 40)), 8, "lm_head")
    with pytest.raises(ToolkitError, match="lm_head: holds NaN"):
        module.round_head(Dense(torch.full((8, 64), float("nan"))), 8, "lm_head")
    artifact = open_engine(rounded("llama", 8)[1])
    entry = artifact.params["lm_head"] | {"shape": [64, 320]}
    with pytest.raises(ToolkitError, match=r"lm_head: expected shape \[320, 64\], found \[64, 320\]; convert"):
        CudaWeights(replace(artifact, params=artifact.params | {"lm_head": entry}), torch.device("cpu"))
