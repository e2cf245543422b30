"""Which GGML type each tensor of a model gets: llama.cpp's mixtures by name, with its own fall-backs.

The rules are those of ``llama-quantize`` (https://github.com/ggml-org/llama.cpp/blob/master/src/llama-quant.cpp), so
that a file named Q4_K_M is what people expect of one: more bits for what hurts most, that is the head, attn_v and
ffn_down of the first and last eighth of the layers and of every third in between.
"""

from __future__ import annotations

from collections.abc import Callable

from toolkit.artifacts.gguf.container import TYPES
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import UsageError


@dataclass(frozen=True)
class Place:
    """A matrix in the model. ``role``: its GGUF stem ("attn_v", "ffn_down", "output", "token_embd"; with "_exps" for
    experts). ``layer`` of ``layers``; ``tied``: token_embd is the head too; ``experts`` a layer, 0 for none.
    """

    role: str
    layer: int
    layers: int
    columns: int
    tied: bool = False
    experts: int = 0

    @property
    def is_head(self) -> bool:
        tables = ("token_embd", "per_layer_token_embd")
        return self.role == "output" or (self.role in tables and self.tied)

    @property
    def wants_more(self) -> bool:
        eighth = self.layers // 8
        return self.layer < eighth or self.layer >= 7 * self.layers // 8 or (self.layer - eighth) % 3 == 2


@dataclass(frozen=True)
class Mixture:
    """``file_type``: what ``general.file_type`` says. ``exception``: the type of a matrix that is not ``base``."""

    base: str
    file_type: int
    exception: Callable[[Place], str | None] = lambda place: None


def _head_in_q6(place: Place) -> str | None:
    return "Q6_K" if place.is_head else None


def _more_bits(more: str, *, small: str | None = None, qkv: str | None = None) -> Callable[[Place], str | None]:
    """The rules of the K mixtures. ``more``: for sensitive matrices; ``small``: for those of the first layers (_S)."""

    def exception(place: Place) -> str | None:
        role = place.role.removesuffix("_exps").removesuffix("_shexp")
        if place.is_head:
            return "Q6_K"
        if role in ("attn_v", "attn_k") and place.experts == 8:
            return "Q8_0"
        if role == "attn_v":
            if place.layers == 80 and small is None and more == "Q6_K" and not place.wants_more:
                return "Q5_K"  # the 70B models, whose eight heads share one value
            first = place.layer < 4
        elif role == "attn_output":
            return "Q5_K" if place.experts == 8 else None
        elif role == "attn_qkv":
            return qkv
        elif role == "ffn_down":
            first = place.layer < place.layers // 8
        else:
            return None
        if small is not None:
            return small if first else None
        return more if place.wants_more else None

    return exception


MIXTURES: dict[str, Mixture] = {
    "f32": Mixture("F32", 0),
    "f16": Mixture("F16", 1),
    "bf16": Mixture("BF16", 32),
    "q8_0": Mixture("Q8_0", 7),
    "q4_0": Mixture("Q4_0", 2, _head_in_q6),
    "q4_1": Mixture("Q4_1", 3, _head_in_q6),
    "q5_0": Mixture("Q5_0", 8, _head_in_q6),
    "q5_1": Mixture("Q5_1", 9, _head_in_q6),
    "q4_k_s": Mixture("Q4_K", 14, _more_bits("Q6_K", small="Q5_K")),
    "q4_k_m": Mixture("Q4_K", 15, _more_bits("Q6_K", qkv="Q5_K")),
    "q5_k_s": Mixture("Q5_K", 16, _head_in_q6),
    "q5_k_m": Mixture("Q5_K", 17, _more_bits("Q6_K", qkv="Q6_K")),
    "q6_k": Mixture("Q6_K", 18, _head_in_q6),
}
ALIASES = {"q4_k": "q4_k_m", "q5_k": "q5_k_m"}
_FALL_BACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_ALSO = ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs",
         "iq3_xs", "iq3_s", "iq3_m", "iq4_nl", "iq4_xs", "tq1_0", "tq2_0", "mxfp4_moe", "q2_k_s")  # fmt: skip


def find_mixture(name: str) -> Mixture:
    """The mixture called ``name``, in any case. Raises UsageError that lists those known."""
    key = ALIASES.get(name.lower(), name.lower())
    if key not in MIXTURES:
        what = f"{name!r}, which this tool does not write" if key in _ALSO else repr(name)
        raise UsageError(f"--gguf-type: expected auto, {', '.join(MIXTURES)}, found {what}")
    return MIXTURES[key]


def type_of(mixture: Mixture, place: Place) -> tuple[str, str | None]:
    """(GGML type of a matrix, None or the type it would have had if its columns divided)."""
    wanted = mixture.exception(place) or mixture.base
    kind = wanted
    if place.columns % columns_of(kind):
        kind = _FALL_BACK.get(kind, "F16")
        if place.columns % columns_of(kind):
            kind = "F16"
    return kind, (wanted if kind != wanted else None)


def columns_of(kind: str) -> int:
    """Columns that a block of a GGML type takes."""
    return next(columns for name, columns, _ in TYPES.values() if name == kind)
