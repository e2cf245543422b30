"""Pages of lists, as OpenAI has them: what a query asks for, and the part of a list that it gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import Request

from toolkit.configs.checks import shown
from toolkit.serve.http.errors import bad_field
from toolkit.serve.model_cards import listed

T = TypeVar("T")
ORDERS = ("asc", "desc")
ORDER = {"type": "string", "enum": list(ORDERS), "default": "desc"}


def parameters(most: int, default: int, **more: dict[str, Any]) -> dict[str, Any]:
    """A route's ``openapi_extra``: after, limit, and ``more`` by name and schema."""
    schemas = {
        "after": {"type": "string"},
        "limit": {"type": "integer", "minimum": 1, "maximum": most, "default": default},
        **more,
    }
    told = [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in schemas.items()]
    return {"parameters": told}


def limit_of(raw: Request, most: int, default: int) -> int:
    """How many things are asked for. Raises ApiError (400)."""
    given = raw.query_params.get("limit", str(default))
    count = int(given[:10]) if given.isascii() and given.isdecimal() else 0  # ten digits are too many already
    if not 1 <= count <= most:
        raise bad_field("limit", f"expected 1 to {most}, found {shown(given)}")
    return count


def in_order(raw: Request, items: list[T]) -> list[T]:
    """``items``, of which the oldest is first, as they are asked for. Raises ApiError (400)."""
    order = raw.query_params.get("order", "desc")
    if order not in ORDERS:
        raise bad_field("order", f"expected {' or '.join(ORDERS)}, found {shown(order)}")
    return items[::-1] if order == "desc" else items


def page(items: Sequence[dict[str, Any]], after: str | None, limit: int) -> dict[str, Any]:
    """At most ``limit`` of ``items``, behind the one whose id is ``after``. Raises ApiError (400) if there is none."""
    start = 0
    if after is not None:
        start = 1 + next((i for i, item in enumerate(items) if item["id"] == after), len(items))
        if start > len(items):
            raise bad_field("after", f"expected an id of this list, found {shown(after)}")
    return listed(items[start : start + limit], more=start + limit < len(items))
