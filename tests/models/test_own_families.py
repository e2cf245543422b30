"""Families from outside the package: Python files that the user names, and entry points of installed packages."""

import importlib
import json
import shutil

import pytest

from toolkit.configs.engine import PytorchEngineConfig
from toolkit.errors import ToolkitError, UsageError
from toolkit.models import registry
from toolkit.models.family import Family
from toolkit.runners.coverage import native_refuses

FILE = """
from toolkit.models.decoder import llama_like
from toolkit.models.family import Family

def build(config):
    return llama_like(config, embed_scale=config.number("loudness"))

FAMILY = Family("louder", "Louder 1B", ("LouderForCausalLM",), build, (), "llama.cpp has no louder")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "louder.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def model(tiny_models, tmp_path):
    """A llama that says it is the file's."""
    path = tmp_path / "model"
    shutil.copytree(tiny_models("llama"), path)
    config = json.loads((path / "config.json").read_text())
    config.update(architectures=["LouderForCausalLM"], model_type="louder", loudness=1.0)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def tool(support):
    return support("command").tool


def test_a_file_named_on_the_command_line_goes_through_the_stages(file, model, tool, tiny_models, tmp_path):
    refused = tool("convert", model, "--dst-path", tmp_path / "engine")
    assert refused.returncode == 1 and "LouderForCausalLM" in refused.stderr
    assert "or one of your own: --custom-module-map FILE (docs/add-a-model.md)" in refused.stderr
    flag = ("--custom-module-map", file)
    done = tool(*flag, "convert", model, "--dst-path", tmp_path / "engine", "--head-bits", "16", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    chat = ("--prompt", "the fox", "--max-new-tokens", "8", "--session-len", "256", "--dtype", "float32")
    said = [
        tool("chat", tmp_path / "engine", *chat),  # holds the spec: needs no file any more
        tool("chat", model, *chat, "--backend", "pytorch", TOOLKIT_CUSTOM_MODULE_MAP=str(file)),
        tool("chat", tiny_models("llama"), *chat, "--no-pack-cache"),
    ]
    assert [s.returncode for s in said] == [0] * 3, [s.stderr for s in said]
    assert len({s.stdout for s in said}) == 1
    listed = json.loads(tool("list", "models", "--json", "-", *flag).stdout)
    assert {"architecture": "LouderForCausalLM", "family": "louder"}.items() <= listed[0].items()
    assert "no tiny model" in listed[0]["not_on_turbomind"]


def test_what_to_type_next_names_the_file_too(file, model, tool, tmp_path):
    made = tmp_path / "made"
    done = tool("lite", "mxfp4", model, "--work-dir", made, "--eval-tokens", "2", "--custom-module-map", file)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"next: tool convert {made} --dst-path {made}-engine --custom-module-map {file}\n")
    words = done.stdout.splitlines()[-1].removeprefix("next: tool ").split()
    done = tool(*words)
    assert done.returncode == 0, done.stderr
    assert "--custom-module-map" not in done.stdout  # an artifact holds its spec


def test_the_python_interface_takes_a_file(file, model, tiny_models):
    from toolkit.messages import GenerationConfig
    from toolkit.pipeline.pipeline import pipeline

    wishes = GenerationConfig(max_new_tokens=8, do_sample=False)
    texts = []
    for path, config in (
        (model, PytorchEngineConfig(custom_module_map=str(file), dtype="float32", session_len=256)),
        (tiny_models("llama"), PytorchEngineConfig(dtype="float32", session_len=256)),
    ):
        with pipeline(str(path), backend_config=config) as pipe:
            texts.append(pipe("the fox", gen_config=wishes).text)
    assert texts[0] == texts[1]


def test_an_own_family_goes_before_ours(file, monkeypatch):
    file.write_text(FILE.replace("LouderForCausalLM", "LlamaForCausalLM"))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert registry.find_family(config).name == "llama"
    assert registry.find_family(config, own=registry.from_files([str(file)])).name == "louder"
    monkeypatch.setenv(registry.VARIABLE, str(file))
    assert registry.find_family(config).name == "louder"
    assert registry.families()[0].name == "louder" and registry.get("llama").name == "llama"


def test_entry_points_of_installed_packages(tmp_path, monkeypatch):
    (tmp_path / "louder_package.py").write_text(FILE)
    (tmp_path / "louder-1.0.dist-info").mkdir()
    (tmp_path / "louder-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: louder\nVersion: 1.0\n")
    points = tmp_path / "louder-1.0.dist-info" / "entry_points.txt"
    points.write_text("[toolkit.families]\nlouder = louder_package:FAMILY\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert registry.find_family({"architectures": ["LouderForCausalLM"]}).known_as == "Louder 1B"
    points.write_text("[toolkit.families]\nlouder = louder_package_gone:FAMILY\n")
    told = "entry point louder of louder: ModuleNotFoundError: No module named 'louder_package_gone'"
    with pytest.raises(UsageError, match=told):
        registry.find_family({"architectures": ["LouderForCausalLM"]})
    assert told in native_refuses()["not known"]  # check_env goes on
    points.write_text("[toolkit.families]\nlouder = louder_package:build\n")
    with pytest.raises(UsageError, match=r"entry point louder of louder: found function, expected a .*Family"):
        registry.find_family({"architectures": ["LouderForCausalLM"]})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("MODULE_MAP = {'LlamaForCausalLM': 'my_llama.MyLlama'}", "FAMILY: found nothing"),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("FAMILY = 5", "FAMILY: found int"),
        ("raise SystemError('two\\nlines')", "SystemError"),
        ("def", "SyntaxError"),
    ],
)
def test_files_that_hold_no_family_are_one_line(tool, tmp_path, text, words):
    (tmp_path / "own.py").write_text(text)
    done = tool("list", "models", "--custom-module-map", tmp_path / "own.py")
    assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    with pytest.raises(ToolkitError, match="custom_module_map"):
        registry.from_files([str(tmp_path / "own.py")])


def test_a_mistake_in_a_family_of_one_s_own_is_told_by_file_and_line(model, tool, tmp_path):
    lines = FILE.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("def build"))
    lines.insert(at + 1, "    nothing_of_this_name()")
    (tmp_path / "own.py").write_text("\n".join(lines))
    done = tool("convert", model, "--dst-path", tmp_path / "e", "--custom-module-map", tmp_path / "own.py")
    assert done.returncode == 2 and "internal error" not in done.stderr, done.stderr
    assert f"{tmp_path / 'own.py'}, line {at + 2}: NameError: name 'nothing_of_this_name' is not defined" in done.stderr


@pytest.mark.parametrize("path", ["missing.py", "own.txt", ""])
def test_what_is_no_python_file_is_refused(tool, tmp_path, path):
    (tmp_path / "own.txt").write_text(FILE)
    done = tool("list", "models", f"--custom-module-map={tmp_path / path}")
    assert done.returncode == 2 and "custom" in done.stderr and "Python file" in done.stderr, done.stderr
    with pytest.raises(UsageError, match=r"custom_module_map: found .*expected a Python file"):
        PytorchEngineConfig(custom_module_map={"a": "b"})


def test_a_family_is_what_the_file_says(file):
    (family,) = registry.from_files([str(file)])
    assert isinstance(family, Family) and family.name == "louder"
