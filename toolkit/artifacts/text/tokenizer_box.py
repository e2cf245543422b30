"""Encoding by a tokenizer that may take all memory or for ever, in a box."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from toolkit.box.box import Box, LimitError, Limits

LIMITS = Limits(memory=3 << 30, cpu_seconds=10.0)
_MOST_OF_A_LETTER = 4096  # tokens


class BoxedEncoder:
    """``encode`` of a tokenizer.json given as bytes. Thread-safe."""

    def __init__(self, definition: bytes) -> None:
        self._box = Box("toolkit.artifacts.text.tokenizer_box:encoding", LIMITS, None, definition)

    def encode(self, text: str) -> list[int]:
        """Token ids, special tokens not added. Raises ValueError with one line where it cannot be."""
        try:
            _, data = self._box.run(None, text.encode())
        except LimitError as e:
            raise ValueError(str(e)) from e
        return array("I", data).tolist()

    def try_out(self) -> None:
        """Raise ValueError, one line, where one letter is too much for it."""
        if (count := len(self.encode("a"))) > _MOST_OF_A_LETTER:
            raise ValueError(f"it makes {count} tokens of one letter")


def encoding(setup: None, data: bytes) -> Callable[[None, bytes], tuple[None, bytes]]:
    """The box's job: UTF-8 text -> token ids, 4 bytes each."""
    import tokenizers

    backend = tokenizers.Tokenizer.from_buffer(data)
    with suppress(Exception):
        backend.no_padding()
        backend.no_truncation()

    def run(value: Any, text: bytes) -> tuple[None, bytes]:
        try:
            ids = backend.encode(text.decode(), add_special_tokens=False).ids
        except BaseException as e:  # a panic of Rust is no Exception
            raise ValueError(" ".join(str(e).split())[:300] or type(e).__name__) from None
        return None, array("I", ids).tobytes()

    return run
