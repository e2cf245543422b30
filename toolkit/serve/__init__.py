"""The OpenAI-compatible server: ``run.serve`` runs it in this process, ``app.create_app`` makes the application alone.

The package itself can be called, as LMDeploy's ``serve`` is: ``toolkit.serve(model)`` starts a server in a process of
its own; see ``background.serve`` for its arguments.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.serve.background import Server


class _Callable(ModuleType):
    """A module that is a function too: ``toolkit.serve`` is the name of both."""

    def __call__(self, model_path: str, *args: Any, **kwargs: Any) -> Server:
        from toolkit.serve.background import serve

        return serve(model_path, *args, **kwargs)


sys.modules[__name__].__class__ = _Callable
