"""``tool list``: the built-in chat templates, and the models that can run."""

from __future__ import annotations

from typing import Annotated

import typer

from toolkit.commands.output import stdout, table, write_json

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
JSON = Annotated[str | None, typer.Option("--json", help="Write the list as JSON to this file (- = standard output).")]


@app.callback(invoke_without_command=True)
def templates(context: typer.Context, json: JSON = None) -> None:
    """List the built-in chat templates; `tool list models` lists what can run.

    A name goes to --chat-template. A model that brings its own template needs none.
    """
    if context.invoked_subcommand is not None:
        return
    from toolkit.chat import builtin

    found = builtin.load()
    rows = [{"name": b.name, "aliases": list(b.aliases), "for_models_like": b.example} for b in found]
    if json is not None:
        write_json(json, rows)
        return
    lines = [(b.name, ", ".join(b.aliases), b.example) for b in found]
    stdout().print(table("Built-in chat templates", ("name", "also called", "for models like"), lines))


@app.command("models")
def models(json: JSON = None) -> None:
    """List architectures, the weight formats each is read from, and the backends that run it."""
    from toolkit.artifacts.formats import FORMATS
    from toolkit.models import registry
    from toolkit.runners.choose import BACKENDS

    formats = ["hf", *sorted(FORMATS), "engine"]
    described = registry.describe()
    if json is not None:
        rows = [
            {"architecture": name, "family": family, "notes": notes, "formats": formats, "backends": list(BACKENDS)}
            for name, family, notes in described
        ]
        write_json(json, rows)
        return
    lines = [(name, family, " ".join(formats), " ".join(BACKENDS), notes) for name, family, notes in described]
    stdout().print(table("Models", ("architecture", "family", "weight formats", "backends", "notes"), lines))
