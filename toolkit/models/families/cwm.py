"""Code World Model: Llama 3 of which every fourth layer, from the first, sees everything. Source: transformers
``CwmForCausalLM``."""

from __future__ import annotations

from toolkit.models.config.dims import read_dims, read_window, read_windows
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like
from toolkit.models.families import llama
from toolkit.models.family import Family, Tiny

ROPE = {**llama.LLAMA3, "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8192}


def build(config: Fields) -> Built:
    if not config.has("rope_parameters") and not config.has("rope_scaling"):
        config = config.changed({"rope_scaling": ROPE})
    dims = read_dims(config, eps=1e-5, head_dim=128, kv_heads=8)
    window = read_window(config, default=8192)
    return llama_like(
        config,
        dims,
        theta=1e6,
        windows=read_windows(config, dims.layers, window, [i % 4 != 0 for i in range(dims.layers)]),
        mlp_bias=config.flag("mlp_bias", False),
    )


FAMILY = Family(
    "cwm",
    "CWM 32B",
    ("CwmForCausalLM",),
    build,
    (
        Tiny(dict(head_dim=32, sliding_window=16, num_hidden_layers=3, rope_parameters=llama.LLAMA3)),
        Tiny(dict(head_dim=24, layer_types=["full_attention"] * 2)),
    ),
    llama.GGUF,
)
