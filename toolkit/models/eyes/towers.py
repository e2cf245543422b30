"""Pieces that the files of families that see are put together from: towers as ``vision_config`` describes them, how
checkpoints spell them, and the language model inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.decoder import Built
from toolkit.models.eyes.vision import PREFIX, Stage, Tower, VisionSpec, tensors
from toolkit.models.registry import find_family
from toolkit.models.registry import names as families
from toolkit.models.spec import DecoderSpec, LayerSpec, Part, StoredTensor

Spelling = Mapping[str, str]
"""Part of a canonical name → how checkpoints spell it; ``{}`` is the layer's number."""
PLAIN = {"norm1": "layer_norm1", "norm2": "layer_norm2", "up": "mlp.fc1", "down": "mlp.fc2"} | {
    name: f"self_attn.{theirs}_proj" for name, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "out"))
}
CLIP: Spelling = PLAIN | {
    "patch": "embeddings.patch_embedding",
    "class": "embeddings.class_embedding",
    "position": "embeddings.position_embedding.weight",
    "pre_norm": "pre_layrnorm",
    "post_norm": "post_layernorm",
    "layers": "encoder.layers.{}",
}
PIXTRAL: Spelling = {
    "patch": "patch_conv",
    "pre_norm": "ln_pre",
    "layers": "transformer.layers.{}",
    "norm1": "attention_norm",
    "norm2": "ffn_norm",
    **{name: f"attention.{name}_proj" for name in "qkvo"},
    **{name: f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
}
ACTIVATIONS = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "silu": "silu"}
# What transformers' configs mean by an absent field; files of LLaVA leave out what is so.
LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-6,
}
GEMMA4 = LLAMA | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "vocab_size": 262144,
}
ABSENT: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": LLAMA | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    "gemma3_text": LLAMA
    | {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "vocab_size": 262208,
    },
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4 | {"max_position_embeddings": 262144},
    "qwen2": LLAMA | {"intermediate_size": 22016, "max_position_embeddings": 32768, "vocab_size": 151936},
}


def side(config: Fields, name: str, default: int | None = None) -> int:
    """A number of pixels, which may be given for both sides, if they are equal."""
    value = config.values.get(name)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        config = config.changed({name: value[0]})
    return config.integer(name, default=default, high=1 << 16)


def clip_tower(config: Fields, **changes: Any) -> Tower:
    """CLIP's, or with ``changes`` what is like it, such as SigLIP's. Absent fields are those of CLIP-L/14 at 336."""
    hidden = config.integer("hidden_size", default=1024, high=1 << 16)
    heads = config.integer("num_attention_heads", default=16, high=1024)
    if hidden % heads:
        config.fail("num_attention_heads", heads, f"a divisor of hidden_size ({hidden})")
    layers = config.integer("num_hidden_layers", default=24, high=MAX_LAYERS)
    patch = side(config, "patch_size", 14)
    image = side(config, "image_size", 336)
    if image < patch:
        config.fail("image_size", image, f"at least patch_size ({patch})")
    grid = image // patch
    made: dict[str, Any] = {
        "layers": layers,
        "taken": layers,
        "hidden": hidden,
        "heads": heads,
        "head_dim": hidden // heads,
        "inner": config.integer("intermediate_size", default=4096, high=1 << 18),
        "patch": patch,
        "activation": activation(config, "quick_gelu"),
        "norm": "layer",
        "eps": config.number("layer_norm_eps", default=1e-5, high=0.5),
        "positions": "learned",
        "grid": (grid, grid),
        "patch_bias": False,
        "class_token": True,
        "pre_norm": True,
        "post_norm": "stored",
    }
    return Tower(**(made | changes))


def siglip_tower(config: Fields, **changes: Any) -> Tower:
    eps = config.number("layer_norm_eps", default=1e-6, high=0.5)
    found = {"activation": activation(config, "gelu_pytorch_tanh"), "eps": eps}
    return clip_tower(config, **found, **{"patch_bias": True, "class_token": False, "pre_norm": False, **changes})


def check_grid(config: Fields, tower: Tower, factor: int, least: int = 1) -> None:
    """Raise ToolkitError where ``config``, the tower's, gives patches that are no multiple of ``factor`` along a side,
    or fewer than ``least``."""
    if tower.grid[0] % factor or tower.grid[0] < least:
        found = tower.grid[0] * tower.patch
        config.fail("image_size", found, f"a multiple of {factor} patches of {tower.patch} pixels, {least} at least")


def pixtral_tower(config: Fields, **changes: Any) -> Tower:
    config = config.filled({"patch_size": 16})
    head_dim = config.integer("head_dim", default=64, high=1024)
    theta = (config.nested("rope_parameters") or config).number("rope_theta", default=10_000.0)
    none = dict.fromkeys(("patch_bias", "qkv_bias", "o_bias", "mlp_bias", "class_token"), False)
    own = {
        "norm": "rms",
        "eps": 1e-5,
        "positions": "interlaced",
        "grid": (0, 0),
        "gated": True,
        "post_norm": "none",
        "activation": activation(config, "gelu"),
        "head_dim": head_dim,
        "theta": theta,
    }
    return clip_tower(config, **none, **own, **changes)


def activation(config: Fields, default: str, name: str = "hidden_act") -> str:
    return ACTIVATIONS[config.text(name, default=default, choices=tuple(ACTIVATIONS))]


def projector_activation(config: Fields) -> str:
    """One that a stage of a projector has."""
    return ACTIVATIONS[config.text("projector_hidden_act", default="gelu", choices=("gelu", "gelu_pytorch_tanh"))]


def taken_layers(config: Fields, layers: int, default: int) -> int:
    """How many layers run for the hidden state that ``vision_feature_layer`` names: -1 is the last one's."""
    value = config.values.get("vision_feature_layer", default)
    index = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(index, bool) or not isinstance(index, int) or not -layers <= index <= layers or index == 0:
        config.fail("vision_feature_layer", value, f"one layer, from {-layers} to {layers}")
    return index if index > 0 else layers + 1 + index


def mlp(inputs: int, outputs: int, act: str, bias: bool = True) -> tuple[Stage, ...]:
    """Two linears as ``multi_modal_projector`` has them."""
    first = Stage("linear", "vision.projector.linear_1", inputs, outputs, bias)
    second = Stage("linear", "vision.projector.linear_2", outputs, outputs, bias)
    return first, Stage("gelu_tanh" if act == "gelu_tanh" else "gelu"), second


def stored_vision(
    spec: VisionSpec,
    tower: str,
    projector: str,
    spelling: Spelling,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> list[StoredTensor]:
    """The tensors of a checkpoint. ``tower``, ``projector``: what their names begin with; ``shapes``: of canonical
    parameters that are stored in others. Parameters that are spelled alike lie one behind another in one tensor.
    """
    found: dict[str, list[str]] = {}
    ours = tensors(spec)
    for name in ours:
        found.setdefault(_spelled(name, tower, projector, spelling), []).append(name)
    patch = (spec.tower.hidden, 3, *([spec.tower.frames] * (spec.tower.frames > 1)), *(spec.tower.patch,) * 2)
    given = {"vision.patch.weight": patch} | dict(shapes or {})
    unused = spec.tower.post_norm == "stored"
    made = []
    for theirs, names in found.items():
        optional = unused and names[0].startswith("vision.post_norm")
        shape = given.get(names[0], ours[names[0]])
        if len(names) == 1:
            made.append(StoredTensor(theirs, "vision", shape, (Part(names[0]),), optional=optional))
            continue
        parts, at = [], 0
        for name in names:
            size = ours[name][0] * (ours[name][1] if len(ours[name]) > 1 else 1)
            parts.append(Part(name, ((at, at + size),)))
            at += size
        rows = sum(ours[name][0] for name in names)
        made.append(StoredTensor(theirs, "vision", (rows, *shape[1:]), tuple(parts)))
    return made


def _spelled(name: str, tower: str, projector: str, spelling: Spelling) -> str:
    _, part, *rest = name.split(".")
    if part == "projector":
        if found := spelling.get(name.removeprefix("vision.")):
            return f"{projector}.{found}"
        return ".".join([projector, spelling.get(f"projector.{rest[0]}", rest[0]), *rest[1:]])
    if part == "routed":
        layer, inner, kind = ".".join(rest[:3]), ".".join(rest[3:-1]), rest[-1]
        return f"{spelling[part]}{layer}.{spelling[f'{part}.{inner}']}.{kind}"
    if part == "high":
        return spelling["high"] + ".".join(rest)
    if part == "deep":
        return ".".join([spelling[part].format(rest[0]), *rest[1:]])
    if part in ("newline", "separator", "begin", "end", "tokens", "pad"):
        return spelling[part]
    if part in ("layers", "over_all"):
        begin, (number, part, *rest) = tower + spelling[part], rest
        return ".".join([begin.format(number), spelling[part], *rest])
    return ".".join([tower + spelling[part], *rest])


def language_of(config: Fields, text: str | None = "text_config", default: str = "llama", **changes: Any) -> Built:
    """The language model that ``config`` holds under ``text``, None: beside its other fields, as its own family builds
    it. ``changes``: to its config. Where the whole says that embedding and head are one it counts, else what the part
    says.
    """
    part = config if text is None else config.inner(text)
    own = part.values
    kind = own.get("model_type") or default
    absent = (ABSENT.get(kind, {}) if isinstance(kind, str) else {}) | {"model_type": kind}
    # null counts as nothing, but to a family that gives it a meaning: DeepSeek-V2's q_lora_rank
    values = absent | {key: value for key, value in own.items() if value is not None or key not in absent} | changes
    if config.has("tie_word_embeddings"):
        tied = config.flag("tie_word_embeddings", False) or own.get("tie_word_embeddings") or False
        values["tie_word_embeddings"] = tied
    if text == "text_config" and "architectures" not in changes and kind in families():
        values["architectures"] = None  # transformers goes by model_type: SmolVLM's files name a VLlama3ForCausalLM
    family = find_family(values, config.source if text is None else f"{config.source}: {text}")
    spec, stored = family.build(Fields(values, config.source, part.prefix))
    return replace(spec, family=family.name), stored


def seeing(language: Built, spec: VisionSpec, stored: list[StoredTensor], spelled: Mapping[str, str]) -> Built:
    """A language model with eyes. ``spelled``: how names of the language model begin → how they begin in the whole."""
    decoder, text = language

    def whole(name: str) -> str:
        begin = next((begin for begin in spelled if name.startswith(begin)), "")
        return spelled.get(begin, "") + name.removeprefix(begin)

    return replace(decoder, vision=replace(spec, language=decoder.family)), [
        *(replace(x, name=whole(x.name)) for x in text),
        *stored,
    ]


def without_sight(spec: DecoderSpec) -> DecoderSpec:
    """The language model alone: what it sees with is not loaded, nor are layers that read pictures alone."""
    return replace(spec, vision=None, layers=tuple(layer for layer in spec.layers if not _reads_pictures(layer)))


def names_of_sight(spec: DecoderSpec) -> tuple[str, ...]:
    """How names of the parameters begin that ``without_sight`` leaves out."""
    return (PREFIX, *(f"model.layers.{i}." for i, layer in enumerate(spec.layers) if _reads_pictures(layer)))


def _reads_pictures(layer: LayerSpec) -> bool:
    return any(s.mixer.kind == "cross" for s in layer.sublayers)
