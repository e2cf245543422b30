"""``--layer-config``: bits and groups of their own for some linears, by name or pattern, as auto-round has them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from toolkit.artifacts.json_file import parse_json, read_json_object
from toolkit.base.user_path import user_path
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.spec import StoredTensor
from toolkit.quant.methods.awq import Grid
from toolkit.quant.methods.grid import GROUP_SIZES

OPTION = "--layer-config"
DENSE_BITS = 16


def read_layer_config(
    text: str, modules: list[StoredTensor], base: Grid, bits: tuple[int, ...]
) -> tuple[dict[str, Grid], frozenset[str]]:
    """(grids of their own by canonical name, names that stay dense) of a JSON file, or of JSON written out.

    ``{"NAME OR PATTERN": {"bits": 8, "group_size": 32, "sym": true}}``: a name (canonical or on disk), else a regular
    expression found in one; later entries win. What an entry leaves out is as in ``base``; 16 bits stay dense. A module
    that is stored fused is taken whole. Raises UsageError that names the entry.
    """
    grids: dict[str, Grid] = {}
    dense: set[str] = set()
    for pattern, wanted in _read(text).items():
        grid = _grid(pattern, wanted, base, bits)
        for item in _fitting(pattern, modules):
            for part in item.parts:
                dense.discard(part.name)
                grids.pop(part.name, None)
                if grid is None:
                    dense.add(part.name)
                elif grid != base:
                    _check_divides(pattern, item, grid)
                    grids[part.name] = grid
    return grids, frozenset(dense)


def _read(text: str) -> dict[str, Any]:
    try:
        if text.lstrip().startswith("{"):
            found: dict[str, Any] = parse_json(text, "the object")
        else:
            found = read_json_object(user_path(text))
    except ToolkitError as error:
        raise UsageError(f"{OPTION}: expected a JSON file or object: {str(error).splitlines()[0]}") from error
    if not found:
        raise UsageError(f"{OPTION}: expected an object of names or patterns, found {{}}")
    return found


def _grid(pattern: str, wanted: Any, base: Grid, bits: tuple[int, ...]) -> Grid | None:
    """The grid of an entry; None: dense."""
    where = f"{OPTION}: {pattern}"
    if not isinstance(wanted, dict) or not wanted or set(wanted) - {"bits", "group_size", "sym"}:
        raise UsageError(f"{where}: expected an object of bits, group_size and sym, found {wanted!r:.60}")
    if wanted.get("bits") == DENSE_BITS:
        return None
    if type(wanted.get("bits", base.bits)) is not int or wanted.get("bits", base.bits) not in bits:
        raise UsageError(f"{where}: bits: expected {', '.join(map(str, bits))} or 16, found {wanted['bits']!r:.20}")
    size = wanted.get("group_size", base.group_size)
    if type(size) is not int or size not in (*GROUP_SIZES, -1):
        raise UsageError(f"{where}: group_size: expected {', '.join(map(str, GROUP_SIZES))} or -1, found {size!r:.20}")
    if type(wanted.get("sym", True)) is not bool:
        raise UsageError(f"{where}: sym: expected true or false, found {wanted['sym']!r:.20}")
    return replace(
        base, bits=wanted.get("bits", base.bits), group_size=size, symmetric=wanted.get("sym", base.symmetric)
    )


def _fitting(pattern: str, modules: list[StoredTensor]) -> list[StoredTensor]:
    exact = [item for item in modules if pattern in (item.name, *(p.name for p in item.parts))]
    if exact:
        return exact
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"{OPTION}: {pattern!r}: neither a name nor a regular expression: {error}") from error
    found = [x for x in modules if any(compiled.search(n) for n in (x.name, *(p.name for p in x.parts)))]
    if not found:
        raise UsageError(f"{OPTION}: {pattern!r}: fits no linear of this model; names look like {modules[0].name}")
    return found


def _check_divides(pattern: str, item: StoredTensor, grid: Grid) -> None:
    if grid.group_size > 0 and item.matrix[1] % grid.group_size:
        raise UsageError(
            f"{OPTION}: {pattern}: groups of {grid.group_size} do not divide the {item.matrix[1]} inputs of {item.name}"
        )
