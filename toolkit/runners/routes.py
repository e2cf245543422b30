"""Which experts tokens went to, layer by layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from toolkit.models.spec import DecoderSpec
from toolkit.runners.step import NO_EXPERT, U16


def width_of(spec: DecoderSpec) -> int:
    """The most experts that a token chooses in a layer, 0 where there are none."""
    return max((chosen for _, chosen in spec.mixtures()), default=0)


def by_layer(found: NDArray[np.uint16], spec: DecoderSpec) -> U16:
    """``found`` [tokens, mixtures, width] in their layers, [tokens, layers, width]."""
    out = np.full((len(found), len(spec.layers), found.shape[2]), NO_EXPERT, np.uint16)
    for at, (layer, _) in enumerate(spec.mixtures()):
        out[:, layer] = found[:, at]
    return out
