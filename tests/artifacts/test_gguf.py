"""GGUF files against the ``gguf`` package, transformers' loader, and garbage."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from toolkit.artifacts.canonical import Dense, GroupInt
from toolkit.artifacts.checkpoint import Checkpoint, open_checkpoint
from toolkit.artifacts.gguf.container import read_container
from toolkit.artifacts.gguf.metadata import unsupported
from toolkit.artifacts.gguf.pre_tokenizers import BY_NAME, EITHER, STEPS, WHOLE_PIECES, build_cuts, name_of
from toolkit.artifacts.gguf.tokenizer import build_tokenizer, end_ids
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.artifacts.text.tokenizer_pieces import CONTROL, USER_DEFINED
from toolkit.artifacts.weights import canonical_weights, validate_checkpoint
from toolkit.errors import ToolkitError
from toolkit.models import registry
from toolkit.models.registry import load_spec
from toolkit.models.tiny import tiny_config

# No llama3 rope here: GGUF keeps it as a tensor, which has its own test.
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
ARCHS: dict[str, dict[str, Any]] = {
    "llama": PLAIN,
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "phi3": {**PLAIN, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def files(support: Any) -> Any:
    return support("gguf_files")


def valid(path: Path) -> tuple[Checkpoint, dict[str, Any]]:
    checkpoint = open_checkpoint(path)
    stored = load_spec(checkpoint)[1]
    validate_checkpoint(checkpoint, stored)
    return checkpoint, canonical_weights(checkpoint, stored)


@pytest.mark.parametrize("arch", ARCHS)
def test_names_rearrangements_and_config_come_back(tiny_models: Any, tmp_path: Path, files: Any, arch: str) -> None:
    model = tiny_models(arch, **ARCHS[arch])
    checkpoint, _ = valid(files.write_gguf(model, tmp_path / "m.gguf"))
    expected = load_file(model / "model.safetensors")
    assert set(checkpoint.names()) == set(expected)
    for name, tensor in expected.items():
        exact = arch != "gemma2" or "norm" not in name  # 1 + w - 1 rounds
        found = checkpoint.tensor(name)
        assert torch.equal(found, tensor) if exact else torch.allclose(found, tensor, atol=1e-6), name
    assert load_spec(checkpoint)[0] == load_spec(open_checkpoint(model))[0]


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16", "F32"])
def test_types_equal_the_reference_dequantization(tiny_models: Any, tmp_path: Path, files: Any, kind: str) -> None:
    model = tiny_models("qwen2", **ARCHS["qwen2"])
    checkpoint, weights = valid(files.write_gguf(model, tmp_path / "m.gguf", kind))
    for name, tensor in load_file(model / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if tensor.ndim < 2:
            continue
        expected = files.dequantized(tensor, kind)
        assert torch.equal(weights[stem].dequantize(), expected), name
        assert torch.equal(checkpoint.tensor(name).float(), expected), name
    weight = weights["model.layers.0.self_attn.q_proj"]
    if kind.startswith("Q"):
        assert isinstance(weight, GroupInt)
        assert (weight.bits, weight.group_size) == (8 if kind == "Q8_0" else 4, 32)
        assert weight.symmetric == (kind != "Q4_1") and (weight.minima is not None) == (kind == "Q4_1")
    else:
        assert isinstance(weight, Dense)


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_transformers_loads_the_same_weights(tiny_models: Any, tmp_path: Path, files: Any, arch: str) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    path = files.write_gguf(tiny_models(arch, **ARCHS[arch]), tmp_path / "m.gguf", "Q8_0", llama__vocab_size=320)
    reference = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).state_dict()
    checkpoint, _ = valid(path)
    for name in checkpoint.names():
        assert torch.equal(checkpoint.tensor(name).float(), reference[name]), name


def test_side_files_make_a_working_tokenizer(tiny_models: Any, tmp_path: Path, files: Any, home: Path) -> None:
    from transformers import AutoTokenizer

    model = tiny_models("llama", **PLAIN)
    checkpoint = open_checkpoint(files.write_gguf(model, tmp_path / "m.gguf"))
    assert checkpoint.tokenizer_dir.is_relative_to(home)
    ours, theirs = AutoTokenizer.from_pretrained(checkpoint.tokenizer_dir), AutoTokenizer.from_pretrained(model)
    for text in ("Call me Ishmael.", "a  1\n\n 22 naïve 日本", "<|im_start|>user\nHi<|im_end|>", ""):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert (ours.bos_token_id, ours.eos_token_id, ours.model_max_length) == (1, 2, 512)
    assert ours.chat_template == "{{ messages[0]['content'] }}"
    assert open_checkpoint(tmp_path / "m.gguf").tokenizer_dir == checkpoint.tokenizer_dir
    assert len(list((home / "gguf").iterdir())) == 1


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({"scale_linear": 4.0}, 4.0),
        ({"scaling__factor": 2.0}, 2.0),
        ({"scaling__factor": 2.0, "scaling__type": "linear"}, 2.0),
        ({"scaling__factor": 2.0, "scaling__type": "none"}, None),
        ({"scale_linear": 1.0}, None),
    ],
)
def test_positions_are_stretched_as_llama_cpp_does(
    tiny_models: Any, tmp_path: Path, files: Any, keys: dict[str, Any], factor: float | None
) -> None:
    """Linearly where a file has a factor and no type, and by the key of older files."""
    stated = {f"llama__rope__{name}": value for name, value in keys.items()}
    config = open_checkpoint(files.write_gguf(tiny_models("llama", **PLAIN), tmp_path / "m.gguf", **stated)).config
    assert config.get("rope_scaling") == (None if factor is None else {"rope_type": "linear", "factor": factor})


def test_several_chat_templates(tiny_models: Any, tmp_path: Path, files: Any, home: Path) -> None:
    """As llama.cpp's converter names them; a name that leads elsewhere is none."""
    key = "tokenizer.chat_template."
    more = {
        "tokenizer.chat_templates": ["rag", "tool_use"],
        f"{key}rag": "of documents",
        f"{key}tool_use": "{{ tools }}",
    }
    strange = {f"{key}../../up": "x", f"{key}a/b": "x", f"{key}number": 5, f"{key}empty": ""}
    path = files.write_gguf(tiny_models("llama", **PLAIN), tmp_path / "m.gguf", **more, **strange)
    tokenizer = Tokenizer.open(open_checkpoint(path).tokenizer_dir)
    usual = "{{ messages[0]['content'] }}"
    assert tokenizer.chat_templates == {"default": usual, "rag": "of documents", "tool_use": "{{ tools }}"}
    assert not list(home.rglob("up.jinja"))


def test_thousands_of_added_tokens_are_read_in_no_time(tmp_path: Path) -> None:
    """Gemma 3 has more than 6,000; one by one they took a minute."""
    names = [f"<unused{i}>" for i in range(4000)]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": np.array([CONTROL, USER_DEFINED] * 2000, np.int32),
    }
    begun = time.process_time()
    built = build_tokenizer(tmp_path, metadata)
    assert time.process_time() - begun < 3
    added = built.get_added_tokens_decoder()
    assert [added[i].content for i in range(4000)] == names and [added[i].special for i in (0, 1)] == [True, False]


def test_another_version_writes_the_side_files_anew(
    tiny_models: Any, tmp_path: Path, files: Any, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may read the metadata better."""
    path = files.write_gguf(tiny_models("llama", **PLAIN), tmp_path / "m.gguf")
    before = open_checkpoint(path).tokenizer_dir
    monkeypatch.setattr("toolkit.artifacts.gguf.checkpoint.__version__", "9.9")
    assert open_checkpoint(path).tokenizer_dir != before


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a  12", ["a", "Ġ", "Ġ12"]),
        ("smollm", "a  12", ["a", "ĠĠ", "1", "2"]),
        ("qwen2", "a  12\n\nB's", ["a", "Ġ", "Ġ", "1", "2", "ĊĊ", "B", "'s"]),
        ("llama-bpe", "a 12345", ["a", "Ġ", "123", "45"]),
    ],
)
def test_pre_tokenizers(pre: str, text: str, pieces: list[str]) -> None:
    from toolkit.artifacts.gguf.tokenizer import build_tokenizer

    tokens = ["<s>", *"ab"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a b"] if "ab" in tokens else [],
        "tokenizer.ggml.token_type": np.array([3, 1, 1], np.int32),
    }
    built = build_tokenizer(Path("x.gguf"), metadata)
    assert built.pre_tokenizer is not None
    assert [piece for piece, _ in built.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("names", STEPS, ids=lambda names: names[0])
def test_texts_are_cut_as_llama_cpp_does_and_the_way_comes_back_under_its_name(names: tuple[str, ...]) -> None:
    """``llama_cpp_pieces.json``: what llama-cpp-python 0.3.36 made of the text, with a token and merges for each of its
    parts, so that a piece becomes one token; of deepseek-llm, what its patterns say."""
    oracle = json.loads((Path(__file__).parent / "llama_cpp_pieces.json").read_text(encoding="utf-8"))
    made = build_cuts(BY_NAME[names[-1]])
    assert [piece for piece, _ in made.pre_tokenize_str(oracle["text"])] == oracle["pieces"][names[0]]
    found = json.loads(made.__getstate__())
    parts = found["pretokenizers"] if found["type"] == "Sequence" else [found]
    whole = names[0] in WHOLE_PIECES
    assert name_of(parts, whole) == names[0]
    assert names[0] in EITHER or name_of(parts, not whole) != names[0]
    raw = [{**part, "pattern": {"Regex": part["pattern"]["Regex"].replace("\\r", "\r").replace("\\n", "\n")}}
           if part["type"] == "Split" else part for part in parts]  # fmt: skip
    assert name_of(raw, whole) == names[0]
    spaced = [{**part, "add_prefix_space": True} if part["type"] == "ByteLevel" else part for part in parts]
    assert name_of(spaced, whole) is None


@pytest.mark.parametrize("part", [
    {"type": "Split", "pattern": {"Regex": "x+"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": BY_NAME["gpt-2"][0]}, "behavior": "Removed", "invert": False},
    {"type": "Metaspace"},
])  # fmt: skip
def test_an_unknown_way_of_cutting_has_no_name(part: dict[str, Any]) -> None:
    assert name_of([part, {"type": "ByteLevel", "use_regex": False}], False) is None
    assert name_of([], False) is None


@pytest.mark.parametrize(
    "steps, cut, lost",
    [
        (["NFC"], "gpt-2", "NFC"),  # which no reader of "gpt-2" knows of
        (["NFC"], "qwen2", None),
        ([], "gpt-2", None),
    ],
)
def test_a_normalizer_that_the_file_cannot_say_is_told(
    steps: list[str], cut: str, lost: str | None, tiny_models: Any, tmp_path: Path
) -> None:
    from toolkit.convert.formats import rewrite

    path = tmp_path / "model"
    shutil.copytree(tiny_models("llama"), path)
    data = json.loads((path / "tokenizer.json").read_text())
    data["normalizer"] = {"type": "Sequence", "normalizers": [{"type": step} for step in steps]} if steps else None
    data["pre_tokenizer"] = json.loads(build_cuts(BY_NAME[cut]).__getstate__())
    (path / "tokenizer.json").write_text(json.dumps(data))
    notes = rewrite(str(path), tmp_path / "m.gguf", to="gguf").notes
    said = f"the tokenizer's {lost} has no place in GGUF: there text that it would change is cut otherwise"
    assert [note for note in notes if "tokenizer" in note] == ([said] if lost else [])


@pytest.mark.parametrize(
    "around, flags",
    [
        ("$A", {"add_bos_token": True}),  # which the post-processor does not say
        ("<s> $A", {"add_bos_token": False}),
        ("$A </s>", {}),  # as models do whose last token is pooled
        ("$A <|im_end|>", {}),  # which ends no answer
        ("<s> $A </s>", {"add_eos_token": False}),
    ],
)
def test_what_is_put_around_texts_goes_into_the_file_and_comes_back(
    around: str, flags: dict[str, bool], tiny_models: Any, tmp_path: Path, home: Path
) -> None:
    from tokenizers.processors import TemplateProcessing

    from toolkit.convert.formats import rewrite

    path = tmp_path / "model"
    shutil.copytree(tiny_models("llama"), path)
    data = json.loads((path / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in data["added_tokens"]}
    made = TemplateProcessing(single=around, pair="$A $B", special_tokens=list(ids.items()))
    data["post_processor"] = json.loads(made.__getstate__())
    (path / "tokenizer.json").write_text(json.dumps(data))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | flags))
    rewrite(str(path), tmp_path / "m.gguf", to="gguf")
    found, told = Tokenizer.open(path), Tokenizer.open(open_checkpoint(tmp_path / "m.gguf").tokenizer_dir)
    assert found.encode("a b") == told.encode("a b")
    assert set(found.eos_ids) <= set(told.eos_ids)


@pytest.mark.parametrize(
    "tokens, named, ends",
    [
        (["<|return|>", "<|end|>", "<|call|>", "<|endoftext|>"], {"eos": 0}, [0, 2, 3]),  # gpt-oss
        (["<|endoftext|>", "<|end|>", "<|user|>"], {"eos": 0}, [0, 1]),  # Phi-3
        (["<|endoftext|>", "<|user|>", "<|observation|>"], {"eos": 0, "eot": 1, "eom": 2}, [0, 1, 2]),  # GLM 4.5
        (["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"], {"eos": 1}, [1, 0, 2]),  # Llama 3.1
        (["<bos>", "b"], {}, []),
    ],
)
def test_what_ends_an_answer_has_its_name_or_its_place(
    tokens: list[str], named: dict[str, int], ends: list[int]
) -> None:
    metadata = {f"tokenizer.ggml.{name}_token_id": i for name, i in named.items()}
    types = np.array([CONTROL] * len(tokens) + [1], np.int32)
    metadata |= {"tokenizer.ggml.tokens": [*tokens, "</s>"], "tokenizer.ggml.token_type": types}
    assert end_ids(metadata) == ends  # and no text that looks like one, as Gemma's "</s>"


def test_three_ends_of_answers_are_written(tiny_models: Any, tmp_path: Path, home: Path) -> None:
    from toolkit.convert.formats import rewrite

    path = tmp_path / "model"
    shutil.copytree(tiny_models("llama"), path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3, 0]}))
    rewrite(str(path), tmp_path / "m.gguf", to="gguf")
    assert {0, 2, 3} <= set(Tokenizer.open(open_checkpoint(tmp_path / "m.gguf").tokenizer_dir).eos_ids)


def test_tokens_that_are_never_drawn_are_kept(tiny_models: Any, tmp_path: Path, home: Path) -> None:
    """As llama.cpp's converter writes Gemma 4's, and its sampler reads them."""
    from toolkit.artifacts.text.suppressed import suppressed_tokens
    from toolkit.convert.formats import rewrite

    path = tmp_path / "model"
    shutil.copytree(tiny_models("llama"), path)
    (path / "generation_config.json").write_text(json.dumps({"suppress_tokens": [9, 7, 5000]}))
    rewrite(str(path), tmp_path / "m.gguf", to="gguf")
    assert read_container(tmp_path / "m.gguf").metadata["tokenizer.ggml.suppress_tokens"].tolist() == [9, 7]
    assert suppressed_tokens(open_checkpoint(tmp_path / "m.gguf").tokenizer_dir, 320) == (9, 7)


def test_sentencepiece_vocabulary(tmp_path: Path) -> None:
    """Merges follow the scores, spaces become ▁, unknown characters fall back to bytes, and a space is put in front."""
    from toolkit.artifacts.gguf.tokenizer import build_tokenizer

    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    pieces = ["\u2581", "l", "o", "w", "e", "r", "lo", "er", "\u2581lo", "low", "ower"]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces]
    scores = [0.0] * 259 + [-1000.0] * 6 + [-1.0, -2.0, -3.0, -4.0, -0.5]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(pieces), np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    built = build_tokenizer(tmp_path, metadata)
    assert built.encode("lower").tokens == ["<s>", "\u2581lo", "w", "er"]
    encoded = built.encode("low é")
    assert encoded.tokens == ["<s>", "\u2581lo", "w", "\u2581", "<0xC3>", "<0xA9>"]
    assert built.decode(encoded.ids) == "low é"


@pytest.mark.parametrize("original", [8192, 64], ids=["llama3", "other factors"])
def test_rope_factors_turn_as_the_original_does(tiny_models: Any, tmp_path: Path, files: Any, original: int) -> None:
    """llama.cpp stores Llama 3's rope scaling as one factor a frequency."""
    from toolkit.models.rope import inv_freq

    parameters = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    model = tiny_models("llama", rope_parameters=parameters)
    rope = load_spec(open_checkpoint(model))[0].attention_layers()[0][1].rope
    assert rope is not None
    expected, _ = inv_freq(rope, False)
    factors = (10000.0 ** -(np.arange(len(expected)) / len(expected)) / expected).astype(np.float32)
    checkpoint, _ = valid(files.write_gguf(model, tmp_path / "m.gguf", extra={"rope_freqs.weight": factors}))
    found = load_spec(checkpoint)[0].attention_layers()[0][1].rope
    assert found is not None and (found.kind == "llama3") == (original == 8192)
    for long in (False, True):
        frequencies, attention = inv_freq(found, long)
        assert np.allclose(frequencies, expected, rtol=1e-6) and attention == 1.0


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe"])
def test_experts_that_no_layer_has_are_a_reason(family: str) -> None:
    config = tiny_config(next(x for x in registry.families() if x.name == family))
    spec, _ = registry.build(config | {"first_k_dense_replace": config["num_hidden_layers"]})
    assert "experts, this model has none" in str(unsupported(spec))


def test_latent_attention_in_two_tensors_is_one_matrix(tiny_models: Any, tmp_path: Path) -> None:
    """As llama.cpp writes it today: each head's keys transposed, its values apart, and a latent that is the one key."""
    from toolkit.artifacts.gguf.writer import Entry, write_gguf
    from toolkit.convert.convert import convert
    from toolkit.convert.formats import rewrite

    model = tiny_models("deepseek_v2")
    rewrite(str(model), tmp_path / "one.gguf", to="gguf", quiet=True)
    one = read_container(tmp_path / "one.gguf")
    heads, nope, v, rank, turned = 4, 16, 16, 32, 32
    arrays = {name: one.raw(name).view("<f4").reshape(info.shape) for name, info in one.tensors.items()}
    for name in [name for name in arrays if "attn_kv_b" in name]:
        both = arrays.pop(name).reshape(heads, nope + v, rank)
        arrays[name.replace("kv_b", "k_b")] = np.ascontiguousarray(both[:, :nope].transpose(0, 2, 1))
        arrays[name.replace("kv_b", "v_b")] = np.ascontiguousarray(both[:, nope:])
    sizes = {"head_count_kv": 1, "key_length": rank + turned, "value_length": rank, "key_length_mla": nope + turned}
    stated = {f"deepseek2.attention.{key}": value for key, value in (sizes | {"value_length_mla": v}).items()}
    entries = [Entry(name, array.shape, "F32") for name, array in arrays.items()]
    data = [array.reshape(-1).view(np.uint8) for array in arrays.values()]
    write_gguf(tmp_path / "two.gguf", one.metadata | stated, entries, data)
    checkpoint, found = valid(tmp_path / "two.gguf")
    assert load_spec(checkpoint)[0] == load_spec(open_checkpoint(tmp_path / "one.gguf"))[0]
    expected = valid(model)[1]["model.layers.1.self_attn.kv_b_proj"]
    assert torch.equal(found["model.layers.1.self_attn.kv_b_proj"].dequantize(), expected.dequantize())
    convert(str(tmp_path / "two.gguf"), tmp_path / "engine", quiet=True)  # asks the headers alone what it will be


# --- what cannot be read -------------------------------------------------------------------------------------------


def refused(path: Path, *words: str) -> None:
    with pytest.raises(ToolkitError) as caught:
        valid(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    for word in words:
        assert word in message, message


@pytest.fixture
def good(tiny_models: Any, tmp_path: Path, files: Any) -> Path:
    return files.write_gguf(tiny_models("llama", **PLAIN), tmp_path / "m.gguf", "Q8_0")


@pytest.mark.parametrize("raw", [b"", b"GGUF", b"x" * 100, b"GGUF" + b"\xff" * 100, b"FUGG" + bytes(100)])
def test_garbage(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "m.gguf").write_bytes(raw)
    refused(tmp_path / "m.gguf", "GGUF")


def test_other_versions(good: Path) -> None:
    raw = bytearray(good.read_bytes())
    raw[4:8] = struct.pack("<I", 1)
    good.write_bytes(raw)
    refused(good, "version", "1")


@pytest.mark.parametrize("size", [30, 1000, -1000, -100_000])
def test_truncated(good: Path, size: int) -> None:
    good.write_bytes(good.read_bytes()[:size])
    refused(good)


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv7")
    writer.add_tensor("x", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "m.gguf", "rwkv7", "llama", "qwen2")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama__attention__head_count", 3),
        ("llama__attention__head_count", 0),
        ("llama__attention__head_count_kv", 7),
        ("llama__embedding_length", "wide"),
        ("llama__embedding_length", 63),
        ("llama__block_count", 3),
        ("llama__nextn_predict_layers", 2),
        ("llama__attention__layer_norm_rms_epsilon", float("nan")),
        ("llama__expert_count", 8),
        ("llama__rope__scaling__type", "warp"),
        ("general__alignment", 0),
    ],
)
def test_metadata_at_odds_with_the_tensors(
    tiny_models: Any, tmp_path: Path, files: Any, key: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf

    real = gguf.GGUFWriter.add_key_value

    def replaced(self: Any, name: str, old: Any, kind: Any, *rest: Any) -> None:
        """Let later values win: the writer refuses a key twice."""
        self.kv_data[0].pop(name, None)
        real(self, name, old, kind, *rest)

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", replaced)
    path = files.write_gguf(tiny_models("llama", **PLAIN), tmp_path / "m.gguf", **{key: value})
    refused(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.model", "rwkv"),
        ("tokenizer.ggml.pre", "martian"),
        ("tokenizer.ggml.tokens", None),
        ("tokenizer.ggml.tokens", 3),
        ("tokenizer.ggml.merges", ["nospace"]),
        ("tokenizer.ggml.merges", ["not there"]),
        ("tokenizer.ggml.merges", None),
        ("tokenizer.ggml.token_type", None),
        ("tokenizer.ggml.bos_token_id", 10_000_000),
        ("tokenizer.ggml.bos_token_id", "one"),
    ],
)
def test_broken_tokenizers_are_one_line(good: Path, tmp_path: Path, key: str, value: Any) -> None:
    from toolkit.artifacts.gguf.tokenizer import write_tokenizer

    metadata = {**read_container(good).metadata, key: value}
    with pytest.raises(ToolkitError, match=r"tokenizer\.ggml"):
        write_tokenizer(good, metadata, 512, tmp_path)


@pytest.fixture(scope="session")
def sample(tiny_models: Any, support: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sample") / "m.gguf"
    return support("gguf_files").write_gguf(tiny_models("llama", **PLAIN), path, "Q4_0").read_bytes()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_mutation_gets_past_as_anything_but_an_error_line(
    data: st.DataObject, sample: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    head = 12_000  # metadata and tensor table; what follows is numbers
    raw = bytearray(sample)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, head))
        patch = data.draw(st.binary(min_size=1, max_size=8))
        raw[at : at + len(patch)] = patch
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    path.write_bytes(raw)
    try:
        checkpoint, _ = valid(path)
        assert checkpoint.gguf is not None
        target = path.parent / "side"
        target.mkdir()
        checkpoint.gguf.write_configs(target)
    except ToolkitError as error:
        assert "\n" not in str(error)
    finally:
        shutil.rmtree(path.parent)


def test_opening_needs_no_torch(good: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from toolkit.artifacts.checkpoint import open_checkpoint\n"
        f"open_checkpoint(Path({str(good)!r})).tokenizer_dir\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
