"""Configs refuse what they cannot mean, in one line that names the field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit import GenerationConfig, PytorchEngineConfig, TurbomindEngineConfig, pipeline
from toolkit.errors import UsageError

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


@pytest.mark.parametrize("config", [TurbomindEngineConfig, PytorchEngineConfig])
@pytest.mark.parametrize("name", ["enable_prefix_caching", "enable_metrics"])
def test_switches_of_the_engine(config: Any, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        config(**{name: "no"})


@pytest.mark.parametrize("config", ["pytorch", {"tp": 1}, 5])
def test_a_backend_config_of_another_kind(config: Any) -> None:
    with pytest.raises(UsageError, match="backend_config"):
        pipeline("demo", backend_config=config)
