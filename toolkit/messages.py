"""The records a user meets: generation options and chat templates that go in, responses that come out.

LMDeploy's names, fields and defaults. Importing this module imports neither torch nor transformers. The engine configs
can be had from here too, as LMDeploy has it.
"""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any, Literal

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import read
from toolkit.configs.checks import named
from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig, VisionConfig
from toolkit.configs.generation import GenerationConfig
from toolkit.configs.moving import EngineRole, MigrationBackend
from toolkit.configs.speculative import SpeculativeConfig
from toolkit.errors import UsageError

__all__ = [
    "ChatTemplateConfig",
    "EngineRole",
    "FinishReason",
    "GenerationConfig",
    "MigrationBackend",
    "PromptProgress",
    "PytorchEngineConfig",
    "Response",
    "SpeculativeConfig",
    "TurbomindEngineConfig",
    "VisionConfig",
]

FinishReason = Literal["stop", "length", "error", "abort"]


@dataclass(frozen=True)
class PromptProgress:
    """Tokens of a prompt: ``total``; ``cache``: from the prefix cache; ``processed``: these and those computed so far.
    ``time_ms``: since the first was begun. Named as llama.cpp's server names them."""

    total: int
    cache: int
    processed: int
    time_ms: float


@dataclass
class Response:
    """What a request produced; when streaming, what it produced since the last one (``extend`` joins them).

    ``logprobs``: one dict {token id: log-probability} a generated token, the chosen token always in it.
    ``logits``: float32 [tokens, vocab]; ``last_hidden_state``: [tokens, hidden]. ``index``: position in the batch.
    ``routed_experts``: uint16 [tokens, layers, chosen] of prompt and answer but for the last token, those experts of
    the largest weights first; 65535 is none.
    ``cached_tokens``: prompt tokens served from the prefix cache. ``accepted_tokens``, ``rejected_tokens``: guessed
    ones that a step has verified, and that came true or did not (docs/how-to/speculate.md).
    """

    text: str = ""
    generate_token_len: int = 0
    input_token_len: int = 0
    finish_reason: FinishReason | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    logits: Any = None
    last_hidden_state: Any = None
    index: int = 0
    cached_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    error_code: int | None = None
    error_message: str | None = None
    session_id: int | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    prompt_progress: PromptProgress | None = None  # where the request asked for it
    routed_experts: Any = None
    cache_block_ids: list[str] | None = None  # where the request asked for them (with_cache)

    def extend(self, other: Response) -> Response:
        """Append a later delta of the same request and return self: in time that follows the delta's length, and
        without touching lists and arrays that others hold."""
        own = self.__dict__.get("_own")
        if own is None or own.of != id(self):
            own = self.__dict__["_own"] = _Own(id(self))
        text, self.text = self.text, ""  # held here alone, it grows in place
        text += other.text
        self.text = text
        self.token_ids = own.longer("token_ids", self.token_ids, other.token_ids)
        self.generate_token_len = other.generate_token_len
        self.input_token_len = other.input_token_len
        self.finish_reason = other.finish_reason
        self.index = other.index
        self.cached_tokens = other.cached_tokens
        self.accepted_tokens, self.rejected_tokens = other.accepted_tokens, other.rejected_tokens
        self.error_code, self.error_message = other.error_code, other.error_message
        self.stop_reason = other.stop_reason
        self.cache_block_ids = other.cache_block_ids
        if other.logprobs:
            self.logprobs = own.longer("logprobs", self.logprobs, other.logprobs)
        if other.prompt_logprobs:
            self.prompt_logprobs = other.prompt_logprobs
        for name in ("logits", "last_hidden_state", "routed_experts"):
            mine, more = getattr(self, name), getattr(other, name)
            if more is not None:
                setattr(self, name, more if mine is None else own.more_rows(name, mine, more))
        return self


class _Own:
    """Lists and arrays that ``Response.extend`` has made, which it may fill further. ``of``: the id of whose they are:
    a copy of a response shares them."""

    def __init__(self, of: int) -> None:
        self.of = of
        self._made: dict[str, Any] = {}

    def longer(self, name: str, mine: list[Any] | None, more: list[Any]) -> list[Any]:
        """``mine`` and ``more``."""
        made: list[Any] | None = self._made.get(name)
        if made is None or mine is not made:
            made = self._made[name] = list(mine or ())
        made.extend(more)
        return made

    def more_rows(self, name: str, mine: Any, more: Any) -> Any:
        """The rows of both arrays, with room for as many again behind them."""
        import numpy as np

        rows, made = len(mine) + len(more), self._made.get(name)
        if made is None or mine.base is not made or rows > len(made):
            made = self._made[name] = np.empty((2 * rows, *mine.shape[1:]), mine.dtype)
            made[: len(mine)] = mine
        made[len(mine) : rows] = more
        return made[:rows]


@named()
@dataclass
class ChatTemplateConfig:
    """A chat template: the name of a built-in one, or one's own pieces.

    A field that is not None overrides the built-in ``model_name``; with a new name the pieces are the template: system,
    meta_instruction, eosys, then for every round user, content, eoh, assistant, content, eoa, separator.
    ``parse_special``: special tokens that messages spell become those tokens; else they stay text.
    """

    model_name: str
    model_path: str | None = None
    system: str | None = None
    meta_instruction: str | None = None
    eosys: str | None = None
    user: str | None = None
    eoh: str | None = None
    assistant: str | None = None
    eoa: str | None = None
    tool: str | None = None
    eotool: str | None = None
    separator: str | None = None
    capability: Literal["completion", "infilling", "chat", "python"] | None = None
    stop_words: list[str] | None = None
    parse_special: bool | None = None

    def to_json(self, file_path: str | None = None) -> str:
        """The fields that are set, as JSON; also written to ``file_path`` where given."""
        import json
        from pathlib import Path

        text = json.dumps({f.name: v for f in fields(self) if (v := getattr(self, f.name)) is not None}, indent=2)
        if file_path is not None:
            Path(file_path).write_text(text + "\n", encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, file_or_string: str) -> ChatTemplateConfig:
        """From a file name or JSON text. Raises UsageError for bad JSON, unknown or ill-typed keys."""
        import json
        from pathlib import Path

        what = "chat template"
        text = file_or_string
        if not file_or_string.lstrip().startswith("{"):
            what = file_or_string
            try:
                text = Path(file_or_string).read_text(encoding="utf-8")
            except (OSError, ValueError) as e:
                raise UsageError(f"{file_or_string:.200}: cannot read the chat template ({e})") from e
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as e:
            raise UsageError(f"{what}: not valid JSON ({e})") from e
        try:
            return read(cls, data)
        except ValueError as e:
            raise UsageError(f"{what}: {e}; known fields are {', '.join(f.name for f in fields(cls))}") from e
