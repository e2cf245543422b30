"""What commands print: tables and notes for people on standard error or output, JSON for scripts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from toolkit.artifacts.json_file import finite
from toolkit.base.figures import written

if TYPE_CHECKING:
    from rich.table import Table

    from toolkit.engine.process.frontend import AsyncEngine


def stdout() -> Console:
    """Where results for people go."""
    return Console(highlight=False)


def stderr() -> Console:
    """Where progress and notes go, so that standard output stays clean for pipes."""
    return Console(stderr=True, highlight=False)


def say(line: str, console: Console | None = None, style: str | None = None) -> None:
    """A line of plain text, brackets and all, on standard error or where ``console`` goes."""
    (console or stderr()).print(line, style=style, markup=False, soft_wrap=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """A Rich table; the first column is left-aligned text, numbers align right. All of it is plain text, brackets and
    all."""
    from rich.table import Table  # what shows none does without
    from rich.text import Text

    made = Table(title=Text(title, style="table.title"), title_justify="left", header_style="bold")
    data = [[_cell(c) for c in row] for row in rows]
    for i, name in enumerate(columns):
        numeric = bool(data) and all(_is_number(row[i]) for row in data)
        made.add_column(Text(name), justify="right" if numeric else "left", overflow="fold")
    for row in data:
        made.add_row(*map(Text, row))
    return made


def show_engine(console: Console, engine: AsyncEngine) -> None:
    """What a loaded model takes of memory, and whatever else its user should know."""
    plan = engine.plan
    title = f"{engine.model_name} on {engine.device}: {plan.max_batch_size} requests of up to {plan.session_len} tokens"
    console.print(table(title, ("memory", "takes", ""), plan.table()))
    say_how_it_runs(console, engine, engine.runner_note)


def say_how_it_runs(console: Console, engine: AsyncEngine, note: str) -> None:
    """Why the model runs otherwise than was asked for or is fastest, which is not to be overlooked; ``note``, where it
    is not empty; what had to be reduced to fit."""
    if engine.runner_why:
        say(engine.runner_why, console, "bold yellow")
    for line in filter(None, (note, *engine.plan.notices)):
        say(line, console)


def write_json(target: str | None, data: Any) -> None:
    """Write ``data`` as JSON to a file, whole or not at all, or to standard output for "-"; nothing for None.

    Ask ``result_file.check_json`` first, before any long work.
    """
    if target is None:
        return
    text = json.dumps(finite(data), indent=2, ensure_ascii=False, default=str) + "\n"
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    from toolkit.artifacts.output.result_file import write_text

    write_text("--json", Path(target), text)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return written(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value)


def _is_number(text: str) -> bool:
    try:
        float(text.replace(",", "") or "0")
    except ValueError:
        return False
    return True
