"""From a request's fields to a GenerationConfig: the request goes first, then the model's own, then our defaults."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path

from toolkit.artifacts.json_file import read_json_object
from toolkit.errors import UsageError
from toolkit.messages import GenerationConfig
from toolkit.request_limits import SEED_MAX
from toolkit.serve.errors import bad_field
from toolkit.serve.protocol import GenerateRequest


@dataclass(frozen=True)
class SamplingDefaults:
    """Values for fields that a request leaves out (LMDeploy's server defaults)."""

    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 40
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def choose(cls, wanted: str, model_dir: Path | None) -> SamplingDefaults:
        """What ``--generation-config`` asks for: "auto" (the file in ``model_dir``, None: not known yet), "toolkit"
        (none but ours), or another generation_config.json or its directory. Raises UsageError or ToolkitError.
        """
        if wanted == "toolkit" or (wanted == "auto" and model_dir is None):
            return cls()
        file = Path(model_dir if wanted == "auto" and model_dir else wanted).expanduser()
        file = file / "generation_config.json" if file.is_dir() else file
        if file.is_file():
            return cls.of_file(file)
        if wanted == "auto":
            return cls()
        raise UsageError(
            f"--generation-config {wanted}: expected auto, toolkit, or a generation_config.json or its directory"
        )

    @classmethod
    def of_file(cls, file: Path) -> SamplingDefaults:
        """Those that a generation_config.json sets. Raises UsageError for a value out of range."""
        known = {f.name for f in fields(cls)}
        chosen = {k: v for k, v in read_json_object(file).items() if k in known and v is not None}
        try:
            GenerationConfig(**chosen)
        except UsageError as error:
            raise UsageError(f"{file}: {error}") from error
        return replace(cls(), **chosen)


def generation_config(
    request: GenerateRequest,
    defaults: SamplingDefaults,
    *,
    max_new_tokens: int | None,
    logprobs: int | None,
    vocab_size: int,
    prompt_logprobs: int | None = None,
) -> GenerationConfig:
    """The config of choice 0. ``max_new_tokens`` None = as far as the session goes.

    Raises ApiError (400) for token ids past ``vocab_size``, UsageError for what GenerationConfig itself refuses.
    """
    sampling = {f.name: getattr(request, f.name) for f in fields(defaults)}
    sampling = {k: getattr(defaults, k) if v is None else v for k, v in sampling.items()}
    sampling["top_k"] = max(sampling["top_k"], 0)
    for token in request.stop_token_ids or ():
        if token >= vocab_size:
            raise bad_field("stop_token_ids", f"expected ids below {vocab_size}, found {token}")
    return GenerationConfig(
        do_sample=True,
        max_new_tokens=max_new_tokens,
        min_new_tokens=request.min_new_tokens,
        random_seed=request.seed,
        stop_words=request.stop,
        stop_token_ids=request.stop_token_ids,
        bad_words=request.bad_words,
        ignore_eos=bool(request.ignore_eos),
        skip_special_tokens=_or(request.skip_special_tokens, True),
        spaces_between_special_tokens=_or(request.spaces_between_special_tokens, True),
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        repetition_ngram_size=request.repetition_ngram_size or 0,
        repetition_ngram_threshold=request.repetition_ngram_threshold or 0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_logit_bias(request.logit_bias, vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        response_format=request.response_format.rule() if request.response_format else None,
        **sampling,
    )


def choice_config(config: GenerationConfig, index: int) -> GenerationConfig:
    """The config of choice ``index``: the same, with its own seed."""
    if index == 0 or config.random_seed is None:
        return config
    seed = config.random_seed + index
    choice = copy(config)  # checked already: long lists are not looked through again for every choice
    choice.random_seed = seed if seed <= SEED_MAX else seed & SEED_MAX
    return choice


def _or(value: bool | None, default: bool) -> bool:
    return default if value is None else value


def _logit_bias(given: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not given:
        return None
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and int(key[:12]) < vocab_size):
            raise bad_field("logit_bias", f"expected token ids below {vocab_size} as keys, found {key!r:.40}")
        bias[int(key)] = value
    return bias
