"""Compiling a grammar, and trying it out, inside a box: see ``grammar.py``, which asks for it."""

from __future__ import annotations

import json
import random
import re
import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from toolkit.engine.constraints.grammar_cost import COUNTED, LENGTHS, given_seconds, long_texts, schema_of
from toolkit.engine.constraints.grammar_pace import Pace
from toolkit.engine.constraints.grammar_place import told, words
from toolkit.engine.constraints.xgrammar_core import ANY_ORDER, CORE, STYLE, vocabulary

_WALKS, _TOKENS = 2, 48  # texts that are tried, tokens of each
_CACHE = 64 << 20  # bytes of parts that schemas have in common
_AGAIN_BYTES = 64 << 20  # memory of what may be compiled once more
_STACK = 1 << 20  # half of what a thread has at the least: what fits here has room wherever it is compiled again

_NOT_KEPT = "per_rule_fsm_hashes"  # of the message with which it fails
_LONGEST = 1 << 16  # letters of a text that no limit of time is needed for
PREPARED = 16  # lengths beyond COUNTED that are compiled before the fork: nothing ends that, so no client may go on so
_COUNTS = re.compile(r'"m(?:ax|in)Length": \d')

T = TypeVar("T")


class Compilers:
    """xgrammar's over one vocabulary, with a cache and without."""

    def __init__(self, info: Any) -> None:
        self._made = {kept: CORE.GrammarCompiler(info, 1, kept, _CACHE if kept else -1) for kept in (False, True)}
        self._prepared: set[tuple[int, ...]] = set()

    def prepare(self, response_format: dict[str, Any], seconds: float) -> None:
        """Texts of one length are the same for all schemas, and most of what those cost: have them in the cache. Beyond
        ``COUNTED`` only the first lengths that come, and in runs with all their time; later ones go by its limit."""
        if response_format["type"] == "json_schema" and _COUNTS.search(json.dumps(response_format)):
            honest = [(a, b) for a, b in sorted(long_texts(response_format)) if 0 <= a <= COUNTED < b <= _LONGEST]
            new = [pair for pair in honest[:LENGTHS] if pair not in self._prepared]
            new = new[: PREPARED - len(self._prepared)] if seconds >= given_seconds(response_format) else []
            self._prepared.update(new)
            for least, most in [(0, COUNTED), *new]:
                counted = {"type": "string", "minLength": least, "maxLength": most}
                compile_format(self._made[True], {"type": "json_schema", "json_schema": {"schema": counted}})

    def compile(self, response_format: dict[str, Any]) -> Any:
        """``compile_format``, with the cache but for structural tags, whose rules that ask for tokens by id would be
        taken for one another. xgrammar cannot keep patterns that count beyond 128, and fails: these compile without."""
        if response_format["type"] != "structural_tag":
            try:
                return compile_format(self._made[True], response_format)
            except RuntimeError as e:
                if _NOT_KEPT not in str(e):
                    raise
        return compile_format(self._made[False], response_format)


class Compiling:
    """The box's job. ``setup``: the "lengths" of the tokens whose bytes are ``data``, the vocabulary's "size", "stops".

    It takes a response_format and gives True, for it to be compiled again; or False and the compiled grammar as bytes
    where it takes much memory. As bytes a grammar holds all of itself once for each of its rules: six texts of long
    lengths took 12 s to compile, 24 s to write (252 MiB), and 8 s to read. Raises ValueError, one line, for one that is
    not valid, allows no text, or takes too long to follow.
    """

    def __init__(self, setup: dict[str, Any], data: bytes) -> None:
        self._setup = setup
        self._tokens = [data[a:b] for a, b in pairwise(accumulate(setup["lengths"], initial=0))]
        self._compilers = Compilers(vocabulary(self._tokens, setup["size"], setup["stops"]))
        self.prepare = self._compilers.prepare  # before the fork

    def __call__(self, response_format: dict[str, Any], data: bytes) -> tuple[bool, bytes]:
        size = _most_bytes()
        try:
            compiled = _with_small_stack(lambda: self._compilers.compile(response_format))
            size = _most_bytes() - size
            for seed in range(_WALKS):
                _try_out(compiled, self._setup, self._tokens, random.Random(seed))
            if size <= _AGAIN_BYTES:
                return True, b""
            return False, str(compiled.serialize_json()).encode()
        except RuntimeError as e:
            if "bad_alloc" in str(e):
                raise MemoryError from None
            if response_format["type"] == "json_schema":
                raise ValueError(told(schema_of(response_format), e)) from e
            raise ValueError(f"is not valid: {words(e):.300}") from e


def _with_small_stack(function: Callable[[], T]) -> T:
    """What ``function`` gives in a thread of its own; one that nests too deep ends the process."""
    before = threading.stack_size(_STACK)
    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(function).result()
    finally:
        threading.stack_size(before)


def _most_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def compile_format(compiler: Any, response_format: dict[str, Any]) -> Any:
    """xgrammar's grammar of a checked ``response_format``. Raises what the library raises."""
    kind = response_format["type"]
    value: Any = response_format.get(kind)
    if kind == "json_object":
        return _compile_schema(compiler, {"type": "object"})
    if kind == "json_schema":
        return _compile_schema(compiler, schema_of(response_format))
    if kind == "structural_tag":
        return compiler.compile_structural_tag(json.dumps(value))
    if kind == "regex_schema":
        return compiler.compile_regex(value)
    if kind == "choice":
        value = "root ::= " + " | ".join(json.dumps(c, ensure_ascii=False) for c in value)
    return compiler.compile_grammar_from_strings(value, "root")


def _compile_schema(compiler: Any, schema: Any) -> Any:
    return compiler.compile_json_schema(json.dumps(schema), *STYLE, ANY_ORDER)


def _try_out(compiled: Any, setup: dict[str, Any], tokens: list[bytes], choose: random.Random) -> None:
    """Write a text by the grammar, as long as it goes, of long tokens. Raises ValueError where it cannot begin, comes
    to where it can neither go on nor end, or takes longer than the engine would wait."""
    stops = setup["stops"]
    matcher = CORE.GrammarMatcher(compiled, stops or None, not stops, -1, None)
    pace = Pace()
    allowed, _ = _allowed(matcher, setup, len(tokens), pace)
    if not len(allowed):
        raise ValueError("allows no text at all")
    for _ in range(_TOKENS):
        pace.next_token()
        some = sorted(set(choose.choices(allowed.tolist(), k=8)), key=lambda i: (-len(tokens[i]), i))
        for token in some:  # the first after which the text may go on
            with pace:
                matcher.accept_token(token, False)
            allowed, ends = _allowed(matcher, setup, len(tokens), pace)
            if pace.lost:
                raise ValueError("takes too long to follow: the same text can be read by it in too many ways")
            if len(allowed):
                break
            if not ends:
                raise ValueError("leads to where no text goes on: a part of it can never be fulfilled")
            matcher.rollback(1)
        else:
            return


def _allowed(matcher: Any, setup: dict[str, Any], known: int, pace: Pace) -> tuple[NDArray[np.intp], bool]:
    """Tokens that may come next and are no end, and whether the text may end."""
    if matcher.is_terminated():
        return np.zeros(0, np.intp), True
    mask = np.zeros((1, -(-setup["size"] // 32)), np.int32)
    with pace:
        matcher.fill_next_token_bitmask(mask, 0, False)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:known]
    stops = [i for i in setup["stops"] if i < known]
    ends = bool(bits[stops].any())
    bits[stops] = 0
    return np.flatnonzero(bits), ends
