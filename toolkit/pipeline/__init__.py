"""The Python API: ``pipeline.pipeline`` makes a ``Pipeline``, an object that answers prompts.

The package itself can be called, as LMDeploy's ``pipeline`` is: ``toolkit.pipeline(model)``; see there for its
arguments.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.pipeline.pipeline import Pipeline


class _Callable(ModuleType):
    """A module that is a function too: ``toolkit.pipeline`` is the name of both."""

    def __call__(self, model_path: str, *args: Any, **kwargs: Any) -> Pipeline:
        from toolkit.pipeline.pipeline import pipeline

        return pipeline(model_path, *args, **kwargs)


sys.modules[__name__].__class__ = _Callable
