"""What every body that clients send is built on: no field is unknown, no value is bent to fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, get_args

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field


class Strict(BaseModel):
    # deferred: what checks a body is made when the first one comes, of which a server is sent few of many kinds
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, populate_by_name=True, defer_build=True)


ModelName = Annotated[
    str,
    BeforeValidator(lambda name: "" if name is None else name, json_schema_input_type=str | None),
    Field(description="Default: the model that is served, of several the first"),
]
"""A request's ``model``: "" where it says nothing, which ``requests.parse`` fills in."""


def fields_at(model: type[BaseModel], place: Sequence[str | int]) -> list[str]:
    """The fields that may stand where ``place``, as pydantic names one, ends in a body of ``model``."""
    models = [model]
    for part in place[:-1]:
        inner = [one for at in models for name, field in at.model_fields.items() if part in _names(name, field)
                 for one in _models_in(field.annotation)]  # fmt: skip
        models = inner or [one for one in models if one.__name__ == part] or models
    return [name for at in models for own, field in at.model_fields.items() for name in _names(own, field)]


def _names(own: str, field: Any) -> tuple[str, ...]:
    """What clients may call a field."""
    alias = field.validation_alias
    choices = alias.choices if isinstance(alias, AliasChoices) else (alias,) if isinstance(alias, str) else (own,)
    return tuple(str(name) for name in choices)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)
