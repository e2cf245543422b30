"""Windows that keep the first tokens too: the paper's scores, and bits that depend on the text alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from toolkit.errors import UsageError
from toolkit.runners.base import RunnerError
from toolkit.runners.choose import open_model

FAMILIES = [
    "llama",
    "qwen3",
    "gemma2",
    "gpt_oss",
    "mpt",
]  # rope, normed heads, beside sliding layers, gpt-oss' sinks, ALiBi
SHAPES = [(20, 4, 100), (140, 5, 330), (130, 128, 300), (64, 0, 100)]  # window, sink tokens, length
LONG = {"max_position_embeddings": 512}


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, 100, length).tolist()


def fed(driver: Any, ids: list[int], chunk: int) -> np.ndarray:
    number = driver.add()
    parts = (driver.step({number: ids[i : i + chunk]}, "all").logits for i in range(0, len(ids), chunk))
    return np.concatenate(list(parts))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_paper_s_cache_of_renumbered_keys(
    family: str, shape: Any, drive: Any, tiny_models: Any, support: Any
):
    window, sinks, length = shape
    driver, ids = drive(family, model=_long(family), stream=(window, sinks)), prompt(length)
    weights = support("random_specs").dense(dict(open_model(tiny_models(family, **_long(family))).weights()))
    expected = support("plain_model").logits(driver.runner.spec, weights, ids).numpy()
    found = fed(driver, ids, length)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-4)
    whole = fed(drive(family, model=_long(family)), ids, length)
    full = window + sinks
    np.testing.assert_array_equal(found[:full], whole[:full])  # as long as it is the whole text
    assert not np.isclose(found[full + 1 :], whole[full + 1 :], rtol=1e-3, atol=1e-4).all()


def _long(family: str) -> dict[str, Any]:
    return {"max_seq_len": 512} if family == "mpt" else LONG


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quant_policy": 8}, {"quant_policy": 4}], ids=str)
@pytest.mark.parametrize("shape", [(20, 4, 150), (140, 5, 330)], ids=str)
def test_bits_depend_on_no_chunk_batch_or_thread(options: Any, shape: Any, drive: Any) -> None:
    window, sinks, length = shape
    model = LONG | {"head_dim": 64}
    driver, ids = drive("llama", model=model, blocks=128, stream=(window, sinks), **options), prompt(length, 1)
    expected = fed(driver, ids, length)
    for chunk in (1, 3, 7, 64):
        np.testing.assert_array_equal(fed(driver, ids, chunk), expected)
        for number in range(len(driver.sequences)):
            driver.free(number)
    other = drive("llama", model=model, blocks=256, stream=(window, sinks), **options | {"threads": 1})
    rows = [other.add() for _ in range(7)]
    for row in rows:
        other.step({row: ids[: length - 5 - row]})
    for i in range(3):  # each decodes at a place of its own beside the others
        step = other.step({row: [ids[length - 5 - row + i]] for row in rows}, "all")
        for row in rows:
            np.testing.assert_array_equal(step.logits[row], expected[length - 5 - row + i])


def test_what_lies_between_need_not_be_there(drive: Any) -> None:
    """The first tokens' blocks must, and those of the window."""
    driver, ids = drive("llama", model=LONG, stream=(20, 4)), prompt(120, 2)
    expected = fed(driver, ids, 120)[-1]
    number = driver.add()
    driver.step({number: ids[:-1]})
    blocks = driver.sequences[number].blocks[0]
    blocks[1:6] = [-1] * 5  # of 16 tokens each; the last token sees 0 to 3 and 100 to 119
    np.testing.assert_array_equal(driver.step({number: ids[-1:]}, "all").logits[-1], expected)
    for missing in (0, 6):
        again = driver.add()
        driver.step({again: ids[:-1]})
        driver.sequences[again].blocks[0][missing] = -1
        with pytest.raises(RunnerError, match="block_tables"):
            driver.step({again: ids[-1:]})
        driver.sequences[again].blocks[0] = []


def test_far_positions_are_as_sharp_as_near_ones(drive: Any) -> None:
    """A text that is repeated for ever ends in one distribution: places a million tokens on turn as finely."""
    driver, ids = drive("llama", model=LONG, stream=(32, 4)), prompt(120, 3)
    near = fed(driver, ids, 120)[-1]
    base = (1 << 20) + 12345
    batch = driver.batch({driver.add(): ids[:4]}, "all")
    driver.runner.submit(batch).result()
    number = len(driver.sequences) - 1
    batch = driver.batch({number: ids[4:]}, "all")
    moved = batch.positions.copy()
    moved[0] += base  # the window's positions alone move: distances in it stay
    far = driver.runner.submit(replace(batch, positions=moved)).result().logits[-1]
    np.testing.assert_allclose(far, near, rtol=2e-3, atol=2e-3)


REFUSED = {
    "deepseek_v2": "MLA",
    "hunyuan_v1_dense": "normed once they are turned",
    "mistral": "keeps no token for ever",
    "bert": "computes tokens together",
    "qwen": "grow with their position",
}


@pytest.mark.parametrize("family", REFUSED)
def test_models_that_cannot(family: str, tiny_models: Any) -> None:
    with pytest.raises(UsageError, match=f"^kv_window: .*{REFUSED[family]}"):
        open_model(tiny_models(family), kv_window=8)


def test_more_than_the_model_was_trained_for(tiny_models: Any) -> None:
    with pytest.raises(UsageError, match="expected at most 512 together"):
        open_model(tiny_models("llama", **LONG), kv_window=510, kv_sinks=4)
    scaled = {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    with pytest.raises(UsageError, match="expected at most 512 together"):
        open_model(tiny_models("llama", **LONG), hf_overrides=scaled, kv_window=510, kv_sinks=4)
    spec = open_model(tiny_models("llama", **LONG), hf_overrides=scaled, kv_window=400).spec
    assert {rope.kind for rope in spec.ropes()} == {"default"}
