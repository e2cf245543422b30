"""How much effort ``tool lite`` spends: three levels, in one table. An option that is given goes before its preset."""

from __future__ import annotations

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import UsageError


@dataclass(frozen=True)
class Preset:
    """``calib_samples``: None for as many as ``calibration.make_plan`` takes by itself. ``guide_samples``: of them,
    whose gradients guide the rounding. ``tune_steps``: of ``tune.tune`` where memory allows it, and bits are few or
    nothing guides; ``tune_steps_8bit``: the same after ``smooth_quant``. ``iters``: of auto-round a block.
    ``eval_tokens``: of the held-out text. ``rounding``: what ``auto_awq`` rounds by. ``sweeps``: behind GPTQ's."""

    calib_samples: int | None
    guide_samples: int
    tune_steps: int
    tune_steps_8bit: int
    iters: int
    eval_tokens: int
    rounding: str
    sweeps: int


MEASURED = 24576  # all of the held-out text for most tokenizers
PRESETS = {
    "fast": Preset(16, 0, tune_steps=0, tune_steps_8bit=0, iters=50, eval_tokens=4096, rounding="nearest", sweeps=0),
    "balanced": Preset(
        None, 32, tune_steps=64, tune_steps_8bit=0, iters=200, eval_tokens=MEASURED, rounding="gptq", sweeps=0
    ),
    "best": Preset(
        128, 128, tune_steps=300, tune_steps_8bit=64, iters=1000, eval_tokens=MEASURED, rounding="gptq", sweeps=2
    ),
}


def choose_preset(name: str) -> Preset:
    """The preset called ``name``. Raises UsageError."""
    if name not in PRESETS:
        raise UsageError(f"--preset: expected {', '.join(PRESETS)}, found {name!r}")
    return PRESETS[name]
