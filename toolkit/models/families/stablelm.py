"""StableLM 2: Llama with layer norms and partial rope, its sublayers side by side in the larger ones. Source:
transformers ``StableLmForCausalLM``."""

from __future__ import annotations

from functools import partial

from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import PARALLEL_NORM, PRE_NORMS, Built, layer_norm, llama_like
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import BLOCK, Gguf


def build(config: Fields) -> Built:
    rotary = config.number("rope_pct", default=0.25, high=1.0)  # as the first 3B's file has it, with norm_eps
    dims = read_dims(config, eps=1e-5, kv_heads=32)
    config.only(": norms that the checkpoint has one a head are not read", qk_layernorm=False)
    parallel = config.flag("use_parallel_residual", False)
    return llama_like(
        config,
        dims,
        partial_rotary=rotary,
        qkv_bias=config.flag("use_qkv_bias", False),
        norm=partial(layer_norm, eps=dims.eps, bias=True),
        norms=PARALLEL_NORM if parallel else PRE_NORMS,
        parallel=parallel,
    )


FAMILY = Family(
    "stablelm",
    "StableLM 3B, 2 1.6B; StableCode 3B",
    ("StableLmForCausalLM", "StableLMEpochForCausalLM"),
    build,
    (
        Tiny(dict(use_qkv_bias=True)),
        Tiny(dict(use_parallel_residual=True, num_key_value_heads=1)),
    ),
    Gguf(
        "stablelm",
        "stablelm",
        BLOCK,
        eps="layer_norm_eps",
        fields={"hidden_act": "silu"},
        read=lambda file, config: {
            "use_qkv_bias": "blk.0.attn_q.bias" in file.tensors,
            "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,  # the key says true of others too
        },
        write=lambda spec: {"use_parallel_residual": spec.layers[0].sublayers[0].reads == "block"},
    ),
)
