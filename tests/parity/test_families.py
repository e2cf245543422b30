"""Every family, run by our runners, against transformers on the same float32 weights.

The oracle is transformers' whole forward pass over each prompt alone, with eager attention and no cache. For a
family without a class there its twin answers. Phi-3's and InternLM2's rope
have two sets of frequencies: a request that may grow past the original length uses the long one from its first token,
and so does transformers for a forward pass that is longer; lengths in these tests stay on one side.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.engine.core import EngineCore
from toolkit.engine.options import EngineOptions
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_model, open_runner
from toolkit.runners.native.library import available

RUNNERS = {"pytorch": "tensor", "turbomind": "native"}  # backend → runner
BACKENDS = ("pytorch", "turbomind") if available() is None else ("pytorch",)
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
BLOCK = 16
NEW = 12
ATOL = 2e-4  # logits have a spread of about 1; float32 sums in another order differ by a few 1e-6

SHORT = [1, 7, 16, 33, 50]  # prompt lengths that stay below phi3's original length of 64 with NEW tokens more
LONG = [70, 91, 129, 200]


class Oracle:
    """transformers' model for a tiny checkpoint."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self.model.eval()
        self.answers: dict[tuple[int, ...], list[int]] = {}

    def logits(self, ids: list[int]) -> np.ndarray:
        with self.torch.inference_mode():
            return self.model(self.torch.tensor([ids]), use_cache=False).logits[0].float().numpy()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """As each step's whole forward pass would choose; a prompt is answered once."""
        if (*prompt, count) not in self.answers:
            ids = list(prompt)
            for _ in range(count):
                ids.append(int(self.logits(ids)[-1].argmax()))
            self.answers[*prompt, count] = ids[len(prompt) :]
        return self.answers[*prompt, count]


@pytest.fixture(scope="module")
def case(family: str, tiny_models: Any) -> tuple[str, Path, Oracle]:
    return family, tiny_models(family), Oracle(tiny_models.twin(family))


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[int(x) for x in rng.integers(5, 320, n)] for n in lengths]


def open_backend(path: Path, backend: Any) -> Any:
    options = RunnerOptions(device="cpu", dtype="float32", block_size=BLOCK, threads=1)
    runner, _ = open_runner(path, backend=backend, options=options)
    assert runner.name == RUNNERS[backend]
    return runner


def is_long(family: str, length: int) -> bool:
    return family == "phi3" and length > 64


def assert_logits(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert expected.std() > 0.3, "the oracle's logits are too flat to tell anything"
    np.testing.assert_allclose(found, expected, atol=ATOL, rtol=ATOL)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["short", "long"])
def test_logits_of_a_ragged_batch(case: Any, support: Any, backend: str, lengths: list[int]) -> None:
    family, path, oracle = case
    driver = support("steps").Driver(open_backend(path, backend))
    new = {driver.add(long=is_long(family, len(p))): p for p in prompts(lengths)}
    output = driver.step(new, want="all")
    expected = np.concatenate([oracle.logits(p) for p in new.values()])
    assert_logits(output.logits, expected)
    last = np.cumsum(lengths) - 1
    assert output.tokens[:, 0].tolist() == expected[last].argmax(-1).tolist()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("chunk", [1, 5, 23])
def test_logits_in_odd_chunks_among_neighbours(case: Any, support: Any, backend: str, chunk: int) -> None:
    """Each sequence advances by chunks of its own size in the same steps."""
    family, path, oracle = case
    driver = support("steps").Driver(open_backend(path, backend))
    texts = prompts([41, 29, 90], seed=1)
    numbers = [driver.add(long=is_long(family, len(p))) for p in texts]
    at = [0] * len(texts)
    rows: list[list[np.ndarray]] = [[] for _ in texts]
    while any(a < len(p) for a, p in zip(at, texts, strict=True)):
        new = {}
        for i, p in enumerate(texts):
            piece = p[at[i] : at[i] + chunk + 3 * i]
            if piece:
                new[numbers[i]] = piece
        logits = driver.step(new, want="all").logits
        start = 0
        for i in range(len(texts)):
            size = len(new.get(numbers[i], ()))
            rows[i].append(logits[start : start + size])
            start, at[i] = start + size, at[i] + size
    for found, p in zip(rows, texts, strict=True):
        assert_logits(np.concatenate(found), oracle.logits(p))


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True, "head_dim": 40, "num_attention_heads": 4, "num_key_value_heads": 4}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}}),
    ("llama", {"rope_parameters": YARN, "hidden_act": "gelu"}),
    ("llama", {"num_key_value_heads": 1, "dtype": "bfloat16", "max_shard_size": "100KB"}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"use_sliding_window": False}),
    ("qwen2", {"layer_types": ["sliding_attention", "full_attention"]}),
    ("qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}),
    ("internlm2", {"shape": 1}),
    ("gemma2", {"tie_word_embeddings": False, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "sliding_window": 13}),
    ("phi3", {"tie_word_embeddings": True, "num_attention_heads": 4, "num_key_value_heads": 4, **PLAIN}),
    ("mixtral", {"sliding_window": 11, "num_experts_per_tok": 1}),
    ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [], "decoder_sparse_step": 2}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 10, "attention_bias": True}),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family, overrides", VARIANTS, ids=[f"{f}-{'-'.join(o)[:40]}" for f, o in VARIANTS])
def test_logits_of_config_variants(
    tiny_models: Any, support: Any, backend: str, family: str, overrides: dict[str, Any]
) -> None:
    path = tiny_models(family, **overrides)
    oracle = Oracle(tiny_models.twin(family, **overrides))
    driver = support("steps").Driver(open_backend(path, backend))
    new = {driver.add(): p for p in prompts(SHORT)}
    output = driver.step(new, want="all")
    assert_logits(output.logits, np.concatenate([oracle.logits(p) for p in new.values()]))


def run_engine(
    path: Path, backend: str, requests: list[list[int]], *, budget: int, caching: bool
) -> tuple[list[list[int]], int]:
    """Greedy tokens of each request and the prompt tokens that came from the cache; the second half of the requests is
    added when the first has ended, so that it meets a filled cache."""
    runner = open_backend(path, backend)
    runner.load_weights()
    blocks = (64,) * len(runner.spec.cache_groups)
    runner.allocate_cache(blocks)
    options = EngineOptions(
        session_len=256,
        max_batch_size=4,
        max_prefill_token_num=budget,
        num_blocks=blocks,
        prefix_caching=caching,
        check=True,
    )
    core = EngineCore(runner, options, None)
    tokens: dict[str, list[int]] = {}
    cached: dict[str, int] = {}
    half = len(requests) // 2
    for part in (range(half), range(half, len(requests))):
        for i in part:
            core.add(EngineRequest(str(i), requests[i], SamplingParams(max_new_tokens=NEW)))
        while core.has_work:
            for out in core.step():
                assert out.error is None, out.error
                tokens.setdefault(out.id, []).extend(out.token_ids)
                cached[out.id] = max(cached.get(out.id, 0), out.cached_tokens)
    return [tokens[str(i)] for i in range(len(requests))], sum(cached.values())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("budget, caching", [(7, True), (37, False), (512, True)])
def test_greedy_tokens_through_the_engine(case: Any, backend: str, caching: bool, budget: int) -> None:
    _, path, oracle = case
    texts = prompts([40, 3, 50, 21, 1, 33], seed=2)
    requests = [*texts, texts[0], texts[2][:35] + texts[3][:10], texts[5], texts[1] + texts[3]]
    found, cached = run_engine(path, backend, requests, budget=budget, caching=caching)
    expected = [oracle.greedy(p, NEW) for p in requests]
    assert found == expected
    assert (cached > 0) == caching


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family, shape", [("phi3", 0), ("phimoe", 1), ("phimoe", 2), ("gemma2", 0), ("llama", 0)])
def test_long_requests_through_the_engine(tiny_models: Any, backend: str, family: str, shape: int) -> None:
    """Above the original length of both Phi, and far past gemma2's window, where blocks of the window are freed."""
    path = tiny_models(family, shape=shape)
    oracle = Oracle(path)
    if family == "phimoe":  # transformers has its short frequencies at any length, its authors the long ones here
        rotary = oracle.model.model.rotary_emb
        rotary.rope_init_fn = partial(rotary.rope_init_fn, seq_len=75)
    texts = prompts([100, 150, 75], seed=3)
    requests = [*texts, texts[0], texts[1][:140], texts[2]]
    found, cached = run_engine(path, backend, requests, budget=61, caching=True)
    assert found == [oracle.greedy(p, NEW) for p in requests]
    assert cached > 0


if "turbomind" in BACKENDS:

    def test_native_is_bit_exact(case: Any, support: Any) -> None:
        """A request's logits depend neither on its neighbours nor on how its prompt is cut."""
        family, path, _ = case
        driver = support("steps").Driver(open_backend(path, "turbomind"))
        texts = prompts([45, 30, 88, 1, 17], seed=4)
        longs = [is_long(family, len(p)) for p in texts]
        together = driver.step({driver.add(long=lo): p for p, lo in zip(texts, longs, strict=True)}, want="all").logits
        start = 0
        for p, long in zip(texts, longs, strict=True):
            expected = together[start : start + len(p)]
            start += len(p)
            for chunk in (len(p), 13):
                number = driver.add(long=long)
                pieces = [driver.step({number: p[a : a + chunk]}, want="all").logits for a in range(0, len(p), chunk)]
                np.testing.assert_array_equal(np.concatenate(pieces), expected)
                driver.free(number)


def replaced(node: Any, key: str, value: Any) -> Any:
    """``node`` (JSON) with every field called ``key`` that holds something set to ``value``."""
    if isinstance(node, dict):
        return {k: value if k == key and v is not None else replaced(v, key, value) for k, v in node.items()}
    return [replaced(v, key, value) for v in node] if isinstance(node, (list, tuple)) else node


MATTERS = [
    ("llama", "kind", "default"),  # of rope
    ("llama", "high_freq_factor", 2.0),
    ("mistral", "window", 25),
    ("mistral", "window", 23),
    ("qwen2", "window", 21),
    ("qwen3", "q_norm", None),
    ("qwen3", "k_norm", None),
    ("gemma2", "softcap", None),
    ("gemma2", "logit_softcap", None),
    ("gemma2", "window", 17),
    ("gemma2", "embed_scale", 7.9),
    ("gemma2", "scale", 0.2),
    ("gemma2", "post_norm", None),
    ("gemma2", "weight_offset", 0.0),
    ("gemma2", "activation", "gelu"),
    ("phi3", "attention_factor", 1.0),
    ("phi3", "rotary_dim", 26),
    ("mixtral", "norm_topk", False),
    ("mixtral", "top_k", 1),
    ("qwen3_moe", "norm_topk", False),
    ("qwen3_moe", "eps", 1e-3),
]


@pytest.mark.parametrize("family, key, value", MATTERS)
def test_a_wrong_spec_shows(tiny_models: Any, support: Any, family: str, key: str, value: Any) -> None:
    """The comparison above would notice if a family file got this field wrong."""
    from toolkit.runners.tensor.runner import TensorRunner

    path = tiny_models(family)
    opened = open_model(path)
    data = opened.spec.to_json()
    if key == "kind":
        for layer in data["layers"]:
            layer["sublayers"][0]["mixer"]["rope"]["kind"] = value
    elif key == "rotary_dim":
        for layer in data["layers"]:
            rope = layer["sublayers"][0]["mixer"]["rope"]
            rope.update(rotary_dim=value, short_factor=[*rope["short_factor"], 1.0], long_factor=[1.0] * 13)
    else:
        changed = replaced(data, key, value)
        assert changed != data
        data = changed
    options = RunnerOptions(device="cpu", dtype="float32", block_size=BLOCK)
    driver = support("steps").Driver(TensorRunner(DecoderSpec.from_json(data), opened.weights, options))
    (prompt,) = prompts([60])
    found = driver.step({driver.add(): prompt}, want="all").logits
    assert np.abs(found - Oracle(path).logits(prompt)).max() > 10 * ATOL


@pytest.mark.parametrize("backend", BACKENDS)
def test_rope_sets_differ(tiny_models: Any, support: Any, backend: str) -> None:
    """The long set is not the short one: taking the wrong one would show above."""
    path = tiny_models("phi3")
    (prompt,) = prompts([40])
    driver = support("steps").Driver(open_backend(path, backend))
    short = driver.step({driver.add(long=False): prompt}, want="all").logits
    long = driver.step({driver.add(long=True): prompt}, want="all").logits
    assert np.abs(short - long).max() > 0.01
