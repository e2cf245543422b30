"""What is said of GGUF files that cannot be read: the whole line."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.gguf.architectures import family_of
from toolkit.artifacts.gguf.container import read_container
from toolkit.artifacts.weights import canonical_weights, validate_checkpoint
from toolkit.convert.formats import rewrite
from toolkit.errors import ToolkitError
from toolkit.models.registry import load_spec

Change = Callable[[dict[str, Any], dict[str, np.ndarray]], Any]
PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
F32, Q8_0 = 0, 8  # types by their numbers


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path / "home"))


def raw(*tensors: tuple[bytes, tuple[int, ...], int, int], data: int = 64) -> bytes:
    """A file without metadata: (name, shape as GGUF has it, type, offset) of each tensor, then zeros."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 0)
    for name, shape, kind, offset in tensors:
        head += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}QIQ", *shape, kind, offset)
    return head + bytes(-len(head) % 32 + data)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"GGUF" + bytes(9), "expected a GGUF file, found 13 bytes; fetch it again"),
        (b"PK\3\4" + bytes(60), r"not a GGUF file: it starts with b'PK\x03\x04', expected b'GGUF'"),
        (raw((b"t", (0,), F32, 0)), "tensor t: shape [0] is impossible for F32; fetch the file again"),
        (raw((b"t", (31, 2), Q8_0, 0)), "tensor t: shape [2, 31] is impossible for Q8_0; fetch the file again"),
        (
            raw((b"t", (64,), F32, 0)),
            "tensor t: truncated: it ends at byte 320, the file at 128; fetch the file again",
        ),
        (raw((b"a", (8,), F32, 0), (b"b", (8,), F32, 16)), "tensor b: overlaps another; fetch the file again"),
        (raw((b"a", (8,), F32, 0), (b"a", (8,), F32, 32)), "tensor a: occurs twice; fetch the file again"),
    ],
)
def test_a_broken_container(tmp_path: Path, content: bytes, told: str) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ToolkitError) as error:
        read_container(file)
    assert str(error.value) == f"{file}: {told}"


@pytest.fixture(scope="module")
def plain(tiny_models: Any, support: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound file of a llama."""
    path = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    written: Path = support("gguf_files").write_gguf(tiny_models("llama", **PLAIN), path)
    return written


def rewritten(source: Path, target: Path, change: Change) -> Path:
    """``source``, of float32 alone, with its metadata and tensors as ``change`` leaves them."""
    container = read_container(source)
    metadata = dict(container.metadata)
    tensors = {
        name: container.raw(name).view(np.float32).reshape(info.shape) for name, info in container.tensors.items()
    }
    change(metadata, tensors)
    writer = gguf.GGUFWriter(target, metadata.pop("general.architecture"))
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        add.get(type(value), lambda k, v: writer.add_array(k, np.asarray(v).tolist()))(key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def opened(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    stored = load_spec(checkpoint)[1]
    validate_checkpoint(checkpoint, stored)
    canonical_weights(checkpoint, stored)
    assert checkpoint.tokenizer_dir.is_dir()


Q, UP, T = "blk.0.attn_q.weight", "blk.0.ffn_up.weight", "tokenizer.ggml"


def key(name: str, value: Any) -> Change:
    """Another value under a key; None: the key goes."""
    return lambda metadata, tensors: metadata.pop(name) if value is None else metadata.update({name: value})


def tensor(name: str, *shape: int) -> Change:
    """A tensor of zeros; without a shape it goes."""
    return lambda metadata, tensors: tensors.update({name: np.zeros(shape, np.float32)}) if shape else tensors.pop(name)


NOT_THERE = "is missing; fetch the file again"
DISAGREE = "config.json and weights disagree"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (key(f"{T}.tokens", 5), f"{T}.tokens: expected a list of texts, found 5"),
        (key(f"{T}.tokens", None), f"{T}.tokens is missing: the file has no tokenizer"),
        (key(f"{T}.model", "rwkv"), f"{T}.model: expected gpt2, llama, gemma4 or bert, found 'rwkv'"),
        (key(f"{T}.model", "llama"), f"{T}.scores: expected 320 entries, found nothing"),
        (key(f"{T}.token_type", [1, 1]), f"{T}.token_type: expected 320 entries, found 2"),
        (key(f"{T}.token_type", None), f"{T}.token_type: expected 320 entries, found nothing"),
        (key(f"{T}.merges", None), f"{T}.merges: expected a list of strings, found None"),
        (key(f"{T}.merges", ["ab"]), f"{T}.merges: expected pairs of tokens, found 'ab'"),
        (key(f"{T}.merges", ["zz yy"]), f"{T}.merges: Error while initializing BPE: Token `zz` out of vocabulary"),
        (
            key(f"{T}.suppress_tokens", np.array([1, 320])),
            f"{T}.suppress_tokens: expected token ids below 320, found [1, 320]",
        ),
        (key(f"{T}.unknown_token_id", 320), f"{T}.unknown_token_id: expected a token id below 320, found 320"),
        (key("llama.rope.scaling.type", "spiral"), "llama.rope.scaling.type: expected linear or yarn, found 'spiral'"),
        (
            key("split.count", 3),
            "is file 1 of the 3 of a model; expected …-00001-of-00003.gguf for a name",
        ),
        (key("llama.block_count", 10**6), "llama.block_count: expected at most 1000, found 1000000"),
        (
            key("llama.attention.head_count", "four"),
            "llama.attention.head_count: expected a positive whole number, found 'four'",
        ),
        (
            key("llama.attention.layer_norm_rms_epsilon", None),
            "llama.attention.layer_norm_rms_epsilon: expected a number, found None",
        ),
        (tensor("token_embd.weight"), f"tensor token_embd.weight {NOT_THERE}"),
        (tensor(Q, 65, 64), f"tensor {Q}: 65 rows do not make 4 heads"),
        (tensor(UP, 2, 3, 4), f"tensor {UP}: F32 [2, 3, 4] cannot be model.layers.0.mlp.up_proj"),
        (tensor("blk.0.nothing.weight", 4, 4), "tensor 'blk.0.nothing.weight' has no place in llama"),
        (tensor("blk.².attn_q.weight", 4, 4), "tensor 'blk.².attn_q.weight' has no place in llama"),
        (
            tensor(Q),
            "tensor model.layers.0.self_attn.q_proj.weight is missing, expected F16 or BF16 or F32 [64, 64]; fetch or "
            "convert the model again, or correct config.json",
        ),
        (
            tensor(UP, 3, 64),
            f"tensor model.layers.0.mlp.up_proj.weight: expected shape [128, 64], found [3, 64]; {DISAGREE}",
        ),
    ],
)
def test_a_file_that_is_no_model(plain: Path, tmp_path: Path, change: Change, told: str) -> None:
    file = rewritten(plain, tmp_path / "m.gguf", change)
    with pytest.raises(ToolkitError) as error:
        opened(file)
    assert str(error.value) == f"{file}: {told}"


@pytest.mark.parametrize("padding", [320, 2**32 - 1])
def test_a_padding_that_is_no_token_is_left_out(plain: Path, tmp_path: Path, padding: int) -> None:
    """As llama.cpp does: converters write what a tokenizer said that had more tokens."""
    file = rewritten(plain, tmp_path / "m.gguf", key(f"{T}.padding_token_id", padding))
    opened(file)
    assert open_checkpoint(file).config["pad_token_id"] is None


def test_a_block_of_a_number_that_none_has(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="has no place in llama"):
        opened(rewritten(plain, tmp_path / "m.gguf", tensor(f"blk.{'9' * 5000}.x", 4, 4)))


def test_an_architecture_that_has_no_experts() -> None:
    file, metadata = Path("m.gguf"), {"general.architecture": "gemma2", "gemma2.expert_count": 4}
    with pytest.raises(ToolkitError) as error:
        family_of(file, metadata)
    told = "m.gguf: gemma2 with experts cannot be read from GGUF; give the safetensors checkpoint"
    assert str(error.value) == told


VISION, POSITIVE = "clip.vision", "expected a positive whole number"
PROJECTORS = (
    "gemma3, gemma4v, gemma4uv, glm4v, idefics3, internvl, lightonocr, llama4, mlp, resampler, pixtral, paddleocr, "
    "qwen2.5vl_merger, qwen2vl_merger"
)


@pytest.fixture(scope="module")
def seeing(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of models that see, each with what it sees with beside it."""
    folder = tmp_path_factory.mktemp("seeing")
    for family in ("llava", "minicpmv"):
        (folder / family).mkdir()
        rewrite(str(tiny_models(family)), folder / family / "m.gguf", to="gguf", gguf_type="f32")
    return {family: folder / family for family in ("llava", "minicpmv")}


@pytest.mark.parametrize(
    ("family", "change", "told"),
    [
        (
            "llava",
            key("clip.projector_type", "odd"),
            f"clip.projector_type: expected {PROJECTORS}, qwen3vl_merger, found 'odd'; without the file texts are read",
        ),
        ("llava", key(f"{VISION}.patch_size", "x"), f"{VISION}.patch_size: {POSITIVE}, found 'x'"),
        (
            "llava",
            key(f"{VISION}.attention.layer_norm_epsilon", "x"),
            f"{VISION}.attention.layer_norm_epsilon: expected a number, found 'x'",
        ),
        ("llava", key(f"{VISION}.image_mean", None), f"{VISION}.image_mean: expected three numbers, found None"),
        (
            "llava",
            key(f"{VISION}.feature_layer", 5),
            f"{VISION}.feature_layer: expected a list of whole numbers, found 5",
        ),
        (
            "llava",
            key(f"{VISION}.feature_layer", [1, 2]),
            f"{VISION}.feature_layer: expected one layer, found [1, 2]: no model here reads rows of several",
        ),
        ("llava", tensor("v.patch_embd.weight"), f"tensor v.patch_embd.weight {NOT_THERE}"),
        ("llava", tensor("v.blk.0.ffn_up.weight"), "tensor v.blk.0.ffn_up.weight: expected a matrix, found None"),
        ("llava", tensor("mm.0.weight", 3, 3), "tensor mm.0.weight: expected (64, 32), found 9 numbers"),
        (
            "minicpmv",
            key("clip.minicpmv_version", 9),
            "clip.minicpmv_version: expected 2 (MiniCPM-V 2.5) or 3 (2.6), found 9",
        ),
        (
            "minicpmv",
            key("clip.minicpmv_version", "x"),
            "clip.minicpmv_version: expected a whole number, found 'x'",
        ),
    ],
)  # fmt: skip
def test_a_file_beside_a_model(seeing: dict[str, Path], tmp_path: Path, family: str, change: Change, told: str) -> None:
    shutil.copy(seeing[family] / "m.gguf", tmp_path / "m.gguf")
    file = rewritten(seeing[family] / "mmproj-m.gguf", tmp_path / "mmproj-m.gguf", change)
    with pytest.raises(ToolkitError) as error:
        opened(tmp_path / "m.gguf")
    assert str(error.value) == f"{file}: {told}"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (key("general.name", "x"), "the model beside it has no token <unk>, which its pictures need"),
        (key("clip.projector_type", "odd"), "clip.projector_type: expected "),
        (key("clip.projector_type", "qwen2vl_merger"), "it is for models of qwen2vl, the one beside it is llama"),
    ],
)
def test_a_text_model_opens_beside_what_another_sees_with(
    tiny_models: Any,
    seeing: dict[str, Path],
    tmp_path: Path,
    change: Change,
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both are of one width. Under its own name the file is meant for it, and refused."""
    rewrite(str(tiny_models("llama")), tmp_path / "text.gguf", to="gguf", gguf_type="f32")
    other = rewritten(seeing["llava"] / "mmproj-m.gguf", tmp_path / "mmproj-other.gguf", change)
    assert load_spec(open_checkpoint(tmp_path / "text.gguf"))[0].vision is None
    assert f"{other}: {told}" in caplog.text
    other.rename(tmp_path / "mmproj-text.gguf")
    with pytest.raises(ToolkitError, match=told[:20]):
        open_checkpoint(tmp_path / "text.gguf")


def test_a_broken_file_beside_several_models_is_none_of_theirs(
    tiny_models: Any, seeing: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One model's alone it is, or one's whose name it has: those are refused."""
    rewrite(str(tiny_models("llama")), tmp_path / "text.gguf", to="gguf", gguf_type="f32")
    broken = tmp_path / "mmproj-broken.gguf"
    broken.write_bytes((seeing["llava"] / "mmproj-m.gguf").read_bytes()[:5000])
    with pytest.raises(ToolkitError, match=r"mmproj-broken\.gguf"):
        open_checkpoint(tmp_path / "text.gguf")
    shutil.copy(seeing["llava"] / "m.gguf", tmp_path / "m.gguf")
    shutil.copy(seeing["llava"] / "mmproj-m.gguf", tmp_path / "mmproj-m.gguf")
    assert load_spec(open_checkpoint(tmp_path / "m.gguf"))[0].vision is not None
    assert load_spec(open_checkpoint(tmp_path / "text.gguf"))[0].vision is None
    assert f"text.gguf is read without a file beside it: {broken}: " in caplog.text
    broken.rename(tmp_path / "mmproj-text.gguf")
    with pytest.raises(ToolkitError, match=r"mmproj-text\.gguf"):
        open_checkpoint(tmp_path / "text.gguf")


def test_what_is_beside_a_model_under_another_name_is_found(seeing: dict[str, Path], tmp_path: Path) -> None:
    shutil.copy(seeing["llava"] / "m.gguf", tmp_path / "m-q8.gguf")
    shutil.copy(seeing["llava"] / "mmproj-m.gguf", tmp_path / "mmproj-m-f32.gguf")
    assert load_spec(open_checkpoint(tmp_path / "m-q8.gguf"))[0].vision is not None
