"""When the runner with graphs is chosen, what is said where it is not, and weights that nobody trained."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from toolkit.artifacts.canonical import ChannelInt8, Dense, Fp8
from toolkit.errors import UsageError
from toolkit.kernels import KernelError
from toolkit.runners import choose
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_model, open_runner
from toolkit.runners.tensor import support as module
from toolkit.runners.tensor.devices import find as device_module
from toolkit.runners.tensor.ops import choose_ops
from toolkit.runners.tensor.runner import TensorRunner


@pytest.fixture
def gpu(monkeypatch):
    """``gpu(*capabilities, failing=…)``: torch sees such GPUs; kernels pass their self-test, but those in ``failing``.

    Returns a list of (current device, capability) that self-tests ran with.
    """

    def pretend(*capabilities, failing=()):
        found, current, ran = capabilities or ((9, 0),), [0], []

        @contextmanager
        def device(which):
            current.append(torch.device(which).index)
            yield
            current.pop()

        def at(device=None):
            return 0 if device is None else device if isinstance(device, int) else torch.device(device).index or 0

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
        monkeypatch.setattr(torch.cuda, "device", device)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: found[at(device)])
        names = {(7, 5): "NVIDIA T4", (8, 0): "NVIDIA A100", (9, 0): "NVIDIA H200"}
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: names[found[at(device)]])

        def tested(op, implementation, target):
            ran.append((current[-1], target.capability))
            return "failed its self-test: x" if op.name in failing else None

        monkeypatch.setattr(module.registry, "tested", tested)
        return ran

    return pretend


def _reason(tiny_models, family="llama", model=None, **options):
    opened = open_model(tiny_models(family, **(model or {})))
    return module.unsupported(opened.spec, opened.weights, RunnerOptions(**({"device": "cuda"} | options)))


def test_a_gpu_that_runs_everything_gives_no_reason(gpu, tiny_models):
    gpu()
    assert _reason(tiny_models) is None and _reason(tiny_models, device="auto", quant_policy=4) is None
    for family in ("minicpm3", "lfm2", "mamba2", "qwen3_next"):  # with latent rows, with states
        assert _reason(tiny_models, family) is None


@pytest.mark.parametrize(
    "setting, options, said",
    [
        ([(7, 5)], {}, "needs compute capability 8.0 or newer, NVIDIA T4 has 7.5"),
        ([(7, 5), (9, 0)], {}, "NVIDIA T4 has 7.5 (but cuda:1 would do: --device)"),
        ([(9, 0)], {"device": "cuda:3"}, "there are 1 GPUs, counted from 0 (CUDA_VISIBLE_DEVICES='2')"),
        ("rope_kv_write", {}, "its rope_kv_write kernel failed its self-test: x"),
        ("paged_attention", {}, "its paged_attention kernel failed its self-test: x"),
        ("latent_write", {"family": "minicpm3"}, "its latent_write kernel failed its self-test: x"),
    ],
)
def test_what_is_missing_is_said_in_one_line(setting, options, said, gpu, tiny_models, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    if isinstance(setting, str):
        gpu(failing=(setting,))
    else:
        gpu(*setting)
    reason = _reason(tiny_models, **options)
    assert said in reason and "\n" not in reason


def test_experts_that_run_one_by_one_are_left_to_pytorch(gpu, tiny_models):
    gpu()
    opened = open_model(tiny_models("mixtral"))
    assert _reason(tiny_models, "mixtral") is None

    def without_gate(sub):
        if sub.mixer.kind != "moe":
            return sub
        return replace(sub, mixer=replace(sub.mixer, experts=tuple(replace(e, gate=None) for e in sub.mixer.experts)))

    layers = tuple(replace(layer, sublayers=tuple(map(without_gate, layer.sublayers))) for layer in opened.spec.layers)
    reason = module.unsupported(replace(opened.spec, layers=layers), opened.weights, RunnerOptions(device="cuda"))
    assert reason == "a captured step waits for nothing, as experts without a gate do for the router"


def test_kernels_are_tried_on_the_gpu_that_is_to_run_them(gpu, tiny_models):
    ran = gpu((8, 0), (9, 0))
    assert _reason(tiny_models, device="cuda:1") is None
    assert ran and set(ran) == {(1, 90)}


@pytest.mark.parametrize(
    "capabilities, asked, index, said",
    [
        (
            [(8, 0), (9, 0), (8, 0)],
            "cuda",
            0,
            "cuda:0 (NVIDIA A100, compute capability 8.0) runs the model, not cuda:1 (",
        ),
        ([(8, 0), (9, 0)], "cuda:1", 1, None),  # somebody chose
        ([(8, 0), (8, 0)], "auto", 0, None),
    ],
)
def test_gpus_of_several_kinds_are_told_apart(capabilities, asked, index, said, gpu):
    gpu(*capabilities)
    notes = device_module.mixed_gpus(asked, torch.device("cuda", index))
    assert len(notes) == (said is not None) and all(n.startswith(said) and "A100), cuda:2" not in n for n in notes)
    assert device_module.mixed_gpus(asked, torch.device("cpu")) == []


@pytest.mark.parametrize(
    "target, said",
    [
        ("cuda-sm90", "weights packed for cuda-sm90 run on this GPU of compute capability 8.0: both are packed alike"),
        ("cuda-sm80", None),
        ("cpu", "weights packed for cpu are unpacked for this GPU: `tool convert --target cuda-sm80` loads faster"),
        ("torch", None),
        (None, None),
    ],
)
def test_artifacts_of_other_targets_run_with_a_notice(target, said, gpu):
    gpu((8, 0))
    assert choose._packed_elsewhere(target, "cuda:0") == (said or "")


def test_heads_that_no_kernel_takes_are_named(gpu, tiny_models):
    gpu()
    assert "head_dim" in _reason(tiny_models, model={"head_dim": 20})
    wide = _reason(tiny_models, "minicpm3", model={"kv_lora_rank": 1024})
    assert "paged_attention kernel takes latent rows of up to 576 numbers" in wide


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
    with pytest.raises(UsageError, match=r"expected auto, cpu, cuda or cuda:N, or .* found 'cuda:one'"):
        open_runner(tiny_models("llama"), backend=None, options=RunnerOptions(device="cuda:one"))
    with pytest.raises(UsageError, match="'cuda:3' asked for, but there are 1 GPUs, counted from 0"):
        open_runner(tiny_models("llama"), backend="pytorch", options=RunnerOptions(device="cuda:3"))


@pytest.fixture
def answers(monkeypatch):
    """``answers(reason on the GPU, likely)``: runners are mere records of what they are and were given."""
    from toolkit.runners.native import runner as native_runner
    from toolkit.runners.tensor import runner as tensor_runner
    from toolkit.runners.tensor.devices import cuda_device

    def tensor(spec, weights, options, adapters, *, graphs=None):
        return SimpleNamespace(name="kernels" if graphs is None else "graphs", device=graphs, adapters=adapters)

    def native(spec, weights, options, changes):
        return SimpleNamespace(name="native")

    def set_up(reason, likely=True):
        monkeypatch.setattr(choose, "gpu_is_likely", lambda: likely)
        monkeypatch.setattr(choose, "cuda_unsupported", lambda opened, options: reason)
        monkeypatch.setattr(choose, "native_unsupported", lambda opened, options: None)
        monkeypatch.setattr(device_module, "find_device", lambda name: "cuda:0")
        monkeypatch.setattr(cuda_device, "CudaDevice", lambda device: device)
        monkeypatch.setattr(tensor_runner, "TensorRunner", tensor)
        monkeypatch.setattr(native_runner, "NativeRunner", native)

    return set_up


@pytest.mark.parametrize(
    "device, reason, likely, name, said",
    [
        ("cuda", None, False, "graphs", ""),
        ("auto", None, True, "graphs", ""),
        ("auto", None, False, "native", ""),
        ("cpu", None, True, "native", ""),
        ("auto", "the driver is too old", True, "native", "the GPU is not used: the driver is too old; the CPU runs"),
    ],
)
def test_the_gpu_runs_what_it_can(device, reason, likely, name, said, answers, tiny_models):
    answers(reason, likely)
    runner, note = open_runner(tiny_models("llama"), backend=None, options=RunnerOptions(device=device))
    assert runner.name == name and note.startswith(said) and bool(note) == bool(said)


def test_adapters_run_with_graphs_on_the_gpu_and_natively_on_the_cpu(answers, tiny_models, monkeypatch):
    answers(None)
    monkeypatch.setattr("toolkit.artifacts.adapters.adapter.read_adapter", lambda path, spec, stored: path.name)
    options = RunnerOptions(device="cuda", adapters=(("a", "x"),))
    runner, _ = open_runner(tiny_models("llama"), backend=None, options=options)
    assert (runner.name, runner.adapters) == ("graphs", ["x"])
    runner, note = open_runner(tiny_models("llama"), backend=None, options=replace(options, device="cpu"))
    assert (runner.name, note) == ("native", "")
    options = replace(options, device="cpu")
    runner, _ = open_runner(tiny_models("llama"), backend="pytorch", options=options)
    assert (runner.name, runner.adapters) == ("kernels", ["x"])


def test_pytorch_stands_in_on_a_gpu_that_turbomind_cannot_use(answers, tiny_models, monkeypatch):
    answers("it needs compute capability 8.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    runner, note = open_runner(tiny_models("llama"), backend=None, options=RunnerOptions(device="auto"))
    assert runner.name == "kernels"
    assert note == "turbomind does not run on this GPU: it needs compute capability 8.0; pytorch stands in"


def test_most_kernels_are_tried_before_their_first_call(gpu, monkeypatch):
    """Trying a kernel compiles it; a model without experts or fp4 weights never asks for theirs."""
    gpu()
    tried: list[str] = []

    def tested(op, implementation, target):
        tried.append(op.name)
        return "failed its self-test: x" if op.name == "rms_norm" else None

    monkeypatch.setattr(module.registry, "tested", tested)
    ops = choose_ops(torch.device("cuda"), torch.float32, head_dim=64)
    assert "paged_attention" in tried and not {"rms_norm", "moe_experts_int8", "linear_fp4"} & set(tried)
    x, weight = torch.randn(3, 8), torch.randn(8)
    for _ in range(2):  # the compiled one fails, so torch's runs; it is tried once
        torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6), torch.nn.functional.rms_norm(x, (8,), weight, 1e-6))
    assert tried.count("rms_norm") == 1 and "moe_experts_int8" not in tried


def _device(name):
    return SimpleNamespace(torch=torch.device(name), dense=False, reserved=0, memory=lambda: (8 << 30, 16 << 30))


def test_kept_blocks_are_told_by_the_gpu_that_computes_them(gpu, tiny_models):
    gpu((8, 0), (9, 0))
    opened, options = open_model(tiny_models("llama")), RunnerOptions(device="cuda:1", dtype="float16")
    layout = TensorRunner(opened.spec, opened.weights, options, graphs=_device("cuda:1")).layout
    assert "H200" in layout and "A100" not in layout


@pytest.mark.parametrize("form, said", [(Dense, None), (ChannelInt8, None), (Fp8, "_quant: .* capability 8.9")])
def test_batch_invariant_asks_for_the_kernels_that_the_model_calls(form, said, gpu, tiny_models):
    """GPUs before compute capability 8.9 have none that round to float8 with rows that are alike."""
    gpu((8, 0))
    opened = open_model(tiny_models("llama"))
    stored = dict(opened.weights())
    for linear in opened.spec.linears():
        whole = stored[linear.name].dequantize(torch.float32)
        codes = torch.float8_e4m3fn if form is Fp8 else torch.int8
        stored[linear.name] = Dense(whole) if form is Dense else form(whole.to(codes), torch.ones(len(whole)))
    device, options = _device("cuda"), RunnerOptions(device="cuda", dtype="float16", batch_invariant=True)
    if said is not None:
        with pytest.raises(UsageError, match=said):
            TensorRunner(opened.spec, lambda: stored, options, graphs=device)
        return
    ops = TensorRunner(opened.spec, lambda: stored, options, graphs=device)._ops
    with pytest.raises(KernelError, match=r"^moe_experts_fp8: .* capability 8\.9"):
        ops.moe_experts_fp8()
