"""EXAONE 4: norms after each sublayer and on q and k; where layers slide, those that see everything have no rope.
Source: transformers ``Exaone4ForCausalLM``."""

from __future__ import annotations

from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config.dims import read_dims, read_window, read_windows
from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.decoder import POST_NORMS, Built, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, QK_NORMS, Gguf, without
from toolkit.models.spec import DecoderSpec

POST_NORM_NAMES = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, kv_heads=32)
    window = read_window(config, default=4096)
    windows = read_windows(config, dims.layers, window, slides(config, dims.layers, window))
    return llama_like(
        config,
        dims,
        turned=[window is None or seen is not None for seen in windows],
        windows=windows,
        qk_norm=True,
        norms=POST_NORMS,
    )


def slides(config: Fields, layers: int, window: int | None) -> list[bool]:
    """Which layers slide. ``sliding_window_pattern``: a number n, every n-th layer sees everything, or letters L and G,
    repeated."""
    pattern = config.values.get("sliding_window_pattern")
    if window is None:
        return [False] * layers
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            config.fail("sliding_window_pattern", pattern, "a number, or letters L and G")
        return [pattern[i % len(pattern)] == "L" and i < layers - 1 for i in range(layers)]
    every = config.integer("sliding_window_pattern", default=4, high=MAX_LAYERS)
    return [(i + 1) % every != 0 for i in range(layers)]


def _write(spec: DecoderSpec) -> dict[str, Any]:
    layers = [a for _, a in spec.attention_layers()]
    windows = [a.window for a in layers]
    if not any(windows) and any(a.rope is None for a in layers):
        raise ToolkitError("gguf: llama.cpp's exaone4 turns q and k where no layer slides, this model does not")
    if any(windows) and (len(windows) != 64 or any((w is None) != ((i + 1) % 4 == 0) for i, w in enumerate(windows))):
        raise ToolkitError("gguf: llama.cpp's exaone4 slides in the model of 64 layers alone, in three of every four")
    return {}


FAMILY = Family(
    "exaone4",
    "EXAONE 4.0",
    ("Exaone4ForCausalLM",),
    build,
    (
        Tiny(dict(num_hidden_layers=4, sliding_window=16, sliding_window_pattern=4, head_dim=32)),
        Tiny(
            dict(
                sliding_window=None, layer_types=["full_attention"] * 2, head_dim=24, num_key_value_heads=1,
                tie_word_embeddings=True,
            )
        ),
    ),
    Gguf(
        "exaone4",
        "exaone4",
        {**without(BLOCK, "attn_norm", "ffn_norm"), **QK_NORMS, **POST_NORM_NAMES},
        biases=False,
        window=True,
        fields={"hidden_act": "silu"},
        read=lambda file, config: {"sliding_window": file.stated("attention.sliding_window", None)},
        write=_write,
    ),
)  # fmt: skip
