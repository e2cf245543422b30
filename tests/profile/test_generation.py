"""The static benchmark: what it asks of an engine."""

from __future__ import annotations

import pytest

from toolkit import TurbomindEngineConfig
from toolkit.profile.generation import fit
from toolkit.profile.options import Grid


@pytest.mark.parametrize(("told", "taken"), [(None, 0.0), (40.0, 40.0)])
def test_prompts_are_read_before_tokens_are_written_unless_a_step_has_a_target(
    told: float | None, taken: float
) -> None:
    config = TurbomindEngineConfig(target_step_ms=told)
    fit(config, Grid())
    assert config.target_step_ms == taken
