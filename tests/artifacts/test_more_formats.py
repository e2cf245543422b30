"""GPTQ writing, compressed-tensors, auto-round, blocked fp8 and mxfp4 against naive readers written from the formats.

The naive ones go bit by bit in Python integers and share nothing with the package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from toolkit.artifacts.canonical import BlockFp8, ChannelInt8, Dense, Fp4, Fp8, GroupInt, Weight
from toolkit.artifacts.checkpoint import Checkpoint, open_checkpoint
from toolkit.artifacts.formats import FORMATS, auto_round, awq, blocked_fp8, compressed_tensors, gptq, mxfp4
from toolkit.artifacts.formats.bits import pack_words, unpack_whole_words, unpack_words
from toolkit.artifacts.formats.describe import layout_of
from toolkit.artifacts.rounding import nearest_fp4, to_block_fp8, to_channel_int8, to_mxfp4
from toolkit.artifacts.weights import load_stored, validate_checkpoint
from toolkit.errors import ToolkitError
from toolkit.models.spec import Part, StoredTensor
from toolkit.quant.methods.grid import quantize

N_IN, N_OUT = 96, 64
NAME = "model.layers.0.mlp.up_proj"
LINEAR = StoredTensor(NAME, "linear", (N_OUT, N_IN), (Part(NAME),))


def group_int(
    seed: int, bits: int = 4, group: int = 32, *, symmetric: bool = False, order: bool = False, least_zero: int = 0
) -> GroupInt:
    g = torch.Generator().manual_seed(seed)
    groups = N_IN // group
    zeros = torch.randint(least_zero, 1 << bits, (N_OUT, groups), generator=g).to(torch.uint8)
    return GroupInt(
        codes=torch.randint(0, 1 << bits, (N_OUT, N_IN), generator=g).to(torch.uint8),
        scales=(torch.rand(N_OUT, groups, generator=g) + 0.1).half(),
        zeros=torch.full_like(zeros, 1 << (bits - 1)) if symmetric else zeros,
        bits=bits,
        group_size=group,
        group_index=(torch.randperm(N_IN, generator=g) // group).int() if order else None,
    )


def checkpoint_of(path: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None) -> Checkpoint:
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return open_checkpoint(path)


def read_back(path: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None) -> Weight:
    checkpoint = checkpoint_of(path, tensors, quantization)
    validate_checkpoint(checkpoint, [LINEAR])
    weight, _ = load_stored(checkpoint, LINEAR)
    assert not isinstance(weight, torch.Tensor)
    return weight


def same(a: Weight, b: Weight) -> bool:
    return type(a) is type(b) and a.shape == b.shape and torch.equal(a.dequantize(), b.dequantize())


def bits_of(words: torch.Tensor) -> int:
    """A row of int32 words as one long little-endian integer."""
    return sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(words.tolist()))


def stream_codes(words: torch.Tensor, bits: int, count: int) -> list[int]:
    total = bits_of(words)
    return [total >> (bits * i) & ((1 << bits) - 1) for i in range(count)]


def whole_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes in int32 words of 32 // bits each, none over a word's border, as compressed-tensors once packed them."""
    each = 32 // bits
    rows = [
        [sum(code << (bits * i) for i, code in enumerate(row[a : a + each])) for a in range(0, len(row), each)]
        for row in codes.tolist()
    ]
    return torch.from_numpy(np.array(rows, np.uint32).view(np.int32))


def naive_gptq(tensors: dict[str, torch.Tensor], bits: int, offset: int) -> np.ndarray:
    scales, index = tensors[f"{NAME}.scales"].float().numpy(), tensors[f"{NAME}.g_idx"].tolist()
    zeros = [stream_codes(row, bits, N_OUT) for row in tensors[f"{NAME}.qzeros"]]
    dense = np.zeros((N_OUT, N_IN), np.float32)
    for out in range(N_OUT):
        codes = stream_codes(tensors[f"{NAME}.qweight"][:, out], bits, N_IN)
        for i, (code, group) in enumerate(zip(codes, index, strict=True)):
            dense[out, i] = np.float32(code - (zeros[group][out] + offset)) * scales[group, out]
    return dense


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 30), bits=st.integers(1, 8), count=st.integers(1, 70))
def test_both_packings_are_inverted(seed: int, bits: int, count: int) -> None:
    codes = torch.randint(0, 1 << bits, (3, count), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    dense, whole = pack_words(codes, bits), whole_words(codes, bits)
    assert dense.shape[1] == -(-count * bits // 32)
    assert whole.shape[1] == -(-count // (32 // bits))
    assert [stream_codes(row, bits, count) for row in dense] == codes.tolist()
    assert torch.equal(unpack_words(dense, bits)[:, :count], codes)
    assert torch.equal(unpack_whole_words(whole, bits)[:, :count], codes)


# --- GPTQ ------------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    bits=st.sampled_from(gptq.BITS),
    version=st.sampled_from([1, 2]),
    order=st.booleans(),
    group=st.sampled_from([16, 32, 96]),
)
def test_a_naive_reader_understands_the_gptq_we_write(
    seed: int, bits: int, version: int, order: bool, group: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    weight = group_int(seed, bits, group, order=order and group < N_IN, least_zero=2 - version)
    tensors = gptq.write_linear(NAME, weight, version=version)
    assert np.array_equal(naive_gptq(tensors, bits, 2 - version), weight.dequantize().numpy())
    config = gptq.config({NAME: layout_of(weight)}, version=version)
    assert same(read_back(tmp_path_factory.mktemp("gptq"), tensors, config), weight)


def test_gptq_with_a_wrong_zero_reads_other_numbers(tmp_path: Path) -> None:
    weight = group_int(5, least_zero=1)
    tensors = gptq.write_linear(NAME, weight)
    wrong = gptq.config({NAME: layout_of(weight)}, version=2)
    assert not same(read_back(tmp_path, tensors, wrong), weight)


def test_gptq_1_cannot_hold_a_zero_point_of_zero() -> None:
    weight = group_int(5)
    with pytest.raises(ToolkitError, match="gptq_v2"):
        gptq.write_linear(NAME, weight)
    gptq.write_linear(NAME, weight, version=2)


@pytest.mark.parametrize("weight", [Dense(torch.zeros(8, 8)), group_int(1, bits=5), to_channel_int8(torch.ones(8, 8))])
def test_gptq_names_what_it_cannot_hold(weight: Weight) -> None:
    with pytest.raises(ToolkitError, match="GPTQ holds"):
        gptq.write_linear(NAME, weight)


def test_gptq_dynamic_gives_modules_bits_of_their_own(tmp_path: Path) -> None:
    weights = {
        NAME: group_int(1, bits=8, symmetric=True),
        "a": group_int(2, symmetric=True),
        "b": group_int(3, symmetric=True),
    }
    layouts = {name: layout_of(weight) for name, weight in weights.items()} | {"dense": None, "lm_head": None}
    config = gptq.config(layouts)
    assert config["bits"] == 4 and config["lm_head"] is False
    assert config["dynamic"] == {
        r"+:^model\.layers\.0\.mlp\.up_proj$": {"bits": 8, "group_size": 32, "sym": True, "desc_act": False},
        "-:^dense$": {},
    }
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        tensors |= gptq.write_linear(name, weight)
    assert same(read_back(tmp_path, tensors, config), weights[NAME])


@pytest.mark.parametrize(
    ("dynamic", "word"), [({"(": {}}, "pattern"), ([1], "object of patterns"), ({"x": 3}, "expected an object")]
)
def test_a_broken_dynamic_is_named(tmp_path: Path, dynamic: Any, word: str) -> None:
    weight = group_int(1, symmetric=True)
    config = gptq.config({NAME: layout_of(weight)}) | {"dynamic": dynamic}
    with pytest.raises(ToolkitError, match=word):
        read_back(tmp_path, gptq.write_linear(NAME, weight), config)


# --- auto-round ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packing", list(auto_round.PACKINGS))
def test_auto_round_packings(tmp_path: Path, packing: str) -> None:
    offset = auto_round.PACKINGS[packing]
    weight = group_int(3, least_zero=1)
    tensors = awq.write_linear(NAME, weight) if offset is None else gptq.write_linear(NAME, weight, version=2 - offset)
    config = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 32, "sym": False}
    assert same(read_back(tmp_path, tensors, config), weight)


@pytest.mark.parametrize("key", [NAME, r".*mlp\.up_proj"])
def test_auto_round_extra_config(tmp_path: Path, key: str) -> None:
    weight = group_int(3, bits=8, group=16, symmetric=True)
    config = {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": 32,
        "extra_config": {key: {"bits": 8, "group_size": 16}, "other": {"bits": 16}},
    }
    assert same(read_back(tmp_path, gptq.write_linear(NAME, weight), config), weight)


def test_auto_round_with_inputs_that_are_turned_as_the_model_runs() -> None:
    config = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32}
    fused = {"r1": True, "r2": True, "r3": True, "r4": False, "online_r1_rotation": False}
    for more in ({}, {"rotation_config": None}, {"rotation_config": {}}, {"spinquant_config": fused}):
        auto_round.check_config(config | more)
    for spin, word in (({"r4": True}, "r4"), ({"online_r1_rotation": True}, "online_r1_rotation")):
        with pytest.raises(ToolkitError, match=rf"spinquant_config\.{word}: expected false, .*, found True"):
            auto_round.check_config(config | {"spinquant_config": fused | spin})
    with pytest.raises(ToolkitError, match="rotation_config: expected none, for inputs are not turned here, found"):
        auto_round.check_config(config | {"rotation_config": {"block_size": 32, "hadamard_type": "hadamard"}})
    with pytest.raises(ToolkitError, match="spinquant_config: expected an object, found 5"):
        auto_round.check_config(config | {"spinquant_config": 5})


def test_auto_round_has_no_act_order() -> None:
    weight = group_int(3, order=True)
    assert "act-order" in (auto_round.cannot_hold(weight) or "")
    with pytest.raises(ToolkitError, match=f"{NAME}.*act-order; use gptq"):
        auto_round.write_linear(NAME, weight)


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 16), (None, None)])
def test_a_head_is_what_auto_round_s_own_loader_takes_it_for(bits: int | None, group: int) -> None:
    from types import SimpleNamespace

    from auto_round.inference.convert_model import get_layer_config
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": N_IN, "intermediate_size": N_OUT, "num_attention_heads": 2, "num_key_value_heads": 2}
    tiny = AutoConfig.for_model("llama", vocab_size=64, num_hidden_layers=1, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny)
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    layouts = {name: layout_of(group_int(1, symmetric=True)) for name in names}
    layouts["lm_head"] = None if bits is None else layout_of(group_int(2, bits, group, symmetric=True))
    layouts[names[0]] = None
    config = auto_round.config(layouts)
    found = get_layer_config(model, SimpleNamespace(**{"extra_config": {}} | config))
    assert ("lm_head" in found) == (bits is not None)
    if bits is not None:
        assert (found["lm_head"].bits, found["lm_head"].group_size, found["lm_head"].sym) == (bits, group, True)
    assert found[names[0]].bits == 16 and all(found[name].bits == 4 for name in names[1:])


# --- compressed-tensors ----------------------------------------------------------------------------------------------


def naive_packed(tensors: dict[str, torch.Tensor], bits: int, symmetric: bool) -> np.ndarray:
    scales = tensors[f"{NAME}.weight_scale"].float().numpy()
    half, group = 1 << (bits - 1), N_IN // scales.shape[1]
    zeros = np.zeros(scales.shape, np.int64)
    if not symmetric:
        stored = tensors[f"{NAME}.weight_zero_point"]
        zeros = np.array([stream_codes(stored[:, g], bits, N_OUT) for g in range(scales.shape[1])]).T - half
    dense = np.zeros((N_OUT, N_IN), np.float32)
    for out in range(N_OUT):
        for i, code in enumerate(stream_codes(tensors[f"{NAME}.weight_packed"][out], bits, N_IN)):
            dense[out, i] = np.float32(code - half - zeros[out, i // group]) * scales[out, i // group]
    return dense


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    bits=st.integers(2, 8),
    group=st.sampled_from([16, 32, 96]),
    symmetric=st.booleans(),
)
def test_a_naive_reader_understands_pack_quantized(
    seed: int, bits: int, group: int, symmetric: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    weight = group_int(seed, bits, group, symmetric=symmetric)
    tensors = compressed_tensors.write_linear(NAME, weight)
    assert np.array_equal(naive_packed(tensors, bits, symmetric), weight.dequantize().numpy())
    config = compressed_tensors.config({NAME: layout_of(weight)})
    back = read_back(tmp_path_factory.mktemp("ct"), tensors, config)
    assert same(back, weight) and isinstance(back, GroupInt) and torch.equal(back.codes, weight.codes)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_packing_of_earlier_releases_is_told_by_its_shape(tmp_path: Path, bits: int, symmetric: bool) -> None:
    weight = group_int(4, bits, symmetric=symmetric)
    tensors = compressed_tensors.write_linear(NAME, weight)
    tensors[f"{NAME}.weight_packed"] = whole_words(weight.codes, bits)
    if not symmetric:
        assert weight.zeros is not None
        tensors[f"{NAME}.weight_zero_point"] = whole_words(weight.zeros.t().contiguous(), bits).t().contiguous()
    assert same(read_back(tmp_path, tensors, compressed_tensors.config({NAME: layout_of(weight)})), weight)


def test_act_order_of_earlier_releases_is_read(tmp_path: Path) -> None:
    weight = group_int(4, symmetric=True, order=True)
    plain = GroupInt(weight.codes, weight.scales, weight.zeros, 4, 32)
    tensors = compressed_tensors.write_linear(NAME, plain)
    assert weight.group_index is not None
    tensors[f"{NAME}.weight_g_idx"] = weight.group_index
    config = compressed_tensors.config({NAME: layout_of(plain)})
    assert same(read_back(tmp_path, tensors, config), weight)
    with pytest.raises(ToolkitError, match="act-order"):
        compressed_tensors.write_linear(NAME, weight)


def test_zero_points_that_the_config_denies_are_not_dropped(tmp_path: Path) -> None:
    weight = group_int(2)
    tensors = compressed_tensors.write_linear(NAME, weight)
    config = compressed_tensors.config({NAME: layout_of(weight)})
    config["config_groups"]["group_0"]["weights"]["symmetric"] = True
    with pytest.raises(ToolkitError, match=r"weight_zero_point: found zero points, expected none"):
        read_back(tmp_path, tensors, config)
    plain = group_int(2, symmetric=True)
    tensors = compressed_tensors.write_linear(NAME, plain)
    tensors[f"{NAME}.weight_zero_point"] = torch.zeros(tensors[f"{NAME}.weight_scale"].shape, dtype=torch.int8)
    assert same(read_back(tmp_path, tensors, compressed_tensors.config({NAME: layout_of(plain)})), plain)


@pytest.mark.parametrize("block", [[0, 128], [128, 10**30], [128], "x", 128, [128, 1.5]])
def test_blocks_of_fp8_that_cannot_be(block: Any) -> None:
    with pytest.raises(ToolkitError, match="weight_block_size: expected"):
        blocked_fp8.check_config({"quant_method": "fp8", "weight_block_size": block})


WEIGHTS: dict[str, Weight] = {
    "int4": group_int(1, symmetric=True),
    "int4 asymmetric": group_int(2),
    "int8 a row": group_int(3, 8, N_IN),
    "W8A8": to_channel_int8(torch.randn(N_OUT, N_IN)),
    "fp8": Fp8(torch.randn(N_OUT, N_IN).to(torch.float8_e4m3fn), torch.rand(N_OUT) + 0.1),
    "fp8 in blocks": to_block_fp8(torch.randn(N_OUT, N_IN), block=(32, 40)),
    "mxfp4": to_mxfp4(torch.randn(N_OUT, N_IN)),
    "nvfp4": Fp4(
        torch.randint(0, 16, (N_OUT, N_IN)).to(torch.uint8),
        (torch.rand(N_OUT, N_IN // 16) * 100).to(torch.float8_e4m3fn),
        16,
        torch.tensor([37.5]),
    ),
}


@pytest.mark.parametrize("kind", list(WEIGHTS))
def test_compressed_tensors_round_trip(tmp_path: Path, kind: str) -> None:
    weight = WEIGHTS[kind]
    config = compressed_tensors.config({NAME: layout_of(weight), "lm_head": None})
    assert config["ignore"] == ["lm_head"]
    back = read_back(tmp_path, compressed_tensors.write_linear(NAME, weight), config)
    assert same(back, weight)


@pytest.mark.parametrize("kind", list(WEIGHTS))
def test_the_library_itself_reads_what_we_write(kind: str) -> None:
    """Its config parser takes our config, its decompressor gives our numbers."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    weight = WEIGHTS[kind]
    config = QuantizationConfig.model_validate(compressed_tensors.config({NAME: layout_of(weight)}))
    scheme = config.config_groups["group_0"]
    tensors = {k.removeprefix(f"{NAME}."): v for k, v in compressed_tensors.write_linear(NAME, weight).items()}
    if "weight_scale" in tensors and tensors["weight_scale"].dtype in (torch.float16, torch.bfloat16):
        tensors["weight_scale"] = tensors["weight_scale"].float()
    theirs = BaseCompressor.get_value_from_registry(config.format).decompress(tensors, scheme)["weight"].float()
    tolerance = 1 / 256 if kind in ("nvfp4", "mxfp4") else 1e-6  # the library unpacks 4-bit floats into bfloat16
    assert torch.allclose(theirs, weight.dequantize(), rtol=tolerance, atol=0)


def integers(bits: int, *, symmetric: bool = True) -> Callable[[torch.Tensor], Weight]:
    return lambda w: quantize(w, 32, bits=bits, symmetric=symmetric, name=NAME)


def to_nvfp4(dense: torch.Tensor) -> Fp4:
    blocks = dense.unflatten(1, (-1, 16))
    scales = (blocks.abs().amax(-1) * 50).to(torch.float8_e4m3fn)
    codes = nearest_fp4(blocks / scales.float()[..., None] * 300)
    return Fp4(codes.flatten(1), scales, 16, torch.tensor([300.0]))


ROUNDED: dict[str, Callable[[torch.Tensor], Weight]] = {
    "W2A16": integers(2),
    "W3A16": integers(3),
    "W4A16": integers(4),
    "W4A16 asymmetric": integers(4, symmetric=False),
    "W8A16": integers(8),
    "W8A8": to_channel_int8,
    "FP8": lambda w: Fp8((w * 100).to(torch.float8_e4m3fn), torch.full((len(w),), 0.01)),
    "FP8 in blocks": to_block_fp8,
    "mxfp4": to_mxfp4,
    "nvfp4": to_nvfp4,
}


@pytest.mark.parametrize("kind", list(ROUNDED))
def test_transformers_reads_a_model_that_we_write(kind: str, tiny_models: Any, tmp_path: Path) -> None:
    """Every linear holds the numbers that were written, and so does what is computed with them."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    source = tiny_models("llama")
    dense, written, layouts = load_file(source / "model.safetensors"), {}, {}
    for name, tensor in list(dense.items()):
        if "_proj." not in name:
            written[name] = tensor
            continue
        stem, weight = name.removesuffix(".weight"), ROUNDED[kind](tensor)
        written |= compressed_tensors.write_linear(stem, weight)
        layouts[stem], dense[name] = layout_of(weight), weight.dequantize()
    config = json.loads((source / "config.json").read_text())
    stated = {"quantization_config": compressed_tensors.config({**layouts, "lm_head": None})}
    (tmp_path / "config.json").write_text(json.dumps(config | stated))
    save_file({k: v.contiguous() for k, v in written.items()}, tmp_path / "model.safetensors", {"format": "pt"})

    expand = CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=expand)
    state = theirs.state_dict()
    assert state.keys() == dense.keys()
    # Codes are multiplied by scales in the scales' dtype, float16; nvfp4's two in bfloat16.
    tolerance = 2**-7 if kind == "nvfp4" else 2**-10
    for name, tensor in dense.items():
        assert torch.allclose(state[name].float(), tensor, rtol=tolerance, atol=0), name
    ours = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ours.load_state_dict(dense)
    ids = torch.arange(10, 40)[None]
    with torch.inference_mode():
        a, b = theirs(ids).logits, ours(ids).logits
    assert float((a - b).abs().max()) < 16 * tolerance * float(b.std())


def test_targets_names_beat_patterns_beat_classes(tmp_path: Path) -> None:
    weight = group_int(3, 8, symmetric=True)
    config = compressed_tensors.config({NAME: layout_of(weight)})
    right = config["config_groups"]["group_0"]
    wrong = {**right, "weights": {**right["weights"], "num_bits": 4}}
    tensors = compressed_tensors.write_linear(NAME, weight)
    for targets in ([NAME], ["re:.*up_proj"]):
        groups = {"a": {**wrong, "targets": ["Linear"]}, "b": {**right, "targets": targets}}
        assert same(read_back(tmp_path, tensors, config | {"config_groups": groups}), weight)
    groups = {"a": {**wrong, "targets": ["re:.*up_proj"]}, "b": {**right, "targets": [NAME]}}
    assert same(read_back(tmp_path, tensors, config | {"config_groups": groups}), weight)


def turned(*places: str) -> dict[str, Any]:
    """The field of a config that says where weights and what goes through them are turned."""
    applied = [{"targets": ["Linear"], "location": place, "inverse": False, "ignore": ["lm_head"]} for place in places]
    return {"transform_config": {"config_groups": {"v": {"type": "hadamard", "apply": applied}}}}


@pytest.mark.parametrize(
    "stated",
    [
        {"transform_config": None},
        {"transform_config": {}},
        turned("weight_input", "weight_output"),
        turned("q_attn", "k_cache"),
    ],
)
def test_what_is_turned_in_the_weights_alone_or_back_again_is_read(tmp_path: Path, stated: dict[str, Any]) -> None:
    weight = group_int(3, symmetric=True)
    config = compressed_tensors.config({NAME: layout_of(weight)}) | stated
    assert same(read_back(tmp_path, compressed_tensors.write_linear(NAME, weight), config), weight)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"config_groups": {}}, "config_groups"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "preset"),
        ({"ignore": ["re:("]}, "ignore"),
        ({"ignore": [NAME]}, NAME),
        ({"ignore": 5}, "ignore"),
        ({"format": "marlin-24"}, "marlin-24"),
        ({"transform_config": 5}, "transform_config"),
        ({"transform_config": {"config_groups": {"v": {"apply": 5}}}}, "config_groups.v.apply"),
        (turned("weight_input", "input"), "config_groups.v.apply.location"),
        (turned("q_attn"), "q_attn"),
    ],
)
def test_configs_that_cannot_be_read_are_named(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    weight = group_int(3, symmetric=True)
    config = compressed_tensors.config({NAME: layout_of(weight)})
    config["config_groups"]["group_0"].pop("format")
    with pytest.raises(ToolkitError, match=re.escape(word)) as caught:
        read_back(tmp_path, compressed_tensors.write_linear(NAME, weight), config | change)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "stated"),
    [
        ("W8A8", {"strategy": "block", "block_structure": [32, 40]}),
        ("int4", {"strategy": "block", "block_structure": [32, 40]}),
        ("nvfp4", {"strategy": "channel"}),
        ("mxfp4", {"strategy": "tensor"}),
    ],
)
def test_a_strategy_that_the_format_has_not_is_named(kind: str, stated: dict[str, Any]) -> None:
    config = compressed_tensors.config({NAME: layout_of(WEIGHTS[kind])})
    config["config_groups"]["group_0"]["weights"] |= stated
    with pytest.raises(ToolkitError, match=f"weights.strategy: expected .*, found '{stated['strategy']}'"):
        compressed_tensors.check_config(config)


def test_one_scale_for_all_and_weight_only_float8(tmp_path: Path) -> None:
    values = torch.randn(N_OUT, N_IN).to(torch.float8_e4m3fn)
    weight = Fp8(values, torch.full((N_OUT,), 0.25))
    config = compressed_tensors.config({NAME: layout_of(weight)})
    group = config["config_groups"]["group_0"]
    group["weights"]["strategy"] = "tensor"
    tensors = {f"{NAME}.weight": values, f"{NAME}.weight_scale": torch.tensor([0.25], dtype=torch.bfloat16)}
    assert same(read_back(tmp_path, tensors, config), weight)
    group["input_activations"] = None
    back = read_back(tmp_path, tensors, config)
    assert isinstance(back, BlockFp8) and torch.equal(back.dequantize(), weight.dequantize())


# --- blocked fp8, mxfp4 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(256, 384), (200, 130), (1, 1)])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_blocked_fp8_against_a_naive_reader(tmp_path: Path, shape: tuple[int, int], power_of_two: bool) -> None:
    dense = torch.randn(shape) * torch.rand(shape[0], 1) * 30
    weight = to_block_fp8(dense, power_of_two=power_of_two)
    tensors = blocked_fp8.write_linear(NAME, weight)
    scales = tensors[f"{NAME}.weight_scale_inv"].numpy()
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    values = tensors[f"{NAME}.weight"].float().numpy()
    naive = np.array([[values[o, i] * scales[o // 128, i // 128] for i in range(shape[1])] for o in range(shape[0])])
    assert np.array_equal(naive, weight.dequantize().numpy())
    assert float((weight.dequantize() - dense).norm() / dense.norm()) < 0.0625  # half a unit of e4m3
    if power_of_two:
        assert bool((torch.frexp(weight.scales).mantissa == 0.5).all())
    checkpoint = checkpoint_of(tmp_path, tensors, blocked_fp8.config({NAME: layout_of(weight)}))
    item = StoredTensor(NAME, "linear", shape, (Part(NAME),))
    validate_checkpoint(checkpoint, [item])
    assert same(load_stored(checkpoint, item)[0], weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("fmt", ["e4m3", "float8_e4m3fn", None])
def test_e4m3_is_spelled_in_several_ways(fmt: str | None) -> None:
    """DeepSeek's and MiniMax M2's."""
    blocked_fp8.check_config({"quant_method": "fp8", "fmt": fmt, "weight_block_size": [128, 128]})
    with pytest.raises(ToolkitError, match="fmt: expected 'e4m3', found 'e5m2'"):
        blocked_fp8.check_config({"quant_method": "fp8", "fmt": "e5m2"})


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_fp8_without_tiles_has_one_scale_a_tensor(tmp_path: Path, name: str) -> None:
    """As transformers names it (Ministral 3), with a static scale of activations beside, and as vLLM does."""
    values = torch.randn(N_OUT, N_IN).to(torch.float8_e4m3fn)
    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    scales = {name: torch.tensor(0.25, dtype=torch.bfloat16), "activation_scale": torch.tensor(0.5)}
    tensors = {f"{NAME}.weight": values, **{f"{NAME}.{x}": scale for x, scale in scales.items()}}
    assert same(read_back(tmp_path, tensors, config), Fp8(values, torch.full((N_OUT,), 0.25)))


def test_rows_of_tiles_keep_their_scales() -> None:
    weight = to_block_fp8(torch.randn(300, 140))
    rows = torch.tensor([5, 290, 131, 7])
    assert torch.equal(weight.take_rows(rows).dequantize(), weight.dequantize()[rows])
    assert torch.equal(
        weight.take_rows(slice(100, 200)).take_rows(slice(40, 60)).dequantize(), weight.dequantize()[140:160]
    )
    with pytest.raises(ToolkitError, match="taken out"):
        blocked_fp8.write_linear(NAME, weight.take_rows(rows))


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1 << 30), power=st.integers(-20, 20))
def test_mxfp4_against_a_naive_reader(seed: int, power: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    dense = torch.randn(N_OUT, N_IN, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    weight = to_mxfp4(dense)
    tensors = mxfp4.write_linear(NAME, weight)
    blocks, scales = tensors[f"{NAME}.weight_blocks"], tensors[f"{NAME}.weight_scales"]
    assert blocks.shape == (N_OUT, N_IN // 32, 16) and scales.shape == (N_OUT, N_IN // 32)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    naive = np.zeros((N_OUT, N_IN), np.float32)
    for out in range(N_OUT):
        for i in range(N_IN):
            byte = int(blocks[out, i // 32, i % 32 // 2])
            code = byte >> 4 if i % 2 else byte & 15
            naive[out, i] = (-1 if code & 8 else 1) * table[code & 7] * 2.0 ** (int(scales[out, i // 32]) - 127)
    assert np.array_equal(naive, weight.dequantize().numpy())
    config = mxfp4.config({NAME: layout_of(weight)})
    assert same(read_back(tmp_path_factory.mktemp("mx"), tensors, config), weight)


def test_nearest_fp4_is_nearest() -> None:
    x = torch.cat([torch.linspace(-7, 7, 2001), torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.0])])
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = nearest_fp4(x).long()
    got = table[codes & 7]
    best = (x.abs()[:, None] - table).abs().min(1).values
    assert torch.allclose((x.abs() - got).abs(), best, atol=1e-6)
    assert got[-8:-1].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]  # ties go to even mantissas
    assert torch.equal(codes >= 8, torch.signbit(x))


def test_channel_int8_uses_the_whole_range() -> None:
    dense = torch.randn(7, 40) * torch.arange(7)[:, None]
    weight = to_channel_int8(dense)
    assert isinstance(weight, ChannelInt8)
    assert weight.weight.abs().amax(1).tolist() == [0] + [127] * 6
    assert bool(((weight.dequantize() - dense).abs() <= weight.scales[:, None] * 0.501).all())


@pytest.mark.parametrize("make", [to_block_fp8, to_mxfp4, to_channel_int8])
def test_nan_is_refused_by_name(make: Any) -> None:
    dense = torch.ones(32, 32)
    dense[3, 4] = torch.nan
    with pytest.raises(ToolkitError, match=NAME):
        make(dense, NAME)


def test_every_format_is_registered() -> None:
    assert set(FORMATS) == {
        "awq", "gptq", "auto-round", "compressed-tensors", "smooth_quant", "fp8", "mxfp4", "modelopt", "trellis",
        "bitnet", "bitsandbytes", "mlx", "gguf",
    }  # fmt: skip


# -- Model Optimizer

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def modelopt_linear(kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of one linear as Model Optimizer 0.47 writes them (a real model's were looked at), and what they
    mean, number by number."""
    g = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {"input_scale": torch.tensor(0.01)}
    means = torch.empty(N_OUT, N_IN)
    if kind == "NVFP4":
        packed = torch.randint(0, 256, (N_OUT, N_IN // 2), generator=g).to(torch.uint8)
        scales = (torch.rand(N_OUT, N_IN // 16, generator=g) * 300 + 1).to(torch.float8_e4m3fn)
        tensors |= {"weight": packed, "weight_scale": scales, "weight_scale_2": torch.tensor(3.7e-5)}
        for row, column in np.ndindex(N_OUT, N_IN):
            code = int(packed[row, column // 2]) >> 4 * (column % 2) & 15
            value = -E2M1[code - 8] if code > 7 else E2M1[code]
            means[row, column] = value * float(scales[row, column // 16]) * 3.7e-5
        return tensors, means
    if kind == "W8A16":
        weight = torch.randint(-128, 128, (N_OUT, N_IN), generator=g).to(torch.int8)
    else:
        weight = (torch.randn(N_OUT, N_IN, generator=g) * 60).to(torch.float8_e4m3fn)
    tensors["weight"] = weight
    if kind == "MXFP8":
        scales = torch.randint(100, 130, (N_OUT, N_IN // 32), generator=g).to(torch.uint8)
        tensors["weight_scale"] = scales
        return tensors, weight.float() * torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
    shape = {"FP8": (), "FP8_PB_WO": (1, 1, 1, 1)}.get(kind, (N_OUT,))
    tensors["weight_scale"] = torch.rand(shape, generator=g) + 0.01
    return tensors, weight.float() * tensors["weight_scale"].reshape(-1, 1)


MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "fp8_pb_wo", "MXFP8", "NVFP4", "W4A16_NVFP4", "W8A16")


@pytest.mark.parametrize("told", ["config", "inside", "mixed", "beside"])
@pytest.mark.parametrize("algorithm", MODELOPT)
def test_modelopt(algorithm: str, told: str, tmp_path: Path) -> None:
    """``told``: where the algorithm is: in config.json, for each layer, or in hf_quant_config.json alone."""
    tensors, means = modelopt_linear(algorithm.upper().removeprefix("W4A16_"))
    layer = {"quant_algo": algorithm} | ({"group_size": 16} if "NVFP4" in algorithm else {})
    stated: dict[str, Any] = {
        "config": {"quant_method": "modelopt", "ignore": ["lm_head"], **layer},
        "inside": {"quant_method": "modelopt", "producer": {"name": "modelopt"}, "quantization": layer},
        "mixed": {
            "quant_method": "modelopt_mixed",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {NAME: layer, "model.layers.1": {"quant_algo": "FP8"}},
        },
        "beside": None,
    }[told]
    if told == "beside":
        side = {"quantization": {**layer, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(side))
    found = read_back(tmp_path, {f"{NAME}.{name}": tensor for name, tensor in tensors.items()}, stated)
    assert found.shape == (N_OUT, N_IN)
    assert torch.allclose(found.dequantize(), means, rtol=3e-7, atol=0)
    wanted = {"FP8": Fp8, "FP8_PER_CHANNEL_PER_TOKEN": Fp8, "W8A16": GroupInt, "NVFP4": Fp4, "W4A16_NVFP4": Fp4}
    assert type(found) is wanted.get(algorithm, BlockFp8)


@pytest.mark.parametrize(
    "stated, told",
    [
        ({"quant_algo": "W4A16_AWQ"}, "quant_algo: expected one of FP8, .*found 'W4A16_AWQ'"),
        ({}, "quant_algo: expected one of .*found None"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size: expected 16, found 32"),
        ({"quant_algo": "MIXED_PRECISION"}, "quantized_layers: expected an object of layers, found None"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {NAME: 3}},
            "up_proj: expected an object with quant_algo",
        ),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": {"quant_algo": "FP8"}}},
            "up_proj: quantized, but quantization_config.quantized_layers has no entry",
        ),
        ({"quant_algo": "MXFP8"}, "weight_scale: expected shape"),
    ],
)
def test_modelopt_refuses(stated: dict[str, Any], told: str, tmp_path: Path) -> None:
    tensors, _ = modelopt_linear("FP8")
    named = {f"{NAME}.{name}": tensor for name, tensor in tensors.items()}
    with pytest.raises(ToolkitError, match=told):
        read_back(tmp_path, named, {"quant_method": "modelopt", **stated})


def test_modelopt_scaled_inputs_and_dense_weights(tmp_path: Path) -> None:
    tensors, _ = modelopt_linear("FP8")
    named = {f"{NAME}.{name}": tensor for name, tensor in tensors.items()}
    with pytest.raises(ToolkitError, match="pre_quant_scale: found what activations are to be scaled by"):
        scaled = {**named, f"{NAME}.pre_quant_scale": torch.ones(N_IN)}
        read_back(tmp_path, scaled, {"quant_method": "modelopt", "quant_algo": "FP8"})
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null}}')  # the cache alone
    dense = read_back(tmp_path, {f"{NAME}.weight": torch.ones(N_OUT, N_IN)}, None)
    assert isinstance(dense, Dense)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": 3}')
    with pytest.raises(ToolkitError, match=r"hf_quant_config\.json: quantization: expected an object, found 3"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("spelled, known", [("fbgemm_fp8", "fp8"), ("FBGEMM_FP8", "fp8"), ("modelopt_fp4", "modelopt")])
def test_other_names_of_formats(spelled: str, known: str, tmp_path: Path) -> None:
    """FBGEMM's linears, as Llama 3.1 405B has them: a scale a row, and a bound of activations."""
    tensors, means = modelopt_linear("FP8_PER_CHANNEL_PER_TOKEN" if known == "fp8" else "NVFP4")
    if known == "fp8":
        del tensors["input_scale"]
        tensors |= {"weight_scale": tensors["weight_scale"][:, None], "input_scale_ub": torch.tensor([1200.0])}
    stated = {"quant_method": spelled, "quant_algo": "NVFP4", "activation_scale_ub": 1200.0}
    found = read_back(tmp_path, {f"{NAME}.{name}": tensor for name, tensor in tensors.items()}, stated)
    assert torch.allclose(found.dequantize(), means, rtol=3e-7, atol=0)
    assert open_checkpoint(tmp_path).model_format == known


def test_intels_name_of_auto_round(tmp_path: Path) -> None:
    weight = group_int(5)
    stated = auto_round.config({NAME: layout_of(weight)}) | {"quant_method": "intel/auto-round"}
    assert same(read_back(tmp_path, auto_round.write_linear(NAME, weight), stated), weight)


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_files_beside_configs_of_older_programs(method: str, name: str, tmp_path: Path) -> None:
    """AutoGPTQ's and AutoAWQ's of 2023, whose config.json says nothing."""
    weight = group_int(7, least_zero=1)
    if method == "gptq":
        tensors = gptq.write_linear(NAME, weight, version=1)
        told = {"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "sym": False}
    else:
        tensors = awq.write_linear(NAME, weight)
        told = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (tmp_path / name).write_text(json.dumps(told))
    assert same(read_back(tmp_path, tensors, None), weight)
    assert open_checkpoint(tmp_path).model_format == method
    (tmp_path / name).write_text('{"bits": 5, "group_size": 32}')
    with pytest.raises(ToolkitError, match="bits: expected one of"):
        read_back(tmp_path, tensors, None)
    (tmp_path / name).write_text('{"mode": "dynamic"}')  # onnx's, say
    assert open_checkpoint(tmp_path).quantization is None
