"""When the runner for GPUs is chosen, what is said where it is not, and weights that nobody trained."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from toolkit.errors import UsageError
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
