"""Give a source tree the version of a nightly build: the next minor version's development release of today (UTC).

python scripts/wheel/nightly_version.py toolkit/__init__.py
"""

from __future__ import annotations

import argparse
import re
from datetime import UTC, date, datetime
from pathlib import Path

_LINE = re.compile(r'^__version__ = "(\d+)\.(\d+)\.\d+"$', re.MULTILINE)


def nightly(text: str, day: date) -> tuple[str, str]:
    """(the module's text with that version, the version). Raises SystemExit where the text states none."""
    found = _LINE.search(text)
    if found is None:
        raise SystemExit('expected a line __version__ = "X.Y.Z"')
    version = f"{found[1]}.{int(found[2]) + 1}.0.dev{day:%Y%m%d}"
    return text[: found.start()] + f'__version__ = "{version}"' + text[found.end() :], version


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    path = parser.parse_args().file
    text, version = nightly(path.read_text(encoding="utf-8"), datetime.now(UTC).date())
    path.write_text(text, encoding="utf-8")
    print(version)
