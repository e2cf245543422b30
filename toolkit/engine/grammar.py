"""Constrained output: a ``response_format`` becomes a bitmask of the tokens that may come next (by xgrammar).

{"type": "json_object"}
{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}     (or the schema itself under "json_schema")
{"type": "regex_schema", "regex_schema": "…"}
{"type": "grammar", "grammar": "root ::= …"}                            (EBNF)
{"type": "choice", "choice": ["yes", "no"]}
{"type": "text"}                                                        (no constraint)
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.artifacts.tokenizer import Tokenizer

TYPES = ("text", "json_object", "json_schema", "regex_schema", "grammar", "choice")
_KEPT = 64  # compiled grammars
_PLACE = re.compile(r"\[[\d:]+\] \S+:\d+: ")  # "[12:34:56] /project/cpp/file.cc:83: " before xgrammar's own words
_MAX_TEXT = 1 << 18  # characters of a schema, regex or grammar


def check_format(response_format: Any) -> None:
    """Raise UsageError unless ``response_format`` has a known type and its field. The content is checked later."""
    if not isinstance(response_format, dict) or response_format.get("type") not in TYPES:
        found = response_format.get("type") if isinstance(response_format, dict) else response_format
        raise UsageError(f"response_format: expected a type among {', '.join(TYPES)}, found {found!r:.60}")
    kind = response_format["type"]
    if kind in ("text", "json_object"):
        return
    value = response_format.get(kind)
    good = {
        "json_schema": isinstance(value, dict),
        "regex_schema": isinstance(value, str) and bool(value),
        "grammar": isinstance(value, str) and bool(value),
        "choice": isinstance(value, list) and bool(value) and all(isinstance(c, str) and c for c in value),
    }[kind]
    try:
        json.dumps(value, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as e:
        raise UsageError(f"response_format: field {kind!r}: expected plain JSON values ({e})") from e
    if not good:
        wanted = {"json_schema": "an object", "choice": "a list of non-empty strings"}.get(kind, "a non-empty string")
        raise UsageError(f"response_format: field {kind!r}: expected {wanted}, found {value!r:.60}")


class Grammars:
    """Compiled grammars over one vocabulary; ``vocab_size`` is the model's, which may exceed the tokenizer's."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        import xgrammar

        special = tokenizer.special_ids
        self._vocab_size = vocab_size
        vocabulary = [b"" if i in special else b for i, b in enumerate(tokenizer.token_bytes[:vocab_size])]
        self._eos = [i for i in tokenizer.eos_ids if i < vocab_size]
        info = xgrammar.TokenizerInfo(vocabulary, vocab_size=vocab_size, stop_token_ids=self._eos or None)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()  # over it: grammars are compiled in several threads

    def has(self, response_format: dict[str, Any]) -> bool:
        """Whether ``state`` finds it compiled."""
        return _key(response_format) in self._compiled

    def state(self, response_format: dict[str, Any], stop_token_ids: list[int]) -> GrammarState:
        """A matcher at the start of the grammar; it allows the stop ids (else eos) where the grammar may end.

        Raises UsageError, one line, for a schema, regex or grammar that does not compile.
        """
        import xgrammar

        check_format(response_format)
        key = _key(response_format)
        if len(key) > _MAX_TEXT:
            raise UsageError(f"response_format: {len(key)} characters, expected at most {_MAX_TEXT}")
        compiled = self._compiled.get(key)
        if compiled is None:
            try:
                compiled = self._compile(response_format)
            except Exception as e:
                reason = _PLACE.sub("", " ".join(str(e).split()))
                raise UsageError(f"response_format: the {response_format['type']} is not valid: {reason:.300}") from e
            if not self._allows_something(compiled):
                raise UsageError(f"response_format: the {response_format['type']} allows no text at all")
        with self._lock:
            self._compiled[key] = compiled
            self._compiled.move_to_end(key)
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        stops = stop_token_ids or self._eos
        matcher = xgrammar.GrammarMatcher(
            compiled, override_stop_tokens=stops or None, terminate_without_stop_token=not stops
        )
        return GrammarState(matcher, frozenset(stops))

    def _allows_something(self, compiled: Any) -> bool:
        """Whether there is a first token: {"$ref": "#"}, say, compiles but never comes to one."""
        import xgrammar

        mask = np.zeros((1, -(-self._vocab_size // 32)), np.int32)
        xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(mask, 0)
        return bool(mask.any())

    def _compile(self, response_format: dict[str, Any]) -> Any:
        kind = response_format["type"]
        if kind == "json_object":
            return self._compiler.compile_json_schema('{"type": "object"}')
        value = response_format[kind]
        if kind == "json_schema":
            schema = value.get("schema", value) if "schema" in value or "name" in value else value
            return self._compiler.compile_json_schema(json.dumps(schema))
        if kind == "regex_schema":
            return self._compiler.compile_regex(value)
        if kind == "choice":
            choices = " | ".join(json.dumps(c, ensure_ascii=False) for c in value)
            return self._compiler.compile_grammar(f"root ::= {choices}")
        return self._compiler.compile_grammar(value)


def _key(response_format: dict[str, Any]) -> str:
    return json.dumps(response_format, sort_keys=True)


class GrammarState:
    """How far one request's output has got in its grammar. ``stops``: tokens that may end it, no part of it."""

    def __init__(self, matcher: Any, stops: frozenset[int]) -> None:
        self._matcher = matcher
        self.stops = stops

    def fill(self, mask: NDArray[np.int32], row: int) -> None:
        """Write the tokens that may come next into ``mask[row]``, one bit a token."""
        self._matcher.fill_next_token_bitmask(mask, row)

    def accept(self, token: int) -> bool:
        """Take a generated token; True once the output is complete."""
        accepted = self._matcher.accept_token(token)
        return not accepted or self._matcher.is_terminated()
