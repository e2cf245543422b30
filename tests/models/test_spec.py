"""The spec as JSON: what is written is read back equal, and nonsense is refused."""

import json

import pytest

from toolkit.models.registry import FAMILIES, build
from toolkit.models.spec import DecoderSpec, MoeSpec

NAMES = [f.name for f in FAMILIES]


@pytest.fixture(params=NAMES)
def spec(request, tiny_models):
    config = json.loads((tiny_models(request.param) / "config.json").read_text())
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
        (("hidden_size",), "64", "expected int"),
        (("hidden_size",), True, "expected int"),
        (("final_norm", "eps"), "small", "expected float"),
        (("final_norm",), None, "expected an object"),
        (("cache_groups", 0, "kind"), "ring", "expected one of"),
        (("layers", 0, "sublayers", 0, "mixer", "kind"), "conv", "unknown kind"),
        (("layers",), {}, "expected a list"),
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
