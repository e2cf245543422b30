"""Runs a proxy in this process until SIGTERM or Ctrl-C."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

from toolkit.errors import UsageError
from toolkit.serve.proxy.app import create_app
from toolkit.serve.proxy.state import ProxySettings
from toolkit.serve.proxy.watch import watch
from toolkit.serve.run import LOG_LEVELS, Address, bind, run_app


def serve(address: Address, settings: ProxySettings, log_level: str, ready: Callable[[str], None]) -> None:
    """``ready`` gets the URL. Raises ToolkitError or UsageError for whatever keeps it from starting."""
    if log_level not in LOG_LEVELS:
        raise UsageError(f"--log-level: expected one of {', '.join(LOG_LEVELS)}, found {log_level!r}")
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # it tells every request
    with contextlib.closing(bind(address.host, address.port)) as sock:
        app = create_app(settings)
        run_app(app, sock, address, log_level, ready, beside=lambda _: watch(app.state.server))
