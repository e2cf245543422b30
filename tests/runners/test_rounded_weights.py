"""Linears rounded to 8 or 4 bits while they are read (``--load-format int8``, ``int4``)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from toolkit.artifacts.canonical import Dense, GroupInt
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.sites import RowFold, layer_sites
from toolkit.models.spec import LayerSpec, ReuseSpec
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.selection import select
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_model, open_runner
from toolkit.runners.tensor.runner import TensorRunner
from toolkit.runners.weights.folding import Folded, fold_site
from toolkit.runners.weights.rounded import RoundedWeights, rounded
from toolkit.runners.weights.scaled import ScaledWeights


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma2", "mixtral", "qwen3_moe", "deepseek_v2"])
def test_linears_are_within_half_a_step_and_the_rest_is_untouched(family, tiny_models):
    exact, rounded = (open_model(tiny_models(family), load_format=f) for f in ("auto", "int8"))
    before, after = exact.weights(), rounded.weights()
    assert list(after) == list(before) and len(after) == len(before)
    linears = {x.name for x in exact.spec.linears()} - exact.spec.routers()
    linears -= {x.name for _, mixer in exact.spec.mixers() for x in mixer.matrices()}
    for name in before:
        w, found = before[name], after[name]
        if name not in linears:
            assert type(found) is type(w)
            old, new = (x.weight if isinstance(x, Dense) else x for x in (w, found))
            torch.testing.assert_close(new, old, rtol=0, atol=0)
            continue
        assert isinstance(found, GroupInt) and (found.bits, found.group_size) in ((8, 64), (8, 32))
        step = found.scales.float().repeat_interleave(found.group_size, 1)
        # The scale is rounded to float16, which can put the largest of a group off by 127 times its rounding.
        off = (found.dequantize() - w.dequantize()).abs()
        assert (off <= step * (0.5 + 127 * 2.0**-11) + 1e-7).all()
    if family in ("mixtral", "qwen3_moe"):
        assert exact.spec.routers() and all(isinstance(after[name], Dense) for name in exact.spec.routers())


@pytest.mark.parametrize(("load_format", "off"), [("int8", 2e-3), ("int4", 0.3)])
@pytest.mark.parametrize("backend", ["turbomind", "pytorch"])
def test_a_rounded_model_predicts_what_the_original_does(backend, load_format, off, tiny_models, steps):
    options, found = RunnerOptions(device="cpu", dtype="float32", block_size=16), []
    for how in ("auto", load_format):
        runner, _ = open_runner(tiny_models("llama"), backend=backend, options=options, load_format=how)
        driver = steps.Driver(runner)
        found.append(driver.step({driver.add(): list(range(3, 40))}, "all").logits)
    a, b = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in found)
    assert 0 < (np.exp(a) * (a - b)).sum(-1).mean() < off


def test_what_is_quantized_or_has_no_group_stays(tiny_models):
    spec = open_model(tiny_models("llama")).spec
    first, second, third = (x.name for x in spec.linears()[:3])
    four = GroupInt(
        torch.randint(0, 16, (8, 32), dtype=torch.uint8), torch.ones(8, 1).half(), torch.zeros(8, 1).byte(), 4, 32
    )
    weights = {first: four, second: Dense(torch.randn(8, 24)), third: Dense(torch.randn(8, 96))}
    found = RoundedWeights(weights, spec)
    assert found[first] is four and found[second] is weights[second]
    assert isinstance(found[third], GroupInt) and found[third].group_size == 32


@pytest.mark.parametrize("load_format", ["int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(value, load_format, tiny_models):
    spec = open_model(tiny_models("llama")).spec
    layer = spec.layers[0].linears()[0]
    weight = torch.randn(layer.out_features, layer.in_features)
    weight[1, 2] = value
    with pytest.raises(ToolkitError, match=f"^{layer.name}: holds NaN, infinity or"):
        RoundedWeights({layer.name: Dense(weight)}, spec, 8 if load_format == "int8" else 4)[layer.name]


def test_nothing_is_rounded_twice(tiny_models, monkeypatch):
    """Neither to plan memory nor to find the dtype."""
    from toolkit.runners.native.packing import rounding

    rounded, exact = [], rounding.to_group_int
    monkeypatch.setattr(rounding, "to_group_int", lambda *a: rounded.append(a) or exact(*a))
    options = RunnerOptions(device="cpu", block_size=16)
    runner, _ = open_runner(tiny_models("llama"), backend="turbomind", options=options, load_format="int8")
    runner.memory()
    assert len(rounded) <= 1
    runner.load_weights()
    linears = len(runner.spec.linears())
    assert linears <= len(rounded) <= linears + 1
    runner.close()


def test_what_is_quantized_already_is_refused(tiny_models, tmp_path):
    from toolkit.quant.lite import Common, auto_awq
    from toolkit.quant.options import Awq

    text = tmp_path / "text.txt"
    text.write_text("It was a dark and stormy night. " * 60)
    common = Common(calib_dataset=str(text), calib_samples=2, calib_seqlen=32, eval_tokens=64)
    auto_awq(str(tiny_models("llama")), tmp_path / "awq", Awq(tune_steps=0), common=common)
    with pytest.raises(
        UsageError, match=r"^load_format: found 'int8', but .*awq holds awq weights already; leave it out"
    ):
        open_model(tmp_path / "awq", load_format="int8")


def test_an_engine_artifact_is_refused(tiny_models, tmp_path):
    from toolkit.convert.convert import convert
    from toolkit.convert.options import Packing

    convert(tiny_models("llama"), tmp_path / "engine", Packing(target="cpu"))
    with pytest.raises(UsageError, match=r"^load_format: found 'int8', but .*engine is packed already"):
        open_model(tmp_path / "engine", load_format="int8")


def test_the_runner_for_gpus_takes_them(tiny_models, steps, support):
    opened = open_model(tiny_models("llama"), load_format="int8")
    options, graphs = RunnerOptions(device="cpu", dtype="float32", block_size=16), support("graphs")
    device = graphs.CpuDevice()
    ours = steps.Driver(
        device.watch(TensorRunner(opened.spec, opened.weights, options, graphs=device, ops=graphs.interpreted_ops()))
    )
    oracle = steps.Driver(open_runner(tiny_models("llama"), backend="pytorch", options=options, load_format="int8")[0])
    ours.add(), oracle.add()
    for ids in ([3, 4, 5], [6], [7]):
        found, expected = (d.step({0: ids}) for d in (ours, oracle))
        assert found.tokens.tolist() == expected.tokens.tolist()


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2_moe", "cohere", "olmo2", "deepseek_v2"])
def test_scaling_alone_changes_nothing_and_is_told_from_headers(family, tiny_models, steps):
    opened = open_model(tiny_models(family))
    options, found = RunnerOptions(device="cpu", dtype="float32", block_size=16), []
    scaled = ScaledWeights(opened.weights(), opened.spec, 32)
    for weights in (opened.weights(), scaled):
        driver = steps.Driver(TensorRunner(opened.spec, lambda weights=weights: weights, options))
        found.append(driver.step({driver.add(): list(range(3, 40))}, "all").logits)
    assert np.abs(found[0] - found[1]).max() < 1e-4 * np.abs(found[0]).max()
    assert any(not torch.equal(_numbers(scaled[n]), _numbers(opened.weights()[n])) for n in scaled)
    for name in scaled:
        told, there = scaled.info(name), scaled[name]
        assert type(told) is type(there) and told.shape == there.shape
        assert _numbers(told).dtype == _numbers(there).dtype


@pytest.mark.parametrize(
    "family, shape", [("cogvlm", 0), ("internlmxcomposer2", 0), ("internlmxcomposer2", 2), ("internvl_chat", 2)]
)
def test_scaling_changes_nothing_where_pictures_have_linears_of_their_own(family, shape, tiny_models, steps):
    opened = open_model(tiny_models(family, shape=shape))
    options, found = RunnerOptions(device="cpu", dtype="float32", block_size=16), []
    rows = np.random.default_rng(0).normal(size=(6, opened.spec.hidden_size)).astype(np.float32)
    index = np.arange(4, 10, dtype=np.int32)
    shown = {"embeds": rows, "embed_index": index, "routed": index}
    for weights in (opened.weights(), ScaledWeights(opened.weights(), opened.spec, 32)):
        driver = steps.Driver(TensorRunner(opened.spec, lambda weights=weights: weights, options))
        found.append(driver.step({driver.add(): list(range(5, 40))}, "all", **shown).logits)
    assert np.abs(found[0] - found[1]).max() < 1e-4 * np.abs(found[0]).max()


def test_values_that_another_layer_reads_too_take_no_scale(tiny_models, steps):
    opened = open_model(tiny_models("llama"))
    first, second, *rest = opened.spec.layers
    mixer, mlp = second.sublayers
    a = mixer.mixer
    reuse = ReuseSpec(a.q, a.o, a.heads, a.kv_heads, a.head_dim, a.rope, source=0)
    spec = replace(opened.spec, layers=(first, LayerSpec((replace(mixer, mixer=reuse), mlp)), *rest))
    options, found = RunnerOptions(device="cpu", dtype="float32", block_size=16), []
    for weights in (opened.weights(), ScaledWeights(opened.weights(), spec, 32)):
        driver = steps.Driver(TensorRunner(spec, lambda weights=weights: weights, options))
        found.append(driver.step({driver.add(): list(range(3, 40))}, "all").logits)
    assert np.abs(found[0] - found[1]).max() < 1e-4 * np.abs(found[0]).max()
    source = LayerSource(tiny_models("llama"))
    source.spec = spec
    folds = [[site.fold for site in select(source).sites(layer)] for layer in spec.layers]
    assert not any(isinstance(fold, RowFold) and "v_proj" in fold.linear.name for fold in folds[0] + folds[1])


def _numbers(weight):
    return weight.weight if isinstance(weight, Dense) else weight


def test_inputs_of_different_sizes_lose_less_in_4_bits_than_by_rounding_alone(tiny_models, steps):
    """A model whose norms and values have outliers, computing what it did before: what quantizers meet."""
    opened = open_model(tiny_models("llama"))
    spec, exact = opened.spec, dict(opened.weights())
    outliers = torch.exp2(torch.randint(0, 6, (64,), generator=torch.Generator().manual_seed(3)).float())
    for layer in spec.layers:
        floats = Folded({n: _numbers(exact[n]).float() for n in exact})
        site = layer_sites(layer)[0]
        fold_site(site, floats, 1 / outliers[: site.size].repeat(-(-site.size // 64))[: site.size])
        for n in exact:
            changed = floats[n]
            exact[n] = Dense(changed) if isinstance(exact[n], Dense) else changed
    options, found = RunnerOptions(device="cpu", dtype="float32", block_size=16), []
    for weights in (exact, RoundedWeights(exact, spec, 4), rounded(exact, spec, "int4")):
        driver = steps.Driver(TensorRunner(spec, lambda weights=weights: weights, options))
        found.append(torch.from_numpy(driver.step({driver.add(): list(range(3, 60))}, "all").logits).log_softmax(-1))
    plain, ours = (float((found[0].exp() * (found[0] - x)).sum(-1).mean()) for x in found[1:])
    assert ours < 2 / 3 * plain
