"""Guesses change a request's speed alone: the engine's loop with and without them, on a model that is a hash of all
that the cache shows."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from toolkit.configs.speculative import Speculation
from toolkit.engine.core import EngineCore
from toolkit.engine.drafts.cost import StepCost, least_chance, worth
from toolkit.engine.drafts.draft import Draft, Guess, Outlook
from toolkit.engine.drafts.lookup import USERS, Lookup
from toolkit.engine.drafts.model import DraftModel
from toolkit.engine.drafts.search import Answers, Newest, Seen, pairs
from toolkit.engine.drafts.speculator import Speculator
from toolkit.engine.drafts.vocabulary import equal
from toolkit.engine.plan import Plan
from toolkit.engine.request import EngineOutput, EngineRequest, Filters, SamplingParams, Whose
from toolkit.engine.sequence import Sequence

VOCAB = 64
FILTERS = (
    Filters(dry_multiplier=0.8, dry_base=1.3, dry_allowed_length=1),
    Filters(xtc_probability=0.5, xtc_threshold=0.05, typical_p=0.9),
    Filters(top_n_sigma=1.5, dynatemp_range=0.4),
)
WINDOWS: list[tuple[Any, ...]] = [(None,), (6,), (None, 6), ("state",), (None, "state"), ((6, 5),)]


def params_of(draw: Any) -> SamplingParams:
    """Any of the fields that a token is drawn by."""
    words: dict[str, Any] = {}
    if draw(st.booleans()):
        words = {"temperature": draw(st.sampled_from([0.3, 0.8, 1.0, 1.5])), "seed": draw(st.integers(0, 9))}
        words |= {"top_k": draw(st.sampled_from([0, 5, 40])), "top_p": draw(st.sampled_from([1.0, 0.8]))}
        words["min_p"] = draw(st.sampled_from([0.0, 0.05]))
    if draw(st.booleans()):
        words["repetition_penalty"] = draw(st.sampled_from([1.0, 1.3]))
        words["presence_penalty"] = draw(st.sampled_from([0.0, 0.5]))
        words["frequency_penalty"] = draw(st.sampled_from([0.0, -0.7]))
    if draw(st.booleans()):
        words["stop_token_ids"] = draw(st.lists(st.integers(0, VOCAB - 1), max_size=6))
        words["min_new_tokens"] = draw(st.integers(0, 6))
    if draw(st.booleans()):
        words["logit_bias"] = {
            t: draw(st.sampled_from([-3.0, 4.0])) for t in draw(st.sets(st.integers(0, 63), max_size=4))
        }
        words["bad_token_ids"] = draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))
    if draw(st.integers(0, 3)) == 0:
        words["filters"] = draw(st.sampled_from(FILTERS))
    words["logprobs"] = draw(st.sampled_from([-1, -1, 0, 3]))
    if draw(st.integers(0, 7)) == 0:
        words |= {"ngram_size": 1, "ngram_limit": 2}
    return SamplingParams(draw(st.integers(1, 24)), **words)


@pytest.fixture(scope="module")
def seer(support: Any) -> Any:
    """The module ``tests/support/seer.py``."""
    return support("seer")


@st.composite
def cases(draw: Any, drafts: tuple[str, ...] = ("seer", "seer", "dear", "lookup", "hooked")) -> dict[str, Any]:
    shared = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
    requests = []
    for i in range(draw(st.integers(1, 6))):
        own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
        prompt = [*shared[: draw(st.integers(0, len(shared)))], *own]
        request = EngineRequest(str(i), prompt, params_of(draw), session=draw(st.sampled_from([None, None, "s"])))
        requests.append(
            replace(request, priority=draw(st.integers(0, 2)), whose=Whose(user=draw(st.sampled_from("ab"))))
        )
    return {
        "requests": requests,
        "after": [draw(st.integers(0, 4)) for _ in requests],  # steps between arrivals
        "aborted": draw(st.sets(st.integers(0, 5), max_size=1)),
        "windows": draw(st.sampled_from(WINDOWS)),
        "blocks": draw(st.sampled_from([14, 18, 60])),
        "asynchronous": draw(st.booleans()),
        "wrong": draw(st.integers(0, 8)),
        "seed": draw(st.integers(0, 1 << 16)),
        "options": {
            "max_batch_size": draw(st.sampled_from([1, 3, 8])),
            "max_prefill_token_num": draw(st.sampled_from([3, 9, 64])),
            "prefix_caching": draw(st.booleans()),
        },
        "most": draw(st.integers(1, 9)),
        "always": draw(st.integers(0, 3)) > 0,
        "draft": draw(st.sampled_from(drafts)),
        "draft_blocks": draw(st.sampled_from([3, 12, 60])),
        "twin": draw(st.booleans()),
        "fails": draw(st.sets(st.integers(0, 30), max_size=1)),
    }


def run(
    fake: Any, seer: Any, case: dict[str, Any], answers: dict[str, list[int]] | None
) -> tuple[EngineCore, dict[str, Any]]:
    """``answers`` None: without guesses. Requests come one after the other, some steps between them."""
    speculation = None if answers is None else Speculation(most=case["most"], always=case["always"])
    core = fake.make_core(
        case["windows"],
        VOCAB,
        blocks=case["blocks"],
        asynchronous=case["asynchronous"],
        session_len=56,
        speculation=speculation,
        **case["options"],
    )
    if answers is not None:
        core.runner.fail_on = case["fails"]
        if case["draft"] in ("seer", "dear"):
            draft = seer.Seer(answers, case["wrong"], case["seed"], VOCAB, costs=case["draft"] == "dear")
            core.speculator.drafts = [draft]
        if case["draft"] == "model":
            core.speculator.drafts = [drafting(fake, core, case)]
    found: dict[str, list[EngineOutput]] = {}

    def step() -> None:
        for output in core.step():
            found.setdefault(output.id, []).append(output)
        core.check_integrity()

    for request, after in zip(case["requests"], case["after"], strict=True):
        hooks = [lambda ids, logits: logits - 0.01 * (ids[-1] % 7)] if case["draft"] == "hooked" else []
        core.add(replace(request, prediction=request.token_ids[::2]), hooks)
        for _ in range(after):
            step()
        if answers is not None and int(request.id) in case["aborted"]:
            core.abort(request.id)
    for _ in range(5000):
        if not core.has_work:
            break
        step()
    return core, {name: seer.told(outputs) for name, outputs in found.items()}


def drafting(fake: Any, core: EngineCore, case: dict[str, Any]) -> DraftModel:
    """A draft model that computes what its target does, or something else."""
    windows = tuple(w for w in case["windows"] if w != "state") or (None,)
    runner = fake.FakeRunner(windows if case["twin"] else (5,), VOCAB, 4, asynchronous=case["asynchronous"])
    if not case["twin"]:
        runner.nan_on, runner.fail_on = {case["seed"] % VOCAB}, {40}
    blocks = (case["draft_blocks"],) * len(runner.windows)
    runner.allocate_cache(blocks)
    return DraftModel(runner, blocks, core.options.max_batch_size, 56, equal(VOCAB, VOCAB))


def check_drafts(core: EngineCore, case: dict[str, Any]) -> None:
    """Of one that computes what its target does all is right, and no block stays with anybody."""
    if case["draft"] != "model":
        return
    assert core.speculator.drafts or not case["twin"], "it failed"
    if not core.speculator.drafts:
        return
    (draft,) = core.speculator.drafts
    draft.blocks.check_integrity()
    assert not draft._followers and all(pool.available == pool.size for pool in draft.blocks.pools)
    whole = not any(r.params.ngram_size or r.params.filters for r in case["requests"])  # a draft has no filters
    if case["twin"] and whole and "state" not in case["windows"]:
        assert core.speculator.total.accepted == core.speculator.total.tokens


def check(fake: Any, seer: Any, case: dict[str, Any]) -> None:
    _, plain = run(fake, seer, case, None)
    core, fast = run(fake, seer, case, {name: answer[0] for name, answer in plain.items()})
    check_drafts(core, case)
    for name, answer in fast.items():
        if int(name) in case["aborted"] and answer[2] == "abort":
            assert answer[0] == plain[name][0][: len(answer[0])]
        else:
            assert answer == plain[name], name
    assert fast.keys() == plain.keys()


@given(case=cases())
@settings(max_examples=70, deadline=None)
def test_any_guesses_change_nothing(fake: Any, seer: Any, case: dict[str, Any]) -> None:
    check(fake, seer, case)


@given(case=cases(("model",)))
@settings(max_examples=80, deadline=None)
def test_any_draft_model_changes_nothing(fake: Any, seer: Any, case: dict[str, Any]) -> None:
    """One that computes what its target does is always right, whatever comes, goes, and gives up its blocks."""
    check(fake, seer, case)


def test_waking_an_engine_that_is_awake_leaves_its_draft_model_as_it_is(fake: Any) -> None:
    """Else it would have a new cache, and read in it what it has of prompts no more."""
    core = fake.make_core((None,), VOCAB, speculation=Speculation(most=4, always=True))
    case = {"windows": (None,), "twin": True, "asynchronous": False, "draft_blocks": 60}
    core.speculator.drafts = [drafting(fake, core, case)]
    for _ in range(2):
        fake.ask(core, list(range(30)), 12)
        assert core.wake("weights", "kv_cache") == []
    assert core.speculator.total.accepted == core.speculator.total.tokens > 0


PARTS, CASES = 50, 10_000


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_ten_thousand_guesses_change_nothing(fake: Any, seer: Any, part: int) -> None:
    @seed(part)
    @given(case=cases(("seer", "dear", "lookup", "hooked", "model")))
    @settings(max_examples=CASES // PARTS, deadline=None, database=None)
    def some(case: dict[str, Any]) -> None:
        check(fake, seer, case)

    some()


ALPHABET = dict.fromkeys(b'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,. -truefalsn\\+Eyo!?_\n')
LONGER = [b"ab", b"abc", b'":', b'", "', b"na", b"name", b"true", b"yes"]


class Letters:
    """A token a byte, and a few longer ones; the last id is eos."""

    special_ids = frozenset({VOCAB - 1})
    eos_ids = (VOCAB - 1,)
    token_bytes = [*(bytes([b]) for b in ALPHABET), *LONGER][: VOCAB - 1]
    token_bytes += [b"?!"] * (VOCAB - 1 - len(token_bytes)) + [b"<eos>"]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        found, data = [], text.encode()
        while data:
            token = max((t for t in self.token_bytes if data.startswith(t)), key=len)
            found.append(self.token_bytes.index(token))
            data = data[len(token) :]
        return found


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "abc": {"enum": ["yes", "no"]},
        "n": {"type": "integer"},
    },
    "required": ["name", "abc", "n"],
}
FORMATS: list[dict[str, Any]] = [
    {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    {"type": "regex_schema", "regex_schema": "(ab|abc|true)*yes[0-9]{3}"},
    {"type": "json_object"},
]


@pytest.mark.parametrize("wrong", [2, 8, None], ids=["some", "hostile", "own"])
@pytest.mark.parametrize("rule", FORMATS, ids=lambda rule: rule["type"])
def test_guesses_under_grammars_change_nothing(fake: Any, seer: Any, rule: dict[str, Any], wrong: int | None) -> None:
    """The mask of each place, bad words and penalties along the guess; ``None``: drafts as an engine has them."""

    def answers(known: dict[str, list[int]] | None) -> tuple[dict[str, Any], Any]:
        speculation = None if known is None else Speculation(most=6, always=True)
        core = fake.make_core((None, 6), VOCAB, tokenizer=Letters(), session_len=120, speculation=speculation)
        if known is not None and wrong is not None:
            core.speculator.drafts = [seer.Seer(known, wrong, 3, VOCAB)]
        draws: list[dict[str, Any]] = [
            {},
            {"temperature": 1.2, "seed": 4, "bad_words": ["ye", "a1"]},
            {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "logprobs": 2},
            {"temperature": 1.0, "seed": 6, "frequency_penalty": 0.5},
        ]
        for i, draw in enumerate(draws):
            params = SamplingParams(60 - 12 * i, grammar=rule, stop_token_ids=[VOCAB - 1], **draw)
            core.add(EngineRequest(str(i), [3, 1, 4, 1 + i], params))
        return {name: seer.told(outputs) for name, outputs in fake.run(core).items()}, core

    plain, _ = answers(None)
    fast, core = answers({name: told[0] for name, told in plain.items()})
    assert fast == plain
    assert core.speculator.total.drafts or wrong == 8
    assert wrong != 2 or core.speculator.total.accepted > 20


def guessed(
    lookup: Lookup, tokens: list[int], new: int = 0, most: int = 4, **fields: Any
) -> tuple[Sequence, list[int]]:
    """A request whose last ``new`` tokens are its answer so far, and what is guessed next."""
    request = EngineRequest("r", tokens[: len(tokens) - new], SamplingParams(50), **fields)
    seq = Sequence(request, order=0, max_len=1000, rope_set=0, keys_root=None)
    for token in tokens[len(tokens) - new :]:
        lookup.propose([(seq, most)])  # as it is asked step by step
        seq.expect()
        seq.arrive(token)
    return seq, lookup.propose([(seq, most)])[0].tokens


def test_lookup_goes_on_as_the_text_did_before() -> None:
    assert guessed(Lookup(), [1, 2, 3, 4, 5, 6, 9, 2, 3])[1] == [4, 5, 6, 9]
    assert guessed(Lookup(), [1, 2, 3, 7, 1, 2, 3, 8, 5, 2, 3])[1] == [8, 5, 2, 3], "the last place of equal ones"
    assert guessed(Lookup(), [1, 2, 3, 7, 1, 9, 3, 8, 5, 1, 2, 3])[1] == [7, 1, 9, 3], "the longest first"
    assert guessed(Lookup(), [5, 6, 5, 6])[1] == [5, 6, 5, 6], "round and round"
    assert guessed(Lookup(), [1, 2, 3, 4])[1] == []
    assert guessed(Lookup(), [1, 2, 3, 9, 2])[1] == [3, 9, 2, 3], "one token alike is enough"
    assert guessed(Lookup(), [1, 2, 7, 3, 2, 8, 5, 9, 2])[1] == [8, 5, 9, 2], "where it stands last"


def test_lookup_does_not_guess_what_cannot_pay() -> None:
    """One token alike comes true now and then; a text that goes on for long comes true nearly always."""
    lookup = Lookup()
    lookup.least = 0.5
    assert guessed(lookup, [1, 2, 3, 9, 2])[1] == []
    assert guessed(lookup, [*range(20), 40, *range(16)])[1] == [16, 17, 18, 19]


def test_lookup_steps_over_what_was_edited() -> None:
    text = list(range(1, 20))
    assert guessed(Lookup(), [*text, 30, 1, 2, 3, 40], new=4)[1] == [5, 6, 7, 8]
    assert guessed(Lookup(), [*text, 30, 1, 2, 3, 40, 41], new=5)[1] == [], "two that differ are another text"


def test_a_prediction_is_guessed_from_its_start_and_behind_what_is_new() -> None:
    said = [20, 21, 22, 23, 24, 25, 26]
    assert guessed(Lookup(), [1, 2], prediction=said)[1] == said[:4]
    assert guessed(Lookup(), [1, 2, 20, 21, 50, 51, 52, 23, 24], new=7, prediction=said)[1] == [25, 26]


@pytest.mark.parametrize(("share", "seen"), [("user", False), ("all", True), ("off", False)])
def test_answers_of_others_are_looked_up_where_they_may_be(share: Any, seen: bool) -> None:
    lookup = Lookup(share)
    seq, _ = guessed(lookup, [1, 2, 3, 30, 31, 32, 33, 34, 35], new=6, whose=Whose(owner="a"))
    lookup.forget(seq)
    fresh = [7, 30, 31, 32]
    assert guessed(lookup, fresh, whose=Whose(owner="b"))[1] == ([33, 34, 35] if seen else [])
    assert guessed(lookup, fresh, whose=Whose(owner="a"))[1] == ([33, 34, 35] if share != "off" else [])
    assert guessed(lookup, fresh, whose=Whose(owner="a"), adapter=1)[1] == [], "another adapter's"


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), max_size=12), st.integers(16, 80))
def test_answers_that_are_written_over_are_not_found(answers: list[list[int]], room: int) -> None:
    kept = Answers(room)
    for answer in answers:
        kept.add(np.array([9, 8], np.int32), np.array(answer[: room // 4], np.int32))
        for end in range(3, len(answer) + 1):
            at, length = kept.find(np.array(answer[:end], np.int32))
            assert kept.tokens[at - length : at].tolist() == answer[end - length : end]
            assert length == 0 or length >= 3


def test_answers_of_one_key_push_out_no_others() -> None:
    """Whoever has a key names as many owners behind it as they like."""
    lookup = Lookup("user")
    for owner in ("victim", *(f"greedy/{i:08x}" for i in range(3 * USERS))):
        seq, _ = guessed(lookup, [1, 2, 3, 30, 31, 32, 33, 34, 35], new=6, whose=Whose(owner=owner))
        lookup.forget(seq)
    assert guessed(lookup, [7, 30, 31, 32], whose=Whose(owner="victim"))[1] == [33, 34, 35]


@given(st.lists(st.integers(0, 5), min_size=2, max_size=60), st.integers(0, 100))
def test_pairs_that_were_seen_are_known(tokens: list[int], room: int) -> None:
    found = pairs(np.array(tokens, np.int32))
    seen = Seen(found[:-1], room)
    assert all(int(number) in seen for number in found[:-1])
    seen.add(int(found[-1]))
    assert int(found[-1]) in seen


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(0, 60))
def test_where_a_token_stands_last_is_known(tokens: list[int], room: int) -> None:
    text = np.array(tokens, np.int32)
    newest = Newest(text[: len(text) // 2], len(tokens) + room)
    for place in range(len(text) // 2, len(text)):
        newest.add(int(text[place]), place + 1)
    for token in range(10):
        place = newest.of(token)
        assert place == max((i + 1 for i, other in enumerate(tokens) if other == token), default=place)


def test_as_many_guesses_are_verified_as_pay() -> None:
    cost = StepCost()
    for rows in range(1, 17):
        cost.note(rows, 1.0 if rows <= 4 else rows / 4)  # four rows cost what one does
    assert worth([[0.9] * 8], 1, 100, cost) == [3]
    assert worth([[0.5, 0.5]] * 4, 4, 100, cost) == [0] * 4
    assert worth([[0.9] * 8], 1, 2, cost) == [2], "no more than there is room for"
    free, dear = StepCost(), StepCost()
    for rows in (1, 2, 4, 8, 16):
        free.note(rows, 1.0)
        dear.note(rows, float(rows))
    assert worth([[0.1] * 5, [0.9] * 5], 2, 100, free) == [5, 5]
    assert worth([[0.9] * 5], 1, 100, dear) == [0]


@given(
    st.integers(1, 8),
    st.integers(-3, 16),
    st.lists(st.floats(0.1, 4.0), min_size=20, max_size=20),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8),
)
def test_a_chance_too_small_for_a_row_is_never_verified(
    rows: int, room: int, seconds: list[float], chances: list[float]
) -> None:
    cost = StepCost()
    for i in range(len(seconds)):
        cost.note(rows + i, sum(seconds[: i + 1]))
    least = least_chance(rows, room, cost)
    assert 0 <= least
    assert worth([chances], rows, room, cost) == [0] or chances[0] >= least - 1e-9


def test_what_few_rows_cost_is_known_beside_others() -> None:
    """Steps that take now more and now less raise nothing; after one that took too long no further rows look free."""
    cost = StepCost()
    for _ in range(4):
        cost.note(1, 1.0)
    for i in range(400):
        cost.note(3, 3.0 if i % 4 == 0 else 1.0)
    assert cost.of(np.array([1]))[0] < 2.0
    bad = StepCost()
    bad.note(1, 3.0)
    for rows in (2, 3, 4, 2, 3, 4, 2, 3, 4):
        bad.note(rows, 0.5 * rows)
    one, four = bad.of(np.array([1, 4]))
    assert one < 2.0 and four > one


def test_cost_follows_the_steps() -> None:
    cost = StepCost()
    cost.note(1, 1.0)
    assert cost.of(np.array([1, 9]))[1] > 1.0, "further rows are not free as long as nothing is known"
    cost.note(9, 1.2)
    assert cost.of(np.array([5]))[0] == pytest.approx(1.1)
    for _ in range(50):
        cost.note(9, 5.0)
    assert cost.of(np.array([9]))[0] > 4


class Priced(Draft):
    """Of ``chance`` in the tokens that follow, at ``seconds`` each, while that pays; usually of ``usual``."""

    name = "priced"
    costs = True

    def __init__(self, chance: float, seconds: float, usual: float | None = None) -> None:
        self.chance, self.seconds, self.asked = chance, seconds, [0]
        self.usual = chance if usual is None else usual

    def outlook(self, asked: Any) -> Outlook:
        most = max(most for _, most in asked)
        return Outlook(np.full(len(asked), self.usual), self.seconds * np.arange(most + 1))

    def propose(self, asked: Any) -> list[Guess]:
        paying = [sum(self.chance ** (i + 1) >= self.least for i in range(most)) for _, most in asked]
        self.asked = [max(1, count) for count in paying]
        return [Guess([1] * count, [self.chance] * count) for count in self.asked]


@pytest.mark.parametrize(
    ("chance", "seconds", "asked"),
    [(0.95, 0.05, 8), (0.6, 0.1, 3), (0.6, 0.9, 0), (0.05, 0.1, 0), (0.0, 0.0, 0)],
    ids=["sure and cheap", "half", "as slow as a step", "never right", "worthless"],
)
def test_a_draft_that_costs_is_asked_for_what_pays(chance: float, seconds: float, asked: int) -> None:
    """Steps take 1 s, and 0.03 s more with each row; a request may have 8 tokens guessed."""
    draft = Priced(chance, seconds)
    speculator = Speculator(Speculation(most=8), [draft], VOCAB)
    for rows in range(1, 40):
        speculator.cost.note(rows, 0.97 + 0.03 * rows)
    request = EngineRequest("r", [1, 2, 3], SamplingParams(50))
    seq = Sequence(request, order=0, max_len=1000, rope_set=0, keys_root=None)
    seq.computed = 2
    speculator.choose([seq])
    assert draft.asked[0] in (2, asked), "the first is a trial where it does not pay"
    draft.asked, speculator._next_trial = [0], np.inf
    guesses = speculator.choose([seq])
    assert draft.asked == [asked]
    assert len(guesses.get(seq, [])) <= asked


def test_who_is_surer_than_usual_guesses_further() -> None:
    made = []
    for chance in (0.6, 0.9):
        draft = Priced(chance, 0.1, usual=0.6)
        speculator = Speculator(Speculation(most=12), [draft], VOCAB)
        for rows in range(1, 40):
            speculator.cost.note(rows, 0.97 + 0.03 * rows)
        seq = Sequence(EngineRequest("r", [1, 2], SamplingParams(50)), order=0, max_len=99, rope_set=0, keys_root=None)
        seq.computed = 1
        made.append(len(speculator.choose([seq])[seq]))
    assert 2 <= made[0] <= 3 and made[1] >= 8


def test_what_a_step_without_guesses_takes_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first took long, by chance, so that guesses seemed to pay; then nothing but guesses was seen."""
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    speculator = Speculator(Speculation(most=8), [sure := Poor()], VOCAB)
    sure.chance = 0.9
    seq = Sequence(EngineRequest("r", [1, 2], SamplingParams(50)), order=0, max_len=99, rope_set=0, keys_root=None)
    taken = []
    for i in range(1000):
        guess = speculator.choose([seq]).get(seq, [])
        plan = Plan(decodes=[seq], guesses={seq: len(guess)} if guess else {})
        plan.submitted = now
        now += 9.0 if i == 0 else 1.0 + len(guess)
        speculator.step_ended(plan, 1 + len(guess), now)
        taken.append(len(guess))
    assert taken[1] == 8 and not any(taken[-100:])


class Poor(Draft):
    """Guesses at no cost that nearly never come true."""

    name = "poor"
    chance = 0.3

    def propose(self, asked: Any) -> list[Guess]:
        return [Guess([1] * most, [self.chance] * most) for _, most in asked]


def test_beside_guesses_that_do_not_pay_a_draft_pays_no_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not time for a trial."""
    draft = Priced(0.95, 0.9)
    speculator = Speculator(Speculation(most=8), [Poor(), draft], VOCAB)
    for rows in range(1, 40):
        speculator.cost.note(rows, 0.5 + 0.5 * rows)
    seq = Sequence(EngineRequest("r", [1, 2], SamplingParams(50)), order=0, max_len=99, rope_set=0, keys_root=None)
    monkeypatch.setattr("toolkit.engine.drafts.speculator.time", SimpleNamespace(perf_counter=lambda: -1.0))
    assert speculator.choose([seq]) == {} and draft.asked == [0]


def test_what_a_draft_held_as_it_failed_is_gone_as_it_is_closed() -> None:
    """Tensors of its last step, and its cache: the memory is to be free then."""
    draft, held = Priced(0.9, 0.0), []

    def propose(asked: Any) -> list[Guess]:
        cache = np.zeros(1)
        held.append(weakref.ref(cache))
        raise RuntimeError("no memory")

    draft.propose = propose  # type: ignore[method-assign]
    draft.close = lambda: held.append(held.pop()())  # type: ignore[method-assign]
    speculator = Speculator(Speculation(most=8, always=True), [draft], VOCAB)
    seq = Sequence(EngineRequest("r", [1, 2], SamplingParams(50)), order=0, max_len=99, rope_set=0, keys_root=None)
    assert speculator.choose([seq]) == {} and held == [None]


def test_nothing_is_computed_for_a_draft_that_has_failed(fake: Any) -> None:
    draft = Priced(0.9, 0.0)
    draft.aux_layers = (0,)
    draft.propose = lambda asked: [][1]  # type: ignore[method-assign]
    core = fake.make_core((None,), VOCAB, speculation=Speculation(most=4, always=True))
    core = EngineCore(core.runner, core.options, None, drafts=[draft])
    wanted, submit = [], core.runner.submit
    core.runner.submit = lambda batch: wanted.append(batch.aux_layers) or submit(batch)
    fake.ask(core, [1, 2], 9)
    assert wanted[0] == (0,) and wanted[-1] == ()


@pytest.mark.parametrize("free", [False, True])
def test_a_draft_that_fails_is_asked_no_more(free: bool) -> None:
    draft = Poor() if free else Priced(0.9, 0.0)
    draft.propose = lambda asked: [][1]  # type: ignore[method-assign]
    speculator = Speculator(Speculation(most=8, always=True), [draft], VOCAB)
    seq = Sequence(EngineRequest("r", [1, 2], SamplingParams(50)), order=0, max_len=99, rope_set=0, keys_root=None)
    assert speculator.choose([seq]) == {} and speculator.drafts == []
