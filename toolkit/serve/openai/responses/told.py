"""Answers as /v1/responses has them: a response object, or its events in order."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from toolkit.messages import Response
from toolkit.parsers.pieces import Piece
from toolkit.serve.fields.parameters import given_parameters
from toolkit.serve.generation.chat import Chat
from toolkit.serve.generation.running import running
from toolkit.serve.http.replies import for_client
from toolkit.serve.openai.responses.asked import CUSTOM
from toolkit.serve.openai.responses.fields import ResponsesRequest, spelled

Event = dict[str, Any]


class Told:
    """One response on its way. ``keep`` gets the response object once it is whole."""

    def __init__(self, request: ResponsesRequest, chat: Chat, keep: Callable[[Event], None]) -> None:
        self._chat = chat
        self._keep = keep
        self._tools = {spelled(tool.name, tool.namespace): tool for tool in request.tools or ()}
        self._count = 0  # of events
        self._items: list[Event] = []
        self._open: Event | None = None  # the last item, while it grows
        self._fields = _echo(request) | {"id": chat.id, "created_at": int(time.time())}

    async def whole(self) -> Event:
        """The response object."""
        last = Response()
        async with running(self._chat) as stream:
            async for _, delta, pieces in stream:
                last = delta
                for piece in pieces:
                    self._take(piece)
        self._close(_was_cut(last))
        return self._done(last)

    async def events(self) -> AsyncGenerator[Event, None]:
        """response.created, response.in_progress, the items, then how it ended. An error after the first event is one
        too."""
        last = Response()
        try:
            async with running(self._chat) as stream:
                for kind in ("created", "in_progress"):
                    yield self._event(f"response.{kind}", response=self._response("in_progress"))
                async for _, delta, pieces in stream:
                    last = delta
                    for piece in pieces:
                        for event in self._take(piece):
                            yield event
        except Exception as error:
            if not self._count:
                raise
            told = for_client(error)
            failure = {"code": told.code or "server_error", "message": told.message}
            yield self._event("response.failed", response=self._response("failed") | {"error": failure})
            return
        for event in self._close(_was_cut(last)):
            yield event
        done = self._done(last)
        yield self._event(f"response.{done['status']}", response=done)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._count += 1
        return {"type": kind, "sequence_number": self._count - 1, **fields}

    def _take(self, piece: Piece) -> list[Event]:
        """Grow the open item by ``piece``, or open one."""
        told: list[Event] = []
        if piece.kind == "call" or self._open is None or not _goes_on(self._open, piece):
            told += self._close() + self._begin(piece)
        if piece.kind == "call":
            return told
        item = self._open
        assert item is not None
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        if piece.kind == "arguments":
            item["arguments"] += piece.text
            if item["type"] == "function_call":
                told.append(self._event("response.function_call_arguments.delta", **place, delta=piece.text))
            return told
        item["content"][0]["text"] += piece.text
        more: Event = {"logprobs": []} if piece.kind == "content" else {}
        kind = "output_text" if piece.kind == "content" else "reasoning_text"
        return [*told, self._event(f"response.{kind}.delta", **place, content_index=0, delta=piece.text, **more)]

    def _begin(self, piece: Piece) -> list[Event]:
        index = len(self._items)
        id = f"{self._chat.id.removeprefix('resp_')}_{index}"
        item: Event
        if piece.kind == "call":
            tool = self._tools.get(piece.text)
            custom = tool is not None and tool.type == "custom"
            item = {
                "id": f"{'ctc' if custom else 'fc'}_{id}",
                "type": "custom_tool_call" if custom else "function_call",
            }
            item |= {"call_id": piece.id, "name": piece.text, "arguments": "", "status": "in_progress"}
            if tool is not None and tool.namespace is not None:
                item |= {"name": tool.name, "namespace": tool.namespace}
        elif piece.kind == "content":
            item = {"id": f"msg_{id}", "type": "message", "role": "assistant", "status": "in_progress"}
            item["content"] = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
        else:
            item = {"id": f"rs_{id}", "type": "reasoning", "summary": [], "status": "in_progress"}
            item["content"] = [{"type": "reasoning_text", "text": ""}]
        self._items.append(item)
        self._open = item
        bare = dict(item) | ({"content": []} if "content" in item else {})
        told = [self._event("response.output_item.added", output_index=index, item=_shown(bare))]
        if "content" in item:
            part = dict(item["content"][0])
            place = {"item_id": item["id"], "output_index": index, "content_index": 0}
            told.append(self._event("response.content_part.added", **place, part=part))
        return told

    def _close(self, cut: bool = False) -> list[Event]:
        """End the open item, if any; ``cut``: it is not whole."""
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = "incomplete" if cut else "completed"
        index = len(self._items) - 1
        place = {"item_id": item["id"], "output_index": index}
        told = []
        if item["type"] == "function_call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            told.append(self._event("response.function_call_arguments.done", **place, **fields))
        elif item["type"] == "custom_tool_call":
            item["input"] = _custom_input(item.pop("arguments"))
            told.append(self._event("response.custom_tool_call_input.delta", **place, delta=item["input"]))
            told.append(self._event("response.custom_tool_call_input.done", **place, input=item["input"]))
        else:
            part, place = item["content"][0], place | {"content_index": 0}
            kind = part["type"]
            more: Event = {"logprobs": []} if kind == "output_text" else {}
            told.append(self._event(f"response.{kind}.done", **place, text=part["text"], **more))
            told.append(self._event("response.content_part.done", **place, part=part))
        return [*told, self._event("response.output_item.done", output_index=index, item=item)]

    def _done(self, last: Response) -> Event:
        """The response that is whole, or was cut short."""
        cut = _was_cut(last)
        usage = self._chat.usage
        done = self._response("incomplete" if cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": int(time.time()),
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.generated,
                "output_tokens_details": {"reasoning_tokens": usage.thought},
                "total_tokens": usage.prompt + usage.generated,
            },
        }
        self._keep(done)
        return done

    def _response(self, status: str) -> Event:
        return self._fields | {"status": status, "output": [_shown(item) for item in self._items]}


def _was_cut(last: Response) -> bool:
    return last.finish_reason == "length"


def _goes_on(item: Event, piece: Piece) -> bool:
    kinds = {"content": ("message",), "reasoning": ("reasoning",)}
    return item["type"] in kinds.get(piece.kind, ("function_call", "custom_tool_call"))


def _shown(item: Event) -> Event:
    """A copy; a custom call that still grows has no input yet."""
    if item["type"] != "custom_tool_call" or "input" in item:
        return dict(item)
    return {name: value for name, value in item.items() if name != "arguments"} | {"input": ""}


def _custom_input(arguments: str) -> str:
    """The text that a custom tool was called with."""
    try:
        found = json.loads(arguments).get(CUSTOM)
    except (ValueError, RecursionError, AttributeError):
        return arguments
    return found if isinstance(found, str) else arguments


def _echo(request: ResponsesRequest) -> Event:
    """What a response repeats of its request."""
    text = request.text.format if request.text else None
    reasoning = request.reasoning.effort if request.reasoning else None
    choice = request.tool_choice or "auto"
    given = given_parameters(request)
    return {
        "object": "response",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "model": request.model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": reasoning, "summary": None},
        "store": request.store is not False,
        "temperature": given.get("temperature"),
        "text": {"format": text.model_dump(exclude_none=True, by_alias=True) if text else {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump(exclude_none=True, by_alias=True) for tool in request.tools or ()],
        "top_p": given.get("top_p"),
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
        "metadata": request.metadata or {},
    }
