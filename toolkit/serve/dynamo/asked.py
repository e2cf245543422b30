"""A request of Dynamo's front end as ours, and our answer as its chunks: tokens in, tokens out. Nothing of Dynamo is
imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolkit.chat import settings
from toolkit.errors import UsageError
from toolkit.messages import GenerationConfig, Response

_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
)  # fmt: skip
_RULES = {"regex": "regex_schema", "choice": "choice", "grammar": "grammar"}
_REFUSED: dict[str, Any] = {  # and what asks for nothing
    "use_beam_search": False, "length_penalty": 1, "best_of": 1, "allowed_token_ids": [], "bad_words_token_ids": [],
}  # fmt: skip


def config_of(request: Mapping[str, Any], defaults: GenerationConfig) -> GenerationConfig:
    """How to generate. Stop texts are the front end's. Raises UsageError for what is not done here."""
    sampling = _given(request, "sampling_options")
    stops, output = _given(request, "stop_conditions"), _given(request, "output_options")
    if request.get("multi_modal_data"):
        raise UsageError("multi_modal_data: pictures are not taken over Dynamo; tool serve api_server takes them")
    for name, neutral in _REFUSED.items():
        if sampling.get(name, neutral) != neutral:
            raise UsageError(f"{name}: not done here, found {sampling[name]!r:.80}")
    typed = {name: sampling[name] for name in _SAMPLING if name in sampling}
    if "top_k" in typed:
        typed["top_k"] = max(0, typed["top_k"])
    if "ignore_eos" in stops:
        typed["ignore_eos"] = bool(stops["ignore_eos"])
    if sampling.get("n", 1) != 1:
        raise UsageError(f"n: expected 1, for Dynamo ends an answer with its first choice, found {sampling['n']!r:.40}")
    found = settings.change(defaults, **typed)
    ends = {*stops.get("stop_token_ids", ()), *stops.get("stop_token_ids_hidden", ())}  # the client's, and the model's
    return replace(
        found,
        max_new_tokens=stops.get("max_tokens"),
        min_new_tokens=stops.get("min_tokens"),
        stop_token_ids=sorted(ends) or None,
        logprobs=output.get("logprobs"),
        prompt_logprobs=output.get("prompt_logprobs"),
        response_format=_rule(sampling.get("guided_decoding")),
        migration_request=_handed(request),
    )


def _given(request: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in (request.get(name) or {}).items() if value is not None}


def _rule(guided: Any) -> dict[str, Any] | None:
    """``guided_decoding`` as GenerationConfig has it."""
    rules = {k: v for k, v in guided.items() if v is not None} if isinstance(guided, dict) else {}
    if "json" in rules:
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": rules["json"]}}
    for name, kind in _RULES.items():
        if name in rules:
            return {"type": kind, kind: rules[name]}
    if unknown := [name for name in rules if name not in ("backend", "whitespace_pattern")]:
        raise UsageError(f"guided_decoding: expected json, {', '.join(_RULES)}, found {unknown[0]!r:.80}")
    return None


def _handed(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Who has computed the prompt, where another worker has."""
    told = prefilled(request)
    return {"remote_engine_id": told["engine_id"]} if isinstance(told.get("engine_id"), str) else None


def prefilled(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the worker that has computed the prompt said (``lent``); empty where none has."""
    return (request.get("prefill_result") or {}).get("disaggregated_params") or {}


def lent(info: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker that has computed a prompt tells the one that goes on (``disaggregated_params``)."""
    return {name: info[name] for name in ("engine_id", "address", "tls", "in_common")}


def chunk_of(delta: Response, tokens: Any) -> dict[str, Any]:
    """A delta that is no error. ``tokens``: of an id its text."""
    chunk: dict[str, Any] = {"token_ids": delta.token_ids, "index": 0}
    if delta.logprobs:
        pairs = list(zip(delta.token_ids, delta.logprobs, strict=True))
        chunk["log_probs"] = [float(probabilities[token]) for token, probabilities in pairs]
        chunk["top_logprobs"] = [_ranked(probabilities, tokens) for _, probabilities in pairs]
    if delta.prompt_logprobs:
        told = [
            None if one is None else {str(e["token_id"]): _known(e) for e in _ranked(one, tokens)}
            for one in delta.prompt_logprobs
        ]
        chunk["engine_data"] = {"prompt_logprobs": told}
    if delta.finish_reason is not None:
        chunk["finish_reason"] = "cancelled" if delta.finish_reason == "abort" else delta.finish_reason
        chunk["completion_usage"] = {
            "prompt_tokens": delta.input_token_len,
            "completion_tokens": delta.generate_token_len,
            "total_tokens": delta.input_token_len + delta.generate_token_len,
            "prompt_tokens_details": {"cached_tokens": delta.cached_tokens},
        }
    return chunk


def _ranked(probabilities: Mapping[int, float], tokens: Any) -> list[dict[str, Any]]:
    best = sorted(probabilities.items(), key=lambda pair: -pair[1])
    return [
        {"rank": rank, "token_id": token, "token": tokens(token), "logprob": float(value)}
        for rank, (token, value) in enumerate(best, 1)
    ]


def _known(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"logprob": entry["logprob"], "rank": entry["rank"], "decoded_token": entry["token"]}
