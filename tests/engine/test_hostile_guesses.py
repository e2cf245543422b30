"""What one user's guesses come to slows nobody else down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from toolkit.configs.speculative import Speculation
from toolkit.engine.drafts import speculator
from toolkit.engine.drafts.cost import StepCost
from toolkit.engine.drafts.lookup import Lookup
from toolkit.engine.drafts.odds import ANY, USERS, Users
from toolkit.engine.request import EngineRequest, SamplingParams, Whose
from toolkit.engine.sequence import Sequence

VOCAB, NEW = 64, 40


class Fixed(StepCost):
    """A step takes 1 s, and 0.1 s more with each row."""

    def __init__(self) -> None:
        super().__init__()
        self.known = True

    def note(self, rows: int, seconds: float) -> None:
        """No clock."""

    def upto(self, rows: int) -> list[float]:
        return [0.9 + 0.1 * n for n in range(rows + 1)]


def request(name: str, user: str, prediction: Any = ()) -> EngineRequest:
    return EngineRequest(name, [3, 1, 4], SamplingParams(NEW), whose=Whose(user=user), prediction=list(prediction))


def steps(core: Any, asked: EngineRequest) -> tuple[list[int], int]:
    """(the answer, how many steps it took)."""
    core.add(asked)
    tokens, count = [], 0
    while core.has_work:
        tokens += [token for output in core.step() for token in output.token_ids]
        count += 1
    return tokens, count


def test_wrong_predictions_slow_down_their_own_client_alone(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculator, "TRIAL_REST", 1e12)  # no step by the clock

    def core() -> Any:
        found = fake.make_core((None,), VOCAB, session_len=200, speculation=Speculation(most=8, shared="off"))
        found.speculator.cost = Fixed()
        return found

    plain, _ = steps(core(), request("plain", "a"))
    edited = [token if i % 9 else (token + 1) % VOCAB for i, token in enumerate(plain)]
    _, alone = steps(core(), request("good", "good", edited))
    attacked = core()
    wrong = [(token + 7) % VOCAB for token in plain]
    _, first = steps(attacked, request("bad", "bad", wrong))
    for i in range(30):
        steps(attacked, request(str(i), "bad", wrong))
    tokens, beside = steps(attacked, request("good", "good", edited))
    assert tokens == plain and beside == alone < NEW // 2
    guessed = attacked.speculator.total.tokens
    steps(attacked, request("again", "bad", wrong))
    assert attacked.speculator.total.tokens == guessed, "of whom guesses were never right none are verified"
    assert first >= NEW


def test_answers_that_lie_are_followed_no_more() -> None:
    """Where all share their answers, and one's answers go on otherwise than others' texts do."""
    rng = np.random.default_rng(1)
    phrase = list(range(40, 52))
    lines = [[i, *phrase] for i in range(1, 30)]

    def right(lies: bool) -> int:
        lookup = Lookup("all")
        for i in range(1, 30) if lies else ():
            tokens = [39, i, *phrase[:2], *rng.integers(52, VOCAB, 9).tolist()]
            bad = Sequence(request("bad", "bad"), order=0, max_len=999, rope_set=0, keys_root=None)
            for token in tokens:
                bad.expect()
                bad.arrive(token)
            lookup.forget(bad)
        asked = replace(request("good", "good"), params=SamplingParams(900))
        good, count = Sequence(asked, order=0, max_len=999, rope_set=0, keys_root=None), 0
        for token in [token for line in lines for token in line]:
            guess = lookup.propose([(good, 1)])[0]
            count += guess.tokens == [token] and guess.chances[0] > 0.5
            good.expect()
            good.arrive(token)
        return count

    assert right(lies=True) >= 0.97 * right(lies=False) > 200


def test_of_a_new_user_most_others_are_believed() -> None:
    first = [0.5] * (ANY + 1)
    users = Users(first)

    def use(user: str, chance: int, times: int = 500) -> None:
        for i in range(times):
            users.of(user).note(ANY, i % 100 < chance)

    use("bad", 0)
    assert users.of("new").of(ANY) == 0.5, "one alone says nothing of others"
    for i in range(6):
        use(f"good {i}", 90)
    use("worse", 0)
    assert users.of("newer").of(ANY) == pytest.approx(0.9, abs=0.1)
    assert users.of("bad").of(ANY) < 0.1
    for i in range(2 * USERS):
        users.of(f"passing {i}")
    assert users.of("bad").of(ANY) > 0.4, "of those that have not asked for long nothing is kept"
