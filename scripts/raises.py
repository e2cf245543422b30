"""Which errors that a user can meet do tests raise: python scripts/raises.py [--least SHARE] [ARGUMENTS OF PYTEST].

Runs pytest and counts, room by room, the places in toolkit/ and commands/ that raise ToolkitError, one of its kinds
or ApiError, and those that were reached, by pytest or by what it starts with its own environment. --keep FILE adds what
was reached to a file, so that a suite can be run in parts; --only-count runs none. (A line that moves is not found
again: count before you edit.)
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WATCH = ROOT / "scripts" / "testing" / "watch_raises"  # its sitecustomize.py notes what each process raises
ERRORS = {"ToolkitError", "UsageError", "BusyError", "HopelessError", "ApiError"}


# --- the count --------------------------------------------------------------------------------------------------------


def sites(path: Path) -> list[tuple[int, int]]:
    """First and last line of each place that raises one."""
    return [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
        and ast.unparse(node.exc.func).rpartition(".")[2] in ERRORS
    ]  # fmt: skip


def count(lines: set[str]) -> dict[str, list[tuple[str, bool]]]:
    """By room: each place, and whether it was reached."""
    met = defaultdict(set)
    for line in lines:
        name, _, number = line.rpartition(":")
        met[name].add(int(number))
    rooms = defaultdict(list)
    for path in sorted(p for folder in ("toolkit", "commands") for p in (ROOT / folder).rglob("*.py")):
        inside = path.relative_to(ROOT).parts
        room = "/".join(inside[: 2 if inside[0] == "toolkit" and len(inside) > 2 else 1])
        for first, last in sites(path):
            hit = any(first <= number <= last for number in met[str(path.resolve())])
            rooms[room].append((f"{path.relative_to(ROOT)}:{first}", hit))
    return rooms


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
    with tempfile.TemporaryDirectory() as folder:
        file = (args.keep or Path(folder) / "reached").resolve()
        if not args.only_count:
            paths = [str(WATCH), *filter(None, [os.environ.get("PYTHONPATH")])]
            watched = {"TOOLKIT_RAISES_FILE": str(file), "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
            command = [sys.executable, "-m", "pytest", *rest]
            with subprocess.Popen(command, cwd=ROOT, env={**os.environ, **watched}) as run:
                try:
                    code = run.wait()
                except KeyboardInterrupt:  # pytest has it too, and ends; what it reached is counted
                    code = run.wait() or 1
        rooms = count(set(file.read_text(encoding="utf-8").split("\n")) - {""} if file.is_file() else set())
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
