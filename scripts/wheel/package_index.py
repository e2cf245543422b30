"""Make a folder of wheels a package index (PEP 503): FOLDER/simple/NAME/index.html links each with its SHA-256.

python scripts/wheel/package_index.py dist

Any web server serves FOLDER as it is, and pip takes it from a disk too:
pip install --extra-index-url file://$PWD/dist/simple toolkit==VERSION
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
import zipfile
from html import escape
from pathlib import Path
from urllib.parse import quote

_PAGE = '<!DOCTYPE html>\n<html><head><meta name="pypi:repository-version" content="1.0"><title>{0}</title></head>\n'


def write_index(folder: Path) -> list[Path]:
    """Write the pages for all wheels that lie in ``folder``; return the wheels."""
    wheels = sorted(folder.glob("*.whl"))
    projects: dict[str, list[Path]] = {}
    for wheel in wheels:
        projects.setdefault(re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower(), []).append(wheel)
    _page(folder / "simple", "index", [f'<a href="{name}/">{name}</a>' for name in projects])
    for name, files in projects.items():
        _page(folder / "simple" / name, name, [_link(file) for file in files])
    return wheels


def _link(wheel: Path) -> str:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        needs = re.search(r"^Requires-Python: (.+)$", archive.read(metadata).decode(), re.MULTILINE)
    pythons = f' data-requires-python="{escape(needs[1].strip())}"' if needs else ""
    return f'<a href="../../{quote(wheel.name)}#sha256={digest}"{pythons}>{escape(wheel.name)}</a>'


def _page(folder: Path, title: str, links: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    body = "".join(f"{link}<br>\n" for link in links)
    (folder / "index.html").write_text(f"{_PAGE.format(escape(title))}<body>\n{body}</body></html>\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if not folder.is_dir():
        sys.exit("expected one folder of wheels: python scripts/wheel/package_index.py dist")
    print(f"{len(write_index(folder))} wheels in {folder}/simple")
