"""Runs a proxy in this process until SIGTERM or Ctrl-C."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from toolkit.serve.options import ProxySettings
from toolkit.serve.proxy.app import create_app
from toolkit.serve.proxy.watch import watch
from toolkit.serve.run import begin, bind, run_app


def serve(settings: ProxySettings, ready: Callable[[str], None]) -> None:
    """``ready`` gets the URL. Raises ToolkitError or UsageError for whatever keeps it from starting."""
    settings.check()
    address = begin(settings)
    with contextlib.closing(bind(address.host, address.port)) as sock:
        app = create_app(settings)
        run_app(app, sock, address, ready, beside=lambda _: watch(app.state.server))
