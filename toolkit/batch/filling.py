"""Requests filled where their lines leave something open, by the options of a batch."""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from toolkit.base.user_path import user_path
from toolkit.batch.options import BatchSettings, Filling
from toolkit.chat.origin import named
from toolkit.configs.engine import EngineConfig
from toolkit.errors import UsageError
from toolkit.messages import ChatTemplateConfig
from toolkit.serve.fields.formats import ResponseFormat
from toolkit.serve.generation.sampling import choose_defaults
from toolkit.serve.http.errors import from_validation
from toolkit.serve.openai.batches.lines import ENDPOINTS, Asked
from toolkit.serve.openai.batches.urls import CHAT, PROMPTED, RESPONSES

MOST_SCHEMA = 1 << 20  # bytes of a file that holds one
_LENGTH = {"max_tokens", "max_completion_tokens"}  # two names of one field: a request that gives one says it all
_CHANGING = ("tool_call_parser", "reasoning_parser", "media_io_kwargs")
# Options of an engine by which a model computes something else.
_COMPUTED = ("dtype", "quant_policy", "load_format", "revision", "hf_overrides", "rope_scaling_factor",
             "use_logn_attn", "dynamic_rope", "kv_window", "kv_sinks")  # fmt: skip
_FORMS = (
    "response_format",
    "structured_outputs",
    *(f"guided_{name}" for name in ("json", "regex", "choice", "grammar")),
)


class Filler:
    """Raises UsageError for options that mean nothing."""

    def __init__(self, filling: Filling) -> None:
        self._filling = filling
        self._given = {**(filling.extra_body or {}), **filling.defaults}
        self._schema = None if filling.json_schema is None else _schema(filling.json_schema)
        if filling.prompt is None:
            for name in ("system", "id_column"):
                if getattr(filling, name) is not None:
                    raise UsageError(f"{name}: only with prompt, for rows")
            if filling.endpoint != CHAT:
                raise UsageError("endpoint: only with prompt, for rows; other lines name theirs as url")
        if filling.endpoint not in PROMPTED:
            raise UsageError(f"endpoint: expected {' or '.join(PROMPTED)}, found {filling.endpoint!r:.80}")
        if filling.system is not None and filling.endpoint not in (CHAT, RESPONSES):
            raise UsageError(f"system: {filling.endpoint} has no place for it; write it into the prompt")
        if unknown := sorted(set(self._given) - set().union(*map(_fields, ENDPOINTS))):
            instead = "; those of requests go in by name: max_tokens, temperature" if unknown == ["gen_config"] else ""
            raise UsageError(f"{unknown[0]}: no request has such a field{instead}")
        if self._schema is not None:
            try:
                ResponseFormat.model_validate(_chat_form(self._schema))
            except ValidationError as error:
                raise UsageError(f"json_schema: {from_validation(error).message}") from error

    def body(self, asked: Asked, model: str) -> dict[str, Any]:
        """The body of a request, with what it leaves open. ``model``: what the served model is called."""
        body, known = dict(asked.body), _fields(asked.url)
        for name, value in self._given.items():
            if name == "max_tokens" and asked.url == RESPONSES:
                name = "max_output_tokens"
            if name in known and not (name in _LENGTH and _LENGTH & body.keys()):
                body.setdefault(name, value)
        body.setdefault("model", model)
        if self._schema is not None:
            if asked.url == RESPONSES:
                text = body.get("text") or {}
                form = {"type": "json_schema", "name": "answer", "schema": self._schema}
                if isinstance(text, dict):  # else the answer to the line says what is wrong with it
                    body["text"] = {"format": form, **{k: v for k, v in text.items() if v is not None}}
            elif "response_format" in known and not any(body.get(name) for name in _FORMS):
                body["response_format"] = _chat_form(self._schema)
        return body

    def salt(
        self,
        model: str,
        settings: BatchSettings,
        chat_template: ChatTemplateConfig | str | None = None,
        engine: EngineConfig | None = None,
    ) -> bytes:
        """What tells requests of one filling, to one model, from those of another; 32 bytes. ``settings``, ``engine``:
        what of them changes answers. Raises UsageError for a ``chat_template`` or ``generation_config`` that is
        none."""
        rows = [getattr(self._filling, name) for name in ("prompt", "system", "endpoint", "id_column")]
        told = [rows, self._schema, self._given, model]
        if settings.pooling != "auto":  # whose runs have been told apart by the rest alone
            told.append(settings.pooling)
        others = {name: value for name in _CHANGING if (value := getattr(settings, name)) is not None}
        if settings.generation_config != "auto":
            others["generation_config"] = asdict(choose_defaults(settings.generation_config, None))
        for name in _COMPUTED:
            if engine is not None and (value := getattr(engine, name, None)) != getattr(type(engine), name, None):
                others[name] = value
        if others:
            told.append(others)
        if chat_template is not None and (found := named(chat_template)) is not None:
            made_of = [found.sources, found.pieces, found.meta_instruction, found.stop_words]
            told.append([found.name, *made_of, found.capability, found.parse_special])
        return blake2b(json.dumps(told, sort_keys=True, default=str).encode(), digest_size=32).digest()


def _schema(text: str) -> dict[str, Any]:
    if not text.lstrip().startswith("{"):
        text = _read(user_path(text))
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"json_schema: expected a JSON schema or a file of one, found {text!r:.60} ({error})"
        ) from error
    if not isinstance(schema, dict):
        raise UsageError(f"json_schema: expected a JSON object, found {text!r:.60}")
    return schema


def _read(file: Path) -> str:
    try:
        with file.open("rb") as source:
            data = source.read(MOST_SCHEMA + 1)
        if len(data) > MOST_SCHEMA:
            raise UsageError(f"json_schema: {file} has more than {MOST_SCHEMA:,} bytes")
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UsageError(
            f"json_schema: {str(file)!r:.80} is neither a JSON object nor a file to read ({why})"
        ) from error


def _chat_form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _fields(url: str) -> set[str]:
    """What a body may have there."""
    found: set[str] = set()
    for name, told in ENDPOINTS[url].model_fields.items():
        found |= {name, *([told.alias] if told.alias else ())}
    return found
