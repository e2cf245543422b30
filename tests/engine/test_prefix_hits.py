"""What prompts share is computed once, whoever's turn it is: fair shares cost no hits of the prefix cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from toolkit.engine.request import EngineRequest, SamplingParams, Whose

SIZE, PREFACE, OWN = 16, 92, 20  # tokens of a block; of what prompts begin with: five blocks and most of a sixth
COUNT = 48


def ids(name: str, count: int) -> list[int]:
    draw = random.Random(name)
    return [draw.randrange(61) for _ in range(count)]


def prompts(kind: str, users: int) -> Iterator[tuple[str, str, list[int]]]:
    """User, request and prompt. ``kind``: who begins alike."""
    for i in range(COUNT):
        user = i % users if kind == "mixed" else i * users // COUNT
        preface = {"own": f"user {user}", "common": "all", "mixed": f"preface {i % 3}"}[kind]
        yield f"user {user}", f"request {user}", [*ids(preface, PREFACE), i, *ids(f"own {i}", OWN)]


@pytest.mark.parametrize("budget", [24, 40, 100])
@pytest.mark.parametrize(("kind", "users", "prefaces"), [("own", 4, 4), ("common", 6, 1), ("mixed", 2, 3)])
@pytest.mark.parametrize("fair", [False, True])
def test_a_beginning_is_computed_once(fake: Any, kind: str, users: int, prefaces: int, budget: int, fair: bool) -> None:
    """``fair``: the requests are those of several users, else all one's, first come, first served."""
    core = fake.make_core(
        block_size=SIZE, session_len=256, blocks=800, max_batch_size=16, max_prefill_token_num=budget,
        asynchronous=True, cheap=True,
    )  # fmt: skip
    for number, (user, group, prompt) in enumerate(prompts(kind, users)):
        whose = Whose(user, group) if fair else Whose()
        core.add(EngineRequest(str(number), prompt, SamplingParams(4), whose=whose))
    fake.run(core)
    assert core.stats()["prefix_hit_tokens"] >= (COUNT - prefaces) * PREFACE


@pytest.mark.parametrize(
    "salts, hits", [(("", ""), 5), (("a", "a"), 5), (("a", "b"), 0), (("a", ""), 0), (("", "a"), 0)]
)
def test_requests_of_another_salt_find_nothing(fake: Any, salts: tuple[str, str], hits: int) -> None:
    """Nor do those without one; and what they compute stays their own while both run."""
    core = fake.make_core(block_size=SIZE, session_len=256, blocks=800, cheap=True)
    for number, salt in enumerate(salts):
        core.add(EngineRequest(str(number), ids("common", PREFACE), SamplingParams(4), salt=salt))
        fake.run(core)
    assert core.stats()["prefix_hit_tokens"] // SIZE == hits


def test_those_that_begin_alike_lie_side_by_side_in_a_step(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runners read what neighbours have in common once."""
    core = fake.make_core(block_size=SIZE, session_len=256, blocks=800, max_batch_size=16, cheap=True)
    submit, crowded = core.runner.submit, []

    def watched(batch: Any) -> Any:
        firsts = batch.block_tables[0][:, 0].tolist()
        if len(firsts) == 12 and len(batch.token_ids) == 12:
            crowded.append(firsts)
        return submit(batch)

    monkeypatch.setattr(core.runner, "submit", watched)
    for i in range(3):  # known before the others come
        core.add(EngineRequest(f"first {i}", ids(f"preface {i}", PREFACE), SamplingParams(1)))
    fake.run(core)
    for number, (_, _, prompt) in zip(range(12), prompts("mixed", 1), strict=False):
        core.add(EngineRequest(str(number), prompt, SamplingParams(8)))
    fake.run(core)
    assert crowded
    for firsts in crowded:
        assert len(set(firsts)) == 3 and firsts == [first for first in dict.fromkeys(firsts) for _ in range(4)]
