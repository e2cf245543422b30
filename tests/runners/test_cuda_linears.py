"""The CUDA kernels inside the runner with graphs, on a CPU: built by g++ and run lane by lane, kernel by kernel."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from toolkit.kernels.cuda.linear import PackedLinear, prepare
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_model, open_runner
from toolkit.runners.tensor.layers import linear as linears
from toolkit.runners.tensor.runner import TensorRunner

SCHEME = {"quant_method": "gptq", "bits": 4, "group_size": 64, "lm_head": True}
HEAD = {"+:^lm_head$": {"bits": 8}}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_in_4_bits_and_a_head_in_8_give_the_torch_runners_logits(
    dtype, tiny_models, tmp_path, support, steps, monkeypatch
):
    """Prompts go through ``tile``, decode steps through ``few``."""
    config = json.loads((tiny_models("llama") / "config.json").read_text())
    config |= {"quantization_config": SCHEME | {"dynamic": HEAD}, "num_hidden_layers": 1, "dtype": dtype}
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened, graphs, ran = open_model(tmp_path, load_format="dummy"), support("graphs"), []
    machine = support("cuda_host").host(log=ran)

    def packed(weight, constants, place, ops):
        return prepare(*constants, scratch=place.scratch, machine=machine)

    options, device = RunnerOptions(device="cpu", dtype=dtype, block_size=16), graphs.CpuDevice()
    oracle = steps.Driver(open_runner(tmp_path, backend="pytorch", options=options, load_format="dummy")[0])
    monkeypatch.setattr(linears, "group_linear", packed)
    runner = TensorRunner(opened.spec, opened.weights, options, graphs=device, ops=graphs.interpreted_ops())
    device.fail_captures = 99  # launches through ctypes are not recorded
    ours = steps.Driver(device.watch(runner))
    head = runner._decoder.head
    assert isinstance(head, PackedLinear) and head.wide and head.weight.bits == 8
    ours.add(), oracle.add()
    for ids in (list(range(3, 23)), [12]):
        found, expected = (d.step({0: ids}, "all").logits for d in (ours, oracle))
        assert found.dtype == np.float32 and not np.array_equal(
            found, torch.from_numpy(found).to(torch.float16).float()
        )
        np.testing.assert_allclose(found, expected, atol=0.02 * abs(expected).max())
    kinds = {tuple(name.split("_")[::2]) for name, _ in ran}
    assert {("few", "w4", "n1"), ("few", "w8", "n1"), ("tile", "w4", "n4"), ("tile", "w8", "n4")} <= kinds
