"""``tool lite auto_round``: integers whose rounding the auto-round library tunes."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.base.extras import require
from toolkit.errors import UsageError
from toolkit.quant.grids import grid_options, grids, integers
from toolkit.quant.layer_config import read_layer_config
from toolkit.quant.lite.shared import GPTQ_BITS, quiet
from toolkit.quant.methods import autoround
from toolkit.quant.opening import choose, open_source, targets
from toolkit.quant.options import AutoRound, Common
from toolkit.quant.run import Prepared, Progress, Recipe, Result, run


def auto_round(
    model: str,
    work_dir: Path | str,
    options: AutoRound = AutoRound(),
    *,
    common: Common = Common(),
    progress: Progress = quiet,
) -> Result:
    """Quantize MODEL by the auto-round library, one block after another, into ``work_dir``.

    A head that is quantized too is rounded by GPTQ. Raises as ``auto_awq`` does.
    """
    require("auto_round", "lite auto_round")
    if options.w_bits not in GPTQ_BITS:
        raise UsageError(f"--w-bits: expected 4, 8, 3 or 2, found {options.w_bits}")
    iters = common.effort.iters if options.iters is None else options.iters
    if iters < 0:
        raise UsageError(f"--iters: expected 0 or more, found {iters}")
    if common.calibration is not None:
        raise UsageError("--calibration: auto_round has no use for it; leave the option out")
    source = open_source(model, common, "auto_round")
    grid, own, common = grids(options, source, common, rows=False)
    if options.layer_config is not None:
        modules = [item for items in source.stored for item in items if item.kind == "linear"]
        own, dense = read_layer_config(options.layer_config, modules, grid, GPTQ_BITS)
        common = replace(common, skip=(*common.skip, *(f"^{re.escape(name)}$" for name in sorted(dense))))
    tuning = autoround.Tuning(grid, iters, common.batch_size, common.seed, own)
    selection = choose(source, common)
    odd = next((x for x in targets(source, selection) if x.in_features % 32 or x.out_features % 32), None)
    if odd is not None:  # the library would leave it as it is
        raise UsageError(
            f"{odd.name}: found {odd.out_features} x {odd.in_features} weights, and auto-round takes multiples of 32; "
            "leave it out with --skip"
        )

    def prepare(run: Prepared) -> dict[str, Any]:
        autoround.tune(source, selection, run, tuning)
        return {}

    gptq_names: tuple[str, ...] = ("gptq", "gptq_v2") if grid.symmetric else ("gptq_v2", "gptq")
    if any(not g.symmetric for g in own.values()):
        gptq_names = ("gptq_v2",)
    plain: tuple[str, ...] = () if own else ("awq",)  # AWQ states one grid for the whole model
    if all(g.symmetric or g.bits < 8 for g in own.values()):
        plain = (*plain, "gguf")
    recipe = Recipe(
        stage="lite auto_round",
        options=grid_options(grid)
        | {"iters": iters}
        | ({"layer_config": {name: asdict(g) for name, g in own.items()}} if own else {}),
        method=lambda dtype, directory: autoround.method(directory, tuning, dtype=dtype, head=source.spec.head),
        sample=partial(integers, grid, False),
        formats=("auto_round", *gptq_names, "compressed-tensors", *plain),
        group_size=grid.group_size,
        prepare=prepare,
        whole_layers=True,
        texts=2,
    )
    return run(source, Path(work_dir), recipe, common, progress)
