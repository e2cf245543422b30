"""Command-R7B, Command A, Aya Expanse's successors: Command-R of which three layers in four slide, and the others have
no rope. Source: transformers ``Cohere2ForCausalLM``."""

from __future__ import annotations

from functools import partial
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config.dims import read_dims, read_window, read_windows
from toolkit.models.config.fields import MAX_LAYERS, Fields
from toolkit.models.decoder import PARALLEL_NORM, Built, layer_norm, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, Gguf, without
from toolkit.models.spec import DecoderSpec

PATTERN = 4


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, tied=True)
    every = config.integer("sliding_window_pattern", default=PATTERN, high=MAX_LAYERS)
    slides = [(i + 1) % every != 0 for i in range(dims.layers)]
    windows = read_windows(config, dims.layers, read_window(config, default=4096), slides)
    return llama_like(
        config,
        dims,
        turned=[window is not None for window in windows],
        windows=windows,
        attention_bias=config.flag("attention_bias", False),
        norm=partial(layer_norm, eps=dims.eps),
        norms=PARALLEL_NORM,
        parallel=True,
        pairs=True,
        head_scale=config.number("logit_scale", default=0.0625),
    )


def _write(spec: DecoderSpec) -> dict[str, Any]:
    if any((a.window is None) != ((i + 1) % PATTERN == 0) for i, a in spec.attention_layers()) or not spec.tied:
        raise ToolkitError(f"gguf: llama.cpp's cohere2 sees everything in each {PATTERN}th layer alone, and is tied")
    return {"logit_scale": spec.head_scale}


FAMILY = Family(
    "cohere2",
    "Command R7B, Command A; Aya Vision's text part",
    ("Cohere2ForCausalLM",),
    build,
    (
        Tiny(dict(logit_scale=0.25, num_hidden_layers=4, sliding_window=16)),
        Tiny(
            dict(
                logit_scale=0.5,
                sliding_window=12,
                layer_types=["full_attention", "sliding_attention"],
                attention_bias=True,
                num_key_value_heads=1,
                tie_word_embeddings=False,
            )
        ),
    ),
    Gguf(
        "cohere2",
        "cohere2",
        without(BLOCK, "ffn_norm"),
        interleaved_qk=True,
        biases=False,
        window=True,
        eps="layer_norm_eps",
        fields={"hidden_act": "silu", "attention_bias": False},
        read=lambda file, config: {
            "logit_scale": file.number("logit_scale"),
            "sliding_window": file.whole("attention.sliding_window", 4096),
            "sliding_window_pattern": PATTERN,
        },
        write=_write,
    ),
)
