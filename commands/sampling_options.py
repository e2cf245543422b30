"""The sampling flags of commands that generate: one parameter ``sampling``, and a decorator. They are the fields of
GenerationConfig that users type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from toolkit.commands.options import with_flags
from toolkit.generation_config import TYPED, Parameter


class SamplingFlags:
    """A field for each flag; None = not given."""

    def given(self) -> dict[str, Any]:
        """The flags that were given, by the names of ``toolkit.chat.settings``."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {name: value for name, value in found.items() if value not in (None, [])}


def _flag(parameter: Parameter, help: str) -> tuple[str, Any, Any]:
    """Of ``dataclasses.make_dataclass``."""
    kind: Any = list[str] if parameter.type is list else parameter.type
    name = "--do-sample/--greedy" if parameter.name == "do_sample" else f"--{parameter.spelled.replace('_', '-')}"
    option = typer.Option(name, help=help, rich_help_panel="Sampling")
    return parameter.spelled, Annotated[kind | None, option], dataclasses.field(default=None)


def _flags(parameters: Iterable[Parameter], **helps: str) -> type:
    fields = [_flag(p, helps.get(p.name, p.help)) for p in parameters]
    return dataclasses.make_dataclass("Flags", fields, bases=(SamplingFlags,))


with_answer_flags = with_flags("sampling", _flags(TYPED.values()))
# of load that is measured: how tokens are drawn, greedily unless told otherwise
with_load_flags = with_flags(
    "sampling",
    _flags(
        (p for p in TYPED.values() if p.neutral is not None or p.name == "do_sample"),
        do_sample="Draw tokens, or take the likeliest. Default: greedy.",
    ),
)
