"""The engine over the runner with graphs (on a CPU, see ``tests/support/graphs.py``): the tokens of the one without,
whatever the way the work is done, a step ahead of what was read.
"""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from toolkit.engine.core import EngineCore
from toolkit.engine.in_flight import BROKEN_AFTER
from toolkit.engine.options import EngineOptions
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_model, open_runner
from toolkit.runners.tensor.runner import TensorRunner

OPTIONS = RunnerOptions(device="cpu", dtype="float32", block_size=16)
NEW = 6


def _requests():
    rng = np.random.default_rng(5)
    shared = rng.integers(3, 300, 36).tolist()
    prompts = [shared[:31], rng.integers(3, 300, 30).tolist(), rng.integers(3, 300, 5).tolist(), shared]
    settings = [{}, {"temperature": 0.9, "top_k": 40, "seed": 11}, {"repetition_penalty": 1.2}, {"logprobs": 2}]
    return [
        EngineRequest(str(i), p, SamplingParams(NEW, **s))
        for i, (p, s) in enumerate(zip(prompts, settings, strict=True))
    ]


def _core(runner, blocks=40, **options):
    groups = len(runner.spec.cache_groups)
    chosen = EngineOptions(
        **({"session_len": 128, "max_batch_size": 8, "max_prefill_token_num": 64} | options),
        num_blocks=(blocks,) * groups,
        check=True,
    )
    runner.load_weights()
    runner.release_cache()
    runner.allocate_cache(chosen.num_blocks)
    return EngineCore(runner, chosen, None)


def _serve(core, requests, abort=None):
    """Tokens by request; ``abort``: (request, after how many of its tokens)."""
    for request in requests:
        core.add(request)
    found = {}
    while core.has_work:
        for output in core.step():
            assert output.error is None
            found.setdefault(output.id, []).extend(output.token_ids)
        if abort is not None and len(found.get(abort[0], ())) >= abort[1]:
            core.abort(abort[0])
            abort = None
    return found


@pytest.fixture
def runners(tiny_models, support):
    """``runners(family) -> (runner with graphs, its device, torch's runner)``."""

    def make(family, dynamic_rope="session", **changes):
        graphs, path = support("graphs"), tiny_models(family, num_hidden_layers=1, **changes)  # the interpreter is slow
        opened, device = open_model(path, dynamic_rope=dynamic_rope), graphs.CpuDevice()
        runner = TensorRunner(opened.spec, opened.weights, OPTIONS, graphs=device, ops=graphs.interpreted_ops())
        plain = open_runner(path, backend="pytorch", options=OPTIONS, dynamic_rope=dynamic_rope)[0]
        return device.watch(runner), device, plain

    return make


def test_requests_turn_by_their_own_length_on_graphs_too(runners):
    """Prompts beyond and below 24 trained tokens, one of which crosses that length as it is answered."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    runner, device, plain = runners("llama", "request", max_position_embeddings=24, rope_parameters=rope)
    ids = np.random.default_rng(7).integers(3, 300, 40).tolist()
    asked = [EngineRequest(str(n), ids[:n], SamplingParams(NEW)) for n in (40, 22, 6)]
    runner.load_weights()
    runner.allocate_cache((40,))
    runner.warm_up(4, 128, 64)
    runner.release_cache()
    assert _serve(_core(runner), asked) == _serve(_core(plain), asked) and device.replays > 0


@pytest.mark.parametrize("family", ["llama", pytest.param("mistral", marks=pytest.mark.slow)])
def test_the_engine_gives_the_torch_runners_tokens_a_step_ahead(family, runners):
    runner, device, oracle = runners(family)
    expected = _serve(_core(oracle), _requests())
    core = _core(runner)
    ahead = 0
    assert core._lookahead, "an asynchronous runner is scheduled ahead"
    submit = runner.submit

    def counted(batch):
        nonlocal ahead
        ahead += int((batch.from_previous >= 0).any())
        return submit(batch)

    runner.submit = counted
    plain = [r for r in _requests() if r.id != "2"]  # penalties want each token before the next step
    assert _serve(core, plain) == {k: v for k, v in expected.items() if k != "2"}
    assert ahead > 0 and device.replays > 0
    assert _serve(core, _requests()) == expected  # now with the prefixes cached
    assert core.stats()["prefix_hit_tokens"] > 0


@pytest.mark.parametrize(
    "change",
    [
        {"max_prefill_token_num": 7, "prefix_caching": False},
        {"blocks": 6},
        pytest.param({"max_batch_size": 1}, marks=pytest.mark.slow),
        pytest.param({"lookahead": False}, marks=pytest.mark.slow),
    ],
    ids=["odd chunks, no prefix cache", "preemption", "one at a time", "not ahead"],
)
def test_tokens_do_not_depend_on_the_way(change, runners):
    runner, _, oracle = runners("llama")
    expected = _serve(_core(oracle), _requests())
    core = _core(runner, **change)
    assert _serve(core, _requests()) == expected
    assert "blocks" not in change or core.stats()["preemptions"] > 0


def test_a_request_that_ends_early_frees_its_blocks_and_leaves_the_others_alone(runners):
    runner, _, oracle = runners("llama")
    expected = _serve(_core(oracle), _requests())
    core = _core(runner)
    found = _serve(core, _requests(), abort=("3", 2))
    assert 2 <= len(found.pop("3")) < NEW
    assert found == {k: v for k, v in expected.items() if k != "3"}


def test_memory_that_runs_out_once_costs_no_request_its_tokens(runners):
    runner, device, oracle = runners("llama")
    core = _core(runner)
    first, third, second, _ = _requests()
    core.add(first)
    core.step()
    device.fail_step = True
    outputs = []
    core.add(second)
    while core.has_work:
        outputs += core.step()
    assert not [o for o in outputs if o.finish_reason == "error"], "the step was run again in parts"
    expected = _serve(_core(oracle), [third])
    assert _serve(core, [third]) == expected


@pytest.mark.parametrize("which", ["graphs", "torch"])
def test_a_cache_that_is_made_anew_takes_the_place_of_the_old_one(which, runners, monkeypatch):
    """The error of the steps that failed is still held then, and with it where it came from."""
    runner = dict(zip(("graphs", "device", "torch"), runners("llama"), strict=True))[which]
    core, allocate, alive = _core(runner), runner.allocate_cache, []
    old = weakref.ref(runner._cache)

    def broken(*args):
        raise RuntimeError("no such kernel")

    def counted(blocks):
        runner.release_cache()
        alive.append(old())
        allocate(blocks)

    monkeypatch.setattr(runner, "allocate_cache", counted)
    monkeypatch.setattr(type(runner._decoder), "run", broken)
    for i in range(BROKEN_AFTER):
        core.add(EngineRequest(str(i), [3, 4, 5], SamplingParams(2)))
    gc.collect()
    gc.disable()
    try:
        while core.has_work:
            core.step()
    finally:
        gc.enable()
    assert alive == [None]
