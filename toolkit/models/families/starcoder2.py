"""StarCoder2: layer norms, a plain MLP and biases throughout. Source: transformers ``Starcoder2ForCausalLM``."""

from __future__ import annotations

from functools import partial

from toolkit.models.config.dims import read_dims, read_window
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, layer_norm, llama_like, plain_mlp
from toolkit.models.family import Family, Tiny
from toolkit.models.gguf import PLAIN_BLOCK, Gguf
from toolkit.models.stored import renamed


def build(config: Fields) -> Built:
    dims = read_dims(config, eps=1e-5, tied=True, kv_heads=2)
    bias = config.flag("use_bias", True)
    act = config.activation("hidden_act", default="gelu_pytorch_tanh")
    return llama_like(
        config,
        dims,
        windows=read_window(config),
        attention_bias=bias,
        activation=act,
        feed_forward=lambda i: plain_mlp(i, dims, act, bias),
        norm=partial(layer_norm, eps=dims.eps, bias=True),
        rename=renamed({"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}),
    )


FAMILY = Family(
    "starcoder2",
    "StarCoder2 3B, 7B, 15B",
    ("Starcoder2ForCausalLM",),
    build,
    (
        Tiny(dict(sliding_window=20)),
        Tiny(dict(num_key_value_heads=1, num_attention_heads=2, tie_word_embeddings=False)),
    ),
    Gguf(
        "starcoder2",
        "starcoder2",
        PLAIN_BLOCK,
        eps="norm_epsilon",
        fields={"hidden_act": "gelu_pytorch_tanh"},
        read=lambda file, config: {"use_bias": "blk.0.attn_q.bias" in file.tensors},
    ),
)
