"""Runs a prompt as it is, without a chat template, for APIs that answer chats in the same way."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from toolkit.messages import Response
from toolkit.parsers.pieces import Answer, Piece
from toolkit.serve.fields.protocol import CompletionRequest
from toolkit.serve.generation.choice import Choice
from toolkit.serve.generation.choices import Usage, run_choices
from toolkit.serve.generation.read import encode_prompt
from toolkit.serve.generation.sampling import generation_config
from toolkit.serve.state import ServerState


class Plain:
    """The answer to a request with one prompt; as ``chat.Chat``, but every piece of it is text."""

    def __init__(self, state: ServerState, request: CompletionRequest, id: str) -> None:
        self.state = state
        self.request = request
        self.id = id
        self.choices: list[Choice] = []
        self.answers = [Answer()]
        self.usage = Usage([])

    async def prepare(self) -> None:
        """Tokenize the prompt. Raises ApiError, UsageError for what cannot be answered."""
        state, request = self.state, self.request
        token_ids = await encode_prompt(state, request.prompt[0], "prompt")
        config = generation_config(state, request, max_new_tokens=request.token_limit, logprobs=request.logprobs)
        adapter, told = state.adapter_of(request.model), bool(request.return_progress)
        self.choices = [Choice(0, 0, token_ids, config, adapter, progress=told)]
        self.usage = Usage(self.choices)

    async def deltas(self) -> AsyncGenerator[tuple[int, Response, list[Piece]], None]:
        """(0, what the engine said, its text), after ``prepare``."""
        async with aclosing(run_choices(self.state, self.id, self.choices)) as stream:
            async for index, delta in stream:
                pieces = [Piece("content", delta.text)] if delta.text else []
                self.usage.add(index, delta)
                self.answers[0].take(pieces)
                yield index, delta, pieces

    def finish_reason(self, index: int, delta: Response) -> str | None:
        return delta.finish_reason
