"""``tool lite blocked_fp8`` and ``mxfp4``: small floats, which need no calibration."""

from __future__ import annotations

from pathlib import Path

import torch

from toolkit.artifacts.canonical import BlockFp8, Fp4, Weight
from toolkit.artifacts.formats.blocked_fp8 import BLOCK
from toolkit.errors import UsageError
from toolkit.quant.lite.shared import quiet
from toolkit.quant.methods import floats
from toolkit.quant.opening import choose, open_source, targets
from toolkit.quant.options import BlockedFp8, Common
from toolkit.quant.run import Progress, Recipe, Result, run


def blocked_fp8(
    model: str,
    work_dir: Path | str,
    options: BlockedFp8 = BlockedFp8(),
    *,
    common: Common = Common(),
    progress: Progress = quiet,
) -> Result:
    """Quantize MODEL to float8 in tiles of 128 × 128 (DeepSeek's format) into ``work_dir``; needs no calibration.

    Raises as ``auto_awq`` does.
    """
    scale_fmt = options.scale_fmt
    if scale_fmt not in (None, "ue8m0"):
        raise UsageError(f"--scale-fmt: expected ue8m0, or leave it out, found {scale_fmt!r}")
    source = open_source(model, common, "blocked_fp8")
    routers = source.spec.routers()
    stored = [
        module  # stacks of experts are written one by one, as is what stays in part as it is
        for items in source.stored
        for item in items
        for module in (
            item.alone() if item.stacked or len({part.name in routers for part in item.parts}) > 1 else [item]
        )
    ]

    def sample(rows: int, columns: int) -> Weight:
        codes = torch.zeros(1, 1, dtype=torch.float8_e4m3fn).expand(rows, columns)
        return BlockFp8(codes, torch.ones(-(-rows // BLOCK[0]), -(-columns // BLOCK[1])), BLOCK)

    recipe = Recipe(
        stage="lite blocked_fp8",
        options={"scale_fmt": scale_fmt},
        method=lambda dtype, _: floats.tiles_method(stored, powers_of_two=scale_fmt == "ue8m0", dtype=dtype),
        sample=sample,
        formats=("fp8", "compressed-tensors"),
        calibrated=False,
        extra={"scale_fmt": scale_fmt} if scale_fmt and common.format in (None, "fp8") else {},
    )
    return run(source, Path(work_dir), recipe, common, progress)


def mxfp4(model: str, work_dir: Path | str, *, common: Common = Common(), progress: Progress = quiet) -> Result:
    """Quantize MODEL to 4-bit floats in blocks of 32 with power-of-two scales into ``work_dir``; needs no calibration.

    Raises as ``auto_awq`` does.
    """
    source = open_source(model, common, "mxfp4")
    odd = next((x for x in targets(source, choose(source, common)) if x.in_features % floats.GROUP), None)
    if odd is not None:
        raise UsageError(
            f"{odd.name}: {odd.in_features} inputs are no multiple of mxfp4's 32; leave it out with --skip"
        )

    def sample(rows: int, columns: int) -> Weight:
        zero = torch.zeros(1, 1, dtype=torch.uint8)
        return Fp4(zero.expand(rows, columns), zero.expand(rows, columns // floats.GROUP), floats.GROUP)

    recipe = Recipe(
        stage="lite mxfp4",
        options={},
        method=lambda dtype, _: floats.mxfp4_method(dtype=dtype),
        sample=sample,
        formats=("compressed-tensors", "mxfp4"),
        calibrated=False,
    )
    return run(source, Path(work_dir), recipe, common, progress)
