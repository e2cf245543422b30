"""Quantize, convert and serve large language models, on the GPU you have or on none.

Importing the package loads nothing heavy; names below are resolved on first use. It sets OpenMP's environment variables
where the user has not (``toolkit.base.threads``).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from toolkit.base import threads

__version__ = "0.3.0"
threads.settle()  # before anything imports torch

_EXPORTS = {
    "ChatTemplateConfig": "toolkit.messages",
    "GenerationConfig": "toolkit.messages",
    "Pipeline": "toolkit.pipeline.pipeline",
    "PytorchEngineConfig": "toolkit.configs.engine",
    "Response": "toolkit.messages",
    "Session": "toolkit.pipeline.pipeline",
    "SpeculativeConfig": "toolkit.configs.speculative",
    "TurbomindEngineConfig": "toolkit.configs.engine",
    "VisionConfig": "toolkit.configs.engine",
    "client": "toolkit.serve.client",
}
__all__ = [
    "ChatTemplateConfig",
    "GenerationConfig",
    "Pipeline",
    "PytorchEngineConfig",
    "Response",
    "Session",
    "SpeculativeConfig",
    "TurbomindEngineConfig",
    "VisionConfig",
    "__version__",
    "client",
    "pipeline",
    "serve",
]

if TYPE_CHECKING:
    from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig, VisionConfig
    from toolkit.configs.speculative import SpeculativeConfig
    from toolkit.messages import ChatTemplateConfig, GenerationConfig, Response
    from toolkit.pipeline.pipeline import Pipeline, Session, pipeline
    from toolkit.serve.background import serve
    from toolkit.serve.client import client


def __getattr__(name: str) -> Any:
    if name in ("pipeline", "serve"):  # packages that can be called
        return import_module(f"toolkit.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value
