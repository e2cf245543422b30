"""Chat templates that a user writes in Python, as LMDeploy has them: a class registered under a name.

from toolkit.model import MODELS, BaseChatTemplate

@MODELS.register_module(name="pirate")
class Pirate(BaseChatTemplate):
    def __init__(self):
        super().__init__(meta_instruction="You are a pirate.", user="<|user|>", eoh="<|end|>", assistant="<|bot|>")

pipe = pipeline("demo", chat_template_config="pirate")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from toolkit.chat import builtin
from toolkit.chat.messages import Message, normalise
from toolkit.errors import UsageError

T = TypeVar("T", bound=type)


class BaseChatTemplate:
    """A template made of pieces: system, meta_instruction, eosys, then for every round user, content, eoh, assistant,
    content, eoa, separator. Subclasses set pieces, or write ``messages2prompt`` themselves.
    """

    def __init__(
        self,
        system: str = "",
        meta_instruction: str | None = "",
        eosys: str = "",
        user: str = "",
        eoh: str = "",
        assistant: str = "",
        eoa: str = "",
        separator: str = "",
        tool: str | None = None,
        eotool: str | None = None,
        capability: str = "chat",
        stop_words: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> None:
        self.meta_instruction = meta_instruction
        self.capability = capability
        self.stop_words = list(stop_words or ())
        self._pieces = builtin.Builtin(
            name=type(self).__name__,
            example="",
            system=system,
            eosys=eosys,
            user=user,
            eoh=eoh,
            assistant=assistant,
            eoa=eoa,
            separator=separator,
            tool=tool,
            eotool=eotool,
        )

    def get_prompt(self, prompt: str, sequence_start: bool = True) -> str:
        """One user message as a prompt."""
        return self.messages2prompt([{"role": "user", "content": prompt}], sequence_start)

    def messages2prompt(self, messages: str | Sequence[Message], sequence_start: bool = True, **kwargs: Any) -> str:
        """A conversation as a prompt, without the tokenizer's start token; the answer begins where it ends.

        ``sequence_start``: whether the system text belongs in front. ``kwargs``: what else a template may be given
        (tools, enable_thinking …); this one has no use for it.
        """
        if isinstance(messages, str):
            return self.get_prompt(messages, sequence_start)
        turns = normalise(messages)
        if self.meta_instruction and sequence_start and turns[0]["role"] not in ("system", "developer"):
            turns.insert(0, {"role": "system", "content": self.meta_instruction})
        values = {
            "start": "",
            "pieces": self._pieces.variables(),
            "messages": turns,
            "add_generation_prompt": turns[-1]["role"] != "assistant",
        }
        from toolkit.chat.sandbox import Sandbox

        return Sandbox().render(self._pieces.source(), values)


class Registry:
    """Name -> class of chat template."""

    def __init__(self) -> None:
        self._classes: dict[str, type] = {}

    def register_module(
        self, name: str | Sequence[str] | None = None, force: bool = False, module: type | None = None
    ) -> Callable[[T], T]:
        """Decorator: put a class under ``name`` (or several; its own by default). ``module``: register this at once.

        Raises UsageError for a name that is taken, unless ``force``; TypeError for what is no class.
        """

        def put(cls: T) -> T:
            if not (isinstance(cls, type) and callable(getattr(cls, "messages2prompt", None))):
                raise TypeError(f"register_module: expected a class with messages2prompt, found {cls!r}")
            for each in [cls.__name__] if name is None else [name] if isinstance(name, str) else name:
                if not force and each in self._classes:
                    raise UsageError(f"MODELS: {each!r} is registered already; force=True replaces it")
                self._classes[each] = cls
            return cls

        if module is not None:
            put(module)
        return put

    def get(self, name: str) -> type | None:
        """The class under ``name``, or None."""
        return self._classes.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._classes


MODELS = Registry()
