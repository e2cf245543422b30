"""Artifacts that older versions wrote still open, are whole, and answer what they answered there.

``of_0_1_0.tar.xz``: a tiny Llama as `lite auto_awq`, `lite auto_gptq`, `convert --to gguf` and `convert --target cpu`
of that version left it; ``of_0_2_0.tar.xz``: a tiny Qwen3 by `lite smooth_quant`, `lite mxfp4`, `lite draft` and
`convert`; ``of_0_3_0.tar.xz``: a tiny Llama by `convert --tp 2`. ``tokens.json`` has the tokens that each version's
native runner took after a prompt (greedily).
"""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from toolkit import GenerationConfig, TurbomindEngineConfig, pipeline

HERE = Path(__file__).resolve().parent
ANSWERING = {"0.1.0": ("awq", "gptq", "m.gguf", "engine-awq"), "0.2.0": ("int8", "mxfp4", "engine-int8")}
RANKS = "engine-tp2"
KINDS = {
    "0.1.0": {"awq": "quantized", "gptq": "quantized", "engine-awq": "engine"},
    "0.2.0": {"int8": "quantized", "mxfp4": "quantized", "engine-int8": "engine", "draft": "draft"},
    "0.3.0": {RANKS: "engine"},
}
CONVERTED = {"0.1.0": "awq", "0.2.0": "int8"}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By versions, the folder of its artifacts."""
    found = {version: tmp_path_factory.mktemp(f"of {version}") for version in KINDS}
    for version, root in found.items():
        with tarfile.open(HERE / f"of_{version.replace('.', '_')}.tar.xz") as archive:
            archive.extractall(root, filter="data")
    return found


def told(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "tokens.json").read_text())
    return found


def answer(model: Path, prompt: str, **more: Any) -> list[int]:
    """Eight tokens, greedily."""
    greedy = GenerationConfig(do_sample=False, max_new_tokens=8, ignore_eos=True)
    config = TurbomindEngineConfig(session_len=128, max_batch_size=2, **more)
    with pipeline(str(model), backend_config=config) as pipe:
        return list(pipe(prompt, gen_config=greedy, do_preprocess=False).token_ids)


@pytest.mark.parametrize("version, name", [(v, name) for v, names in ANSWERING.items() for name in names])
def test_they_answer_as_there(old: dict[str, Path], version: str, name: str) -> None:
    before = told(old[version])
    assert answer(old[version] / name, before["prompt"]) == before[name]


@pytest.mark.skipif(sys.platform != "linux", reason="ranks meet in Linux's memory")
def test_ranks_answer_as_there(old: dict[str, Path]) -> None:
    """Each of their files has a part of the head, which no draft head can borrow then."""
    root, before = old["0.3.0"], told(old["0.3.0"])
    assert answer(root / RANKS, before["prompt"], tp=2) == before[RANKS]


@pytest.mark.parametrize("version, name", [(v, name) for v, names in KINDS.items() for name in names])
def test_their_manifests_are_read(old: dict[str, Path], version: str, name: str, support: Any) -> None:
    done = support("command").tool("inspect", old[version] / name, "--verify", "--json", "-")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["kind"], found["tool_version"]) == (KINDS[version][name], version)


@pytest.mark.parametrize("version", CONVERTED)
def test_the_next_stage_takes_them(old: dict[str, Path], version: str, tmp_path: Path, support: Any) -> None:
    name, before = CONVERTED[version], told(old[version])
    done = support("command").tool("convert", old[version] / name, "--dst-path", tmp_path / "engine")
    assert done.returncode == 0, done.stderr
    assert answer(tmp_path / "engine", before["prompt"]) == before[name]


def test_a_head_guesses(old: dict[str, Path]) -> None:
    root, before = old["0.2.0"], told(old["0.2.0"])
    config = {"speculative_algorithm": "eagle3", "speculative_draft_model": str(root / "draft")}
    assert answer(root / "int8", before["prompt"], **config) == before["int8"]
