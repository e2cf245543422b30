"""The native runner: parity with transformers, and results that depend on nothing they should not depend on."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from toolkit.errors import UsageError
from toolkit.kernels.reference.cache import hadamard
from toolkit.runners.base import RunnerError
from toolkit.runners.native import library

FORMS = ("dense", "int4", "int8")


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, length).tolist()


@pytest.fixture(scope="module")
def oracle(tiny_models: Any) -> Any:
    """``oracle(family, ids) -> logits`` of transformers, float32."""
    models: dict[str, Any] = {}

    def logits(family: str, ids: list[int]) -> np.ndarray:
        if family not in models:
            from transformers import AutoModelForCausalLM

            path = tiny_models.twin(family)
            models[family] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        with torch.no_grad():
            return models[family](torch.tensor([ids]), use_cache=False).logits[0].numpy()

    return logits


@pytest.mark.parametrize("isa", library.isas())
def test_dense_float32_equals_transformers(family, isa, drive, oracle, monkeypatch) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    driver = drive(family)
    prompts = [prompt(n, seed) for seed, n in enumerate((45, 3, 1, 17))]
    more = [[5], [6, 7, 8], [9], [10]]
    numbers = [driver.add() for _ in prompts]
    first = driver.step(dict(zip(numbers, prompts, strict=True)), "all").logits
    second = driver.step(dict(zip(numbers, more, strict=True)), "all").logits
    whole = [oracle(family, p + m) for p, m in zip(prompts, more, strict=True)]
    close = {"rtol": 1e-4, "atol": 1e-4}
    np.testing.assert_allclose(
        first, np.concatenate([w[: len(p)] for w, p in zip(whole, prompts, strict=True)]), **close
    )
    np.testing.assert_allclose(
        second, np.concatenate([w[len(p) :] for w, p in zip(whole, prompts, strict=True)]), **close
    )


@pytest.mark.parametrize("form", ["int4", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe", "qwen2", "lfm2", "qwen3_next", "falcon_h1"])
def test_quantized_weights_stay_near_the_dequantized_model(family, form, drive) -> None:
    """Int8 activations and the 8-bit head are the only differences."""
    driver, ids = drive(family, weights=form), prompt(40, 5)
    found = driver.step({driver.add(): ids}, "all").logits
    dense = drive(family, weights=form)
    from toolkit.artifacts.canonical import Dense

    def dequantized() -> dict[str, Any]:
        return {k: v if isinstance(v, torch.Tensor) else Dense(v.dequantize()) for k, v in load().items()}

    dense.runner.release_weights()
    load = dense.runner.use_weights(dequantized)
    dense.runner.load_weights()
    dense.runner.allocate_cache((64,) * len(dense.runner.spec.cache_groups))
    expected = dense.step({dense.add(): ids}, "all").logits
    assert 0 < np.linalg.norm(found - expected) < 0.1 * np.linalg.norm(expected)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_bfloat16_rounds_the_inputs_of_linears_that_are(family, drive) -> None:
    """Linears with float32 weights stay exact. Attention multiplies codes alike in both, as integers or as floats."""
    ids, found = prompt(40, 5), {}
    for weights in ("dense", "bf16"):
        for dtype in ("float32", "bfloat16"):
            driver = drive(family, weights=weights, dtype=dtype, quant_policy=8)
            found[weights, dtype] = driver.step({driver.add(): ids}, "all").logits
    attention, all_products = (
        np.linalg.norm(found[w, "bfloat16"] - found[w, "float32"]) / np.linalg.norm(found[w, "float32"])
        for w in ("dense", "bf16")
    )
    if {"amx", "avx512vnni"} & {*library.isas()}:
        assert attention == 0 < all_products < 0.02
    else:
        assert attention == all_products == 0


def turned_values(path: Path, to: Path, head_dim: int) -> Path:
    """The same model with its values turned by a Hadamard matrix, and turned back by what reads them."""
    shutil.copytree(path, to)
    weights = load_file(to / "model.safetensors")
    for name, x in weights.items():
        if name.endswith("v_proj.weight"):
            weights[name] = hadamard(x.view(-1, head_dim, x.shape[1]).mT).mT.reshape(x.shape).contiguous()
        if name.endswith("o_proj.weight"):
            weights[name] = hadamard(x.view(len(x), -1, head_dim)).reshape(x.shape).contiguous()
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize(
    "family, model, policy, near",
    [("llama", {"head_dim": dim}, *policy) for dim in (16, 40, 64) for policy in ((8, 1.5), (4, 0.5), (44, 0.5))]
    + [("minicpm3", {}, 8, 1.5)],
)
def test_quantized_caches_hold_what_the_torch_runner_s_hold(
    family, model, policy, near, drive, tiny_models, steps, tmp_path
) -> None:
    """Scale and offset are rounded differently; beside what the codes lose that is little. Torch's has weights whose
    values are turned, where the native cache turns them itself."""
    from toolkit.runners.base import RunnerOptions
    from toolkit.runners.choose import open_runner

    ids, found = prompt(60, 6), {}
    for name, bits in (("native", policy), ("plain", 0)):
        driver = drive(family, model=model, quant_policy=bits)
        found[name] = driver.step({driver.add(): ids}, "all").logits
    options = RunnerOptions(dtype="float32", block_size=16, quant_policy=policy)
    path = tiny_models(family, **model)
    if policy in (4, 44):
        path = turned_values(path, tmp_path / "turned", model["head_dim"])
    driver = steps.Driver(open_runner(path, backend="pytorch", options=options)[0])
    torch_logits = driver.step({driver.add(): ids}, "all").logits
    lost = np.linalg.norm(found["native"] - found["plain"])
    assert 0 < np.linalg.norm(found["native"] - torch_logits) < near * lost
    np.testing.assert_allclose(lost, np.linalg.norm(torch_logits - found["plain"]), rtol=0.2)


CACHES: tuple[dict[str, Any], ...] = (
    {},
    {"dtype": "bfloat16"},
    {"quant_policy": 8},
    {"quant_policy": 4, "dtype": "bfloat16"},
    {"quant_policy": 44},
)


@pytest.mark.parametrize(
    "family, form, options",
    [
        (family, form, options)
        for family, forms in {"llama": ("dense", "bf16", "int4"), "gemma2": ("int4",), "qwen3_moe": ("int8",)}.items()
        for form in forms
        for options in CACHES
    ]
    + [(family, form, CACHES[1]) for family in ("lfm2_moe", "qwen3_5_text", "nemotron_h") for form in ("bf16", "int4")]
    + [("sdar", "int4", CACHES[2]), ("sdar_moe", "bf16", CACHES[1])],
)
def test_bits_do_not_depend_on_chunks_batch_or_threads(family, form, options, drive) -> None:
    ids = prompt(150, 6)
    alone = drive(family, weights=form, threads=1, **options)
    expected = alone.step({alone.add(): ids}, "all").logits
    for threads, chunk in ((1, 1), (2, 7), (3, 64), (5, 13)):
        driver = drive(family, weights=form, threads=threads, blocks=96, **options)
        number, other = driver.add(), driver.add()
        found, block = list[np.ndarray](), driver.runner.spec.block
        chunk = -(-chunk // block) * block  # tokens that see each other come together
        for start in range(0, len(ids), chunk):
            piece = ids[start : start + chunk]
            step = driver.step({other: prompt(3, start), number: piece} if start % 2 else {number: piece}, "all")
            found.append(step.logits[-len(piece) :])
        np.testing.assert_array_equal(np.concatenate(found), expected)


@pytest.mark.parametrize("options", CACHES)
def test_bits_do_not_depend_on_the_size_of_blocks(options, drive) -> None:
    ids, found = prompt(150, 6), []
    for size, chunk in ((16, 150), (32, 11), (64, 40), (128, 1)):
        driver = drive("llama", blocks=24, **{"block_size": size, **options})
        number = driver.add()
        found.append([driver.step({number: ids[i : i + chunk]}, "all").logits for i in range(0, len(ids), chunk)])
    for other in found[1:]:
        np.testing.assert_array_equal(np.concatenate(other), found[0][0])


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "family, form, options",
    [("llama", "int4", options) for options in CACHES]
    + [(family, "bf16", options) for family in ("gemma2", "minicpm3", "qwen3_moe", "mpt") for options in CACHES[:2]],
)
def test_bits_do_not_depend_on_a_prefix_that_others_share(family, form, options, threads, drive) -> None:
    """Some begin with the same blocks of the cache, which are read once for all of them: tiles of 128 tokens."""
    common, shared = prompt(300, 1), (288, 288, 0, 144, 272, 288, 288, 128)
    tails = [prompt(7 + 19 * i, 10 + i) for i in range(len(shared))]
    steps = [[prompt(1 + (i * turn) % 4, 30 + i) for i in range(len(shared))] for turn in range(3)]

    def begun(threads: int, which: Iterable[int]) -> tuple[Any, list[int]]:
        driver, numbers = drive(family, weights=form, threads=threads, blocks=200, **options), []
        driver.step({(first := driver.add()): common})
        for i in which:
            numbers.append(driver.add())
            s, n = driver.sequences[-1], shared[i]
            s.blocks, s.length = [blocks[: n // 16] for blocks in driver.sequences[first].blocks], n
            driver.step({numbers[-1]: common[n:] + tails[i]})
        return driver, numbers

    driver, numbers = begun(threads, range(len(shared)))
    found = [driver.step(dict(zip(numbers, new, strict=True)), "all").logits for new in steps]
    for i in range(len(shared)):
        alone, (one,) = begun(1, [i])
        for new, logits in zip(steps, found, strict=True):
            start = sum(map(len, new[:i]))
            expected = alone.step({one: new[i]}, "all").logits
            np.testing.assert_array_equal(logits[start : start + len(new[i])], expected)


@pytest.mark.parametrize(
    "family, model", [("llama", {"intermediate_size": 12288}), ("qwen3_moe", {"moe_intermediate_size": 6144})]
)
def test_bits_do_not_depend_on_threads_where_they_share_weights_by_their_speed(family, model, drive) -> None:
    """Megabytes of weights in a phase are taken in parts that get smaller, by whoever is free."""
    ids, found = prompt(14, 6), []
    for threads in (1, 2, 3):
        driver = drive(family, model=model, threads=threads)
        number = driver.add()
        found.append([driver.step({number: piece}, "all").logits for piece in (ids[:10], ids[10:13], ids[13:])])
    for other in found[1:]:
        for one, expected in zip(other, found[0], strict=True):
            np.testing.assert_array_equal(one, expected)


@pytest.mark.parametrize(
    "family, form, options",
    [("minicpm3", "dense", {}), ("minicpm3", "bf16", CACHES[1]), ("deepseek_v3", "dense", CACHES[2])],
)
def test_latent_attention_does_not_depend_on_how_a_prompt_is_cut(family, form, options, drive) -> None:
    """Many tokens at once as few, beside others as alone, by one thread as by several."""
    ids, expected = prompt(700, 6), None
    for cut in ((700,), (600, 700), (300, 301, 310, 700), (20, 40, 600, 700)):
        for threads, beside in ((1, []), (3, prompt(5))):
            driver = drive(
                family, weights=form, model={"max_position_embeddings": 1024}, threads=threads, blocks=160, **options
            )
            number, other, logits = driver.add(), driver.add(), []
            for start, stop in zip((0, *cut), cut, strict=False):
                new = ({other: beside} if beside else {}) | {number: ids[start:stop]}
                logits.append(driver.step(new, "all").logits[-(stop - start) :])
            found = np.concatenate(logits)
            expected = found if expected is None else expected
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_linears_whose_columns_are_reordered_alike(family, drive) -> None:
    """As GPTQ's act-order does: one order for all that read an input."""
    from dataclasses import replace

    from toolkit.artifacts.canonical import GroupInt

    def reordered(value: Any) -> Any:
        if not isinstance(value, GroupInt):
            return value
        columns = np.random.default_rng(value.shape[1]).permutation(value.shape[1])
        return replace(value, group_index=torch.from_numpy((columns // value.group_size).astype(np.int32)))

    driver, ids = drive(family, weights="int4"), prompt(20, 5)
    driver.runner.release_weights()
    load = driver.runner.use_weights(lambda: {name: reordered(value) for name, value in load().items()})
    driver.runner.load_weights()
    assert not any("held as bfloat16" in note for note in driver.runner.notes)
    driver.runner.allocate_cache((64,) * len(driver.runner.spec.cache_groups))
    assert np.isfinite(driver.step({driver.add(): ids}, "all").logits).all()


@pytest.mark.parametrize("family", ["llama", "lfm2", "qwen3_next", "falcon_h1"])
def test_blocks_and_slots_are_as_large_as_planned(family, drive) -> None:
    runner = drive(family).runner
    assert [len(runner.export_block(g, 0)) for g, _ in enumerate(runner.spec.cache_groups)] == [
        *runner.memory().block_bytes
    ]


def test_states_may_change_places(drive) -> None:
    """All are read before any is written."""
    found = []
    for changed in (False, True):
        d = drive("lfm2")
        one, two = d.add(), d.add()
        d.step({one: prompt(20), two: prompt(7)})
        batch = d.batch({one: [5], two: [6]}, "all")
        (table,) = (t for t, g in zip(batch.block_tables, d.runner.spec.cache_groups, strict=True) if g.kind == "state")
        if changed:
            table[:] = [[table[0, 1], table[1, 1]], [table[1, 1], table[0, 1]]]
        found.append(d.runner.submit(batch).result().logits)
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_long_prompt_equals_its_chunks(family, drive) -> None:
    """Longer than what goes through the layers at once, with tiles of many blocks."""
    model = {"max_position_embeddings": 2048}
    ids = prompt(1400, 7)
    whole, cut = (drive(family, weights="int4", model=model, blocks=96) for _ in range(2))
    expected = whole.step({whole.add(): ids}, "all")
    number = cut.add()
    found = [cut.step({number: ids[a : a + 300]}, "all").logits for a in range(0, 1400, 300)]
    np.testing.assert_array_equal(np.concatenate(found), expected.logits)


@pytest.mark.parametrize("options", CACHES)
def test_tokens_that_see_each_other_are_computed_together(options, drive, tiny_models, steps) -> None:
    """Pictures in a prompt that is longer than what goes through the layers at once, before and at its borders, within
    windows; in chunks, and with the first half of one in the cache; beside another."""
    from toolkit.runners.base import RunnerOptions
    from toolkit.runners.choose import open_runner

    path = tiny_models("gemma3")
    opened = open_runner(path, backend="pytorch", options=RunnerOptions(dtype="float32", block_size=16))[0]
    window = min(a.window for _, a in opened.spec.attention_layers() if a.window)
    ids, runs = prompt(700, 6), [(first, first + window - 1) for first in (3, 120, 512 - window // 2, 600)]

    def mutual(start: int, stop: int, sequence: int = 0, before: int = 0) -> np.ndarray:
        shift = before - start
        inside = [(max(a, start) + shift, b + shift, sequence) for a, b in runs if start < b <= stop]
        return np.array(inside, np.int32).reshape(-1, 3)

    driver = drive("gemma3", threads=1, blocks=160, **options)
    expected = driver.step({driver.add(): ids}, "all", mutual=mutual(0, 700)).logits
    if not options:
        plain = steps.Driver(opened, 160)
        wanted = plain.step({plain.add(): ids}, "all", mutual=mutual(0, 700)).logits
        np.testing.assert_allclose(expected, wanted, rtol=1e-4, atol=1e-4)
        assert np.abs(expected - driver.step({driver.add(): ids}, "all").logits).max() > 0.01
    for threads, cuts in ((2, (2, 300, runs[2][1], 700)), (3, (runs[0][1], 599, runs[3][1], 700))):
        driver = drive("gemma3", threads=threads, blocks=160, **options)
        number, other, found = driver.add(), driver.add(), []
        for start, stop in zip((0, *cuts), cuts, strict=False):
            new = {other: [9, 8], number: ids[start:stop]}
            step = driver.step(new, "all", mutual=mutual(start, stop, 1, 2))
            found.append(step.logits[2:])
        np.testing.assert_array_equal(np.concatenate(found), expected)
    with pytest.raises(RunnerError, match="more than 512 tokens see each other"):
        driver.step({driver.add(): ids}, mutual=np.array([[0, 513, 0]], np.int32))


def test_layers_of_other_heads_do_not_meet(support, steps) -> None:
    """Threads take parts of a long prompt through layers whose queries are as many and as long as chance has it."""
    from toolkit.models.config.dims import Dims
    from toolkit.models.decoder import assemble
    from toolkit.models.spec import AttentionSpec, LayerSpec, LinearSpec, NormSpec, Sublayer
    from toolkit.runners.base import RunnerOptions
    from toolkit.runners.native.runner import NativeRunner

    def layer(i: int, heads: int, kv_heads: int, dim: int) -> LayerSpec:
        name = f"model.layers.{i}.self_attn"
        q, k, v = (
            LinearSpec(f"{name}.{x}", 48, n * dim) for x, n in zip("qkv", (heads, kv_heads, kv_heads), strict=True)
        )
        o = LinearSpec(f"{name}.o", heads * dim, 48)
        attention = AttentionSpec(q, k, v, o, heads=heads, kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5, rope=None)
        return LayerSpec((Sublayer(attention, NormSpec(f"{name}.norm", 48, 1e-6)),))

    shapes = ((4, 1, 16), (4, 4, 64), (2, 2, 16), (8, 2, 64), (6, 1, 48))
    dims = Dims(96, 48, 0, len(shapes), 1, 1, 1, 1e-6, 1024, True)
    spec = assemble(dims, [layer(i, *shape) for i, shape in enumerate(shapes)], NormSpec("model.norm", 48, 1e-6))
    weights, ids = support("random_specs").weights(spec, "dense", 3), [token % 96 for token in prompt(500)]
    options = {"dtype": "float32", "device": "cpu", "block_size": 16}
    found = []
    for threads in (1, 2, 4, 4):
        driver = steps.Driver(NativeRunner(spec, lambda: weights, RunnerOptions(threads=threads, **options)))
        found.append(driver.step({driver.add(): ids}, "all").logits)
        np.testing.assert_array_equal(found[-1], found[0])


@pytest.mark.parametrize("family", ["llama", "minicpm3", "qwen3_next", "falcon_h1"])
@pytest.mark.parametrize("isa", library.isas()[:-1])
def test_instruction_sets_agree(family, isa, drive, monkeypatch) -> None:
    """With the plainest of this build: ``generic``, but in one for this processor alone."""
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    driver = drive(family, weights="int4")
    monkeypatch.setenv(library.ISA_VARIABLE, library.isas()[-1])
    plain = drive(family, weights="int4")
    a, b = (d.step({d.add(): prompt(60, 8)}, "all").logits for d in (driver, plain))
    assert np.linalg.norm(a - b) < 0.02 * np.linalg.norm(b)  # a rounding to int8 may fall the other way


def test_sampled_tokens_follow_the_reference(drive, steps) -> None:
    from toolkit.kernels.reference.sampling import sample
    from toolkit.runners.step import uniform

    driver, rows = drive("llama"), 48
    numbers = [driver.add() for _ in range(rows)]
    rng = np.random.default_rng(9)
    columns = {
        "temperature": rng.choice([0.0, 0.5, 1.0, 1.7], rows),
        "top_k": rng.choice([0, 1, 5, 40], rows),
        "top_p": rng.choice([1.0, 0.9, 0.4, 0.0], rows),
        "min_p": rng.choice([0.0, 0.1], rows),
        "seed": rng.integers(0, 1 << 60, rows),
        "position": rng.integers(0, 100, rows),
        "logprobs": rng.integers(-1, 6, rows),
    }
    new = {n: prompt(2, n) for n in numbers}
    output = driver.step(
        new, sampling=steps.sampling(rows, **columns), logits_index=np.arange(1, 2 * rows, 2, dtype=np.int32)
    )
    draws = [uniform(int(s), int(p)) for s, p in zip(columns["seed"], columns["position"], strict=True)]
    logits = torch.from_numpy(output.logits)
    f32 = {k: torch.tensor(columns[k], dtype=torch.float32) for k in ("temperature", "top_p", "min_p")}
    expected = sample(
        logits,
        f32["temperature"],
        torch.tensor(columns["top_k"]),
        f32["top_p"],
        f32["min_p"],
        torch.tensor(draws, dtype=torch.float32),
    )
    assert output.tokens[:, 0].tolist() == expected.tolist()
    norms = logits.log_softmax(-1).numpy()
    for i, width in enumerate(columns["logprobs"]):
        if width < 0:
            assert np.isnan(output.logprob[i, 0])
            continue
        np.testing.assert_allclose(output.logprob[i, 0], norms[i, output.tokens[i, 0]], atol=1e-5)
        best = np.argsort(-norms[i], kind="stable")[:width]
        np.testing.assert_array_equal(output.top_ids[i, :width], best)
        np.testing.assert_allclose(output.top_logprobs[i, :width], norms[i, best], atol=1e-5)


def test_every_request_of_a_crowd_is_served(drive) -> None:
    driver = drive("llama", blocks=4096)
    numbers = [driver.add() for _ in range(4096)]
    crowd = driver.step({n: [3 + n % 300] for n in numbers}).tokens[:, 0]
    single = drive("llama", threads=64)
    for n in (0, 77, 4095):
        assert single.step({single.add(): [3 + n % 300]}).tokens[0, 0] == crowd[n]


def test_a_step_without_requests_is_empty(drive) -> None:
    driver = drive("llama")
    number = driver.add()
    batch = driver.batch({number: [5]})
    empty = np.zeros(0, np.int32)
    batch.token_ids = batch.from_previous = batch.seq_lens = batch.sample_index = batch.adapter = empty
    batch.positions, batch.cu_seqlens = np.zeros((1, 0), np.int32), np.zeros(1, np.int32)
    batch.block_tables, batch.slot_mapping = (np.zeros((0, 1), np.int32),), (np.zeros(0, np.int64),)
    batch.rope_set = np.zeros(0, np.int8)
    batch.sampling = type(batch.sampling)(
        **{k: v[:0] if k[-3:] != "ptr" else v[:1] for k, v in vars(batch.sampling).items() if v is not None}
    )
    assert driver.runner.submit(batch).result().tokens.shape == (0, 1)


def test_wrong_options_are_named(drive, monkeypatch) -> None:
    for options, text in (
        ({"quant_policy": 3}, "quant_policy"),
        ({"dtype": "int8"}, "dtype"),
        ({"device": "cuda"}, "cuda"),
    ):
        with pytest.raises(UsageError, match=text):
            drive("llama", **options)
    driver = drive("llama")
    with pytest.raises(RunnerError, match="counts"):
        driver.runner.allocate_cache((4, 4))
    with pytest.raises(RunnerError, match="above 0"):
        driver.runner.allocate_cache((0,))
    driver.runner.release_weights()
    with pytest.raises(RunnerError, match="load_weights"):
        driver.step({driver.add(): [5]})
    monkeypatch.setenv(library.ISA_VARIABLE, "sse9")
    with pytest.raises(UsageError, match="sse9"):
        drive("llama")


def test_profile_is_printed_on_request(drive, monkeypatch, capfd) -> None:
    monkeypatch.setenv("TOOLKIT_NATIVE_PROFILE", "1")
    driver = drive("llama")
    driver.step({driver.add(): prompt(20)})
    driver.runner.close()
    assert "attention" in capfd.readouterr().err
    driver.runner.close()
    assert capfd.readouterr().err == ""


def test_no_profile_unless_asked(drive, monkeypatch, capfd) -> None:
    monkeypatch.delenv("TOOLKIT_NATIVE_PROFILE", raising=False)
    driver = drive("llama")
    driver.step({driver.add(): prompt(20)})
    driver.runner.close()
    assert capfd.readouterr().err == ""
