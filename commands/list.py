"""``tool list``: the built-in chat templates, and the models that can run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD

from toolkit.commands.groups import Group
from toolkit.commands.output import stdout, table, write_json

app = typer.Typer(cls=Group, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
NARROW = 72  # columns, below which a table of three has no room for words
JSON = Annotated[str | None, typer.Option("--json", help="Write the list as JSON to this file (- = standard output).")]


@app.callback(invoke_without_command=True)
def templates(context: typer.Context, json: JSON = None) -> None:
    """List the built-in chat templates; `tool list models` lists what can run.

    A name goes to --chat-template. A model that brings its own template needs none.
    """
    if context.invoked_subcommand is not None:
        return
    from toolkit.artifacts.result_file import check_json
    from toolkit.chat import builtin

    check_json("--json", json, ("name", "for_models_like"))
    found = builtin.load()
    rows = [{"name": b.name, "aliases": list(b.aliases), "for_models_like": b.example} for b in found]
    if json is not None:
        write_json(json, rows)
        return
    lines = [(b.name, ", ".join(b.aliases), b.example) for b in found]
    stdout().print(table("Built-in chat templates", ("name", "also called", "for models like"), lines))


@app.command("models")
def models(json: JSON = None) -> None:
    """List models by the names that people know, with their architectures and the weight formats they are read from."""
    from importlib.util import find_spec

    from toolkit.artifacts.formats import FORMATS
    from toolkit.artifacts.result_file import check_json
    from toolkit.models.gguf import Gguf
    from toolkit.models.registry import families

    check_json("--json", json, ("architecture", "backends"))
    known = families()
    of_gguf = {family.gguf.family for family in known if isinstance(family.gguf, Gguf)}
    quantized = [("w8a8" if name == "smooth_quant" else name) for name in FORMATS if name != "gguf"]
    formats = ["hf", *quantized, "gguf", "engine"]
    backends = ["pytorch", *(["turbomind"] if find_spec("toolkit.runners.native.runner") else [])]
    rows = [
        {
            "architecture": name,
            "family": family.name,
            "known_as": family.known_as,
            "formats": [f for f in formats if f != "gguf" or family.name in of_gguf],
            "backends": backends,
        }
        for family in known
        for name in family.architectures
    ]
    if json is not None:
        write_json(json, rows)
        return
    first = {family.architectures[0] for family in known}  # the others are older spellings
    lines = [
        (row["known_as"] if row["architecture"] in first else "", row["architecture"], _but(formats, row["formats"]))
        for row in rows
    ]
    if stdout().width < NARROW:
        for known_as, architecture, but in lines:
            stdout().print(f"{known_as}\n  {architecture}: {but}".lstrip("\n"), markup=False, highlight=False)
    else:
        made = table("Models that run", ["known as", "architecture", "weight formats"], lines)
        made.box, made.show_edge, made.collapse_padding = SIMPLE_HEAD, False, True
        made.columns[1].no_wrap = True
        stdout().print(made)
    stdout().print(f"All formats: {', '.join(formats)}. Backends: {', '.join(backends)}.")
    if "turbomind" not in backends:
        stdout().print("turbomind: its native runner is not installed; pytorch's stands in for it.")


def _but(all_formats: Sequence[str], found: Sequence[str]) -> str:
    missing = [name for name in all_formats if name not in found]
    return f"all but {', '.join(missing)}" if missing else "all"
