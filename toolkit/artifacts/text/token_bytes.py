"""Which bytes of text a token stands for, worked out from a tokenizer's decoder.

The decoders of today's language models are all byte-exact: the text of a sequence is the concatenation of its tokens'
bytes, read as UTF-8, at most without one leading blank. Two kinds cover them: *ByteLevel* (GPT-2's table from bytes to
printable characters) and *sentencepiece* (``▁`` for a blank, ``<0xNN>`` for a byte that is no character).
"""

from __future__ import annotations

import json
import re
from typing import Any

from toolkit.base.lazy_dataclass import dataclass

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_table() -> dict[str, int]:
    """Character -> byte of ByteLevel tokenizers. Source: GPT-2's ``bytes_to_unicode``."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    rest = (b for b in range(256) if b not in set(printable))
    return table | {chr(256 + i): b for i, b in enumerate(rest)}


@dataclass(frozen=True)
class ByteRule:
    """How a token's string becomes bytes. ``strip``: the text as a whole loses one leading blank."""

    byte_level: dict[str, int] | None
    byte_fallback: bool
    replace: tuple[tuple[str, str], ...]
    strip: bool

    def token(self, text: str, *, added: bool) -> bytes:
        """The bytes of the token spelled ``text`` in the vocabulary; ``added``: an added token stands for itself."""
        if self.byte_level is not None:
            if added:
                return text.encode()
            try:
                return bytes(self.byte_level[c] for c in text)
            except KeyError:  # not written in the table's alphabet: it stands for itself
                return text.encode()
        for old, new in self.replace:
            text = text.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        return text.encode()


def byte_rule(decoder: Any) -> ByteRule | None:
    """The rule of a ``tokenizers`` decoder, or None where it is not byte-exact (WordPiece, CTC, none at all …)."""
    if decoder is None:
        return None
    state = json.loads(decoder.__getstate__())
    parts = state["decoders"] if state["type"] == "Sequence" else [state]
    byte_level, fallback, strip, fused = False, False, False, False
    replace: list[tuple[str, str]] = []
    for part in parts:
        kind = part["type"]
        if kind == "ByteLevel":
            byte_level = True
        elif kind == "ByteFallback":
            fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Replace" and "String" in part["pattern"]:
            replace.append((part["pattern"]["String"], part["content"]))
        elif kind == "Metaspace":
            replace.append((part["replacement"], " "))
            strip = part.get("prepend_scheme", "always") != "never"
        elif kind == "Strip" and fused and (part["content"], part["start"], part["stop"]) == (" ", 1, 0):
            strip = True
        else:
            return None
    if not (byte_level or replace):
        return None
    return ByteRule(byte_level_table() if byte_level else None, fallback, tuple(replace), strip)
