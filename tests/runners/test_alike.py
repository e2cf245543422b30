"""``batch_invariant``: what the runner with graphs (on a CPU, see ``tests/support/graphs.py``) computes for a request
depends on nothing but the request."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.engine.core import EngineCore
from toolkit.engine.options import EngineOptions
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.errors import UsageError
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_model, open_runner
from toolkit.runners.tensor.runner import TensorRunner
from toolkit.runners.tensor.step.sampler import log_sum

OPTIONS = RunnerOptions(device="cpu", dtype="float32", block_size=16, batch_invariant=True)
NEW = 4


def _requests():
    rng = np.random.default_rng(5)
    shared = rng.integers(3, 300, 40).tolist()
    prompts = [shared[:31], rng.integers(3, 300, 50).tolist(), rng.integers(3, 300, 5).tolist(), shared]
    settings = [{}, {"temperature": 0.9, "top_k": 40, "seed": 11}, {"repetition_penalty": 1.2}, {}]
    return [
        EngineRequest(str(i), p, SamplingParams(NEW, logprobs=3, **s))
        for i, (p, s) in enumerate(zip(prompts, settings, strict=True))
    ]


def _serve(runner, requests, **changes):
    """Tokens and log-probabilities by request."""
    chosen = EngineOptions(
        **({"session_len": 128, "max_batch_size": 8, "max_prefill_token_num": 128} | changes),
        num_blocks=(40,) * len(runner.spec.cache_groups),
        check=True,
    )
    runner.load_weights()
    runner.release_cache()
    runner.allocate_cache(chosen.num_blocks)
    core, found = EngineCore(runner, chosen, None), {}
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in core.step():
            assert output.error is None
            found.setdefault(output.id, []).extend(zip(output.token_ids, output.logprobs, strict=True))
    return found


@pytest.fixture
def runner(tiny_models, support, monkeypatch):
    support("interpreted").exact_products(monkeypatch.setattr)

    def make(family, **changes):
        changes |= {"mlp_only_layers": []} if family == "qwen3_moe" else {}
        graphs, path = support("graphs"), tiny_models(family, num_hidden_layers=1, **changes)
        opened, device = open_model(path), graphs.CpuDevice()
        ops = graphs.interpreted_ops("linear", alike=True)
        return device.watch(TensorRunner(opened.spec, opened.weights, OPTIONS, graphs=device, ops=ops)), device

    return make


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_a_request_is_the_same_in_any_company(family, runner):
    made, device = runner(family)
    assert made.batch_invariant
    alone = {}
    for request in _requests():
        alone |= _serve(made, [request])
    assert _serve(made, _requests()) == alone and device.replays > 0
    assert _serve(made, _requests()[::-1], max_prefill_token_num=7, prefix_caching=False) == alone


def test_blocks_that_are_kept_are_told_from_those_of_others(runner):
    """``layout`` is part of the name that a kept block has."""
    made, _ = runner("llama")
    mine, made.batch_invariant = made.layout, False
    assert made.layout != mine


def test_log_sums_are_right_and_go_by_the_row_alone():
    logits = 4 * torch.randn(9, 50_000, generator=torch.Generator().manual_seed(0))
    found = log_sum(logits)
    torch.testing.assert_close(found, logits.logsumexp(-1), atol=1e-5, rtol=1e-6)
    assert all(torch.equal(log_sum(row[None]), found[i : i + 1]) for i, row in enumerate(logits))
    assert torch.equal(log_sum(torch.zeros(2, 1)), torch.zeros(2))
    banned = torch.full((1, 300), -torch.inf)
    banned[0, 7] = 2.0
    assert log_sum(banned).tolist() == [2.0]


class Sums(TorchDispatchMode):
    """Notes (sums, numbers of each) of every sum over the last of three dimensions, of one row."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.sum.dim_IntList:
            self.found.append(tuple(args[0].shape[1:]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("vocab", [40, 300, 1999, 10_000, 32_000, 128_256, 151_936])
def test_a_gpu_has_one_order_of_a_log_sum_for_any_rows(vocab):
    """torch gives some sums more threads than a warp has where there are fewer than 16, whoever's they are."""
    with Sums() as sums:
        log_sum(torch.zeros(1, vocab))
    assert sums.found and all(numbers <= 32 or count >= 16 for count, numbers in sums.found)


@pytest.mark.parametrize("family", ["deepseek_v2", "mamba2", "lfm2"])
def test_models_that_it_is_not_for_say_so(family, tiny_models):
    with pytest.raises(UsageError, match=r"^batch_invariant: this model has (latent|recurrent)"):
        open_runner(tiny_models(family), backend="pytorch", options=OPTIONS)


def test_a_cpu_has_it_with_turbomind_alone(tiny_models):
    path = tiny_models("llama")
    with pytest.raises(UsageError, match=r"^batch_invariant: .* give --backend turbomind"):
        open_runner(path, backend="pytorch", options=OPTIONS)
    assert open_runner(path, backend="turbomind", options=replace(OPTIONS, dtype="auto"))[0].batch_invariant
