"""Function calling: what a model may call, and the calls that stand in its answer.

Two ways of writing a call are read. Hermes and Qwen2.5: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any
number of them among text. Llama 3: an answer that is nothing but ``{"name": …, "parameters": {…}}``, several joined by
";". Which one a model writes follows from its chat template (``ChatTemplate.tool_format``).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any, Literal

ToolFormat = Literal["hermes", "llama3"]
OPEN, CLOSE, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
_ARGUMENTS = {"hermes": "arguments", "llama3": "parameters"}
_TYPES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean", "list": "array", "dict": "object"}
Call = dict[str, Any]


def forced_format(form: ToolFormat, functions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The response_format under which an answer is one call of one of ``functions`` (OpenAI's definitions)."""
    key = _ARGUMENTS[form]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": f["name"]}, key: _schema(f.get("parameters")) or {"type": "object"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for f in functions
    ]
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {"type": "json_schema", "json_schema": {"name": "call", "schema": schema}}


def _schema(node: Any) -> Any:
    """A JSON schema with the names that Python programmers give types in it put right."""
    if isinstance(node, list):
        return [_schema(x) for x in node]
    if not isinstance(node, dict):
        return node
    made = {k: _schema(v) for k, v in node.items()}
    kind = made.get("type")
    if isinstance(kind, str) and kind in _TYPES:
        made["type"] = _TYPES[kind]
    return made


class CallParser:
    """Takes an answer piece by piece; ``calls`` are those found so far.

    ``names``: the functions there are; ``forced``: the answer can only be calls; ``single``: the first call is handed
    on, others are dropped.
    """

    def __init__(self, form: ToolFormat, names: Sequence[str], forced: bool = False, single: bool = False) -> None:
        self.calls: list[Call] = []
        self._names = frozenset(names)
        self._single = single
        self._tagged = form == "hermes" and not forced
        self._held = ""
        self._plain = False  # untagged: the answer has turned out to be text

    def add(self, text: str) -> str:
        """What of the answer may be shown now; the rest is held back until it is clear what it is."""
        self._held += text
        return self._tags() if self._tagged else self._bare()

    def finish(self) -> str:
        """What was held back and is no call, at the end of the answer."""
        rest, self._held = self._held, ""
        if not self._tagged:
            found = [] if self._plain else _calls(rest, self._names)
        elif (inside := rest.lstrip()).startswith(OPEN):  # the closing tag may be a token that ended the answer
            found = _calls(inside.removeprefix(OPEN), self._names)
        else:
            found = []
        self._take(found)
        return "" if found or (self.calls and not rest.strip()) else rest

    def _take(self, calls: list[Call]) -> None:
        self.calls += calls
        if self._single:
            del self.calls[1:]

    def _bare(self) -> str:
        start = self._held.lstrip()
        if not self._plain and (not start or start[0] == "{" or PYTHON_TAG.startswith(start[: len(PYTHON_TAG)])):
            return ""
        self._plain, shown, self._held = True, self._held, ""
        return shown

    def _tags(self) -> str:
        shown = ""
        while (at := self._held.find(OPEN)) >= 0:
            before = self._held[:at].rstrip()
            end = self._held.find(CLOSE, at)
            if end < 0:
                self._held = self._held[len(before) :]
                return shown + before
            calls = _calls(self._held[at + len(OPEN) : end], self._names)
            self._take(calls)
            end += len(CLOSE)
            shown += before if calls else self._held[:end]
            self._held = self._held[end:]
        show = len(self._held) - _undecided(self._held)
        shown, self._held = shown + self._held[:show], self._held[show:]
        return shown


def _undecided(text: str) -> int:
    """How much of the end of ``text`` may belong to a call: white space, and the beginning of a tag."""
    tag = next((n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if OPEN.startswith(text[-n:])), 0)
    body = text[: len(text) - tag]
    return tag + len(body) - len(body.rstrip())


def _calls(text: str, names: frozenset[str]) -> list[Call]:
    """The calls that ``text`` consists of; empty where it is anything else."""
    text = text.strip().removeprefix(PYTHON_TAG).strip()
    found: list[Call] = []
    while text:
        try:
            data, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return []
        for each in data if isinstance(data, list) else [data]:  # some models put all their calls into one list
            name = each.get("name") if isinstance(each, dict) else None
            if not isinstance(name, str) or name not in names:
                return []
            arguments = each.get("arguments", each.get("parameters", {}))
            if not isinstance(arguments, dict):
                return []
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            found.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
        text = text[end:].lstrip(" \t\r\n;")
    return found
