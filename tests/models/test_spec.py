"""The spec as JSON: what is written is read back equal, and nonsense is refused."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.models.registry import build
from toolkit.models.spec import DecoderSpec, MoeSpec
from toolkit.models.spec.check import check_spec


@pytest.fixture
def spec(family, tiny_models):
    config = json.loads((tiny_models(family) / "config.json").read_text())
    return build(config)[0]


def test_json_round_trip(spec):
    text = json.dumps(spec.to_json())
    assert DecoderSpec.from_json(json.loads(text)) == spec


def test_unknown_field_is_refused(spec):
    data = json.loads(json.dumps(spec.to_json()))
    data["layers"][0]["sublayers"][0]["mixer"]["colour"] = 1
    with pytest.raises(ValueError, match="colour"):
        DecoderSpec.from_json(data)


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("hidden_size",), "64", "hidden_size: expected a whole number"),
        (("hidden_size",), True, "expected a whole number"),
        (("final_norm", "eps"), "small", "final_norm.eps: expected a number"),
        (("final_norm",), None, "expected an object"),
        (("cache_groups", 0, "kind"), "ring", "expected one of"),
        (("layers", 0, "sublayers", 0, "mixer", "kind"), "conv", "unknown kind"),
        (("layers",), {}, "expected a list"),
        (("layers",), [], "layers: found 0"),
        (("layers", 0, "sublayers"), [], "sublayers: found 0"),
        (("final_norm", "eps"), 10**400, "an integer of 1329 bits"),
        (("final_norm", "eps"), 0, "eps: found 0.0"),
        (("final_norm", "size"), 63, "size: found 63, expected 64"),
        (("embed_scale",), float("nan"), "embed_scale: found nan"),
        (("vocab_size",), 0, "vocab_size: found 0"),
        (("vocab_size",), 10**3000, "a huge integer"),
        (("head",), "model.embed_tokens", "given once"),
        (("layers", 1, "sublayers", 0, "mixer", "kv_heads"), 3, "a divisor of 4"),
        (("layers", 1, "sublayers", 0, "mixer", "q", "out_features"), 128, r"found \(64, 128\)"),
        (("layers", 1, "sublayers", 0, "mixer", "group"), 1, "group: found 1"),
        (("layers", 1, "sublayers", 0, "mixer", "window"), 16, "window: found 16"),
        (("layers", 1, "sublayers", 0, "mixer", "rope", "rotary_dim"), 18, "even number up to 16"),
        (("layers", 1, "sublayers", 0, "mixer", "rope", "kind"), "spiral", "one of default"),
        (("layers", 1, "sublayers", 0, "mixer", "rope", "high_freq_factor"), 0.5, "at least low_freq_factor"),
        (("layers", 1, "sublayers", 1, "mixer", "down", "in_features"), 127, "expected"),
        (("cache_groups", 0, "layers"), [0], "cache_groups"),
        (("cache_groups",), [], "group: found 0"),
    ],
)
def test_wrong_values_are_refused(tiny_models, path, value, message):
    config = json.loads((tiny_models("llama") / "config.json").read_text())
    data = json.loads(json.dumps(build(config)[0].to_json()))
    node = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        DecoderSpec.from_json(data)


def test_missing_field_is_refused(spec):
    data = spec.to_json()
    del data["vocab_size"]
    with pytest.raises(ValueError, match="vocab_size"):
        DecoderSpec.from_json(data)


def test_names_are_unique_and_linears_complete(spec):
    linears = [x.name for x in spec.linears()]
    assert len(set(linears)) == len(linears)
    assert len({n.name for n in spec.norms()}) == len(spec.norms())
    experts = sum(
        len(s.mixer.experts) for layer in spec.layers for s in layer.sublayers if isinstance(s.mixer, MoeSpec)
    )
    moe_layers = sum(isinstance(s.mixer, MoeSpec) for layer in spec.layers for s in layer.sublayers)
    dense_layers = len(spec.layers) - moe_layers
    assert len(linears) == 4 * len(spec.layers) + 3 * dense_layers + 3 * experts + moe_layers


def test_every_attention_is_in_its_cache_group(spec):
    seen = []
    for i, attention in spec.attention_layers():
        group = spec.cache_groups[attention.group]
        assert i in group.layers
        assert group.window == attention.window
        assert group.kind == ("full" if attention.window is None else "window")
        seen.append(i)
    assert sorted(x for g in spec.cache_groups for x in g.layers) == seen


@pytest.mark.parametrize(
    "family, path, value",
    [
        ("mixtral", ("top_k",), 5),
        ("mixtral", ("router", "out_features"), 5),
        ("mixtral", ("experts", 1, "up", "out_features"), 64),
        ("mixtral", ("experts",), []),
    ],
)
def test_contradictions_of_experts_are_refused(tiny_models, family, path, value):
    config = json.loads((tiny_models(family) / "config.json").read_text())
    data = json.loads(json.dumps(build(config)[0].to_json()))
    node = data["layers"][0]["sublayers"][1]["mixer"]
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(ValueError, match="expected"):
        DecoderSpec.from_json(data)


def test_what_families_build_is_sound(spec):
    check_spec(spec)


def _nodes(node):
    """Every (container, key) below ``node``."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield node, key
        yield from _nodes(value)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3_moe"])
def test_any_mutation_gives_a_spec_or_a_value_error(tiny_models, family, data):
    config = json.loads((tiny_models(family) / "config.json").read_text())
    spec = json.loads(json.dumps(build(config)[0].to_json()))
    nodes = list(_nodes(spec))
    container, key = nodes[data.draw(st.integers(0, len(nodes) - 1))]
    values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([]) | st.just({})
    container[key] = data.draw(values | st.integers(-1, 3))
    try:
        DecoderSpec.from_json(spec)
    except ValueError as error:
        assert "\n" not in str(error)
