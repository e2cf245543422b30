"""Fixtures for every test folder. Shared modules live in ``tests/support`` and are loaded by path: tests are run with
``--import-mode=importlib`` and are not a package."""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.util
import locale
import os
import re
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from time import monotonic  # tests may put a clock of theirs in its module
from types import ModuleType
from typing import Any

# The repository root must never be importable: transformers would take our folder `kernels` for a package it probes.
_ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [p for p in sys.path if Path(p or os.getcwd()).resolve() != _ROOT]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models lose more than they gain by threads
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TOOLKIT_PACK_CACHE", "0")  # never the developer's own; its tests set a home of theirs
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported: tests run its kernels on CPU tensors
os.environ.update(LC_ALL="C.UTF-8", PYTHONUTF8="1")  # tests and what they start speak UTF-8 in any locale
locale.setlocale(locale.LC_ALL, "C.UTF-8")
os.environ.pop("TERMINAL_WIDTH", None)  # goes before the width that a test gives, for typer as it is imported
# A job in the background may run with SIGINT ignored, and what it starts would inherit that: tests interrupt programs.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What tests write need not outlive a loss of power, and waiting for the disk takes a share of their time.
os.fsync = os.fdatasync = os.fstat  # type: ignore[assignment]  # which still wants an open file

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from toolkit.models.registry import names as registry_names  # noqa: E402

# The same examples in every run, and no limit of time for any: a slow machine is no fault. fuzz looks further.
settings.register_profile("suite", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

BEGUN = monotonic()
# What differs in the executors and stages: tests of those run on these, and `every_family` ones on the whole registry.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "internlm2", "gemma2", "phi3", "mixtral", "qwen3_moe")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """An argument ``family`` that the test does not parametrize itself: each of FAMILIES, or of the registry."""
    own: set[str] = set()
    for mark in metafunc.definition.iter_markers("parametrize"):
        own.update(re.split(r"[, ]+", mark.args[0]) if isinstance(mark.args[0], str) else mark.args[0])
    if "family" in metafunc.fixturenames and "family" not in own:
        every = metafunc.definition.get_closest_marker("every_family") is not None
        metafunc.parametrize("family", registry_names() if every else FAMILIES, scope="module")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is imported and collected stays: Python's collector need not go through those millions of objects again in
    every test that makes some of its own."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """With TOOLKIT_TEST_SECONDS (``scripts/test --fast``) no test begins once so many seconds are over."""
    most = float(os.environ.get("TOOLKIT_TEST_SECONDS", "inf"))
    if nextitem is not None and monotonic() - BEGUN > most:
        item.session.shouldstop = f"{most:.0f} seconds are over; what is left: without --fast"


def pytest_unconfigure() -> None:
    """Else what was frozen outlives Triton's bindings, which then name at length all that they leaked."""
    gc.unfreeze()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """That the time was over is no failure: a push goes on."""
    if isinstance(session.shouldstop, str) and session.shouldstop.endswith("--fast") and not session.testsfailed:
        session.exitstatus = pytest.ExitCode.OK


def load(name: str, file: Path) -> ModuleType:
    """The Python in ``file`` as a module that is called ``name``."""
    spec = importlib.util.spec_from_loader(name, importlib.machinery.SourceFileLoader(name, str(file)))
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_support(name: str, folder: str = "support") -> ModuleType:
    """The module ``tests/<folder>/<name>.py``, loaded once."""
    full = f"toolkit_test_{folder}_{name}"
    return sys.modules.get(full) or load(full, Path(__file__).parent / folder / f"{name}.py")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """torch's random numbers, the same in every run, whichever tests ran before."""
    import torch

    torch.manual_seed(0)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``tiny_models(family, **overrides) -> Path``: cached tiny checkpoints (see tests/support/tiny.py)."""
    return load_support("tiny").TinyModels(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Any:
    """``tiny_checkpoint(family, path, **overrides) -> Path``: a fresh tiny checkpoint (see tests/support/tiny.py)."""
    return load_support("tiny").tiny_checkpoint


@pytest.fixture(scope="session")
def script() -> Any:
    """``script(file)``: a file of ``scripts/`` as a module, loaded anew, by a name that no import finds."""
    scripts = Path(__file__).parents[1] / "scripts"
    return lambda file: load("script_" + file.removesuffix(".py").replace("/", "_"), scripts / file)


@pytest.fixture(scope="session")
def support() -> Any:
    """``support(name)``: the shared module ``tests/support/<name>.py``."""
    return load_support


@pytest.fixture(scope="session")
def corpus() -> Any:
    """``corpus(name)``: the module ``tests/corpus/<name>.py``, hostile input of one kind."""
    return lambda name: load_support(name, "corpus")
