"""From a request's fields to a GenerationConfig: the request goes first, then the model's own, then our defaults."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path

from toolkit.base.user_path import user_path
from toolkit.chat import settings
from toolkit.configs.checks import shown
from toolkit.configs.generation import TYPED, GenerationConfig
from toolkit.configs.limits import SEED_MAX
from toolkit.errors import UsageError
from toolkit.serve.fields.parameters import given_parameters
from toolkit.serve.fields.protocol import SampledRequest
from toolkit.serve.http.errors import bad_field
from toolkit.serve.state import ServerState

_DIGITS = 10  # of a token id
ONLY_THESE = 100.0  # a logit so much higher leaves no other token among the likeliest


def choose_defaults(wanted: str, model_dir: Path | None) -> GenerationConfig:
    """What ``--generation-config`` asks for: "auto" (the model's, in ``model_dir``; None: not known yet), "toolkit"
    (greedy), or another generation_config.json or its directory. Raises UsageError or ToolkitError.
    """
    if wanted in ("auto", "toolkit"):
        return settings.of_model(model_dir) if wanted == "auto" and model_dir is not None else settings.GREEDY
    file = user_path(wanted)
    file = file / "generation_config.json" if file.is_dir() else file
    if file.is_file():
        return settings.of_file(file)
    raise UsageError(
        f"--generation-config {wanted}: expected auto, toolkit, or a generation_config.json or its directory"
    )


def generation_config(
    state: ServerState,
    request: SampledRequest,
    *,
    max_new_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    routed: bool | None = False,
) -> GenerationConfig:
    """The config of choice 0; of sampling the server's defaults where the request asks for nothing else.
    ``max_new_tokens`` None = as far as the session goes. ``routed``: tell which experts tokens went to.

    Raises ApiError (400) for token ids that the model does not have, UsageError for what GenerationConfig itself
    refuses.
    """
    defaults, vocab_size = state.defaults, state.engine.tokenizer.vocab_size
    given = given_parameters(request)
    several = request.drawn > 1 and "temperature" not in given  # greedy choices would be one and the same
    if "top_k" in given:
        given["top_k"] = max(given["top_k"], 0)
    typed = {name: given[name] for name in given.keys() & TYPED.keys() - {"stop", "min_new_tokens"}}
    sampling = settings.change(replace(defaults, do_sample=True) if several else defaults, **typed)
    for token in request.stop_token_ids or ():
        if token >= vocab_size:
            raise bad_field("stop_token_ids", f"expected ids below {vocab_size}, found {token}")
    return replace(
        sampling,
        max_new_tokens=max_new_tokens,
        min_new_tokens=given.get("min_new_tokens"),
        stop_words=request.stop,
        stop_token_ids=request.stop_token_ids,
        bad_words=request.bad_words,
        dry_sequence_breakers=request.dry_sequence_breakers,
        skip_special_tokens=request.skip_special_tokens is not False,
        spaces_between_special_tokens=request.spaces_between_special_tokens is not False,
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        repetition_ngram_size=given.get("repetition_ngram_size", 0),
        repetition_ngram_threshold=given.get("repetition_ngram_threshold", 0),
        logit_bias=_logit_bias(request, vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        return_routed_experts=bool(routed),
        with_cache=bool(request.with_cache),
        preserve_cache=bool(request.preserve_cache),
        migration_request=request.migration_request,
        response_format=request.response_format.rule() if request.response_format else None,
    )


def choice_config(config: GenerationConfig, index: int) -> GenerationConfig:
    """The config of choice ``index``: the same, with its own seed."""
    if index == 0 or config.random_seed is None:
        return config
    seed = config.random_seed + index
    choice = copy(config)  # checked already: long lists are not looked through again for every choice
    choice.random_seed = seed if seed <= SEED_MAX else seed & SEED_MAX
    return choice


def _logit_bias(request: SampledRequest, vocab_size: int) -> dict[int, float] | None:
    given, allowed = request.logit_bias, request.allowed_token_ids
    if allowed is not None:
        if given:
            raise bad_field("allowed_token_ids", "expected either it or logit_bias")
        if (most := max(allowed)) >= vocab_size:
            raise bad_field("allowed_token_ids", f"expected ids below {vocab_size}, found {most}")
        return dict.fromkeys(allowed, ONLY_THESE)
    if not given:
        return None
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= _DIGITS and int(key) < vocab_size):
            raise bad_field("logit_bias", f"expected token ids below {vocab_size} as keys, found {shown(key, 40)}")
        bias[int(key)] = value
    return bias
