"""What a model must be so that a row's numbers are the same whatever else its step has (``batch_invariant``).

Its linears, experts and attention then run in tiles of one shape, with sums in one order; see ``alike`` of
``toolkit.kernels.op.Implementation``.
"""

from __future__ import annotations

import torch

from toolkit.errors import UsageError
from toolkit.models.spec import DecoderSpec
from toolkit.runners.tensor.split import Split

_KINDS = {
    "latent": "latent attention, which decodes otherwise than it reads prompts",
    "cross": "layers that look at pictures",
    "mamba": "recurrent layers, whose sums depend on how a prompt is cut",
    "delta": "recurrent layers, whose sums depend on how a prompt is cut",
    "short_conv": "recurrent layers, whose sums depend on how a prompt is cut",
}


def check_alike(spec: DecoderSpec, split: Split | None) -> None:
    """Raise UsageError for a model that it is not for."""
    why = next((_KINDS[mixer.kind] for _, mixer in spec.mixers() if mixer.kind in _KINDS), None)
    if spec.mutual:
        why = "no decoder: its texts are computed whole"
    if spec.vision is not None and spec.vision.routed:
        why = "linears of its own for the tokens of pictures"
    if split is not None:
        why = "several ranks, whose sums go by the size of a message"
    if why is not None:
        raise UsageError(f"batch_invariant: this model has {why}; leave it out")


def check_alike_device(device: torch.device) -> None:
    """Raise UsageError for a device that has no such kernels."""
    if device.type != "cuda":
        raise UsageError(
            f"batch_invariant: the pytorch backend has no such kernels for {device.type}; "
            "give --backend turbomind, which on a CPU is so in any case"
        )
