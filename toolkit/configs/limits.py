"""How much one request may ask for. Bounds of numbers stand at the fields of ``GenerationConfig``.

Bounds are such that the type that computes with a number (``kind``) holds every value within them: what it cannot hold
is refused where it arrives, not in the midst of a step that others share.
"""

from __future__ import annotations

from typing import Literal

from toolkit.base.lazy_dataclass import dataclass

Kind = Literal["float32", "int32", "int64", "uint64"]


@dataclass(frozen=True)
class Bounds:
    """``low`` and ``high`` are allowed themselves."""

    low: float
    high: float
    kind: Kind = "float32"

    @property
    def whole(self) -> bool:
        return self.kind != "float32"


SEED_MAX = (1 << 64) - 1
TOKEN_ID = Bounds(0, (1 << 31) - 1, "int32")
PRIORITY = Bounds(-(1 << 31), (1 << 31) - 1, "int32")  # of a request in the engine
LOGIT_BIAS = Bounds(-100, 100)
GREEDY_BELOW = 1e-5  # a temperature: logits that differ by 0.001 are then e^100 apart, so the best one is taken at once

# How long the lists of a request may be, and the words in them (in characters).
MOST = {
    "stop_words": 64,
    "bad_words": 4096,
    "dry_sequence_breakers": 64,
    "stop_token_ids": 1024,
    "bad_token_ids": 1 << 16,
    "logit_bias": 1024,
}
WORD_LENGTH = {"stop_words": 4096, "bad_words": 256, "dry_sequence_breakers": 64}
TEMPLATE_STOPS = 16  # stop words, and ids, that a chat template may add to a request's own
