"""Answers as Anthropic's API has them: one message, or its events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from itertools import groupby
from typing import Any

from toolkit.messages import Response
from toolkit.parsers.pieces import Piece, read_arguments
from toolkit.serve.generation.chat import Chat
from toolkit.serve.generation.choices import Usage
from toolkit.serve.generation.running import running

SIGNATURE = "local"  # of thoughts: clients send it back, nobody checks it
PING = {"type": "ping"}
_DELTAS = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "arguments": ("input_json_delta", "partial_json"),
}


async def whole(chat: Chat) -> dict[str, Any]:
    """The message object."""
    last = Response()
    pieces: list[Piece] = []
    async with running(chat) as stream:
        async for _, delta, more in stream:
            last = delta
            pieces += more
    content = _content(pieces)
    return _message(chat) | {"content": content} | _end(chat, last) | {"usage": _usage(chat.usage)}


async def events(chat: Chat) -> AsyncGenerator[dict[str, Any], None]:
    """message_start, the blocks of content one after the other, message_delta, message_stop."""
    blocks = _Blocks()
    last = Response()
    async with running(chat) as stream:
        yield {"type": "message_start", "message": _message(chat) | {"usage": _usage(chat.usage)}}
        yield PING
        async for _, delta, pieces in stream:
            last = delta
            for piece in pieces:
                for event in blocks.take(piece):
                    yield event
    for event in blocks.close():
        yield event
    yield {"type": "message_delta", "delta": _end(chat, last), "usage": _usage(chat.usage)}
    yield {"type": "message_stop"}


class _Blocks:
    """Which block is open in a stream."""

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""  # of the open one

    def take(self, piece: Piece) -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = []
        if piece.kind == "call":
            told += self._open("arguments", {"type": "tool_use", "id": piece.id, "name": piece.text, "input": {}})
        elif piece.kind == "content" and self._kind != "content":
            told += self._open("content", {"type": "text", "text": ""})
        elif piece.kind == "reasoning" and self._kind != "reasoning":
            told += self._open("reasoning", {"type": "thinking", "thinking": "", "signature": ""})
        if piece.kind != "call":
            kind, field = _DELTAS[piece.kind]
            told.append(self._delta({"type": kind, field: piece.text}))
        return told

    def close(self) -> list[dict[str, Any]]:
        """End the open block, if any."""
        if not self._kind:
            return []
        told = []
        if self._kind == "reasoning":
            told.append(self._delta({"type": "signature_delta", "signature": SIGNATURE}))
        self._kind = ""
        return [*told, {"type": "content_block_stop", "index": self._index}]

    def _open(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        told = self.close()
        self._index += 1
        self._kind = kind
        return [*told, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _message(chat: Chat) -> dict[str, Any]:
    return {
        "id": chat.id,
        "type": "message",
        "role": "assistant",
        "model": chat.request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _content(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """The blocks that a stream of ``pieces`` has, in its order."""
    blocks: list[dict[str, Any]] = []
    for kind, same in groupby(pieces, lambda piece: piece.kind):
        if kind == "call":
            blocks += [{"type": "tool_use", "id": call.id, "name": call.text, "input": {}} for call in same]
            continue
        text = "".join(piece.text for piece in same)
        if kind == "arguments":
            blocks[-1]["input"] = read_arguments(text)
        elif kind == "content":
            blocks.append({"type": "text", "text": text})
        else:
            blocks.append({"type": "thinking", "thinking": text, "signature": SIGNATURE})
    return blocks


def _end(chat: Chat, last: Response) -> dict[str, Any]:
    """stop_reason and stop_sequence."""
    if chat.called(0, last):
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if last.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(last.stop_reason, str) and last.stop_reason in (chat.request.stop or ()):
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """input_tokens are those that the cache did not have."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.generated,
    }
