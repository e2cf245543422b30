"""Blocks of tokens that are guessed together: the engine's loop against one without cache, batch and chunks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.weights import canonical_weights
from toolkit.configs.engine import PytorchEngineConfig
from toolkit.configs.unmasking import Unmasking
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing
from toolkit.engine.canvas import chosen_of
from toolkit.engine.core import EngineCore
from toolkit.engine.load.setup import CONFIGS
from toolkit.engine.options import EngineOptions
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.engine.request import EngineOutput, EngineRequest, SamplingParams
from toolkit.errors import UsageError
from toolkit.messages import GenerationConfig, Response
from toolkit.models.registry import load_spec
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native.library import available

BACKENDS = {"pytorch": "tensor"} | ({} if available() else {"turbomind": "native"})  # and their runners
BLOCK, MASK, NEW = 4, 4, 10  # of the tiny model; NEW: no multiple of its block
RULES = {
    "dynamic": Unmasking(threshold=0.3),
    "dynamic in two": Unmasking(steps=2, threshold=0.5),
    "static": Unmasking("low_confidence_static"),
    "static in three": Unmasking("low_confidence_static", steps=3),
    "sequential": Unmasking("sequential"),
    "sequential in two": Unmasking("sequential", steps=2),
    "more steps than tokens": Unmasking("low_confidence_static", steps=9),
}
WAYS: dict[str, dict[str, Any]] = {
    "odd chunks": {"max_prefill_token_num": 9},
    "no prefix cache": {"prefix_caching": False},
    "one request at a time": {"max_batch_size": 1},
    "preemption": {"blocks": 7},
    "lookahead": {"lookahead": True},
    "paced": {"target_step_ms": 1e-6},
}


def requests() -> list[EngineRequest]:
    """Prompts that end in and between blocks, one shorter than a block, two that begin alike; drawn in several ways."""
    rng = np.random.default_rng(3)
    shared = rng.integers(5, 300, 46).tolist()
    prompts = [shared[:45], [*shared[:32], 9, 8], [7], shared, rng.integers(5, 300, 48).tolist()]
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "top_k": 5, "seed": 11},
        {},
        {"temperature": 1.3, "top_k": 3, "seed": 4},
        {"logprobs": 2},
    ]
    pairs = zip(prompts, settings, strict=True)
    return [EngineRequest(str(i), p, SamplingParams(NEW, **s)) for i, (p, s) in enumerate(pairs)]


@pytest.fixture(scope="module")
def model(tiny_models: Callable[..., Path]) -> Path:
    return tiny_models("sdar")


@pytest.fixture(scope="module", params=BACKENDS)
def runner(model: Path, request: Any) -> Any:
    runner, _ = open_runner(
        model, backend=request.param, options=RunnerOptions(device="cpu", dtype="float32", block_size=16, threads=1)
    )
    assert runner.name == BACKENDS[request.param]
    runner.load_weights()
    return runner


@pytest.fixture(scope="module")
def wanted(model: Path, support: Any) -> Callable[..., list[int]]:
    """``wanted(request, unmasking)``: the tokens by the plain loop over the plain model."""
    checkpoint = open_checkpoint(model)
    spec, stored = load_spec(checkpoint)
    weights = support("random_specs").dense(canonical_weights(checkpoint, stored))

    @cache
    def logits(*ids: int) -> Any:
        return support("plain_model").logits(spec, weights, list(ids)).numpy()

    def tokens(request: EngineRequest, rule: Unmasking) -> list[int]:
        params = request.params
        found: list[int] = support("denoise").denoise(
            lambda ids: logits(*ids), request.token_ids, params.max_new_tokens, BLOCK, MASK,
            strategy=rule.strategy, steps=rule.steps, threshold=rule.threshold,
            temperature=params.temperature, top_k=params.top_k, seed=params.seed, stops=params.stop_token_ids,
        )  # fmt: skip
        return found

    return tokens


def core_of(runner: Any, rule: Unmasking, blocks: int = 40, **options: Any) -> EngineCore:
    sizes = {"session_len": 64, "max_batch_size": 8, "max_prefill_token_num": 64} | options
    runner.release_cache()
    runner.allocate_cache((blocks,))
    return EngineCore(runner, EngineOptions(**sizes, num_blocks=(blocks,), unmasking=rule, check=True), None)


def serve(core: EngineCore, asked: list[EngineRequest]) -> dict[str, list[EngineOutput]]:
    found: dict[str, list[EngineOutput]] = {}
    for request in asked:
        core.add(request)
    while core.has_work:
        for output in core.step():
            found.setdefault(output.id, []).append(output)
    return found


def tokens_of(found: dict[str, list[EngineOutput]]) -> dict[str, list[int]]:
    return {name: [token for output in outputs for token in output.token_ids] for name, outputs in found.items()}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_tokens_are_those_of_the_plain_loop(rule: Unmasking, runner: Any, wanted: Any) -> None:
    found = serve(core_of(runner, rule), requests())
    assert tokens_of(found) == {request.id: wanted(request, rule) for request in requests()}
    assert found["0"][-1].finish_reason == "length"
    for request in requests():  # a block at a time: first what the prompt left free of its own, at last what is wanted
        first = min(NEW, BLOCK - len(request.token_ids) % BLOCK)
        rest = [min(BLOCK, NEW - at) for at in range(first, NEW, BLOCK)]
        assert [len(output.token_ids) for output in found[request.id]] == [first, *rest]


@pytest.mark.parametrize("way", WAYS)
def test_tokens_do_not_depend_on_how_the_work_is_done(way: str, runner: Any, wanted: Any) -> None:
    rule = RULES["dynamic"]
    core = core_of(runner, rule, **WAYS[way])
    found = tokens_of(serve(core, requests()))
    again = tokens_of(serve(core, requests()))  # with what the first have left in the cache
    assert found == again == {request.id: wanted(request, rule) for request in requests()}
    stats = core.stats()
    assert (stats["preemptions"] > 0) == (way == "preemption")
    assert (stats["prefix_hit_tokens"] > 0) == (way != "no prefix cache")


def test_sure_guesses_stay_together_and_save_passes(runner: Any) -> None:
    steps = []
    for threshold in (0.0, 1.0):
        core = core_of(runner, Unmasking(threshold=threshold))
        serve(core, [EngineRequest("r", [5] * 8, SamplingParams(3 * BLOCK))])
        steps.append(core.stats()["steps"])
    assert steps == [3, 3 * BLOCK]


def test_an_end_inside_a_block_ends_the_answer_there(runner: Any, wanted: Any) -> None:
    rule = RULES["static"]
    for request in requests():
        whole = wanted(request, rule)
        for place in range(0, NEW, 3):
            request.params.stop_token_ids = [whole[place]]
            first = whole.index(whole[place])
            outputs = serve(core_of(runner, rule), [request])[request.id]
            assert tokens_of({"": outputs})[""] == whole[: first + 1]
            assert (outputs[-1].finish_reason, outputs[-1].stop_token) == ("stop", whole[first])


def test_min_new_tokens_bans_the_end_place_by_place(runner: Any) -> None:
    request = requests()[2]
    free = tokens_of(serve(core_of(runner, RULES["static"]), [request]))["2"]
    request.params.stop_token_ids, request.params.min_new_tokens = list(dict.fromkeys(free)), 5
    found = tokens_of(serve(core_of(runner, RULES["static"]), [request]))["2"]
    assert len(found) >= 5 and not set(found[:5]) & set(free)


def test_log_probabilities_come_with_their_tokens(runner: Any) -> None:
    request = requests()[4]
    outputs = serve(core_of(runner, RULES["dynamic"]), [request])["4"]
    found = [entry for output in outputs for entry in output.logprobs]
    assert len(found) == NEW
    for token, entry in zip(tokens_of({"": outputs})[""], found, strict=True):
        assert entry[token] == max(entry.values()) <= 0 and len(entry) == 2  # greedy: of the best two


def test_penalties_count_the_tokens_of_finished_blocks(runner: Any) -> None:
    request = EngineRequest("r", [5] * 8, SamplingParams(24, presence_penalty=1000.0))
    found = tokens_of(serve(core_of(runner, Unmasking("sequential")), [request]))["r"]
    blocks = [set(found[i : i + BLOCK]) for i in range(0, 24, BLOCK)]
    assert sum(map(len, blocks)) == len(set(found))


def test_a_step_that_fails_is_run_again(runner: Any, wanted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, calls, submit = RULES["static"], [], runner.submit

    def breaking(batch: Any) -> Any:
        calls.append(len(batch.seq_lens))
        if len(calls) in (2, 6):
            raise RuntimeError("broke")
        return submit(batch)

    monkeypatch.setattr(runner, "submit", breaking)
    found = tokens_of(serve(core_of(runner, rule), requests()))
    assert found == {request.id: wanted(request, rule) for request in requests()}


def test_a_session_goes_on_from_whole_blocks(runner: Any, wanted: Any) -> None:
    rule = RULES["dynamic"]
    core = core_of(runner, rule, prefix_caching=False)
    first = EngineRequest("a", requests()[3].token_ids, SamplingParams(NEW), session="s")
    text = [*first.token_ids, *tokens_of(serve(core, [first]))["a"], 9, 8, 7]
    second = EngineRequest("b", text, SamplingParams(5), session="s")
    outputs = serve(core, [second])
    assert tokens_of(outputs)["b"] == wanted(second, rule)
    assert outputs["b"][0].cached_tokens == 52  # of 56, whose last block of the canvas was never computed as it became


ASKED: dict[str, dict[str, Any]] = {
    "response_format": {"grammar": {"type": "json_object"}},
    "bad_words": {"bad_words": ["the"]},
    "prompt_logprobs": {"prompt_logprobs": 0},
    "output_logits": {"logits": "all"},
    "output_last_hidden_state": {"hidden": "generation"},
}


@pytest.mark.parametrize("name", ["logits_processors", "scores and embeddings", *ASKED])
def test_what_goes_from_token_to_token_is_refused(name: str, runner: Any) -> None:
    core = core_of(runner, Unmasking())
    only: Any = "score" if name.startswith("scores") else None
    request = EngineRequest("r", [5, 6], SamplingParams(4, **ASKED.get(name, {})), only=only)
    core.add(request, [lambda ids, x: x] if name == "logits_processors" else [])
    (output,) = core.step()
    assert output.error_code == 400 and str(output.error).startswith(f"{name}: ")
    assert "blocks of tokens together" in str(output.error)
    assert not core.has_work


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=12), st.integers(1, 12),
    st.sampled_from(["low_confidence_dynamic", "low_confidence_static", "sequential"]), st.floats(0, 1),
)  # fmt: skip
def test_which_guesses_stay(shares: list[int], due: int, strategy: str, threshold: float) -> None:
    probability = np.array(shares, np.float32) / 20
    found = chosen_of(probability, Unmasking(strategy, None, threshold), due).tolist()
    least = min(due, len(shares))
    assert found == sorted(set(found)) and len(found) >= least
    assert strategy == "low_confidence_dynamic" or len(found) == least
    if strategy == "sequential":
        assert found == list(range(least))
    else:
        left = set(range(len(shares))) - set(found)
        assert all(probability[i] >= probability[j] for i in found for j in left)
        sure = [i for i, p in enumerate(probability) if p > threshold]
        assert strategy != "low_confidence_dynamic" or len(found) == max(least, len(sure))


def whole(engine: AsyncEngine, ids: list[int], **fields: Any) -> tuple[Response, list[str]]:
    done, texts = Response(), []
    for delta in engine.generate_sync(ids, GenerationConfig(**fields)):
        texts.append(delta.text)
        done.extend(delta)
    return done, texts


@pytest.mark.parametrize("backend", BACKENDS)
def test_options_reach_the_model_and_a_stop_string_may_end_inside_a_block(backend: str, model: Path) -> None:
    config = partial(CONFIGS[backend], session_len=128, max_batch_size=4, threads=1)
    with AsyncEngine.open(model, backend_config=config(dllm_block_length=8)) as engine:
        free, texts = whole(engine, [5, 6, 7], max_new_tokens=21, ignore_eos=True)
        assert engine.runner_name == BACKENDS[backend] and len(free.token_ids) == 21 and len(texts) <= 4
        for word in dict.fromkeys(free.text[i : i + 3] for i in range(0, len(free.text) - 3, 2)):
            cut, _ = whole(engine, [5, 6, 7], max_new_tokens=21, ignore_eos=True, stop_words=[word])
            assert cut.text == free.text[: free.text.index(word)] and cut.finish_reason == "stop"
            assert cut.token_ids == free.token_ids[: len(cut.token_ids)] and cut.generate_token_len <= 21
    with AsyncEngine.open(model, backend_config=config()) as engine:  # blocks of 4, as its config.json says
        assert len(whole(engine, [5, 6, 7], max_new_tokens=5, ignore_eos=True)[0].token_ids) == 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dllm_block_length": 6}, "dllm_block_length: expected a divisor of block_size, which is 64, found 6"),
        ({"dllm_block_length": 0}, "dllm_block_length"),
        ({"dllm_denoising_steps": 0}, "dllm_denoising_steps"),
        ({"dllm_confidence_threshold": 1.5}, "dllm_confidence_threshold"),
        ({"dllm_unmasking_strategy": "best"}, "dllm_unmasking_strategy: expected one of low_confidence_dynamic"),
    ],
)
def test_options_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PytorchEngineConfig(**fields)


@pytest.mark.parametrize(("name", "value"), [("dllm_block_length", 4), ("dllm_denoising_steps", 1)])
def test_blocks_are_for_models_that_guess_them(name: str, value: Any, tiny_models: Callable[..., Path]) -> None:
    config = PytorchEngineConfig(device_type="cpu", threads=1, **{name: value})
    with pytest.raises(UsageError, match=f"{name}={value}: this model draws one token after another"):
        AsyncEngine.open(tiny_models("qwen3"), backend_config=config)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_engine_artifact_takes_another_length(backend: str, model: Path, tmp_path: Path) -> None:
    head = None if available() else 16  # fewer bits would round what is compared
    convert(str(model), tmp_path / "engine", Packing(dtype="float32", head_bits=head), quiet=True)
    found = []
    for path in (model, tmp_path / "engine"):
        config = CONFIGS[backend](session_len=64, dtype="float32", threads=1, dllm_block_length=8)
        with AsyncEngine.open(path, backend_config=config) as engine:
            found.append(whole(engine, [5, 6, 7], max_new_tokens=12, ignore_eos=True)[0].token_ids)
    assert found[0] == found[1] and len(found[0]) == 12
