"""``python -m toolkit`` is ``tool``."""

import atexit
import io
import os
import signal
import sys
from contextlib import suppress

INTERRUPTED = 130  # exit code


def main() -> None:
    """Run ``tool``, ready for a Ctrl-C while it is still being imported and when it has ended.

    What Ctrl-C ends is gone at once: Python's own tidying up, with torch loaded, may take longer than all that a
    command had to give back, and stops the thread that watches the time. A command that has ended by itself tidies up
    what it registered, and leaves Python's own part out: it looks at all of torch's objects once more. Ctrl-C leaves
    the rest of the command's, too, and the exit code stays.
    """
    from toolkit.base import garbage

    garbage.look_seldom()
    _open_closed()
    _write_anything()
    code = 1
    atexit.register(lambda: _leave(code))  # the last to run, as the first that is registered
    try:
        watches = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else it is somebody's
        if watches:  # nothing is to be given back yet, and Python loses what is raised in a callback of its own
            signal.signal(signal.SIGINT, lambda *_: _interrupted())
        from toolkit.commands.main import main as run

        if watches:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except KeyboardInterrupt:
        _interrupted()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code == INTERRUPTED:
            _leave(code)
        signal.signal(signal.SIGINT, lambda *_: _leave(code))
        raise


def _open_closed() -> None:
    """Streams that whoever started us has closed (``tool … >&-``) lead nowhere: else Python has none to read or to
    write, and the next file that is opened takes the number, and what native code prints."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)


def _write_anything() -> None:
    """What a stream's encoding lacks (an arrow, where it is Latin-1; a name that is no UTF-8) is written as an escape,
    as Python itself has it on standard error alone."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _interrupted() -> None:
    print("interrupted", file=sys.stderr)
    _leave(INTERRUPTED)


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, RuntimeError):  # the last: where it was just being flushed
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
