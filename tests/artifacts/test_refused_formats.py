"""What is said of linears that a format of quantized weights cannot hold, and of its configs: the whole line."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.refused import refusing
from toolkit.artifacts.canonical import Dense, GroupInt
from toolkit.artifacts.formats import auto_round, awq, blocked_fp8, compressed_tensors, gptq, mxfp4, w8a8
from toolkit.artifacts.formats.describe import layout_of
from toolkit.artifacts.gguf.quantize import quantize
from toolkit.artifacts.rounding import to_channel_int8

CONFIG = "config.json: quantization_config"
IN = "input features of"
OPEN = "missing ), unterminated subpattern at position 0"
NOT_CODES = "GPTQ holds codes of 2, 3, 4 or 8 bits with zero points"

refused = refusing()


@pytest.mark.parametrize(
    ("form", "holds"),
    [
        (awq, "AWQ holds 4-bit codes with zero points in consecutive groups"),
        (auto_round, NOT_CODES),
        (gptq, NOT_CODES),
        (blocked_fp8, "blocked fp8 holds float8_e4m3fn in tiles"),
        (compressed_tensors, "compressed-tensors holds integers with zero points, float8 and fp4"),
        (mxfp4, "mxfp4 holds 4-bit floats in blocks of 32 with e8m0 scales"),
        (w8a8, "W8A8 holds 8-bit weights with a scale a row"),
    ],
)
def test_a_dense_weight_has_no_packed_form(form: Any, holds: str) -> None:
    told = refused(lambda: form.write_linear("up", Dense(torch.zeros(8, 8))))
    assert told == f"up: {holds}, found a dense weight"


def scheme(**more: Any) -> dict[str, Any]:
    """compressed-tensors' config of 4 bits in groups of 32."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    groups = {"g": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, "format": "pack-quantized", **more}


FOUR = {"bits": 4, "group_size": 32}
ELEVEN = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 11}
FP4 = scheme(config_groups={"g": {"targets": ["Linear"], "weights": ELEVEN}}, format="nvfp4-pack-quantized")


@pytest.mark.parametrize(
    ("form", "config", "shape", "told"),
    [
        (awq, FOUR, (12, 64), "up: AWQ packs 8 output features a word, which does not divide 12"),
        (awq, FOUR | {"group_size": 48}, (16, 64), f"{CONFIG}.group_size: 48 does not divide the 64 {IN} up"),
        (gptq, FOUR, (12, 64), "up: 12 output features of 4 bits do not fill whole 32-bit words"),
        (gptq, FOUR | {"group_size": -1}, (16, 60), "up: 60 input features of 4 bits do not fill whole 32-bit words"),
        (mxfp4, {}, (8, 40), "up: 40 input features are no multiple of mxfp4's blocks of 32"),
        (
            compressed_tensors,
            scheme(),
            (8, 40),
            f"{CONFIG}.config_groups: group_size 32 does not divide the 40 {IN} up",
        ),
        (compressed_tensors, FP4, (8, 33), "up: 33 input features of 4 bits do not fill whole bytes"),
        (
            compressed_tensors,
            scheme(ignore=["up"]),
            (8, 64),
            "up: quantized, but quantization_config.config_groups has no target for it (or ignores it)",
        ),
    ],
)  # fmt: skip
def test_shapes_that_do_not_fit(form: Any, config: dict[str, Any], shape: tuple[int, int], told: str) -> None:
    assert refused(lambda: form.expected(config, "up", shape)) == told


@pytest.mark.parametrize(
    ("form", "config", "told"),
    [
        (compressed_tensors, scheme(ignore=["re:("]), f"ignore: 're:(': {OPEN}"),
        (gptq, FOUR | {"dynamic": {"(": {}}}, f"dynamic: pattern '(': {OPEN}"),
        (gptq, FOUR | {"dynamic": {"x": 3}}, "dynamic: 'x': expected an object, found 3"),
        (gptq, FOUR | {"dynamic": [1]}, "dynamic: expected an object of patterns, found [1]"),
        (
            auto_round,
            FOUR | {"packing_format": []},
            "packing_format: expected one of auto_round:auto_gptq, auto_round, auto_round:gptqmodel, "
            "auto_round:auto_awq, found []",
        ),
    ],
)  # fmt: skip
def test_fields(form: ModuleType, config: dict[str, Any], told: str) -> None:
    assert refused(lambda: form.check_config(config)) == f"{CONFIG}.{told}"


def test_one_layout_for_the_whole_model() -> None:
    def four(group: int) -> GroupInt:
        groups = 64 // group
        codes = torch.zeros(8, 64, dtype=torch.uint8)
        return GroupInt(codes, torch.ones(8, groups).half(), torch.zeros(8, groups, dtype=torch.uint8), 4, group)

    odd = {"a": layout_of(four(32)), "b": layout_of(four(64)), "c": layout_of(four(32))}
    told = refused(lambda: awq.config_of(odd))
    assert told == "b: AWQ states one group size for the whole model; use gptq or compressed-tensors"
    told = refused(lambda: blocked_fp8.config(odd))
    assert told == "blocked fp8: expected one tile size for the whole model, found None; use compressed-tensors"
    eight = {"a": layout_of(to_channel_int8(torch.ones(8, 8))), "b": layout_of(four(32))}
    told = refused(lambda: w8a8.config_of(eight | {"c": eight["a"]}))
    assert told == "b: W8A8 states one type for the whole model; use compressed-tensors"


@pytest.mark.parametrize(
    ("value", "kind", "told"),
    [
        (float("nan"), "Q4_0", "holds NaN or infinity; nothing can be rounded to Q4_0"),
        (1e6, "F16", "a value is beyond float16's 65504; use bf16 or f32"),
        (1e9, "Q8_0", "weights up to 1e+09 need a scale beyond float16"),
    ],
)
def test_numbers_that_gguf_cannot_hold(value: float, kind: str, told: str) -> None:
    assert refused(lambda: quantize(torch.full((1, 32), value), kind, name="w")) == f"w: {told}"
