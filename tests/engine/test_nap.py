"""Sleeping and waking: the model's memory goes and comes back, and what it says afterwards is the same."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from toolkit import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.engine.process.weights import Weights
from toolkit.errors import ToolkitError, UsageError
from toolkit.messages import GenerationConfig, Response

PROMPT = list(range(5, 155))
GREEDY = GenerationConfig(max_new_tokens=12, ignore_eos=True)
CONFIGS = {
    "torch": PytorchEngineConfig(device_type="cpu", dtype="float32", session_len=400),
    "native": TurbomindEngineConfig(device="cpu", dtype="float32", session_len=400),
}


def answer(engine: AsyncEngine) -> Response:
    whole = Response()
    for delta in engine.generate_sync(PROMPT, GREEDY):
        whole.extend(delta)
    return whole


@pytest.mark.parametrize(("runner", "process"), [("torch", False), ("native", False), ("native", True)])
def test_the_same_model_wakes(tiny_models: Any, runner: str, process: bool) -> None:
    with AsyncEngine.open(tiny_models("llama"), backend_config=CONFIGS[runner], process=process) as engine:
        before = answer(engine)
        assert before.finish_reason == "length"
        for tags in (("weights", "kv_cache"), ("weights",)):
            engine.weights.sleep()
            refused = answer(engine)
            assert engine.weights.asleep and refused.error_code == 503 and "wakeup" in (refused.error_message or "")
            engine.weights.wake(tags)
            if engine.weights.asleep:
                assert answer(engine).error_code == 503
                engine.weights.wake(["kv_cache"])
            assert not engine.weights.asleep
            again = answer(engine)
            assert again.token_ids == before.token_ids and again.cached_tokens == 0
            assert answer(engine).cached_tokens > 0
        engine.weights.wake()  # nothing to do


def test_the_cache_does_not_come_back_first(tiny_models: Any) -> None:
    with AsyncEngine.open(tiny_models("llama"), backend_config=CONFIGS["native"], process=True) as engine:
        engine.weights.sleep()
        with pytest.raises(UsageError, match="weights"):
            engine.weights.wake(["kv_cache"])
        with pytest.raises(UsageError, match="tags"):
            engine.weights.wake(["dreams"])
        assert engine.weights.asleep
        engine.weights.wake()
        assert answer(engine).finish_reason == "length"


def test_what_runs_ends_in_an_error(tiny_models: Any) -> None:
    async def run(engine: AsyncEngine) -> list[Response]:
        config = GenerationConfig(max_new_tokens=140, ignore_eos=True)
        found = []
        async for delta in engine.generate(PROMPT, config):
            found.append(delta)
            if len(found) == 1:
                await asyncio.to_thread(engine.weights.sleep)
        return found

    with AsyncEngine.open(tiny_models("llama"), backend_config=CONFIGS["torch"]) as engine:
        last = asyncio.run(run(engine))[-1]
        assert last.finish_reason == "error" and last.error_code == 503
        engine.weights.wake()
        assert answer(engine).finish_reason == "length"


@pytest.mark.parametrize("second", ["sleep", "lost"])
def test_of_two_at_once_the_later_one_holds(second: str) -> None:
    """Of a wake and a sleep, whichever thread hears of it first; of a sleep that fails and the engine's end, which it
    fails by: the next one is awake."""
    others: list[threading.Thread] = []

    def call(name: str, *parts: str) -> list[str]:
        if not others and name == first:
            others.append(threading.Thread(target=getattr(weights, second)))
            others[0].start()
            others[0].join(0.2)
            if second == "lost":
                raise ToolkitError("the engine failed")
        return []

    first = ""
    weights = Weights(call, lambda: False, empty=False)
    weights.sleep()
    if second == "lost":
        first = "sleep"
        with pytest.raises(ToolkitError, match="failed"):
            weights.sleep()
    else:
        first = "wake"
        weights.wake()
    others[0].join()
    assert weights.asleep == (second == "sleep")


def test_a_closed_engine_does_not_sleep(tiny_models: Any) -> None:
    engine = AsyncEngine.open(tiny_models("llama"), backend_config=CONFIGS["native"], process=True)
    engine.close()
    with pytest.raises(ToolkitError):
        engine.weights.sleep()
