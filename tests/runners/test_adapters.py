"""LoRA adapters in the runner without graphs, against models with the adapter merged into their weights."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from toolkit.artifacts.adapters.adapter import read_adapter
from toolkit.errors import ToolkitError
from toolkit.runners.base import RunnerError, RunnerOptions
from toolkit.runners.choose import open_model, open_runner

ATTENTION, ALL = "q_proj|v_proj", r"(?:[qkvo]|gate|up|down|qkv|gate_up|wqkv|wo)_?(?:proj)?|w[123]"
LATENT = "q_[ab]_proj|kv_a_proj_with_mqa|o_proj"


@pytest.fixture
def adapters(support):
    return support("adapters")


def runner_for(model, *adapters, dtype="float32"):
    options = RunnerOptions(
        device="cpu", dtype=dtype, block_size=16, adapters=tuple((a.name, str(a)) for a in adapters)
    )
    return open_runner(model, backend="pytorch", options=options)[0]


def ids(count, seed):
    return np.random.default_rng(seed).integers(3, 300, count).tolist()


def logits_alone(steps, runner, prompt, adapter=-1):
    """[len(prompt), V]: all but the last tokens as a prompt, then one alone."""
    driver = steps.Driver(runner)
    number = driver.add()
    index = {"adapter": np.array([adapter], np.int32)}
    first = driver.step({number: prompt[:-1]}, "all", **index).logits
    return np.concatenate([first, driver.step({number: prompt[-1:]}, "all", **index).logits])


@pytest.mark.parametrize(
    "family, targets",
    [("llama", ATTENTION), ("llama", ALL), ("phi3", ALL), ("internlm2", ALL), ("gemma2", ALL), ("deepseek_v3", LATENT)],
)
def test_an_adapter_gives_what_merged_weights_give(family, targets, tiny_models, adapters, steps, tmp_path):
    model = tiny_models(family)
    made = adapters.write_adapter(tmp_path / "one", model, targets)
    expected = logits_alone(steps, runner_for(adapters.merge(model, made, tmp_path / "merged")), ids(23, 0))
    runner = runner_for(model, made)
    found = logits_alone(steps, runner, ids(23, 0), adapter=0)
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)
    base = logits_alone(steps, runner_for(model), ids(23, 0))
    np.testing.assert_array_equal(logits_alone(steps, runner, ids(23, 0)), base)
    assert np.abs(found - base).max() > 0.1


@pytest.mark.parametrize("family", ["cohere", "internlm2", "phi3"])
def test_an_artifact_takes_what_its_checkpoint_takes(family, tiny_models, adapters, steps, tmp_path):
    """Rows that the checkpoint has in another order, and names of its own."""
    from toolkit.convert.convert import convert
    from toolkit.convert.options import Packing

    model = tiny_models(family)
    made = adapters.write_adapter(tmp_path / "one", model, ALL)
    engine = tmp_path / "engine"
    convert(model, engine, Packing(target="torch"))
    expected = logits_alone(steps, runner_for(model, made), ids(23, 0), adapter=0)
    found = logits_alone(steps, runner_for(engine, made), ids(23, 0), adapter=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(found - logits_alone(steps, runner_for(model), ids(23, 0))).max() > 0.1


def test_a_ragged_batch_of_several_adapters(tiny_models, adapters, steps, tmp_path):
    model = tiny_models("llama")
    made = [
        adapters.write_adapter(tmp_path / "a", model, ATTENTION, rank=3, seed=2),
        adapters.write_adapter(tmp_path / "b", model, ALL, rank=20, seed=3, use_rslora=True),
        adapters.write_adapter(
            tmp_path / "c", model, ALL, rank=8, seed=4, rank_pattern={"o_proj": 2}, alpha_pattern={"down_proj": 3}
        ),
    ]
    merged = [model, *(adapters.merge(model, a, tmp_path / f"merged-{a.name}") for a in made)]
    lengths = [5, 19, 1, 8, 30]
    use = np.array([1, -1, 2, 0, 1], np.int32)
    driver = steps.Driver(runner_for(model, *made))
    numbers = [driver.add() for _ in use]
    found = driver.step({n: ids(k, n) for n, k in zip(numbers, lengths, strict=True)}, "all", adapter=use).logits
    more = driver.step({n: [7] for n in numbers}, "all", adapter=use).logits
    rows = np.split(found, np.cumsum(lengths)[:-1])
    for n, (adapter, length) in enumerate(zip(use, lengths, strict=True)):
        expected = logits_alone(steps, runner_for(merged[adapter + 1]), [*ids(length, n), 7])
        np.testing.assert_allclose(np.concatenate([rows[n], more[n : n + 1]]), expected, rtol=3e-4, atol=3e-4)


def test_a_quantized_base_takes_adapters(tiny_models, adapters, steps, tmp_path, support):
    """W8A8 linears with an adapter read what a norm has not rounded; those without still take its codes."""
    from toolkit.artifacts.canonical import ChannelInt8
    from toolkit.runners.tensor import decoder
    from toolkit.runners.tensor.layers.lora import Adapted
    from toolkit.runners.tensor.runner import TensorRunner

    model = tiny_models("llama")
    opened = open_model(model)
    weights = dict(opened.weights())
    for linear in opened.spec.linears():
        w = weights[linear.name].dequantize()
        scales = w.abs().amax(1) / 127
        weights[linear.name] = ChannelInt8((w / scales[:, None]).round().char(), scales)
    made = adapters.write_adapter(tmp_path / "a", model, ATTENTION)
    pairs = [read_adapter(made, opened.spec, opened.stored)]
    runner = TensorRunner(opened.spec, lambda: weights, RunnerOptions(device="cpu", dtype="bfloat16"), pairs)
    found = logits_alone(steps, runner, ids(20, 1), adapter=0)
    attention, mlp = runner._decoder.steps[:2]
    assert isinstance(attention.mixer.qkv, Adapted) and not isinstance(attention.pre_norm, decoder.RoundingNorm)
    assert isinstance(mlp.pre_norm, decoder.RoundingNorm)
    expected = logits_alone(steps, runner_for(adapters.merge(model, made, tmp_path / "merged")), ids(20, 1))
    base = logits_alone(steps, runner_for(model), ids(20, 1))
    error, change = np.linalg.norm(found - expected), np.linalg.norm(base - expected)
    assert error < 0.1 * np.linalg.norm(expected) and error < 0.5 * change


def test_memory_counts_adapters_and_an_unknown_one_fails_the_step(tiny_models, adapters, steps, tmp_path):
    model = tiny_models("llama")
    runner = runner_for(model, adapters.write_adapter(tmp_path / "a", model, ALL))
    assert runner.memory().weights > runner_for(model).memory().weights
    driver = steps.Driver(runner)
    with pytest.raises(RunnerError, match=r"adapter: expected values in \[-1, 1\), found 1"):
        driver.step({driver.add(): [5, 6]}, adapter=np.array([1], np.int32))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"peft_type": "IA3"}, "peft_type: expected LORA, found 'IA3'"),
        ({"use_dora": True}, "use_dora: expected lora_magnitude_vector"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: expected"),
        ({"bias": "all"}, "bias: expected 'none', found 'all'"),
        ({"init_lora_weights": "pissa"}, "changes the base weights too"),
        ({"r": 5}, "r: expected 4, the rank of"),
        ({"lora_alpha": "x"}, "lora_alpha: expected a number"),
        ({"alpha_pattern": {"(": 2}}, "is no regular expression"),
    ],
)
def test_what_an_adapter_cannot_be_is_said_in_one_line(change, message, tiny_models, adapters, tmp_path):
    model = tiny_models("llama")
    made = adapters.write_adapter(tmp_path / "a", model, ATTENTION)
    config = json.loads((made / "adapter_config.json").read_text())
    (made / "adapter_config.json").write_text(json.dumps(config | change))
    opened = open_model(model)
    with pytest.raises(ToolkitError) as error:
        read_adapter(made, opened.spec, opened.stored)
    assert message in str(error.value) and "\n" not in str(error.value) and "adapter_config.json" in str(error.value)


def test_modules_and_shapes_that_do_not_fit(tiny_models, adapters, tmp_path):
    def refusal(model, made):
        opened = open_model(model)
        with pytest.raises(ToolkitError) as error:
            read_adapter(made, opened.spec, opened.stored)
        return str(error.value)

    llama, mixtral = tiny_models("llama"), tiny_models("mixtral")
    other = tiny_models("llama", hidden_size=96)
    assert "the adapter is of another model" in refusal(other, adapters.write_adapter(tmp_path / "a", llama, ATTENTION))
    embed = adapters.write_adapter(tmp_path / "b", llama, "embed_tokens")
    assert "it changes model.embed_tokens" in refusal(llama, embed)
    assert "no embedding, head, router, expert or kv_b_proj" in refusal(
        mixtral, adapters.write_adapter(tmp_path / "c", mixtral, "gate|router")
    )
    latent = tiny_models("minicpm3")
    both_sides = adapters.write_adapter(tmp_path / "e", latent, "kv_b_proj")
    assert "it changes model.layers.0.self_attn.kv_b_proj" in refusal(latent, both_sides)
    (tmp_path / "d").mkdir()
    assert "found no adapter_config.json" in refusal(llama, tmp_path / "d")
    (embed / "adapter_model.safetensors").rename(embed / "adapter_model.bin")
    assert "adapter_model.bin: expected a file of torch.save" in refusal(llama, embed)
    (embed / "adapter_model.bin").unlink()
    assert "expected adapter_model.safetensors or adapter_model.bin" in refusal(llama, embed)


def test_one_of_torch_save_is_the_same(adapters, tiny_models, tmp_path):

    path = adapters.write_adapter(tmp_path / "a", tiny_models("llama"), ATTENTION)
    opened = open_model(tiny_models("llama"))
    expected = read_adapter(path, opened.spec, opened.stored)
    torch.save(load_file(path / "adapter_model.safetensors"), path / "adapter_model.bin")
    (path / "adapter_model.safetensors").unlink()
    found = read_adapter(path, opened.spec, opened.stored)
    assert set(found) == set(expected) and found
    assert all(torch.equal(found[n].a, x.a) and torch.equal(found[n].b, x.b) for n, x in expected.items())
