"""What a step refuses, keeps and returns."""

from __future__ import annotations

import traceback

import numpy as np
import pytest

from toolkit.runners.base import RunnerError


def _i32(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"token_ids": _i32(3, 320, 5)}, "token_ids"),
        ({"token_ids": _i32(3, -1, 5)}, "token_ids"),
        ({"from_previous": _i32(-1, 0, -1)}, "from_previous"),
        ({"positions": _i32(0, -1, 2)[None]}, "positions"),
        ({"slot_mapping": (np.asarray([0, 1, 64 * 16]),)}, "slot_mapping"),
        ({"slot_mapping": (np.asarray([0, 1]),)}, "slot_mapping"),
        ({"block_tables": (_i32(64)[None],)}, "block_tables"),
        ({"block_tables": (_i32(-1)[None],)}, "block_tables"),
        ({"seq_lens": _i32(2)}, "seq_lens"),
        ({"seq_lens": _i32(17)}, "block_tables"),
        ({"cu_seqlens": _i32(0, 2)}, "cu_seqlens"),
        ({"sample_index": _i32(3)}, "sample_index"),
        ({"logits_index": _i32(-1)}, "logits_index"),
        ({"target_index": _i32(0), "target_ids": _i32(320)}, "target_ids"),
        ({"target_index": _i32(0)}, "target_ids"),
        ({"adapter": _i32(0)}, "adapter"),
        ({"sample_index": _i32(0, 1)}, "sampling"),
    ],
)
def test_arrays_out_of_bounds_are_refused_by_name(wrong, named, drive):
    driver = drive("llama")
    with pytest.raises(RunnerError, match=named):
        driver.step({driver.add(): [3, 4, 5]}, **wrong)
    assert driver.step({driver.add(): [3, 4, 5]}).tokens.shape == (1, 1)  # and the next step runs


def test_a_step_that_fails_tells_where(drive, monkeypatch):
    driver = drive("llama")

    def broken(*_: object) -> None:
        raise RuntimeError("sizes differ")

    with monkeypatch.context() as patch:
        patch.setattr(type(driver.runner._decoder), "hidden", broken)
        with pytest.raises(RunnerError, match=r"^the step failed: RuntimeError: sizes differ$") as failed:
            driver.step({driver.add(): [3, 4, 5]})
    assert [entry.name for entry in traceback.extract_tb(failed.value.__cause__.__traceback__)][-1] == "broken"
    assert driver.step({driver.add(): [3, 4, 5]}).tokens.shape == (1, 1)


def test_tokens_can_come_from_the_step_before(drive):
    one, two = drive("llama"), drive("llama")
    a, b = one.add(), one.add()
    first = one.step({a: [3, 4], b: [5, 6, 7]})
    given = one.step({a: [int(first.tokens[0, 0])], b: [int(first.tokens[1, 0])]}, "all")
    c, d = two.add(), two.add()
    two.step({c: [3, 4], d: [5, 6, 7]})
    carried = two.step({d: [0], c: [999]}, "all", from_previous=_i32(1, 0))
    np.testing.assert_allclose(carried.logits[::-1], given.logits, rtol=1e-5, atol=1e-5)


def test_rows_come_back_in_the_order_asked(drive):
    driver, other = drive("llama"), drive("llama")
    every = other.step({other.add(): [3, 4, 5, 6]}, "all")
    output = driver.step(
        {driver.add(): [3, 4, 5, 6]},
        sample_index=_i32(3),
        logits_index=_i32(2, 0, 2),
        hidden_index=_i32(1),
        target_index=_i32(2, 1),
        target_ids=_i32(8, 9),
    )
    np.testing.assert_allclose(output.logits, every.logits[[2, 0, 2]], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(output.hidden, every.hidden[[1]], rtol=1e-5, atol=1e-5)
    logits = every.logits.astype(np.float64)
    expected = [logits[r, t] - np.log(np.exp(logits[r]).sum()) for r, t in ((2, 8), (1, 9))]
    np.testing.assert_allclose(output.target_logprobs, expected, rtol=1e-4, atol=1e-4)
    assert output.tokens.tolist() == every.tokens.tolist()


def test_a_step_without_samples_returns_none(drive, steps):
    driver = drive("llama")
    output = driver.step({driver.add(): [3, 4]}, sample_index=_i32(), sampling=steps.sampling(0))
    assert output.tokens.shape == (0, 1) and output.logits.shape == (0, 320)


def test_output_arrays_have_the_dtypes_of_the_boundary(drive, steps):
    driver = drive("llama", dtype="bfloat16")
    output = driver.step({driver.add(): [3, 4]}, "all", sampling=steps.sampling(1, logprobs=3))
    kinds = {
        "tokens": np.int32,
        "logprob": np.float32,
        "top_ids": np.int32,
        "top_logprobs": np.float32,
        "logits": np.float32,
        "hidden": np.float32,
        "target_logprobs": np.float32,
        "bad_rows": np.int32,
    }
    assert {name: getattr(output, name).dtype for name in kinds} == {k: np.dtype(v) for k, v in kinds.items()}


def test_weights_and_cache_can_be_released_and_come_back(drive):
    driver = drive("llama")
    before = driver.step({driver.add(): [3, 4, 5]}, "all").logits
    runner = driver.runner
    runner.release_weights()
    runner.release_cache()
    with pytest.raises(RunnerError, match="load_weights"):
        driver.step({0: [6]})
    runner.load_weights()
    runner.load_weights()
    runner.allocate_cache((64,))
    driver.free(0)
    np.testing.assert_array_equal(driver.step({0: [3, 4, 5]}, "all").logits, before)
    runner.close()


def test_memory_is_known_before_anything_is_loaded(tiny_models):
    from toolkit.runners.base import RunnerOptions
    from toolkit.runners.choose import open_runner

    options = RunnerOptions(dtype="float32", block_size=16, device="cpu")
    runner, _ = open_runner(tiny_models("qwen2"), backend="pytorch", options=options)
    need = runner.memory()
    assert not need.loaded and need.free > 0 and need.activations_per_token > 0
    assert need.block_bytes == (2 * 16 * 2 * 16 * 4,) * 2  # k and v, tokens, kv heads, head_dim, bytes; a layer each
    runner.load_weights()
    assert runner.memory().loaded and runner.memory().weights == need.weights  # test_weight_info.py: what is held
