"""Modules with rows in another order, transposed or stacked by experts: what is read is written back as it was."""

from __future__ import annotations

import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from toolkit.artifacts.canonical import Fp4
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.weights import canonical_weights, load_part, validate_checkpoint
from toolkit.convert.formats import rewrite
from toolkit.errors import ToolkitError
from toolkit.models.registry import load_spec
from toolkit.quant.lite import auto_awq, mxfp4
from toolkit.quant.options import Awq, Common
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native import library as native

FAMILIES = ("cohere", "gpt_oss", "granitemoe")
EXPERTS = "model.layers.0.mlp.experts"
BACKENDS = ("pytorch", "turbomind") if native.available() is None else ("pytorch",)


def _tensors(path):
    return load_file(path / "model.safetensors")


def _canonical(path):
    checkpoint = open_checkpoint(path)
    _, stored = load_spec(checkpoint)
    validate_checkpoint(checkpoint, stored)
    found = canonical_weights(checkpoint, stored)
    return {k: v if isinstance(v, torch.Tensor) else v.dequantize() for k, v in found.items()}


def _same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name].float(), b[name].float()), name


@pytest.mark.parametrize("family", FAMILIES)
def test_dense_tensors_come_back_bit_by_bit(family, tiny_models, tmp_path):
    source = tiny_models(family)
    rewrite(str(source), tmp_path / "hf", to="hf", quiet=True)
    ours, theirs = _tensors(tmp_path / "hf"), _tensors(source)
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in theirs.items()}
    _same(ours, theirs)


@pytest.mark.parametrize("family", [*FAMILIES, "internlm2"])
def test_parts_read_one_by_one_are_those_read_together(family, tiny_models):
    checkpoint = open_checkpoint(tiny_models(family))
    _, stored = load_spec(checkpoint)
    whole = canonical_weights(checkpoint, stored)
    single = {name: x for item in stored for part in item.parts for name, x in load_part(checkpoint, item, part)}
    assert single.keys() == whole.keys()
    for name, value in single.items():
        a, b = (x if isinstance(x, torch.Tensor) else x.weight for x in (value, whole[name]))
        assert torch.equal(a, b), name


@pytest.mark.parametrize("to", ["w8a8", "fp8", "mxfp4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounded_weights_are_read_as_they_were_rounded(family, to, tiny_models, tmp_path):
    """Row by row: the errors are those of rounding, so no row is another's."""
    source = tiny_models(family)
    rewrite(str(source), tmp_path / to, to=to, quiet=True)
    exact, found = _canonical(source), _canonical(tmp_path / to)
    assert exact.keys() == found.keys()
    for name in exact:
        limit = {"w8a8": 0.02, "fp8": 0.06, "mxfp4": 0.2}[to]
        assert (found[name].float() - exact[name].float()).norm() < limit * exact[name].norm(), name
    rewrite(str(tmp_path / to), tmp_path / "hf", to="hf", quiet=True)
    _same(_canonical(tmp_path / "hf"), found)
    assert _tensors(tmp_path / "hf").keys() == _tensors(source).keys()  # stacks are stacks again


def test_mxfp4_experts_are_stacked_as_gpt_oss_ships_them(tiny_models, tmp_path):
    source = tiny_models("gpt_oss")
    config = json.loads((source / "config.json").read_text())
    count, hidden, inner = (config[n] for n in ("num_local_experts", "hidden_size", "intermediate_size"))
    rewrite(str(source), tmp_path / "mx", to="mxfp4", quiet=True)
    found, dense = _tensors(tmp_path / "mx"), _tensors(source)
    assert found[f"{EXPERTS}.gate_up_proj_blocks"].shape == (count, 2 * inner, hidden // 32, 16)
    assert found[f"{EXPERTS}.gate_up_proj_scales"].shape == (count, 2 * inner, hidden // 32)
    assert found[f"{EXPERTS}.down_proj_blocks"].shape == (count, hidden, inner // 32, 16)
    assert torch.equal(found[f"{EXPERTS}.gate_up_proj_bias"], dense[f"{EXPERTS}.gate_up_proj_bias"])
    blocks, scales = (found[f"{EXPERTS}.gate_up_proj_{n}"][2] for n in ("blocks", "scales"))
    codes = torch.stack([blocks & 15, blocks >> 4], -1).view(2 * inner, hidden)
    expert = Fp4(codes, scales, 32).dequantize()
    exact = dense[f"{EXPERTS}.gate_up_proj"][2].T
    assert (expert - exact).norm() < 0.2 * exact.norm()
    back = _canonical(tmp_path / "mx")  # gate in the even rows, up in the odd
    assert torch.equal(back[f"{EXPERTS}.2.gate_proj"], expert[0::2])
    assert torch.equal(back[f"{EXPERTS}.2.up_proj"], expert[1::2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gpt_oss_in_mxfp4_gives_transformers_logits(backend, tiny_models, support, tmp_path):
    """Of the same numbers; the native runner has the head and the embedding in 8 bits, so that a router may waver."""
    from transformers import AutoModelForCausalLM

    rewrite(str(tiny_models("gpt_oss")), tmp_path / "mx", to="mxfp4", quiet=True)
    rewrite(str(tmp_path / "mx"), tmp_path / "hf", to="hf", quiet=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32, attn_implementation="eager")
    ids = np.random.default_rng(0).integers(5, 320, 40).tolist()
    with torch.no_grad():
        expected = model.eval()(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16, threads=1)
    driver = support("steps").Driver(open_runner(tmp_path / "mx", backend=backend, options=options)[0])
    found = driver.step({driver.add(): ids}, "all").logits
    errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert (errors.max() if backend == "pytorch" else np.median(errors)) < {"pytorch": 1e-4, "turbomind": 0.05}[backend]


@pytest.mark.slow  # Triton's interpreter
def test_gpt_oss_in_mxfp4_decodes_by_graphs(tiny_models, support, tmp_path):
    """Its experts with their biases run together, so that a decode step is captured as on a GPU."""
    from toolkit.runners.choose import open_model
    from toolkit.runners.tensor.runner import TensorRunner

    rewrite(str(tiny_models("gpt_oss")), tmp_path / "mx", to="mxfp4", quiet=True)
    opened, graphs = open_model(tmp_path / "mx"), support("graphs")
    device, ops = graphs.CpuDevice(), graphs.interpreted_ops("moe_experts_fp4", "act_and_mul")
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16, threads=1)
    runner = device.watch(TensorRunner(opened.spec, opened.weights, options, graphs=device, ops=ops))
    driver, ids = support("steps").Driver(runner), np.random.default_rng(0).integers(5, 320, 24).tolist()
    one, other = driver.add(), driver.add()
    driver.step({one: ids[:-1], other: [5, 6]})
    found = driver.step({one: ids[-1:], other: [7]}).tokens[0, 0]
    weights = support("random_specs").dense(dict(opened.weights()))
    assert found == support("plain_model").logits(opened.spec, weights, ids)[-1].argmax()


def test_mxfp4_is_the_same_by_lite_and_by_convert(tiny_models, tmp_path):
    source = str(tiny_models("llama"))
    rewrite(source, tmp_path / "convert", to="mxfp4", quiet=True)
    mxfp4(source, tmp_path / "lite", common=Common(format="mxfp4", eval_tokens=64))
    by_convert, by_lite = (load_file(tmp_path / name / "model.safetensors") for name in ("convert", "lite"))
    codes = [name for name in by_lite if name.endswith(("_blocks", "_scales"))]
    assert len(codes) == 2 * 14 and all(torch.equal(by_convert[name], by_lite[name]) for name in codes)


@pytest.mark.parametrize("family", ["cohere", "olmo2", "gpt_oss"])
@pytest.mark.parametrize("method", ["awq", "mxfp4"])
def test_quantized_models_stay_near_what_they_were(family, method, tiny_models, tmp_path, support):
    source = tiny_models(family)
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 200)
    common = Common(calib_dataset=str(text), calib_samples=4, calib_seqlen=32, eval_tokens=64)
    if method == "awq":
        result = auto_awq(str(source), tmp_path / "q", Awq(w_group_size=32, tune_steps=0), common=common)
    else:
        result = mxfp4(str(source), tmp_path / "q", common=common)
    assert all(layer["rel_error"] < 0.3 for layer in result.quality["layers"])
    ids, options = [3, 50, 7, 120, 9, 33, 200, 41], RunnerOptions(device="cpu", dtype="float32", block_size=16)
    logits = []
    for path in (source, tmp_path / "q"):
        driver = support("steps").Driver(open_runner(path, backend="pytorch", options=options)[0])
        logits.append(driver.step({driver.add(): ids}, "all").logits)
    assert np.linalg.norm(logits[1] - logits[0]) < 0.6 * np.linalg.norm(logits[0])


def _turned(source, target):
    """A copy of a checkpoint of which all stacks of experts stand the other way round, as Qwen3-VL's are released."""
    shutil.copytree(source, target)
    tensors = _tensors(source)
    swapped = {n: t.transpose(1, 2).contiguous() for n, t in tensors.items() if ".experts." in n and t.dim() == 3}
    assert swapped
    save_file(tensors | swapped, target / "model.safetensors", {"format": "pt"})
    return target


def test_stacks_are_read_as_they_stand(tiny_models, tmp_path):
    """transformers 5 writes them straight, also square ones, which do not tell by themselves."""
    source = tiny_models("qwen3_vl_moe")
    down = _tensors(source)["model.language_model.layers.0.mlp.experts.down_proj"]
    assert down.shape[1] == down.shape[2]
    _same(_canonical(_turned(source, tmp_path / "turned")), _canonical(source))


@pytest.mark.parametrize("block", [[16, 32], [48, 32], None], ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_float8_stacks(turned, block, tiny_models, tmp_path):
    """``X`` and ``X_scale_inv``, beside linears that are dense. ``block``: of 48 rows the last tile of an expert is not
    full; None: one scale an expert, or one for gate and one for up."""
    source, made = tiny_models("qwen3_vl_moe"), tmp_path / "fp8"
    shutil.copytree(source, made)
    config = json.loads((source / "config.json").read_text())
    stated = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    (made / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    tensors, dense = _tensors(source), _tensors(source)
    for name in [n for n, t in tensors.items() if ".experts." in n and t.dim() == 3]:
        stack = tensors[name].float()
        count, rows, columns = stack.shape
        halves = 2 if "gate_up" in name else 1
        high, wide = block or (rows // halves, columns)
        tiles = torch.zeros(count, -(-rows // high), -(-columns // wide))
        codes = torch.zeros_like(stack)
        for e, i, j in itertools.product(*map(range, tiles.shape)):
            at = e, slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            tiles[e, i, j] = stack[at].abs().max() / 448
            codes[at] = (stack[at] / tiles[e, i, j]).to(torch.float8_e4m3fn).float()
            dense[name][at] = codes[at] * tiles[e, i, j]
        order = (0, 2, 1) if turned else (0, 1, 2)
        tensors[name] = codes.permute(order).to(torch.float8_e4m3fn).contiguous()
        tensors[f"{name}_scale_inv"] = (tiles.permute(order) if block else tiles).contiguous()
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    shutil.copytree(source, tmp_path / "dense")
    save_file(dense, tmp_path / "dense" / "model.safetensors", {"format": "pt"})
    _same(_canonical(made), _canonical(tmp_path / "dense"))
    if turned and block:  # a tensor of the other order is said to be wrong
        wrong = {
            n: t.transpose(1, 2).contiguous() if n.endswith("gate_up_proj_scale_inv") else t for n, t in tensors.items()
        }
        save_file(wrong, made / "model.safetensors", {"format": "pt"})
        with pytest.raises(ToolkitError, match="gate_up_proj_scale_inv: expected shape"):
            _canonical(made)
