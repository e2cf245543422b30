"""Prints which tests that failed beside others are run once more by themselves, a line each, or nothing where there is
to be no second run.

Only tests of rooms that start programs and wait for them, and three at most: a machine that does other things too can
let such a program be late. Numbers are never tried twice. ``scripts/test`` names whatever passed at its second run: it
waits for time or for a state that passes, and is to be mended."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ROOMS = ("batch", "box", "chat", "check_env", "deploy", "measure", "parallel", "profile", "scripts", "serve")
MOST = 3


def once_more(failed: list[str]) -> list[str]:
    """``failed``: pytest's node ids."""
    late = [test for test in failed if test.split("/")[1] in ROOMS]
    return late if len(late) == len(failed) <= MOST else []


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path, help="pytest's cache folder of the first run")
    found = parser.parse_args().cache / "v/cache/lastfailed"
    print("\n".join(once_more(list(json.loads(found.read_text())) if found.is_file() else [])), end="")
