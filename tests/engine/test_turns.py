"""Whose turn it is: nobody waits for ever, one user alone has the whole machine, and what is given was there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.engine import feeding, scheduler, turns
from toolkit.engine.core import EngineCore
from toolkit.engine.request import EngineRequest, SamplingParams, Whose
from toolkit.engine.sequence import Sequence
from toolkit.engine.turns import LEAST_TOKENS, split

RELAXED = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
PATIENCE = 12  # in place of turns.PATIENCE, so that a test sees the end of it


@pytest.fixture
def impatient(monkeypatch: Any) -> None:
    for module in (turns, feeding):
        monkeypatch.setattr(module, "PATIENCE", PATIENCE)


def ask(name: str, user: str = "", prompt: int = 5, new: int = 3, *, priority: int = 0, **whose: Any) -> EngineRequest:
    draw = random.Random(name)
    ids = [draw.randrange(61) if i < 4 else i % 61 for i in range(prompt)]
    return EngineRequest(name, ids, SamplingParams(new), priority=priority, whose=Whose(user, **whose))


def crowd(core: EngineCore, user: str, count: int, **more: Any) -> None:
    for i in range(count):
        core.add(ask(f"{user}-{i}", user, group=f"{user}'s", **more))


def rows(core: EngineCore) -> dict[str, int]:
    """Places by user."""
    held = turns.Held(core.scheduler.running).rows
    return {user: count for user, count in held.items() if count}


def test_a_chat_gets_a_place_at_once_beside_a_request_that_has_all(fake: Any) -> None:
    core = fake.make_core(max_batch_size=8, blocks=400)
    crowd(core, "greedy", 40, new=100)
    for _ in range(6):
        core.step()
    assert rows(core) == {"greedy": 8}  # alone: the whole machine
    core.add(ask("chat", "modest"))
    first = next(i for i in range(9) if any(o.id == "chat" and o.token_ids for o in core.step()))
    assert first <= 1 and rows(core) == {"greedy": 7, "modest": 1}
    outputs = fake.run(core)
    assert len(outputs) == 41 and core.blocks.usage() == 0
    assert core.scheduler.preemptions == 1  # one place was given back, once


def test_a_chat_of_the_same_user_gets_one_too(fake: Any) -> None:
    core = fake.make_core(max_batch_size=8, blocks=400)
    crowd(core, "key", 40, new=100)
    for _ in range(6):
        core.step()
    core.add(ask("chat", "key"))
    assert next(i for i in range(9) if any(o.id == "chat" and o.token_ids for o in core.step())) <= 1


def test_a_prompt_is_computed_beside_many_long_ones(fake: Any) -> None:
    """40 prompts of 150 tokens, 16 tokens a step: a short one of another user has its tokens in the next step."""
    core = fake.make_core(max_batch_size=8, blocks=400, max_prefill_token_num=16)
    for i in range(40):
        core.add(ask(f"text {i}", "greedy", 150, 1, group="embeddings"))
    for _ in range(20):
        core.step()
    core.add(ask("chat", "modest", 6))
    assert next(i for i in range(9) if any(o.id == "chat" and o.token_ids for o in core.step())) <= 1


def test_a_short_prompt_goes_before_the_first_turns_of_long_ones(fake: Any) -> None:
    """Eight users have just come with long prompts, 8 tokens a step: a ninth does not wait for 64 of each of them."""
    core = fake.make_core(max_batch_size=32, blocks=400, max_prefill_token_num=8)
    for user in range(8):
        core.add(ask(f"text {user}", f"greedy {user}", 150, 1))
    core.step()
    core.add(ask("chat", "modest", 6))
    assert next(i for i in range(99) if any(o.id == "chat" and o.token_ids for o in core.step())) <= 1


@pytest.mark.parametrize("length", [40, 100])  # with its first turn alone, or several
def test_newcomers_without_end_let_a_long_prompt_through(fake: Any, length: int) -> None:
    core = fake.make_core(max_batch_size=8, blocks=400, max_prefill_token_num=8)
    core.add(ask("text", "modest", 150, 1))
    for number in range(400):
        for side in "ab":
            core.add(ask(f"chat {number}{side}", f"user {number}{side}", length, 1))
        if any(o.id == "text" and o.token_ids for o in core.step()):
            return
    raise AssertionError("it was never answered")


def test_nobody_waits_long_for_a_prompt_that_begins_like_ones_own_and_has_no_turn(fake: Any) -> None:
    """A greedy user begins a prompt as another will, and lets it stand behind its own others."""
    core = fake.make_core(block_size=16, max_batch_size=8, blocks=400, session_len=400, max_prefill_token_num=16)
    known = list(range(60)) * 4
    core.add(EngineRequest("first", [1] * 380, SamplingParams(1), whose=Whose("greedy", "texts")))
    core.add(EngineRequest("like", known, SamplingParams(1), whose=Whose("greedy", "texts")))
    for i in range(6):
        core.add(EngineRequest(f"text {i}", [i + 2] * 200, SamplingParams(1), whose=Whose("greedy", "texts")))
    core.step()
    core.add(EngineRequest("chat", known[:40], SamplingParams(1), whose=Whose("modest", "chat")))
    first = next(i for i in range(400) if any(o.id == "chat" and o.token_ids for o in core.step()))
    assert first <= scheduler.HELD + 6


def test_places_are_shared_by_weight(fake: Any) -> None:
    core = fake.make_core(max_batch_size=12, blocks=400)
    for user, weight in (("two", 2.0), ("one", 1.0)):
        crowd(core, user, 60, new=9, weight=weight)
    seen = []
    for _ in range(40):
        core.step()
        seen.append(rows(core))
    assert seen[-1] == {"two": 8, "one": 4}


def test_a_share_is_the_most_that_a_user_may_have(fake: Any) -> None:
    core = fake.make_core(max_batch_size=8, blocks=400)
    crowd(core, "capped", 20, share=0.25)
    most = 0
    while core.has_work:
        core.step()
        most = max(most, len(core.scheduler.running))
    assert most == 2


def test_eight_crowds_and_a_ninth_user_have_equal_parts(fake: Any) -> None:
    core = fake.make_core(max_batch_size=16, blocks=800)
    for i in range(8):
        crowd(core, f"user {i}", 20, new=30)
        core.step()
    for _ in range(60):
        core.step()
    held = rows(core)
    assert sum(held.values()) == 16 and max(held.values()) - min(held.values()) <= 1
    core.add(ask("chat", "modest"))
    assert next(i for i in range(9) if any(o.id == "chat" and o.token_ids for o in core.step())) <= 1


# -- one user alone ---------------------------------------------------------------------------------


@RELAXED
@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 12), st.integers(1, 6), st.integers(0, 10)), max_size=14),
    st.integers(1, 5),
    st.booleans(),
)
def test_one_user_alone_starts_by_priority_then_by_arrival(fake: Any, asked: list[Any], batch: int, one: bool) -> None:
    """As before there were users: each that starts is the first in turn of those that wait, no place is left empty, and
    nobody gives one back. ``one``: all are choices of one request."""
    core = fake.make_core(max_batch_size=batch, blocks=400, prefix_caching=False)
    scheduled, begun = core.scheduler, 0
    arrivals, now = sorted(enumerate(asked), key=lambda a: a[1][3]), 0
    while arrivals or core.has_work:
        while arrivals and arrivals[0][1][3] <= now:
            number, (priority, prompt, new, _) = arrivals.pop(0)
            core.add(ask(str(number), "me", prompt, new, priority=priority, group="request" if one else ""))
        before = list(scheduled.waiting)
        outputs = core.step()
        started = [seq for seq in before if seq not in scheduled.waiting]
        assert all(seq.turn < other.turn for seq in started for other in scheduled.waiting)
        begun += len(started)
        ended = sum(o.finish_reason is not None for o in outputs)
        assert not scheduled.waiting or len(scheduled.running) + ended == batch
        now += 1
    assert not scheduled.preemptions and begun == len(asked)


# -- nobody waits for ever --------------------------------------------------------------------------

USERS = st.tuples(  # user, priority, weight, group
    st.sampled_from(["a", "b", "c"]), st.integers(-100, 100), st.sampled_from([0.01, 1.0, 100.0]), st.integers(0, 2)
)


@st.composite
def floods(draw: Any) -> dict[str, Any]:
    """What keeps coming: a few kinds of requests, and how many of them wait at any time."""
    return {
        "kinds": draw(st.lists(st.tuples(USERS, st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=5)),
        "waiting": draw(st.integers(1, 12)),
        "batch": draw(st.integers(1, 5)),
        "budget": draw(st.sampled_from([1, 3, 8, 40])),
        "blocks": draw(st.integers(16, 60)),
        "user": draw(st.sampled_from(["a", "z"])),
        "priority": draw(st.sampled_from([0, 100, 1 << 31])),
        "asynchronous": draw(st.booleans()),
    }


GIVEN_AWAY = {  # the last one's place is asked for by others' requests for as long as it has one
    "kinds": [
        (("b", -63, 0.01, 1), 26, 11), (("b", 100, 100.0, 2), 15, 3), (("c", 91, 100.0, 2), 29, 11),
        (("a", 54, 1.0, 1), 11, 4), (("a", 17, 100.0, 1), 26, 6),
    ],
    "waiting": 3, "batch": 3, "budget": 1, "blocks": 48, "user": "a", "priority": 1 << 31, "asynchronous": True,
}  # fmt: skip


def test_a_request_of_little_weight_keeps_its_place_at_last(fake: Any, impatient: None) -> None:
    answered(fake, GIVEN_AWAY, 6000)


@pytest.mark.slow
@settings(RELAXED, max_examples=25)
@given(floods())
def test_no_schedule_starves_anybody(fake: Any, impatient: None, f: dict[str, Any]) -> None:
    answered(fake, f, 60_000)


def answered(fake: Any, f: dict[str, Any], steps: int) -> None:
    """One request of the least weight and the last priority comes among others that never cease: it is answered."""
    core = fake.make_core(
        block_size=4, session_len=48, max_batch_size=f["batch"], max_prefill_token_num=f["budget"], blocks=f["blocks"],
        asynchronous=f["asynchronous"], cheap=True,
    )  # fmt: skip
    kinds, numbers = cycle(f["kinds"]), iter(range(1 << 30))

    def flood() -> None:
        while len(core.scheduler.waiting) < f["waiting"]:
            (user, priority, weight, group), prompt, new = next(kinds)
            name = f"flood {next(numbers)}"
            core.add(ask(name, user, prompt, new, priority=priority, weight=weight, group=f"{user} {group}"))

    for _ in range(5):
        flood()
        core.step()
    priority = min(f["priority"], (1 << 31) - 1)
    core.add(ask("last", f["user"], 20, 8, priority=priority, weight=0.01, group="last"))
    for _ in range(steps):
        flood()
        if any(o.id == "last" and o.finish_reason for o in core.step()):
            break
    else:
        raise AssertionError("it was never answered")
    core.check_integrity()


def cycle(kinds: list[Any]) -> Iterator[Any]:
    while True:
        yield from kinds


# -- tokens of a step -------------------------------------------------------------------------------

NEEDS = st.lists(st.tuples(st.integers(1, 2000), st.sampled_from([0.25, 1.0, 1.0, 1.0, 4.0])), min_size=1, max_size=20)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz")), max_size=6), st.sampled_from(["a", "b"]))
def test_where_places_are_even_nobody_is_to_give_one(running: list[tuple[str, str]], user: str) -> None:
    seqs = [Sequence(ask(f"{i}", u, group=g), i, 10, 0, None) for i, (u, g) in enumerate([*running, (user, "w")])]
    waiting = seqs.pop()
    waits = turns.Waiting()
    waits.add(waiting)
    held = turns.Held(seqs)
    if held.even(waits.users):
        assert held.too_many(seqs, waiting, own=False) is None
    if len(set(running)) == len(running) and (held.rows.keys() <= {user} or max(held.rows.values()) == 1):
        assert held.even(waits.users)


@given(st.integers(1, 3000), NEEDS)
def test_tokens_are_split_evenly_and_none_is_lost(budget: int, needs: list[tuple[int, float]]) -> None:
    shares = split(budget, needs)
    fed = needs[: max(1, budget // LEAST_TOKENS)]
    assert all(0 <= share <= need for share, (need, _) in zip(shares, needs, strict=True))
    assert sum(shares) == min(budget, sum(need for need, _ in needs)) and shares[0]
    for share, (need, cost) in zip(shares, fed, strict=False):
        if share < need:  # whoever could use more has no less than others, by weight, but for what rounding leaves
            assert all(
                (share + 1) * cost >= (other - len(needs)) * c for other, (_, c) in zip(shares, fed, strict=False)
            )
