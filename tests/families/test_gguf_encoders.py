"""Encoders in GGUF files: vectors and tokens are those of transformers on the same weights. The gguf package writes the
files, under the names that it knows of the tensors, as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolkit import PytorchEngineConfig, TurbomindEngineConfig, pipeline
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing
from toolkit.errors import ToolkitError
from toolkit.runners.native.library import available

gguf = pytest.importorskip("gguf")

TEXT = "The Ship, the harbour:  a café in Zürich—naïve! 水 and\tunaffable hills' end… [SEP] 😀"
WORDS = "the ship ##s harbour cafe in un ##aff ##able hill ##s' end and water ##s".split()
ARCHS = {"bert": "BERT", "nomic_bert": "NOMIC_BERT"}
CONFIGS = {
    "pytorch": PytorchEngineConfig(device_type="cpu", dtype="float32"),
    "turbomind": TurbomindEngineConfig(device="cpu", dtype="float32"),
}
BACKENDS = tuple(CONFIGS) if available() is None else ("pytorch",)


def words(capitals: bool = False) -> list[str]:
    letters = [chr(c) for c in range(97, 123)] + [*"!',.:;—…水", "unused"]
    letters += [chr(c) for c in range(65, 91)] if capitals else []
    inside = [f"##{c}" for c in letters if c.isalpha() and len(c) == 1]
    found = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", *letters, *inside, *WORDS]
    return list(dict.fromkeys(found))


def written(model: Path, path: Path, *, vocabulary: list[str] | None = None, q8: bool = False, **changes: Any) -> Path:
    """``changes``: metadata in place of what the converter writes; None: leave it out."""
    from safetensors.torch import load_file

    config = json.loads((model / "config.json").read_text())
    arch = getattr(gguf.MODEL_ARCH, ARCHS[config["model_type"]])
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    told: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.layer_norm_epsilon": config["layer_norm_eps"],
        "attention.causal": False,
        "pooling_type": gguf.PoolingType.MEAN.value,
    }
    if config["model_type"] == "nomic_bert":
        told["rope.freq_base"] = float(config["rope_parameters"]["rope_theta"])
    told = {f"{writer.arch}.{key}": value for key, value in told.items()}
    vocab = vocabulary or words()
    spelled = [w[2:] if w.startswith("##") else w if w[0] == "[" and i < 5 else f"▁{w}" for i, w in enumerate(vocab)]
    told |= {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.token_type_count": config["type_vocab_size"],
        "tokenizer.ggml.tokens": spelled,
        "tokenizer.ggml.token_type": [3] * 5 + [1] * (len(vocab) - 5),
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.cls_token_id": 2,
        "tokenizer.ggml.mask_token_id": 4,
    }
    for key, value in (told | changes).items():
        if isinstance(value, (list, str, bool)):
            {list: writer.add_array, str: writer.add_string, bool: writer.add_bool}[type(value)](key, value)
        elif value is not None:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, tensor in load_file(model / "model.safetensors").items():
        if (new := names.get_name(name, try_suffixes=(".weight", ".bias"))) is None:
            assert "pooler" in name, name
            continue
        if q8 and tensor.dim() == 2 and new.startswith("blk."):
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(new, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(new, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vectors(model: Path, parts: list[list[int]]) -> list[np.ndarray]:
    """transformers' mean of each text's states, of length 1."""
    from transformers import AutoModel

    theirs = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        means = [theirs(torch.tensor([part])).last_hidden_state[0].mean(0) for part in parts]
    return [(x / x.norm()).numpy() for x in means]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ARCHS)
@pytest.mark.parametrize("q8", [False, True])
def test_vectors_are_transformers(family: str, q8: bool, backend: str, tiny_models: Any, tmp_path: Path) -> None:
    """By the pooling that the file names, mean, not by that of a folder which says nothing."""
    model = tiny_models(family)
    file = written(model, tmp_path / "m.gguf", q8=q8)
    rng = np.random.default_rng(0)
    parts = [[int(x) for x in rng.integers(5, 80, n)] for n in (3, 60, 21)]
    with pipeline(str(file), CONFIGS[backend]) as pipe:
        found = pipe.get_embeddings(parts)
        assert "writes none" in (pipe("hello").error_message or "")
    for row, wanted in zip(found, vectors(model, parts), strict=True):
        np.testing.assert_allclose(row, wanted, atol=0.02 if q8 else 1e-4)
        assert row @ wanted > 0.999


def test_an_artifact_of_a_file_pools_as_it_says(tiny_models: Any, tmp_path: Path) -> None:
    file = written(tiny_models("bert"), tmp_path / "m.gguf")
    convert(str(file), str(tmp_path / "e"), Packing(target="torch"))
    rows = []
    for model in (file, tmp_path / "e"):
        with pipeline(str(model), CONFIGS["pytorch"]) as pipe:
            rows.append(pipe.get_embeddings([TEXT])[0])
    np.testing.assert_allclose(*rows, atol=2e-2)


@pytest.mark.parametrize("capitals", [False, True])
def test_tokens_are_bert_s(capitals: bool, tiny_models: Any, tmp_path: Path) -> None:
    from transformers import BertTokenizer

    vocab = words(capitals)
    theirs = BertTokenizer(vocab={w: i for i, w in enumerate(vocab)}, do_lower_case=not capitals)
    file = written(tiny_models("bert"), tmp_path / "m.gguf", vocabulary=vocab)
    ours = Tokenizer.open(open_checkpoint(file).tokenizer_dir)
    assert ours.encode(TEXT) == theirs(TEXT)["input_ids"]
    pair = ours.backend.encode("the ship", "a hill")
    wanted = theirs("the ship", "a hill")
    assert (pair.ids, pair.type_ids) == (wanted["input_ids"], wanted["token_type_ids"])
    ids = [vocab.index(w) for w in ("un", "##aff", "##able", "water", "##s")]
    assert ours.decode(ids) == "unaffable waters"


@pytest.mark.parametrize("names", [("bos", "eos"), ("cls", "separator")])
def test_other_names_of_the_tokens_around_a_text(names: tuple[str, str], tiny_models: Any, tmp_path: Path) -> None:
    gone = {f"tokenizer.ggml.{x}_token_id": None for x in ("cls", "seperator")}
    told = {f"tokenizer.ggml.{x}_token_id": i for x, i in zip(names, (2, 3), strict=True)}
    file = written(tiny_models("bert"), tmp_path / "m.gguf", **(gone | told))
    ids = Tokenizer.open(open_checkpoint(file).tokenizer_dir).encode("water")
    assert ids == [2, words().index("water"), 3]


@pytest.mark.parametrize(
    "key, value, told",
    [
        ("tokenizer.ggml.cls_token_id", None, "cls_token_id: expected a token id below [0-9]+, found 101"),
        ("tokenizer.ggml.unknown_token_id", 4000, "unknown_token_id: expected a token id below [0-9]+, found 4000"),
        ("tokenizer.ggml.cls_token_id", 7, "expected tokens like .CLS. and .SEP. around a text, found '[$]A'"),
        ("tokenizer.ggml.model", "t5", "expected gpt2, llama, gemma4 or bert, found 't5'"),
        ("bert.pooling_type", "mean", "pooling_type: expected a whole number, found 'mean'"),
    ],
)
def test_a_bad_file_is_told(key: str, value: Any, told: str, tiny_models: Any, tmp_path: Path) -> None:
    vocabulary = [*words()[:7], "$A", *words()[8:]]
    file = written(tiny_models("bert"), tmp_path / "m.gguf", vocabulary=vocabulary, **{key: value})
    with pytest.raises(ToolkitError, match=told):
        _ = open_checkpoint(file).tokenizer_dir
