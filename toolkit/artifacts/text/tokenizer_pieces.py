"""sentencepiece's files (``tokenizer.model``) in the form of the ``tokenizers`` library, from their bytes alone.

A file is a protocol buffer (https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto): pieces
with scores and types, how texts are normalized, and the kind of model. Its few fields are read here, so that such a
model needs neither sentencepiece, protobuf nor transformers to be served.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE = 1, 2
SPACE = "\u2581"
MAX_BYTES = 64 << 20
MAX_PIECE = 256  # characters
MAX_CUTS = 1 << 26  # of pieces into two, over all of them
MAX_OWN = 4096  # pieces that are looked for one by one


@dataclass(frozen=True)
class Piece:
    text: str
    score: float
    kind: int


@dataclass
class PiecesFile:
    """What a file says. ``model``: UNIGRAM or BPE; ``charsmap``: a compiled table of what replaces which characters;
    ``bos``, ``eos``: ids, below 0 for none."""

    pieces: list[Piece] = field(default_factory=list)
    model: int = UNIGRAM
    bos: int = 1
    eos: int = 2
    suffix: bool = False
    charsmap: bytes = b""
    prefix: bool = True
    squeeze: bool = True
    escape: bool = True

    def named(self, index: int) -> str | None:
        """The text of the piece, None for no such piece."""
        return self.pieces[index].text if 0 <= index < len(self.pieces) else None


_TRAINER = {3: "model", 24: "suffix", 41: "bos", 42: "eos"}
_NORMALIZER = {2: "charsmap", 3: "prefix", 4: "squeeze", 5: "escape"}


def read_pieces(file: Path) -> PiecesFile:
    """The contents of a file. Raises ToolkitError, one line, for what is no such file or cannot be computed here."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise ToolkitError(f"{file}: {file.stat().st_size} bytes, expected at most {MAX_BYTES} of a tokenizer")
        found = _parse(file.read_bytes())
    except OSError as error:
        raise ToolkitError(f"{file}: {error.strerror}") from None
    except (ValueError, struct.error, IndexError, TypeError, AttributeError) as error:
        raise ToolkitError(
            f"{file}: not a file of sentencepiece ({error}); fetch it again from the original model"
        ) from None
    _check(found, file)
    return found


def _check(found: PiecesFile, file: Path) -> None:
    texts = {piece.text for piece in found.pieces}
    longest = max((len(piece.text) for piece in found.pieces), default=0)
    problem = None
    if len(texts) != len(found.pieces) or not texts or "" in texts:
        problem = f"{len(found.pieces)} pieces, {len(texts - {''})} of them different: expected each once"
    elif longest > MAX_PIECE or sum(len(text) ** 2 for text in texts) > MAX_CUTS:
        problem = f"a piece of {longest} characters; expected at most {MAX_PIECE}, and most of them short"
    elif found.model not in (UNIGRAM, BPE):
        problem = f"model_type {found.model}: expected unigram (1) or BPE (2)"
    elif found.suffix or not found.escape:
        problem = "blanks behind words or not escaped, which no model here has"
    elif sum(piece.kind == USER_DEFINED for piece in found.pieces) > MAX_OWN:
        problem = f"more than {MAX_OWN} pieces of its user's own"
    elif sum(piece.kind == UNKNOWN for piece in found.pieces) != 1:
        problem = "expected one piece for what is unknown"
    if problem is not None:
        raise ToolkitError(f"{file}: {problem}")


def _parse(data: bytes) -> PiecesFile:
    found = PiecesFile()
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            (score,) = struct.unpack("<f", piece.get(2, b"\0\0\0\0"))
            found.pieces.append(Piece(piece.get(1, b"").decode(), score, piece.get(3, NORMAL)))
        elif number in (2, 3):
            names = _TRAINER if number == 2 else _NORMALIZER
            for inner, setting in _fields(value):
                if inner in names:
                    _set(found, names[inner], setting)
    return found


def _set(found: PiecesFile, name: str, value: Any) -> None:
    old = getattr(found, name)
    if isinstance(value, bytes) != isinstance(old, bytes):
        raise ValueError(f"{name} is of another type")
    if isinstance(old, bool):
        value = bool(value)
    elif isinstance(old, int):
        value = value - (1 << 64) if value >> 63 else value
    setattr(found, name, value)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, whole number or bytes) of a message's fields."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"field of type {kind}")
        if at + size > len(data):
            raise ValueError("it ends within a field")
        yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError("a number of more than 64 bits")


def build(found: PiecesFile, everywhere: bool = True) -> tokenizers.Tokenizer:
    """The tokenizer of a file; with ``everywhere`` a text gets its blank in front after each special token too, as
    where the parts are encoded one by one, else at its start alone."""
    made = tokenizers.Tokenizer(_model(found))
    steps: list[Any] = []
    if found.charsmap:
        steps.append(normalizers.Precompiled(found.charsmap))
    if found.squeeze:
        steps += [
            normalizers.Replace(tokenizers.Regex(r"\A +| +\z"), ""),
            normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        ]
    if found.prefix and everywhere:
        steps.append(normalizers.Prepend(SPACE))
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    cuts: list[Any] = []
    if found.prefix and not everywhere:
        cuts.append(pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False))
    own = [piece.text for piece in found.pieces if piece.kind == USER_DEFINED]
    if own:  # they are found before anything is joined, the longest first
        pattern = "|".join(re.escape(text) for text in sorted(own, key=len, reverse=True))
        cuts.append(pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"))
    if cuts:
        made.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    undo = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if found.prefix else undo)
    made.add_special_tokens([AddedToken(p.text, normalized=False) for p in found.pieces if p.kind == CONTROL])
    return made


def _model(found: PiecesFile) -> Any:
    unknown = next(i for i, piece in enumerate(found.pieces) if piece.kind == UNKNOWN)
    fallback = any(piece.kind == BYTE for piece in found.pieces)
    if found.model == UNIGRAM:
        scores = [(piece.text, piece.score) for piece in found.pieces]
        return models.Unigram(scores, unk_id=unknown, byte_fallback=fallback)
    merges = merges_by_score(
        [piece.text for piece in found.pieces],
        [piece.score for piece in found.pieces],
        [piece.kind not in (UNKNOWN, CONTROL, BYTE) for piece in found.pieces],
    )
    return models.BPE(
        vocab={piece.text: i for i, piece in enumerate(found.pieces)},
        merges=merges,
        unk_token=found.pieces[unknown].text,
        fuse_unk=True,
        byte_fallback=fallback,
        ignore_merges=any(piece.kind == USER_DEFINED for piece in found.pieces),
    )


def merges_by_score(
    tokens: Sequence[str], scores: Sequence[float], joined: Sequence[bool] | None = None
) -> list[tuple[str, str]]:
    """Pairs of tokens that make a token, in the order in which sentencepiece joins them: a merge ranks as the score of
    what it makes. ``joined``: whether a token may be joined of others."""
    ids = {token: i for i, token in enumerate(tokens)}
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for i, (token, score) in enumerate(zip(tokens, scores, strict=True)):
        if joined is not None and not joined[i]:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-float(score), ids[left], ids[right], (left, right)))
    ranked.sort(key=lambda item: item[:3])
    return [item[3] for item in ranked]
