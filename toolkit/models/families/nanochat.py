"""nanochat: norms without weights, one of them behind the embedding, q and k normed as they are turned, squared ReLU.
Source: transformers ``NanoChatForCausalLM``.

Its heads turn the other way round: the halves of q's and k's rows change places, and they turn as others do.
"""

from __future__ import annotations

from dataclasses import replace

from toolkit.models.config.dims import Dims, read_dims
from toolkit.models.config.fields import Fields
from toolkit.models.decoder import Built, llama_like, plain_mlp
from toolkit.models.encoder import EMBED_NORM
from toolkit.models.families.bloom import NO_GGUF
from toolkit.models.families.gemma2 import softcap
from toolkit.models.family import Family, Tiny
from toolkit.models.spec import EncoderSpec, NormSpec
from toolkit.models.stored import Fused, renamed

NAMES = {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}


def build(config: Fields) -> Built:
    dims = read_dims(config)
    act = config.activation("hidden_act", default="relu2")

    def norm(name: str, size: int) -> NormSpec:
        return NormSpec(name, size, dims.eps, weight=False)

    return llama_like(
        config,
        dims,
        attention_bias=config.flag("attention_bias", False),
        qk_norm=True,
        activation=act,
        change=lambda i, own: replace(own, norm_last=True),
        feed_forward=lambda i: plain_mlp(i, dims, act, False),
        norm=norm,
        rename=renamed(NAMES),
        fused=[_turned(dims, "q_proj", dims.heads), _turned(dims, "k_proj", dims.kv_heads)],
        logit_softcap=softcap(config, "final_logit_softcapping", 15.0),
        encoder=EncoderSpec(writes=True, norm=norm(EMBED_NORM, dims.hidden)),
    )


def _turned(dims: Dims, part: str, heads: int) -> Fused:
    half = dims.head_dim // 2
    starts = [h * dims.head_dim for h in range(heads)]
    rows = tuple(span for s in starts for span in ((s + half, s + 2 * half), (s, s + half)))
    return Fused(f"self_attn.{part}", {f"self_attn.{part}": rows})


FAMILY = Family(
    "nanochat",
    "nanochat d20 to d34",
    ("NanoChatForCausalLM",),
    build,
    (
        Tiny({}),
        Tiny(dict(num_key_value_heads=1, final_logit_softcapping=None)),
    ),
    NO_GGUF,
)
