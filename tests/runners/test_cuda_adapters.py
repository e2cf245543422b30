"""LoRA adapters in the runner with graphs on a CPU, inside graphs, against the runner without graphs."""

from __future__ import annotations

import numpy as np
import pytest

from toolkit.artifacts.adapters.adapter import read_adapter
from toolkit.runners.base import RunnerError, RunnerOptions
from toolkit.runners.choose import open_model
from toolkit.runners.tensor.layers.lora import Adapted
from toolkit.runners.tensor.runner import TensorRunner

ONE_LAYER = {"num_hidden_layers": 1}  # the interpreter is slow
ALL = r"(?:[qkvo]|gate|up|down)_proj"


@pytest.fixture(scope="module")
def pair(tiny_models, steps, support, tmp_path_factory):
    """``pair()``: (driver over ours, the device, driver without graphs), both with the same two adapters."""
    model, made, folder = tiny_models("llama", **ONE_LAYER), support("adapters"), tmp_path_factory.mktemp("adapters")
    opened, graphs = open_model(model), support("graphs")
    paths = [
        made.write_adapter(folder / "a", model, "q_proj|v_proj|down_proj", rank=3, seed=2),
        made.write_adapter(folder / "b", model, ALL, rank=20, seed=3, use_rslora=True),
    ]
    adapters = [read_adapter(path, opened.spec, opened.stored) for path in paths]
    options = RunnerOptions(
        dtype="float32", block_size=16, device="cpu", adapters=tuple((p.name, str(p)) for p in paths)
    )

    def make():
        device = graphs.CpuDevice()
        ops = graphs.interpreted_ops("lora_shrink", "lora_expand")
        runner = TensorRunner(opened.spec, opened.weights, options, graphs=device, ops=ops, adapters=adapters)
        oracle = TensorRunner(opened.spec, opened.weights, options, adapters)
        return steps.Driver(device.watch(runner)), device, steps.Driver(oracle)

    return make


def _both(ours, oracle, new, adapter, want="last"):
    adapter = np.array(adapter, np.int32)
    found, expected = (d.step(dict(new), want, adapter=adapter) for d in (ours, oracle))
    assert found.tokens.tolist() == expected.tokens.tolist()
    np.testing.assert_allclose(found.logits, expected.logits, rtol=2e-4, atol=2e-4)
    return found


def test_steps_that_mix_adapters_run_in_one_graph_and_steps_without_in_another(pair):
    ours, device, oracle = pair()
    for driver in (ours, oracle):
        driver.add(), driver.add(), driver.add()
    rng = np.random.default_rng(0)
    prompts = {n: rng.integers(3, 300, 5 + 7 * n).tolist() for n in range(3)}
    _both(ours, oracle, prompts, [1, -1, 0], "all")
    plain = _both(ours, oracle, {n: [7] for n in prompts}, [-1, -1, -1])
    for adapter in ([1, -1, 0], [1, -1, 0], [-1, 1, -1], [0, 0, 1], [-1, -1, -1]):  # padded to four sequences
        found = _both(ours, oracle, {n: [7] for n in prompts}, adapter)
    keys = ours.runner._steps.graphs.keys()
    assert sorted(key.adapted for key in keys) == [False, True]
    assert device.captures == 2 and device.replays == 3
    _both(ours, oracle, {n: [9] for n in prompts}, [1, -1, 0], "all")  # what the graphs wrote to the cache
    assert plain.tokens.shape == found.tokens.shape


def test_warm_up_captures_steps_with_adapters_too(pair):
    ours, device, oracle = pair()
    ours.runner.warm_up(2, 64, 32)
    adapted = [(key.rows, key.adapted) for key in ours.runner._steps.graphs.keys()]
    assert sorted(adapted) == [(1, False), (1, True), (2, False), (2, True)]
    before = device.replays
    assert [ours.add(), oracle.add()] == [0, 0]
    _both(ours, oracle, {0: [3, 4, 5]}, [1])
    for adapter in (1, -1, 0):
        _both(ours, oracle, {0: [6]}, [adapter])
    assert len(ours.runner._steps.graphs.keys()) == 4 and device.replays == before + 3


def test_memory_counts_adapters_and_an_unknown_one_fails_the_step(pair, tiny_models, support):
    ours, _, oracle = pair()
    opened, graphs = open_model(tiny_models("llama", **ONE_LAYER)), support("graphs")
    options = RunnerOptions(dtype="float32", block_size=16, device="cpu")
    bare = TensorRunner(opened.spec, opened.weights, options, graphs=graphs.CpuDevice(), ops=graphs.interpreted_ops())
    mixers = [step.mixer for step in oracle.runner._decoder.steps]
    stacks = [linear for mixer in mixers for linear in vars(mixer).values() if isinstance(linear, Adapted)]
    held = sum(stack.a.nbytes + stack.b.nbytes for stack in stacks)  # of the lesser rank as much as of the larger
    assert ours.runner.memory().weights == oracle.runner.memory().weights == bare.memory().weights + held > held > 0
    with pytest.raises(RunnerError, match=r"adapter: expected values in \[-1, 2\), found 2"):
        ours.step({ours.add(): [5, 6]}, adapter=np.array([2], np.int32))
