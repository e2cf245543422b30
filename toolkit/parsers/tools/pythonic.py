"""Llama 4 and other models that call in Python: ``[weather(city="Paris"), now()]``, perhaps between
``<|python_start|>`` and ``<|python_end|>``; LFM2, whose marks are its own."""

from __future__ import annotations

import ast
import re

from toolkit.parsers import json_calls
from toolkit.parsers.formats import Call, Functions, ToolFormat, Written
from toolkit.parsers.json_calls import as_arguments, known

_LONGEST = 1 << 16  # characters that are read as Python
_JSON = {"true": True, "false": False, "null": None}
_MAY_BE = re.compile(r"\s*(?:\[\s*(?:[A-Za-z_][\w.]*\s*)?)?")
_IS = re.compile(r"\s*\[\s*(?:[A-Za-z_][\w.]*\s*\(|\{)")


def _bare(start: str) -> bool | None:
    if _IS.match(start):
        return True
    return None if _MAY_BE.fullmatch(start) else False


def _read(text: str, functions: Functions) -> list[Call]:
    if (found := json_calls.read(text, functions)) or len(text) > _LONGEST:
        return found
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        calls = tree.elts if isinstance(tree, ast.List) else [tree]
        found = [_call(call, functions) for call in calls]
    except (TypeError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    return found


def _call(call: ast.expr, functions: Functions) -> Call:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("no call by keywords")
    name = ast.unparse(call.func)
    values = {keyword.arg: ast.literal_eval(_AsPython().visit(keyword.value)) for keyword in call.keywords}
    arguments = None if None in values else as_arguments(values)
    if arguments is None or not known(name, functions):
        raise ValueError("no such call")
    return Call(name, arguments)


class _AsPython(ast.NodeTransformer):
    """Literals that models spell as JSON does."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON[node.id]) if node.id in _JSON else node


FORMAT = ToolFormat(
    name="pythonic",
    aliases=("llama4_pythonic", "llama4", "lfm2"),
    marks=(("<|python_start|>", "<|python_end|>"), ("<|tool_call_start|>", "<|tool_call_end|>")),
    read=_read,
    # Grammars know no Python: where a call is forced it is JSON, which is read too.
    written=Written('[{"name": "%s", "parameters": ', "}]", between=", ", trigger='[{"name": "'),
    signs=(("<|python_start|>",), ("func_name1(",), ("<|tool_list_start|>",)),
    bare=_bare,
    quoted=False,
)
