"""What clients may send: the fields of OpenAI's API that are implemented, and our extensions.

A field that is not listed is refused by name (400): nothing a client asks for is dropped in silence. Fields that change
nothing about the answer (``user``, ``metadata``, ``store`` …) are accepted. ``null`` means absent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from toolkit.configs.checks import shown
from toolkit.configs.generation import PARAMETERS
from toolkit.configs.limits import LOGIT_BIAS, MOST, PRIORITY, TOKEN_ID, WORD_LENGTH
from toolkit.errors import UsageError
from toolkit.serve.fields.formats import FormatFields
from toolkit.serve.fields.message import Messages, TextPart
from toolkit.serve.fields.parameters import parameter, with_parameters
from toolkit.serve.fields.strict import ModelName, Strict
from toolkit.serve.fields.tools import ToolFields
from toolkit.vision.sampling import media_sampling

TokenId = Annotated[int, Field(ge=TOKEN_ID.low, le=TOKEN_ID.high)]
StopWord = Annotated[str, Field(min_length=1, max_length=WORD_LENGTH["stop_words"])]
StopWords = Annotated[list[StopWord], Field(max_length=MOST["stop_words"])]
BadWord = Annotated[str, Field(min_length=1, max_length=WORD_LENGTH["bad_words"])]
Breaker = Annotated[str, Field(min_length=1, max_length=WORD_LENGTH["dry_sequence_breakers"])]
Breakers = Annotated[list[Breaker], Field(max_length=MOST["dry_sequence_breakers"])]
BadWords = Annotated[list[BadWord], Field(max_length=MOST["bad_words"])]

# Known to OpenAI's clients, not built here: field -> what to say. An empty value (null, [], false) is let through.
UNSUPPORTED = {
    "tools": "only for /v1/chat/completions",
    "tool_choice": "only for /v1/chat/completions",
    "functions": "not supported; write tools",
    "function_call": "not supported; write tool_choice",
    "best_of": "only for /v1/completions",
    "suffix": "only for /v1/completions",
    "audio": "not supported; this server handles text alone",
    "reasoning_effort": "only for /v1/chat/completions",
    "moderation": "not supported; the server has no model that judges",
    "web_search_options": "not supported; the server has no access to the web",
    # vLLM's:
    "chat_template": "cannot be set by a request; start the server with --chat-template",
    "logits_processors": "only in Python, as GenerationConfig has them",
    "use_beam_search": "not supported; best_of of /v1/completions is the nearest",
    "length_penalty": "not supported; it is a beam search's",
    "echo": "only for /v1/completions",
    "return_tokens_as_token_ids": "not supported; return_token_ids gives them",
    "truncate_prompt_tokens": "only for /v1/chat/completions and /v1/completions",
    "mm_processor_kwargs": "not supported; pictures are prepared as the model's files say",
    "media_io_kwargs": "only for /v1/chat/completions",
    "kv_transfer_params": "not supported; caches stay in their server",
    "vllm_xargs": "not supported",
}
# Of these, further values that ask for nothing: defaults, which some clients send.
NOTHING: dict[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "best_of": (1,),
    "length_penalty": (1,),
}


def _without_prewarm(given: dict[str, Any]) -> dict[str, Any]:
    if given.get("prewarm"):
        raise ValueError("prewarm is not supported: the cache is filled by requests that are answered")
    return given


def _checked_media(given: dict[str, Any]) -> dict[str, Any]:
    try:
        media_sampling(given)
    except UsageError as e:
        raise ValueError(str(e).removeprefix("media_io_kwargs: ")) from e
    return given


CacheOptions = Annotated[dict[str, Any], AfterValidator(_without_prewarm)]


class Prediction(Strict):
    """OpenAI's predicted output."""

    type: Literal["content"] = "content"
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers; without effect


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Stop = Annotated[StopWords | None, BeforeValidator(_as_list, json_schema_input_type=str | list[str] | None)]
# One text, or several:
Texts = Annotated[list[str], Field(min_length=1), BeforeValidator(_as_list, json_schema_input_type=str | list[str])]


# What our words of drawing and llama.cpp's have alike:
with_sampling = with_parameters(
    *(p.name for p in PARAMETERS.values() if p.draws and p.name != "top_k"),
    *(p.name for p in PARAMETERS.values() if p.name.startswith("dry_")),
    "presence_penalty",
    "frequency_penalty",
    "random_seed",
    top_k=parameter("top_k", ge=-1, description="Keep this many likeliest tokens; 0 or -1 = all."),
)


@with_parameters(
    "repetition_penalty",
    "repetition_ngram_size",
    "repetition_ngram_threshold",
    "min_new_tokens",
    "ignore_eos",
)
@with_sampling
class SampledRequest(FormatFields):
    """What OpenAI's and LMDeploy's endpoints that write text share."""

    model: ModelName = ""
    stream: bool | None = None
    n: int | None = parameter("n")
    logit_bias: dict[str, Annotated[float, Field(ge=LOGIT_BIAS.low, le=LOGIT_BIAS.high)]] | None = Field(
        None, max_length=MOST["logit_bias"]
    )
    allowed_token_ids: list[TokenId] | None = Field(
        None, min_length=1, max_length=MOST["logit_bias"], description="As vLLM has it: no other token is drawn"
    )
    stop: Stop = None
    min_tokens: int | None = parameter("min_new_tokens", description="vLLM's name of min_new_tokens")
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MOST["stop_token_ids"])
    bad_words: BadWords | None = None
    dry_sequence_breakers: Breakers | None = Field(None, description="Texts that no repeat of DRY goes across")
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    priority: int | None = Field(
        None, ge=PRIORITY.low, le=PRIORITY.high, description="The lower, the sooner it starts; default 0"
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="The prefix cache is shared with requests alone that have the same, as in vLLM",
    )
    with_cache: bool | None = Field(None, description="The answer names its prompt's blocks, and they are lent")
    preserve_cache: bool | None = Field(None, description="They stay in the cache until /distserve/free_cache")
    migration_request: dict[str, Any] | None = Field(
        None, description="Which engine lends what the prompt has become: {'remote_engine_id': …}, as LMDeploy has it"
    )
    # Accepted, without effect on the answer:
    user: str | None = None
    session_id: int | str | None = Field(None, description="What /abort_request may call it by")
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: CacheOptions | None = None
    prediction: Prediction | None = Field(None, description="Text that much of the answer may be: it is written sooner")
    verbosity: str | None = None
    guided_decoding_backend: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        unsupported = UNSUPPORTED.keys() - cls.model_fields.keys()
        for name in unsupported & data.keys():
            if data[name] and data[name] not in NOTHING.get(name, ()):
                raise ValueError(f"{name}: {UNSUPPORTED[name]}")
        return {k: v for k, v in data.items() if k not in unsupported}

    @model_validator(mode="after")
    def _one_least_length(self) -> SampledRequest:
        if self.min_tokens is not None:
            if self.min_new_tokens not in (None, self.min_tokens):  # type: ignore[has-type]
                raise ValueError("min_tokens: expected either it or min_new_tokens")
            self.min_new_tokens = self.min_tokens
        return self

    @property
    def drawn(self) -> int:
        """Answers that are generated for each prompt."""
        return self.n or 1


def _for_the_template(given: dict[str, Any]) -> dict[str, Any]:
    if ours := sorted({"self", "messages", "tools", "add_generation_prompt"} & set(given)):
        raise ValueError(f"{ours[0]!r} is the request's own; it cannot be set here")
    return given


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TemplateVariables = Annotated[dict[str, Any], AfterValidator(_for_the_template)]


class ReadingRequest(SampledRequest):
    """What OpenAI's two endpoints tell of a prompt, a stream and their tokens."""

    max_tokens: int | None = Field(None, ge=1, le=1 << 30)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 30, description="Goes before max_tokens")

    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="As vLLM has it: the ids of prompt and answer come too")
    prompt_logprobs: int | None = Field(None, ge=0, le=20, description="As vLLM has it; not in a stream")
    return_progress: bool | None = Field(
        None, description="As llama.cpp has it: a stream says how far the prompt has come"
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="As in vLLM: the prompt's last tokens alone, so many; -1: as many as there is room for"
    )

    @model_validator(mode="after")
    def _keeps_something(self) -> ReadingRequest:
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens: expected -1, or 1 and more, found 0")
        return self

    @model_validator(mode="after")
    def _fits_a_stream(self) -> ReadingRequest:
        if self.include_usage and not self.stream:
            raise ValueError("stream_options: only with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: not with stream=true")
        if self.return_progress and not self.stream:
            raise ValueError("return_progress: only with stream=true")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def kept_tokens(self, session_len: int) -> int | None:
        """How many of the prompt's last tokens are read; None: all."""
        if self.truncate_prompt_tokens == -1:
            return max(session_len - (self.token_limit or 1), 1)
        return self.truncate_prompt_tokens

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class ChatCompletionRequest(ReadingRequest, ToolFields):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    return_routed_experts: bool | None = Field(
        None, description="As LMDeploy has it: which experts each token went to, of models that have such"
    )
    chat_template_kwargs: TemplateVariables | None = Field(None, description="Variables for the chat template")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = Field(None, description="Go on with an assistant's last message; it is so")
    reasoning_effort: Effort | None = Field(None, description="For templates that know it; none: without thoughts")
    enable_thinking: bool | None = Field(None, description="As in chat_template_kwargs")
    documents: list[dict[str, Any]] | None = Field(None, description="Texts for templates that know documents")
    thinking_token_budget: int | None = Field(None, ge=0, le=1 << 30, description="Most tokens of a thought")
    thinking_budget_message: str | None = Field(
        None, max_length=WORD_LENGTH["stop_words"], description="What ends a thought that reaches its budget"
    )
    modalities: list[Literal["text"]] | None = None
    media_io_kwargs: Annotated[dict[str, Any], AfterValidator(_checked_media)] | None = Field(
        None, description='How videos are read: {"video": {"num_frames": …, "fps": …}}'
    )
    cache_report: bool | None = Field(None, description="usage says where the prompt left the prefix cache, and why")

    @model_validator(mode="after")
    def _one_grammar(self) -> ChatCompletionRequest:
        if self.must_call and self.response_format is not None and self.response_format.rule() is not None:
            raise ValueError("response_format: not together with a tool_choice that asks for a call")
        return self

    @model_validator(mode="after")
    def _goes_on(self) -> ChatCompletionRequest:
        goes_on = bool(self.messages and self.messages[-1].role == "assistant")
        if self.continue_final_message not in (None, goes_on):
            last = self.messages[-1].role
            raise ValueError(f"continue_final_message: expected {goes_on} where the last message is {last}'s")
        return self

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:  # clients send every default
            raise ValueError("top_logprobs: only with logprobs=true")
        return self

    @property
    def opens_answer(self) -> bool:
        """Whether the prompt ends where an answer begins, or goes on. Clients of vLLM, which goes on with one beside
        ``add_generation_prompt=false`` alone, send both."""
        return self.add_generation_prompt is not False or bool(self.continue_final_message)

    @property
    def continued(self) -> str:
        """The text of the assistant's message that the answer goes on with; "" where it begins a new one."""
        last = self.messages[-1]
        if last.role != "assistant" or last.tool_calls or not self.opens_answer:
            return ""
        return (
            last.content
            if isinstance(last.content, str)
            else "".join(part.get("text", "") for part in last.content or ())
        )

    @property
    def logprobs_wanted(self) -> int | None:
        """How many of the best tokens' log-probabilities each token comes with; None: not even its own."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the chat template is given besides the messages."""
        thinks = False if self.reasoning_effort == "none" else self.enable_thinking
        made: dict[str, Any] = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}
        if self.reasoning_effort not in (None, "none"):
            made["reasoning_effort"] = self.reasoning_effort
        if self.told_tools:
            made["tools"] = self.told_tools
        if self.documents:
            made["documents"] = self.documents
        return made | (self.chat_template_kwargs or {})


def _prompts(value: Any) -> Any:
    """A prompt, or a list of them, as a list; each a string or a list of token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("expected a string, a list of strings, token ids, or lists of token ids; not empty")
    if all(type(item) is int for item in value):
        value = [value]
    for i, item in enumerate(value):
        good = isinstance(item, list) and item and all(type(token) is int for token in item)
        if not (good or isinstance(item, str)):
            raise ValueError(f"item {i}: expected a string or a list of token ids, found {shown(item, 40)}")
    return value


Prompts = Annotated[
    list[str | list[int]],
    BeforeValidator(_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


class CompletionRequest(ReadingRequest):
    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0, le=1 << 30, description="0 only with echo: score the prompt")
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: int | None = parameter("n", description="Generate so many, return the n of the highest mean logprob")
    add_special_tokens: bool | None = Field(None, description="As in vLLM; false: not what texts begin with")
    suffix: str | None = Field(None, description="What comes behind the gap, for models that were trained on gaps")

    @model_validator(mode="after")
    def _within_limits(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: 0 needs echo=true, or there is nothing to return")
        return self

    @model_validator(mode="after")
    def _one_gap(self) -> CompletionRequest:
        if self.suffix and (len(self.prompt) > 1 or not isinstance(self.prompt[0], str)):
            raise ValueError("suffix: expected one text as the prompt beside it")
        if self.suffix and self.echo and self.logprobs is not None:
            raise ValueError("echo: not with suffix and logprobs together; prompt_logprobs has the prompt's tokens")
        return self

    @model_validator(mode="after")
    def _best_of_several(self) -> CompletionRequest:
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise ValueError(f"best_of: expected at least n ({n}), found {self.best_of}")
        if self.drawn > n and self.stream:
            raise ValueError("best_of: not with stream=true, for the best are known at the end")
        return self

    @property
    def drawn(self) -> int:
        return max(self.n or 1, self.best_of or 1)
