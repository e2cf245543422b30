"""A draft model that guesses a block of tokens in one pass, from hidden states of a larger model (DFlash)."""

from __future__ import annotations

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec.decoder import DecoderSpec
from toolkit.models.spec.parts import LinearSpec, NormSpec


@dataclass(frozen=True)
class DFlashSpec:
    """Of each token that is known ``norm(join(states))`` is what keys and values of all layers are made of; ``states``
    are those that the larger model gives to its layers ``taps``, side by side. The newest token, whose states are not
    known yet, and ``mask`` tokens behind it, ``block`` in all, go through the layers as those of a model do, but see
    each other; what the head says of a mask is about its own place.

    ``layer``: the layers, with the larger model's embedding and head.
    Source: Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding" (2026), arXiv 2602.06036.
    """

    layer: DecoderSpec
    join: LinearSpec
    norm: NormSpec
    taps: tuple[int, ...]
    mask: int
    block: int
