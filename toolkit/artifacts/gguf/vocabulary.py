"""The tokenizer of a checkpoint as GGUF metadata: the inverse of ``tokenizer``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.artifacts.gguf.keys import NEVER, TEMPLATE
from toolkit.artifacts.gguf.pre_tokenizers import COMPOSED, STEPS, name_of
from toolkit.artifacts.json_file import read_json_object
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.artifacts.text.tokenizer_pieces import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from toolkit.errors import ToolkitError

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
UNSCORED = -1000.0  # a score that says nothing, as llama.cpp's converter writes it
_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def vocabulary(
    directory: Path, vocab_size: int, config: dict[str, Any], generation: dict[str, Any], own: str = ""
) -> tuple[dict[str, Any], list[str]]:
    """``tokenizer.*`` entries for the tokenizer in ``directory``, filled up to ``vocab_size`` tokens, and one line each
    on what they cannot say.

    ``config`` and ``generation``: config.json and generation_config.json, for the ids of special tokens; ``own``: the
    kind of tokenizer with byte tokens that the architecture has alone, whose merges are told. Raises
    ToolkitError, one line, for a tokenizer that GGUF (or this tool) cannot express.
    """
    path, opened = directory / "tokenizer.json", None
    if path.is_file():
        data = read_json_object(path)
    else:
        path, opened = directory, Tokenizer.open(directory)
        data = json.loads(opened.backend.to_str())
    model = data["model"] if isinstance(data.get("model"), dict) else {}
    if model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        raise ToolkitError(
            f"{path}: model.type: expected BPE, found {model.get('type')!r:.40}; GGUF needs another tool"
        )
    opened = opened or Tokenizer.open(directory)  # who has looked at what follows
    added = {int(token["id"]): token for token in data.get("added_tokens") or []}
    tokens = {int(i): token for token, i in model["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    if max(tokens, default=0) >= vocab_size:
        raise ToolkitError(
            f"{path}: token id {max(tokens)}: the model has {vocab_size} embeddings; the two do not match"
        )
    listed = [tokens.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    sentencepiece = bool(model.get("byte_fallback"))
    kinds = [
        _kind(i, listed[i], i in tokens, added.get(i), model.get("unk_token"), sentencepiece) for i in range(vocab_size)
    ]
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "llama" if sentencepiece else "gpt2",
        "tokenizer.ggml.pre": "default" if sentencepiece else _pre_tokenizer(path, data),
        "tokenizer.ggml.tokens": listed,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
    }
    merges = [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in model.get("merges") or []]
    if sentencepiece and own:
        del found["tokenizer.ggml.pre"]
        found |= {"tokenizer.ggml.model": own, "tokenizer.ggml.scores": np.full(vocab_size, UNSCORED, np.float32)}
    elif sentencepiece:
        found["tokenizer.ggml.scores"] = _scores(listed, merges)
    if not sentencepiece or own:
        found["tokenizer.ggml.merges"] = [" ".join(pair) for pair in merges]
    found |= _special_ids(opened, listed, config, generation)
    found |= _flags(opened, data, found, sentencepiece)
    never = generation.get("suppress_tokens")
    never = [i for i in never if type(i) is int and 0 <= i < vocab_size] if isinstance(never, list) else []
    found |= {NEVER: np.array(never, np.int32)} if never else {}
    lost = [
        f"the tokenizer's {step} has no place in GGUF: there text that it would change is cut otherwise"
        for step in _lost(data, found.get("tokenizer.ggml.pre", ""), sentencepiece)
    ]
    return found | _templates(opened.chat_templates), lost


def _templates(templates: Mapping[str, str]) -> dict[str, Any]:
    """Chat templates as llama.cpp's converter writes them; where none is the usual one, the first is."""
    if not templates:
        return {}
    usual = templates.get("default") or next(iter(templates.values()))
    named = {re.sub(r"[^A-Za-z0-9]", "_", name): text for name, text in templates.items() if name != "default"}
    listed = {"tokenizer.chat_templates": list(named)} if named else {}
    return listed | {f"{TEMPLATE}.{name}": text for name, text in named.items()} | {TEMPLATE: usual}


def _kind(
    i: int, text: str, exists: bool, added: dict[str, Any] | None, unknown: str | None, sentencepiece: bool
) -> int:
    if not exists:
        return UNUSED
    if sentencepiece and text == unknown:
        return UNKNOWN
    if added is not None:
        return CONTROL if added.get("special") else USER_DEFINED
    return BYTE if sentencepiece and _BYTE_TOKEN.fullmatch(text) else NORMAL


def _scores(tokens: list[str], merges: list[tuple[str, ...]]) -> Any:
    """Sentencepiece joins the pair that makes the token of the highest score: the earlier the merge, the higher."""
    rank: dict[str, int] = {}
    for i, pair in enumerate(merges):
        rank.setdefault("".join(pair), i)
    return np.array([-float(rank.get(token, len(merges))) for token in tokens], np.float32)


def _parts(step: Any) -> list[dict[str, Any]]:
    """A pre-tokenizer or normalizer as a list of its steps."""
    if not isinstance(step, dict):
        return []
    for key in ("pretokenizers", "normalizers"):
        if key in step:
            return [part for inner in step[key] for part in _parts(inner)]
    return [step]


def _lost(data: dict[str, Any], pre: str, sentencepiece: bool) -> list[str]:
    """The normalizers that a reader of the file does not know of."""
    known = ("Prepend", "Replace") if sentencepiece else ("NFC",) if pre in COMPOSED else ()
    return [str(step.get("type")) for step in _parts(data.get("normalizer")) if step.get("type") not in known]


def _pre_tokenizer(path: Path, data: dict[str, Any]) -> str:
    """llama.cpp's name for how text is cut before merging."""
    changed = [step.get("type") for step in _parts(data.get("normalizer")) if step.get("type") != "NFC"]
    if changed:
        raise ToolkitError(
            f"{path}: normalizer: found {changed[0]!r:.40}, which GGUF cannot say of a byte-level tokenizer"
        )
    whole = bool((data.get("model") or {}).get("ignore_merges"))
    found = name_of(_parts(data.get("pre_tokenizer")), whole)
    if found is None:
        raise ToolkitError(
            f"{path}: pre_tokenizer: expected one that llama.cpp has ({', '.join(names[0] for names in STEPS)}), found "
            f"{json.dumps(data.get('pre_tokenizer')):.120}; GGUF cannot say how this model's texts are cut"
        )
    return found


def _special_ids(
    opened: Tokenizer, tokens: list[str], config: dict[str, Any], generation: dict[str, Any]
) -> dict[str, Any]:
    ids: dict[str, int] = {}
    for short, key in _NAMES.items():
        token = opened.config.get(f"{short}_token")
        text = token.get("content") if isinstance(token, dict) else token
        found = config.get(f"{short}_token_id")
        if isinstance(text, str) and text in tokens:
            ids[key] = tokens.index(text)
        elif isinstance(found, int) and 0 <= found < len(tokens):
            ids[key] = found
    ends = generation.get("eos_token_id", config.get("eos_token_id"))
    ends = [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int) and end < len(tokens)]
    if ends:
        ids["eos"] = ids["eos"] if ids.get("eos") in ends else ends[0]
        others = [end for end in ends if end != ids["eos"]]
        ids |= zip(("eot", "eom"), reversed(others), strict=False)
    _, behind = opened.around
    if behind and behind[-1] != ids.get("eos"):  # readers put eos behind a text, no other token
        ids |= {"eot": ids["eos"], "eos": behind[-1]} if "eos" in ids else {"eos": behind[-1]}
    return {f"tokenizer.ggml.{key}_token_id": value for key, value in ids.items()}


def _flags(opened: Tokenizer, data: dict[str, Any], found: dict[str, Any], sentencepiece: bool) -> dict[str, bool]:
    """Whether bos and eos are added, and (sentencepiece) a blank in front."""
    before, behind = opened.around
    flags = {
        "tokenizer.ggml.add_bos_token": before[:1] == [found.get("tokenizer.ggml.bos_token_id")],
        "tokenizer.ggml.add_eos_token": behind[-1:] == [found.get("tokenizer.ggml.eos_token_id")],
    }
    if not sentencepiece:
        return {**flags, "tokenizer.ggml.add_space_prefix": False}
    steps = _parts(data.get("normalizer")) + _parts(data.get("pre_tokenizer"))
    prefix = any(
        step.get("type") == "Prepend"
        or (step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )
    return {**flags, "tokenizer.ggml.add_space_prefix": prefix}
