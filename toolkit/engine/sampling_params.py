"""What a user asked for (GenerationConfig) -> the numbers the engine loop works with (SamplingParams)."""

from __future__ import annotations

import secrets
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from toolkit.configs.generation import PARAMETERS, GenerationConfig
from toolkit.configs.limits import SEED_MAX
from toolkit.engine.constraints.grammar_cost import check_cost
from toolkit.engine.request import Filters, SamplingParams
from toolkit.runners.step import Draw

if TYPE_CHECKING:
    from toolkit.artifacts.text.tokenizer import Tokenizer

BREAKERS = ("\n", ":", '"', "*")  # of DRY: llama.cpp's


def resolve(config: GenerationConfig, tokenizer: Tokenizer, prompt_len: int, session_len: int) -> SamplingParams:
    """Raises UsageError that names the field for a value out of range.

    ``max_new_tokens`` None becomes what the session has left. A stop word that is a special token stops by its id,
    since special tokens do not appear in the text. A response format that allows any text is none.
    """
    config.validate()
    form = config.response_format
    if form is not None:
        from toolkit.engine.constraints.grammar_format import check_format

        check_format(form)
        check_cost(form)
    left = max(1, session_len - prompt_len)
    return SamplingParams(
        max_new_tokens=left if config.max_new_tokens is None else config.max_new_tokens,
        min_new_tokens=config.min_new_tokens or 0,
        **_draw(config),
        stop_token_ids=stop_ids(config, tokenizer),
        bad_token_ids=list(config.bad_token_ids or ()),
        bad_words=list(config.bad_words or ()),
        logit_bias=dict(config.logit_bias or {}),
        ngram_size=config.repetition_ngram_size,
        ngram_limit=config.repetition_ngram_threshold,
        logprobs=-1 if config.logprobs is None else config.logprobs,
        prompt_logprobs=-1 if config.prompt_logprobs is None else config.prompt_logprobs,
        grammar=None if form is None or form["type"] == "text" else form,
        filters=_filters(config),
        logits=config.output_logits,
        hidden=config.output_last_hidden_state,
        routes=config.return_routed_experts,
    )


def special_stops(config: GenerationConfig, tokenizer: Tokenizer) -> dict[int, str]:
    """Stop words that are special tokens, by token id."""
    found = {}
    for word in config.stop_words or ():
        token = tokenizer.token_id(word)
        if token is not None and token in tokenizer.special_ids:
            found[token] = word
    return found


def stop_ids(config: GenerationConfig, tokenizer: Tokenizer) -> list[int]:
    """Ids that end the answer: eos unless ignored, those asked for, stop words that are special tokens."""
    eos = tokenizer.eos_ids
    words = special_stops(config, tokenizer)
    if config.ignore_eos:
        eos, words = [], {i: w for i, w in words.items() if i not in tokenizer.eos_ids}
    return list(dict.fromkeys([*eos, *(config.stop_token_ids or ()), *words]))


def _filters(config: GenerationConfig) -> Filters | None:
    breakers = BREAKERS if config.dry_sequence_breakers is None else config.dry_sequence_breakers
    given = {f.name: getattr(config, f.name) for f in fields(Filters) if f.name != "dry_sequence_breakers"}
    found = Filters(**given, dry_sequence_breakers=list(breakers))
    return found if found.repeats or (found.draws and not config.greedy) else None


def _draw(config: GenerationConfig) -> dict[str, Any]:
    """The fields of ``Draw``; of a greedy request those alone that hold for it."""
    greedy = config.greedy
    found: dict[str, Any] = {f.name: f.default for f in fields(Draw)}
    for name in found.keys() & PARAMETERS.keys():
        if not (greedy and PARAMETERS[name].draws):
            found[name] = type(found[name])(getattr(config, name))
    if config.random_seed is not None:
        found["seed"] = config.random_seed & SEED_MAX
    elif not greedy:
        found["seed"] = secrets.randbits(64)
    return found
