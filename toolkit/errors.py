"""Errors that are the user's to mend.

``commands/main.py`` is the only place that catches them on the command line: it prints one line
and exits with ``exit_code``. Anything else that reaches it is a bug of ours.

    ToolkitError            exit 1: something failed (bad file, no memory, no network)
    └── UsageError          exit 2: the command line, an option or a config value is wrong
"""

from __future__ import annotations


class ToolkitError(Exception):
    """A failure a user can act on. The message names the thing, what was found, and what to do."""

    exit_code = 1


class BusyError(ToolkitError):
    """Too much else is going on: the same request may be taken later."""


class UsageError(ToolkitError):
    """The user asked for something that cannot be: a wrong flag, option, path or value."""

    exit_code = 2
