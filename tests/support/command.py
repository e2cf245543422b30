"""``tool`` in this process, as a shell runs it: for tests of a command to which a process of its own is nothing but the
seconds in which it imports torch.
"""

from __future__ import annotations

import io
import os
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from toolkit.commands.main import main


def tool(*arguments: object, text: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """What ``tool ARGUMENTS`` did, ``text`` piped into it and ``environment`` added to ours."""
    given, out, err = [str(argument) for argument in arguments], io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), mock.patch("sys.stdin", io.StringIO(text)):
        with mock.patch.dict(os.environ, environment):  # what the command itself changes there goes, too
            code: object = 0
            try:
                main(given)
            except SystemExit as end:
                code = end.code
    return subprocess.CompletedProcess(given, int(code) if isinstance(code, int) else 0, out.getvalue(), err.getvalue())
