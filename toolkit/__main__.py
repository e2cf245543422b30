"""``python -m toolkit`` is ``tool``."""

import sys


def main() -> None:
    """Run ``tool``, ready for a Ctrl-C while it is still being imported."""
    try:
        from toolkit.commands.main import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
