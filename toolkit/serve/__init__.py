"""The OpenAI-compatible server: ``run.serve`` runs it in this process, ``app.create_app`` makes the application alone.

The package itself can be called, as LMDeploy's ``serve`` is: ``toolkit.serve(model)`` starts a server in a process of
its own; see ``background.serve`` for its arguments.
"""

from toolkit.base.callable_package import make_callable

make_callable(__name__, "background", "serve")
