"""Weights that nobody trained (``--load-format dummy``): forms, lists of modules that stay dense, what is refused."""

from __future__ import annotations

import json

import pytest
import torch

from toolkit.artifacts.canonical import Dense, Fp8, GroupInt
from toolkit.errors import ToolkitError, UsageError
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_model, open_runner


def _config(tiny_models, folder, **fields):
    config = json.loads((tiny_models("llama") / "config.json").read_text())
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize(
    "quantization",
    [
        None,
        {"quant_method": "awq", "bits": 4, "group_size": 32},
        {"quant_method": "gptq", "bits": 8, "group_size": -1},
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        {"quant_method": "smooth_quant"},
    ],
)
def test_dummy_weights_run_a_model_that_was_not_fetched(quantization, tiny_models, tmp_path, steps):
    fields = {} if quantization is None else {"quantization_config": quantization}
    path = _config(tiny_models, tmp_path / "shape", **fields)
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16)
    logits = []
    for _ in range(2):
        runner, _ = open_runner(path, backend="pytorch", options=options, load_format="dummy")
        driver = steps.Driver(runner)
        logits.append(driver.step({driver.add(): [3, 4, 5]}, "all").logits)
    assert (logits[0] == logits[1]).all() and 0.1 < logits[0].std() < 10


def test_dummy_weights_want_a_config_they_can_follow(tiny_models, tmp_path):
    with pytest.raises(UsageError, match=r"expected a directory with config\.json"):
        open_model(tmp_path / "nothing", load_format="dummy")
    with pytest.raises(ToolkitError, match="not 'hqq'"):
        open_model(
            _config(tiny_models, tmp_path / "a", quantization_config={"quant_method": "hqq"}), load_format="dummy"
        )
    with pytest.raises(UsageError, match="expected one of auto, int8, int4, dummy"):
        open_model(tiny_models("llama"), load_format="fast")
    awq = {"quant_method": "awq", "bits": 4, "group_size": 48}
    opened = open_model(_config(tiny_models, tmp_path / "b", quantization_config=awq), load_format="dummy")
    with pytest.raises(ToolkitError, match="48 does not divide 64"):
        opened.weights()["model.layers.0.self_attn.q_proj"]


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ("awq", "quantization_config: expected an object, found 'awq'"),
        ({"quant_method": ["awq"]}, "not ['awq']"),
        ({"quant_method": "awq", "w_bit": "four"}, "quantization_config.w_bit: found four"),
        ({"quant_method": "gptq", "bits": 9}, "quantization_config.bits: found 9"),
        ({"quant_method": "gptq", "group_size": 0}, "quantization_config.group_size: found 0"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "quantization_config.weight_block_size: found [128]"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "quantization_config.weight_block_size: found 128"),
        ({"quant_method": "awq", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert: found lm_head"),
        ({"quant_method": "fp8", "ignored_layers": [1]}, "quantization_config.ignored_layers: found [1]"),
        ({"quant_method": "gptq", "lm_head": "yes"}, "quantization_config.lm_head: found yes"),
        ({"quant_method": "gptq", "dynamic": {"(": {}}}, "quantization_config.dynamic: pattern '('"),
        ({"quant_method": "gptq", "dynamic": {"a": {"bits": 9}}}, "quantization_config.dynamic: bits: found 9"),
        ({"quant_method": "gptq", "modules_in_block_to_quantize": ["a"]}, "modules_in_block_to_quantize: found ['a']"),
    ],
)
def test_a_quantization_that_cannot_be_followed_is_one_line(quantization, words, tiny_models, tmp_path):
    path = _config(tiny_models, tmp_path / "shape", quantization_config=quantization)
    with pytest.raises(ToolkitError) as caught:
        open_model(path, load_format="dummy")
    message = str(caught.value)
    assert words in message and str(path / "config.json") in message and "\n" not in message


def test_dummy_weights_of_a_config_in_float8_are_bfloat16(tiny_models, tmp_path):
    path = _config(tiny_models, tmp_path / "shape", dtype="float8_e4m3fn", torch_dtype=None)
    weights = open_model(path, load_format="dummy").weights()
    assert weights["model.embed_tokens"].weight.dtype == torch.bfloat16


def test_the_flag_reaches_the_engine(tiny_models, tmp_path):
    from toolkit.configs.engine import PytorchEngineConfig
    from toolkit.engine.load.setup import find
    from toolkit.engine.load.start import start

    path = _config(tiny_models, tmp_path / "shape")
    config = PytorchEngineConfig(load_format="dummy", device_type="cpu", session_len=64, max_batch_size=2)
    core, facts = start(find(str(path), config, "pytorch"), None, lambda text: None)
    assert facts.runner == "tensor" and facts.plan.session_len == 64
    core.runner.close()
    with pytest.raises(UsageError, match="load_format"):
        PytorchEngineConfig(load_format="fast")


@pytest.mark.parametrize(
    "family, quantization, dense",
    [
        ("llama", {"quant_method": "awq", "modules_to_not_convert": ["layers.0", "down_proj"]}, "layers.0. down_proj"),
        ("llama", {"quant_method": "fp8", "ignored_layers": ["model.layers.1.mlp.up_proj"]}, "1.mlp.up_proj"),
        ("llama", {"quant_method": "smooth_quant", "ignore": ["re:.*self_attn"]}, "self_attn"),
        ("llama", {"quant_method": "gptq", "dynamic": {"-:.*o_proj": {}}}, "o_proj"),
        ("llama", {"quant_method": "gptq", "modules_in_block_to_quantize": [["mlp.up_proj"]]}, "self_attn gate down"),
        ("phi3", {"quant_method": "awq", "modules_to_not_convert": ["gate_up_proj"]}, "gate up"),
        ("mixtral", {"quant_method": "awq", "modules_to_not_convert": ["gate"]}, "gate"),
    ],
)
def test_modules_that_a_config_leaves_out_stay_dense(family, quantization, dense, tiny_models, tmp_path):
    """gate of mixtral is its router, which is dense anyway: its experts' gates are quantized all the same."""
    from toolkit.models.registry import build

    config = json.loads((tiny_models(family) / "config.json").read_text())
    config["quantization_config"] = {"group_size": 32} | quantization
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = open_model(tmp_path, load_format="dummy")
    weights, parts = opened.weights(), dense.split()
    linears = [x.name for x in opened.spec.linears()]
    left = {name for name in linears if isinstance(weights[name], Dense)}
    if family == "mixtral":
        assert left == {name for name in linears if name.endswith("gate")}
    elif family == "phi3":
        fused = [i for i in build(config)[1] if i.name.endswith("gate_up_proj")]
        assert left == {part.name for item in fused for part in item.parts} and left
    else:
        assert left == {name for name in linears if any(part in name for part in parts)} and len(left) < len(linears)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_in_8_bits(tied, tiny_models, tmp_path, steps, support):
    """As GPTQModel writes it; the embedding stays as it is, and graphs give the plain runner's tokens."""
    from toolkit.runners.tensor.runner import TensorRunner

    scheme = {"quant_method": "gptq", "bits": 4, "group_size": 32, "lm_head": True}
    scheme["dynamic"] = {"+:^lm_head$": {"bits": 8, "group_size": 64}}
    path = _config(tiny_models, tmp_path / "shape", quantization_config=scheme, tie_word_embeddings=tied)
    opened = open_model(path, load_format="dummy")
    head, embed = opened.weights()[opened.spec.head], opened.weights()[opened.spec.embed]
    assert isinstance(head, GroupInt) and (head.bits, head.group_size) == (8, 64) and isinstance(embed, Dense)
    options, graphs = RunnerOptions(device="cpu", dtype="float32", block_size=16), support("graphs")
    device = graphs.CpuDevice()
    runner = TensorRunner(opened.spec, opened.weights, options, graphs=device, ops=graphs.interpreted_ops())
    ours = steps.Driver(device.watch(runner))
    oracle = steps.Driver(open_runner(path, backend="pytorch", options=options, load_format="dummy")[0])
    ours.add(), oracle.add()
    for ids in ([3, 4, 5], [6], [7], [8]):
        found, expected = (d.step({0: ids}) for d in (ours, oracle))
        assert found.tokens.tolist() == expected.tokens.tolist()
    assert device.replays == 2


def test_fp8_without_lists_takes_every_linear(tiny_models, tmp_path):
    path = _config(tiny_models, tmp_path / "shape", quantization_config={"quant_method": "fp8"})
    opened = open_model(path, load_format="dummy")
    weights = opened.weights()
    assert all(isinstance(weights[x.name], Fp8) for x in opened.spec.linears())
    assert isinstance(weights[opened.spec.head], Dense)
