"""How the CUDA kernels are found, chosen and called; without a GPU."""

from __future__ import annotations

import ctypes
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from toolkit.artifacts.canonical import GroupInt
from toolkit.errors import UsageError
from toolkit.kernels import registry
from toolkit.kernels.cuda import driver
from toolkit.kernels.cuda import linear as cuda
from toolkit.kernels.cuda.plan import LinearArguments, names
from toolkit.kernels.op import Implementation, KernelError, Target
from toolkit.kernels.tolerances import compare
from toolkit.runners.tensor import build
from toolkit.runners.tensor.layers import linear as runner_linear


@pytest.fixture
def host(support, monkeypatch):
    """The registered implementation, run by this process instead of a GPU."""
    machine = support("cuda_host").host()
    monkeypatch.setattr(driver, "machine", lambda device: machine)
    monkeypatch.setattr(driver, "unavailable", lambda capability: None)
    return registry.load()["linear_group_int"].implementations["cuda"]


@pytest.fixture
def fatbin(tmp_path):
    """An installation's fatbin, made by CUDA 13.0."""
    path = tmp_path / "k.fatbin"
    path.write_bytes(b"")
    path.with_suffix(".json").write_text(json.dumps({"cuda": 13000, "architectures": [80, 90]}))
    return path


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("prepared", [False, True])
def test_the_op_equals_its_reference(host, dtype, prepared):
    op, ran = registry.load()["linear_group_int"], []
    run = host
    if prepared:
        scratch: dict = {}

        def through(x, **weight):
            return host.prepare(**weight, scratch=scratch)(x)

        run = Implementation("cuda", through, ("cpu",), op.dtypes)
    for case in op.cases():
        reason = host.unsupported(Target("cuda", dtype, 90, case.traits))
        if reason is None:
            ran.append(case.label)
            assert compare(op, run, case, Target("cpu", dtype, None, case.traits)) is None
        else:
            assert "minima" in reason or "4 or 8 bits" in reason
    others = ["tokens12", "tokens40", "tokens70", "tokens400", "bytes12", "bytes70", "long1", "long9"]
    assert ran == ["zeros4", "zeros8", "order4", *others]


def weight(order: torch.Tensor | None = None, bits: int = 4, minima: bool = False) -> GroupInt:
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 1 << bits, (24, 128), generator=g, dtype=torch.uint8)
    scales = torch.rand(24, 2, generator=g).half() / 16
    zeros = torch.full((24, 2), 7, dtype=torch.uint8)
    return GroupInt(codes, scales, None if minima else zeros, bits, 64, scales if minima else None, order)


@pytest.fixture
def place(monkeypatch):
    """A runner's placement on a GPU that is not there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(registry, "tested", lambda *_: None)
    return runner_linear.Placement(torch.device("cuda"), torch.float16, False)


def bound(w: GroupInt, place):
    """The linear that the runner without graphs makes of ``w``, on CPU tensors."""
    here = runner_linear.Placement(torch.device("cpu"), torch.float16, False)
    constants = runner_linear._bind(w, None, here, type("Ops", (), {"linear_group_int": None})).constants
    return runner_linear.group_linear(w, constants, place, None)


def test_a_runner_packs_the_weights_that_the_kernels_take(host, place):
    order = torch.randperm(128, generator=torch.Generator().manual_seed(1)).int() // 64
    x = torch.randn(3, 128).half()
    made = [bound(w, place) for w in (weight(), weight(order))]
    for w, linear in zip((weight(), weight(order)), made, strict=True):
        assert isinstance(linear, cuda.PackedLinear)
        torch.testing.assert_close(linear(x), (x.float() @ w.dequantize().T).half(), rtol=2e-2, atol=2e-2)
    assert made[0].workspace is made[1].workspace


def test_a_head_in_integers_gives_logits_in_float32(host, place, monkeypatch):
    spec = SimpleNamespace(head="lm_head", head_bias=False, tied=True)
    monkeypatch.setattr(build, "make_linear", lambda weights, biases, place, ops: bound(weights[0], place))
    x, head = torch.randn(3, 128).half(), weight(bits=8)
    builder = build._Builder({"lm_head": head}, place, SimpleNamespace(), (), None, {})
    logits = builder.head(spec, torch.empty(0))(x)
    # Sums of 128 products of up to 16 in another order; logits rounded to float16 would be off by 1e-2.
    torch.testing.assert_close(logits, x.float() @ head.dequantize().T, rtol=1e-5, atol=2e-4)


def test_other_weights_go_to_the_next_kernel(host, place, caplog):
    uneven = torch.zeros(128, dtype=torch.int32)
    uneven[:10] = 1
    triton = registry.load()["linear_group_int"].implementations["triton"].run
    for w in (weight(bits=2), weight(minima=True), weight(uneven)):
        linear = bound(w, place)
        assert isinstance(linear, runner_linear.Bound) and linear.kernel is triton
    bound(weight(bits=2), place)
    bound(weight(), place)
    said = [record.message for record in caplog.records]
    why = "takes weights of 4 or 8 bits, not 2"
    assert len(said) == 3, "each reason once"
    assert said[0] == f"integer weights: the cuda kernel is not used ({why}), triton's runs instead"


def test_a_family_that_is_asked_for_and_cannot_run_is_refused(host, place, monkeypatch):
    monkeypatch.setenv("TOOLKIT_KERNELS", "cuda")
    with pytest.raises(UsageError, match="the cuda implementation cannot run: takes weights of 4 or 8 bits, not 2"):
        bound(weight(bits=2), place)


def test_reasons_name_what_is_missing(fatbin, monkeypatch, tmp_path):
    monkeypatch.setattr(driver, "driver_version", lambda: 13010)
    assert driver.unavailable(90, fatbin) is None and driver.unavailable(None, fatbin) is None
    assert driver.unavailable(75, fatbin) == "needs compute capability 8.0 or newer, this GPU has 7.5"
    assert "installation has no fatbin" in driver.unavailable(90, tmp_path / "absent.fatbin")
    monkeypatch.setattr(driver, "driver_version", lambda: 12080)
    assert driver.unavailable(90, fatbin) == "the driver knows CUDA 12.8, the fatbin needs 13.0: update the driver"
    monkeypatch.setattr(driver, "driver_version", lambda: None)
    assert driver.unavailable(90, fatbin) == "the CUDA driver (libcuda.so.1) does not load"


class FakeDriver:
    """libcuda as far as it is called."""

    def __init__(self, failing: str = ""):
        self.calls: list = []
        self.failing = failing

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, arguments))
            if name == "cuGetErrorString":
                arguments[1]._obj.value = b"no image for this GPU"
            elif name == "cuDeviceGetAttribute":
                arguments[0]._obj.value = 99 * 1024
            elif name == "cuModuleGetFunction":
                arguments[0]._obj.value = len(self.calls)
            elif name == "cuOccupancyMaxActiveBlocksPerMultiprocessor":
                arguments[0]._obj.value = 228 * 1024 // (arguments[3].value + 1024)
            return 209 if name == self.failing else 0

        return call

    def named(self, name):
        return [arguments for found, arguments in self.calls if found == name]


@pytest.fixture
def gpu(monkeypatch, fatbin):
    """A fake driver and the parts of torch.cuda that loading and launching use: a GPU with 99 KiB of shared memory."""
    fake = FakeDriver()
    monkeypatch.setattr(driver, "cuda_driver", lambda: fake)
    monkeypatch.setattr(driver, "FATBIN", fatbin)
    monkeypatch.setattr(driver, "unavailable", lambda capability: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=1234))
    properties = SimpleNamespace(major=8, minor=6, multi_processor_count=84)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    driver.machine.cache_clear()
    yield fake
    driver.machine.cache_clear()


@pytest.mark.parametrize("dependent", [False, True])
def test_a_launch_says_all_to_the_driver(gpu, dependent):
    machine = driver.machine(torch.device("cuda:0"))
    assert (machine.multiprocessors, machine.shared_limit) == (84, 99 * 1024)
    assert (machine.resident["few_float16_w4_s64_n1"], machine.resident["few_float16_w8_s32_n1"]) == (4, 2)
    loaded = len(gpu.calls)
    for _ in range(2):
        arguments = LinearArguments(tokens=3)
        driver.machine(torch.device("cuda:0")).launch("few_float16_w4_s64_n1", (5, 2, 1), arguments, dependent)
    called = [name for name, _ in gpu.calls[loaded:]]
    assert called == ["cuCtxSetCurrent", "cuLaunchKernelEx"] * 2, "nothing is loaded later"
    config, function, pointers, extra = gpu.calls[-1][1]
    config = config._obj
    assert (list(config.grid), list(config.block), config.shared) == ([5, 2, 1], [256, 1, 1], 49152)
    handles = {kernel: handle._obj for handle, _, kernel in gpu.named("cuModuleGetFunction")}
    assert config.stream == 1234 and function is handles[b"few_float16_w4_s64_n1"] and extra is None
    assert LinearArguments.from_address(pointers[0]).tokens == 3
    assert config.count == dependent and config.attributes[0].id == 6 and config.attributes[0].value == 1
    assert ctypes.sizeof(driver._Config) == 56 and ctypes.sizeof(driver._Attribute) == 72


def test_dependent_launches_are_for_gpus_that_have_them_unless_someone_says_no(gpu, monkeypatch):
    assert not driver.machine(torch.device("cuda:0")).dependent
    every = (80, 86, 89, 90, 100, 120)
    have = {c: driver.dependent_launches(c, every) for c in (80, 89, 90, 100, 103, 120, 121)}
    assert have == {80: False, 89: False} | dict.fromkeys((90, 100, 103, 120, 121), True)
    monkeypatch.setenv(driver.DEPENDENT, "0")
    assert not driver.dependent_launches(90, every)
    monkeypatch.setenv(driver.DEPENDENT, "yes")
    with pytest.raises(KernelError, match="TOOLKIT_DEPENDENT_LAUNCH: expected 0 or 1, found 'yes'"):
        driver.dependent_launches(90, every)


@pytest.mark.parametrize("capability, built", [(100, [80, 90]), (90, [100, 120]), (120, [90, 100])])
def test_kernels_that_the_driver_compiles_are_not_launched_early(capability, built, monkeypatch):
    """Their PTX is that of compute capability 8.0, which has no instruction that waits for the kernel before."""
    monkeypatch.setenv(driver.DEPENDENT, "1")
    assert not driver.dependent_launches(capability, built)


def test_kernels_that_do_not_fit_the_gpu_are_not_loaded(gpu):
    driver.machine(torch.device("cuda:0"))
    loaded = {kernel.decode() for _, _, kernel in gpu.named("cuModuleGetFunction")}
    assert "tile_float16_w8_s64_n4" in loaded and "tile_float16_w8_s64_n16" not in loaded
    assert all(size <= 99 * 1024 for _, _, size in gpu.named("cuFuncSetAttribute"))
    assert loaded < set(names())


def test_the_drivers_errors_are_told(gpu):
    gpu.failing = "cuModuleLoadData"
    with pytest.raises(KernelError, match=r"cuModuleLoadData: no image for this GPU \(CUDA error 209\)"):
        driver.machine(torch.device("cuda:0"))
