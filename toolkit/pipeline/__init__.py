"""The Python API: ``pipeline.Pipeline`` is an object that answers prompts.

The package itself can be called, as LMDeploy's ``pipeline`` is: ``toolkit.pipeline(model)`` makes a ``Pipeline``.
"""

from toolkit.base.callable_package import make_callable

make_callable(__name__, "pipeline", "pipeline")
