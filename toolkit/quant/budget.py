"""What the budget of ``tool lite search`` leaves for the linears that it chooses bits for."""

from __future__ import annotations

import math

from toolkit.configs.option import show_size
from toolkit.errors import UsageError
from toolkit.models.spec import LinearSpec
from toolkit.quant import gguf
from toolkit.quant.artifact_size import bits_beside
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.methods import search as finder
from toolkit.quant.opening import store_dtype
from toolkit.quant.options import Common, Search

FEW_BITS = 3.5  # a weight, below which quality falls fast


def budget_of(
    options: Search,
    size: int | None,
    source: LayerSource,
    linears: list[LinearSpec],
    heads: list[LinearSpec],
    costs: finder.Costs,
    common: Common,
) -> int:
    """Bits that ``linears`` may take. ``size``: bytes, of the engine artifact or the GGUF file. Raises UsageError for a
    budget that is less than the least, or more bits than there are; tells one that leaves few."""
    weights = sum(x.in_features * x.out_features for x in linears)
    least, most = costs.least(linears), costs.most(linears)
    if options.bits is not None:
        budget = int(options.bits * weights)
        if budget < least:
            raise UsageError(f"--bits {options.bits:g}: too few, {least / weights:.2f} bits a weight are the least")
        if budget > math.ceil(most / weights) * weights:
            raise UsageError(f"--bits {options.bits:g}: too many, {most / weights:.2f} bits a weight are the most")
    else:
        assert size is not None
        if costs.gguf:
            outer = gguf.outer_matrices(source, bool(heads))
            quantized = [*linears, *outer, *([] if source.spec.tied else heads)]
            beside = finder.fixed_bits(source, quantized, store_dtype(common.dtype, source))
            beside += gguf.overhead_bits(source)
            beside += sum(costs.of(x, finder.GGUF_GRIDS[gguf.OUTER]) for x in outer)
        else:
            beside = bits_beside(source, [*linears, *heads])
        beside += sum(costs.all([head], finder.head_grid(head, costs)) for head in heads)
        budget = 8 * size - beside
        of = "the file" if costs.gguf else "the engine artifact"
        if budget < least:
            enough, rest = (show_size(-(-found // 8), options.size) for found in (least + beside, beside))
            raise UsageError(
                f"--size {options.size}: too small, {enough} of {of} are the least ({rest} of them for embedding, head "
                f"and what else stays as it is){'' if costs.gguf else '; for other engines --bits goes lower'}"
            )
        if budget > most:
            common.notice(f"--size {options.size}: more than {show_size((most + beside) // 8, options.size)}, the most")
    if min(budget, most) < FEW_BITS * weights:
        common.notice(
            f"warning: {budget / weights:.2f} bits a weight: below {FEW_BITS} a model loses much; a larger "
            f"{'--size' if options.bits is None else '--bits'} is worth it"
        )
    return budget
