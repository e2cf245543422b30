"""A conversation: what was said, in the order in which it was said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any
from uuid import uuid4

from toolkit.base.lazy_dataclass import dataclass
from toolkit.messages import GenerationConfig, Response
from toolkit.vision.parts import user_content


@dataclass
class Session:
    """The handle of a conversation with a Pipeline. Pass it back to ``chat`` for the next turn.

    ``prompt`` and ``response``: the last turn's; ``history``: what the user (a text, or a pair of text and images) and
    the assistant said in all turns; ``system``: the
    system text, None for the template's own. The whole history is sent each turn; the KV cache keeps its prefix, so
    only what is new is computed. ``close`` (or leaving ``with``) gives that cache back, ``abort`` stops the answer
    that is being written.
    """

    session_id: str = field(default_factory=lambda: uuid4().hex)
    prompt: str | tuple[Any, ...] | None = None
    response: Response | None = None
    history: list[tuple[str | tuple[Any, ...], str]] = field(default_factory=list)
    gen_config: GenerationConfig | None = None
    system: str | None = None
    closed: bool = False
    on_abort: Callable[[Session], None] | None = field(default=None, repr=False, compare=False)
    on_close: Callable[[Session], None] | None = field(default=None, repr=False, compare=False)

    def messages(self, prompt: str | None = None) -> list[dict[str, Any]]:
        """The conversation as OpenAI messages, with ``prompt`` as the next question."""
        made: list[dict[str, Any]] = [] if self.system is None else [{"role": "system", "content": self.system}]
        for user, assistant in self.history:
            made += [{"role": "user", "content": user_content(user)}, {"role": "assistant", "content": assistant}]
        return made if prompt is None else [*made, {"role": "user", "content": prompt}]

    def abort(self) -> None:
        """Stop the answer that is being written, if there is one; what came so far is kept."""
        if self.on_abort is not None:
            self.on_abort(self)

    def close(self) -> None:
        """Forget the conversation and free what the engine keeps for it. May be called twice."""
        if not self.closed and self.on_close is not None:
            self.on_close(self)
        self.closed = True
        self.prompt, self.response, self.history = None, None, []

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
