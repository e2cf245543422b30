"""Log-probabilities as OpenAI's two endpoints lay them out."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from toolkit.serve.generation.likeliest import likeliest, number


class TokenBytes(Protocol):
    @property
    def special_ids(self) -> Collection[int]: ...
    def bytes_of(self, token_id: int) -> bytes: ...


def _text(data: bytes) -> str:
    """A token's text; of bytes that are no text alone, their spelling, as OpenAI does it, so that tokens stay apart."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(
    tokenizer: TokenBytes,
    token_ids: Sequence[int],
    entries: Sequence[Mapping[int, float]],
    count: int,
    ids: bool = False,
) -> list[dict[str, Any]]:
    """``logprobs.content``: one object a token with its ``count`` best alternatives; with their ``ids``, as llama.cpp
    has it."""

    def item(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.bytes_of(token)
        named = {"id": token} if ids else {}
        return {**named, "token": _text(data), "logprob": number(logprob), "bytes": list(data)}

    content = []
    for token, entry in zip(token_ids, entries, strict=False):
        top = [item(*pair) for pair in likeliest(entry, count)]
        content.append({**item(token, entry.get(token, float("-inf"))), "top_logprobs": top})
    return content


def prompt_logprobs(
    tokenizer: TokenBytes, token_ids: Sequence[int], entries: Sequence[Mapping[int, float] | None], count: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's ``prompt_logprobs``: for each token its own log-probability and those of the ``count`` best, by id.

    ``rank`` counts from 1; it is null for a token that is not among those looked at.
    """
    told: list[dict[str, dict[str, Any]] | None] = []
    for token, entry in zip(token_ids, entries, strict=False):
        if entry is None:
            told.append(None)
            continue
        ranks = {i: rank for rank, (i, _) in enumerate(likeliest(entry, count), 1)}
        told.append(
            {
                str(i): {
                    "logprob": number(entry.get(i, float("-inf"))),
                    "rank": ranks.get(i),
                    "decoded_token": _text(tokenizer.bytes_of(i)),
                }
                for i in dict.fromkeys((token, *ranks))
            }
        )
    return told


class CompletionLogprobs:
    """Builds the ``logprobs`` object of one completion choice, piece by piece. ``special``: whether its text shows
    special tokens."""

    def __init__(self, tokenizer: TokenBytes, count: int, special: bool = False) -> None:
        self.tokenizer = tokenizer
        self.count = count
        self.special = special
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def piece(
        self, token_ids: Sequence[int], entries: Sequence[Mapping[int, float] | None], echoed: str | None = None
    ) -> dict[str, Any]:
        """The object for the next tokens. An entry is None for the very first token of a prompt, of which ``echoed`` is
        the text."""
        tokens, logprobs, tops, offsets = [], [], [], []
        for token, entry in zip(token_ids, entries, strict=False):
            data = self.tokenizer.bytes_of(token)
            tokens.append(_text(data))
            offsets.append(self._offset)
            self._offset += self._shown(token, self._decoder.decode(data), echoed)
            logprobs.append(None if entry is None else number(entry.get(token, float("-inf"))))
            tops.append(None if entry is None else self._alternatives(token, entry))
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _shown(self, token: int, text: str, echoed: str | None) -> int:
        """Characters of a token that stand in the choice's text. The blank that some tokenizers put before a prompt
        does not, nor do the special tokens around it."""
        if echoed is None:
            return len(text) if self.special or token not in self.tokenizer.special_ids else 0
        if echoed.startswith(text, self._offset):
            return len(text)
        if token in self.tokenizer.special_ids:
            return 0
        return len(text) - (not self._offset and text.startswith(" "))

    def _alternatives(self, chosen: int, entry: Mapping[int, float]) -> dict[str, float]:
        """The best ``count`` and the chosen one; of two tokens that spell the same text the better one stays."""
        found: dict[str, float] = {}
        for token, value in [*likeliest(entry, self.count), (chosen, entry.get(chosen, float("-inf")))]:
            found.setdefault(_text(self.tokenizer.bytes_of(token)), number(value))
        return found
