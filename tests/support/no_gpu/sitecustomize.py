"""Python reads this as it starts, where a test has put this folder on its path: torch then sees an H100, whose memory
is the host's.

So scripts for GPUs are rehearsed with the commands, processes and files of a GPU's machine: a moved path or a module
that is missing fails here and costs no minutes there. Numbers are right as well: Triton's kernels run in its
interpreter, the CUDA kernels in their host build, a captured graph is recorded and done again. What takes long is
small: models, shapes, and of alike items there is one.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SUPPORT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(SUPPORT.parents[1] / "scripts" / "testing"))
from after_import import AfterImport  # noqa: E402

del sys.path[0]
capturing: list[Any] = []  # recorders of graphs
NAME, CAPABILITY, FREE, TOTAL = "NVIDIA H100 80GB HBM3", (9, 0), 8 << 30, 79 << 30


def of_tests(name: str) -> Any:
    """``tests/support/NAME.py``, without a path that a script might have forgotten."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(f"no_gpu_{name}", SUPPORT / f"{name}.py")
    assert spec is not None and spec.loader is not None
    if spec.name not in sys.modules:
        sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[spec.name])
    return sys.modules[spec.name]


def torch_with_a_gpu(torch: Any) -> None:
    """Its GPU is the CPU: whatever names a device "cuda" gets the host's."""
    from torch.overrides import TorchFunctionMode

    def host(x: Any) -> Any:
        named = x.type if isinstance(x, torch.device) else x.partition(":")[0] if isinstance(x, str) else ""
        return torch.device("cpu") if named == "cuda" else x

    class OnHost(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.device:  # a name alone
                return func(*args, **(kwargs or {}))
            kwargs = {name: host(x) for name, x in (kwargs or {}).items()}
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            if func is torch.Tensor.cuda:
                return args[0]
            return func(*map(host, args), **kwargs)

    class Generator(torch.Generator):  # type: ignore[misc,name-defined]
        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, device=host(device))

    run = threading.Thread.run

    def run_on_host(thread: threading.Thread) -> None:
        with OnHost():
            run(thread)

    threading.Thread.run = run_on_host  # type: ignore[method-assign]
    torch.Generator = Generator
    OnHost().__enter__()
    torch.version.cuda = "13.0"
    torch.Tensor.is_cuda = True
    cuda = torch.cuda
    known = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": NAME,
        "get_device_capability": CAPABILITY,
        "mem_get_info": (FREE, TOTAL),
        "current_stream": SimpleNamespace(cuda_stream=0, synchronize=lambda: None, wait_stream=lambda other: None),
        "get_device_properties": SimpleNamespace(
            name=NAME, major=9, minor=0, multi_processor_count=132, total_memory=TOTAL, L2_cache_size=50 << 20
        ),
        "graph_pool_handle": object(),
        "is_bf16_supported": True,
        **dict.fromkeys(("synchronize", "empty_cache", "init", "set_device")),
    }
    for name, value in known.items():
        setattr(cuda, name, lambda *_, value=value, **__: value)
    cuda.Stream, cuda.Event, cuda.CUDAGraph, cuda.device, cuda.stream = Stream, Event, Graph, Inside, Inside
    cuda.graph = captured


class Inside(ExitStack):
    """Of a device or a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class Stream:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.synchronize = self.wait_stream = self.wait_event = lambda *_: None


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.record = self.synchronize = self.wait = lambda *_: None

    def elapsed_time(self, other: Any) -> float:
        return 1.0

    def query(self) -> bool:
        return True


class Graph:
    """Recorded and replayed as in ``graphs.py``."""

    def __init__(self) -> None:
        self._on, self._open = of_tests("graphs").CpuDevice(), ExitStack()

    def capture_begin(self, *_: Any, **__: Any) -> None:
        self._on._recorder = of_tests("graphs").Recorder()
        capturing.append(self._on._recorder)
        self._open.enter_context(self._on._kernels())
        self._open.enter_context(self._on._recorder)

    def capture_end(self) -> None:
        self._open.close()
        recorder, self._on._recorder = capturing.pop(), None
        recorder.restore()
        self._recorder = recorder

    def replay(self) -> None:
        self._on._replay(self._recorder)


@contextmanager
def captured(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
    graph.capture_begin()
    yield
    graph.capture_end()


def triton_interpreted(triton: Any) -> None:
    if "TRITON_INTERPRET" in os.environ:
        triton.knobs.runtime.interpret = True  # whatever the environment says later


def cuda_driver(driver: Any) -> None:
    """The CUDA kernels by g++, for this processor."""
    import functools

    from toolkit.kernels.cuda.build import sources

    @functools.cache
    def machine(device: Any) -> Any:
        host = of_tests("cuda_host").host(multiprocessors=132, dependent=True)

        def launch(kernel: str, grid: Any, arguments: Any, dependent: bool) -> None:
            host.launch(kernel, grid, arguments, dependent)
            if capturing:
                kept = type(arguments).from_buffer_copy(arguments)
                again = functools.partial(host.launch, kernel, grid, kept, dependent)
                capturing[-1].calls.append(of_tests("graphs").Call(again, (), {}, None))

        return replace(host, launch=launch)

    note = {"cuda": 13000, "architectures": [90], "sources": sources()}
    driver.machine, driver.fatbin_note = machine, lambda path: note
    driver.unavailable = lambda capability, path=None: None


QUICK = {"--op": "rms_norm", "--linears": "4,float16,ahead", "--manifest": "kv_write"}  # of their kinds


def kinds(items: Any) -> None:
    """One item of each kind."""
    whole = items.items

    def some(*arguments: Any) -> Any:
        found: dict[str, Any] = {}
        for item in whole(*arguments):
            kind = next((a for a in item.arguments if a.startswith("--")), "compile")
            if QUICK.get(kind, item.arguments[-1]) in item.arguments:
                found.setdefault(kind, replace(item, silence=item.limit))  # the host compiles nothing, and is slow
        return list(found.values())

    items.items = some


def small_models(models: Any) -> None:
    models.WIDE |= {"wide": models.TINY["llama"], "wide awq": models.TINY["awq"]}
    models.CONFIGS |= models.WIDE


def short_drive(runner: Any) -> None:
    """Prompts, a step that is captured and one that is a replay."""
    drive = runner.drive
    runner.drive = lambda *arguments: islice(drive(*arguments), 5)


def few_answers(alike: Any) -> None:
    alike.LENGTHS, alike.NEW = alike.TRIED


def few_calls(manifest: Any) -> None:
    calls = manifest.calls
    manifest.calls = lambda: [next(call for call in calls() if call.op == "kv_write")]


def small_engine(engine: Any) -> None:
    engine.CASES = (replace(engine.TINY[0], loads=engine.TINY[0].loads[:1]),)


def small_kernels(kernels: Any) -> None:
    kernels.Size, kernels.seconds = lambda: kernels.TINY, run_once
    kernels.SAMPLED = (2,)


def run_once(runs: Any, device: str) -> float:
    runs[0]()
    return 1e-5


def one_choice(tune: Any) -> None:
    candidates = tune.candidates
    tune.candidates = lambda *arguments: candidates(*arguments)[:1]
    write = tune.write
    tune.write = lambda best, device: write(best, device, Path(os.environ["TOOLKIT_NO_GPU_TUNED"]))


def small_linears(linears: Any) -> None:
    linears.SERVED = linears.SANITIZED = linears.TINY
    linears.AHEAD = linears.TINY_AHEAD


def gloo(links: Any) -> None:
    links.NCCL = links.GLOO
    links.dist.is_nccl_available = lambda: True


def trusted(registry: Any) -> None:
    """No kernel is tried on cases of its own before a model uses it."""
    registry.tested = lambda *_: None


def cold(runner: Any) -> None:
    """Nothing is run before it is asked for."""
    runner.TensorRunner.warm_up = lambda *_: None


def few_launches(launches: Any) -> None:
    """Of those that are compiled beforehand."""
    of_tuning = launches.of_tuning
    launches.of_kernels, launches.of_tuning = lambda capability: [], lambda capability: of_tuning(capability)[:1]


CHANGED: dict[str, Callable[[Any], None]] = {
    "torch": torch_with_a_gpu,
    "triton": triton_interpreted,
    "toolkit.kernels.cuda.driver": cuda_driver,
    "gpu.models": small_models,
    "gpu.measuring.engine": small_engine,
    "gpu.measuring.kernels": small_kernels,
    "gpu.measuring.tune": one_choice,
    "gpu.checking.linears": small_linears,
    "gpu.checking.manifest": few_calls,
    "gpu.checking.runner": short_drive,
    "gpu.checking.alike": few_answers,
    "toolkit.kernels.registry": trusted,
    "toolkit.parallel.links": gloo,
    "toolkit.runners.tensor.runner": cold,
    "gpu.checking.items": kinds,
    "gpu.compiling.launches": few_launches,
}


if any(argument.endswith("precompile.py") for argument in sys.orig_argv):
    os.environ.pop("TRITON_INTERPRET", None)
else:
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("PYTEST_ADDOPTS", "-k output_arrays")
sys.meta_path.insert(0, AfterImport(CHANGED))
