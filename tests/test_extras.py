"""The package without its extras: what a machine that only serves has installed."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolkit.base import extras
from toolkit.errors import ToolkitError

ROOT = Path(__file__).resolve().parent.parent
IMPORT_NAMES = {
    "protobuf": "google",
    "auto-round": "auto_round",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
}

# A finder that knows none of the packages that only extras bring, in front of all others.
WITHOUT = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""
TOOL = "from toolkit.commands.main import main; main(sys.argv[1:])"
JSON_ANSWER = """
from toolkit import GenerationConfig, pipeline
with pipeline(sys.argv[1]) as pipe:
    held = pipe("hello", gen_config=GenerationConfig(max_new_tokens=3, response_format={{"type": "json_object"}}))
    print(held.error_message)
    print(pipe("hello", gen_config=GenerationConfig(max_new_tokens=3)).finish_reason)
"""


def optional_modules() -> set[str]:
    """Import names of what the extras for users add to the base."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        line
        for name, lines in project["optional-dependencies"].items()
        if name not in ("dev", "docs")
        for line in lines
    ]
    names = {
        line.split(">")[0].split(";")[0].split("[")[0].strip() for line in wanted if not line.startswith("toolkit[")
    }
    return {IMPORT_NAMES.get(name, name) for name in names}


def bare(*args: str, program: str = TOOL) -> subprocess.CompletedProcess[str]:
    """``program`` with ``args`` where no extra is installed."""
    code = (WITHOUT + program).format(names=sorted(optional_modules()))
    return subprocess.run([sys.executable, "-P", "-c", code, *args], capture_output=True, text=True, timeout=500)


@pytest.fixture(scope="module")
def engine(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from toolkit.convert.convert import convert
    from toolkit.convert.options import Packing

    target = tmp_path_factory.mktemp("engine") / "model"
    convert(str(tiny_models("llama")), target, Packing(target="cpu"))
    return target


def test_a_converted_model_runs_without_extras(engine: Path) -> None:
    done = bare("chat", str(engine), "--prompt", "hello", "--max-new-tokens", "3")
    assert done.returncode == 0, done.stderr
    done = bare("profile", "throughput", str(engine), *"--num-prompts 1 --random-input-len 4".split())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("args", "extra"),
    [
        (("lite", "auto_awq", "{model}", "--work-dir", "{out}"), "torch"),
        (("convert", "{model}", "--dst-path", "{out}"), "torch"),
        (("chat", "{model}", "--prompt", "hello"), "torch"),
        (("chat", "{engine}", "--backend", "pytorch", "--prompt", "hello"), "torch"),
    ],
)
def test_a_missing_extra_is_named(
    args: tuple[str, ...], extra: str, engine: Path, tiny_models: Callable[..., Path], tmp_path: Path
) -> None:
    places = {"engine": engine, "model": tiny_models("llama"), "out": tmp_path / "out"}
    done = bare(*(a.format(**places) for a in args))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(extras.command(extra)), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_an_answer_held_to_json_names_the_extra_and_the_engine_goes_on(engine: Path) -> None:
    done = bare(str(engine), program=JSON_ANSWER)
    assert done.stdout.splitlines()[-2:] == [extras.explain(ModuleNotFoundError(name="xgrammar")), "length"], (
        done.stderr
    )


@pytest.mark.parametrize(
    "args",
    [
        ("--help",),
        ("list",),
        ("check_env", "--verbose"),
        ("lite", "--help"),
        ("serve", "api_server", "--help"),
    ],
)
def test_what_looks_only_needs_no_extra(args: tuple[str, ...]) -> None:
    assert bare(*args).returncode == 0


def test_check_env_says_what_it_left_out_and_what_works_without() -> None:
    done = bare("check_env")
    told = extras.explain(ModuleNotFoundError(name="torch"))
    assert f"left out: {told}" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("next: tool chat DIR")


def test_every_optional_package_names_an_extra() -> None:
    for module in optional_modules():
        told = extras.explain(ModuleNotFoundError(f"No module named {module}.part", name=f"{module}.part"))
        assert told is not None and "pip install " in told and told.endswith("]'"), module


def test_other_missing_modules_stay_what_they_are() -> None:
    assert extras.explain(ModuleNotFoundError("No module named 'numpy'", name="numpy")) is None
    assert extras.explain(ModuleNotFoundError("nameless")) is None
    with pytest.raises(ModuleNotFoundError), extras.named():
        raise ModuleNotFoundError("No module named 'toolkit.nothing'", name="toolkit.nothing")
    with pytest.raises(ToolkitError, match=r"\[quant\]"), extras.named():
        raise ModuleNotFoundError("No module named 'datasets'", name="datasets")


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (None, "pip install 'toolkit[torch]'"),
        ('{"url": "file:///w/toolkit-0.1.0.whl", "archive_info": {}}', "pip install 'toolkit[torch]'"),
        ('{"url": "file:///my%20src/t", "dir_info": {"editable": true}}', "pip install -e '/my src/t[torch]'"),
    ],
)
def test_the_line_to_type_is_for_how_it_was_installed(
    record: str | None, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install -e .` alone brings no torch: the first command that needs it says what does, from that folder."""

    class Installed:
        requires = importlib.metadata.requires("toolkit")

        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return record

    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Installed())
    told = extras.explain(ModuleNotFoundError(name="torch"))
    assert told == f"torch is not installed, and this needs it: {line}"


def test_the_install_page_and_the_readme_say_the_same() -> None:
    for page in ("README.md", "docs/install.md"):
        assert "pip install -e '.[all]'" in (ROOT / page).read_text(encoding="utf-8"), page
