"""Codes that still lie in the words of a file, so that a packer can read them there in one pass."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from toolkit.artifacts.formats.bits import AWQ_ORDER, unpack_columns, unpack_words
from toolkit.base.lazy_dataclass import dataclass

Layout = Literal["rows", "gptq", "awq"]


@dataclass(frozen=True)
class Words:
    """Codes [out, in] of 4 or 8 bits in int32 words, whole words a row (or column).

    ``layout``: where words stand and what they hold, ascending from the lowest bits:
        "rows"  [out, in * bits / 32], codes along *in* (compressed-tensors)
        "gptq"  [in * bits / 32, out], codes along *in*
        "awq"   [in, out / 8], 4 bits alone, codes along *out* in ``AWQ_ORDER``
    """

    words: Tensor
    bits: int
    layout: Layout

    @property
    def shape(self) -> tuple[int, int]:
        """Of the codes."""
        a, b = self.words.shape
        each = 32 // self.bits
        if self.layout == "rows":
            return a, b * each
        return (b, a * each) if self.layout == "gptq" else (b * each, a)

    def unpack(self) -> Tensor:
        """uint8 [out, in]."""
        if self.layout == "awq":
            return unpack_columns(self.words, self.bits, AWQ_ORDER)
        return unpack_words(self.words if self.layout == "rows" else self.words.t(), self.bits)

    def take_rows(self, rows: slice) -> Words | None:
        """Those of some rows, a view, or None where they begin or end within a word."""
        first, last, step = rows.indices(self.shape[0])
        if step != 1 or last <= first:
            return None
        if self.layout != "awq":
            part = self.words[first:last] if self.layout == "rows" else self.words[:, first:last]
        elif first % 8 or last % 8:
            return None
        else:
            part = self.words[:, first // 8 : last // 8]
        return Words(part, self.bits, self.layout)


def stored_codes(words: Tensor, bits: int, layout: Layout, n_in: int) -> Any:
    """``GroupInt.codes`` [out, ``n_in``] as ``Words``; of other widths and of an outline unpacked."""
    found = Words(words, bits, layout)
    if words.is_meta or bits not in (4, 8) or found.shape[1] != n_in:
        return found.unpack()[:, :n_in].contiguous()
    return found
