"""SmolLM3: Llama without rope in every fourth layer. Source: transformers ``SmolLM3ForCausalLM``."""

from __future__ import annotations

from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config.dims import read_dims, read_window, read_windows
from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, Gguf
from toolkit.models.spec import DecoderSpec

INTERVAL = 4


def build(config: Fields) -> Built:
    dims = read_dims(config, tied=True, kv_heads=4)
    turns = _layers_with_rope(config, dims.layers)
    window = read_window(config) if config.flag("use_sliding_window", False) else None
    return llama_like(
        config,
        dims,
        theta=2e6,
        turned=turns,
        windows=read_windows(config, dims.layers, window, [not turn for turn in turns]),
        attention_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )


def _layers_with_rope(config: Fields, layers: int) -> list[bool]:
    """``no_rope_layers`` has a 1 for each layer *with* rope, despite its name."""
    found = config.values.get("no_rope_layers")
    if found is None:
        every = config.integer("no_rope_layer_interval", default=INTERVAL, high=MAX_LAYERS)
        return [(i + 1) % every != 0 for i in range(layers)]
    if not isinstance(found, list) or len(found) < layers or any(x not in (0, 1) for x in found):
        config.fail("no_rope_layers", found, f"a list of at least {layers} zeros and ones")
    return [x == 1 for x in found[:layers]]


def _write(spec: DecoderSpec) -> dict[str, Any]:
    if any((a.rope is None) != ((i + 1) % INTERVAL == 0) for i, a in spec.attention_layers()):
        raise ToolkitError(f"gguf: llama.cpp's smollm3 has no rope in every layer of {INTERVAL} alone, this model not")
    return {}


FAMILY = Family(
    "smollm3",
    "SmolLM3",
    ("SmolLM3ForCausalLM",),
    build,
    (
        Tiny(dict(num_hidden_layers=4)),
        Tiny(
            dict(
                no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=16, tie_word_embeddings=False,
                num_key_value_heads=1, head_dim=24,
            )
        ),
    ),
    Gguf("smollm3", "smollm3", BLOCK, interleaved_qk=True, biases=False, fields={"hidden_act": "silu"}, write=_write),
)  # fmt: skip
