"""The sampling flags of commands that generate: one parameter ``sampling``, and a decorator. They are the fields of
GenerationConfig that users type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from toolkit.commands.options import with_flags
from toolkit.configs.generation import TYPED, Parameter
from toolkit.configs.option import option


class SamplingFlags:
    """A field for each flag; None = not given."""

    def given(self) -> dict[str, Any]:
        """The flags that were given, by the names of ``toolkit.chat.settings``."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        given = {name: value for name, value in found.items() if value not in (None, ())}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}


def _field(parameter: Parameter, help: str) -> tuple[str, Any, Any]:
    """Of ``dataclasses.make_dataclass``."""
    if parameter.type is list:
        return parameter.spelled, tuple[str, ...], option((), help)
    names = ("--do-sample/--greedy",) if parameter.name == "do_sample" else ()
    return parameter.spelled, parameter.type | None, option(None, help, *names)


def _flags(parameters: Iterable[Parameter], **helps: str) -> type:
    fields = [_field(p, helps.get(p.name, p.help)) for p in parameters]
    return dataclasses.make_dataclass("Flags", fields, bases=(SamplingFlags,))


with_answer_flags = with_flags("sampling", _flags(TYPED.values()), "Sampling")
# of requests that say nothing of it themselves, by the names of their fields
with_request_flags = with_flags(
    "sampling",
    _flags(
        (
            replace(p, spelled="max_tokens") if p.name == "max_new_tokens" else p
            for p in TYPED.values()
            if p.name != "do_sample"
        ),
        max_new_tokens="Longest answer. Default: as far as the session goes.",
    ),
    "Sampling of requests that leave it open",
)
# of load that is measured: how tokens are drawn, greedily unless told otherwise
with_load_flags = with_flags(
    "sampling",
    _flags(
        (p for p in TYPED.values() if p.neutral is not None or p.name == "do_sample"),
        do_sample="Draw tokens, or take the likeliest. Default: greedy.",
    ),
    "Sampling",
)
