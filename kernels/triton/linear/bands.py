"""Which tile of a product a program has."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_and_columns(tokens, n_out, ROWS: tl.constexpr, COLS: tl.constexpr, BAND: tl.constexpr):
    """(tokens [ROWS], outputs [COLS]) of this program; some may lie beyond the last. Programs go through bands of BAND
    tiles of tokens, so that weights stay in L2."""
    down, across = tl.cdiv(tokens, ROWS), tl.cdiv(n_out, COLS)
    band = tl.program_id(0) // (BAND * across)
    height = tl.minimum(down - band * BAND, BAND)
    rest = tl.program_id(0) % (BAND * across)
    return (band * BAND + rest % height) * ROWS + tl.arange(0, ROWS), rest // height * COLS + tl.arange(0, COLS)
