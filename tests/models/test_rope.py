"""Rotary frequencies against transformers' own functions."""

import math

import numpy as np
import pytest
import torch

from toolkit.models.config.fields import Fields
from toolkit.models.config.rope import read_rope
from toolkit.models.positions import alibi_slopes, bias_buckets, to_bfloat16
from toolkit.models.registry import build
from toolkit.models.rope import inv_freq, query_scale
from toolkit.models.spec import PositionBias, QueryScale

LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
LONG = dict(
    rope_type="longrope",
    short_factor=[1.0 + 0.01 * i for i in range(32)],
    long_factor=[1.0 + 1.3 * i for i in range(32)],
    original_max_position_embeddings=4096,
)
CASES = {
    "default": dict(rope_type="default"),
    "linear": dict(rope_type="linear", factor=2.5),
    "dynamic": dict(rope_type="dynamic", factor=3.0),
    "llama3": LLAMA3,
    "llama3.2": {**LLAMA3, "factor": 32.0},
    "llama4-scout": {**LLAMA3, "factor": 16.0, "high_freq_factor": 1.0},
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8192),
    "yarn-mscale": dict(
        rope_type="yarn", factor=40.0, mscale=1.0, mscale_all_dim=0.7, original_max_position_embeddings=4096
    ),
    "yarn-betas": dict(
        rope_type="yarn", factor=4.0, beta_fast=16.0, beta_slow=2.0, original_max_position_embeddings=4096
    ),
    "yarn-untruncated": dict(
        rope_type="yarn", factor=32.0, truncate=False, original_max_position_embeddings=4096, attention_factor=1.1
    ),
    "longrope": LONG,
    "longrope-factor": {**LONG, "factor": 16.0},
    "longrope-attention": {**LONG, "attention_factor": 1.25},
}
HEAD_DIM = 64


def _oracle(scaling, theta, max_position, seq_len=None, head_dim=HEAD_DIM):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=max_position,
        rope_parameters={**scaling, "rope_theta": theta},
    )
    kind = scaling["rope_type"]
    if kind == "default":
        frequencies, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, device="cpu", seq_len=seq_len)
    return frequencies.numpy(), factor


def _spec(scaling, theta, max_position, head_dim=HEAD_DIM):
    config = {"rope_parameters": {**scaling, "rope_theta": theta}}
    return read_rope(Fields(config), head_dim=head_dim, max_position=max_position)


def _close(ours, theirs, ulp=2):
    """Within two units in the last place: powf's own error is one."""
    assert ours.dtype == np.float32
    assert ours.shape == theirs.shape
    np.testing.assert_array_max_ulp(ours, theirs, maxulp=ulp)


@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1234567.0])
@pytest.mark.parametrize("case", CASES)
def test_short_set_equals_transformers(case, theta):
    ours, factor = inv_freq(_spec(CASES[case], theta, 16384), long=False)
    theirs, expected = _oracle(CASES[case], theta, 16384)
    # llama3's blend subtracts nearby numbers, which makes one unit of powf's error into several
    _close(ours, theirs, ulp=8 if CASES[case]["rope_type"] == "llama3" else 2)
    assert math.isclose(factor, expected, rel_tol=1e-12)


@pytest.mark.parametrize("case", ["longrope", "longrope-factor", "longrope-attention"])
def test_long_set_of_longrope(case):
    ours, factor = inv_freq(_spec(CASES[case], 10000.0, 131072), long=True)
    theirs, expected = _oracle(CASES[case], 10000.0, 131072, seq_len=4097)
    _close(ours, theirs)
    assert math.isclose(factor, expected, rel_tol=1e-12)
    assert not np.allclose(ours, inv_freq(_spec(CASES[case], 10000.0, 131072), long=False)[0])


def test_long_set_of_dynamic_is_for_the_longest_length():
    rope = _spec(CASES["dynamic"], 10000.0, 2048)
    assert rope.original_max_position == 2048
    assert rope.max_position == 6144
    theirs, _ = _oracle(CASES["dynamic"], 10000.0, 2048, seq_len=6144)
    _close(inv_freq(rope, long=True)[0], theirs)


@pytest.mark.parametrize("case", ["default", "linear", "llama3", "yarn"])
def test_other_kinds_have_one_set(case):
    rope = _spec(CASES[case], 10000.0, 16384)
    np.testing.assert_array_equal(inv_freq(rope, True)[0], inv_freq(rope, False)[0])


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_head_dims(head_dim):
    scaling = dict(rope_type="default")
    _close(inv_freq(_spec(scaling, 10000.0, 4096, head_dim))[0], _oracle(scaling, 10000.0, 4096, head_dim=head_dim)[0])


def test_partial_rotary():
    rope = read_rope(Fields({"partial_rotary_factor": 0.75}), head_dim=128, max_position=4096)
    assert rope.rotary_dim == 96
    expected = 1.0 / 10000.0 ** (np.arange(0, 96, 2) / 96)
    np.testing.assert_allclose(inv_freq(rope)[0], expected, rtol=1e-6)


@pytest.mark.parametrize("head_dim", [80, 88, 96, 120, 128, 192])
def test_a_share_that_is_a_quotient_loses_no_dimension(head_dim):
    for rotary in range(2, head_dim, 2):
        read = read_rope(Fields({"partial_rotary_factor": rotary / head_dim}), head_dim=head_dim, max_position=64)
        assert read.rotary_dim == rotary
    assert read_rope(Fields({"partial_rotary_factor": 0.3}), head_dim=88, max_position=64).rotary_dim == 26


def test_spellings_agree():
    old = {"rope_theta": 500000.0, "rope_scaling": {**LLAMA3, "type": "llama3"}}
    del old["rope_scaling"]["rope_type"]
    new = {"rope_parameters": {**LLAMA3, "rope_theta": 500000.0}}
    per_type = {
        "rope_parameters": {
            "full_attention": {**LLAMA3, "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        }
    }
    specs = [read_rope(Fields(c), head_dim=64, max_position=131072) for c in (old, new, per_type)]
    assert specs[0] == specs[1] == specs[2]
    local = read_rope(Fields(per_type), head_dim=64, max_position=131072, layer_type="sliding_attention")
    assert (local.kind, local.theta) == ("default", 10000.0)


def test_scaling_that_was_added_to_a_file_of_transformers_5_leaves_the_base():
    added = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8192)
    kept = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    read = [
        read_rope(Fields(config), head_dim=HEAD_DIM, max_position=32768)
        for config in (
            {"rope_scaling": added, "rope_parameters": kept},
            {"rope_scaling": added, "rope_parameters": {"full_attention": kept, "sliding_attention": LLAMA3}},
            {"rope_parameters": {**kept, **added}},
        )
    ]
    assert read[0] == read[1] == read[2] and (read[0].theta, read[0].rotary_dim) == (1e6, 32)
    older = {"rope_scaling": added, "rope_theta": 5e5, "rope_parameters": kept}
    assert read_rope(Fields(older), head_dim=HEAD_DIM, max_position=32768).theta == 5e5


def test_scaling_that_was_added_leaves_the_rope_of_layers_that_slide():
    own = {"rope_type": "default", "rope_theta": 5e4}
    parameters = {"full_attention": {**own, "rope_theta": 1e6}, "sliding_attention": own}
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=6, num_attention_heads=1)
    config = {"architectures": ["Gemma3ForCausalLM"], **sizes, "num_key_value_heads": 1, "max_position_embeddings": 99}
    config |= {"rope_parameters": parameters, "rope_scaling": dict(rope_type="linear", factor=8.0)}
    ropes = [attention.rope for _, attention in build(config)[0].attention_layers()]
    assert [(rope.theta, rope.factor) for rope in ropes] == [(5e4, 1.0)] * 5 + [(1e6, 8.0)]


def test_null_scaling_is_default():
    assert read_rope(Fields({"rope_scaling": None}), head_dim=64, max_position=2048).kind == "default"


def test_context_length_follows_the_scaling():
    assert _spec(CASES["yarn"], 1e4, 8192).max_position == 32768
    assert _spec(CASES["yarn"], 1e4, 32768).max_position == 32768
    assert _spec(CASES["linear"], 1e4, 2048).max_position == 5120
    assert _spec(LLAMA3, 1e4, 131072).max_position == 131072


def test_slopes_of_alibi_where_heads_are_a_power_of_two_and_where_not():
    assert alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    assert alibi_slopes(6) == tuple(2.0**-i for i in (2, 4, 6, 8, 1, 3))
    assert len(alibi_slopes(40)) == 40 and alibi_slopes(40)[31] == 2.0**-8  # Baichuan-13B


@pytest.mark.parametrize("buckets, distance", [(32, 128), (16, 64), (64, 200)])
def test_buckets_of_position_biases_are_transformers(buckets, distance):
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    apart = torch.arange(-599, 600)
    wanted = MPNetEncoder.relative_position_bucket(apart, num_buckets=buckets, max_distance=distance)
    assert bias_buckets(PositionBias("table", 600, buckets, distance)) == wanted.tolist()


def test_bfloat16_is_torch_s():
    for x in (0.3, 2.0**-0.25, 1.00390625, 1.01171875):
        assert to_bfloat16(x) == torch.tensor(x).bfloat16().item()


def test_queries_grow_with_their_position():
    positions = np.array([0, 7, 8, 40])
    floor = query_scale(QueryScale("floor", 8, 0.1), positions)
    np.testing.assert_allclose(floor, [1, 1, 1 + 0.1 * np.log(2), 1 + 0.1 * np.log(6)], rtol=1e-6)
    log = query_scale(QueryScale("log", 8), positions)
    np.testing.assert_allclose(log, [1, 1, np.log(9) / np.log(8), np.log(41) / np.log(8)], rtol=1e-6)
