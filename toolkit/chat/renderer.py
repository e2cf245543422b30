"""Renders chat templates that nobody has vetted, in a process of their own: a model's template is code from the
internet, and what Jinja's sandbox lets through may still take all memory or run for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from toolkit.box.box import Box, LimitError, Limits
from toolkit.chat.refusal import TemplateRefusal
from toolkit.errors import UsageError

LIMITS = Limits(memory=512 << 20, cpu_seconds=1.0)


class Renderer:
    """``Sandbox``'s two methods, for templates that are not ours. Thread-safe; renders two at once."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._box = Box("toolkit.chat.renderer:rendering", limits)

    def start(self) -> None:
        """Start the process now, to be there when it is needed."""
        self._box.start()

    def check(self, source: str) -> None:
        """Raise ValueError with one line that says what is wrong with a template."""
        self._run({"source": source})

    def render(self, source: str, variables: dict[str, Any]) -> str:
        """The text. Raises TemplateRefusal, UsageError for variables that are no plain JSON, or ValueError with one
        line that says what is wrong with the template."""
        found = self._run({"source": source, "variables": variables})
        if "refused" in found:
            raise TemplateRefusal(found["refused"])
        return found["text"]

    def _run(self, value: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._box.run(value)[0]
        except TypeError as e:
            raise UsageError(f"messages: the chat template's variables are expected to be plain JSON ({e})") from e
        except LimitError as e:
            raise ValueError(str(e)) from e


def rendering(setup: Any, data: bytes) -> Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]:
    """The box's job: check a template ("source"), or render it with "variables"."""
    from toolkit.chat.sandbox import Sandbox  # Jinja, which the asking process does without

    sandbox = Sandbox()

    def run(value: dict[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        if "variables" not in value:
            sandbox.check(value["source"])
            return {}, b""
        try:
            return {"text": sandbox.render(value["source"], value["variables"])}, b""
        except TemplateRefusal as e:
            return {"refused": str(e)}, b""

    return run
