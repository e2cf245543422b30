"""Configs refuse what they cannot mean, in one line that names the field."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit import GenerationConfig, PytorchEngineConfig, TurbomindEngineConfig, pipeline
from toolkit.configs.generation import PARAMETERS
from toolkit.configs.limits import MOST, SEED_MAX, TEMPLATE_STOPS, WORD_LENGTH
from toolkit.configs.lmdeploy import notices
from toolkit.errors import UsageError
from toolkit.messages import ChatTemplateConfig

FIELDS = sorted(GenerationConfig.__dataclass_fields__)
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.just(10**400)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(FIELDS), ANYTHING)
def test_any_value_is_taken_or_refused_by_name(name: str, value: Any) -> None:
    try:
        GenerationConfig(**{name: value})
    except UsageError as error:
        assert name in str(error) and "\n" not in str(error) and len(str(error)) < 300


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("random_seed", 10**400),
        pytest.param("temperature", -(10**5000), id="huge"),
        ("stop_words", 5),
        ("stop_words", {"a"}),
        ("stop_token_ids", 5),
        ("logit_bias", [1]),
        ("response_format", "json"),
        ("logits_processors", [5]),
        ("do_sample", "yes"),
        ("ignore_eos", 1),
    ],
)
def test_values_of_a_wrong_type(name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=name):
        GenerationConfig(**{name: value})


@pytest.mark.parametrize("name", sorted(name for name, p in PARAMETERS.items() if p.bounds))
def test_every_number_is_held_by_the_type_that_computes_with_it(name: str) -> None:
    bounds = PARAMETERS[name].bounds
    kind = np.dtype(bounds.kind)
    for value in (bounds.low, bounds.high):
        stored = np.array(value & SEED_MAX if kind == np.uint64 else value).astype(kind)
        assert np.isfinite(stored) and (stored == 0) == (value == 0)
        assert bounds.kind == "float32" or int(stored) & SEED_MAX == value & SEED_MAX


@pytest.mark.parametrize("value", [1e-46, 1e-300, 0.0, 0, -1e-46, 1e39, math.inf, math.nan])
def test_penalties_that_float32_makes_zero_or_infinite(value: float) -> None:
    with pytest.raises(UsageError, match="repetition_penalty"):
        GenerationConfig(repetition_penalty=value)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-300, True), (1e-7, True), (0.01, False)])
def test_tiny_temperatures_are_greedy(temperature: float, greedy: bool) -> None:
    assert GenerationConfig(do_sample=True, temperature=temperature).greedy is greedy


@pytest.mark.parametrize("name", sorted(MOST))
def test_lists_have_a_limit(name: str) -> None:
    def of(count: int) -> Any:
        words = [str(i) for i in range(count)]
        return (
            words
            if name in WORD_LENGTH
            else list(range(count))
            if name != "logit_bias"
            else dict.fromkeys(range(count), 1.0)
        )

    GenerationConfig(**{name: of(MOST[name])})
    with pytest.raises(UsageError, match=f"^{name}: expected at most {MOST[name]} entries"):
        GenerationConfig(**{name: of(MOST[name] + TEMPLATE_STOPS + 1)})


@pytest.mark.parametrize("name", sorted(WORD_LENGTH))
def test_words_have_a_limit_and_whole_characters(name: str) -> None:
    GenerationConfig(**{name: ["é" * WORD_LENGTH[name]]})
    for word, why in (("x" * (WORD_LENGTH[name] + 1), "characters each"), ("a\ud800", "surrogate")):
        with pytest.raises(UsageError, match=f"^{name}: .*{why}"):
            GenerationConfig(**{name: [word]})


def test_lmdeploy_s_other_fields_take_their_default_alone() -> None:
    """All fields of LMDeploy 0.18, each at its default there."""
    theirs: dict[str, Any] = dict(
        n=1, max_new_tokens=512, do_sample=False, top_p=1.0, top_k=50, min_p=0.0, temperature=0.8,
        repetition_penalty=1.0,
        ignore_eos=False, random_seed=None, stop_words=None, bad_words=None, stop_token_ids=None, bad_token_ids=None,
        min_new_tokens=None, skip_special_tokens=True, spaces_between_special_tokens=True, logprobs=None,
        logprob_start_len=-1, response_format=None, logits_processors=None, output_logits=None,
        output_last_hidden_state=None, include_stop_str_in_output=False, return_ppl=False, with_cache=False,
        preserve_cache=False, migration_request=None, return_routed_experts=False, repetition_ngram_size=0,
        repetition_ngram_threshold=0,
    )  # fmt: skip
    assert GenerationConfig(**theirs) == GenerationConfig()
    others: dict[str, Any] = dict(
        logprob_start_len=0,
        return_ppl=True,
    )
    for name, value in others.items():
        with pytest.raises(UsageError, match=rf"^{name}: found .*expected {theirs[name]}"):
            GenerationConfig(**{name: value})


@pytest.mark.parametrize("config", [TurbomindEngineConfig, PytorchEngineConfig])
@pytest.mark.parametrize("name", ["enable_prefix_caching", "enable_metrics", "eager_mode"])
def test_switches_of_the_engine(config: Any, name: str) -> None:
    if name not in config.__dataclass_fields__:
        return
    with pytest.raises(UsageError, match=name):
        config(**{name: "no"})


@pytest.mark.parametrize("config", ["pytorch", {"tp": 1}, 5])
def test_a_backend_config_of_another_kind(config: Any) -> None:
    with pytest.raises(UsageError, match="backend_config"):
        pipeline("demo", backend_config=config)


@pytest.mark.parametrize(
    ("config", "field", "default", "other"),
    [
        (TurbomindEngineConfig, "cp", 1, 2),
        (TurbomindEngineConfig, "outer_dp_size", None, 2),
        (PytorchEngineConfig, "kv_transfer_config", None, {"kv_role": "producer"}),
    ],
)
def test_fields_that_ask_for_more_than_there_is_take_their_default_alone(
    config: type, field: str, default: object, other: object
) -> None:
    assert config(**{field: default}) == config()
    wanted = "; leave it out" if default is None else f", expected {default!r}"
    with pytest.raises(UsageError, match=rf"^{field}: found {re.escape(repr(other))}{wanted}: "):
        config(**{field: other})


def test_fields_that_change_nothing_are_taken_with_a_notice_each() -> None:
    assert notices(TurbomindEngineConfig(cache_chunk_size=-1)) == notices(PytorchEngineConfig()) == []
    tuned = TurbomindEngineConfig(num_tokens_per_iter=4096, communicator="native", cache_prompt="all")
    said = notices(tuned)
    assert [line.partition(":")[0] for line in said] == [
        "num_tokens_per_iter=4096",
        "communicator='native'",
        "cache_prompt='all'",
    ]
    assert all("without effect" in line and "\n" not in line for line in said)
    assert notices(PytorchEngineConfig(eager_mode=True)) == []


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, []),
        ({"temperature": 0.2}, ["temperature 0.2"]),
        ({"temperature": 0.2, "do_sample": True}, []),
        ({"temperature": 0.0}, []),
        ({"top_k": 5, "top_p": 0.5}, ["top_p 0.5", "top_k 5"]),
    ],
)
def test_what_has_no_effect_is_named(fields: dict[str, Any], named: list[str]) -> None:
    found = GenerationConfig(**fields).without_effect()
    assert [line.partition(" has no effect")[0] for line in found] == named


def test_a_chat_template_that_is_no_json() -> None:
    with pytest.raises(UsageError, match=r"^chat template: not valid JSON \("):
        ChatTemplateConfig.from_json("{")
