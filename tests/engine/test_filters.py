"""llama.cpp's samplers: each rule beside its definition or transformers, and what an engine draws by them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit import GenerationConfig
from toolkit.engine.constraints import host_sampler
from toolkit.engine.constraints.filters import LONGEST, Filtering, typical, without_top_choices
from toolkit.engine.request import EngineRequest, Filters, SamplingParams
from toolkit.engine.sampling_params import resolve
from toolkit.errors import UsageError
from toolkit.runners.step import uniform

VOCAB = 64
TEXTS = [bytes([97 + i % 26]) if i else b"x:\n" for i in range(VOCAB)]  # token 0 has breakers in it


def logits(seed: int, size: int = VOCAB) -> Any:
    return (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)


def batch(support: Any, **draw: Any) -> Any:
    """A SamplingBatch of one row."""
    made = support("steps").sampling(1, **{"temperature": 1.0, **draw})
    made.position = made.position.copy()
    return made


# -- DRY


def naive(tokens: list[int], f: Filters) -> dict[int, float]:
    """Penalties by token, as llama.cpp's comment says it: for every earlier place, how many tokens before it are those
    before the end; a breaker among these ends them."""
    tokens = tokens[-f.dry_penalty_last_n :] if f.dry_penalty_last_n > 0 else tokens
    found: dict[int, int] = {}
    for place in range(1, len(tokens)):
        alike = 0
        while alike < place and tokens[place - 1 - alike] == tokens[-1 - alike]:
            if f.dry_sequence_breakers and tokens[-1 - alike] == 0:
                break
            alike += 1
        if alike >= f.dry_allowed_length:
            found[tokens[place]] = max(found.get(tokens[place], 0), alike)
    return {t: min(f.dry_multiplier * f.dry_base ** (n - f.dry_allowed_length), 1e6) for t, n in found.items()}


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.sampled_from([1.0, 1.3, 1.75]),
    st.integers(1, 3),
    st.sampled_from([-1, 0, 5, 20]),
    st.sampled_from([[], [":"]]),
)
def test_repeats_cost_what_their_length_says(
    tokens: list[int], base: float, allowed: int, last: int, breakers: list[str]
) -> None:
    f = Filters(
        dry_multiplier=0.8, dry_base=base, dry_allowed_length=allowed, dry_penalty_last_n=last,
        dry_sequence_breakers=breakers,
    )  # fmt: skip
    found = Filtering(f, TEXTS).penalized(np.zeros(VOCAB, np.float32), np.array(tokens, np.int32))
    wanted = np.zeros(VOCAB)
    for token, penalty in ({} if last == 0 else naive(tokens, f)).items():
        wanted[token] = -penalty
    np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize(("breaker", "alike"), [("bc", 2), ("c", 2), ("cf", 1), ("bcfg", 0), ("cb", 10)])
def test_a_breaker_may_be_several_tokens(breaker: str, alike: int) -> None:
    """Of the text bcfg bcfg bcfg, a token each letter."""
    f = Filters(dry_multiplier=1.0, dry_base=1.5, dry_allowed_length=1, dry_sequence_breakers=[breaker])
    found = Filtering(f, TEXTS).penalized(np.zeros(VOCAB, np.float32), np.array([1, 2, 5, 6] * 3, np.int32))
    assert -found[1] == pytest.approx(1.5 ** (min(alike, 8) - 1) if alike else 0.0)


@pytest.mark.parametrize("base", [1.0, 1.001, 1.75, 100.0])
def test_a_text_of_one_token_ends(base: float) -> None:
    f = Filters(dry_multiplier=2.0, dry_base=base)
    found = Filtering(f).penalized(np.zeros(VOCAB, np.float32), np.full(20_000, 5, np.int32))
    assert np.isfinite(found).all() and found[5] < -1.9 and not found[np.arange(VOCAB) != 5].any()
    assert found[5] == pytest.approx(-2 * min(1e6, math.exp(min(LONGEST * math.log(base), 20))), rel=0.7)


# -- cuts


@pytest.mark.parametrize("mass", [0.05, 0.2, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("case", range(8))
def test_typical_tokens_are_those_of_transformers(mass: float, case: int) -> None:
    import torch
    from transformers import TypicalLogitsWarper

    x = logits(case)
    wanted = TypicalLogitsWarper(mass)(None, torch.from_numpy(x)[None])[0]
    p = host_sampler.probabilities(x, 1.0)
    assert typical(p, np.arange(VOCAB), mass).tolist() == torch.isfinite(wanted).nonzero().flatten().tolist()


def test_top_choices_give_way_to_the_least_of_them() -> None:
    p = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    every = np.arange(5)
    assert without_top_choices(p, every, 0.12).tolist() == [2, 3, 4]
    assert without_top_choices(p, every, 0.3).tolist() == [1, 2, 3, 4]
    assert without_top_choices(p, every, 0.35).tolist() == [0, 1, 2, 3, 4]  # one choice alone stays
    assert without_top_choices(p, every[2:], 0.3).tolist() == [3, 4]  # of what other cuts leave
    assert without_top_choices(np.array([0.4, 0.4, 0.2]), np.arange(3), 0.3).tolist() == [1, 2]


def drawn(support: Any, x: Any, filters: Filters, count: int = 3000, **draw: Any) -> Any:
    """How often each token comes, over so many positions."""
    f, found = Filtering(filters), np.zeros(len(x), int)
    s = batch(support, seed=7, **draw)
    for position in range(count):
        s.position[0] = position
        found[f.draw(x, s, 0)] += 1
    return found / count


def test_far_tokens_are_cut_by_deviations(support: Any) -> None:
    x = logits(3) / 3
    near = x >= x.max() - 1.5 * x.std()
    assert ((drawn(support, x, Filters(top_n_sigma=1.5)) > 0) == near).all() and near.sum() > 2
    assert drawn(support, x, Filters())[~near].sum() > 0.2  # what it would draw
    masked = np.where(np.arange(VOCAB) % 2, x, -np.inf).astype(np.float32)  # by a grammar: they count for nothing
    assert not (drawn(support, masked, Filters(top_n_sigma=1.0), 500) > 0)[::2].any()


def test_top_choices_are_left_out_as_often_as_asked(support: Any) -> None:
    x = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    found = drawn(support, x, Filters(xtc_probability=0.5, xtc_threshold=0.2))
    np.testing.assert_allclose(found, [0.25, 0.15 + 0.3, 0.075 + 0.15, 0.025 + 0.05], atol=0.035)
    assert drawn(support, x, Filters(xtc_probability=1.0, xtc_threshold=0.2))[0] == 0


@pytest.mark.parametrize("move", [0.0, 0.3, 0.7])
def test_temperature_moves_with_what_is_uncertain(support: Any, move: float) -> None:
    x = np.log(np.array([0.7, 0.1, 0.1, 0.1]))
    own = np.exp(x)
    uncertain = -(own * x).sum() / np.log(4)
    temperature = (0.7 - move) + 2 * move * uncertain**2 if move else 0.7
    wanted = np.exp(x / temperature) / np.exp(x / temperature).sum()
    f = Filters(dynatemp_range=move, dynatemp_exponent=2.0, typical_p=1.0)
    found = drawn(support, x.astype(np.float32), f, temperature=0.7)
    np.testing.assert_allclose(found, wanted, atol=0.035)


def test_what_a_grammar_rules_out_is_no_choice(support: Any) -> None:
    x = np.array([-np.inf, 2.0, 1.0, 0.0, -np.inf], np.float32)
    assert drawn(support, x, Filters(xtc_probability=1.0, xtc_threshold=0.0), 50)[3] == 1
    even = np.array([1.0, 1.0, *[-np.inf] * 60], np.float32)  # as uncertain as can be, so hot that one is drawn often
    even[1] -= 1.5
    f = Filters(dynatemp_range=1.0, dynatemp_exponent=1.0)
    np.testing.assert_allclose(drawn(support, even, f)[:2], drawn(support, even[:2], f), atol=1e-9)


@pytest.mark.parametrize("move", [0.0, 1.0])
def test_the_best_of_what_is_left_comes_where_it_is_cold(support: Any, move: float) -> None:
    """However unlikely beside what was left out."""
    x = np.array([9.0, 4.0, 0.0, -1.0, -2.0], np.float32)
    f = Filters(xtc_probability=1.0, xtc_threshold=0.005, dynatemp_range=move, dynatemp_exponent=100.0)
    assert drawn(support, x, f, 50, temperature=0.005)[1] == 1


def test_without_filters_nothing_changes(support: Any) -> None:
    x = logits(5)
    s = batch(support, seed=3, top_k=20, top_p=0.9, min_p=0.02, temperature=0.8)
    for position in range(200):
        s.position[0] = position
        assert Filtering(Filters()).draw(x, s, 0) == host_sampler.draw(x, s, 0)


def test_draws_of_their_own_are_apart() -> None:
    """Whether XTC acts tells nothing of which token is drawn."""
    other = 0x9E3779B97F4A7C15
    pairs = np.array([(uniform(s, p), uniform(s ^ other, p)) for s in range(60) for p in range(60)])
    assert abs(np.corrcoef(pairs.T)[0, 1]) < 0.05


# -- of requests


def test_only_what_changes_something_is_asked_of_an_engine(tiny_models: Any) -> None:
    from toolkit.artifacts.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.open(tiny_models("llama"))

    def of(**given: Any) -> Filters | None:
        return resolve(GenerationConfig(**given), tokenizer, 4, 64).filters

    assert of(do_sample=True) is None and of(typical_p=0.5) is None  # which is greedy
    assert of(do_sample=True, top_n_sigma=-1, dry_multiplier=1.0, dry_penalty_last_n=0) is None
    found = of(dry_multiplier=1.0)
    assert found is not None and found.dry_sequence_breakers == ["\n", ":", '"', "*"]
    found = of(do_sample=True, xtc_probability=0.5, dry_sequence_breakers=[])
    assert found == Filters(xtc_probability=0.5)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"typical_p": 1.5}, "typical_p"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"dry_sequence_breakers": ["a"] * 65}, "dry_sequence_breakers"),
        ({"xtc_probability": float("nan")}, "xtc_probability"),
    ],
)
def test_what_cannot_be_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        GenerationConfig(**given)


@pytest.mark.parametrize("alone", [True, False])
def test_an_engine_draws_by_them(support: Any, alone: bool) -> None:
    """A token that repeats is held back, and what else runs changes nothing."""
    fake = support("fake_runner")

    def run(*requests: EngineRequest) -> list[int]:
        core = fake.make_core((None,), VOCAB, blocks=60, asynchronous=True, session_len=56)
        for request in requests:
            core.add(request)
        found = fake.run(core)
        assert not any(output.error for outputs in found.values() for output in outputs)
        tokens: list[int] = fake.tokens_of(found["mine"])
        return tokens

    drawn = SamplingParams(20, temperature=1.0, seed=4, filters=Filters(xtc_probability=0.5, dry_multiplier=3.0))
    mine = EngineRequest("mine", [5, 6, 7, 5, 6], drawn)
    others = () if alone else (EngineRequest("a", [1, 2], SamplingParams(9)), EngineRequest("b", [5, 6], drawn))
    assert run(mine, *others) == run(mine)
    assert run(mine) != run(EngineRequest("mine", [5, 6, 7, 5, 6], SamplingParams(20, temperature=1.0, seed=4)))
