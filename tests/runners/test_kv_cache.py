"""The paged cache: quantized forms, blocks copied, moved and reused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from toolkit.errors import ToolkitError, UsageError
from toolkit.kernels.reference.cache import dequantize_heads, hadamard, quantize_heads
from toolkit.models.spec import LayerSpec
from toolkit.runners.base import RunnerError
from toolkit.runners.tensor.runner import TensorRunner


def _prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, length).tolist()


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("head_dim", [16, 32, 40, 48])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_quantized_caches_stay_near_the_plain_one(family, head_dim, drive):
    found = {}
    for policy in (0, 8, 4, 16, 17):
        driver = drive(family, model={"head_dim": head_dim}, quant_policy=policy)
        found[policy] = driver.step({driver.add(): _prompt(60)}, "all").logits
    eight, four, e4m3, e5m2 = (_distance(found[policy], found[0]) for policy in (8, 4, 16, 17))
    assert 0 < eight < 0.02
    assert eight < four < 0.25
    assert eight < e4m3 < 0.1
    assert e4m3 < e5m2 < 0.2


@pytest.mark.parametrize("bits", [8, 4, 16])
def test_quantized_results_do_not_depend_on_chunks(bits, drive):
    prompt, found = _prompt(50, 1), {}
    for policy in (0, bits):
        driver = drive("llama", quant_policy=policy)
        found[policy] = driver.step({driver.add(): prompt}, "all").logits
    number = driver.add()
    parts = np.concatenate([driver.step({number: prompt[i : i + 7]}, "all").logits for i in range(0, 50, 7)])
    # Products of 7 rows may end in another last bit than those of 50, which now and then makes another code.
    assert _distance(parts, found[bits]) < 0.1 * _distance(found[bits], found[0])
    assert np.isclose(parts, found[bits], rtol=1e-4, atol=1e-4).mean() > 0.8


@pytest.mark.parametrize("bits", [8, 6, 4])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_codes_are_the_nearest_to_the_value(bits, dim):
    x = torch.randn(50, 3, dim, generator=torch.Generator().manual_seed(dim))
    codes, params = quantize_heads(x, bits)
    back = dequantize_heads(codes, params, bits, torch.float32)
    step = params[..., :1].float()
    # Half a step, and at the ends of the range what rounding scale and zero to float16 can shift them by.
    assert ((back - x).abs() <= step * (0.5 + 2**-10 * (1 << bits))).all()
    assert codes.shape[-1] == dim * bits // 8


def test_extreme_rows_keep_finite_codes():
    x = torch.tensor([[0.0] * 8, [3.0] * 8, [1e4 + i for i in range(8)], [-60000.0] * 8, [1e-7 * i for i in range(8)]])
    for bits in (8, 6, 4):
        codes, params = quantize_heads(x, bits)
        back = dequantize_heads(codes, params, bits, torch.float32)
        assert torch.isfinite(back).all()
        assert ((back - x).abs() <= x.abs().amax(-1, keepdim=True) * 2e-3 + 2e-3).all()


@pytest.mark.parametrize("dim", [1, 64, 80, 96, 256])
def test_hadamard_is_orthogonal_and_its_own_inverse(dim):
    x = torch.randn(5, dim, generator=torch.Generator().manual_seed(0))
    turned = hadamard(x)
    torch.testing.assert_close(hadamard(turned), x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert dim == 1 or not torch.allclose(turned, x)


@pytest.mark.parametrize("bits", [0, 8, 4, 44, 17])
def test_exported_blocks_come_back_anywhere(bits, drive):
    driver, prompt = drive("qwen2", quant_policy=bits), _prompt(40, 2)
    source, twin = driver.add(), driver.add()
    driver.step({source: prompt})
    driver.sequences[twin].length = 40
    for group, blocks in enumerate(driver.sequences[source].blocks):
        for block in blocks:
            copy = driver._free[group].pop(0)
            driver.sequences[twin].blocks[group].append(copy)
            exported = driver.runner.export_block(group, block)
            driver.runner.import_block(group, copy, exported)
            assert driver.runner.export_block(group, copy) == exported
    assert len(driver.runner.export_block(0, 0)) == driver.runner.memory().block_bytes[0]
    output = driver.step({source: [9], twin: [9]}, "all")
    np.testing.assert_allclose(
        output.logits[0], output.logits[1], rtol=1e-4, atol=1e-4
    )  # rows of one product may differ


def test_copied_blocks_diverge(drive):
    driver, prompt = drive("llama"), _prompt(20, 3)
    source, twin = driver.add(), driver.add()
    driver.step({source: prompt})
    pairs = []
    for block in driver.sequences[source].blocks[0]:
        driver.sequences[twin].blocks[0].append(driver._free[0].pop(0))
        pairs.append((block, driver.sequences[twin].blocks[0][-1]))
    driver.sequences[twin].length = 20
    copies = (np.asarray(pairs, np.int32),)
    both = driver.step({source: [9], twin: [9]}, "all", copy_blocks=copies).logits
    np.testing.assert_allclose(both[0], both[1], rtol=1e-5, atol=1e-5)
    driver.step({twin: [11, 12]})
    again = driver.add()
    alone = driver.step({again: [*prompt, 9, 5]}, "all").logits[-1]
    np.testing.assert_allclose(driver.step({source: [5]}, "all").logits[0], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("bits", [0, 8, 4, 16])
def test_what_a_freed_block_holds_reaches_nobody(family, bits, drive):
    driver, clean = drive(family, quant_policy=bits), drive(family, quant_policy=bits)
    bad = driver.add()
    poison = np.full((1, driver.runner.spec.hidden_size), np.nan, np.float32)
    where = {"embeds": np.repeat(poison, 40, 0), "embed_index": np.arange(40, dtype=np.int32)}
    assert driver.step({bad: _prompt(40)}, **where).bad_rows.tolist() == [0]
    driver.free(bad)
    prompts = [_prompt(n, n) for n in (5, 21)]
    for d in (driver, clean):
        for _ in prompts:
            d.add()
    numbers = range(1, 3)
    for new in (prompts, [[3], [4]], [[5, 6], [7]]):
        found = driver.step(dict(zip(numbers, new, strict=True)), "all")
        expected = clean.step(dict(zip(range(2), new, strict=True)), "all")
        assert not len(found.bad_rows)
        np.testing.assert_allclose(found.logits, expected.logits, rtol=1e-5, atol=1e-5)


def test_a_bad_request_leaves_its_neighbours_alone(drive):
    driver = drive("llama")
    first, bad, last = driver.add(), driver.add(), driver.add()
    poison = np.full((1, driver.runner.spec.hidden_size), np.nan, np.float32)
    new = {first: [5, 6], bad: [7], last: [8, 9]}
    output = driver.step(new, "all", embeds=poison, embed_index=np.asarray([2], np.int32))
    assert output.bad_rows.tolist() == [1]
    alone = drive("llama")
    expected = alone.step({alone.add(): [5, 6], alone.add(): [8, 9]}, "all")
    np.testing.assert_allclose(output.logits[[0, 1, 3, 4]], expected.logits, rtol=1e-4, atol=1e-4)
    assert output.tokens[[0, 2], 0].tolist() == expected.tokens[:, 0].tolist()


def test_wrong_blocks_are_refused(drive):
    driver = drive("llama")
    with pytest.raises(RunnerError, match=r"expected .* bytes"):
        driver.runner.import_block(0, 0, b"12")
    with pytest.raises(RunnerError, match="does not exist"):
        driver.runner.export_block(0, 64)


def test_int4_needs_heads_in_steps_of_four(drive):
    runner = drive("llama").runner
    layer = runner.spec.layers[0]
    attention, rest = layer.sublayers[0], layer.sublayers[1:]
    odd = replace(attention, mixer=replace(attention.mixer, head_dim=18))
    spec = replace(runner.spec, layers=(LayerSpec((odd, *rest)), *runner.spec.layers[1:]))
    with pytest.raises(UsageError, match="head_dim in steps of 4"):
        TensorRunner(spec, runner._weights, replace(runner.options, quant_policy=4))


@pytest.mark.parametrize("dim", [64, 40])
def test_keys_of_a_four_bit_cache_have_six(dim):
    """Both implementations, over a cache that they wrote themselves; only the number of bits bounds the error."""
    from toolkit.kernels.reference import attention as reference
    from toolkit.kernels.torch import attention as fast
    from toolkit.kernels.torch import kv_write as torch_write

    g = torch.Generator().manual_seed(dim)
    q, k, v = torch.randn(30, 4, dim, generator=g), *torch.randn(2, 30, 2, dim, generator=g)
    batch = (np.array([[1, 0]], np.int32), np.array([0, 30], np.int32), np.array([30], np.int32), dim**-0.5)
    found = []
    for write, attend in (
        (reference.kv_write, reference.paged_attention),
        (torch_write.kv_write, fast.paged_attention),
    ):
        cache = torch.zeros(2, 16, 2, dim * 3 // 4, dtype=torch.uint8), torch.zeros(2, 16, 2, dim // 2).byte()
        params = torch.zeros(2, 16, 2, 2).half(), torch.zeros(2, 16, 2, 2).half()
        slots = torch.cat([torch.arange(16, 32), torch.arange(14)])
        write(k, v, *cache, slots, 4, *params)
        found.append(attend(q, *cache, *batch, bits=4, k_params=params[0], v_params=params[1]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    back = dequantize_heads(*quantize_heads(k, 6), 6, torch.float32)
    assert 0 < _distance(back.numpy(), k.numpy()) < 0.12 / (1 << 2)


def test_scales_of_a_float8_cache_come_from_the_checkpoint(drive, tiny_models, tmp_path):
    """A layer's keys and values far beyond what float8 holds are only right where they are divided first."""
    from safetensors.torch import load_file, save_file

    from toolkit.runners.base import RunnerOptions
    from toolkit.runners.choose import open_runner

    source = tiny_models("llama", num_hidden_layers=1)
    for file in source.iterdir():
        if file.name != "manifest.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(source / "model.safetensors")
    base = "model.layers.0.self_attn"
    weights[f"{base}.v_proj.weight"] *= 1e5
    weights[f"{base}.o_proj.weight"] *= 1e-5
    prompt, found = _prompt(20, 5), {}
    for name, scale in (("plain", None), ("none", None), ("given", 2e3)):
        if scale is not None:
            weights |= {f"{base}.k_scale": torch.tensor([0.05]), f"{base}.v_scale": torch.tensor(scale)}
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        options = RunnerOptions(dtype="float32", block_size=16, device="cpu", quant_policy=0 if name == "plain" else 16)
        runner, _ = open_runner(tmp_path, backend="pytorch", options=options)
        driver = type(drive("llama"))(runner, 64, True)
        found[name] = driver.step({driver.add(): prompt}, "all").logits
    assert _distance(found["given"], found["plain"]) < 0.05 < _distance(found["none"], found["plain"])


@pytest.mark.parametrize(
    ("scale", "words"),
    [(0.0, "expected a number above 0, found 0.0"), ([0.5, 0.6], r"expected one number, found shape \[2\]")],
)
def test_a_scale_that_cannot_be_is_refused(drive, scale, words):
    runner = drive("llama").runner
    weights = dict(runner._weights()) | {"model.layers.0.self_attn.k_scale": torch.tensor(scale)}
    broken = TensorRunner(runner.spec, lambda: weights, runner.options)
    with pytest.raises(ToolkitError, match=rf"self_attn.k_scale: {words}"):
        broken.load_weights()
