"""The tensor runner against transformers on the same weights, float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def _prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 300, length).tolist()


def test_ragged_batches_give_transformers_logits(family, drive, transformers_model, logits_of):
    driver, model = drive(family), transformers_model(family)
    prompts = [_prompt(n, seed) for seed, n in enumerate((45, 3, 1, 17))]
    more = [[5], [6, 7, 8], [9], [10]]
    numbers = [driver.add() for _ in prompts]
    first = driver.step(dict(zip(numbers, prompts, strict=True)), "all")
    second = driver.step(dict(zip(numbers, more, strict=True)), "all")
    whole = [logits_of(model, p + m) for p, m in zip(prompts, more, strict=True)]
    expected = torch.cat([w[: len(p)] for w, p in zip(whole, prompts, strict=True)]).numpy()
    np.testing.assert_allclose(first.logits, expected, **CLOSE)
    expected = torch.cat([w[len(p) :] for w, p in zip(whole, prompts, strict=True)]).numpy()
    np.testing.assert_allclose(second.logits, expected, **CLOSE)
    assert first.tokens[:, 0].tolist() == [int(w[len(p) - 1].argmax()) for w, p in zip(whole, prompts, strict=True)]


@pytest.mark.parametrize("chunk", [1, 7, 13])
def test_odd_chunks_give_transformers_logits(family, chunk, drive, transformers_model, logits_of):
    driver, prompt = drive(family), _prompt(50, 3)
    number, found = driver.add(), []
    for start in range(0, len(prompt), chunk):
        found.append(driver.step({number: prompt[start : start + chunk]}, "all").logits)
    np.testing.assert_allclose(np.concatenate(found), logits_of(transformers_model(family), prompt).numpy(), **CLOSE)


def test_greedy_tokens_equal_transformers(family, drive, transformers_model):
    prompt = _prompt(20, 4)
    with torch.no_grad():
        expected = transformers_model(family).generate(
            torch.tensor([prompt]), max_new_tokens=30, min_new_tokens=30, do_sample=False, eos_token_id=None
        )
    assert drive(family).generate(prompt, 30) == expected[0, len(prompt) :].tolist()
    assert drive(family, scattered=False).generate(prompt, 30, chunk=6) == expected[0, len(prompt) :].tolist()


def test_hidden_states_are_those_after_the_final_norm(drive, transformers_model):
    prompt = _prompt(12, 5)
    driver = drive("llama")
    found = driver.step({driver.add(): prompt}, "all").hidden
    with torch.no_grad():
        model = transformers_model("llama").model
        np.testing.assert_allclose(found, model(torch.tensor([prompt])).last_hidden_state[0].numpy(), **CLOSE)


def test_long_requests_turn_by_the_long_frequencies(drive, transformers_model, logits_of):
    prompt, driver = _prompt(90, 6), drive("phi3")
    expected = logits_of(transformers_model("phi3"), prompt).numpy()
    long, short = driver.add(long=True), driver.add()
    np.testing.assert_allclose(driver.step({long: prompt}, "all").logits, expected, **CLOSE)
    both = driver.step({short: prompt[:40], long: [7]}, "all").logits  # both sets in one step
    np.testing.assert_allclose(both[:40], logits_of(transformers_model("phi3"), prompt[:40]).numpy(), **CLOSE)
    np.testing.assert_allclose(both[40:], logits_of(transformers_model("phi3"), [*prompt, 7])[-1:].numpy(), **CLOSE)


def test_pieces_of_a_long_prompt_with_history(drive, transformers_model, logits_of):
    model = {"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    for family in ("llama", "mistral"):
        prompt, driver = _prompt(1300, 7), drive(family, model=model, blocks=96)
        number = driver.add()
        found = [driver.step({number: prompt[:100]}, "all").logits, driver.step({number: prompt[100:]}, "all").logits]
        expected = logits_of(transformers_model(family, **model), prompt).numpy()
        np.testing.assert_allclose(np.concatenate(found), expected, **CLOSE)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("dtype, error", [("bfloat16", 0.06), ("float16", 0.01)])
def test_half_precision_stays_near_float32(family, dtype, error, drive, transformers_model, logits_of):
    driver, prompt = drive(family, dtype=dtype), _prompt(30, 8)
    found = driver.step({driver.add(): prompt}, "all").logits
    expected = logits_of(transformers_model(family), prompt).numpy()
    assert np.linalg.norm(found - expected) < error * np.linalg.norm(expected)


def test_targets_are_log_probabilities_of_raw_logits(drive, transformers_model, logits_of):
    prompt, driver = _prompt(30, 9), drive("gemma2")
    index = np.arange(29, dtype=np.int32)
    output = driver.step({driver.add(): prompt}, target_index=index, target_ids=np.asarray(prompt[1:], np.int32))
    expected = logits_of(transformers_model("gemma2"), prompt).log_softmax(-1)
    expected = expected[torch.arange(29), torch.tensor(prompt[1:])]
    np.testing.assert_allclose(output.target_logprobs, expected.numpy(), **CLOSE)


def test_the_residual_stream_keeps_bfloat16_accurate(drive, transformers_model, logits_of, tiny_models):
    """Nearer to float32 than transformers' own bfloat16, which rounds the sum after every layer."""
    from transformers import AutoModelForCausalLM

    model, prompt = {"num_hidden_layers": 12}, _prompt(40, 10)
    expected = logits_of(transformers_model("llama", **model), prompt)
    theirs = AutoModelForCausalLM.from_pretrained(tiny_models("llama", **model), dtype=torch.bfloat16).eval()
    driver = drive("llama", model=model, dtype="bfloat16")
    ours = torch.from_numpy(driver.step({driver.add(): prompt}, "all").logits)
    assert (ours - expected).norm() < 0.8 * (logits_of(theirs, prompt).float() - expected).norm()
