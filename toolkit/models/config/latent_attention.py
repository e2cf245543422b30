"""Latent attention as the configs of DeepSeek's line of models state it."""

from __future__ import annotations

from collections.abc import Callable

from toolkit.models.config.dims import Dims, read_dims
from toolkit.models.config.fields import MAX_WIDTH, Fields
from toolkit.models.config.rope import read_rope, yarn_mscale
from toolkit.models.spec import AttentionSpec, LatentSpec, LinearSpec, NormSpec

LATENT_EPS = 1e-6  # of the norms inside, whatever the config says of the others


def read_latent_dims(config: Fields, *, eps: float = 1e-6, tied: bool = False) -> Dims:
    """``read_dims`` where a head's size is not hidden / heads: it has several, which ``read_latent`` reads."""
    return read_dims(config, eps=eps, tied=tied, head_dim=config.integer("qk_rope_head_dim", default=64))


def read_latent(
    config: Fields,
    dims: Dims,
    *,
    q_rank: int,
    kv_rank: int = 512,
    nope_dim: int = 128,
    rope_dim: int = 64,
    v_dim: int | None = 128,
) -> Callable[[int, AttentionSpec], LatentSpec]:
    """``change`` of ``llama_like``: the attention of a layer by its number. The arguments are what an absent field
    means; ``v_dim`` None: hidden / heads. A ``q_lora_rank`` of null is none: queries are made of the input at once.
    """
    stated = config.values
    rank = None if "q_lora_rank" in stated else q_rank
    rank = config.integer("q_lora_rank", default=rank, high=MAX_WIDTH)
    kv_rank = config.integer("kv_lora_rank", default=kv_rank)
    nope = config.integer("qk_nope_head_dim", default=nope_dim, high=65_536)
    turned = config.integer("qk_rope_head_dim", default=rope_dim, high=65_536)
    v = config.integer("v_head_dim", default=v_dim or dims.hidden // dims.heads, high=65_536)
    bias = config.flag("attention_bias", False)
    rope = read_rope(config, head_dim=turned, max_position=dims.max_position)
    scale = (nope + turned) ** -0.5
    if rope.kind != "default":
        scaling = config.nested("rope_scaling") or config.nested("rope_parameters") or config
        scale *= yarn_mscale(rope.factor, scaling.number("mscale_all_dim", default=0.0, low=-1.0)) ** 2

    def attention(layer: int, _: AttentionSpec) -> LatentSpec:
        prefix = f"model.layers.{layer}.self_attn"

        def norm(name: str, size: int) -> NormSpec:
            return NormSpec(f"{prefix}.{name}", size, LATENT_EPS)

        q_size, kv_size = dims.heads * (nope + turned), dims.heads * (nope + v)
        plain = LinearSpec(f"{prefix}.q_proj", dims.hidden, q_size, False, "column")
        return LatentSpec(
            q_a=None if rank is None else LinearSpec(f"{prefix}.q_a_proj", dims.hidden, rank, bias),
            q_a_norm=None if rank is None else norm("q_a_layernorm", rank),
            q=plain if rank is None else LinearSpec(f"{prefix}.q_b_proj", rank, q_size, False, "column"),
            kv_a=LinearSpec(f"{prefix}.kv_a_proj_with_mqa", dims.hidden, kv_rank + turned, bias),
            kv_a_norm=norm("kv_a_layernorm", kv_rank),
            kv_b=LinearSpec(f"{prefix}.kv_b_proj", kv_rank, kv_size, False, "column"),
            o=LinearSpec(f"{prefix}.o_proj", dims.heads * v, dims.hidden, bias, "row"),
            heads=dims.heads,
            nope_dim=nope,
            rope_dim=turned,
            v_dim=v,
            kv_rank=kv_rank,
            scale=scale,
            rope=rope,
        )

    return attention
