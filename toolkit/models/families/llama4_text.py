"""Llama 4's text model: most layers turn q and k, norm them and see their own chunk of the text alone; the others see
everything without rope, with queries that grow with their position. Experts weigh what they read. Source: transformers
``Llama4ForCausalLM``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.errors import ToolkitError
from toolkit.models.config.dims import read_dims
from toolkit.models.config.fields import MAX_LAYERS, MAX_POSITION, Fields
from toolkit.models.config.routing import read_mixture
from toolkit.models.decoder import Built, llama_like
from toolkit.models.family import WITHIN, Family, Tiny
from toolkit.models.gguf import BLOCK, SHARED_EXPERT, Gguf, Metadata, with_experts
from toolkit.models.spec import AttentionSpec, DecoderSpec, NormSpec, QueryScale
from toolkit.models.stored import fused_experts, renamed

CHUNKED = "chunked_attention"


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, head_dim=128, kv_heads=8)
    inner = dims.intermediate
    dense = replace(dims, intermediate=config.integer("intermediate_size_mlp", default=16384))
    sparse = _sparse_layers(config, dims.layers)
    turned = _turned_layers(config, dims.layers)
    types = config.choices("layer_types", dims.layers, (CHUNKED, "full_attention"))
    types = types or [CHUNKED if x else "full_attention" for x in turned]
    chunk = config.integer("attention_chunk_size", default=None, high=MAX_POSITION)
    if chunk is None and "attention_chunk_size" not in config.values:
        chunk = 8192
    windows = [chunk if kind == CHUNKED else None for kind in types]
    normed, grows = config.flag("use_qk_norm", True), _growth(config)

    def change(i: int, a: AttentionSpec) -> AttentionSpec:
        chunked = a.window is not None
        if not turned[i]:
            return replace(a, chunked=chunked, q_scale=grows)
        if not normed:
            return replace(a, chunked=chunked)
        q, k = (NormSpec(f"model.layers.{i}.self_attn.{x}_norm", a.head_dim, dims.eps, weight=False) for x in "qk")
        return replace(a, chunked=chunked, q_norm=q, k_norm=k)

    return llama_like(
        config,
        dense,
        theta=500_000.0,
        turned=turned,
        windows=windows,
        attention_bias=config.flag("attention_bias", False),
        change=change,
        feed_forward=read_mixture(
            config,
            dims,
            "num_local_experts",
            sparse=[i in sparse for i in range(dims.layers)],
            norm_topk=False,
            scoring="sigmoid",
            shared=inner,
            weigh_input=True,
        ),
        rename=renamed({"mlp.gate": "mlp.router"}, {".mlp.": ".feed_forward."}),
        fused=fused_experts(config.integer("num_local_experts"), dims.hidden, inner, transposed=True),
        pairs=True,
    )


def _sparse_layers(config: Fields, layers: int) -> frozenset[int]:
    if config.has("moe_layers"):
        return config.indices("moe_layers", layers)
    step = config.integer("interleave_moe_layer_step", default=1, high=MAX_LAYERS)
    return frozenset(range(step - 1, layers, step))


def _turned_layers(config: Fields, layers: int) -> list[bool]:
    """``no_rope_layers`` has a 1 for those that do turn."""
    stated = config.values.get("no_rope_layers")
    if not stated:
        every = config.integer("no_rope_layer_interval", default=4, high=MAX_LAYERS)
        return [(i + 1) % every != 0 for i in range(layers)]
    if not isinstance(stated, list) or len(stated) < layers or any(x not in (0, 1) for x in stated):
        config.fail("no_rope_layers", stated, f"a list of 0 or 1 for each of the {layers} layers")
    return [x == 1 for x in stated[:layers]]


def _growth(config: Fields) -> QueryScale | None:
    if not config.flag("attn_temperature_tuning", True):
        return None
    length = config.integer("floor_scale", default=8192, high=MAX_POSITION)
    return QueryScale("floor", length, config.number("attn_scale", default=0.1, high=100.0), 1)


CHUNK, EVERY, GROWTH = 8192, 4, 0.1  # of all that is released, and of llama.cpp's architecture
UNNORMED = 128  # experts of the model whose q and k llama.cpp does not norm


def _read(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "intermediate_size": file.whole("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": file.whole("interleave_moe_layer_step"),
        "attention_chunk_size": file.whole("attention.sliding_window", CHUNK),
        "use_qk_norm": config["num_local_experts"] != UNNORMED,
    }


def _write(spec: DecoderSpec) -> dict[str, Any]:
    attention = [a for _, a in spec.attention_layers()]
    sparse = [layer.sublayers[1].mixer.kind == "moe" for layer in spec.layers]
    mixers = [mixer for _, mixer in spec.mixers() if mixer.kind == "moe"]
    if not mixers:
        raise ToolkitError("gguf: llama.cpp's llama4 has experts, this model has none")
    step = sparse.index(True) + 1
    inner = mixers[0].experts[0].up.out_features
    turns = [(i + 1) % EVERY != 0 for i in range(len(attention))]
    has = {
        "experts in every n-th layer": sparse == [(i + 1) % step == 0 for i in range(len(sparse))],
        f"{EVERY - 1} layers with rope that see chunks of {CHUNK} tokens, then one that sees all": (
            [(a.rope is not None, a.window) for a in attention] == [(x, CHUNK if x else None) for x in turns]
        ),
        f"queries that grow by {GROWTH} every {CHUNK} tokens, where there is no rope": all(
            a.q_scale == (None if a.rope else QueryScale("floor", CHUNK, GROWTH, 1)) for a in attention
        ),
        f"norms of q and k, but for {UNNORMED} experts": all(
            (a.q_norm is not None) == (a.rope is not None and len(mixers[0].experts) != UNNORMED) for a in attention
        ),
    }
    if lacking := [what for what, so in has.items() if not so]:
        raise ToolkitError(f"gguf: llama.cpp's llama4 has {lacking[0]}, this model has not")
    return {"interleave_moe_layer_step": step, "expert_feed_forward_length": inner}


SIZES = dict(
    head_dim=16,
    intermediate_size=64,
    intermediate_size_mlp=128,
    num_local_experts=4,
    num_experts_per_tok=1,
    attention_chunk_size=12,
)
GGUF = Gguf(
    "llama4",
    "llama4_text",
    {**BLOCK, **with_experts({}, SHARED_EXPERT)},
    interleaved_qk=True,
    biases=False,
    window=True,
    norm_topk=False,
    fields={"hidden_act": "silu"},
    numbers={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    read=_read,
    write=_write,
)
FAMILY = Family(
    "llama4_text",
    "Llama 4 Scout, Maverick (text)",
    ("Llama4ForCausalLM",),
    build,
    (
        Tiny(dict(SIZES, num_hidden_layers=4, attention_chunk_size=CHUNK, interleave_moe_layer_step=2)),
        Tiny(dict(SIZES, num_hidden_layers=4, floor_scale=8, attn_scale=0.5, interleave_moe_layer_step=2)),
        Tiny(
            dict(
                SIZES,
                head_dim=24,
                num_key_value_heads=1,
                num_experts_per_tok=2,
                no_rope_layers=[0, 1],
                floor_scale=16,
                use_qk_norm=False,
                tie_word_embeddings=True,
            )
        ),
    ),
    GGUF,
    spellings=WITHIN,
)
