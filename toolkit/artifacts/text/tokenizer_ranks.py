"""Tokenizers that are a list of byte strings by rank (tiktoken's files), in the form of the ``tokenizers`` library.

A file has a line a token: its bytes in base64, a blank, its rank, which is its id. Texts are cut by a pattern, and what
is cut is joined pair by pair, the pair that makes the token of lowest rank first: byte-level BPE without a list of
merges. Pairs are found here as the halves of each token that are tokens themselves.
"""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from toolkit.artifacts.json_file import read_json_object
from toolkit.artifacts.text import patterns
from toolkit.artifacts.text.token_bytes import byte_level_table
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError


@dataclass(frozen=True)
class RanksFile:
    """One kind of file, by its name. ``pattern`` cuts texts. ``special``: tokens that have the ids behind the ranks;
    ``reserved``: so many ids behind them have names in tokenizer_config.json or none. ``prefix``: what stands before
    every text. ``composed``: whether texts are brought into Unicode's form NFC first."""

    name: str
    pattern: str
    special: tuple[str, ...] = ()
    reserved: int = 0
    prefix: tuple[str, ...] = ()
    composed: bool = False


_EXTRA = tuple(f"<|extra_{i}|>" for i in range(205))
QWEN = RanksFile(  # Qwen 1, from the model's own tokenization_qwen.py
    "qwen.tiktoken", patterns.ONES, ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_EXTRA), composed=True
)
_TAGS = tuple(f"{slash}{name}>" for name in ("ref", "box", "quad", "img") for slash in ("<", "</"))
QWEN_VL = replace(QWEN, special=(*QWEN.special, *_TAGS, "<imgpad>"))  # of a model whose config.json has "visual"
HUNYUAN = RanksFile(  # from tokenization_hy.py
    "hy.tiktoken",
    QWEN.pattern,
    ("<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", *_EXTRA),
    composed=True,
)
KIMI = RanksFile(  # Kimi K2 and Moonlight, from tokenization_kimi.py
    "tiktoken.model", patterns.KIMI, reserved=258
)
GLM = RanksFile(  # GLM-4-9B and CodeGeeX4, whose special tokens stand in tokenizer_config.json
    "tokenizer.model", patterns.THREES, prefix=("[gMASK]", "<sop>")
)
RANKS = (QWEN, HUNYUAN, KIMI, GLM)
MAX_BYTES = 64 << 20
MAX_LINE = 2048  # bytes; the longest tokens of public files have some hundred
MAX_CUTS = 1 << 28  # sum of squared lengths: what cutting each token in two everywhere takes
_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")


def find_ranks(folder: Path) -> RanksFile | None:
    """Of which kind a file of ranks lies in a model's folder, or None; sentencepiece's files have GLM's name too."""
    found = next((kind for kind in RANKS if _begins_with_a_rank(folder / kind.name, kind != GLM)), None)
    config = folder / "config.json"
    if found == QWEN and config.is_file() and "visual" in read_json_object(config):
        return QWEN_VL
    return found


def _begins_with_a_rank(path: Path, told: bool) -> bool:
    """Whether it is a file of ranks, which its name alone tells where ``told``."""
    try:
        with path.open("rb") as file:
            return told or _LINE.match(file.readline(4096)) is not None
    except OSError:
        return False


def read_ranks(folder: Path, kind: RanksFile, config: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of the file; ``config``: tokenizer_config.json. Raises ToolkitError, one line, for one that is no
    such file."""
    ranks = _ranks(folder / kind.name)
    character = {byte: text for text, byte in byte_level_table().items()}
    spelled = {token: "".join(character[byte] for byte in token) for token in ranks}
    vocabulary = {spelled[token]: rank for token, rank in ranks.items()}
    merges = [(spelled[a], spelled[b]) for a, b in _pairs(ranks)]
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    if kind.composed:
        made.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(tokenizers.Regex(kind.pattern), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    special = [*kind.special, *_reserved(kind, len(ranks) + len(kind.special), config)]
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return made


def _reserved(kind: RanksFile, first: int, config: dict[str, Any]) -> list[str]:
    named = config.get("added_tokens_decoder")
    named = named if isinstance(named, dict) else {}
    entries = [(i, named.get(str(i))) for i in range(first, first + kind.reserved)]
    texts = [(i, entry.get("content") if isinstance(entry, dict) else None) for i, entry in entries]
    return [text if isinstance(text, str) else f"<|reserved_token_{i}|>" for i, text in texts]


def _ranks(file: Path) -> dict[bytes, int]:
    found: dict[bytes, int] = {}
    try:
        if (size := file.stat().st_size) > MAX_BYTES:
            raise ToolkitError(f"{file}: {size:,} bytes, more than the {MAX_BYTES:,} that are read")
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
        if len(line) > MAX_LINE:
            raise ToolkitError(f"{file}: line {number}: {len(line):,} bytes, more than the {MAX_LINE:,} of a token")
    if (cuts := sum(len(token) ** 2 for token in found)) > MAX_CUTS:
        raise ToolkitError(f"{file}: {cuts:,} bytes to compare for its pairs, more than {MAX_CUTS:,}")
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
