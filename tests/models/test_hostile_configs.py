"""Any config gives a spec or one line that names the field: never another exception."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.errors import ToolkitError
from toolkit.models.registry import build, load_spec, names

BAD = [
    ("hidden_size", 0),
    ("hidden_size", -64),
    ("hidden_size", "64"),
    ("hidden_size", 64.0),
    ("hidden_size", True),
    ("hidden_size", None),
    ("hidden_size", 10**30),
    ("hidden_size", [64]),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", 100_000_000),
    ("num_attention_heads", 0),
    ("num_attention_heads", -1),
    ("num_key_value_heads", 3),
    ("num_key_value_heads", 0),
    ("head_dim", 0),
    ("head_dim", 7),
    ("head_dim", "big"),
    ("vocab_size", -5),
    ("vocab_size", 10**9),
    ("intermediate_size", 0),
    ("max_position_embeddings", 0),
    ("max_position_embeddings", 2**40),
    ("rms_norm_eps", 0),
    ("rms_norm_eps", -1e-6),
    ("rms_norm_eps", float("nan")),
    ("rms_norm_eps", 10.0),
    ("rms_norm_eps", 10**400),
    ("rms_norm_eps", "1e-6"),
    ("rope_scaling", 5),
    ("rope_scaling", {"type": "spiral", "factor": 2.0}),
    ("rope_scaling", {"type": "linear"}),
    ("rope_scaling", {"type": "linear", "factor": 0}),
    ("rope_scaling", {"type": "linear", "factor": float("inf")}),
    ("rope_scaling", {"type": ["linear"], "factor": 2.0}),
    ("rope_scaling", {"type": "dynamic", "factor": 0.5}),
    ("rope_scaling", {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
    ("rope_scaling", {"rope_type": "longrope", "short_factor": ["a"] * 12, "long_factor": [1.0] * 12}),
    ("partial_rotary_factor", 0.0),
    ("partial_rotary_factor", 2),
    ("tie_word_embeddings", "no"),
    ("dtype", "floot16"),
    ("dtype", "int8"),
    ("dtype", 16),
    ("torch_dtype", "torch.float16"),
    ("eos_token_id", 10**6),
    ("eos_token_id", -1),
    ("eos_token_id", [2, 10**6]),
    ("eos_token_id", [None]),
    ("eos_token_id", "2"),
    ("bos_token_id", 320),
    ("bos_token_id", [1]),
    ("bos_token_id", -2),
    ("pad_token_id", True),
    ("pad_token_id", 1.0),
    ("pad_token_id", 10**40),
    ("architectures", ["WhisperForConditionalGeneration"]),
    ("architectures", [5]),
    ("architectures", "LlamaForCausalLMX"),
    ("architectures", {"a": 1}),
]

FAMILY_BAD = [
    ("llama", "hidden_act", "tanhshrink"),
    ("llama", "attention_bias", 1),
    ("llama", "rope_theta", -1.0),
    ("llama", "rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 1}),
    ("llama", "rope_scaling", {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1}),
    ("mistral", "sliding_window", 0),
    ("mistral", "sliding_window", -1),
    ("mistral", "sliding_window", "all"),
    ("qwen2", "layer_types", ["full_attention"]),
    ("qwen2", "layer_types", ["full_attention", "mamba"]),
    ("qwen2", "layer_types", "full_attention"),
    ("qwen2", "max_window_layers", -1),
    ("qwen2", "use_sliding_window", "yes"),
    ("gemma2", "query_pre_attn_scalar", 0),
    ("gemma2", "attn_logit_softcapping", -50),
    ("gemma2", "final_logit_softcapping", float("nan")),
    ("gemma2", "use_bidirectional_attention", True),
    ("mixtral", "num_experts_per_tok", 5),
    ("mixtral", "num_experts_per_tok", 0),
    ("mixtral", "num_local_experts", 0),
    ("mixtral", "num_local_experts", 10**6),
    ("qwen3_moe", "mlp_only_layers", [7]),
    ("qwen3_moe", "mlp_only_layers", ["1"]),
    ("qwen3_moe", "mlp_only_layers", 1),
    ("qwen3_moe", "decoder_sparse_step", 0),
    ("qwen3_moe", "norm_topk_prob", "true"),
    ("qwen3_moe", "moe_intermediate_size", -1),
    ("nemotron_h", "layers_block_type", ["mlp", "mlp"]),
    ("nemotron_h", "mamba_hidden_act", "gelu"),
    ("mamba2", "hidden_act", "relu"),
    ("granitemoehybrid", "hidden_act", "gelu"),
    ("qwen3_next", "hidden_act", "gelu"),
    ("falcon_h1", "hidden_act", "gelu"),
    ("falcon_h1", "time_step_limit", [0.01, 0.1]),
    ("mamba2", "time_step_limit", [0.01, 0.1]),
    ("internvl", "downsample_ratio", 0.3),
    ("llava", "vision_config", {"image_size": 10, "patch_size": 14}),
]


@pytest.fixture(scope="module")
def configs(tiny_models):
    return {name: json.loads((tiny_models(name) / "config.json").read_text()) for name in names()}


def _one_line(config, field):
    with pytest.raises(ToolkitError) as caught:
        build(config)
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert "\n" not in message
    assert len(message) < 400
    assert field in message
    assert "found" in message and "expected" in message


@pytest.mark.parametrize("field, value", BAD, ids=lambda v: repr(v)[:40])
def test_bad_value_names_the_field(configs, family, field, value):
    if field == "rms_norm_eps" and field not in configs[family]:
        field = "layer_norm_eps"
    config = {**configs[family], field: value}
    if field == "rope_scaling":
        config.pop("rope_parameters", None)
    if field == "partial_rotary_factor":
        config.pop("rope_parameters", None)
        config.pop("rope_scaling", None)
    _one_line(config, field)


@pytest.mark.parametrize("family, field, value", FAMILY_BAD, ids=lambda v: repr(v)[:40])
def test_bad_value_of_a_family(configs, family, field, value):
    config = {**configs[family], field: value}
    if field in ("rope_theta", "rope_scaling"):
        config.pop("rope_parameters", None)
    _one_line(config, field)


@pytest.mark.parametrize("family", ["minicpmv", "phi3_v", "llava_llama", "mgm"])
def test_a_language_model_s_field_is_named_where_it_stands(configs, family):
    with pytest.raises(ToolkitError, match=r"^config\.json: hidden_size: found 0"):
        build({**configs[family], "hidden_size": 0})


@pytest.mark.every_family
def test_special_tokens_and_dtypes_that_are_fine(configs, family):
    fine = {"bos_token_id": -1, "pad_token_id": -1, "eos_token_id": [2, 319], "dtype": "half", "torch_dtype": None}
    if family == "roberta":  # counts positions from the padding on
        del fine["pad_token_id"]
    assert build({**configs[family], **fine}) == build(configs[family])


@pytest.mark.parametrize("family", ["smolvlm", "llama"])
def test_a_padding_of_another_vocabulary_is_fine(configs, family):
    assert build({**configs[family], "pad_token_id": 128_002}) == build(configs[family])


def test_generation_config_s_token_ids_are_checked(configs, tmp_path):
    checkpoint = SimpleNamespace(
        path=tmp_path, config=configs["llama"], generation_config={"eos_token_id": [2, 320]}, names=list
    )
    with pytest.raises(
        ToolkitError, match=r"generation_config.json: eos_token_id: found 320, expected a token id below"
    ):
        load_spec(checkpoint)


@pytest.mark.parametrize("config", [[], None, "x", 5])
def test_not_an_object(config):
    with pytest.raises(ToolkitError, match="JSON object"):
        build(config)


def test_an_unknown_architecture_brings_the_nearest():
    with pytest.raises(ToolkitError, match=r"found nothing, expected .*`tool list models`.*LlamaForCausalLM"):
        build({})
    with pytest.raises(ToolkitError, match=r"Qwen3MoEForCausalLM, .* Qwen3MoeForCausalLM"):
        build({"architectures": ["Qwen3MoEForCausalLM"]})


def test_huge_integer_prints(configs):
    _one_line({**configs["llama"], "hidden_size": 10**6000}, "hidden_size")


_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.integers()
    | st.floats()
    | st.sampled_from(["silu", "linear", "dynamic", "yarn", "llama3", "longrope", "full_attention", "", "x"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["type", "rope_type", "factor", "rope_theta", "full_attention", "original_max_position_embeddings"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.every_family
def test_any_mutation_gives_a_spec_or_a_toolkit_error(configs, family, data):
    from toolkit.models.rope import inv_freq

    config = json.loads(json.dumps(configs[family]))
    for _ in range(data.draw(st.integers(1, 3))):
        names = sorted({*config, "rope_scaling", "rope_theta", "head_dim", "layer_types", "sliding_window"})
        target, key = config, data.draw(st.sampled_from(names))
        if isinstance(config.get(key), dict) and config[key] and data.draw(st.booleans()):
            target, key = config[key], data.draw(st.sampled_from(sorted(config[key])))
        if data.draw(st.booleans()):
            target[key] = data.draw(_json)
        else:
            target.pop(key, None)
    try:
        spec, stored = build(config)
    except ToolkitError as error:
        assert "\n" not in str(error)
        return
    assert stored
    for attention in [a for _, a in spec.attention_layers() if a.rope is not None][:1]:
        for long in (False, True):
            frequencies, factor = inv_freq(attention.rope, long)
            assert frequencies.shape == (attention.rope.rotary_dim // 2,)
            assert factor > 0
