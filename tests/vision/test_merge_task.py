"""XComposer 2.5's parts for a task, added to its weights: against the same by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.refused import refusing
from toolkit import GenerationConfig, PytorchEngineConfig, pipeline
from toolkit.errors import ToolkitError, UsageError
from toolkit.vl.tools.merge_xcomposer2d5_task import TASKS, main, merge

MODULES = ("attention.wqkv", "attention.wo", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
RANKS = {"web": 5, "sft": 3, "dpo": 3}

refused = refusing(UsageError)


@pytest.fixture(scope="module")
def published(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with parts for all tasks, in half precision as the files are."""
    import torch
    from safetensors.torch import load_file, save_file

    path = tmp_path_factory.mktemp("xcomposer") / "model"
    shutil.copytree(tiny_models("internlmxcomposer2"), path)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.removesuffix(".weight").endswith(MODULES)]:
        outputs, inputs = tensors[name].shape
        tensors[name] = tensors[name].half()
        for part, rank in RANKS.items():
            begin = f"{name.removesuffix('.weight')}.lora_{part}_"
            tensors[f"{begin}A.weight"] = torch.randn(rank, inputs, generator=generator).half() / 8
            tensors[f"{begin}B.weight"] = torch.randn(outputs, rank, generator=generator).half() / 8
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("task", TASKS)
def test_weights_are_those_of_the_task(published: Path, tmp_path: Path, task: str, capsys: Any) -> None:
    import torch
    from safetensors.torch import load_file

    assert main([str(published), str(tmp_path / "out"), "--task", task]) == 0
    before, after = (load_file(path / "model.safetensors") for path in (published, tmp_path / "out"))
    assert set(after) == {name for name in before if ".lora_" not in name}
    changed = 0
    for name, tensor in after.items():
        wanted = before[name].float()
        if name.removesuffix(".weight").endswith(MODULES):
            for part in TASKS[task]:
                a, b = (before[name.replace(".weight", f".lora_{part}_{side}.weight")].float() for side in "AB")
                wanted = wanted + b @ a
            changed += 1
        torch.testing.assert_close(tensor, wanted.to(before[name].dtype), rtol=0, atol=0)
    assert f"{changed} linears changed for {task}" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert (manifest["stage"], manifest["options"]) == ("merge_xcomposer2d5_task", {"task": task})
    config = PytorchEngineConfig(session_len=64, max_batch_size=1, dtype="float32")
    with pipeline(str(tmp_path / "out"), config) as opened:
        assert opened("what", gen_config=GenerationConfig(max_new_tokens=3)).generate_token_len


def test_what_is_wrong_is_one_line(published: Path, tiny_models: Any, tmp_path: Path, capsys: Any) -> None:
    plain = str(tiny_models("internlmxcomposer2"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").write_text("mine")
    for arguments, code, says in (
        ([str(published), str(tmp_path / "out"), "--task", "draw"], 2, "expected web or write, found 'draw'"),
        ([plain, str(tmp_path / "out"), "--task", "web"], 1, "expected tensors ending in .lora_web_A.weight"),
        ([str(published), str(tmp_path / "full"), "--task", "web"], 2, "full"),
    ):
        assert main(arguments) == code
        told = capsys.readouterr().err
        assert says in told and told.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_merged(tiny_models: Any, tmp_path: Path) -> None:
    path = tiny_models("llama")
    told = refused(lambda: merge(str(path), tmp_path / "out", "odd"))
    assert told == "--task: expected web or write, found 'odd'"
    told = refused(lambda: merge(str(path), tmp_path / "out", "web"), ToolkitError)
    assert told == f"{path}: expected tensors ending in .lora_web_A.weight, as XComposer 2.5 has them, found none"
