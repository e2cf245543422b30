"""How much effort ``tool lite`` spends: three levels, in one table. An option that is given goes before its preset."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.errors import UsageError


@dataclass(frozen=True)
class Preset:
    """``calib_samples``: None for as many as ``calibration.make_plan`` takes by itself. ``tune_steps``: of
    ``tune.tune`` where memory allows it; ``tune_steps_8bit``: the same after ``smooth_quant``. ``iters``: of auto-round
    a block. ``eval_tokens``: of the held-out text. ``rounding``: what ``auto_awq`` rounds by."""

    calib_samples: int | None
    tune_steps: int
    tune_steps_8bit: int
    iters: int
    eval_tokens: int
    rounding: str


PRESETS = {
    "fast": Preset(calib_samples=16, tune_steps=0, tune_steps_8bit=0, iters=50, eval_tokens=4096, rounding="nearest"),
    # 24,576 tokens are all of the held-out text for most tokenizers
    "balanced": Preset(
        calib_samples=None, tune_steps=64, tune_steps_8bit=0, iters=200, eval_tokens=24576, rounding="gptq"
    ),
    "best": Preset(
        calib_samples=128, tune_steps=192, tune_steps_8bit=64, iters=1000, eval_tokens=24576, rounding="gptq"
    ),
}


def choose_preset(name: str) -> Preset:
    """The preset called ``name``. Raises UsageError."""
    if name not in PRESETS:
        raise UsageError(f"--preset: expected {', '.join(PRESETS)}, found {name!r}")
    return PRESETS[name]
