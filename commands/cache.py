"""``tool cache``: the models that were packed once for this processor, and the KV caches that are kept in folders."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.commands.app.groups import new_app
from toolkit.commands.output import say, stdout, table, write_json
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.engine.cache.kept.folder import Entry

DIR = "--kv-cache-dir"
KvCacheDir = Annotated[
    Path | None,
    typer.Option(
        DIR,
        metavar="<dir>",
        help="Only the KV caches kept here. Default: packed models, and KV caches wherever some were kept.",
    ),
]

app = new_app(
    help="What is kept between runs: models packed for this processor that were never converted, and KV caches.",
    no_args_is_help=True,
)


@app.command("list")
def show(
    json: Annotated[
        str | None, typer.Option("--json", help="Write the list as JSON to this file (- = standard output).")
    ] = None,
    kv_cache_dir: KvCacheDir = None,
) -> None:
    """List the packed models and the kept KV caches, those used last first. TOOLKIT_PACK_CACHE says how many GiB the
    models may take (0: none), --kv-cache-disk what a folder of KV caches may.

    Example: tool cache list
    """
    from toolkit.artifacts.output.result_file import check_json
    from toolkit.convert import pack_cache

    check_json("--json", json, ("name", "packed_from"))
    found = pack_cache.entries() if kv_cache_dir is None else []
    kept = _kept(kv_cache_dir)
    rows: list[dict[str, Any]] = [
        {"name": e.path.name, "packed_from": e.source, "size_bytes": e.size, "last_used": int(e.used)} for e in found
    ]
    rows += [
        {"name": e.model, "kv_cache_dir": str(path), "blocks": e.files, "size_bytes": e.size, "last_used": int(e.used)}
        | {"of": e.about}
        for path, e in kept
    ]
    if json is not None:
        write_json(json, rows)
        return
    if kv_cache_dir is None:
        total, limit = (size / pack_cache.GIB for size in (sum(e.size for e in found), pack_cache.largest_size()))
        _show("Packed models", "packed from", [(e.path.name, e.source, e.size, e.used) for e in found])
        say(f"{total:.2f} of {limit:g} GiB in {pack_cache.cache_dir()}", stdout())
    elif not kept:
        say(f"no KV caches in {kv_cache_dir}", stdout())
    for path in dict.fromkeys(path for path, _ in kept):
        own = [entry for place, entry in kept if place == path]
        _show(
            "KV caches, prompts among them", "of", [(e.model, e.about.get("model", "?"), e.size, e.used) for e in own]
        )
        say(f"{sum(e.size for e in own) / pack_cache.GIB:.2f} GiB in {path}", stdout())


@app.command("clear")
def clear(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="As `tool cache list` shows them. Default: all.")
    ] = None,
    kv_cache_dir: KvCacheDir = None,
) -> None:
    """Delete packed models that are not in use, and kept KV caches; with --kv-cache-dir only those that are there.
    What they were made from stays. It is packed, and computed, again when it is run.

    Example: tool cache clear
    """
    from toolkit.convert import pack_cache
    from toolkit.engine.cache.kept import folder

    found = {entry.path.name: entry for entry in pack_cache.entries()} if kv_cache_dir is None else {}
    kept = _kept(kv_cache_dir)
    if unknown := sorted(set(names or ()) - set(found) - {entry.model for _, entry in kept}):
        raise UsageError(f"{unknown[0]}: nothing of that name is kept; `tool cache list` shows what is")
    chosen = names or [*found, *(entry.model for _, entry in kept)]
    pack_cache.sweep()
    for name in dict.fromkeys(chosen):
        if name in found:
            done = "deleted" if pack_cache.remove(found[name].path) else "in use, so it stays:"
            say(f"{done} {name}, packed from {found[name].source}", stdout())
        for path, entry in kept:
            if entry.model == name:
                size = folder.clear(DIR, path, name)
                say(f"deleted {name}, {size / 1e6:,.0f} MB of KV cache in {path}", stdout())


def _kept(only: Path | None) -> list[tuple[Path, Entry]]:
    """KV caches, and where they are. Raises UsageError for a folder of ``only`` that is not this user's."""
    from toolkit.artifacts.home import toolkit_home
    from toolkit.engine.cache.kept import folder, places

    if only is not None:
        path = only.expanduser().absolute()
        return [(path, entry) for entry in folder.entries(DIR, path)]
    found = []
    for path in places.known(toolkit_home()):
        try:
            found += [(path, entry) for entry in folder.entries(DIR, path)]
        except UsageError:  # it has become another's
            continue
    return found


def _show(title: str, of: str, rows: list[tuple[str, str, int, float]]) -> None:
    if rows:
        lines = [
            (name, source, f"{size / 1e6:,.0f} MB", time.strftime("%Y-%m-%d %H:%M", time.localtime(used)))
            for name, source, size, used in rows
        ]
        made = table(title, ("name", of, "size", "last used"), lines)
        made.columns[0].no_wrap = True  # it is typed after `tool cache clear`
        stdout().print(made)
