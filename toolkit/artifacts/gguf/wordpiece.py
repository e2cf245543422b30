"""BERT's tokenizer out of a GGUF file's metadata: words of a vocabulary, and pieces that go on within a word."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.artifacts.gguf.keys import Keys
from toolkit.artifacts.text.tokenizer_pieces import CONTROL, SPACE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WORDPIECE = "bert"  # a kind of tokenizer
_INSIDE = "##"
# What its parts are called in tokenizer_config.json, and in the file: the first of the names that it has, else the id
# that llama.cpp takes it to be.
_SPECIAL = {
    "cls_token": (("cls", "bos"), 101),
    "sep_token": (("seperator", "separator", "eos"), 102),
    "unk_token": (("unknown",), 100),
    "pad_token": (("padding",), 0),
    "mask_token": (("mask",), 103),
}


def wordpiece(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """The tokenizer, with the tokens around a text. Raises ToolkitError that names file and key for what it cannot
    be."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    special = special_tokens(path, metadata)
    words = _as_bert_has_them(tokens, metadata.get("tokenizer.ggml.token_type"))
    vocab = {word: i for i, word in enumerate(words)}
    built = Tokenizer(models.WordPiece(vocab, unk_token=special["unk_token"], continuing_subword_prefix=_INSIDE))
    capitals = any(not word.startswith("[") and any("A" <= c <= "Z" for c in word) for word in words)
    built.normalizer = normalizers.BertNormalizer(lowercase=not capitals)  # no key tells
    built.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    built.decoder = decoders.WordPiece(prefix=_INSIDE)
    begin, end = special["cls_token"], special["sep_token"]
    built.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B:1 {end}:1",
        special_tokens=[(token, tokens.index(token)) for token in dict.fromkeys((begin, end))],
    )
    return built


def special_tokens(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    """What stands around texts, or for words that are none, by its name in tokenizer_config.json. Raises ToolkitError
    for an id that the vocabulary has not."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    keys = Keys(path, metadata, "tokenizer.ggml")
    found = {}
    for name, (theirs, usual) in _SPECIAL.items():
        key = next((key for x in theirs if keys.value(key := f"{x}_token_id") is not None), None)
        value = usual if key is None else keys.value(key)
        if value < 0 or value >= len(tokens):
            if key is None and name in ("pad_token", "mask_token"):
                continue  # nothing that is read here has one
            raise keys.fail(key or f"{theirs[0]}_token_id", value, f"a token id below {len(tokens)}")
        found[name] = tokens[value]
    return found


def _as_bert_has_them(tokens: list[str], types: Any) -> list[str]:
    """Words that llama.cpp begins with a blank, and pieces within words as they are, as the vocabulary spells them."""
    control = np.asarray(types if types is not None else ()) == CONTROL
    whole = {i for i in np.flatnonzero(control).tolist()}

    def spelled(i: int, token: str) -> str:
        if token.startswith(SPACE):
            return token.removeprefix(SPACE)
        return token if i in whole or (token.startswith("[") and token.endswith("]")) else _INSIDE + token

    return [spelled(i, token) for i, token in enumerate(tokens)]
