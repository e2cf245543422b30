"""Runs a proxy in this process until SIGTERM or Ctrl-C."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from toolkit.serve.log import begin as begin_log
from toolkit.serve.proxy.app import create_app
from toolkit.serve.proxy.state import ProxySettings
from toolkit.serve.proxy.watch import watch
from toolkit.serve.run import Address, bind, run_app


def serve(
    address: Address, settings: ProxySettings, log_level: str, ready: Callable[[str], None], log_format: str = "text"
) -> None:
    """``ready`` gets the URL. Raises ToolkitError or UsageError for whatever keeps it from starting."""
    begin_log(log_level, log_format)
    with contextlib.closing(bind(address.host, address.port)) as sock:
        app = create_app(settings)
        run_app(app, sock, address, log_level, ready, beside=lambda _: watch(app.state.server))
