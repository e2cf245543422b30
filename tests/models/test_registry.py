"""Finding the family, overriding a config, and what importing costs."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from toolkit.errors import ToolkitError, UsageError
from toolkit.models.lacking import LACKING
from toolkit.models.registry import apply_overrides, build, families, find_family, get, load_spec, names

CONFIG = dict(
    architectures=["LlamaForCausalLM"],
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    max_position_embeddings=256,
)


def test_every_file_is_a_family_and_no_architecture_has_two():
    assert [family.name for family in families()] == names()
    told_apart = {name for family in families() for name in family.others.values()}
    architectures = [name for family in families() if family.name not in told_apart for name in family.architectures]
    assert len(set(architectures)) == len(architectures)


def test_a_field_tells_families_of_one_architecture_apart():
    config = {"model_type": "chatglm", "architectures": ["ChatGLMModel"]}
    assert find_family(config).name == "chatglm"
    assert find_family({**config, "vision_config": {"image_size": 1120}}).name == "glm4v_9b"


def test_model_type_where_architectures_is_absent():
    assert find_family({"model_type": "qwen3"}).name == "qwen3"
    assert find_family({"model_type": "qwen3", "architectures": []}).name == "qwen3"


def test_architectures_win_over_model_type():
    assert find_family({"model_type": "llama", "architectures": ["MistralForCausalLM"]}).name == "mistral"
    with pytest.raises(ToolkitError, match="LlamaForTokenClassification"):
        find_family({"model_type": "llama", "architectures": ["LlamaForTokenClassification"]})


def test_the_language_model_inside_goes_by_its_model_type():
    tiny = get("idefics3").tiny[0].fields
    seeing = {"architectures": ["Idefics3ForConditionalGeneration"], **tiny}
    seeing["text_config"] = {**CONFIG, **tiny["text_config"], "architectures": ["VLlama3ForCausalLM"]}
    assert build(seeing)[0].vision.language == "llama"  # as SmolVLM's and Idefics 3's own files say it


@pytest.mark.parametrize("head, tied", [(["language_model.lm_head.weight"], False), ([], True)])
def test_a_head_of_its_own_counts_where_whole_and_part_disagree(tiny_models, head, tied):
    """As transformers 5 saves Mistral Small 3.1 and InternVL 3: its default in the whole, what is true in the part."""
    config = json.loads((tiny_models("mistral3") / "config.json").read_text())
    torn = {**config, "tie_word_embeddings": True}
    torn["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    checkpoint = SimpleNamespace(path=Path("x"), config=torn, generation_config={}, names=lambda: head)
    assert load_spec(checkpoint)[0].tied == tied


def test_what_no_runner_computes_is_named():
    with pytest.raises(ToolkitError, match=r"config\.json: architectures: DeepseekV32ForCausalLM needs attention to"):
        find_family({"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]})


def test_load_spec_names_the_directory(tmp_path):
    checkpoint = SimpleNamespace(path=tmp_path, config={**CONFIG, "hidden_size": 0}, names=list)
    with pytest.raises(ToolkitError, match=f"{tmp_path}: config.json: hidden_size: found 0"):
        load_spec(checkpoint)


def test_quantization_config_is_left_alone():
    assert build({**CONFIG, "quantization_config": {"quant_method": "anything"}}) == build(CONFIG)


def test_overrides_merge_and_leave_the_original():
    config = {**CONFIG, "rope_scaling": {"type": "linear", "factor": 2.0}}
    result = apply_overrides(config, {"rope_scaling": {"factor": 4.0}, "vocab_size": 50})
    assert result["rope_scaling"] == {"type": "linear", "factor": 4.0}
    assert result["vocab_size"] == 50
    assert config["rope_scaling"]["factor"] == 2.0
    assert apply_overrides(config) == config


@pytest.mark.parametrize(
    "theta", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}]
)
def test_rope_scaling_factor_means_dynamic_ntk(theta):
    spec, _ = build(apply_overrides({**CONFIG, **theta}, None, 2.0))
    rope = spec.attention_layers()[0][1].rope
    assert (rope.kind, rope.factor, rope.theta) == ("dynamic", 2.0, 5e5)
    assert spec.max_position == 512


def test_rope_scaling_factor_keeps_what_does_not_scale():
    old = {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_type": "yarn", "factor": 8.0}
    for name in ("rope_parameters", "rope_scaling"):
        rope = build(apply_overrides({**CONFIG, name: old}, None, 2.0))[0].attention_layers()[0][1].rope
        assert (rope.kind, rope.factor, rope.theta) == ("dynamic", 2.0, 5e5)
        assert rope.rotary_dim == CONFIG["hidden_size"] // CONFIG["num_attention_heads"] // 2


def test_rope_scaling_factor_leaves_the_rope_of_layers_that_slide():
    gemma = {**CONFIG, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 2}
    gemma["layer_types"] = ["sliding_attention", "full_attention"]
    by_type = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    }
    spec, _ = build(apply_overrides({**gemma, "rope_parameters": by_type}, None, 2.0))
    local, everywhere = (attention.rope for _, attention in spec.attention_layers())
    assert (local.kind, local.theta) == ("default", 2e4)
    assert (everywhere.kind, everywhere.factor, everywhere.theta) == ("dynamic", 2.0, 3e5)


def test_rope_scaling_factor_is_refused_where_a_part_of_whole_heads_turns():
    """Dynamic rope of that part would turn other pairs of numbers."""
    for part in ({"rope_type": "proportional"}, {"full_attention": {"type": "proportional"}}):
        with pytest.raises(UsageError, match=r"^rope_scaling_factor: this model .* leave it out$"):
            apply_overrides({**CONFIG, "rope_parameters": part}, None, 2.0)


def test_rope_scaling_factor_is_of_the_language_model_inside():
    tiny = get("llava").tiny[0].fields
    seeing = {"architectures": ["LlavaForConditionalGeneration"], **tiny}
    seeing["text_config"] = {**CONFIG, **tiny["text_config"]}
    changed = apply_overrides(seeing, None, 2.0)
    rope = build(changed)[0].attention_layers()[0][1].rope
    assert (rope.kind, rope.factor) == ("dynamic", 2.0) and "rope_scaling" not in seeing["text_config"]
    seeing["text_config"]["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 3, 3]}
    with pytest.raises(ToolkitError, match="one position a token"):
        build(apply_overrides(seeing, None, 2.0))


def test_a_family_that_is_no_longer_named_is_one_line():
    with pytest.raises(ToolkitError, match=r"^model family: found 'gone', expected .* --custom-module-map"):
        get("gone")


@pytest.mark.parametrize(
    "overrides, factor", [("x", 0.0), (None, -1.0), (None, float("nan")), (None, "2"), (None, 0.5)]
)
def test_impossible_overrides(overrides, factor):
    with pytest.raises(UsageError):
        apply_overrides(CONFIG, overrides, factor)


def test_importing_models_is_cheap():
    code = (
        "import sys, toolkit.models.registry, toolkit.models.rope;"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_config_imports_its_family_alone():
    code = (
        "import sys; from toolkit.models.registry import build\n"
        f"build({ {**CONFIG, 'model_type': 'llama'}!r})\n"
        "print([m for m in sys.modules if m.startswith('toolkit.models.families.')])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "['toolkit.models.families.llama']"


@pytest.mark.parametrize("name", sorted(LACKING))
def test_what_a_spec_cannot_say_is_refused_with_what_is_missing(name):
    with pytest.raises(ToolkitError, match=f"{name} needs {LACKING[name]}, which no runner here computes"):
        build({"architectures": [name], "model_type": "x"})


@pytest.mark.parametrize("kind", [dict(rope_type="yarn", factor=4.0), dict(type="linear", factor=2.0)])
def test_rope_scaling_overrides_both_spellings_alike(kind):
    """A config of transformers 5 keeps its base in ``rope_parameters``, which stays."""
    named = dict(CONFIG, num_key_value_heads=2, architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    spelled = ({"rope_theta": 1e6}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    old, new = (build(apply_overrides({**named, **rope}, {"rope_scaling": kind}))[0] for rope in spelled)
    assert old == new and new.ropes()[0].theta == 1e6


@pytest.mark.parametrize(
    "name, family",
    [("Gemma3TextModel", "gemma3_text"), ("Qwen3Model", "qwen3"), ("Qwen3ForSequenceClassification", "qwen3")],
)
def test_models_saved_without_their_head_are_found(name, family):
    assert find_family({"architectures": [name]}).name == family
