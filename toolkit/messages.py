"""The records a user meets: configs that go in, responses that come out. LMDeploy's names, fields and defaults.

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from toolkit.errors import UsageError

DTYPES = ("auto", "float16", "bfloat16", "float32")
MODEL_FORMATS = (None, "hf", "awq", "gptq", "compressed-tensors", "fp8", "mxfp4", "w8a8", "gguf", "engine")
LOAD_FORMATS = ("auto", "dummy")
SEED_MAX = (1 << 64) - 1


def _number(what: str, value: Any, low: float, high: float, *, whole: bool = False, open_low: bool = False) -> None:
    """Raise UsageError unless ``value`` is a finite number within [low, high]."""
    kind = int if whole else (int, float)
    bad = isinstance(value, bool) or not isinstance(value, kind) or (isinstance(value, float) and math.isnan(value))
    if bad or math.inf in (value, -value) or value < low or value > high or (open_low and value == low):
        span = f"{'(' if open_low else '['}{_plain(low)}, {_plain(high)}]"
        raise UsageError(f"{what}: expected {'an integer' if whole else 'a number'} in {span}, found {_shown(value)}")


def _shown(value: Any) -> str:
    """``value`` for an error message, cut; Python itself refuses to write integers of thousands of digits."""
    try:
        return f"{value!r:.80}"
    except ValueError:
        return "a number of thousands of digits"


def _list_of(what: str, value: Any, wanted: str, good: Callable[[Any], bool]) -> None:
    """Raise UsageError unless ``value`` is None or a list (or tuple) of good items."""
    if value is not None and not (isinstance(value, (list, tuple)) and all(good(item) for item in value)):
        raise UsageError(f"{what}: expected a list of {wanted}, found {_shown(value)}")


def _switches(config: Any, *names: str) -> None:
    for name in names:
        if not isinstance(value := getattr(config, name), bool):
            raise UsageError(f"{name}: expected True or False, found {_shown(value)}")


def _only_defaults(config: Any, unbuilt: dict[str, str]) -> None:
    """Raise UsageError for a field of ``unbuilt`` that is not at its default, with what that dict says to do."""
    defaults = {f.name: f.default for f in fields(config)}
    for name, advice in unbuilt.items():
        value = getattr(config, name)
        if type(value) is not type(defaults[name]) or value != defaults[name]:
            raise UsageError(f"{name}: found {_shown(value)}, expected {defaults[name]!r}: {advice}")


def _is_token(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 31


def _plain(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


# Fields of LMDeploy's GenerationConfig without a counterpart here, and what to do instead.
_NOT_GENERATED = {
    "logprob_start_len": "for log-probabilities of the prompt use prompt_logprobs",
    "return_ppl": "use Pipeline.get_ppl",
    "with_cache": "caches do not leave the engine yet",
    "preserve_cache": "caches do not leave the engine yet",
    "migration_request": "prefill and decode are not served apart yet",
    "return_routed_experts": "routing is not reported yet",
}


@dataclass
class GenerationConfig:
    """How to generate. ``validate()`` raises UsageError that names the field.

    Sampling: ``do_sample=False`` is greedy; then temperature, top_k, top_p and min_p are ignored, penalties are not.
    ``stop_words`` and ``bad_words`` may have any number of tokens. ``random_seed``: one seed a request; choice i of n
    uses ``random_seed + i``. ``response_format``: {"type": "json_schema" | "json_object" | "regex_schema" | "grammar" |
    "choice" | "text", …}. ``logits_processors`` (in process only): callables (token_ids, logits) -> logits.
    ``repetition_ngram_size`` and ``repetition_ngram_threshold``, where both are above 0: the answer ends as soon as its
    last ``size`` tokens stand in it ``threshold`` times. The fields after these are LMDeploy's for what is not built
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
    logprob_start_len: int = -1
    return_ppl: bool = False
    with_cache: bool = False
    preserve_cache: bool = False
    migration_request: Any = None
    return_routed_experts: bool = False

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise UsageError for the first field out of its range."""
        _number("n", self.n, 1, 128, whole=True)
        if self.max_new_tokens is not None:
            _number("max_new_tokens", self.max_new_tokens, 1, 1 << 30, whole=True)
        if self.min_new_tokens is not None:
            _number("min_new_tokens", self.min_new_tokens, 0, 1 << 30, whole=True)
            if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
                most = self.max_new_tokens
                raise UsageError(f"min_new_tokens: at most max_new_tokens ({most}), found {self.min_new_tokens}")
        _number("top_p", self.top_p, 0, 1)
        _number("top_k", self.top_k, 0, 1 << 30, whole=True)
        _number("min_p", self.min_p, 0, 1)
        _number("temperature", self.temperature, 0, 2)
        _number("repetition_penalty", self.repetition_penalty, 0, 100, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_ngram_size", self.repetition_ngram_size, 0, 1 << 20, whole=True)
        _number("repetition_ngram_threshold", self.repetition_ngram_threshold, 0, 1 << 30, whole=True)
        _only_defaults(self, _NOT_GENERATED)
        if self.random_seed is not None:
            _number("random_seed", self.random_seed, -(1 << 63), SEED_MAX, whole=True)
        if self.logprobs is not None:
            _number("logprobs", self.logprobs, 0, 1024, whole=True)
        if self.prompt_logprobs is not None:
            _number("prompt_logprobs", self.prompt_logprobs, 0, 1024, whole=True)
        for name in ("stop_words", "bad_words"):
            if isinstance(words := getattr(self, name), str):
                setattr(self, name, [words])
            _list_of(name, getattr(self, name), "non-empty strings", lambda w: isinstance(w, str) and bool(w))
        for name in ("stop_token_ids", "bad_token_ids"):
            _list_of(name, getattr(self, name), "token ids", _is_token)
        _list_of("logits_processors", self.logits_processors, "functions", callable)
        _switches(self, "do_sample", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens")
        _switches(self, "include_stop_str_in_output")
        for name in ("response_format", "logit_bias"):
            if not isinstance(value := getattr(self, name), dict) and value is not None:
                raise UsageError(f"{name}: expected a dict, found {_shown(value)}")
        for name in ("output_logits", "output_last_hidden_state"):
            if getattr(self, name) not in (None, "all", "generation"):
                raise UsageError(f"{name}: expected 'all', 'generation' or None, found {_shown(getattr(self, name))}")
        if self.logit_bias is not None:
            for key, value in self.logit_bias.items():
                _number("logit_bias: token id", key, 0, 1 << 31, whole=True)
                _number(f"logit_bias[{_shown(key)}]", value, -100, 100)

    @property
    def greedy(self) -> bool:
        return not self.do_sample or self.temperature == 0 or self.top_k == 1


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


def _check_engine(config: TurbomindEngineConfig | PytorchEngineConfig, block: str) -> None:
    if config.dtype not in DTYPES:
        raise UsageError(f"dtype: expected one of {', '.join(DTYPES)}, found {_shown(config.dtype)}")
    if config.model_format not in MODEL_FORMATS:
        names = ", ".join(f for f in MODEL_FORMATS if f)
        raise UsageError(f"model_format: expected one of {names}, found {_shown(config.model_format)}")
    if config.load_format not in LOAD_FORMATS:
        raise UsageError(f"load_format: expected one of {', '.join(LOAD_FORMATS)}, found {_shown(config.load_format)}")
    if config.quant_policy not in (0, 4, 8, 16, 17):
        raise UsageError(
            "quant_policy: expected 0, 4 or 8 (bits of the KV cache), 16 or 17 (float8_e4m3fn, float8_e5m2), "
            f"found {_shown(config.quant_policy)}"
        )
    for name in ("tp",):
        _number(name, getattr(config, name), 1, 1024, whole=True)
    if config.session_len is not None:
        _number("session_len", config.session_len, 1, 1 << 30, whole=True)
    if config.max_batch_size is not None:
        _number("max_batch_size", config.max_batch_size, 1, 1 << 20, whole=True)
    _number("max_prefill_token_num", config.max_prefill_token_num, 1, 1 << 30, whole=True)
    count = config.cache_max_entry_count
    if isinstance(count, int) and not isinstance(count, bool):
        _number("cache_max_entry_count", count, 1, 1 << 40, whole=True)
    else:
        _number("cache_max_entry_count", count, 0, 1, open_low=True)
    size = getattr(config, block)
    _number(block, size, 16, 1024, whole=True)
    if size & (size - 1):
        raise UsageError(f"{block}: expected a power of two, found {size}")
    _switches(config, "enable_prefix_caching", "enable_metrics")
    if config.threads is not None:
        _number("threads", config.threads, 0, 4096, whole=True)
    for known in fields(config):
        value = getattr(config, known.name)
        if known.metadata.get("only_default") and (value != known.default or type(value) is not type(known.default)):
            raise UsageError(
                f"{known.name}: expected {known.default!r}, found {_shown(value)}; LMDeploy's other values of it do "
                "nothing here: leave it out"
            )


# A field of LMDeploy's config that has one meaning here, its default's; scripts may spell it out.
_FIXED = {"only_default": True}


def _check_adapters(adapters: Any) -> None:
    if adapters is None:
        return
    if not isinstance(adapters, dict) or not adapters:
        raise UsageError(f"adapters: expected a dict of names and paths, found {_shown(adapters)}")
    for name, path in adapters.items():
        if not isinstance(name, str) or not name.strip() or not isinstance(path, str) or not path:
            raise UsageError(f"adapters: expected names and paths, found {_shown(name)}: {_shown(path)}")


@dataclass
class TurbomindEngineConfig:
    """Options of the ``turbomind`` backend, the fast path: the ``native`` runner.

    ``cache_max_entry_count``: share of free memory for the KV cache, or (an integer) its number of blocks.
    ``device``: "auto", "cpu", "cuda" or "cuda:N". ``threads``: CPU threads, None = all. ``enable_metrics``: whether a
    server of this engine offers /metrics. ``load_format``: "dummy" reads config.json alone and makes random weights.
    """

    dtype: str = "auto"
    model_format: str | None = None
    tp: int = 1
    session_len: int | None = None
    max_batch_size: int | None = None
    cache_max_entry_count: float | int = 0.8
    cache_block_seq_len: int = 64
    enable_prefix_caching: bool = True
    quant_policy: int = 0
    rope_scaling_factor: float = 0.0
    download_dir: str | None = None
    revision: str | None = None
    max_prefill_token_num: int = 8192
    device: str = "auto"
    threads: int | None = None
    hf_overrides: dict[str, Any] | None = None
    enable_metrics: bool = True
    load_format: str = "auto"
    dp: int = field(default=1, metadata=_FIXED)
    cp: int = field(default=1, metadata=_FIXED)
    ep: int = field(default=1, metadata=_FIXED)
    nnodes: int = field(default=1, metadata=_FIXED)
    node_rank: int = field(default=0, metadata=_FIXED)
    cache_chunk_size: int = field(default=-1, metadata=_FIXED)
    num_tokens_per_iter: int = field(default=0, metadata=_FIXED)
    max_prefill_iters: int = field(default=1, metadata=_FIXED)
    async_: int = field(default=1, metadata=_FIXED)
    use_logn_attn: bool = field(default=False, metadata=_FIXED)
    devices: list[int] | None = field(default=None, metadata=_FIXED)
    communicator: str = field(default="nccl", metadata=_FIXED)
    empty_init: bool = field(default=False, metadata=_FIXED)
    language_model_only: bool = field(default=False, metadata=_FIXED)

    def __post_init__(self) -> None:
        _check_engine(self, "cache_block_seq_len")
        _number("rope_scaling_factor", self.rope_scaling_factor, 0, 1e4)

    @property
    def block_size(self) -> int:
        return self.cache_block_seq_len


@dataclass
class PytorchEngineConfig:
    """Options of the ``pytorch`` backend: the ``torch`` runner, any spec on any device torch has.

    ``device_type``: "auto", "cpu", "cuda" or "cuda:N". ``num_gpu_blocks``: KV blocks, 0 = planned from memory.
    ``adapters``: names of LoRA adapters and where they are, a directory or hub id in PEFT's format each.
    ``enable_metrics``: whether a server of this engine offers /metrics. ``eager_mode``: forbid captured graphs
    (the torch runner has none so far, so that both values mean the same). ``load_format``: "dummy" reads config.json
    alone and makes random weights.
    """

    dtype: str = "auto"
    tp: int = 1
    session_len: int | None = None
    max_batch_size: int | None = None
    cache_max_entry_count: float | int = 0.8
    block_size: int = 64
    num_gpu_blocks: int = 0
    adapters: dict[str, str] | None = None
    max_prefill_token_num: int = 8192
    enable_prefix_caching: bool = True
    device_type: str = "auto"
    eager_mode: bool = False
    custom_module_map: dict[str, str] | str | None = None
    download_dir: str | None = None
    revision: str | None = None
    quant_policy: int = 0
    model_format: str | None = None
    threads: int | None = None
    hf_overrides: dict[str, Any] | None = None
    enable_metrics: bool = True
    load_format: str = "auto"
    dp: int = field(default=1, metadata=_FIXED)
    ep: int = field(default=1, metadata=_FIXED)
    dp_rank: int = field(default=0, metadata=_FIXED)
    prefill_interval: int = field(default=16, metadata=_FIXED)
    num_cpu_blocks: int = field(default=0, metadata=_FIXED)
    thread_safe: bool = field(default=False, metadata=_FIXED)
    distributed_executor_backend: str | None = field(default=None, metadata=_FIXED)
    enable_microbatch: bool = field(default=False, metadata=_FIXED)
    enable_eplb: bool = field(default=False, metadata=_FIXED)
    enable_mp_engine: bool = field(default=False, metadata=_FIXED)
    mp_engine_backend: str = field(default="mp", metadata=_FIXED)
    empty_init: bool = field(default=False, metadata=_FIXED)
    language_model_only: bool = field(default=False, metadata=_FIXED)

    def __post_init__(self) -> None:
        _check_engine(self, "block_size")
        _switches(self, "eager_mode")
        _number("num_gpu_blocks", self.num_gpu_blocks, 0, 1 << 40, whole=True)
        _check_adapters(self.adapters)
        if self.custom_module_map is not None:
            raise UsageError("custom_module_map: not built yet; add a family file instead (docs/add-a-model.md)")

    @property
    def device(self) -> str:
        return self.device_type


@dataclass
class VisionConfig:
    """LMDeploy's options of a vision encoder. There is none here yet: ``pipeline`` refuses one that it is given."""

    max_batch_size: int = 1
    thread_safe: bool = False


EngineConfig = TurbomindEngineConfig | PytorchEngineConfig


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
            except (OSError, UnicodeDecodeError) as e:
                raise UsageError(f"{file_or_string}: cannot read the chat template ({e})") from e
        try:
            data = json.loads(text)
        except ValueError as e:
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
