"""Which requests a model can run at all, and how long they may be."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from toolkit.engine.cache.block_manager import window_blocks
from toolkit.engine.options import EngineOptions
from toolkit.engine.request import EngineRequest
from toolkit.errors import UsageError
from toolkit.models.positions import doubled
from toolkit.models.spec import RopeSpec

if TYPE_CHECKING:
    from toolkit.runners.base import Runner


READS_ALONE = "reads texts for embeddings and scores and writes none; use /v1/embeddings, /v1/rerank or `tool embed`"

MUTE = "has no head that writes; use /v1/embeddings, /v1/rerank, /classify or `tool embed`"


def check_request(request: EngineRequest, runner: Runner, max_len: int, session_len: int) -> None:
    """Raise UsageError, naming the field, where the request cannot run. ``max_len``: see ``longest_request``."""
    p, vocab = request.params, runner.spec.vocab_size
    n = len(request.token_ids)
    if request.adapter != -1 and request.adapter not in (numbers := adapters_of(runner)):
        raise UsageError(f"adapter: expected -1 or one of {sorted(numbers)}, found {request.adapter}")
    if n == 0:
        raise UsageError("the prompt is empty: expected at least one token")
    for name, ids in (
        ("prompt", request.token_ids),
        ("logit_bias", p.logit_bias),
        ("bad_token_ids", p.bad_token_ids),
    ):
        if len(ids) and not 0 <= min(ids) <= max(ids) < vocab:
            wrong = next(i for i in ids if not 0 <= i < vocab)
            raise UsageError(f"{name}: token id {wrong} is outside the model's vocabulary of {vocab}")
    if runner.spec.encodes and request.only not in ("cls", "last", "mean"):
        raise UsageError(f"this model ({runner.spec.family}) {READS_ALONE}")
    if runner.spec.mute and not request.only:
        raise UsageError(f"this model ({runner.spec.family}) {MUTE}")
    if p.routes and not runner.spec.mixtures():
        raise UsageError("return_routed_experts: this model has no experts; leave it out")
    if request.pictures and runner.spec.vision is None:
        raise UsageError("image: this model reads text alone; leave the pictures out, or load a model that sees")
    limit = max_len + (1 if request.only else 0)
    if n >= limit:
        if max_len == session_len:
            why, helps = "", longer(session_len, runner.spec.max_position)
        else:
            why, helps = " (all that the KV cache holds)", "raise cache_max_entry_count"
        says = f"the prompt has {n} tokens, but the session length is {max_len}{why}"
        raise UsageError(f"{says}; shorten the prompt, or {helps}")
    p.stop_token_ids = [i for i in p.stop_token_ids if 0 <= i < vocab]  # a tokenizer may know more ids


def adapters_of(runner: Runner) -> Collection[int]:
    """Numbers of the adapters that requests may have: those it was opened with, or what it has taken in since."""
    found: Collection[int] | None = getattr(runner, "adapter_numbers", None)
    return range(len(runner.options.adapters)) if found is None else found


def in_blocks(request: EngineRequest, mask_token: int, processed: bool) -> EngineRequest:
    """The request to a model that guesses blocks of tokens: its ``mask_token`` is none to be drawn. Raises UsageError
    where it asks for what goes from token to token. ``processed``: whether it has logits processors."""
    p = request.params
    asked = {
        "response_format": bool(p.grammar) and (p.grammar or {}).get("type", "text") != "text",
        "bad_words": bool(p.bad_words),
        "logits_processors": processed,
        "typical_p, top_n_sigma, xtc_probability, dynatemp_range, dry_multiplier": p.filters is not None,
        "prompt_logprobs": p.prompt_logprobs >= 0,
        "output_logits": p.logits is not None,
        "output_last_hidden_state": p.hidden is not None,
        "return_routed_experts": p.routes,
    }
    if request.only:
        why = "this model guesses blocks of tokens together"
        raise UsageError(f"scores and embeddings: {why}; use one that draws a token after another")
    for name, given in asked.items():
        if given:
            raise UsageError(f"{name}: not with this model, which guesses blocks of tokens together; leave it out")
    return replace(request, params=replace(p, bad_token_ids=[*p.bad_token_ids, mask_token]))


def longer(length: int, model_len: int, session_len: str = "session_len", scaling: str = "rope_scaling_factor") -> str:
    """What helps where a session of ``length`` tokens is too short for a model that was trained for ``model_len``."""
    if length < model_len:
        return f"raise {session_len} (the model takes {model_len}, if the memory does)"
    return (
        f"go beyond the {model_len} tokens that the model was trained for by a larger {session_len} with {scaling} 2.0 "
        "(docs/how-to/long-prompts.md)"
    )


def longest_request(runner: Runner, options: EngineOptions) -> int:
    """Tokens that one request may have when it is alone: the session length, or less if the KV cache holds less."""
    size, longest = runner.options.block_size, options.session_len
    for group, blocks in zip(runner.spec.cache_groups, options.num_blocks, strict=True):
        if group.reach is None or blocks < window_blocks(group, 1, size):
            longest = min(longest, blocks * size)
    return longest


def long_rope_from(runner: Runner) -> int | None:
    """Longest request in tokens that the short rope frequencies serve; None where there is one set only."""
    for rope in runner.spec.ropes():
        if rope.kind in ("dynamic", "longrope") and rope.original_max_position and not rope.own:
            return rope.original_max_position
    return None


def own_rope(runner: Runner) -> RopeSpec | None:
    """The rope that turns each request by its own length, None where there is none."""
    return next((rope for rope in runner.spec.ropes() if rope.own), None)


def turned_by(rope: RopeSpec, prompt: int) -> int:
    """The length that such a rope reaches for a prompt of so many tokens; 0: it turns as it was trained."""
    trained = rope.original_max_position
    if prompt <= trained:
        return 0
    return doubled(trained, prompt) if rope.doubled else prompt
