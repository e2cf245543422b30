"""Qwen2 and Qwen2.5: biases on q, k and v; upper layers may slide. Source: transformers ``Qwen2ForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims, read_window, read_windows
from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, Gguf
from toolkit.models.spec import HeadLayer


def layer_windows(config: Fields, layers: int) -> list[int | None]:
    """Window of each layer: ``layer_types``, else every layer from ``max_window_layers`` on, where sliding is on."""
    window = read_window(config, default=4096) if config.flag("use_sliding_window", False) else None
    first = config.integer("max_window_layers", default=28, low=0, high=MAX_LAYERS)
    return read_windows(config, layers, window, [i >= first for i in range(layers)])


def build(config: Fields) -> Built:
    dims = read_dims(config, kv_heads=32)
    return llama_like(config, dims, windows=layer_windows(config, dims.layers), qkv_bias=True)


GGUF = Gguf("qwen2", "qwen2", BLOCK, fields={"hidden_act": "silu", "use_sliding_window": False})
FAMILY = Family(
    "qwen2",
    "Qwen 1.5, 2, 2.5, QwQ; R1 distilled into Qwen; MiMo 7B; Qwen2.5-Math-RM",
    ("Qwen2ForCausalLM", "MiMoForCausalLM"),
    build,
    (
        Tiny(dict(use_sliding_window=True, sliding_window=20, max_window_layers=1, tie_word_embeddings=True)),
        Tiny(dict(use_sliding_window=False)),
    ),
    GGUF,
    reward=(HeadLayer("score.0", activation="relu"), HeadLayer("score.2")),
)
