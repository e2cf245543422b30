"""Draw the rooms of the code and who imports whom anew: python scripts/site/rooms.py writes docs/rooms.svg.

An arrow that others lead to as well is left out, and so are those to the rooms that nearly every room stands on.
"""

from __future__ import annotations

import argparse
import ast
import itertools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "rooms.svg"
GROUND = ("base", "configs")
WIDTH, HEIGHT, ACROSS, DOWN = 96, 30, 118, 72  # of a box, and from one box to the next


def imported() -> dict[str, set[str]]:
    """Each room, a folder of the package, and the rooms that its code imports, early or late."""
    rooms = {path.parent.name: path.parent for path in (ROOT / "toolkit").glob("*/__init__.py")}
    arrows: dict[str, set[str]] = {}
    for name, folder in sorted(rooms.items()):
        found = set()
        for path in sorted(folder.resolve().rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    modules = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                if isinstance(node, ast.Constant) and node.value == "toolkit.templates":
                    modules = [node.value]  # data, read as a resource
                found |= {m.split(".")[1] for m in modules if m.startswith("toolkit.")}
        arrows[name] = found & set(rooms) - {name}
    return arrows


def reach(arrows: dict[str, set[str]], start: str) -> set[str]:
    """Every room that ``start`` leads to, in one step or more."""
    return {room for there in arrows[start] for room in {there} | reach(arrows, there)}


def reduced(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """Without arrows that others lead to as well."""
    return {
        room: {there for there in near if not any(there in reach(arrows, other) for other in near)}
        for room, near in arrows.items()
    }


def floors(arrows: dict[str, set[str]]) -> tuple[list[list[str]], dict[tuple[str, str], list[str]]]:
    """What stands on each floor, from the top down, and each arrow's way over it.

    A room is one floor above the highest that it leads to. Where an arrow passes a floor, it has a place of its own
    there, named "from>to>floor".
    """

    def height(room: str) -> int:
        return 1 + max((height(there) for there in arrows[room]), default=-1)

    heights = {room: height(room) for room in arrows}
    ways = {
        (room, there): [room, *(f"{room}>{there}>{h}" for h in range(heights[room] - 1, heights[there], -1)), there]
        for room in sorted(arrows)
        for there in sorted(arrows[room])
    }
    heights |= {stop: int(stop.split(">")[2]) for way in ways.values() for stop in way[1:-1]}
    rows = [sorted(r for r in heights if heights[r] == h) for h in range(max(heights.values()), -1, -1)]
    place: dict[str, float] = {}
    for row in rows:  # each near what leads to it
        above = {r: [place[a] for way in ways.values() for a, z in itertools.pairwise(way) if z == r] for r in row}
        row.sort(key=lambda r: (sum(above[r]) / len(above[r]) if above[r] else 0.0, r))
        place |= across(row)
    return rows, ways


def across(row: list[str]) -> dict[str, float]:
    """How far to the right of the middle each stands."""
    wide = [ACROSS if ">" not in stop else ACROSS / 4 for stop in row]
    return {stop: sum(wide[:i]) + wide[i] / 2 - sum(wide) / 2 for i, stop in enumerate(row)}


def picture() -> str:
    """The SVG."""
    every = imported()
    rows, ways = floors(reduced({room: near - set(GROUND) for room, near in every.items() if room not in GROUND}))
    width = 2 * max(x for row in rows for x in across(row).values()) + ACROSS
    at = {stop: (width / 2 + x, HEIGHT + y * DOWN) for y, row in enumerate(rows) for stop, x in across(row).items()}
    bottom = HEIGHT + len(rows) * DOWN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {bottom + HEIGHT}" font-family="sans-serif"'
        ' font-size="13" text-anchor="middle">',
        "<!-- made by scripts/site/rooms.py -->",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#888"/></marker></defs>',
        f'<rect width="{width:g}" height="{bottom + HEIGHT}" fill="#fff"/>',
    ]
    half = HEIGHT / 2
    for way in ways.values():
        x, y = at[way[0]]
        path = f"M{x:g} {y + half:g}"
        for stop in way[1:]:
            to_x, to_y = at[stop]
            path += f"C{x:g} {y + DOWN / 2:g} {to_x:g} {to_y - DOWN / 2:g} {to_x:g} {to_y - half - 1:g}"
            path += f"V{to_y + half:g}" if ">" in stop else ""
            x, y = to_x, to_y
        lines.append(f'<path d="{path}" fill="none" stroke="#888" marker-end="url(#tip)"/>')
    boxes = [(stop, x, y, WIDTH) for stop, (x, y) in at.items() if ">" not in stop]
    for name, x, y, wide in [*boxes, (", ".join(GROUND), width / 2, bottom, width - ACROSS + WIDTH)]:
        lines.append(
            f'<rect x="{x - wide / 2:g}" y="{y - half:g}" width="{wide:g}" height="{HEIGHT}" rx="6" fill="#eef"'
            f' stroke="#557"/><text x="{x:g}" y="{y + 4:g}">{name}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PICTURE.write_text(picture(), encoding="utf-8")
