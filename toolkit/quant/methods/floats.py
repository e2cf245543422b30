"""Formats of small floats that need no calibration: fp8 in tiles of 128 × 128, and mxfp4.

Sources: DeepSeek-V3 technical report (2024), 3.3 (tiles); OCP Microscaling Formats specification 1.0 (2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from toolkit.artifacts.canonical import BlockFp8, Weight
from toolkit.artifacts.formats.blocked_fp8 import BLOCK
from toolkit.artifacts.formats.mxfp4 import GROUP
from toolkit.artifacts.rounding import to_block_fp8, to_mxfp4
from toolkit.artifacts.weights import split_parts
from toolkit.measure.errors import sampled_error
from toolkit.models.sites import Site
from toolkit.models.spec import StoredTensor
from toolkit.quant.layers.output import join_parts
from toolkit.quant.layers.result import LinearReport, Made, Method, stay_dense
from toolkit.quant.layers.statistics import Gram


def tiles_method(stored: Sequence[StoredTensor], *, powers_of_two: bool, dtype: torch.dtype) -> Method:
    """Blocked fp8 as a method. Tiles are those of the modules as ``stored``, where several linears may be one."""
    items = {part.name: item for item in stored for part in item.parts}

    def rounded(weight: Tensor) -> BlockFp8:
        return to_block_fp8(weight.cpu(), block=BLOCK, power_of_two=powers_of_two)

    def run(
        sites: Sequence[Site], weights: Mapping[str, Tensor], grams: Callable[[str], Gram | None]
    ) -> Iterator[Made]:
        done: set[str] = set()
        for name in (x.name for site in sites for x in site.linears):
            if name in done:
                continue
            item = items.get(name)
            codes: dict[str, Weight | Tensor]
            if item is None or (len(item.parts) == 1 and item.parts[0].rows is None):
                codes = {name: rounded(weights[name])}
            else:
                whole = join_parts(item, [weights[p.name] for p in item.parts])
                assert isinstance(whole, Tensor)
                codes = dict(split_parts(item, rounded(whole)))
            for part, code in codes.items():
                yield Made(part, code, _report(part, weights[part], code, "blocked_fp8", 8, -1))
            done.update(codes)
        yield from stay_dense(sites, weights, dtype)

    return run


def mxfp4_method(*, dtype: torch.dtype) -> Method:
    """mxfp4 as a method."""

    def run(
        sites: Sequence[Site], weights: Mapping[str, Tensor], grams: Callable[[str], Gram | None]
    ) -> Iterator[Made]:
        for name in (x.name for site in sites for x in site.linears):
            w = weights[name]
            code = to_mxfp4(w, name)
            yield Made(name, code, _report(name, w, code, "mxfp4", 4, GROUP))
        yield from stay_dense(sites, weights, dtype)

    return run


def _report(name: str, weight: Tensor, code: Weight | Tensor, how: str, bits: int, group: int) -> LinearReport:
    """Without calibration the error is that of the weights: as of inputs that do not correlate."""
    assert not isinstance(code, Tensor)
    return LinearReport(name, how, bits, group, sampled_error(weight, code, None))
