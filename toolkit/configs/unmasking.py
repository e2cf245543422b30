"""How a model that guesses a block of tokens together settles on them; LMDeploy's ``dllm_`` fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.checks import number, shown
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.configs.engine import EngineConfig

UNMASKING = ("low_confidence_dynamic", "low_confidence_static", "sequential")


@dataclass(frozen=True)
class Unmasking:
    """Which guesses stay of a pass over a block of tokens that are guessed together.

    ``strategy``: those that the model holds for more probable than ``threshold``, or the best where these are too few
    ("low_confidence_dynamic"); the best ("low_confidence_static"); the first ("sequential"). ``steps``: passes after
    which a block is whole at the latest, None: as many as it has tokens.
    """

    strategy: str = UNMASKING[0]
    steps: int | None = None
    threshold: float = 0.85


def check_dllm(config: EngineConfig) -> None:
    """Raises UsageError."""
    if (length := config.dllm_block_length) is not None:
        number("dllm_block_length", length, 1, config.block_size, whole=True)
        if config.block_size % length:
            wanted = f"a divisor of block_size, which is {config.block_size}"
            raise UsageError(f"dllm_block_length: expected {wanted}, found {length}")
    if config.dllm_denoising_steps is not None:
        number("dllm_denoising_steps", config.dllm_denoising_steps, 1, 1 << 20, whole=True)
    number("dllm_confidence_threshold", config.dllm_confidence_threshold, 0, 1)
    if (strategy := config.dllm_unmasking_strategy) not in UNMASKING:
        raise UsageError(f"dllm_unmasking_strategy: expected one of {', '.join(UNMASKING)}, found {shown(strategy)}")
