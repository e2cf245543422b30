"""MiniCPM 1: Llama with scaled embeddings, residuals and logits. Source: arXiv 2404.06395 and the model's own
``modeling_minicpm.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families.granite import scales
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, Gguf, Metadata


def build(config: Fields) -> Built:
    for name in ("num_experts", "mup_denominator"):  # MiniCPM-MoE, MiniCPM 4
        if config.values.get(name):
            config.fail(name, config.values[name], "none: of the models under this name only the first, dense ones run")
    dims = read_dims(config, tied=True)
    return llama_like(
        config,
        dims,
        residual_scale=config.number("scale_depth", default=1.0) / dims.layers**0.5,
        embed_scale=config.number("scale_emb", default=1.0),
        head_scale=config.integer("dim_model_base", default=1) / dims.hidden,
    )


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "scale_emb": file.number("embedding_scale", 12.0),
        "scale_depth": file.number("residual_scale", 1.4 / config["num_hidden_layers"] ** 0.5)
        * config["num_hidden_layers"] ** 0.5,
        "dim_model_base": round(config["hidden_size"] / file.number("logit_scale", config["hidden_size"] / 256)),
    }


FAMILY = Family(
    "minicpm",
    "MiniCPM 1B, 2B",
    ("MiniCPMForCausalLM",),
    build,
    (
        Tiny(
            dict(scale_emb=12, scale_depth=1.4, dim_model_base=32),
            dict(
                embedding_multiplier=12.0, residual_multiplier=1.4 / 2**0.5, logits_scaling=2.0,
                attention_multiplier=0.25, tie_word_embeddings=True,
            ),
        ),
    ),
    Gguf("minicpm", "minicpm", BLOCK, interleaved_qk=True, biases=False, fields={"hidden_act": "silu"}, read=_read,
         write=scales),
    twin="granite",
)  # fmt: skip
