"""Sampling against a plain walk through the rules, one row and one token at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.kernels import registry
from toolkit.runners.step import SamplingBatch, uniform
from toolkit.runners.tensor.devices.device import Cpu
from toolkit.runners.tensor.ops import choose_ops
from toolkit.runners.tensor.step.sampler import sample_rows

OPS, CPU = choose_ops(torch.device("cpu"), torch.float32), Cpu()
VOCAB = 70


def _walk(logits: np.ndarray, s: SamplingBatch, row: int) -> tuple[int, np.ndarray]:
    """(token, log-probabilities) of one row."""
    values = [float(x) for x in logits]
    for j in range(s.history_ptr[row], s.history_ptr[row + 1]):
        token, count = int(s.history_ids[j]), int(s.history_count[j])
        p = float(s.repetition_penalty[row])
        values[token] = values[token] / p if values[token] > 0 else values[token] * p
        values[token] -= float(s.frequency_penalty[row]) * count + float(s.presence_penalty[row]) * (count > 0)
    for j in range(s.bias_ptr[row], s.bias_ptr[row + 1]):
        values[int(s.bias_ids[j])] += float(s.bias_values[j])
    if s.grammar is not None:
        for token in range(VOCAB):
            if not (int(s.grammar[row, token >> 5]) >> (token & 31)) & 1:
                values[token] = -math.inf
    best = max(values)
    total = best + math.log(sum(math.exp(v - best) for v in values))
    logprobs = np.asarray([v - total for v in values])
    if s.temperature[row] == 0:
        return values.index(best), logprobs
    powers = [math.exp((v - best) / float(s.temperature[row])) for v in values]
    mass = sum(powers)
    chances = [x / mass for x in powers]
    order = sorted(range(VOCAB), key=lambda t: (-chances[t], t))
    if s.top_k[row] > 0:
        order = order[: s.top_k[row]]
    kept, reached, goal = [], 0.0, float(s.top_p[row]) * sum(chances[t] for t in order)
    for token in order:
        if kept and reached >= goal and s.top_p[row] < 1:
            break
        kept.append(token)
        reached += chances[token]
    kept = [t for t in kept if chances[t] >= float(s.min_p[row]) * chances[order[0]] or t == order[0]]
    goal, running = uniform(int(s.seed[row]), int(s.position[row])) * sum(chances[t] for t in kept), 0.0
    for token in sorted(kept):
        running += chances[token]
        if running > goal:
            return token, logprobs
    return max(kept), logprobs


def _random_batch(rng: np.random.Generator, rows: int, steps) -> SamplingBatch:
    """Every rule in use, each in some rows only."""

    def some(values: np.ndarray, neutral: float) -> np.ndarray:
        return np.where(rng.random(rows) < 0.5, values, neutral)

    counts = rng.integers(0, 6, rows)
    pointers = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    ids = [np.sort(rng.choice(VOCAB, n, replace=False)) for n in counts]
    grammar = rng.integers(-(2**31), 2**31, (rows, 3), dtype=np.int64).astype(np.int32)
    grammar[rng.random(rows) < 0.5] = -1
    biases = rng.choice([-100.0, -2.5, 1.5, -math.inf], pointers[-1])
    return steps.sampling(
        rows,
        temperature=some(rng.uniform(0.3, 2, rows), 0.0),
        top_k=some(rng.integers(1, 30, rows), 0).astype(np.int32),
        top_p=some(rng.uniform(0.1, 1, rows), 1.0),
        min_p=some(rng.uniform(0, 0.3, rows), 0.0),
        repetition_penalty=some(rng.uniform(0.5, 2, rows), 1.0),
        presence_penalty=some(rng.uniform(-2, 2, rows), 0.0),
        frequency_penalty=some(rng.uniform(-2, 2, rows), 0.0),
        seed=rng.integers(0, 2**63, rows).astype(np.uint64),
        position=rng.integers(0, 1000, rows),
        logprobs=rng.integers(-1, 5, rows).astype(np.int32),
        history_ptr=pointers,
        history_ids=np.concatenate([np.zeros(0, np.int64), *ids]).astype(np.int32),
        history_count=rng.integers(0, 4, pointers[-1]).astype(np.int32),
        bias_ptr=pointers,
        bias_ids=np.concatenate([np.zeros(0, np.int64), *ids]).astype(np.int32),
        bias_values=biases.astype(np.float32),
        grammar=grammar,
    )


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 9))
def test_rows_follow_the_rules(seed, rows, steps):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((rows, VOCAB)) * 3).astype(np.float32)
    if seed % 3 == 0:
        logits = np.round(logits)  # ties
    batch = _random_batch(rng, rows, steps)
    result = sample_rows(torch.from_numpy(logits.copy()), batch, OPS, CPU)
    for row in range(rows):
        token, logprobs = _walk(logits[row], batch, row)
        assert int(result.tokens[row]) == token
        asked = int(batch.logprobs[row])
        if asked >= 0:
            assert result.logprob is not None
            np.testing.assert_allclose(result.logprob[row], logprobs[token], atol=1e-4)
        if asked > 0:
            assert result.top_ids is not None and result.top_logprobs is not None
            np.testing.assert_allclose(result.top_logprobs[row, :asked], np.sort(logprobs)[::-1][:asked], atol=1e-4)
            np.testing.assert_allclose(
                logprobs[result.top_ids[row, :asked]], result.top_logprobs[row, :asked], atol=1e-4
            )
            assert (result.top_ids[row, asked:] == -1).all()


@pytest.mark.parametrize("family", ["reference", "torch"])
def test_a_row_does_not_depend_on_its_neighbours(family):
    run = registry.load()["sample"].implementations[family].run
    g = torch.Generator().manual_seed(1)
    n = 40
    logits = torch.randn(n, 500, generator=g) * 3
    columns = (
        torch.rand(n, generator=g).round(decimals=1),
        torch.randint(0, 40, (n,), generator=g),
        torch.rand(n, generator=g) + 0.3,
        torch.rand(n, generator=g) / 10,
        torch.rand(n, generator=g),
    )
    whole = run(logits, *columns)
    for i in range(n):
        assert run(logits[i : i + 1], *(c[i : i + 1] for c in columns))[0] == whole[i]


@pytest.mark.parametrize("family", ["reference", "torch"])
def test_draws_have_the_frequencies_of_the_softmax(family):
    run = registry.load()["sample"].implementations[family].run
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5]])
    n = 4000
    u = torch.tensor([uniform(7, i) for i in range(n)])
    row = (torch.full((n,), 1.0), torch.zeros(n, dtype=torch.int64), torch.ones(n), torch.zeros(n), u)
    counts = torch.bincount(run(logits.expand(n, -1).contiguous(), *row), minlength=5).double() / n
    torch.testing.assert_close(counts, logits[0].softmax(-1).double(), atol=0.03, rtol=0)
