"""``python -m toolkit`` is ``tool``."""

import os
import sys
from contextlib import suppress

INTERRUPTED = 130  # exit code


def main() -> None:
    """Run ``tool``, ready for a Ctrl-C while it is still being imported.

    What Ctrl-C ends is gone at once: Python's own tidying up, with torch loaded, may take longer than all that a
    command had to give back, and stops the thread that watches the time.
    """
    try:
        try:
            from toolkit.commands.main import main as run
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(INTERRUPTED)
        run()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(INTERRUPTED)
        raise


if __name__ == "__main__":
    main()
