"""Tokenizers that are a list of byte strings by rank (tiktoken's files), in the form of the ``tokenizers`` library.

A file has a line a token: its bytes in base64, a blank, its rank, which is its id. Texts are cut by a pattern, and what
is cut is joined pair by pair, the pair that makes the token of lowest rank first: byte-level BPE without a list of
merges. Pairs are found here as the halves of each token that are tokens themselves.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from toolkit.artifacts.text.token_bytes import byte_level_table
from toolkit.errors import ToolkitError


@dataclass(frozen=True)
class RanksFile:
    """One kind of file, by its name: ``pattern`` cuts texts, ``special`` tokens have the ids behind the ranks."""

    name: str
    pattern: str
    special: tuple[str, ...]


QWEN = RanksFile(  # Qwen 1, from the model's own tokenization_qwen.py
    "qwen.tiktoken",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205))),
)
GLM = RanksFile(  # GLM-4-9B and CodeGeeX4, whose special tokens stand in tokenizer_config.json
    "tokenizer.model", QWEN.pattern.replace(r"|\p{N}|", r"|\p{N}{1,3}|"), ()
)
_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")


def find_ranks(folder: Path) -> RanksFile | None:
    """Of which kind a file of ranks lies in a model's folder, or None; sentencepiece's files have GLM's name too."""
    if (folder / QWEN.name).is_file():
        return QWEN
    return GLM if _begins_with_a_rank(folder / GLM.name) else None


def _begins_with_a_rank(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return _LINE.match(file.readline(4096)) is not None
    except OSError:
        return False


def read_ranks(folder: Path, kind: RanksFile) -> tokenizers.Tokenizer:
    """The tokenizer of the file. Raises ToolkitError, one line, for one that is no such file."""
    ranks = _ranks(folder / kind.name)
    character = {byte: text for text, byte in byte_level_table().items()}
    spelled = {token: "".join(character[byte] for byte in token) for token in ranks}
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    merges = [(spelled[a], spelled[b]) for a, b in _pairs(ranks)]
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    made.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(tokenizers.Regex(kind.pattern), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in kind.special])
    return made


def _ranks(file: Path) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise ToolkitError(f"{file}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            found[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ToolkitError(f"{file}: line {number}: found {line[:40]!r}, expected base64 and a rank") from None
    if sorted(found.values()) != list(range(len(found))) or len(found) < 256:
        raise ToolkitError(f"{file}: found {len(found)} tokens, expected each rank from 0 up once, 256 or more")
    if missing := [byte for byte in range(256) if bytes([byte]) not in found]:
        raise ToolkitError(f"{file}: no token is the byte {missing[0]:#04x}, expected one for every byte")
    return found


def _pairs(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Pairs of tokens that make a token, those of low ranks first; of one token the pair of lower ranks first."""
    found: list[tuple[bytes, bytes]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        halves = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in halves if a in ranks and b in ranks]
        found += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return found
