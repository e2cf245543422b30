"""What in a tokenizer.json may take all memory or for ever, looked at before the tokenizers library opens it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.artifacts.json_file import read_json_object
from toolkit.artifacts.text.patterns import ENDINGS, ONES, THREES
from toolkit.errors import ToolkitError

MAX_GROWTH = 64  # times that normalizing may lengthen a text
MAX_STEPS = 64  # normalizers, pre-tokenizers and decoders
_UNBOUNDED = re.compile(r"[*+]|\{\d*,\}")
_ESCAPED = re.compile(rb"\\u00[4-7]")  # a letter, written so that it is not found
_OPENS = re.compile(rb"\s*:\s*[{\[]")
_SPELLED = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
# Patterns of widespread models, which take time in proportion to the text: any other may be made to take for ever.
KNOWN = frozenset(
    [
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
        THREES,
        ONES,
        THREES.replace(ENDINGS, _SPELLED),
        ONES.replace(ENDINGS, _SPELLED),
        r"\s+(?!\S)|\s+",
        r"\s?\p{L}+",
        r"\p{N}+",
        r"\s+",
        r"\d+",
    ]
)
_GROWS = {"NFKC": 18.0, "NFKD": 18.0, "NFD": 4.0, "NFC": 3.0, "Lowercase": 3.0, "BertNormalizer": 3.0, "ByteLevel": 2.0}


def read_parts(raw: bytes, file: Path) -> dict[str, Any]:
    """What ``file``, a tokenizer.json, holds, parsed; without its model, which is most of it, where that comes last as
    it usually does. Raises ToolkitError for what is no JSON object."""
    try:
        at = raw.find(b'"model"')
        if at > 0 and not _part_after(raw, at):
            data = json.loads(raw[:at].rstrip().rstrip(b",") + b"}")
            if isinstance(data, dict) and data.keys() >= {"normalizer", "pre_tokenizer", "decoder"}:
                return data
    except (ValueError, RecursionError):
        pass  # said below
    return read_json_object(file)


def _part_after(raw: bytes, at: int) -> bool:
    """Whether a part of the tokenizer stands behind ``at``, or one may: a letter of its name is written as an escape.
    Names are looked for first: an expression alone would try every string of the vocabulary."""
    for name in (b'"normalizer"', b'"pre_tokenizer"', b'"decoder"'):
        found = raw.find(name, at)
        while found >= 0:
            if _OPENS.match(raw, found + len(name)):
                return True
            found = raw.find(name, found + 1)
    return raw.find(b"\\u00", at) >= 0 and _ESCAPED.search(raw, at) is not None


def harmless(data: dict[str, Any], file: Path) -> bool:
    """Whether the normalizer and the pre-tokenizer of a parsed tokenizer.json take memory and time in proportion to
    the text. Raises ToolkitError for a decoder of which that is not known."""
    decoders = list(_steps(data.get("decoder")))
    if len(decoders) > MAX_STEPS or _growth(decoders) > MAX_GROWTH or not all(map(_linear, decoders)):
        raise ToolkitError(
            f"{file}: its decoder may lengthen text more than {MAX_GROWTH} times, or has a pattern that may take for "
            "ever; fetch the file from the original model"
        )
    steps = [*_steps(data.get("normalizer")), *_steps(data.get("pre_tokenizer"))]
    return len(steps) <= MAX_STEPS and _growth(steps) <= MAX_GROWTH and all(map(_linear, steps))


def check_ids(highest: int, count: int, file: Path) -> None:
    """Raise ToolkitError for token ids that lie far apart: tables go by them."""
    most = 2 * count + (1 << 16)
    if highest > most:
        raise ToolkitError(f"{file}: token id {highest} in a vocabulary of {count} tokens, expected at most {most}")


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """The members of a normalizer, pre-tokenizer or decoder, those of sequences one by one."""
    stack = [part]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            inner = [part[n] for n in ("normalizers", "pretokenizers", "decoders") if isinstance(part.get(n), list)]
            if inner:
                stack += [member for members in inner for member in members]
            else:
                yield part


def _growth(steps: list[dict[str, Any]]) -> float:
    grown = 1.0
    for step in steps:
        kind = step.get("type")
        if kind == "Precompiled":
            return float("inf")  # a table of its own
        if kind == "Replace":
            pattern = step.get("pattern")
            text = pattern.get("String", "") if isinstance(pattern, dict) else ""
            grown *= max(
                1.0, (len(str(step.get("content", "")).encode()) + (not text)) / max(1, len(str(text).encode()))
            )
        elif isinstance(kind, str):
            grown *= _GROWS.get(kind, 1.0)
    return grown


def _linear(step: dict[str, Any]) -> bool:
    pattern = step.get("pattern")
    text = pattern.get("Regex") if isinstance(pattern, dict) else None
    return not isinstance(text, str) or text in KNOWN or not _UNBOUNDED.search(text)
