"""Artifacts that version 0.1.0 wrote still open, are whole, and answer what they answered there.

``of_0_1_0.tar.xz``: a tiny Llama as `lite auto_awq`, `lite auto_gptq`, `convert --to gguf` and `convert --target cpu`
of that version left it, and the tokens that its native runner took after a prompt (greedily).
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from toolkit import GenerationConfig, TurbomindEngineConfig, pipeline

HERE = Path(__file__).resolve().parent
ARTIFACTS = ("awq", "gptq", "m.gguf", "engine-awq")
KINDS = {"awq": "quantized", "gptq": "quantized", "engine-awq": "engine"}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("of 0.1.0")
    with tarfile.open(HERE / "of_0_1_0.tar.xz") as archive:
        archive.extractall(root, filter="data")
    return root


def answer(model: Path, prompt: str) -> list[int]:
    """Eight tokens, greedily."""
    greedy = GenerationConfig(do_sample=False, max_new_tokens=8, ignore_eos=True)
    with pipeline(str(model), backend_config=TurbomindEngineConfig(session_len=128, max_batch_size=2)) as pipe:
        return list(pipe(prompt, gen_config=greedy, do_preprocess=False).token_ids)


@pytest.mark.parametrize("name", ARTIFACTS)
def test_they_answer_as_there(old: Path, name: str) -> None:
    told = json.loads((old / "tokens.json").read_text())
    assert answer(old / name, told["prompt"]) == told[name]


@pytest.mark.parametrize("name", KINDS)
def test_their_manifests_are_read(old: Path, name: str, support: Any) -> None:
    done = support("command").tool("inspect", old / name, "--verify", "--json", "-")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["kind"], found["tool_version"]) == (KINDS[name], "0.1.0")


def test_the_next_stage_takes_them(old: Path, tmp_path: Path, support: Any) -> None:
    done = support("command").tool("convert", old / "awq", "--dst-path", tmp_path / "engine")
    assert done.returncode == 0, done.stderr
    told = json.loads((old / "tokens.json").read_text())
    assert answer(tmp_path / "engine", told["prompt"]) == told["awq"]
