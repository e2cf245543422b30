"""BERT's tokenizer out of a GGUF file's metadata: words of a vocabulary, and pieces that go on within a word."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.artifacts.gguf.keys import Keys
from toolkit.artifacts.text.tokenizer_pieces import CONTROL, SPACE
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WORDPIECE = "bert"  # a kind of tokenizer
_INSIDE = "##"
_PLAIN = re.compile(r"[^\s$:]+")  # what means itself in a template
# What its parts are called in tokenizer_config.json, and in the file: the first of the names that it has, else the id
# that llama.cpp takes it to be.
_SPECIAL = {
    "cls_token": (("cls", "bos"), 101),
    "sep_token": (("seperator", "separator", "eos"), 102),
    "unk_token": (("unknown",), 100),
    "pad_token": (("padding",), 0),
    "mask_token": (("mask",), 103),
}


def wordpiece(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer, with the tokens around a text. Raises ToolkitError that names file and key for what it cannot
    be."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    words = _as_bert_has_them(metadata)
    vocab = {word: i for i, word in enumerate(words)}
    special = special_tokens(path, metadata)
    built = Tokenizer(models.WordPiece(vocab, unk_token=special["unk_token"], continuing_subword_prefix=_INSIDE))
    capitals = any(not word.startswith("[") and any("A" <= c <= "Z" for c in word) for word in words)
    built.normalizer = normalizers.BertNormalizer(lowercase=not capitals)  # no key tells
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece(prefix=_INSIDE)
    begin, end = special["cls_token"], special["sep_token"]
    if not all(map(_PLAIN.fullmatch, (begin, end))):
        raise ToolkitError(
            f"{path}: tokenizer.ggml.cls_token_id: expected tokens like [CLS] and [SEP] around a text, found "
            f"{begin!r:.40} and {end!r:.40}"
        )
    built.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B:1 {end}:1",
        special_tokens=[(token, vocab[token]) for token in dict.fromkeys((begin, end))],
    )
    return built


def special_tokens(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    """What stands around texts, or for words that are none, by its name in tokenizer_config.json. Raises ToolkitError
    for an id that the vocabulary has not."""
    words = _as_bert_has_them(metadata)
    keys = Keys(path, metadata, "tokenizer.ggml")
    found = {}
    for name, (theirs, usual) in _SPECIAL.items():
        key = next((key for x in theirs if keys.value(key := f"{x}_token_id") is not None), None)
        value = usual if key is None else keys.value(key)
        if not 0 <= value < len(words):
            if key is None and name in ("pad_token", "mask_token"):
                continue  # nothing that is read here has one
            raise keys.fail(key or f"{theirs[0]}_token_id", value, f"a token id below {len(words)}")
        found[name] = words[value]
    return found


def _as_bert_has_them(metadata: Mapping[str, Any]) -> list[str]:
    """The tokens as BERT's vocabulary spells them. In the file words begin with a blank, and pieces that go on within a
    word are bare."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    whole = set(np.flatnonzero(np.asarray(metadata.get("tokenizer.ggml.token_type", ())) == CONTROL).tolist())

    def spelled(i: int, token: str) -> str:
        if token.startswith(SPACE):
            return token.removeprefix(SPACE)
        return token if i in whole or (token.startswith("[") and token.endswith("]")) else _INSIDE + token

    return [spelled(i, token) for i, token in enumerate(tokens)]
