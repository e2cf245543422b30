"""The tokens that tokenizer_config.json declares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from toolkit.artifacts.text.tokenizer_classes import SPECIAL_NAMES
from toolkit.errors import ToolkitError


def token_text(value: Any) -> str | None:
    """A special token in tokenizer_config.json is a string or an object with "content"."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def with_config_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], path: Path) -> tokenizers.Tokenizer:
    """Make the tokenizer know the tokens that tokenizer_config.json declares, at the ids declared there."""
    declared = _declared_tokens(config, path)
    misplaced = {i: t for i, t in declared.items() if backend.token_to_id(t.content) != i}
    if renamed := {i: t for i, t in misplaced.items() if backend.id_to_token(i) is not None}:
        backend = _rename(backend, {i: t.content for i, t in renamed.items()}, path)
    absent = [(i, misplaced[i]) for i in sorted(misplaced) if i not in renamed]
    backend.add_tokens([token for _, token in absent])
    for i, token in absent:
        if backend.token_to_id(token.content) != i:
            raise ToolkitError(
                f"{path / 'tokenizer_config.json'}: added_tokens_decoder puts {token.content!r} at id {i}, "
                f"but the next free id of tokenizer.json is {backend.token_to_id(token.content)}"
            )
    known = backend.get_added_tokens_decoder()
    missing = [t for i, t in declared.items() if i not in known]
    texts = {t.content for t in known.values()} | {t.content for t in missing}
    extra = config.get("additional_special_tokens")
    named = [config.get(n) for n in SPECIAL_NAMES] + (extra if isinstance(extra, list) else [])
    for text in filter(None, map(token_text, named)):
        if text not in texts and backend.token_to_id(text) is not None:
            missing.append(tokenizers.AddedToken(text, special=True, normalized=False))
            texts.add(text)
    if missing:
        backend.add_special_tokens([t for t in missing if t.special])
        backend.add_tokens([t for t in missing if not t.special])
    return backend


def _declared_tokens(config: dict[str, Any], path: Path) -> dict[int, tokenizers.AddedToken]:
    entries = config.get("added_tokens_decoder") or {}
    tokens = {}
    try:
        for key, entry in entries.items():
            flags = {n: bool(entry.get(n, False)) for n in ("lstrip", "rstrip", "single_word", "normalized", "special")}
            tokens[int(key)] = tokenizers.AddedToken(entry["content"], **flags)
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise ToolkitError(
            f"{path / 'tokenizer_config.json'}: added_tokens_decoder: expected id -> {{content, …}}, "
            f"found {entries!r:.60}"
        ) from e
    return tokens


def _rename(backend: tokenizers.Tokenizer, names: dict[int, str], path: Path) -> tokenizers.Tokenizer:
    """Give vocabulary slots the names that tokenizer_config.json declares for them.

    InternLM2 ships placeholders like ``[UNUSED_TOKEN_145]`` in tokenizer.json where its config says ``<|im_start|>``;
    adding the name as a new token would put it beyond the model's vocabulary.
    """
    data = json.loads(backend.to_str())
    vocab = data["model"]["vocab"]
    for i, name in names.items():
        if not isinstance(vocab, dict) or backend.token_to_id(name) is not None:
            raise ToolkitError(
                f"{path / 'tokenizer_config.json'}: added_tokens_decoder puts {name!r} at id {i}, "
                f"but tokenizer.json has {backend.id_to_token(i)!r} there; take both files from the same model"
            )
    for old in [text for text, i in vocab.items() if i in names]:
        i = vocab.pop(old)
        vocab[names[i]] = i
    data["added_tokens"] = [t for t in data["added_tokens"] if t["id"] not in names]
    return tokenizers.Tokenizer.from_str(json.dumps(data, ensure_ascii=False))
