"""Rendering of Jinja templates that nobody has vetted: a model's chat template is code from the internet.

The sandbox of Jinja keeps a template away from Python's internals. Here it is also kept from taking for ever or all
memory: loops and calls are counted and timed, strings, lists and numbers are bounded before they are made, and filters
that chat templates do not need are absent. The helpers are those that transformers gives to chat templates.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

MAX_SOURCE = 1 << 20  # characters of a template
MAX_TEXT = 1 << 24  # characters (or items) of anything a template makes
MAX_MADE = 1 << 28  # characters (or items) of all that one rendering makes
MAX_NUMBER = 1 << 20  # whole numbers handed to a function: widths, repetitions, ranges
MAX_STEPS = 1_000_000  # loop rounds and calls of one rendering
MAX_SECONDS = 1.0  # processor time of one rendering
FILTERS = (
    "abs attr batch capitalize count d default dictsort e escape first float format groupby indent int items join last "
    "length list lower map max min reject rejectattr replace reverse round safe select selectattr sort string "
    "title tojson trim unique upper wordcount"
).split()
UNSAFE_METHODS = frozenset("center encode expandtabs format_map ljust rjust translate zfill".split())  # of str


class TemplateRefusal(Exception):
    """The template itself called ``raise_exception``: it does not take these messages."""


class _LimitError(Exception):
    """The template asked for too much."""


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A Jinja environment with limits. One may render in several threads at once."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation], optimized=False
        )
        self._local = threading.local()
        filters: dict[str, Callable[..., Any]] = {name: self.filters[name] for name in FILTERS} | {"tojson": _tojson}
        self.filters = {name: self._guarded(fn) for name, fn in filters.items()}
        self.filters |= {_LIMITED: self._limited, _CONCAT: self._joined, _MADE: self._made}
        tests: dict[str, Any] = {**self.tests}
        self.tests = {name: self._guarded(fn) for name, fn in tests.items()}
        self.concat = self._joined  # type: ignore[method-assign]  # joins what macros and blocks write
        self.finalize = _printable
        self.globals = {name: self.globals[name] for name in ("range", "dict", "cycler", "joiner", "namespace")}
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """The text. Raises TemplateRefusal, or ValueError with one line that says what is wrong with the template."""
        self._local.steps, self._local.made, self._local.start = 0, 0, time.thread_time()
        pieces, size = [], 0
        try:
            for piece in template.generate(**variables):
                size += len(piece)
                if size > MAX_TEXT:
                    raise _LimitError("it writes too much text")
                pieces.append(piece)
        except TemplateRefusal:
            raise
        except RecursionError:
            raise ValueError("it calls itself without end") from None
        except (Exception, MemoryError) as e:
            raise ValueError(_one_line(e)) from e
        return "".join(pieces)

    def compile_source(self, source: str) -> jinja2.Template:
        """Raises ValueError with one line that says what is wrong."""
        if len(source) > MAX_SOURCE:
            raise ValueError(f"it is longer than {MAX_SOURCE} characters")
        try:
            return self.from_string(source)
        except jinja2.TemplateSyntaxError as e:
            raise ValueError(f"line {e.lineno}: {e.message}") from e
        except (Exception, MemoryError) as e:
            raise ValueError(_one_line(e)) from e

    # Hooks of Jinja -------------------------------------------------------------------------------------------------

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Instrument().visit(source), *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return not (isinstance(obj, str) and attr in UNSAFE_METHODS) and super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self._step()
        _check_arguments(__obj, args, kwargs)
        return __self._made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._step()
        _check_operation(operator, left, right)
        return self._made(super().call_binop(context, operator, left, right))

    # Limits ---------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        local = self._local
        local.steps += 1
        if local.steps > MAX_STEPS or time.thread_time() - local.start > MAX_SECONDS:
            raise _LimitError("it takes too long")

    def _made(self, value: Any) -> Any:
        """Pass a new value through, once its size is found to be within bounds."""
        if isinstance(value, str | list | tuple | dict):
            size = _size(value)
            self._local.made += size
            if size > MAX_TEXT or self._local.made > MAX_MADE:
                raise _LimitError("it makes too much text")
        return value

    def _limited(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._step()
            yield item

    def _joined(self, parts: Iterable[Any]) -> str:
        self._step()
        texts = [str(_printable(part)) for part in parts]
        if sum(map(len, texts)) > MAX_TEXT:
            raise _LimitError("it makes too much text")
        return self._made("".join(texts))

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        passes = hasattr(function, "jinja_pass_arg")  # the first argument is Jinja's context or environment

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self._step()
            _check_arguments(function, args[1:] if passes else args, kwargs)
            return self._made(function(*args, **kwargs))

        return guarded


_LIMITED = "__limited"
_CONCAT = "__concat"
_MADE = "__made"


class _Instrument(NodeTransformer):
    """Puts a counting filter around what every loop runs over, a bounded one in the place of ``~``, and one that weighs
    around every list, tuple and dict a template writes."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if not node.recursive:  # recursive loops come back through ``call``
            node.iter = _filter(node.iter, _LIMITED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), _CONCAT)

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _filter(node, _MADE)

    visit_Tuple = visit_List
    visit_Dict = visit_List


def _filter(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Generation(jinja2.ext.Extension):
    """``{% generation %} … {% endgeneration %}`` marks an answer for training; it changes nothing here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _check_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what would make a huge result, before it is made."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) > MAX_NUMBER:
            raise _LimitError(f"it asks for {value:.0f} of something")
    name = getattr(function, "__name__", "").removeprefix("do_")
    me = getattr(getattr(function, "__wrapped__", function), "__self__", None)
    operands = args if me is None or not isinstance(me, str) else (me, *args)
    if name == "replace" and len(operands) >= 3 and all(isinstance(o, str) for o in operands[:3]):
        text, old, new = operands[:3]
        if text.count(old) * len(new) > MAX_TEXT:
            raise _LimitError("it makes too much text")
    elif name == "join" and operands:
        longest = max((len(o) for o in operands if isinstance(o, str)), default=0)
        most = max((len(o) for o in operands if hasattr(o, "__len__")), default=0)
        if longest * most > MAX_TEXT and longest > 1024:
            raise _LimitError("it makes too much text")
    elif name == "indent" and operands:
        width = max((o if isinstance(o, int) else len(str(o)) for o in (*operands[1:], *kwargs.values())), default=4)
        if str(operands[0]).count("\n") * width > MAX_TEXT:
            raise _LimitError("it makes too much text")
    elif name in ("format", "format_map") and operands:
        _check_format(str(operands[0]))


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        if len(left) + len(right) > MAX_TEXT:
            raise _LimitError("it makes too much text")
    elif operator == "*":
        sized, times = (left, right) if hasattr(left, "__len__") else (right, left)
        if hasattr(sized, "__len__"):
            if isinstance(times, int) and len(sized) * times > MAX_TEXT:
                raise _LimitError("it makes too much text")
        elif abs(left) * abs(right) > 1 << 128:
            raise _LimitError("it makes too large a number")
    elif operator == "**" and (abs(left) > MAX_NUMBER or abs(right) > 64):
        raise _LimitError("it makes too large a number")
    elif operator == "%" and isinstance(left, str):
        _check_format(left)
        _check_arguments(None, right if isinstance(right, tuple) else (right,), {})


def _check_format(form: str) -> None:
    if re.search(r"\d{6}", form):
        raise _LimitError("it formats text over too many columns")


def _size(value: Any) -> int:
    """Characters and items in a value, all that it holds included; stops counting past the limit."""
    size, stack = 0, [value]
    while stack and size <= MAX_TEXT:
        item = stack.pop()
        size += 1
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, list | tuple):
            size += len(item)
            stack.extend(item[:MAX_NUMBER])
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, jinja2.utils.Namespace):
            raise _LimitError("it puts a namespace into a list")
    return size


def _printable(value: Any) -> Any:
    """What is about to be written: a namespace may hold itself many times over."""
    if isinstance(value, jinja2.utils.Namespace):
        raise _LimitError("it writes a namespace")
    return value


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers' filter writes it: no HTML escapes."""
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, check_circular=True
    )
    pieces, size = [], 0
    for piece in encoder.iterencode(value):
        size += len(piece)
        if size > MAX_TEXT:
            raise _LimitError("it makes too much text")
        pieces.append(piece)
    return "".join(pieces)


def _refuse(message: object) -> None:
    raise TemplateRefusal(_one_line(message))


def _one_line(what: object) -> str:
    text = " ".join(str(what).split())[:300]
    return text or type(what).__name__
