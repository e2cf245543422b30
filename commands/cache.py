"""``tool cache``: the models that were packed once for this processor and are kept."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from toolkit.commands.output import stdout, table, write_json
from toolkit.errors import UsageError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Models that chat, serve or profile packed for this processor, because they were never converted.",
)


@app.command("list")
def show(
    json: Annotated[
        str | None, typer.Option("--json", help="Write the list as JSON to this file (- = standard output).")
    ] = None,
) -> None:
    """List the packed models, the one used last first. TOOLKIT_PACK_CACHE says how many GiB they may take (0: none).

    Example: tool cache list
    """
    from toolkit.artifacts.output.result_file import check_json
    from toolkit.convert import pack_cache

    check_json("--json", json, ("name", "packed_from"))
    found = pack_cache.entries()
    rows = [
        {"name": e.path.name, "packed_from": e.source, "size_bytes": e.size, "last_used": int(e.used)} for e in found
    ]
    if json is not None:
        write_json(json, rows)
        return
    total, limit = (size / pack_cache.GIB for size in (sum(e.size for e in found), pack_cache.largest_size()))
    lines = [
        (e.path.name, e.source, f"{e.size / 1e6:,.0f} MB", time.strftime("%Y-%m-%d %H:%M", time.localtime(e.used)))
        for e in found
    ]
    if lines:
        made = table("Packed models", ("name", "packed from", "size", "last used"), lines)
        made.columns[0].no_wrap = True  # it is typed after `tool cache clear`
        stdout().print(made)
    stdout().print(f"{total:.2f} of {limit:g} GiB in {pack_cache.cache_dir()}", soft_wrap=True)


@app.command("clear")
def clear(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="As `tool cache list` shows them. Default: all.")
    ] = None,
) -> None:
    """Delete packed models that are not in use. What they were packed from stays, and is packed again when it is run.

    Example: tool cache clear
    """
    from toolkit.convert import pack_cache

    found = {entry.path.name: entry for entry in pack_cache.entries()}
    if unknown := sorted(set(names or ()) - set(found)):
        raise UsageError(f"{unknown[0]}: no packed model of that name; `tool cache list` shows them")
    pack_cache.sweep()
    for name in names or found:
        done = "deleted" if pack_cache.remove(found[name].path) else "in use, so it stays:"
        stdout().print(f"{done} {name}, packed from {found[name].source}", markup=False, soft_wrap=True)
