"""The arithmetic against cases worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.profile.metrics import RequestRecord, completed, generation_row, throughput_summary

# Starts at 10 s: first token at 10.5, two more at 10.7, the fourth at 11.
FIRST = RequestRecord(6, 10.0, [(10.5, 1), (10.7, 2), (11.0, 1)])
# Starts at 10 s: first token at 12, second and last at 14.
SECOND = RequestRecord(4, 10.0, [(12.0, 1), (14.0, 1)])


def test_one_request() -> None:
    assert (FIRST.output_tokens, FIRST.end) == (4, 11.0)
    assert FIRST.ttft == pytest.approx(0.5) and FIRST.e2e == pytest.approx(1.0)
    assert FIRST.tpot == pytest.approx(0.5 / 3)
    assert FIRST.gaps() == pytest.approx([0.1, 0.1, 0.3])


def test_tokens_that_come_with_the_first_waited_for_nothing() -> None:
    record = RequestRecord(1, 0.0, [(1.0, 3), (2.0, 1)])
    assert record.gaps() == [0.0, 0.0, 1.0] and record.tpot == pytest.approx(1 / 3)


def test_a_single_token_has_no_tpot() -> None:
    record = RequestRecord(1, 0.0, [(1.0, 1)])
    assert record.tpot is None and record.gaps() == []


def test_throughput_summary() -> None:
    failed = RequestRecord(100, 10.0, [(11.0, 5)], error="out of luck")
    empty = RequestRecord(100, 10.0)
    assert completed([FIRST, failed, SECOND, empty]) == [FIRST, SECOND]
    figures = throughput_summary([FIRST, failed, SECOND, empty], 4.0)
    expected = {
        "completed": 2,
        "total_input_tokens": 10,
        "total_output_tokens": 6,
        "duration": 4.0,
        "request_throughput": 0.5,
        "input_throughput": 2.5,
        "output_throughput": 1.5,
        "mean_e2e_latency_ms": 2500.0,
        "mean_ttft_ms": 1250.0,
        "mean_tpot_ms": (500 / 3 + 2000) / 2,
        "mean_itl_ms": (100 + 100 + 300 + 2000) / 4,
        "median_e2e_latency_ms": 2500.0,
        "median_ttft_ms": 1250.0,
        "median_tpot_ms": (500 / 3 + 2000) / 2,
        "median_itl_ms": 200.0,
        "p99_e2e_latency_ms": 1000 + 0.99 * 3000,
        "p99_ttft_ms": 500 + 0.99 * 1500,
        "p99_tpot_ms": 500 / 3 + 0.99 * (2000 - 500 / 3),
        "p99_itl_ms": 300 + 0.97 * 1700,
    }
    assert list(figures) == list(expected)
    assert figures == pytest.approx(expected)


def test_nothing_completed_gives_zeros() -> None:
    figures = throughput_summary([], 1.0)
    assert set(figures.values()) == {0, 1.0}


def test_generation_row() -> None:
    row = generation_row([[FIRST, SECOND]], 5, 3, 123.5)
    # The last first token comes at 12 (2 s of prefill), the last token at 14 (2 s of decode); 4 of 6 are no firsts.
    assert row == {
        "concurrency": 2,
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "prefill_throughput": pytest.approx(10 / 2),
        "decode_throughput": pytest.approx(4 / 2),
        "output_throughput": pytest.approx(6 / 4),
        "first_token_latency_ms": pytest.approx({"min": 500.0, "max": 2000.0, "ave": 1250.0}),
        "token_latency_ms": pytest.approx({"p50": 200.0, "p75": 725.0, "p95": 1745.0, "p99": 1949.0}),
        "peak_memory_mib": 123.5,
    }
    assert list(row) == [
        "concurrency",
        "prompt_tokens",
        "completion_tokens",
        "prefill_throughput",
        "decode_throughput",
        "output_throughput",
        "first_token_latency_ms",
        "token_latency_ms",
        "peak_memory_mib",
    ]


def test_tokens_that_a_slow_client_gets_at_once_have_a_decode_all_the_same() -> None:
    quick = [RequestRecord(4, 10.0, [(10.5, 5)], drawn=[10.1, 10.2, 10.3, 10.4, 10.5]) for _ in range(2)]
    row = generation_row([quick], 4, 5, 0.0)
    assert row["prefill_throughput"] == pytest.approx(8 / 0.1)
    assert row["decode_throughput"] == pytest.approx(8 / 0.4)
    assert row["token_latency_ms"]["p50"] == pytest.approx(100)
    assert row["first_token_latency_ms"]["max"] == pytest.approx(100)


def test_rounds_are_summed() -> None:
    one, two = generation_row([[SECOND]], 4, 2, 0.0), generation_row([[SECOND], [SECOND]], 4, 2, 0.0)
    assert one == two  # the same speed twice is the same speed; concurrency is a round's


def test_a_single_token_has_no_decode() -> None:
    row = generation_row([[RequestRecord(4, 0.0, [(1.0, 1)])]], 4, 1, 0.0)
    assert row["decode_throughput"] == 0.0 and row["output_throughput"] == 1.0


@given(st.lists(st.tuples(st.floats(0.001, 10), st.integers(1, 5)), min_size=1, max_size=30), st.floats(0, 1e4))
def test_gaps_add_up(steps: list[tuple[float, int]], start: float) -> None:
    arrivals, now = [], start
    for gap, count in steps:
        now += gap
        arrivals.append((now, count))
    record = RequestRecord(1, start, arrivals)
    assert len(record.gaps()) == record.output_tokens - 1
    assert record.ttft + sum(record.gaps()) == pytest.approx(record.e2e)
    assert record.tpot is None or record.tpot * (record.output_tokens - 1) == pytest.approx(record.e2e - record.ttft)
