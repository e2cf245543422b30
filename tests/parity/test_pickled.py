"""Models in files of torch.save, as many families were published: the same tensors and tokens as with safetensors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.inspect import inspect
from toolkit.artifacts.manifest import content_files
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing
from toolkit.engine.core import EngineCore
from toolkit.engine.options import EngineOptions
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.errors import ToolkitError
from toolkit.models.registry import get
from toolkit.quant.lite import Common, auto_awq
from toolkit.quant.options import Awq
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native.library import available

BACKENDS = ("pytorch", "turbomind") if available() is None else ("pytorch",)
# Of the families that LMDeploy lists, those whose first models were published as .bin alone.
TEXT = ("llama", "internlm", "internlm2", "baichuan", "baichuan2", "qwen", "chatglm", "falcon", "mistral", "phi")
SEEING = ("qwen_vl", "cogvlm", "internlmxcomposer2", "llava_llama", "minicpmv", "mgm")
NEW = 8


def greedy(path: Path, backend: Any) -> list[list[int]]:
    how = RunnerOptions(device="cpu", dtype="float32", block_size=16, threads=1)
    runner, _ = open_runner(path, backend=backend, options=how)
    runner.load_weights()
    blocks = (64,) * len(runner.spec.cache_groups)
    runner.allocate_cache(blocks)
    options = EngineOptions(session_len=128, max_batch_size=4, max_prefill_token_num=64, num_blocks=blocks)
    core = EngineCore(runner, options, None)
    for i, prompt in enumerate(PROMPTS):
        core.add(EngineRequest(str(i), prompt, SamplingParams(max_new_tokens=NEW)))
    tokens: dict[str, list[int]] = {}
    while core.has_work:
        for out in core.step():
            assert out.error is None, out.error
            tokens.setdefault(out.id, []).extend(out.token_ids)
    return [tokens[str(i)] for i in range(len(PROMPTS))]


PROMPTS = [[int(x) for x in np.random.default_rng(n).integers(5, 320, n)] for n in (3, 21, 40)]


def oracle(path: Path) -> list[list[int]]:
    """transformers' whole forward pass for each token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(NEW):
            with torch.inference_mode():
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


def same_tensors(found: Path, expected: Path) -> None:
    a, b = open_checkpoint(found), open_checkpoint(expected)
    assert set(a.names()) == set(b.names())
    for name in b.names():
        assert a.info(name).dtype == b.info(name).dtype
        assert torch.equal(a.tensor(name), b.tensor(name)), name


def test_tensors(tiny_models: Any, support: Any, tmp_path: Path, family: str) -> None:
    source = tiny_models(family)
    same_tensors(support("pickled").as_pickled(source, tmp_path / "m"), source)


@pytest.mark.parametrize("family", TEXT)
def test_tokens_are_those_of_transformers(tiny_models: Any, support: Any, tmp_path: Path, family: str) -> None:
    path = support("pickled").as_pickled(tiny_models(family), tmp_path / "m")
    expected = oracle(path if get(family).twin is None else tiny_models.twin(family))
    for backend in BACKENDS:
        assert greedy(path, backend) == expected


@pytest.mark.parametrize("family", SEEING)
def test_tokens_of_models_that_see(tiny_models: Any, support: Any, tmp_path: Path, family: str) -> None:
    path = support("pickled").as_pickled(tiny_models(family), tmp_path / "m", shards=3)
    assert greedy(path, "pytorch") == greedy(tiny_models(family), "pytorch")


def test_meta_s_layout(tiny_models: Any, support: Any, tmp_path: Path) -> None:
    source = tiny_models("llama", rope_parameters={"rope_type": "default", "rope_theta": 20000.0}, rms_norm_eps=1e-5)
    path = support("pickled").as_meta(source, tmp_path / "m")
    same_tensors(path, source)
    expected = oracle(source)
    for backend in BACKENDS:
        assert greedy(path, backend) == expected
        open_runner(path, backend=backend, model_format="meta_llama", options=RunnerOptions(device="cpu"))
    for wrong, found in ((source, "hf"), (path, "meta_llama")):
        asked = "awq" if wrong == path else "meta_llama"
        with pytest.raises(ToolkitError, match=f"model_format: .* holds {found} weights, not {asked}; leave it out"):
            open_runner(wrong, backend="pytorch", model_format=asked, options=RunnerOptions(device="cpu"))
    convert(str(path), str(tmp_path / "engine"), Packing(model_format="meta_llama"))


@pytest.mark.parametrize("embed_rows", [False, True])
def test_meta_s_layout_in_parts(tiny_models: Any, support: Any, tmp_path: Path, embed_rows: bool) -> None:
    sizes: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}
    source = tiny_models("llama", rope_parameters={"rope_type": "default", "rope_theta": 20000.0}, **sizes)
    path = support("pickled").as_meta(source, tmp_path / "m", parts=4, embed_rows=embed_rows)
    same_tensors(path, source)
    expected = oracle(source)
    assert all(greedy(path, backend) == expected for backend in BACKENDS)
    engines = [tmp_path / "engine", tmp_path / "whole"]
    for one, engine in zip((path, source), engines, strict=True):
        convert(str(one), str(engine), Packing())
    assert greedy(engines[0], "turbomind") == greedy(engines[1], "turbomind")
    (path / "consolidated.02.pth").rename(tmp_path / "away")
    with pytest.raises(ToolkitError, match=r"consolidated.02.pth: missing, though consolidated.03.pth is there; fetch"):
        open_checkpoint(path)
    (path / "consolidated.03.pth").unlink()
    with pytest.raises(ToolkitError, match="and weights disagree"):  # two parts of four
        open_runner(path, backend="pytorch", options=RunnerOptions(device="cpu"))
    (tmp_path / "away").rename(path / "consolidated.02.pth")
    with pytest.raises(ToolkitError, match=r"expected parts that share 8 heads and 4 of keys evenly, found 3 files"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"n_heads": None}, "params.json: n_heads: expected a whole number"),
        ({"n_heads": 7}, "attention.wq.weight: expected a matrix of 7 heads' rows"),
        ({"dim": "x"}, "params.json: dim: expected"),
        ({"n_kv_heads": True}, "params.json: n_kv_heads: expected"),
    ],
)
def test_spoilt_params(tiny_models: Any, support: Any, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    path = support("pickled").as_meta(tiny_models("llama"), tmp_path / "m")
    params = json.loads((path / "params.json").read_text()) | change
    (path / "params.json").write_text(json.dumps(params))
    with pytest.raises(ToolkitError, match=words):
        open_checkpoint(path)


@pytest.mark.parametrize("shards, options", [(1, {}), (2, {"_use_new_zipfile_serialization": False})])
def test_quantized_and_packed_as_from_safetensors(
    tiny_models: Any, support: Any, tmp_path: Path, shards: int, options: dict[str, Any]
) -> None:
    source = tiny_models("llama")
    path = support("pickled").as_pickled(source, tmp_path / "bin", shards, **options)
    for name, model in (("a", path), ("b", source)):
        awq = Awq(w_group_size=32, tune_steps=0, search_scale=False)
        auto_awq(
            str(model), str(tmp_path / f"{name}-awq"), common=Common(calib_samples=4, calib_seqlen=32), options=awq
        )
        convert(str(model), str(tmp_path / f"{name}-engine"), Packing())
    same_tensors(tmp_path / "a-awq", tmp_path / "b-awq")
    engines = [(tmp_path / f"{name}-engine" / "engine.safetensors").read_bytes() for name in "ab"]
    assert engines[0] == engines[1]
    # The one that was quantized, as .bin again: ready AWQ repositories were published so.
    again = support("pickled").as_pickled(tmp_path / "a-awq", tmp_path / "awq-bin")
    same_tensors(again, tmp_path / "a-awq")
    assert greedy(again, "pytorch") == greedy(tmp_path / "a-awq", "pytorch")


def test_what_counts_as_the_model(tiny_models: Any, support: Any, tmp_path: Path) -> None:
    path = support("pickled").as_pickled(tiny_models("llama"), tmp_path / "m")
    (path / "training_args.bin").write_bytes(b"junk")
    (path / "optimizer.pt").write_bytes(b"junk")
    bins = {file.name for file in content_files(path) if file.suffix in (".bin", ".pt")}
    assert bins == {"pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"}
    (path / "pytorch_model.bin.index.json").unlink()  # shards alone will do
    same_tensors(path, tiny_models("llama"))
    facts = dict(inspect(path).facts)
    assert "torch.save" in facts["weights"]
    whole = support("pickled").as_pickled(tiny_models("llama"), tmp_path / "both", shards=1)
    (whole / "model.safetensors").write_bytes((tiny_models("llama") / "model.safetensors").read_bytes())
    (whole / "pytorch_model.bin").write_bytes(b"not looked at")
    same_tensors(whole, tiny_models("llama"))
    assert not any(file.suffix == ".bin" for file in content_files(whole))


# Where text is the model's own, an engine of its own reads the model once more.
LITE = ["lite", "auto_gptq", "--tune-steps", "0", "--calib-samples", "2", "--calib-seqlen", "16", "--eval-tokens", "32"]


@pytest.mark.parametrize(
    "command", [["inspect"], ["eval", "ppl", "--data", "TEXT", "--window", "64"], LITE], ids=" ".join
)
def test_a_command_says_so_in_one_line(tiny_models: Any, support: Any, tmp_path: Path, command: list[str]) -> None:
    path = support("pickled").as_pickled(tiny_models("llama"), tmp_path / "m")
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 50)
    text = str(tmp_path / "text.txt")
    args = [sys.executable, "-m", "toolkit", *(text if x == "TEXT" else x for x in command), str(path)]
    done = subprocess.run(args, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no code in them runs") == 1, done.stderr
