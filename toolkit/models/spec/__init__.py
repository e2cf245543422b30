"""What a decoder is, as data.

A family file (``toolkit/models/families/<family>.py``) maps ``config.json`` and the checkpoint's tensor names to
a ``DecoderSpec`` and a list of ``StoredTensor``; it is the only place that knows the family. Both runners execute
any spec; the engine artifact carries it as JSON (``to_json`` / ``from_json``).

Names: every parameter has one stable canonical name, spelled as in a Hugging Face Llama checkpoint
(``model.layers.3.self_attn.q_proj``), whatever the family calls it on disk. LoRA, ``--skip`` patterns,
per-layer precision and error messages use these names.

A mixer is one file here: a dataclass that answers for itself what ``mixer.MixerSpec`` lists.
"""

from toolkit.models.spec.assistant import AssistantSpec
from toolkit.models.spec.attention import AttentionSpec
from toolkit.models.spec.cross import CrossSpec
from toolkit.models.spec.decoder import DecoderSpec, LayerSpec, Mixer, Sublayer
from toolkit.models.spec.delta import DeltaSpec
from toolkit.models.spec.dflash import DFlashSpec
from toolkit.models.spec.encoder import EncoderSpec
from toolkit.models.spec.keeps import CacheGroup, Kept, Latent, Paged, State
from toolkit.models.spec.latent import LatentSpec
from toolkit.models.spec.mamba import MambaSpec
from toolkit.models.spec.mixer import Rotary
from toolkit.models.spec.mlp import MlpSpec
from toolkit.models.spec.moe import Apart, MoeSpec
from toolkit.models.spec.mtp import MtpSpec
from toolkit.models.spec.parts import (
    Activation,
    AlibiSpec,
    LinearSpec,
    NormSpec,
    PositionBias,
    QueryScale,
    RopeSpec,
    Spread,
)
from toolkit.models.spec.per_layer import PerLayerSpec, PerLayerTable
from toolkit.models.spec.reuse import ReuseSpec
from toolkit.models.spec.share import Cut, Share, Unit, Units, portion
from toolkit.models.spec.short_conv import ConvSpec, ShortConvSpec
from toolkit.models.spec.stored import Part, Rows, StoredTensor
from toolkit.models.spec.text_head import POOLINGS, HeadActivation, HeadLayer, Pooling, TextHead

__all__ = [
    "POOLINGS",
    "Activation",
    "AlibiSpec",
    "Apart",
    "AssistantSpec",
    "AttentionSpec",
    "CacheGroup",
    "ConvSpec",
    "CrossSpec",
    "DFlashSpec",
    "Cut",
    "DecoderSpec",
    "DeltaSpec",
    "EncoderSpec",
    "HeadActivation",
    "HeadLayer",
    "Kept",
    "Latent",
    "LatentSpec",
    "LayerSpec",
    "LinearSpec",
    "MambaSpec",
    "Mixer",
    "MlpSpec",
    "MoeSpec",
    "MtpSpec",
    "NormSpec",
    "Paged",
    "Part",
    "PerLayerSpec",
    "PerLayerTable",
    "Pooling",
    "PositionBias",
    "QueryScale",
    "ReuseSpec",
    "RopeSpec",
    "Rotary",
    "Rows",
    "Share",
    "ShortConvSpec",
    "Spread",
    "State",
    "StoredTensor",
    "Sublayer",
    "TextHead",
    "Unit",
    "Units",
    "portion",
]
