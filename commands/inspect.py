"""``tool inspect``: what a model on disk is and where it came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.commands.output import stdout, table, write_json

if TYPE_CHECKING:
    from pathlib import Path

    from toolkit.artifacts.checkpoint import Checkpoint
    from toolkit.artifacts.inspect import Inspection


def run(
    model: Annotated[str, typer.Argument(metavar="DIR", help="Model directory, artifact, .gguf file, hub id or demo.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare it with its digest.")] = False,
    json: Annotated[
        str | None, typer.Option("--json", help="Write the manifest as JSON to this file (- = standard output).")
    ] = None,
) -> None:
    """Show what DIR is: kind, quantization, quality, files, and its lineage with what each step cost.

    Example: tool inspect demo-awq
    """
    from toolkit.artifacts.inspect import inspect
    from toolkit.artifacts.output.result_file import check_json
    from toolkit.artifacts.source import resolve_model

    check_json("--json", json, ("kind", "stage", "parent", "quality"))
    path = resolve_model(model)
    found = inspect(path, verify)
    write_json(json, found.record)
    if json != "-":
        is_model = found.checkpoint is not None or found.record["kind"] == "engine"
        _show(found, _refusals(path, found.checkpoint) if is_model else [])


def _refusals(path: Path, checkpoint: Checkpoint | None) -> list[tuple[str, str]]:
    """A row for each executor that does not take the model, or one where none does."""
    from toolkit.artifacts.engine.files import open_engine
    from toolkit.errors import ToolkitError
    from toolkit.models.registry import load_spec
    from toolkit.runners.executors import refusals

    try:
        spec = open_engine(path).spec if checkpoint is None else load_spec(checkpoint)[0]
    except ToolkitError as error:
        return [("does not run", str(error))]
    return [("not for", f"{name}: {reason}") for name, reason in refusals(spec).items()]


def _show(found: Inspection, refused: list[tuple[str, str]]) -> None:
    from rich.markup import escape
    from rich.tree import Tree

    console = stdout()
    record = found.record
    facts = [("kind", record["kind"]), *found.facts, ("size", _bytes(record["size_bytes"])), *refused]
    if record["stage"]:
        facts += [("made by", f"{record['stage']}, version {record['tool_version']}, {record['created']}")]
    if found.checked:
        facts += [("files", found.checked if found.checked.startswith("verified") else f"{found.checked} (--verify)")]
    console.print(table("What it is", ("", "value"), facts))
    if record["quality"]:
        console.print(table("Quality", ("figure", "value"), list(_flat(record["quality"]))))
    rows = [(file["name"], _bytes(file["size"]), (file["sha256"] or "")[:16]) for file in record["files"]]
    console.print(table("Files", ("name", "size", "sha256"), rows))
    tree = Tree("[bold]Lineage[/bold]")
    branch = tree
    for step in found.lineage:
        branch = branch.add(escape(step))
    console.print(tree)


def _flat(figures: dict[str, object]) -> list[tuple[str, object]]:
    """Two levels of names; lists (figures a layer, say) and long texts are for --json."""
    rows: list[tuple[str, object]] = []
    for name, value in figures.items():
        inner = (
            {f"{name}: {key}": inside for key, inside in value.items()} if isinstance(value, dict) else {name: value}
        )
        rows += [(key, _short(x)) for key, x in inner.items()]
    return rows


def _short(value: object) -> object:
    if isinstance(value, (dict, list)):
        return f"{len(value)} entries (see --json)"
    return f"{len(value):,} characters (see --json)" if isinstance(value, str) and len(value) > 200 else value


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
