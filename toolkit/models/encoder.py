"""Pieces that the families of encoders are put together from: models that read a text as a whole and write none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from toolkit.models.config.dims import Dims, read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, assemble, attention, gated_mlp, layer_norm, plain_mlp
from toolkit.models.gguf import BLOCK, Metadata, without
from toolkit.models.spec import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    EncoderSpec,
    LayerSpec,
    NormSpec,
    RopeSpec,
    Sublayer,
)
from toolkit.models.spec.decoder import grouped
from toolkit.models.stored import Fused, stored_tensors

NO_GGUF = "encoders are not read from GGUF files yet, nor written to them"
EMBED_NORM = "model.embed_norm"
TYPES = "model.token_types"
POSITIONS = "model.positions"
GGUF_TOP = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": EMBED_NORM,
    "token_types": TYPES,
    "position_embd": POSITIONS,
}
GGUF_BLOCK = {
    **without(BLOCK, "attn_norm", "ffn_norm"),
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_mlp_layernorm",
}


def encoder(
    config: Fields,
    dims: Dims,
    *,
    activation: Activation,
    extras: EncoderSpec,
    rope: RopeSpec | Sequence[RopeSpec | None] | None = None,
    windows: Sequence[int | None] | None = None,
    gated: bool = False,
    attention_bias: bool = True,
    up_bias: bool = True,
    down_bias: bool = True,
    norm: Callable[[str, int], NormSpec] | None = None,
    norms_first: bool = False,
    change: Callable[[int, AttentionSpec], AttentionSpec] | None = None,
    rename: Callable[[str], str] = str,
    fused: Sequence[Fused] = (),
    max_length: int | None = None,
) -> Built:
    """A model whose tokens all see each other.

    ``extras``: what is added to embeddings. ``norms_first``: norms stand before attention and MLP, but for that of the
    first layer's attention, where the norm of the embeddings stands, and a last one behind all; else behind each sum.
    ``rope``, ``windows``: of all layers or of each, see ``AttentionSpec.mutual``. ``norm``: what makes a norm, a layer
    norm with a bias where it is not given. ``max_length``: of a text, where it is not ``dims.max_position``. The rest
    is as of ``llama_like``.
    """
    made = norm or partial(layer_norm, eps=dims.eps, bias=True)
    ropes = rope if isinstance(rope, Sequence) else [rope] * dims.layers
    seen = windows or [None] * dims.layers
    layers = []
    for i in range(dims.layers):
        own = attention(i, dims, ropes[i], window=seen[i], qkv_bias=attention_bias, o_bias=attention_bias)
        own = replace(own, mutual=True)
        own = own if change is None else change(i, own)
        mlp = plain_mlp(i, dims, activation, up_bias)
        if gated:
            mlp = gated_mlp(f"model.layers.{i}.mlp", dims.hidden, dims.intermediate, activation, up_bias)
        mlp = replace(mlp, down=replace(mlp.down, bias=down_bias))
        before = f"model.layers.{i}.input_layernorm" if norms_first else f"model.layers.{i - 1}.post_mlp_layernorm"
        pre = made(before if i else EMBED_NORM, dims.hidden)
        between = made(f"model.layers.{i}.post_attention_layernorm", dims.hidden)
        first = Sublayer(own, pre, carries=not (norms_first and i))
        layers.append(LayerSpec((first, Sublayer(mlp, between, carries=not norms_first))))
    last = "model.norm" if norms_first else f"model.layers.{dims.layers - 1}.post_mlp_layernorm"
    dims = replace(dims, tied=True, max_position=max_length or dims.max_position)
    spec = assemble(dims, layers, made(last, dims.hidden), encoder=extras)
    return spec, stored_tensors(spec, rename, fused)


def both_ways(fields: Fields, spec: DecoderSpec) -> DecoderSpec:
    """``spec`` as an encoder, whose tokens all see each other. Raises ToolkitError where its layers cannot."""
    plain = spec.vision is None and spec.mask_token is None
    plain = plain and all(mixer.kind in ("attention", "mlp", "moe") for _, mixer in spec.mixers())
    for _, a in spec.attention_layers():
        odd = a.chunked or a.block > 1 or a.softcap is not None or a.sinks is not None or a.sink_tokens
        plain = plain and not odd and not (a.alibi and a.alibi.rounded)
    if not plain:
        fields.fail("is_causal", "false", "true: such layers are computed in order alone here")

    def seeing(_: int, sublayer: Sublayer) -> Sublayer:
        if (mixer := sublayer.mixer).kind != "attention":
            return sublayer
        window = None if mixer.window is None else mixer.window + 1  # the last key of both sides is seen, too
        return replace(sublayer, mixer=replace(mixer, mutual=True, window=window))

    layers, groups = grouped(spec.changed(seeing).layers)
    added = replace(spec.encoder or EncoderSpec(), writes=False)
    return replace(spec, layers=layers, cache_groups=groups, encoder=added, tied=True, head_bias=False, head_rows=0)


def encoder_dims(config: Fields, eps: float) -> Dims:
    """The dimensions of one that has as many keys as heads, which share the hidden size out among them."""
    return read_dims(config.changed({"num_key_value_heads": None, "head_dim": None}), eps=eps)


def types_of(config: Fields, default: int = 2) -> dict[str, Any]:
    """Of ``EncoderSpec`` what a config's ``type_vocab_size`` says; 0 = no types."""
    rows = config.integer("type_vocab_size", default=default, low=0, high=1024)
    return {"types": TYPES, "type_rows": rows} if rows else {}


def gguf_types(file: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """The field of ``types_of`` in a GGUF file's config."""
    return {"type_vocab_size": file.rows("token_types.weight")}


def renamed_within(names: dict[str, str], layers: str = "encoder.layer.") -> Callable[[str], str]:
    """A ``rename`` by how canonical names go on behind a layer's number, or by whole ones."""

    def rename(name: str) -> str:
        head = "model.layers."
        if not name.startswith(head):
            return names.get(name, name)
        number, _, rest = name.removeprefix(head).partition(".")
        return f"{layers}{number}.{names.get(rest, rest)}"

    return rename
