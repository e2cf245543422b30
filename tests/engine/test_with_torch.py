"""The engine over the tensor runner and tiny models: the same tokens however the work is cut, cached and mixed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.engine.core import EngineCore
from toolkit.engine.load.setup import Setup
from toolkit.engine.load.start import start
from toolkit.engine.options import EngineOptions
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.errors import ToolkitError, UsageError
from toolkit.messages import GenerationConfig, Response
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner

# full attention; windows in every layer; windows in some; long rope; states beside attention
FAMILIES = ("llama", "mistral", "gemma2", "phi3", "lfm2", "qwen3_5_text", "falcon_h1")
WAYS: dict[str, dict[str, Any]] = {
    "odd chunks": {"max_prefill_token_num": 7},
    "one token at a time": {"max_prefill_token_num": 1},
    "no prefix cache": {"prefix_caching": False},
    "one request at a time": {"max_batch_size": 1},
    "preemption": {"blocks": 10},
    "lookahead": {"lookahead": True},
}


def requests() -> list[EngineRequest]:
    rng = np.random.default_rng(5)
    shared = rng.integers(3, 300, 40).tolist()
    prompts = [
        shared[:37],
        [*shared[:33], 9, 8],
        rng.integers(3, 300, 5).tolist(),
        shared,
        rng.integers(3, 300, 70).tolist(),
    ]
    settings: list[dict[str, Any]] = [
        {}, {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 11}, {"repetition_penalty": 1.2},
        {"temperature": 1.0, "seed": 4, "min_p": 0.02}, {},
    ]  # fmt: skip
    return [
        EngineRequest(str(i), p, SamplingParams(20, **s))
        for i, (p, s) in enumerate(zip(prompts, settings, strict=True))
    ]


def serve(runner: Any, blocks: int = 40, **options: Any) -> tuple[dict[str, list[int]], EngineCore]:
    groups = len(runner.spec.cache_groups)
    chosen = EngineOptions(
        **({"session_len": 128, "max_batch_size": 8, "max_prefill_token_num": 64} | options),
        num_blocks=(blocks,) * groups,
        check=True,
    )
    runner.release_cache()
    runner.allocate_cache(chosen.num_blocks)
    core = EngineCore(runner, chosen, None)
    for request in requests():
        core.add(request)
    found: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.step():
            assert output.error is None
            found.setdefault(output.id, []).extend(output.token_ids)
    return found, core


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_do_not_depend_on_how_the_work_is_done(family: str, tiny_models: Callable[..., Path]) -> None:
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16, threads=1)
    runners = {}
    for backend in ("pytorch", "turbomind"):  # the second gives another runner only where one runs here
        runner, _ = open_runner(tiny_models(family), backend=backend, options=options)
        runners[runner.name] = runner
    results = {}
    for name, runner in runners.items():
        runner.load_weights()
        expected, _ = serve(runner)
        results[name] = expected
        assert {len(t) for t in expected.values()} == {20}
        for way, change in WAYS.items():
            found, core = serve(runner, **change)
            assert found == expected, (name, way)
            if way == "preemption":
                assert core.stats()["preemptions"] > 0
            if way == "odd chunks":
                assert core.stats()["prefix_hit_tokens"] > 0
        runner.close()
    assert all(tokens == results["tensor"] for tokens in results.values())


def test_the_host_draws_what_the_reference_kernel_draws() -> None:
    import torch

    from toolkit.engine.constraints import host_sampler
    from toolkit.kernels.reference.sampling import sample
    from toolkit.runners.step import SamplingBatch, uniform

    rng = np.random.default_rng(3)
    n, vocab = 400, 150
    logits = (rng.normal(size=(n, vocab)) * 3).astype(np.float32)
    logits[::5] = logits[::5].round()  # ties
    f32, i32 = np.float32, np.int32
    batch = SamplingBatch(
        temperature=rng.choice([0.0, 0.3, 1.0, 1.7], n).astype(f32),
        top_k=rng.choice([0, 1, 7, 500], n).astype(i32),
        top_p=rng.choice([0.0, 0.4, 0.95, 1.0], n).astype(f32),
        min_p=rng.choice([0.0, 0.05, 1.0], n).astype(f32),
        repetition_penalty=np.ones(n, f32),
        presence_penalty=np.zeros(n, f32),
        frequency_penalty=np.zeros(n, f32),
        seed=rng.integers(0, 2**63, n).astype(np.uint64),
        position=rng.integers(0, 1000, n).astype(np.int64),
        history_ptr=np.zeros(n + 1, i32),
        history_ids=np.zeros(0, i32),
        history_count=np.zeros(0, i32),
        bias_ptr=np.zeros(n + 1, i32),
        bias_ids=np.zeros(0, i32),
        bias_values=np.zeros(0, f32),
        logprobs=np.full(n, -1, i32),
    )
    u = torch.tensor([uniform(int(s), int(p)) for s, p in zip(batch.seed, batch.position, strict=True)])
    t = torch.from_numpy
    expected = sample(t(logits), t(batch.temperature), t(batch.top_k), t(batch.top_p), t(batch.min_p), u)
    found = [host_sampler.draw(host_sampler.adjust(logits[i], batch, i), batch, i) for i in range(n)]
    assert found == expected.tolist()


@pytest.mark.parametrize("k, p", [(5, 1.0), (0, 0.7), (5, 0.7), (40, 0.9), (40, 0.3)])
def test_what_filters_keep_is_what_transformers_keeps(k: int, p: float) -> None:
    """Also top_p beside top_k: a share of what that leaves."""
    import torch
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    from toolkit.kernels.reference.kept import kept_mass

    logits = torch.randn(64, 150, generator=torch.Generator().manual_seed(k))
    expected = TopPLogitsWarper(p)(None, TopKLogitsWarper(k)(None, logits) if k else logits) > -torch.inf
    one = torch.ones(64)
    mass = kept_mass(logits, one, torch.full((64,), k), one * p, one * 0)
    assert torch.equal(mass.diff(prepend=torch.zeros(64, 1), dim=1) > 0, expected)


@pytest.fixture(scope="module")
def model(tiny_models: Callable[..., Path]) -> Path:
    return tiny_models("llama")


def config(**fields: Any) -> PytorchEngineConfig:
    return PytorchEngineConfig(
        **({"session_len": 256, "max_batch_size": 8, "device_type": "cpu", "threads": 1} | fields)
    )


def whole(engine: AsyncEngine, ids: list[int], **fields: Any) -> Response:
    done = Response()
    for delta in engine.generate_sync(ids, GenerationConfig(**fields)):
        done.extend(delta)
    return done


def test_open_tells_what_it_got(model: Path) -> None:
    said: list[str] = []
    with AsyncEngine.open(model, backend_config=config(), progress=said.append) as engine:
        assert engine.session_len == 256 and engine.max_batch_size == 8
        assert engine.runner_name == "tensor" and engine.device == "cpu" and engine.healthy
        assert [r[0] for r in engine.plan.table()][:2] == ["weights", "activations"] and said
        assert engine.model_name == model.name
        ids = engine.tokenizer.encode("hello there")
        r = whole(engine, ids, max_new_tokens=6, ignore_eos=True, response_format={"type": "text"})
        assert r.finish_reason == "length"
        assert r.text == engine.tokenizer.decode([*ids, *r.token_ids])[len(engine.tokenizer.decode(ids)) :]


def test_grammar_and_bad_words_work_with_a_real_tokenizer(model: Path) -> None:
    with AsyncEngine.open(model, backend_config=config()) as engine:
        ids = engine.tokenizer.encode("hello")
        fields: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "top_k": 0, "random_seed": 2}
        r = whole(engine, ids, response_format={"type": "choice", "choice": ["left", "right"]}, **fields)
        assert r.text in ("left", "right") and r.finish_reason == "stop"
        held = whole(engine, ids, max_new_tokens=100, ignore_eos=True, bad_words=["e", "th"], **fields)
        assert "e" not in held.text and "th" not in held.text


def test_turbomind_is_accepted_and_says_which_runner_it_got(model: Path) -> None:
    engine_config = TurbomindEngineConfig(session_len=128, device="cpu", threads=1)
    with AsyncEngine.open(model, backend_config=engine_config) as engine:
        assert engine.runner_name == "native" or "pytorch" in engine.runner_why
        assert whole(engine, [5, 6], max_new_tokens=2, ignore_eos=True).generate_token_len == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"session_len": 10**9}, "session_len 1000000000: .*are left"),
        ({"cache_max_entry_count": 10**9}, "cache_max_entry_count"),
    ],
)
def test_what_cannot_be_is_one_line(model: Path, fields: dict[str, Any], message: str) -> None:
    for process in (False, True):
        with pytest.raises(ToolkitError, match=message) as e:
            AsyncEngine.open(model, backend_config=config(**fields), process=process)
        assert "\n" not in str(e.value)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        AsyncEngine.open(tmp_path / "nothing")
    with pytest.raises(ToolkitError):
        AsyncEngine.open(tmp_path)


def test_the_process_gives_what_the_thread_gives_and_outlives_a_crash(model: Path) -> None:
    ids = [5, 6, 7, 8]
    fields: dict[str, Any] = {
        "max_new_tokens": 12, "ignore_eos": True, "logprobs": 2, "output_logits": "generation", "prompt_logprobs": 1,
    }  # fmt: skip
    with AsyncEngine.open(model, backend_config=config()) as engine:
        expected = whole(engine, ids, **fields)
        scores = engine.score(ids)
    engine = AsyncEngine.open(model, backend_config=config(), process=True)
    try:
        found = whole(engine, ids, **fields)
        np.testing.assert_array_equal(found.logits, expected.logits)
        found.logits = expected.logits = None
        assert asdict(found) == asdict(expected)
        np.testing.assert_array_equal(engine.score(ids), scores)
        (refused,) = engine.generate_sync(ids, GenerationConfig(logits_processors=[lambda i, x: x]))
        assert refused.error_code == 400 and "in this process" in str(refused.error_message)
        told = ""
        while "restarted" not in told:  # where the machine is busy an answer may be whole before its engine is killed
            told = asyncio.run(_crash(engine, ids))
        again = whole(engine, ids, **fields)
        assert again.token_ids == expected.token_ids
        assert engine.stats()["generation_tokens"] == 12
    finally:
        engine.close()
    assert not engine.healthy


async def _crash(engine: AsyncEngine, ids: list[int]) -> str:
    """Kill the engine's process in the middle of a request: it fails, the engine comes back. What the request was
    told, "" where it had all it wanted by then.
    """
    pid = engine._loop.pid  # type: ignore[attr-defined]
    stream = engine.generate(ids, GenerationConfig(max_new_tokens=250, ignore_eos=True))
    await anext(stream)
    os.kill(pid, signal.SIGKILL)
    last = None
    async for delta in stream:
        last = delta
    assert last is not None and (last.finish_reason, last.error_code) in (("error", 503), ("length", None))
    end = time.monotonic() + 60
    while engine._loop.pid == pid or not engine.healthy:  # type: ignore[attr-defined]
        assert time.monotonic() < end, "the engine does not come back"
        await asyncio.sleep(0.05)
    return last.error_message or ""


def test_a_runner_that_gets_no_memory_is_told_in_one_line(tiny_models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.runners.base import RunnerError
    from toolkit.runners.tensor.runner import TensorRunner

    def refuse(self: Any, num_blocks: Any) -> None:
        raise RunnerError("out of memory")

    monkeypatch.setattr(TensorRunner, "allocate_cache", refuse)
    with pytest.raises(ToolkitError, match=r"out of memory.*cache-max-entry-count") as error:
        AsyncEngine.open(tiny_models("llama"), backend="pytorch")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("asked", [1, 0])
def test_async_0_schedules_no_step_ahead(asked: int, tiny_models: Callable[..., Path]) -> None:
    path = tiny_models("llama")
    config = TurbomindEngineConfig(async_=asked, session_len=64, device="cpu")
    core, _ = start(Setup(path, path, config, None), None, lambda line: None)
    try:
        assert core.options.lookahead is (None if asked else False)
    finally:
        core.runner.close()
