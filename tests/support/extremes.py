"""Sampling at the ends of what its types can hold: batches that hypothesis draws, and what a sampler owes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from toolkit.engine.constraints import host_sampler
from toolkit.runners.step import SamplingBatch

BIG, TINY = float(np.finfo(np.float32).max), 1e-45
ODD = [np.inf, -np.inf, np.nan]
LOGITS = [0.0, -0.0, 1.0, 1.0 + 1e-7, -1.0, TINY, -TINY, 88.0, -104.0, 1e30, -1e30, BIG, -BIG, *ODD]
TEMPERATURES = [0.0, TINY, 1e-38, 1e-20, 1e-7, 1e-5, 0.01, 0.7, 1.0, 2.0, 1e30, BIG, -1.0, *ODD]
TOP_K = [0, 1, 2, 5, 1 << 20, (1 << 31) - 1, -1, -(1 << 31)]
TOP_P = [0.0, TINY, 1e-7, 0.5, 1 - 6e-8, 1.0, 2.0, -1.0, *ODD]
MIN_P = [0.0, TINY, 0.1, 1.0, 2.0, -0.1, *ODD]
REPETITION = [1.0, TINY, 1e-38, 0.01, 1.3, 100.0, BIG, 0.0, -1.0, *ODD]
PENALTIES = [0.0, 1.5, -2.0, BIG, -BIG, *ODD]
COUNTS = [0, 1, 7, (1 << 31) - 1, -5]
POSITIONS = [0, 3, (1 << 63) - 1, -1]
SEEDS = [0, 1, (1 << 63) - 1, (1 << 64) - 1]
LOGPROBS = [-1, 0, 3, 1 << 20, (1 << 31) - 1, -7]


@st.composite
def cases(draw: Any, vocab: int, rows: int) -> tuple[NDArray[np.float32], SamplingBatch]:
    """(logits [rows, vocab], how to draw from them); about half of the numbers are plain ones."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))

    def column(values: list[Any], plain: Any, dtype: Any) -> NDArray[Any]:
        return np.array([draw(st.sampled_from(values)) if draw(st.booleans()) else plain for _ in range(rows)], dtype)

    def odd(size: int) -> NDArray[np.float32]:
        palette = draw(st.lists(st.sampled_from(LOGITS), min_size=1, max_size=4))
        values = np.array(palette, np.float32)[rng.integers(0, len(palette), size)]
        return np.where(rng.random(size) < draw(st.sampled_from([0.0, 0.02, 1.0])), values, rng.standard_normal(size))

    def ragged() -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        ids = [rng.choice(vocab, n, replace=False) for n in rng.choice([0, 1, 5, vocab], rows)]
        pointers = np.concatenate([[0], np.cumsum([len(i) for i in ids])])
        return pointers.astype(np.int32), np.concatenate(ids).astype(np.int32)

    logits = np.stack([odd(vocab) for _ in range(rows)]).astype(np.float32)
    history_ptr, history_ids = ragged()
    bias_ptr, bias_ids = ragged()
    words = -(-vocab // 32)
    masks = [np.full(words, -1), np.zeros(words), rng.integers(-(1 << 31), 1 << 31, words), np.eye(1, words)[0]]
    return logits, SamplingBatch(
        temperature=column(TEMPERATURES, 0.8, np.float32),
        top_k=column(TOP_K, 0, np.int32),
        top_p=column(TOP_P, 0.9, np.float32),
        min_p=column(MIN_P, 0.0, np.float32),
        repetition_penalty=column(REPETITION, 1.0, np.float32),
        presence_penalty=column(PENALTIES, 0.0, np.float32),
        frequency_penalty=column(PENALTIES, 0.0, np.float32),
        seed=column(SEEDS, 7, np.uint64),
        position=column(POSITIONS, 0, np.int64),
        history_ptr=history_ptr,
        history_ids=history_ids,
        history_count=rng.choice(COUNTS, len(history_ids)).astype(np.int32),
        bias_ptr=bias_ptr,
        bias_ids=bias_ids,
        bias_values=odd(len(bias_ids)).astype(np.float32),
        logprobs=column(LOGPROBS, -1, np.int32),
        grammar=np.stack([masks[draw(st.sampled_from([0, 0, 1, 2, 3]))] for _ in range(rows)]).astype(np.int32)
        if draw(st.booleans())
        else None,
    )


def check(
    logits: NDArray[np.float32], s: SamplingBatch, tokens: NDArray[Any], bad: set[int], *, saturates: bool = False
) -> None:
    """Every row has a token that its constraints allow, or is bad, and is bad only where there is a reason.

    ``saturates``: logits by their temperature stop at the largest float32, so that the best of several may be any.
    """
    assert len(tokens) == len(logits) and ((tokens >= 0) & (tokens < logits.shape[1])).all()
    for row, token in enumerate(tokens.tolist()):
        with np.errstate(all="ignore"):
            x = host_sampler.adjust(logits[row], s, row)
        penalties = s.presence_penalty[row], s.frequency_penalty[row], s.repetition_penalty[row]
        if np.isfinite(penalties).all():  # else implementations may differ in where 0 times infinity comes in
            assert (row in bad) == (not host_sampler.drawable(x, s, row)), f"row {row}: {'bad' if row in bad else x}"
        if row in bad or not host_sampler.drawable(x, s, row):
            continue
        assert x[token] > -np.inf, f"row {row}: token {token} is banned"
        ordered = s.temperature[row] <= 2 and not saturates  # beyond, all are as likely in float32
        if s.temperature[row] == 0 or (s.top_k[row] == 1 and ordered):
            assert token == int(np.argmax(x)), f"row {row}: expected {int(np.argmax(x))}, found {token}"
        elif not saturates or (s.temperature[row] >= 1e-5 and x.max() < 1e30):
            assert float(x[token]) - float(x.max()) >= -746 * float(s.temperature[row]), (
                f"row {row}: drawn against odds"
            )
        if s.top_k[row] and ordered:
            assert (x > x[token]).sum() < s.top_k[row], f"row {row}: {token} is not among the {s.top_k[row]} best"
        with np.errstate(all="ignore"):
            assert 0 <= host_sampler.draw(x, s, row) < len(x)
