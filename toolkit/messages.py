"""The records a user meets: generation options and chat templates that go in, responses that come out.

LMDeploy's names, fields and defaults. Importing this module imports neither torch nor transformers. The engine configs
can be had from here too, as LMDeploy has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from toolkit.config_checks import bounded, is_token, list_of, only_defaults, shown, switches, words_of
from toolkit.engine_configs import PytorchEngineConfig, TurbomindEngineConfig, VisionConfig
from toolkit.errors import UsageError
from toolkit.request_limits import BOUNDS, GREEDY_BELOW, MOST, TEMPLATE_STOPS, TOKEN_ID, WORD_LENGTH

__all__ = [
    "ChatTemplateConfig",
    "FinishReason",
    "GenerationConfig",
    "PytorchEngineConfig",
    "Response",
    "TurbomindEngineConfig",
    "VisionConfig",
]

# Fields of LMDeploy's GenerationConfig without a counterpart here, and what to do instead.
_NOT_GENERATED = {
    "logprob_start_len": "for log-probabilities of the prompt use prompt_logprobs",
    "return_ppl": "use Pipeline.get_ppl",
    "with_cache": "caches do not leave the engine yet",
    "preserve_cache": "caches do not leave the engine yet",
    "migration_request": "prefill and decode are not served apart yet",
    "return_routed_experts": "routing is not reported yet",
}
_MAY_BE_NONE = ("max_new_tokens", "min_new_tokens", "random_seed", "logprobs", "prompt_logprobs")


@dataclass
class GenerationConfig:
    """How to generate. ``validate()`` raises UsageError that names the field; bounds: ``toolkit/request_limits.py``.

    Sampling: ``do_sample=False`` is greedy; then temperature, top_k, top_p and min_p are ignored, penalties are not.
    ``stop_words`` and ``bad_words`` may have any number of tokens. ``random_seed``: one seed a request; choice i of n
    uses ``random_seed + i``. ``response_format``: {"type": "json_schema" | "json_object" | "regex_schema" | "grammar" |
    "choice" | "text", …}. ``logits_processors`` (in process only): callables (token_ids, logits) -> logits.
    ``repetition_ngram_size`` and ``repetition_ngram_threshold``, where both are above 0: the answer ends as soon as its
    last ``size`` tokens stand in it ``threshold`` times. ``shown_special_tokens``: those that stay in the text though
    others are skipped (``skip_special_tokens``). The fields after these are LMDeploy's for what is not built
    here: they take their default alone.
    """

    n: int = 1
    max_new_tokens: int | None = 512
    do_sample: bool = False
    top_p: float = 1.0
    top_k: int = 50
    min_p: float = 0.0
    temperature: float = 0.8
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    random_seed: int | None = None
    stop_words: list[str] | None = None
    bad_words: list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    logits_processors: list[Callable[[Any, Any], Any]] | None = None
    output_logits: Literal["all", "generation"] | None = None
    output_last_hidden_state: Literal["all", "generation"] | None = None
    include_stop_str_in_output: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    prompt_logprobs: int | None = None
    repetition_ngram_size: int = 0
    repetition_ngram_threshold: int = 0
    shown_special_tokens: list[str] | None = None
    logprob_start_len: int = -1
    return_ppl: bool = False
    with_cache: bool = False
    preserve_cache: bool = False
    migration_request: Any = None
    return_routed_experts: bool = False

    def __post_init__(self) -> None:
        self.validate()

    def without_effect(self) -> list[str]:
        """A line for every field that says how to sample where ``do_sample`` is False, and so changes nothing."""
        if self.do_sample:
            return []
        nothing = {"temperature": (0.8, 1.0, 0.0), "top_p": (1.0,), "top_k": (50, 0), "min_p": (0.0,)}
        given = {name: getattr(self, name) for name, silent in nothing.items() if getattr(self, name) not in silent}
        return [f"{name} {value:g} has no effect: do_sample is off" for name, value in given.items()]

    def validate(self) -> None:
        """Raise UsageError for the first field out of its range."""
        for name, bounds in BOUNDS.items():
            value = getattr(self, name)
            if name != "logit_bias" and not (value is None and name in _MAY_BE_NONE):
                bounded(name, value, bounds)
        if self.min_new_tokens is not None and self.max_new_tokens is not None:
            if self.min_new_tokens > self.max_new_tokens:
                most = self.max_new_tokens
                raise UsageError(f"min_new_tokens: at most max_new_tokens ({most}), found {self.min_new_tokens}")
        only_defaults(self, _NOT_GENERATED)
        for name, length in WORD_LENGTH.items():
            if isinstance(words := getattr(self, name), str):
                setattr(self, name, [words])
            words_of(name, getattr(self, name), length)
        for name in ("stop_token_ids", "bad_token_ids"):
            list_of(name, getattr(self, name), "token ids", is_token)
        list_of("shown_special_tokens", self.shown_special_tokens, "texts", lambda text: isinstance(text, str))
        list_of("logits_processors", self.logits_processors, "functions", callable)
        switches(self, "do_sample", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens")
        switches(self, "include_stop_str_in_output")
        for name in ("response_format", "logit_bias"):
            if not isinstance(value := getattr(self, name), dict) and value is not None:
                raise UsageError(f"{name}: expected a dict, found {shown(value)}")
        for name in ("output_logits", "output_last_hidden_state"):
            if getattr(self, name) not in (None, "all", "generation"):
                raise UsageError(f"{name}: expected 'all', 'generation' or None, found {shown(getattr(self, name))}")
        for name, most in MOST.items():
            allowed = most + TEMPLATE_STOPS if name == "stop_words" else most
            if (count := len(getattr(self, name) or ())) > allowed:
                raise UsageError(f"{name}: expected at most {most} entries, found {count}")
        for key, value in (self.logit_bias or {}).items():
            bounded("logit_bias: token id", key, TOKEN_ID)
            bounded(f"logit_bias[{key}]", value, BOUNDS["logit_bias"])

    @property
    def greedy(self) -> bool:
        """Whether each token is simply the best one: the only place that says from which temperature on."""
        return not self.do_sample or self.temperature < GREEDY_BELOW or self.top_k == 1


FinishReason = Literal["stop", "length", "error", "abort"]


@dataclass
class Response:
    """What a request produced; when streaming, what it produced since the last one (``extend`` joins them).

    ``logprobs``: one dict {token id: log-probability} a generated token, the chosen token always in it.
    ``logits``: float32 [tokens, vocab]; ``last_hidden_state``: [tokens, hidden]. ``index``: position in the batch.
    ``cached_tokens``: prompt tokens served from the prefix cache.
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
    error_code: int | None = None
    error_message: str | None = None
    session_id: int | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None

    def extend(self, other: Response) -> Response:
        """Append a later delta of the same request and return self."""
        import numpy as np

        self.text += other.text
        self.token_ids = self.token_ids + other.token_ids
        self.generate_token_len = other.generate_token_len
        self.input_token_len = other.input_token_len
        self.finish_reason = other.finish_reason
        self.index = other.index
        self.cached_tokens = other.cached_tokens
        self.error_code, self.error_message = other.error_code, other.error_message
        self.stop_reason = other.stop_reason
        if other.logprobs:
            self.logprobs = (self.logprobs or []) + other.logprobs
        if other.prompt_logprobs:
            self.prompt_logprobs = other.prompt_logprobs
        for name in ("logits", "last_hidden_state"):
            mine, more = getattr(self, name), getattr(other, name)
            if more is not None:
                setattr(self, name, more if mine is None else np.concatenate([mine, more]))
        return self


@dataclass
class ChatTemplateConfig:
    """A chat template: the name of a built-in one, or one's own pieces.

    A field that is not None overrides the built-in ``model_name``; with a new name the pieces are the template: system,
    meta_instruction, eosys, then for every round user, content, eoh, assistant, content, eoa, separator.
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
        names = {f.name for f in fields(cls)}
        if not isinstance(data, dict) or "model_name" not in data:
            raise UsageError(f"{what}: expected a JSON object with at least 'model_name'")
        if unknown := sorted(set(data) - names):
            raise UsageError(f"{what}: unknown key {unknown[0]!r}; known are {', '.join(sorted(names))}")
        for key, value in data.items():
            good = (
                isinstance(value, list) and all(isinstance(w, str) for w in value)
                if key == "stop_words"
                else isinstance(value, str)
            )
            if value is not None and not good:
                want = "a list of strings" if key == "stop_words" else "a string"
                raise UsageError(f"{what}: {key!r}: expected {want}, found {value!r:.40}")
        return cls(**data)
