"""What the library refuses of one request in a step ends that request alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from toolkit.engine.core import EngineCore
from toolkit.engine.options import EngineOptions
from toolkit.engine.request import EngineOutput, EngineRequest, SamplingParams
from toolkit.engine.sequence import Biases, History


def run(core: EngineCore) -> dict[str, tuple[list[int], EngineOutput]]:
    """(tokens, last output) of each request."""
    found: dict[str, tuple[list[int], EngineOutput]] = {}
    while core.has_work:
        for output in core.step():
            found[output.id] = (found.get(output.id, ([], output))[0] + output.token_ids, output)
    return found


@pytest.mark.parametrize("array", ["bias_ids", "history_ids"])
def test_a_refusal_ends_its_request_alone(drive: Any, array: str) -> None:
    """A token id beyond the vocabulary in one request's arrays, which the library refuses for the whole step."""
    runner = drive("llama").runner

    def outputs(bad: bool) -> dict[str, tuple[list[int], EngineOutput]]:
        runner.allocate_cache((64,))
        core = EngineCore(runner, EngineOptions(128, 8, 64, (64,)), None)
        for i in range(5):
            params = SamplingParams(12, temperature=0.8, seed=i)
            core.add(EngineRequest(str(i), list(range(3 + i, 30)), params))
        if bad:
            core.add(EngineRequest("bad", [5, 6, 7], SamplingParams(12)))
            seq, far = core.sequences["bad"], runner.spec.vocab_size + 7
            if array == "bias_ids":
                seq.biases = Biases(SamplingParams(1, logit_bias={far: 1.0}))
            else:
                seq.history = History(np.array([5, far], np.int32))
        return run(core)

    disturbed, calm = outputs(True), outputs(False)
    tokens, last = disturbed.pop("bad")
    assert tokens == [] and array in str(last.error) and last.error_code == 500
    assert {k: t for k, (t, _) in disturbed.items()} == {k: t for k, (t, _) in calm.items()}
    assert all(o.finish_reason == "length" for _, o in disturbed.values())


@pytest.mark.parametrize(
    "field", [{"temperature": float("nan")}, {"repetition_penalty": 1e-46}, {"top_p": float("nan")}, {"top_k": -5}]
)
def test_a_senseless_number_ends_its_request_alone(drive: Any, field: dict[str, float]) -> None:
    """What no front end lets through: the row is bad, the step goes on."""
    runner = drive("llama").runner
    core = EngineCore(runner, EngineOptions(128, 8, 64, (64,)), None)
    for i in range(3):
        core.add(EngineRequest(str(i), [5, 6, 7 + i], SamplingParams(6)))
    core.add(EngineRequest("bad", [5, 6, 7], SamplingParams(6, **field)))  # type: ignore[arg-type]
    found = run(core)
    assert "no token can be drawn" in str(found.pop("bad")[1].error)
    assert [len(tokens) for tokens, _ in found.values()] == [6, 6, 6]
