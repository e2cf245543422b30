"""What ``cache_report`` compares a prompt with."""

from __future__ import annotations

from toolkit.serve.generation.cache_report import MOST, Prompts


def test_a_key_is_told_of_its_own_prompts_alone() -> None:
    prompts = Prompts()
    assert prompts.seen("a", [1, 2, 3], compare=True) == 0
    assert prompts.seen("b", [1, 2, 3], compare=True) == 0
    assert prompts.seen("a", [1, 2, 4], compare=False) == 0
    assert prompts.seen("a", [1, 2, 4, 5], compare=True) == 3


def test_a_salt_is_told_of_prompts_with_it_alone() -> None:
    prompts = Prompts()
    prompts.seen("a", [1, 2, 3], compare=False, salt="x")
    assert prompts.seen("a", [1, 2, 4], compare=True) == prompts.seen("a", [1, 2, 4], compare=True, salt="y") == 0
    assert prompts.seen("a", [1, 2, 4], compare=True, salt="x") == 2


def test_a_greedy_key_forgets_its_own() -> None:
    prompts = Prompts()
    prompts.seen("a", [1, 2, 3], compare=False)
    for i in range(3 * MOST):
        prompts.seen("b", [9, i], compare=False)
    assert prompts.seen("a", [1, 2, 3, 4], compare=True) == 3
    assert prompts.seen("b", [9, 0], compare=True) == 1 and prompts.seen("b", [9, 3 * MOST - 1], compare=True) == 2
