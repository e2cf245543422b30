"""GPT-NeoX and Pythia: layer norms, a plain MLP, side by side or not, q, k and v joined head by head. Source:
transformers ``GPTNeoXForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, layer_norm, llama_like, plain_mlp
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import PLAIN_BLOCK, QKV, Gguf, Metadata, as_wide_as_the_model
from toolkit.models.spec import DecoderSpec
from toolkit.models.stored import fused_by_kv_head, renamed

NAMES = {
    "model.embed_tokens": "gpt_neox.embed_in",
    "model.norm": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
    "self_attn.o_proj": "attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5)
    act = config.activation("hidden_act", default="gelu")
    return llama_like(
        config,
        dims,
        theta=config.number("rotary_emb_base", default=10_000.0, low=1.0),
        partial_rotary=config.number("rotary_pct", default=0.25, high=1.0),
        attention_bias=config.flag("attention_bias", True),
        activation=act,
        feed_forward=lambda i: plain_mlp(i, dims, act, True),
        norm=partial(layer_norm, eps=dims.eps, bias=True),
        parallel=config.flag("use_parallel_residual", True),
        rename=renamed(NAMES, {"model.layers.": "gpt_neox.layers."}),
        fused=[fused_by_kv_head(dims, "attention.query_key_value")],
    )


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    turned = file.whole("rope.dimension_count") / config["head_dim"]
    return {"use_parallel_residual": file.has("use_parallel_residual"), "rotary_pct": turned}


def _write(spec: DecoderSpec) -> dict[str, Any]:
    as_wide_as_the_model(spec, "gptneox")
    if spec.tied or not spec.attention_layers()[0][1].q.bias:
        raise ToolkitError("gguf: llama.cpp's gptneox has biases in its attention, and a head of its own")
    return {"use_parallel_residual": spec.layers[0].beside(1)}


FAMILY = Family(
    "gpt_neox",
    "Pythia, GPT-NeoX 20B, Dolly 2, RedPajama-INCITE",
    ("GPTNeoXForCausalLM",),
    build,
    (
        Tiny(dict(num_key_value_heads=4)),
        Tiny(dict(num_key_value_heads=4, use_parallel_residual=False, hidden_act="gelu_new")),
    ),
    Gguf(
        "gptneox",
        "gpt_neox",
        PLAIN_BLOCK,
        joined=QKV,
        eps="layer_norm_eps",
        fields={"hidden_act": "gelu"},
        read=_read,
        write=_write,
    ),
)
