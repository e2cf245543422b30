"""Values of the command line whose conversion is plain: texts, numbers in digits, and defaults, which have their type.

Typer converts every value by Pydantic, those of options that were not given too. To import Pydantic and to build a
converter for each option of ``tool chat`` takes longer than to load a small model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

PLAIN = (str, int, float, bool)
NUMBERS = {int: re.compile(r"-?[0-9]{1,18}"), float: re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")}


def spare(command: Any) -> None:
    """Have the values of a Typer command, and of those in it, converted only where they have to be."""
    command.get_params = partial(_parameters, command.get_params)
    for inner in getattr(command, "commands", {}).values():
        spare(inner)


def _parameters(all_of: Callable[[Any], list[Any]], ctx: Any) -> list[Any]:
    """A command's, with --help, which it makes only then."""
    found = all_of(ctx)
    for parameter in found:
        if "process_value" not in vars(parameter):
            parameter.process_value = partial(_value, parameter, parameter.process_value)
    return found


def _value(parameter: Any, converted: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    """What Typer's ``process_value`` gives, which is ``converted``."""
    kind, several = parameter.type_descriptor, parameter.multiple or parameter.nargs == -1
    number = NUMBERS.get(kind.annotation)
    if number is not None and type(value) is str and number.fullmatch(value):
        value = kind.annotation(value)
    plain = value is None or (kind.annotation in PLAIN and type(value) is kind.annotation and _within(kind, value))
    if not plain or (parameter.required and value is None) or kind.parameter_info.parser is not None:
        return converted(ctx, value)
    value = () if several and value is None else value
    return value if parameter.callback is None else parameter.callback(ctx, parameter, value)


def _within(kind: Any, value: Any) -> bool:
    """Whether a number is within the option's range; Typer tells of one that is not."""
    least, most = kind.parameter_info.min, kind.parameter_info.max
    return (least is None or value >= least) and (most is None or value <= most)
