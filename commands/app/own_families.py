"""Model families of the user's own: the Python files that ``--custom-module-map`` names."""

from __future__ import annotations

import os
import shlex

from toolkit.errors import UsageError

FLAG = "--custom-module-map"
NAMED: list[str] = []  # on the command line


def name_families(argv: list[str]) -> list[str]:
    """``argv`` without ``--custom-module-map FILE``, which goes into the environment: of this process and its own."""
    out = []
    NAMED.clear()
    own = argv[: argv.index("--")] if "--" in argv else argv
    given = iter(own)
    for arg in given:
        name, eq, value = arg.partition("=")
        if name != FLAG:
            out.append(arg)
            continue
        path = value if eq else next(given, "")
        if not os.path.isfile(path):
            raise UsageError(f"{FLAG}: found {path or 'nothing'}, expected a Python file (docs/add-a-model.md)")
        from toolkit.models.registry import VARIABLE

        NAMED.append(path)
        known = [os.environ[VARIABLE]] if os.environ.get(VARIABLE) else []
        os.environ[VARIABLE] = os.pathsep.join([os.path.abspath(path), *known])
    return out + argv[len(own) :]


def raised_in(error: BaseException) -> str | None:
    """The file and line of a model family of the user's own (``--custom-module-map``) that an exception comes from."""
    from toolkit.models.registry import VARIABLE

    files = {os.path.abspath(path) for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path}
    place, at = None, error.__traceback__
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        place = f"{file}, line {at.tb_lineno}" if os.path.abspath(file) in files else place
        at = at.tb_next
    return place


def to_type(command: str) -> str:
    """``command``, on what this one has written, with the files that it needs too."""
    return " ".join([command, *(f"{FLAG} {shlex.quote(path)}" for path in NAMED)])
