"""``tool list``: the built-in chat templates, and the models that can run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD

from toolkit.commands.app.groups import new_app
from toolkit.commands.output import stdout, table, write_json
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.runners.coverage import Coverage

app = new_app()
NARROW = 72  # columns, below which the models' table has no room for words
JSON = Annotated[str | None, typer.Option("--json", help="Write the list as JSON to this file (- = standard output).")]


@app.callback(invoke_without_command=True)
def templates(context: typer.Context, json: JSON = None) -> None:
    """List the built-in chat templates; `tool list models` lists what can run.

    A name goes to --chat-template. A model that brings its own template needs none.
    """
    if context.invoked_subcommand is not None:
        if json is not None:
            raise UsageError(f"--json: expected behind the name: tool list {context.invoked_subcommand} --json {json}")
        return
    from toolkit.artifacts.output.result_file import check_json
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
    """List models by the names that people know: what runs them, which methods of lite take them, their name in GGUF.

    convert, chat and serve take every model here. Where turbomind has a dash, pytorch stands in for it.
    """
    from importlib.util import find_spec

    from toolkit.artifacts.output.result_file import check_json
    from toolkit.models.registry import families
    from toolkit.runners.coverage import STAGES, all_formats, coverage

    check_json("--json", json, ("architecture", "backends"))
    found = coverage(families())
    native = find_spec("toolkit.runners.native.runner") is not None
    if json is not None:
        write_json(json, [row for one in found for row in _rows(one, STAGES, native)])
        return
    lines = [
        (
            one.family.known_as,
            one.family.name,
            "yes" if one.native is None else "–" if one.family.tiny else "?",
            f"no {', '.join(one.no_method)}" if one.no_method else "all",
            one.gguf or "–",
        )
        for one in found
    ]
    names = ("models", "model_type", "turbomind", "lite", "GGUF")
    if stdout().width < NARROW:
        for known_as, *cells in lines:
            told = ", ".join(f"{name} {cell}" for name, cell in zip(names[1:], cells, strict=True))
            stdout().print(f"{known_as}\n  {told}", markup=False, highlight=False)
    else:
        made = table("Models that run", names, lines)
        made.box, made.show_edge, made.collapse_padding = SIMPLE_HEAD, False, True
        for column in made.columns[1:]:
            column.no_wrap = True
        stdout().print(made)
    stdout().print(
        f"Weights are read as {', '.join(all_formats())}; which of them --json says, and why where one is not."
    )
    if not native:
        stdout().print("turbomind: its native runner is not installed; pytorch's stands in for it.")


def _rows(one: Coverage, stages: Sequence[str], native: bool) -> list[dict[str, object]]:
    """What is known of a family, for each spelling of its architecture."""
    common: dict[str, object] = {
        "family": one.family.name,
        "known_as": one.family.known_as,
        "stages": list(stages),
        "backends": [name for name in one.backends if native or name != "turbomind"],
        "not_on_turbomind": one.native,
        "no_method": list(one.no_method),
        "formats": list(one.formats),
        "gguf": one.gguf,
        "no_gguf": one.no_gguf,
    }
    return [{"architecture": name, **common} for name in one.family.architectures]
