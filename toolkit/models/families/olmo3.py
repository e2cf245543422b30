"""OLMo 3: OLMo 2 of which three layers in four slide; scaled rope for those that do not. Source: transformers
``Olmo3ForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from toolkit.models.config.dims import layer_ropes, read_dims, read_window, read_windows
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import POST_NORMS, Built, llama_like
from toolkit.models.families import olmo2
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import Metadata
from toolkit.models.spec import DecoderSpec


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5)
    window = read_window(config, default=4096)
    windows = read_windows(config, dims.layers, window, [(i + 1) % 4 != 0 for i in range(dims.layers)])
    theta = config.number("rope_theta", default=500_000.0, low=1.0)
    return llama_like(
        config,
        dims,
        rope=layer_ropes(config, dims, windows, theta=theta, local_theta=theta),
        windows=windows,
        attention_bias=config.flag("attention_bias", False),
        qk_norm="all",
        norms=POST_NORMS,
    )


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    slides = file.flags("attention.sliding_window_pattern")
    kinds = {} if slides is None else {"layer_types": [SLIDES if one else "full_attention" for one in slides]}
    return {"sliding_window": file.whole("attention.sliding_window"), **kinds}


def _write(spec: DecoderSpec) -> dict[str, Any]:
    return {"attention.sliding_window_pattern": np.array([a.window is not None for _, a in spec.attention_layers()])}


SLIDES = "sliding_attention"
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
FAMILY = Family(
    "olmo3",
    "OLMo 3 7B, 32B",
    ("Olmo3ForCausalLM",),
    build,
    (
        Tiny(
            dict(
                num_hidden_layers=4,
                sliding_window=16,
                rope_parameters={
                    "full_attention": YARN,
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            )
        ),
        Tiny(dict(num_key_value_heads=1, layer_types=["full_attention", "sliding_attention"], sliding_window=12)),
    ),
    replace(olmo2.GGUF, family="olmo3", window=True, local="plain", read=_read, write=_write),
)
