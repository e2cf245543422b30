"""Which errors that a user can meet do tests raise: scripts/testing/raises.py [--least SHARE] [ARGUMENTS OF PYTEST].

Runs pytest and counts, room by room, the places in toolkit/ and commands/ that raise ToolkitError, one of its kinds
or ApiError, and those that were reached, by pytest or by what it starts with its own environment. --keep FILE adds what
was reached to a file, so that a suite can be run in parts and between edits; --only-count runs none.
"""

from __future__ import annotations

import argparse
import ast
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
WATCH = ROOT / "scripts" / "testing" / "watch_raises"  # its sitecustomize.py notes what each process raises
ERRORS = {"ToolkitError", "UsageError", "BusyError", "HopelessError", "ApiError"}


# --- the count --------------------------------------------------------------------------------------------------------


class Site(NamedTuple):
    """A place that raises: its first and last line, and what it is called wherever it moves in its file."""

    first: int
    last: int
    name: str


def sites(path: Path) -> list[Site]:
    """Each place of a file that raises one."""
    found: list[Site] = []
    twins: Counter[str] = Counter()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
            continue
        if ast.unparse(node.exc.func).rpartition(".")[2] in ERRORS:
            text = ast.unparse(node)
            twins[text] += 1
            found.append(Site(node.lineno, node.end_lineno or node.lineno, f"{text} #{twins[text]}"))
    return sorted(found)


def every_site() -> dict[str, list[Site]]:
    """By path from the repository's root."""
    paths = sorted(path for folder in ("toolkit", "commands") for path in (ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): sites(path) for path in paths}


def names_of(lines: set[str]) -> set[str]:
    """The sites that ``/path/file.py:line`` lie in, each as ``file.py: name``."""
    every = every_site()
    names = set()
    for line in lines:
        where, _, number = line.rpartition(":")
        path = os.path.relpath(where, ROOT.resolve())
        names |= {f"{path}: {s.name}" for s in every.get(path, ()) if s.first <= int(number) <= s.last}
    return names


def count(reached: set[str]) -> dict[str, list[tuple[str, bool]]]:
    """By room: each place, and whether it was reached."""
    rooms: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    for path, found in every_site().items():
        inside = Path(path).parts
        room = "/".join(inside[: 2 if inside[0] == "toolkit" and len(inside) > 2 else 1])
        rooms[room] += [(f"{path}:{site.first}", f"{path}: {site.name}" in reached) for site in found]
    return {room: places for room, places in rooms.items() if places}


@contextmanager
def listening() -> Iterator[tuple[str, set[str]]]:
    """A socket, by its path, and the lines that processes have told it when the block ends."""
    lines: set[str] = set()
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(place := f"{folder}/socket")

        def listen() -> None:
            while line := heard.recv(1 << 16):
                lines.add(line.decode())

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield place, lines
        finally:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
                end.sendto(b"", place)
            thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--least", type=float, default=0.0, metavar="SHARE", help="fail below this share, as 0.95")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="what was reached, of this run and those before it")
    parser.add_argument("--only-count", action="store_true", help="run nothing: count what --keep has")
    parser.add_argument("--missing", action="store_true", help="print each place that was not reached")
    args, rest = parser.parse_known_args()
    if args.only_count and not (args.keep and args.keep.is_file()):
        parser.error(f"--only-count: {args.keep or 'no --keep'}: expected --keep with the file of an earlier run")
    code = 0
    reached: set[str] = set()
    if not args.only_count:
        with listening() as (place, lines):
            paths = [str(WATCH), *filter(None, [os.environ.get("PYTHONPATH")])]
            watched = {"TOOLKIT_RAISES_SOCKET": place, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
            command = [sys.executable, "-m", "pytest", *rest]
            with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **watched}) as run:
                try:
                    code = run.wait()
                except KeyboardInterrupt:  # pytest has it too, and ends; what it reached is counted
                    code = run.wait() or 1
        reached = names_of(lines)
    if args.keep:  # read now: another part may have written meanwhile
        reached |= set(filter(None, args.keep.read_text(encoding="utf-8").split("\n") if args.keep.is_file() else []))
        if not args.only_count:
            args.keep.parent.mkdir(parents=True, exist_ok=True)
            args.keep.write_text("".join(f"{name}\n" for name in sorted(reached)), encoding="utf-8")
    rooms = count(reached)
    every = [one for places in rooms.values() for one in places]
    for room, places in [*rooms.items(), ("all", every)]:
        print(f"{room:24}{sum(hit for _, hit in places):5} of {len(places):5}")
        if args.missing and room != "all":
            print("".join(f"    {where}\n" for where, hit in places if not hit), end="")
    share = sum(hit for _, hit in every) / len(every)
    print(f"{share:.1%} of {len(every)} places that raise were reached")
    return code or int(share < args.least)


if __name__ == "__main__":
    sys.exit(main())
