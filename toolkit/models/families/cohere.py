"""Command-R and Aya: attention and MLP side by side, layer norms without bias, rotary pairs of neighbours, scaled
logits. Source: transformers ``CohereForCausalLM``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import MAX_POSITION, Fields
from toolkit.models.decoder import PARALLEL_NORM, Built, layer_norm, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, QK_NORMS, Gguf, as_wide_as_the_model, without
from toolkit.models.spec import DecoderSpec


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, tied=True)
    # Command-R was trained on what model_max_length says; its max_position_embeddings is shorter.
    longest = config.integer("model_max_length", "max_position_embeddings", high=MAX_POSITION)
    spec, stored = llama_like(
        config,
        replace(dims, max_position=longest),
        theta=500_000.0,
        attention_bias=config.flag("attention_bias", False),
        qk_norm="own" if config.flag("use_qk_norm", False) else False,  # Command-R+
        norm=partial(layer_norm, eps=dims.eps),
        norms=PARALLEL_NORM,
        parallel=True,
        pairs=True,
        head_scale=config.number("logit_scale", default=0.0625),
    )
    # a norm of its own for each head is a matrix, also where there is one head
    one = [s.kind == "norm" and s.name.endswith(("q_norm", "k_norm")) and len(s.shape) == 1 for s in stored]
    return spec, [replace(s, shape=(1, *s.shape)) if alone else s for s, alone in zip(stored, one, strict=True)]


def _write(spec: DecoderSpec) -> dict[str, Any]:
    as_wide_as_the_model(spec, "command-r")
    first = spec.attention_layers()[0][1]
    normed = first.q_norm is not None
    if not spec.tied or normed != (len(spec.layers) >= LARGE):
        raise ToolkitError(f"gguf: llama.cpp's command-r is tied, and norms q and k from {LARGE} layers on")
    plain = first.rope is None or first.rope.kind == "default"
    return {"logit_scale": spec.head_scale, **({"rope.scaling.type": "none"} if plain else {})}


LARGE = 64  # layers
FAMILY = Family(
    "cohere",
    "Command-R, Command-R+, Aya 23, Aya Expanse",
    ("CohereForCausalLM",),
    build,
    (
        Tiny(dict(logit_scale=0.25, use_qk_norm=True)),
        Tiny(
            dict(
                logit_scale=0.5, attention_bias=True, num_key_value_heads=1, use_qk_norm=True, tie_word_embeddings=False
            )
        ),
        Tiny(dict(logit_scale=0.5, num_key_value_heads=1)),
    ),
    Gguf(
        "command-r",
        "cohere",
        {**without(BLOCK, "ffn_norm"), **QK_NORMS},
        interleaved_qk=True,
        biases=False,
        eps="layer_norm_eps",
        fields={"hidden_act": "silu", "attention_bias": False},
        read=lambda file, config: {
            "logit_scale": file.number("logit_scale"),
            "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        },
        write=_write,
    ),
)
