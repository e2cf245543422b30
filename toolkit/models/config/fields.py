"""Typed, validating access to a checkpoint's ``config.json``.

Every value a family reads goes through ``Fields``, so that a wrong one ends in one line that names the file, the
field, what was found and what was expected. ``null`` counts as absent, as it does in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from toolkit.errors import ToolkitError
from toolkit.models.spec.parts import Activation

MAX_LAYERS = 1000
MAX_WIDTH = 1_000_000
MAX_VOCAB = 10_000_000
MAX_POSITION = 1 << 30
MAX_EXPERTS = 1024
MAX_EXPERTS_IN_ALL = 100_000

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}

# What torch calls the floating-point types that a checkpoint may name as its own.
DTYPES = ("float32", "float", "float16", "half", "bfloat16", "float64", "double", "float8_e4m3fn", "float8_e5m2")

_REQUIRED: Any = object()


class Fields:
    """One JSON object of a config. ``source`` names the file, ``prefix`` the path to a nested object."""

    def __init__(self, values: Mapping[str, Any], source: str = "config.json", prefix: str = "") -> None:
        self.values = values
        self.source = source
        self.prefix = prefix

    def fail(self, name: str, found: object, expected: str) -> NoReturn:
        """Raise the one-line error about field ``name``."""
        shown = "nothing" if found is None else _short(found)
        raise ToolkitError(f"{self.source}: {self.prefix}{name}: found {shown}, expected {expected}")

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, *names: str, default: Any = _REQUIRED, low: int = 1, high: int = MAX_WIDTH) -> Any:
        """The first of ``names`` that is present, as int in [low, high]; else ``default``."""
        name, value = self._first(names)
        expected = f"an integer from {low} to {high}"
        if value is None:
            return self._default(names[0], default, expected)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(name, value, expected)
        return value

    def number(self, *names: str, default: Any = _REQUIRED, low: float = 0.0, high: float = 1e12) -> Any:
        """The first of ``names`` that is present, as finite float strictly above ``low``, at most ``high``."""
        name, value = self._first(names)
        expected = f"a number above {low:g} and at most {high:g}"
        if value is None:
            return self._default(names[0], default, expected)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high:
            self.fail(name, value, expected)
        return float(value)

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of exactly ``length`` positive finite numbers."""
        value = self.values.get(name)
        expected = f"a list of {length} positive numbers"
        if not isinstance(value, list):
            self.fail(name, value, expected)
        if len(value) != length:
            self.fail(name, f"{len(value)} values", expected)
        for x in value:
            if isinstance(x, bool) or not isinstance(x, (int, float)) or not 0 < x < 1e12:
                self.fail(name, x, expected)
        return tuple(float(x) for x in value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(name, value, "true or false")
        return value

    def only(self, why: str = ", as in all released models", **values: bool) -> None:
        """Raise the one-line error, which ends with ``why``, for a flag of ``values`` that says otherwise; absent it
        says so."""
        for name, value in values.items():
            if self.flag(name, value) != value:
                self.fail(name, not value, f"{str(value).lower()}{why}")

    def text(self, *names: str, default: str, choices: Sequence[str]) -> str:
        name, value = self._first(names)
        if value is None:
            return default
        if not isinstance(value, str) or value not in choices:
            self.fail(name, value, f"one of {', '.join(choices)}")
        return value

    def activation(self, *names: str, default: str = "silu") -> Activation:
        return ACTIVATIONS[self.text(*names, default=default, choices=tuple(ACTIVATIONS))]

    def choices(self, name: str, length: int, allowed: Sequence[str]) -> list[str] | None:
        """A list of ``length`` strings out of ``allowed``; None where the field is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != length:
            found = f"a list of {len(value)}" if isinstance(value, list) else value
            self.fail(name, found, f"a list of {length} layer types")
        for x in value:
            if not isinstance(x, str) or x not in allowed:
                self.fail(name, x, f"one of {', '.join(allowed)}")
        return list(value)

    def indices(self, name: str, stop: int) -> frozenset[int]:
        """A list of integers in [0, stop); empty where absent."""
        value = self.values.get(name)
        if value is None:
            return frozenset()
        expected = f"a list of layer numbers below {stop}"
        if not isinstance(value, list):
            self.fail(name, value, expected)
        for x in value:
            if isinstance(x, bool) or not isinstance(x, int) or not 0 <= x < stop:
                self.fail(name, x, expected)
        return frozenset(value)

    def nested(self, name: str) -> Fields | None:
        """The JSON object under ``name``; None where absent or empty."""
        value = self.values.get(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            self.fail(name, value, "a JSON object")
        return Fields(value, self.source, f"{self.prefix}{name}.")

    def inner(self, name: str) -> Fields:
        """The JSON object under ``name``, an empty one where that is absent."""
        return self.nested(name) or Fields({}, self.source, f"{self.prefix}{name}.")

    def over(self, name: str, absent: Mapping[str, Any]) -> Fields:
        """The JSON object under ``name`` with the values of ``absent`` where it has none; null counts as none."""
        return self.inner(name).filled(absent)

    def changed(self, values: Mapping[str, Any]) -> Fields:
        """This object with ``values`` in the place of its own."""
        return Fields({**self.values, **values}, self.source, self.prefix)

    def filled(self, absent: Mapping[str, Any]) -> Fields:
        """This object with the values of ``absent`` where it has none; null counts as none."""
        given = {key: value for key, value in self.values.items() if value is not None}
        return Fields({**absent, **given}, self.source, self.prefix)

    def _first(self, names: Sequence[str]) -> tuple[str, Any]:
        for name in names:
            if self.has(name):
                return name, self.values[name]
        return names[0], None

    def _default(self, name: str, default: Any, expected: str) -> Any:
        if default is _REQUIRED:
            self.fail(name, None, expected)
        return default


def check_dtype(config: Fields) -> None:
    """``dtype`` (or ``torch_dtype``): no runner goes by it, but a name that torch lacks means a broken file."""
    for name in ("dtype", "torch_dtype"):
        config.text(name, default="", choices=DTYPES)


def check_token_ids(config: Fields, vocab: int) -> None:
    """Special tokens must be in the vocabulary: an end that cannot be generated would never come.

    bos and pad may be -1, which older files write for "none". Nothing is padded here, so that a pad may be any number:
    what transformers saves of a SmolVLM has Idefics 3's, far beyond its own vocabulary.
    """
    for name, low, stop in (("bos_token_id", -1, vocab), ("eos_token_id", 0, vocab), ("pad_token_id", -1, MAX_VOCAB)):
        value = config.values.get(name)
        if value is None:
            continue
        for one in value if isinstance(value, list) and name == "eos_token_id" else [value]:
            if isinstance(one, bool) or not isinstance(one, int) or not low <= one < stop:
                config.fail(name, one, f"a token id below vocab_size ({vocab})")


def _short(value: object) -> str:
    """``value`` for an error message: one line, at most about 60 characters."""
    try:
        shown = value if isinstance(value, str) else repr(value)
    except ValueError:  # an integer of thousands of digits refuses to print
        shown = "a huge integer"
    shown = repr(shown) if isinstance(value, str) and not shown.isprintable() else shown
    return shown if len(shown) <= 60 else shown[:57] + "..."
