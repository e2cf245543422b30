"""A Jinja environment for chat templates that keeps them away from Python's internals.

The helpers are those that transformers gives to chat templates; filters that chat templates do not need are absent.
Time and memory are not bounded here: a template that is not ours is rendered in a process of its own
(``renderer.py``), where both are.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from toolkit.chat.refusal import TemplateRefusal

MAX_SOURCE = 1 << 20  # characters of a template
MAX_TEXT = 1 << 24  # characters that one rendering writes
FILTERS = (
    "abs attr batch capitalize count d default dictsort e escape first float format groupby indent int items join last "
    "length list lower map max min reject rejectattr replace reverse round safe select selectattr sort string "
    "title tojson trim unique upper wordcount"
).split()
_KEPT = 8  # compiled templates


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Compiles and renders templates, the last few of which it keeps."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation], optimized=False
        )
        self.filters = {name: self.filters[name] for name in FILTERS} | {"tojson": _tojson}
        self.globals = {name: self.globals[name] for name in ("range", "dict", "cycler", "joiner", "namespace")}
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._compiled: OrderedDict[str, jinja2.Template] = OrderedDict()

    def check(self, source: str) -> None:
        """Raise ValueError with one line that says what is wrong with a template."""
        self._template_of(source)

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """The text. Raises TemplateRefusal, or ValueError with one line that says what is wrong with the template."""
        template = self._template_of(source)
        pieces, size = [], 0
        try:
            for piece in template.generate(**variables):
                size += len(piece)
                if size > MAX_TEXT:
                    raise ValueError(f"it writes more than {MAX_TEXT} characters")
                pieces.append(piece)
        except (TemplateRefusal, MemoryError):
            raise
        except RecursionError:
            raise ValueError("it calls itself without end") from None
        except Exception as e:
            raise ValueError(_one_line(e)) from e
        return "".join(pieces)

    def _template_of(self, source: str) -> jinja2.Template:
        found = self._compiled.get(source)
        if found is None:
            if len(source) > MAX_SOURCE:
                raise ValueError(f"it is longer than {MAX_SOURCE} characters")
            try:
                found = self._compiled[source] = self.from_string(source)
            except jinja2.TemplateSyntaxError as e:
                raise ValueError(f"line {e.lineno}: {_one_line(e.message)}") from e
            except Exception as e:  # RecursionError, SyntaxError of the code that Jinja makes …
                raise ValueError(_one_line(e)) from e
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return found


class _Generation(jinja2.ext.Extension):
    """``{% generation %} … {% endgeneration %}`` marks an answer for training; it changes nothing here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers' filter writes it: no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: object) -> None:
    raise TemplateRefusal(_one_line(message))


def _one_line(what: object) -> str:
    text = " ".join(str(what).split())[:300]
    return text or type(what).__name__
