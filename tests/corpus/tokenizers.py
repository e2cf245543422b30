"""tokenizer.json files that take all memory or for ever: each is a change to a harmless one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

Definition = dict[str, Any]


def replace(old: str, new: str) -> Definition:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def split(pattern: str) -> Definition:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def refused(harmless: Definition) -> Iterator[tuple[str, Definition]]:
    """(what is wrong, a definition that is not to be opened)."""

    def changed(**parts: Any) -> Definition:
        return copy.deepcopy(harmless) | parts

    doubling = {"type": "Sequence", "normalizers": [replace("a", "aa")] * 40}
    yield "doubling normalizers", changed(normalizer=doubling)
    added: Definition = {
        "id": 0,
        "content": "a",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "special": False,
    }
    yield (
        "doubling normalizers of an added token",
        changed(normalizer=doubling, added_tokens=[added | {"normalized": True}]),
    )
    yield (
        "one long replacement twice",
        changed(normalizer={"type": "Sequence", "normalizers": [replace("a", "a" * 60_000)] * 3}),
    )
    decoders = [replace("a", "aa")] * 40
    yield "doubling decoders", changed(decoder={"type": "Sequence", "decoders": decoders})
    slow = {"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": ""}
    yield "a decoder's pattern", changed(decoder={"type": "Sequence", "decoders": [slow]})
    later = changed()
    later["normalizer"] = later.pop("normalizer") or doubling  # behind the model
    yield "doubling normalizers behind the model", later
    far = changed()
    if isinstance(far["model"]["vocab"], dict):
        far["model"]["vocab"]["zzzz"] = 4_000_000_000
        yield "a token id far away", far


def slow(harmless: Definition) -> Iterator[tuple[Definition, str]]:
    """(definition, a text that it cannot encode in time)."""
    for pattern, text in (
        ("(x+x+)+y", "x" * 200),
        ("(x|xx)+[yz]", "x" * 5000),
        ("x*x*y(?=w)", "x" * 4000 + "y"),  # each of its attempts is short of the library's own limit
        (r"(\p{L}+\s?)+\d", "word " * 500),
    ):
        yield copy.deepcopy(harmless) | {"pre_tokenizer": split(pattern)}, text
