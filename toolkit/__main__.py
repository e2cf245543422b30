"""``python -m toolkit`` is ``tool``."""

from toolkit.commands.main import main

if __name__ == "__main__":
    main()
