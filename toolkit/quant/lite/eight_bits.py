"""``tool lite smooth_quant``: 8-bit weights and activations."""

from __future__ import annotations

from pathlib import Path

import torch

from toolkit.artifacts.canonical import ChannelInt8, Fp8, Weight
from toolkit.errors import UsageError
from toolkit.quant.lite.shared import quiet
from toolkit.quant.methods import smooth
from toolkit.quant.opening import open_source
from toolkit.quant.options import Common, SmoothQuant
from toolkit.quant.run import Progress, Recipe, Result, run


def smooth_quant(
    model: str,
    work_dir: Path | str,
    options: SmoothQuant = SmoothQuant(),
    *,
    common: Common = Common(),
    progress: Progress = quiet,
) -> Result:
    """Quantize MODEL to 8-bit weights and activations by SmoothQuant, in LMDeploy's format, into ``work_dir``.

    ``strength``: α for all inputs, None to search it for each. Tuning rounds inputs as at run time. Raises as
    ``auto_awq`` does.
    """
    quant_dtype, strength = options.quant_dtype, options.strength
    if quant_dtype not in smooth.QUANT_DTYPES:
        raise UsageError(f"--quant-dtype: expected {', '.join(smooth.QUANT_DTYPES)}, found {quant_dtype!r}")
    if strength is not None and not 0 <= strength <= 1:
        raise UsageError(f"--strength: expected a number from 0 to 1, found {strength:g}")
    kind = smooth.QUANT_DTYPES[quant_dtype]

    def sample(rows: int, columns: int) -> Weight:
        codes, scales = torch.zeros(1, 1, dtype=kind).expand(rows, columns), torch.ones(1).expand(rows)
        return ChannelInt8(codes, scales) if kind == torch.int8 else Fp8(codes, scales)

    recipe = Recipe(
        stage="lite smooth_quant",
        options={
            "quant_dtype": str(kind).removeprefix("torch."),
            "strength": "searched" if strength is None else strength,
        },
        method=lambda dtype, _: smooth.method(quant_dtype=kind, strength=strength, dtype=dtype),
        sample=sample,
        formats=("w8a8", "compressed-tensors"),
        products=False,
        tune_steps=options.tune_steps,
        eight_bits=True,
    )
    return run(open_source(model, common, "smooth_quant"), Path(work_dir), recipe, common, progress)
