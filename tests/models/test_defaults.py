"""What a field means that a config does not state: what transformers' config class says."""

import math

import numpy as np
import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from toolkit.errors import ToolkitError
from toolkit.models.config.fields import Fields
from toolkit.models.positions import reach
from toolkit.models.registry import apply_overrides, build, get, names
from toolkit.models.rope import inv_freq
from toolkit.models.tiny import SIZES as TINY

SIZES = dict(
    vocab_size=1000,
    hidden_size=1024,
    intermediate_size=256,
    num_hidden_layers=6,
    num_attention_heads=64,  # every default number of kv heads divides it
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
EXPERTS = dict(num_local_experts=4, num_experts=4, n_routed_experts=16, num_experts_per_tok=2)
OWN = {
    "bitnet": dict(num_attention_heads=20, hidden_size=1280),
    "distilbert": dict(dim=1024, hidden_dim=256, n_layers=6, n_heads=64),
    "electra": dict(embedding_size=1024),
    "deepseek_v3": dict(num_attention_heads=128),
    "ernie4_5_moe": dict(moe_num_experts=4, moe_k=2),
    "codegen": dict(num_attention_heads=16),
    "gpt_neo": dict(num_hidden_layers=24),
    "gptj": dict(num_attention_heads=16),
    "helium": dict(num_attention_heads=20),
    "mamba2": dict(num_heads=32),
    "glm4_moe_lite": dict(num_attention_heads=20),
    "minicpm3": dict(num_attention_heads=40, hidden_size=1280),
}
# Where transformers' class has other defaults than the authors' own, by which the published configs are to be read:
# EXAONE's, which came with 5.24.0, takes 8 kv heads, an untied head and a base of 500000.
AUTHORS = {
    "exaone": dict(
        num_key_value_heads=None,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    )
}


@pytest.mark.parametrize("family", [x for x in names() if x in CONFIG_MAPPING and get(x).recipe is None])
def test_absent_fields_mean_what_transformers_takes_for_them(family):
    known = CONFIG_MAPPING[family]().to_dict()
    sizes = {**SIZES, **{name: count for name, count in EXPERTS.items() if name in known}, **OWN.get(family, {})}
    stated = CONFIG_MAPPING[family](**sizes).to_dict()
    named = {"architectures": [get(family).architectures[0]], "model_type": family}
    assert build({**named, **sizes})[0] == build({**stated, **AUTHORS.get(family, {}), **named})[0]


@pytest.mark.parametrize("family", ["lara_mini", "qwen3_5_moe_text", "solar_open"])
def test_without_a_dense_layer_its_width_need_not_be_stated(family):
    if family not in CONFIG_MAPPING:
        pytest.skip("this transformers has no class of its own for it")
    stated = CONFIG_MAPPING[family](num_hidden_layers=2).to_dict()
    assert "intermediate_size" not in stated
    named = {"architectures": [get(family).architectures[0]], "max_position_embeddings": 512}
    assert build({**stated, **named})[0] == build({**stated, **named, "intermediate_size": 64})[0]


@pytest.mark.parametrize("family", AUTHORS)
def test_a_config_that_transformers_writes_states_where_its_defaults_are_others(family):
    if family not in CONFIG_MAPPING:
        pytest.skip("this transformers has no class of its own for it")
    assert AUTHORS[family].keys() <= CONFIG_MAPPING[family]().to_diff_dict().keys()


@pytest.mark.parametrize("family", ["cwm", "mistral", "starcoder2"])
def test_null_means_as_many_kv_heads_as_heads_and_their_share_of_the_width(family):
    named = {"architectures": [get(family).architectures[0]]}
    spec, _ = build({**named, **SIZES, "num_key_value_heads": None, "head_dim": None})
    attention = spec.attention_layers()[0][1]
    assert (attention.heads, attention.kv_heads, attention.head_dim) == (64, 64, 16)


def test_gpt_oss_turns_by_yarn_where_the_config_does_not_say():
    config = {"architectures": ["GptOssForCausalLM"], **SIZES, **EXPERTS}
    rope = build({**config, "rope_theta": 5000.0})[0].attention_layers()[0][1].rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_position, rope.truncate) == (
        "yarn", 5000.0, 32.0, 4096, False,
    )  # fmt: skip


def test_stablelm_epoch_spells_eps_and_the_rotary_share_in_its_own_way():
    config = {"architectures": ["StableLMEpochForCausalLM"], **SIZES, "num_key_value_heads": 64}
    spec, _ = build({**config, "norm_eps": 1e-3, "rope_pct": 0.5})
    assert spec.final_norm.eps == 1e-3
    assert spec.attention_layers()[0][1].rope.rotary_dim == 8


@pytest.mark.parametrize(
    "flags, has",
    [
        ({"attention_bias": True, "mlp_bias": False}, (True, True, False)),
        ({"attention_bias": False, "mlp_bias": True}, (False, False, True)),
        ({"qkv_bias": True, "bias": False}, (True, False, False)),
        ({"qkv_bias": False, "bias": True}, (False, True, True)),
    ],
)
def test_internlm3_s_biases_in_both_spellings(flags, has):
    spec, _ = build({"architectures": ["InternLM3ForCausalLM"], **SIZES, **flags})
    attention, mlp = (sublayer.mixer for sublayer in spec.layers[0].sublayers)
    assert (attention.q.bias, attention.o.bias, mlp.up.bias) == has


def test_a_tied_phi_would_lose_a_bias():
    with pytest.raises(ToolkitError, match=r"config\.json: tie_word_embeddings: found True, expected false"):
        build({"architectures": ["PhiForCausalLM"], **SIZES, "tie_word_embeddings": True})


def test_qwen_2_5_vl_s_tower_has_layers_without_windows_where_the_config_does_not_say_which():
    fields = get("qwen2_5_vl").tiny[0].fields
    vision = {**fields["vision_config"], "depth": 10, "fullatt_block_indexes": None}
    text = {**TINY, **fields["text_config"]}
    spec, _ = get("qwen2_5_vl").build(Fields({**fields, "text_config": text, "vision_config": vision}))
    assert spec.vision.tower.full == (7,)


def test_ernie_under_its_first_name():
    assert build({"architectures": ["Ernie4_5_ForCausalLM"], **SIZES})[0].family == "ernie4_5"


def test_which_baichuan_it_is_stands_in_the_sizes():
    named = {"architectures": ["BaichuanForCausalLM"], **SIZES, "num_attention_heads": 64}
    v1 = {**named, "vocab_size": 64000, "max_position_embeddings": None, "model_max_length": 4096}
    for config, alibi, unit in ((v1, True, False), ({**named, "vocab_size": 125696}, False, True)):
        spec, stored = build(config)
        assert (spec.attention_layers()[0][1].alibi is not None, stored[-1].unit_rows) == (alibi, unit)


def test_absent_fields_mean_what_the_models_own_code_takes_for_them():
    assert build({"architectures": ["InternLM2ForCausalLM"], **SIZES})[0].layers[0].sublayers[0].mixer.q.bias
    assert build({"architectures": ["ExaoneForCausalLM"], **SIZES, "num_layers": 2})[0].tied


@pytest.mark.parametrize("name", ["Gemma2ForCausalLM", "Gemma3ForCausalLM"])
def test_gemma_s_activation_is_no_other_field(name):
    mlp = build({"architectures": [name], **SIZES, "hidden_act": "silu"})[0].layers[0].sublayers[1].mixer
    assert mlp.activation == "gelu_tanh"


def test_a_rope_factor_goes_before_internlm_s_rotary():
    rotary = {"base": 20000, "type": "dynamic", "scaling_factor": 2.0}
    config = apply_overrides({"architectures": ["InternLMForCausalLM"], **SIZES, "rotary": rotary}, None, 4.0)
    rope = build(config)[0].attention_layers()[0][1].rope
    assert (rope.kind, rope.theta, rope.factor) == ("dynamic", 20000.0, 4.0)


@pytest.mark.parametrize("session", [None, 1000, 2048, 4096, 5000, 10_000])
def test_qwen_1_stretches_its_base_beyond_the_trained_length(session):
    config = {"architectures": ["QWenLMHeadModel"], **SIZES, "kv_channels": 16, "seq_length": 2048}
    spec, _ = build({**config, "max_position_embeddings": 8192})
    attention = (spec if session is None else reach(spec, session)).attention_layers()[0][1]
    alpha = max(2 ** (math.ceil(math.log2((session or 8192) / 2048) + 1)) - 1, 1)  # as its own code has it
    stretched = 10000.0 * alpha ** (16 / 14)
    np.testing.assert_allclose(inv_freq(attention.rope, long=True)[0][1], stretched ** (-2 / 16), rtol=1e-6)
    np.testing.assert_allclose(inv_freq(attention.rope)[0][1], 10000.0 ** (-2 / 16), rtol=1e-6)
    assert (attention.q_scale.form, attention.q_scale.length, spec.max_position) == ("log", 2048, 8192)
