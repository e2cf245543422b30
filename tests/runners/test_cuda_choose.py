"""When the runner for GPUs is chosen, what is said where it is not, and weights that nobody trained."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from toolkit.errors import ToolkitError, UsageError
from toolkit.runners import choose
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_model, open_runner
from toolkit.runners.cuda import support as module


@pytest.fixture
def gpu(monkeypatch):
    """``gpu(capability=…, count=…)``: torch sees such GPUs; kernels pass their self-test, but those in ``failing``."""

    def pretend(capability=(9, 0), count=1, failing=()):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA Something")
        tested = lambda op, implementation, target: "failed its self-test: x" if op.name in failing else None  # noqa: E731
        monkeypatch.setattr(module.registry, "tested", tested)

    return pretend


def _reason(tiny_models, family="llama", model=None, **options):
    opened = open_model(tiny_models(family, **(model or {})))
    return module.unsupported(opened.spec, opened.weights, RunnerOptions(**({"device": "cuda"} | options)))


def test_a_gpu_that_runs_everything_gives_no_reason(gpu, tiny_models):
    gpu()
    assert _reason(tiny_models) is None and _reason(tiny_models, device="auto", quant_policy=4) is None


@pytest.mark.parametrize(
    "setting, options, said",
    [
        ({"capability": (7, 5)}, {}, "needs compute capability 8.0 or newer, NVIDIA Something has 7.5"),
        ({}, {"device": "cuda:3"}, "there are 1 GPUs, counted from 0"),
        ({"failing": ("rope_kv_write",)}, {}, "its rope_kv_write kernel failed its self-test: x"),
        ({"failing": ("paged_attention",)}, {}, "its paged_attention kernel failed its self-test: x"),
    ],
)
def test_what_is_missing_is_said_in_one_line(setting, options, said, gpu, tiny_models):
    gpu(**setting)
    reason = _reason(tiny_models, **options)
    assert said in reason and "\n" not in reason


def test_heads_that_no_kernel_takes_are_named(gpu, tiny_models):
    gpu()
    assert "head_dim" in _reason(tiny_models, model={"head_dim": 20})


def test_no_gpu_is_told_from_a_torch_without_cuda(monkeypatch, tiny_models):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in _reason(tiny_models)

    def too_old():
        raise RuntimeError("The NVIDIA driver on your system is too old\nmore")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", too_old)
    reason = "torch cannot use a GPU here (The NVIDIA driver on your system is too old)"
    assert _reason(tiny_models) == reason
    with pytest.raises(UsageError) as caught:
        open_runner(tiny_models("llama"), backend="pytorch", options=RunnerOptions(device="cuda"))
    assert str(caught.value) == f"device: 'cuda' asked for, but {reason}; use cpu or auto"


def test_a_device_that_is_none_is_refused_beside_a_gpu_too(gpu, tiny_models):
    gpu()
    with pytest.raises(UsageError, match="expected auto, cpu, cuda or cuda:N, found 'cuda:one'"):
        open_runner(tiny_models("llama"), backend=None, options=RunnerOptions(device="cuda:one"))


@pytest.fixture
def answers(monkeypatch):
    """``answers(reason on the GPU, likely)``: runners are mere records of their name."""
    from toolkit.runners.cuda import runner as cuda_runner
    from toolkit.runners.native import runner as native_runner

    def set_up(reason, likely=True):
        record = lambda name: lambda spec, weights, options: SimpleNamespace(name=name, notes=["a note"])  # noqa: E731
        monkeypatch.setattr(choose, "gpu_is_likely", lambda: likely)
        monkeypatch.setattr(choose, "cuda_unsupported", lambda opened, options: reason)
        monkeypatch.setattr(choose, "native_unsupported", lambda opened, options: None)
        monkeypatch.setattr(cuda_runner, "CudaRunner", record("gpu"))
        monkeypatch.setattr(native_runner, "NativeRunner", record("cpu"))

    return set_up


@pytest.mark.parametrize(
    "device, reason, likely, name, said",
    [
        ("cuda", None, False, "gpu", "a note"),
        ("auto", None, True, "gpu", "a note"),
        ("auto", None, False, "cpu", ""),
        ("cpu", None, True, "cpu", ""),
        ("auto", "the driver is too old", True, "cpu", "the GPU is not used: the driver is too old; the CPU runs"),
    ],
)
def test_the_gpu_runs_what_it_can(device, reason, likely, name, said, answers, tiny_models):
    answers(reason, likely)
    runner, note = open_runner(tiny_models("llama"), backend=None, options=RunnerOptions(device=device))
    assert runner.name == name and note.startswith(said) and bool(note) == bool(said)


def test_torch_stands_in_on_a_gpu_that_the_native_runner_cannot_use(answers, tiny_models, monkeypatch):
    answers("it needs compute capability 8.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("toolkit.runners.torch.runner.TorchRunner", lambda *a: SimpleNamespace(name="torch", notes=[]))
    _, note = open_runner(tiny_models("llama"), backend=None, options=RunnerOptions(device="auto"))
    reason = "it needs compute capability 8.0"
    assert note == f"turbomind's native runner does not run on this GPU: {reason}; the torch runner stands in"


# -- --load-format dummy


def _config(tiny_models, folder, **fields):
    config = json.loads((tiny_models("llama") / "config.json").read_text())
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


@pytest.mark.parametrize(
    "quantization",
    [
        None,
        {"quant_method": "awq", "bits": 4, "group_size": 32},
        {"quant_method": "gptq", "bits": 8, "group_size": -1},
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        {"quant_method": "smooth_quant"},
    ],
)
def test_dummy_weights_run_a_model_that_was_not_fetched(quantization, tiny_models, tmp_path, steps):
    fields = {} if quantization is None else {"quantization_config": quantization}
    path = _config(tiny_models, tmp_path / "shape", **fields)
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16)
    logits = []
    for _ in range(2):
        runner, _ = open_runner(path, backend="pytorch", options=options, load_format="dummy")
        driver = steps.Driver(runner)
        logits.append(driver.step({driver.add(): [3, 4, 5]}, "all").logits)
    assert (logits[0] == logits[1]).all() and 0.1 < logits[0].std() < 10


def test_dummy_weights_want_a_config_they_can_follow(tiny_models, tmp_path):
    with pytest.raises(UsageError, match=r"expected a directory with config\.json"):
        open_model(tmp_path / "nothing", load_format="dummy")
    with pytest.raises(ToolkitError, match="not 'hqq'"):
        open_model(
            _config(tiny_models, tmp_path / "a", quantization_config={"quant_method": "hqq"}), load_format="dummy"
        )
    with pytest.raises(UsageError, match="expected one of auto, dummy"):
        open_model(tiny_models("llama"), load_format="fast")
    awq = {"quant_method": "awq", "bits": 4, "group_size": 48}
    opened = open_model(_config(tiny_models, tmp_path / "b", quantization_config=awq), load_format="dummy")
    with pytest.raises(ToolkitError, match="48 does not divide 64"):
        opened.weights()["model.layers.0.self_attn.q_proj"]


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ("awq", "quantization_config: expected an object, found 'awq'"),
        ({"quant_method": ["awq"]}, "not ['awq']"),
        ({"quant_method": "awq", "w_bit": "four"}, "quantization_config.w_bit: found four"),
        ({"quant_method": "gptq", "bits": 9}, "quantization_config.bits: found 9"),
        ({"quant_method": "gptq", "group_size": 0}, "quantization_config.group_size: found 0"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "quantization_config.weight_block_size: found [128]"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "quantization_config.weight_block_size: found 128"),
    ],
)
def test_a_quantization_that_cannot_be_followed_is_one_line(quantization, words, tiny_models, tmp_path):
    path = _config(tiny_models, tmp_path / "shape", quantization_config=quantization)
    with pytest.raises(ToolkitError) as caught:
        open_model(path, load_format="dummy")
    message = str(caught.value)
    assert words in message and str(path / "config.json") in message and "\n" not in message


def test_dummy_weights_of_a_config_in_float8_are_bfloat16(tiny_models, tmp_path):
    path = _config(tiny_models, tmp_path / "shape", dtype="float8_e4m3fn", torch_dtype=None)
    weights = open_model(path, load_format="dummy").weights()
    assert weights["model.embed_tokens"].weight.dtype == torch.bfloat16


def test_the_flag_reaches_the_engine(tiny_models, tmp_path):
    from toolkit.engine.setup import find, start
    from toolkit.engine_configs import PytorchEngineConfig

    path = _config(tiny_models, tmp_path / "shape")
    config = PytorchEngineConfig(load_format="dummy", device_type="cpu", session_len=64, max_batch_size=2)
    core, facts = start(find(str(path), config, "pytorch"), None, lambda text: None)
    assert facts.runner == "torch" and facts.plan.session_len == 64
    core.runner.close()
    with pytest.raises(UsageError, match="load_format"):
        PytorchEngineConfig(load_format="fast")
