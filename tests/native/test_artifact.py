"""Engine artifacts for target ``cpu``: the checkpoint's answers, no torch on the way, damage refused in a line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.artifacts.engine.artifact import ENGINE_JSON
from toolkit.artifacts.json_file import write_json_object
from toolkit.artifacts.manifest import describe_file, read_manifest, write_manifest
from toolkit.artifacts.weight_files import huge_pages
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing
from toolkit.errors import ToolkitError, UsageError
from toolkit.runners.base import RunnerError, RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native.runner import NativeRunner


def logits(path: Path, steps: Any, backend: str | None = None) -> np.ndarray:
    runner, _ = open_runner(path, backend=backend, options=RunnerOptions(block_size=16, dtype="float32"))
    assert runner.name == ("tensor" if backend == "pytorch" else "native")
    driver = steps.Driver(runner)
    return driver.step({driver.add(): list(range(5, 45))}, "all").logits


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "mixtral"])
def test_an_artifact_gives_the_checkpoints_logits(family, tiny_models, tmp_path, steps) -> None:
    model = tiny_models(family)
    plain = convert(str(model), tmp_path / "a", Packing(head_bits=16)).path
    np.testing.assert_array_equal(logits(plain, steps), logits(model, steps))
    np.testing.assert_allclose(logits(plain, steps, "pytorch"), logits(model, steps), rtol=1e-4, atol=1e-4)
    eight, four = (convert(str(model), tmp_path / str(b), Packing(head_bits=b)).path for b in (8, 4))
    errors = [np.linalg.norm(logits(p, steps) - logits(model, steps)) for p in (eight, four)]
    assert 0 < errors[0] < errors[1] < 0.6 * np.linalg.norm(logits(model, steps))


def test_weights_in_other_pages_are_the_same(tiny_models, tmp_path, steps, monkeypatch) -> None:
    """Those that are moved to huge pages, here small ones, while steps run; and once they were given back."""
    path = convert(str(tiny_models("llama")), tmp_path / "e").path
    asked: list[int] = []
    monkeypatch.setattr(huge_pages, "HUGE", 4096)
    monkeypatch.setattr(huge_pages, "_PATIENCE", 0.0)
    monkeypatch.setattr(huge_pages, "_moved", type(huge_pages._moved)())  # those of other tests' models apart
    monkeypatch.setattr(huge_pages, "_in_huge_pages", lambda first, last: asked.append(first) or len(asked) % 2 == 0)
    runner, _ = open_runner(path, backend=None, options=RunnerOptions(block_size=16))
    found = []
    for turn in range(3):
        driver = steps.Driver(runner)
        found += [driver.step({driver.add(): list(range(5, 45))}, "all").logits for _ in range(5)]
        runner._mover._thread.join()
        found.append(driver.step({driver.add(): list(range(5, 45))}, "all").logits)
        assert len(asked) == 2 * (turn + 1) and len(huge_pages._moved) == 1
        runner.release_weights()
        assert not huge_pages._moved
    for logits in found[1:]:
        np.testing.assert_array_equal(logits, found[0])


def test_head_bits_are_checked(tiny_models, tmp_path) -> None:
    for options in (Packing(head_bits=5), Packing(head_bits=8, target="torch")):
        with pytest.raises(UsageError, match="head-bits"):
            convert(str(tiny_models("llama")), tmp_path / "e", options)


def test_nothing_heavy_is_imported_to_answer(tiny_models, tmp_path) -> None:
    path = convert(str(tiny_models("llama")), tmp_path / "e").path
    support = str(Path(__file__).parents[1] / "support/steps.py")
    code = (
        "import sys\nfrom pathlib import Path\nimport numpy as np\n"
        "from toolkit.runners.base import RunnerOptions\nfrom toolkit.runners.choose import open_runner\n"
        "import importlib.util\n"
        f"spec = importlib.util.spec_from_file_location('steps', {support!r})\n"
        "steps = importlib.util.module_from_spec(spec); sys.modules['steps'] = steps; spec.loader.exec_module(steps)\n"
        f"runner, _ = open_runner(Path({str(path)!r}), backend=None, options=RunnerOptions(block_size=16))\n"
        "print(steps.Driver(runner).generate([5, 6, 7], 4))\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'xgrammar'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1] == "[]"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda e: e["params"].pop("model.norm"), "model.norm is missing"),
        (lambda e: e["params"]["model.norm"].update(layout=99), "layout"),
        (lambda e: e["params"]["model.norm"].update(dtype=1), "bytes"),
        (lambda e: e["params"]["model.norm"].update(rows=32), r"expected .* bytes|expected 64"),
        (lambda e: e["params"]["model.embed_tokens"].update(group=7), "unknown form"),
        (lambda e: e["params"]["model.embed_tokens"].update(bits=4), "bytes"),
        (lambda e: e["params"]["model.embed_tokens"].update(kind=9), "unknown form"),
        (lambda e: e["params"]["model.embed_tokens"].update(rows=-1), "unknown form"),
        (lambda e: e.update(target="cpu-of-tomorrow"), "cpu-of-tomorrow"),
    ],
)
def test_edited_descriptions_are_refused(change, message, tiny_models, tmp_path) -> None:
    path = convert(str(tiny_models("llama")), tmp_path / "e").path
    data = json.loads((path / ENGINE_JSON).read_text())
    change(data)
    write_json_object(path / ENGINE_JSON, data)
    manifest = read_manifest(path)  # whose digest would catch it first
    files = [describe_file(path, path / e.name) if e.name == ENGINE_JSON else e for e in manifest.files]
    write_manifest(path, replace(manifest, files=files))
    with pytest.raises(ToolkitError) as caught:
        runner, _ = open_runner(path, backend=None, options=RunnerOptions(block_size=16))
        runner.load_weights()
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_refused(tiny_models, tmp_path) -> None:
    path = convert(str(tiny_models("llama")), tmp_path / "e").path
    file = path / "engine.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(ToolkitError):
        open_runner(path, backend=None, options=RunnerOptions(block_size=16))


def test_a_runner_that_cannot_start_is_one_line(tiny_models, tmp_path, monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise RunnerError("made by another version of the package")

    monkeypatch.setattr(NativeRunner, "load_weights", broken)
    with pytest.raises(ToolkitError, match="native runner cannot start: made by another version"):
        convert(str(tiny_models("llama")), tmp_path / "out", Packing(head_bits=8))


def test_the_manifest_states_what_the_head_costs(tiny_models, tmp_path) -> None:
    figures = {}
    for bits in (4, 8, 16):
        done = convert(str(tiny_models("llama")), tmp_path / str(bits), Packing(head_bits=bits))
        assert done.manifest.quality.keys() == ({"head"} if bits < 16 else set())
        figures[bits] = done.manifest.quality.get("head")
    assert figures[8]["bits"] == 8 and figures[8]["tokens"] > 100 and figures[8]["perplexity_ratio_stderr"] > 0
    assert 0 < figures[8]["kl"] < figures[4]["kl"] < 1
    assert abs(figures[8]["perplexity_ratio"] - 1) < 0.1
    silent = tiny_models("llama", tokenizer=False)
    blind = convert(str(silent), tmp_path / "blind", Packing(head_bits=8)).manifest.quality["head"]
    assert blind.keys() == {"bits", "relative_error"} and 0 < blind["relative_error"] < 0.01
    assert json.loads((tmp_path / "blind/manifest.json").read_text())["quality"] == {"head": blind}
