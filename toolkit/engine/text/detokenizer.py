"""Token ids that arrive one by one -> text, as soon as it is certain.

Tokens are bytes (``Tokenizer.bytes_of``); a character may be split over several of them. An incremental UTF-8 decoder
holds an unfinished character back, so no U+FFFD ever appears that a later token would have turned into a character, and
the work per token does not depend on how many came before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from encodings import utf_8

from toolkit.artifacts.text.tokenizer import Tokenizer

_WINDOW = 16  # tokens after which unfinished text of a decoder that is not byte-exact is given out as it is


class Detokenizer:
    """The text that continues a prompt: ``decode(prompt + all) == decode(prompt) + every add() + flush()``.

    ``shown``: special tokens that stay though others are skipped. A sentencepiece blank at the very start of a text is
    dropped, one that continues ``prompt_ids`` is kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        shown: Sequence[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._exact = tokenizer.byte_exact
        self._bytes_of = tokenizer.bytes_of
        kept = {tokenizer.token_id(text) for text in shown}
        self._skip: set[int] = tokenizer.special_ids - kept if skip_special_tokens else set()
        self._skip_special_tokens = skip_special_tokens and not kept  # the rest is left out before
        self._utf8 = utf_8.IncrementalDecoder("replace")
        seen = (i for i in prompt_ids if i not in self._skip and tokenizer.bytes_of(i))
        self._strip = tokenizer.strips_leading_space and next(seen, None) is None
        self._context = [i for i in prompt_ids[-_WINDOW:] if i not in self._skip][-4:]  # a character is at most 4 bytes
        self._pending: list[int] = []
        if tokenizer.byte_exact:
            self._utf8.decode(b"".join(tokenizer.bytes_of(i) for i in self._context))

    def add(self, ids: Iterable[int]) -> str:
        """The text that became certain with these ids; may be empty."""
        if not self._exact:
            return self._add_window(ids)
        return self._emit(b"".join([self._bytes_of(i) for i in ids if i not in self._skip]), final=False)

    def add_one(self, token: int) -> str:
        """``add`` of a single id, as engines draw them."""
        if not self._exact:
            return self._add_window((token,))
        return "" if token in self._skip else self._emit(self._bytes_of(token), final=False)

    def flush(self) -> str:
        """What is still held back, an unfinished character as U+FFFD. The detokenizer is done then."""
        if not self._exact:
            return self._close_window()
        return self._emit(b"", final=True)

    def _emit(self, data: bytes, final: bool) -> str:
        whole = data.isascii() and not self._utf8.buffer  # no character is, or becomes, unfinished
        text = data.decode("ascii") if whole else self._utf8.decode(data, final)
        if self._strip and text:
            self._strip = False
            text = text.removeprefix(" ")
        return text

    def _add_window(self, ids: Iterable[int]) -> str:
        out = []
        for i in ids:
            if i in self._skip:
                continue
            self._pending.append(i)
            text = self._window_text()
            if text and (not text.endswith("\ufffd") or len(self._pending) >= _WINDOW):
                out.append(self._close_window())
        return "".join(out)

    def _window_text(self) -> str:
        before = self._tokenizer.decode(self._context, self._skip_special_tokens)
        both = self._tokenizer.decode([*self._context, *self._pending], self._skip_special_tokens)
        return both[len(before) :]

    def _close_window(self) -> str:
        text = self._window_text()
        self._context, self._pending = [*self._context, *self._pending][-4:], []
        return text
