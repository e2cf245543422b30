"""``adapter_config.json``: whether an adapter is one that runs here, and how its matrices are scaled.

Source: https://huggingface.co/docs/peft (LoraConfig).
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, TypeVar

from toolkit.artifacts.json_file import read_json_object
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import read
from toolkit.errors import ToolkitError

CONFIG = "adapter_config.json"
N = TypeVar("N", int, float)
# Fields that change what an adapter means, and the value at which they do not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "lora_bias": (None, False),
    "bias": (None, "none"),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (None, False),
}
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # how PEFT's names begin, in whatever case


@dataclass(frozen=True)
class Scaling:
    """What of PEFT's LoraConfig says how the matrices are scaled, and what there is beside them; absent fields are as
    PEFT has them. The patterns give single modules another rank or alpha."""

    r: int | None = None
    lora_alpha: float = 8.0
    use_rslora: bool | None = None
    use_dora: bool | None = None
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None


def read_config(path: Path) -> Scaling:
    """That of the adapter in directory ``path``. Raises ToolkitError for one of another kind."""
    if not (path / CONFIG).is_file():
        raise ToolkitError(f"{path}: expected a PEFT adapter, found no {CONFIG} there")
    config = read_json_object(path / CONFIG)
    if config.get("peft_type") != "LORA":
        raise ToolkitError(f"{path / CONFIG}: peft_type: expected LORA, found {config.get('peft_type')!r:.40}")
    for name, plain in _PLAIN.items():
        if config.get(name) not in plain:
            raise ToolkitError(
                f"{path / CONFIG}: {name}: expected {plain[1]!r}, found {config[name]!r:.60}; "
                "merge the adapter into the checkpoint instead"
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGE_BASE):
        raise ToolkitError(
            f"{path / CONFIG}: init_lora_weights: found {start!r:.40}, which changes the base weights too; "
            "convert the adapter to plain LoRA first"
        )
    try:
        return read(Scaling, config, others=True)
    except ValueError as error:
        raise ToolkitError(f"{path / CONFIG}: {error}") from None


def scale_of(file: Path, scaling: Scaling, module: str, rank: int) -> float:
    """lora_alpha / r, or with rsLoRA / sqrt(r), of a module with matrices of ``rank``. Raises ToolkitError where config
    ``file`` says another rank."""
    alpha = _by_pattern(file, "alpha_pattern", scaling.alpha_pattern, module, scaling.lora_alpha)
    declared = _by_pattern(file, "rank_pattern", scaling.rank_pattern, module, rank if scaling.r is None else scaling.r)
    if declared != rank:
        raise ToolkitError(f"{file}: r: expected {rank}, the rank of {module}'s tensors, found {declared}")
    if not math.isfinite(alpha):
        raise ToolkitError(f"{file}: lora_alpha: expected a number, found {alpha}")
    return alpha / (math.sqrt(rank) if scaling.use_rslora else rank)


def _by_pattern(file: Path, field: str, patterns: dict[str, N] | None, module: str, default: N) -> N:
    """The value of the first key that is the module's name or, as a regular expression, its end."""
    for key, value in (patterns or {}).items():
        try:
            if re.fullmatch(rf"(?:.*\.)?(?:{key})", module):
                return value
        except re.error as error:
            raise ToolkitError(f"{file}: {field}: {key!r:.40} is no regular expression: {error}") from None
    return default
