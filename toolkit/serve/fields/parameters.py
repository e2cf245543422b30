"""Fields of requests that are fields of GenerationConfig: their types, bounds and descriptions come from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel, Field, create_model

from toolkit.configs.generation import PARAMETERS

M = TypeVar("M", bound=BaseModel)


def parameter(name: str, **other: Any) -> Any:
    """The pydantic field of a parameter, null where it is left out; ``other``: what is otherwise here."""
    known = PARAMETERS[name]
    limits = {} if known.bounds is None else {"ge": known.bounds.low, "le": known.bounds.high}
    return Field(None, **{"description": known.help, **limits, **other})


def with_parameters(*names: str, **fields: Any) -> Callable[[type[M]], type[M]]:
    """Decorator of a request: it takes the parameters ``names``, and ``fields``, those that are otherwise here, by the
    names that users type."""

    made = {PARAMETERS[name].spelled: (PARAMETERS[name].type | None, parameter(name)) for name in names}
    return _with(made | {name: (PARAMETERS[name].type | None, field) for name, field in fields.items()})


def stepping_over(names: str) -> Callable[[type[M]], type[M]]:
    """Decorator of a request: it takes fields of these ``names``, whatever they hold, and does nothing about them."""
    return _with({name: (Any, Field(None, description="Without effect")) for name in names.split()})


def _with(fields: dict[str, Any]) -> Callable[[type[M]], type[M]]:
    """Decorator of a model: it has these fields too, type and default each."""

    def decorate(model: type[M]) -> type[M]:
        return create_model(
            model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields
        )

    return decorate


def given_parameters(request: BaseModel) -> dict[str, Any]:
    """What a request gives of all parameters, by the names that users type."""
    fields = type(request).model_fields
    names = (p.spelled for p in PARAMETERS.values() if p.spelled in fields)
    return {name: value for name in names if (value := getattr(request, name)) is not None}
