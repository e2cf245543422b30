"""Gemma 4 beside what every family is tried with: every shape quantized, and files as others write them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from toolkit.artifacts.adapters.adapter import read_adapter
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.gguf.container import read_container
from toolkit.artifacts.gguf.tokenizer import build_tokenizer
from toolkit.artifacts.gguf.vocabulary import vocabulary
from toolkit.artifacts.gguf.writer import Entry, write_gguf
from toolkit.convert.formats import rewrite
from toolkit.errors import ToolkitError
from toolkit.models.config.fields import Fields
from toolkit.models.families import gemma4_text
from toolkit.models.registry import load_spec
from toolkit.quant.lite import Common, auto_awq, search
from toolkit.quant.options import Awq, Search
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native.library import available

IDS = np.random.default_rng(4).integers(7, 300, 40).tolist()
BACKENDS = ("pytorch", "turbomind") if available() is None else ("pytorch",)


def logits(path: Path, support: Any, backend: Any = "pytorch") -> Any:
    """Of a text in two pieces; two threads share columns of narrow linears."""
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16, threads=2)
    driver = support("steps").Driver(open_runner(path, backend=backend, options=options)[0])
    one = driver.add()
    return np.concatenate([driver.step({one: IDS[a:b]}, "all").logits for a, b in ((0, 25), (25, 27), (27, 40))])


@pytest.mark.parametrize("shape", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_threads_give_transformers_logits(shape: int, backend: str, tiny_models: Any, support: Any) -> None:
    from transformers import AutoModelForCausalLM

    path = tiny_models("gemma4_text", shape=shape)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    np.testing.assert_allclose(logits(path, support, backend), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("shape", [0, 1])
@pytest.mark.parametrize("method", ["awq", "search"])
def test_each_shape_is_quantized_through_what_goes_along(
    shape: int, method: str, tiny_models: Any, support: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibration carries keys and embeddings of layers' own: the model before has the runner's perplexity, tuning
    goes back through them, and what is written has what it was measured to have."""
    support("lite").quicken(monkeypatch)
    path, text = tiny_models("gemma4_text", shape=shape), tmp_path / "calibration.txt"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen times. " * 20)
    common = Common(calib_dataset=str(text), calib_samples=8, calib_seqlen=32, eval_tokens=64, batch_size=4)
    if method == "awq":
        made = auto_awq(str(path), tmp_path / "out", options=Awq(w_group_size=32, tune_steps=2), common=common)
    else:
        made = search(str(path), tmp_path / "out", options=Search(bits=5.0, tune_steps=0), common=common)
    assert made.quality["perplexity_after"] / made.quality["perplexity_before"] < 1.5
    assert np.isfinite(logits(tmp_path / "out", support)).all()
    exact = logits(path, support)
    assert np.linalg.norm(logits(tmp_path / "out", support) - exact) < 0.4 * np.linalg.norm(exact)


def test_keys_of_layers_that_read_others_are_left_out(tiny_models: Any, support: Any, tmp_path: Path) -> None:
    """Google's own files have them; nothing reads them."""
    path = shutil.copytree(tiny_models("gemma4_text"), tmp_path / "theirs")
    tensors = load_file(path / "model.safetensors")
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.3.self_attn.{name}.weight"] = torch.randn(4, 4)
    save_file(tensors, path / "model.safetensors")
    np.testing.assert_array_equal(logits(path, support), logits(tiny_models("gemma4_text"), support))


def test_adapters_of_keys_that_nothing_reads(tiny_models: Any, support: Any, tmp_path: Path) -> None:
    """The first class of transformers had them in every layer, so that PEFT adapted them; nothing comes of it."""
    model = tiny_models("gemma4_text")
    own = support("adapters").write_adapter(tmp_path / "own", model, "[qkvo]_proj|per_layer_input_gate")
    spec, stored = load_spec(open_checkpoint(model))
    expected = read_adapter(own, spec, stored)
    tensors = load_file(own / "adapter_model.safetensors")
    for name in ("k_proj", "v_proj"):
        module = f"base_model.model.model.layers.3.self_attn.{name}"
        tensors |= {f"{module}.lora_A.weight": torch.ones(4, 64), f"{module}.lora_B.weight": torch.zeros(32, 4)}
    save_file(tensors, own / "adapter_model.safetensors")
    assert expected and read_adapter(own, spec, stored).keys() == expected.keys()


def test_experts_one_by_one_as_quantized_files_have_them(tiny_models: Any, support: Any, tmp_path: Path) -> None:
    path = shutil.copytree(tiny_models("gemma4_text", shape=1), tmp_path / "theirs")
    tensors = {}
    for name, value in load_file(path / "model.safetensors").items():
        name, inside = name.replace("model.", "model.language_model.", 1), name.rpartition(".")[0]
        names = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        for i, one in enumerate(value if inside.endswith(".experts") else ()):
            begin = f"{name.rpartition('.')[0]}.{i}"
            parts = zip(names, one.chunk(len(names)), strict=True)
            tensors |= {f"{begin}.{part}.weight": rows.contiguous() for part, rows in parts}
        if not inside.endswith(".experts"):
            tensors[name] = value
    save_file(tensors, path / "model.safetensors")
    np.testing.assert_array_equal(logits(path, support), logits(tiny_models("gemma4_text", shape=1), support))


def test_files_with_gate_and_up_apart_and_idle_keys(tiny_models: Any, support: Any, tmp_path: Path) -> None:
    """As llama.cpp reads them too, and as its converter writes Google's first files."""
    for shape in (0, 1):
        ours, theirs = tmp_path / f"{shape}.gguf", tmp_path / "theirs.gguf"
        rewrite(str(tiny_models("gemma4_text", shape=shape)), ours, to="gguf")
        container = read_container(ours)
        found = {n: (info.shape, info.dtype, container.raw(n)) for n, info in container.tensors.items()}
        for name in [n for n in found if n.endswith("ffn_gate_up_exps.weight")]:
            (count, rows, columns), kind, whole = found.pop(name)
            for part, data in zip(("gate", "up"), np.split(whole.reshape(count, -1), 2, axis=1), strict=True):
                one = (count, rows // 2, columns), kind, np.ascontiguousarray(data).reshape(-1)
                found[name.replace("gate_up", part)] = one
        if shape == 0:
            found["blk.3.attn_k.weight"] = found["blk.1.attn_k.weight"]
            found["blk.3.attn_k_norm.weight"] = found["blk.1.attn_k_norm.weight"]
        assert found.keys() != container.tensors.keys()
        entries = [Entry(name, shape, kind) for name, (shape, kind, _) in found.items()]
        write_gguf(theirs, dict(container.metadata), entries, (data for _, _, data in found.values()))
        np.testing.assert_array_equal(logits(theirs, support), logits(ours, support))


def test_a_file_whose_last_layer_slides_is_refused(tiny_models: Any, tmp_path: Path) -> None:
    """Here the last one always sees everything, as in transformers."""
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    rewrite(str(tiny_models("gemma4_text")), ours, to="gguf")
    container = read_container(ours)
    for slides in ([True] * 6, [False] * 5 + [True]):
        metadata = {**container.metadata, "gemma4.attention.sliding_window_pattern": np.array(slides)}
        entries = [Entry(name, info.shape, info.dtype) for name, info in container.tensors.items()]
        write_gguf(theirs, metadata, entries, (container.raw(name) for name in container.tensors))
        with pytest.raises(ToolkitError, match="sliding_window_pattern: expected 6 truths"):
            open_checkpoint(theirs)


def test_a_model_of_transformers_before_5_10_says_its_heads_in_two_fields(tiny_models: Any) -> None:
    path = tiny_models("gemma4_text")
    config = json.loads((path / "config.json").read_text())
    spec = load_spec(open_checkpoint(path))[0]
    entry = config.pop("per_layer_config")["1"]
    older = config | {"global_head_dim": entry["head_dim"], "num_global_key_value_heads": entry["num_key_value_heads"]}
    assert gemma4_text.build(Fields(older))[0].layers == spec.layers
    for fields, named in (
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ({"num_global_key_value_heads": 3}, "num_global_key_value_heads"),
        ({"per_layer_config": {"1": entry, "3": entry}}, "per_layer_config.5: found 2 heads of 16"),
    ):
        with pytest.raises(ToolkitError, match=named):
            gemma4_text.build(Fields(older | fields))


def test_its_tokenizer_goes_to_gguf_and_back(tmp_path: Path) -> None:
    """Characters are joined, in lines with their blanks, and runs of line ends; what it does not know is bytes."""
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", *(f"<0x{i:02X}>" for i in range(256))]
    words += ["▁", "\n", *"abcdo", "▁a", "do", "\n\n", "▁▁", "cdo"]
    merges = ["▁ a", "d o", "\n \n", "▁ ▁", "c do"]
    control = np.array([3] * 5 + [6] * 256 + [1] * (len(words) - 261), np.int32)
    metadata = {
        "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.tokens": words, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": control, "tokenizer.ggml.bos_token_id": 2, "tokenizer.ggml.unknown_token_id": 3,
    }  # fmt: skip
    made = build_tokenizer(tmp_path, metadata)
    place = {word: i for i, word in enumerate(words)}
    for text, pieces in (
        ("a cdo", ["a", "▁", "cdo"]),
        (" a  a", ["▁a", "▁", "▁a"]),
        ("do\n\n\ndo", ["do", "\n\n", "\n", "do"]),
        ("é<|turn>b", ["<0xC3>", "<0xA9>", "<|turn>", "b"]),
    ):
        ids = made.encode(text).ids
        assert ids == [2, *(place[piece] for piece in pieces)], text
        assert made.decode(ids[1:], skip_special_tokens=False) == text
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "unk_token": "<unk>"}')
    again, lost = vocabulary(tmp_path, len(words), {}, {}, "gemma4")
    assert not lost and "tokenizer.ggml.pre" not in again
    assert again["tokenizer.ggml.model"] == "gemma4" and again["tokenizer.ggml.merges"] == merges
    back = build_tokenizer(tmp_path, again)
    assert back.encode("a cdo\n\né").ids == made.encode("a cdo\n\né").ids
