"""Quantize, convert and serve large language models, on the GPU you have or on none.

Importing the package loads nothing heavy; names below are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "ChatTemplateConfig": "toolkit.messages",
    "GenerationConfig": "toolkit.messages",
    "Pipeline": "toolkit.pipeline",
    "PytorchEngineConfig": "toolkit.messages",
    "Response": "toolkit.messages",
    "Session": "toolkit.pipeline",
    "TurbomindEngineConfig": "toolkit.messages",
    "pipeline": "toolkit.pipeline",
}
__all__ = ["__version__", *_EXPORTS]

if TYPE_CHECKING:
    from toolkit.messages import (
        ChatTemplateConfig,
        GenerationConfig,
        PytorchEngineConfig,
        Response,
        TurbomindEngineConfig,
    )
    from toolkit.pipeline import Pipeline, Session, pipeline


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    # `toolkit.pipeline` is both a module and the function in it: users mean the function.
    globals()[name] = value
    return value
