"""Each family against a checkpoint that transformers wrote, and against the configs of released models."""

import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

from toolkit.models.eyes.vision import PREFIX
from toolkit.models.registry import build, load_spec
from toolkit.models.spec import MoeSpec


def _config(path):
    return json.loads((path / "config.json").read_text())


def _shapes(path):
    with safe_open(path / "model.safetensors", "np") as f:
        return {name: tuple(f.get_slice(name).get_shape()) for name in f.keys()}


def _expected(stored):
    shapes = {}
    for s in stored:
        shapes[s.weight_name] = s.disk_shape
        if s.bias:
            shapes[s.bias_name] = s.bias_shape
    return shapes


VARIANTS = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True, "head_dim": 48, "num_key_value_heads": 4}),
    ("qwen3", {"attention_bias": True}),
    ("internlm2", {"shape": 1}),
    ("mistral", {"sliding_window": None}),
    ("gemma2", {"tie_word_embeddings": False}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": []}),
    ("cohere", {"use_qk_norm": False, "attention_bias": True}),
    ("olmo2", {"attention_bias": True}),
    ("gpt_oss", {"attention_bias": False}),
]


@pytest.mark.parametrize("family, overrides", VARIANTS, ids=lambda v: v if isinstance(v, str) else ",".join(v) or "-")
def test_tensors_are_those_of_the_checkpoint(tiny_models, family, overrides):
    path = tiny_models(family, **overrides)
    spec, stored = build(_config(path))
    assert spec.family == family
    assert _expected(stored) == _shapes(path)


REPEATED = ("lfm3", "gate_proj")  # which has one number a head


@pytest.mark.every_family
def test_stored_parts_cover_every_parameter_once(tiny_models, family):
    spec, stored = build(_config(tiny_models(family)))
    stored = [s for s in stored if not s.parts[0].name.startswith(PREFIX)]  # towers are not of the decoder
    parts = [p.name for s in stored for p in s.parts]
    wanted = [x.name for x in spec.linears()] + [spec.embed] + ([] if spec.tied else [spec.head])
    wanted += spec.tables()
    biases = {f"{x.name}.bias" for x in [*spec.linears(), *spec.norms()]} | {f"{spec.head}.bias"}
    assert sorted(parts) == sorted([*wanted, *(name for name in spec.vectors() if name not in biases)])
    sizes = {x.name: (x.out_features, x.in_features) for x in spec.linears()}
    for s in stored:
        counts = Counter(row for p in s.parts for row in s.rows_of(p))
        assert sorted(counts) == list(range(s.matrix[0])), "rows leave gaps"
        often = spec.attention_layers()[0][1].head_dim if (family, s.name.rpartition(".")[2]) == REPEATED else 1
        assert set(counts.values()) == {often}, "rows overlap"
        for p in s.parts:
            assert p.name not in sizes or (len(s.rows_of(p)), s.matrix[1]) == sizes[p.name]


def _both(tiny_models, family, **overrides):
    """Tensors of a family's tiny checkpoint, and of its twin's, under canonical names."""
    return (
        load_file(path / "model.safetensors")
        for path in (tiny_models(family, **overrides), tiny_models.twin(family, **overrides))
    )


@pytest.mark.parametrize("overrides", [{}, {"shape": 1}], ids=["two-kv-heads", "one-with-bias"])
def test_internlm2_joins_one_kv_head_after_another(tiny_models, overrides):
    ours, plain = _both(tiny_models, "internlm2", **overrides)
    for suffix in ("weight", "bias") if overrides else ("weight",):
        q, k, v = (plain[f"model.layers.1.self_attn.{x}_proj.{suffix}"].unflatten(0, (-1, 16)) for x in "qkv")
        q = q.unflatten(0, (len(k), -1))
        joined = torch.cat([q, k[:, None], v[:, None]], dim=1).flatten(0, 2)
        assert torch.equal(ours[f"model.layers.1.attention.wqkv.{suffix}"], joined)
    assert torch.equal(ours["model.layers.1.feed_forward.w3.weight"], plain["model.layers.1.mlp.up_proj.weight"])


def test_baichuan_joins_q_k_and_v(tiny_models):
    ours, plain = _both(tiny_models, "baichuan")
    joined = torch.cat([plain[f"model.layers.1.self_attn.{x}_proj.weight"] for x in "qkv"])
    assert torch.equal(ours["model.layers.1.self_attn.W_pack.weight"], joined)


def test_names_that_no_class_of_transformers_tells(tiny_models):
    ours, _ = _both(tiny_models, "exaone", shape=1)
    layer = ("ln_1", "ln_2", "attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj",
             "attn.attention.out_proj", "mlp.c_fc_0", "mlp.c_fc_1", "mlp.c_proj")  # fmt: skip
    assert set(ours) == {"transformer.wte.weight", "transformer.ln_f.weight", "lm_head.weight"} | {
        f"transformer.h.{i}.{name}.weight" for i in range(2) for name in layer
    }
    ours, _ = _both(tiny_models, "deepseek")
    mlp = {name.removeprefix("model.layers.2.mlp.") for name in ours if name.startswith("model.layers.2.mlp.")}
    parts = [f"{x}_proj.weight" for x in ("gate", "up", "down")]
    assert mlp == {"gate.weight", *(f"shared_experts.{p}" for p in parts)} | {
        f"experts.{e}.{p}" for e in range(6) for p in parts
    }


def test_tied_models_list_no_head(tiny_models):
    spec, stored = build(_config(tiny_models("qwen2")))
    assert spec.tied
    assert not any(s.kind == "head" for s in stored)


def test_routers_are_marked(tiny_models):
    for family in ("mixtral", "qwen3_moe"):
        spec, stored = build(_config(tiny_models(family)))
        routers = {s.mixer.router.name for y in spec.layers for s in y.sublayers if isinstance(s.mixer, MoeSpec)}
        assert {s.parts[0].name for s in stored if s.kind == "router"} == routers != set()


def test_qwen3_moe_layer_kinds(tiny_models):
    spec, _ = build(_config(tiny_models("qwen3_moe")))
    assert [layer.sublayers[1].mixer.kind for layer in spec.layers] == ["moe", "mlp", "moe"]
    config = {**_config(tiny_models("qwen3_moe")), "mlp_only_layers": [], "decoder_sparse_step": 2}
    spec, _ = build(config)
    assert [layer.sublayers[1].mixer.kind for layer in spec.layers] == ["mlp", "moe", "mlp"]


def test_gemma2_peculiarities(tiny_models):
    spec, _ = build(_config(tiny_models("gemma2")))
    assert spec.embed_scale == 8.0
    assert spec.logit_softcap == 30.0
    assert spec.tied
    first = spec.layers[0].sublayers[0]
    assert first.mixer.softcap == 50.0
    assert first.mixer.scale == pytest.approx(24**-0.5)
    assert first.post_norm.weight_offset == first.pre_norm.weight_offset == 1.0
    assert spec.final_norm.weight_offset == 1.0
    assert [a.window for _, a in spec.attention_layers()] == [16, None, 16, None]
    assert spec.layers[0].sublayers[1].mixer.activation == "gelu_tanh"


def test_gemma2_softcap_null_is_off(tiny_models):
    config = {**_config(tiny_models("gemma2")), "attn_logit_softcapping": None, "final_logit_softcapping": None}
    spec, _ = build(config)
    assert spec.logit_softcap is None
    assert spec.layers[0].sublayers[0].mixer.softcap is None


# Config files of released models, of each the fields that say what it computes, with the number of its parameters.
RELEASED = {
    line["name"]: line for line in map(json.loads, (Path(__file__).parent / "released.jsonl").read_text().splitlines())
}
LARGE = 100_000_000_000  # parameters, from which on a spec takes a second


def _config_of(name):
    return RELEASED[name]["config"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if x["parameters"] > LARGE else n for n, x in RELEASED.items()]
)
def test_released_models_have_their_parameter_count(name):
    _, stored = build(_config_of(name))
    shapes = _expected(stored).values()
    assert sum(math.prod(shape) for shape in shapes) == RELEASED[name]["parameters"]


def _of_transformers(config):
    """Name → shape of each tensor that transformers' own class would save, and those that copy another."""
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    known = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    kinds = (getattr(transformers, config["architectures"][0], None), transformers.AutoModelForCausalLM)
    kind, make = next((kind, make) for kind, make in zip(kinds, ("_from_config", "from_config"), strict=True) if kind)
    with torch.device("meta"):
        model = getattr(kind, make)(known)
    tensors = revert_weight_conversion(model, model.state_dict())
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}, set(model.all_tied_weights_keys)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, x in RELEASED.items() if x["config"].get("model_type") in CONFIG_MAPPING])
def test_released_models_have_the_tensors_of_transformers(name):
    """All of them, in equal shapes; but a head that copies the embedding, and what a model read as text sees with."""
    config = _config_of(name)
    theirs, copies = _of_transformers(config)
    fake = SimpleNamespace(
        path=Path(name),
        config=config,
        generation_config={},
        names=lambda: list(theirs),
        info=lambda tensor: SimpleNamespace(shape=theirs[tensor]),
    )
    spec, stored = load_spec(fake)
    ours = _expected(stored)
    assert ours.items() <= theirs.items()
    seeing = ("vision_model.", "multi_modal_projector.", "model.visual.") if "text_config" in config else ()
    left = {name for name in theirs.keys() - ours.keys() if not name.startswith(seeing)}
    assert left <= copies and (spec.tied or not left)


def test_released_models_context_and_groups():
    assert build(_config_of("internlm/internlm2-chat-7b"))[0].max_position == 65536
    assert build(_config_of("meta-llama/Llama-3.2-1B"))[0].max_position == 131072
    assert [g.kind for g in build(_config_of("Qwen/Qwen2.5-0.5B"))[0].cache_groups] == ["full"]
    assert build(_config_of("google/gemma-3-1b-it"))[0].max_position == 32768  # counts what linear scaling brings
    groups = build(_config_of("google/gemma-2-2b"))[0].cache_groups
    assert [(g.kind, g.window, len(g.layers)) for g in groups] == [("window", 4096, 13), ("full", None, 13)]


def test_mistral_window_absent_null_and_given():
    config = {**_config_of("meta-llama/Llama-2-7b-hf"), "architectures": ["MistralForCausalLM"]}
    assert build(config)[0].cache_groups[0].window == 4096
    assert build({**config, "sliding_window": None})[0].cache_groups[0].kind == "full"
    assert build({**config, "sliding_window": 128})[0].cache_groups[0].window == 128


def test_qwen2_layer_types_win_over_max_window_layers():
    config = {
        **_config_of("Qwen/Qwen2.5-0.5B"),
        "use_sliding_window": True,
        "sliding_window": 512,
        "num_hidden_layers": 3,
    }
    assert [a.window for _, a in build({**config, "max_window_layers": 2})[0].attention_layers()] == [None, None, 512]
    types = ["sliding_attention", "full_attention", "full_attention"]
    spec = build({**config, "layer_types": types})[0]
    assert [a.window for _, a in spec.attention_layers()] == [512, None, None]
    off = build({**config, "layer_types": types, "use_sliding_window": False})[0]
    assert [a.window for _, a in off.attention_layers()] == [None, None, None]
