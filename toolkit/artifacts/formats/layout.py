"""What a weight format says about the tensors of one linear, so that one validator serves all formats."""

from __future__ import annotations

from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError

FLOATS = ("F16", "BF16", "F32")
WRITES_STACKS = ("mxfp4",)  # methods that write stacks of experts as they stand


@dataclass(frozen=True)
class Expected:
    """A tensor a format needs. ``also``: other shapes that will do."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    optional: bool = False
    also: tuple[tuple[int, ...], ...] = ()


def dense(name: str, shape: tuple[int, ...]) -> Expected:
    return Expected(name, shape, FLOATS)


def wrong(field: str, wanted: str, found: Any) -> ToolkitError:
    """For a field of ``quantization_config`` that is not what it has to be."""
    return ToolkitError(f"config.json: quantization_config.{field}: expected {wanted}, found {found!r:.60}")


def whole(quantization: dict[str, Any], field: str, allowed: tuple[int, ...] | None = None) -> int:
    """An integer field of ``quantization_config``. Raises ToolkitError that names it, if it is none or not allowed."""
    value = quantization.get(field)
    good = isinstance(value, int) and not isinstance(value, bool) and (allowed is None or value in allowed)
    if not good:
        what = f"one of {', '.join(map(str, allowed))}" if allowed else "a whole number"
        raise wrong(field, what, value)
    assert isinstance(value, int)
    return value


def group_size(quantization: dict[str, Any], name: str, in_features: int) -> int:
    """The group size of one linear (-1 in the config: the whole row). Raises ToolkitError if it does not divide."""
    size = whole(quantization, "group_size")
    if size == -1:
        return in_features
    if size < 1 or in_features % size:
        raise ToolkitError(
            f"config.json: quantization_config.group_size: {size} does not divide the {in_features} "
            f"input features of {name}"
        )
    return size
