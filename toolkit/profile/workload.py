"""What to ask a model when measuring it: random prompts, or conversations from a file; and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from toolkit.artifacts.json_file import parse_json
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.eyes.pictures import Picture

MIN_TOKENS = 4  # shorter questions and answers of a dataset measure nothing
INSTRUCTS = ("system", "developer")  # whose turn before the first question is none
# Of random texts: words that most tokenizers know as one token each.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education"
).split()


class Encoder(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def special_ids(self) -> set[int]: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...


@dataclass(frozen=True)
class Ask:
    """A prompt, and how many tokens to generate from it."""

    token_ids: list[int]
    output_len: int
    pictures: tuple[Picture, ...] = ()


def random_prompts(rng: np.random.Generator, tokenizer: Encoder, count: int, length: int) -> list[list[int]]:
    """``count`` prompts of ``length`` uniformly drawn token ids, none of them special. Fresh at every call."""
    plain = np.setdiff1d(np.arange(tokenizer.vocab_size), np.fromiter(tokenizer.special_ids, np.int64))
    if not len(plain):
        raise ToolkitError("tokenizer: all of its tokens are special, so that no random prompt can be drawn")
    return rng.choice(plain, (count, length)).tolist()


def random_asks(seed: int, tokenizer: Encoder, count: int, input_len: int, output_len: int) -> list[Ask]:
    """Random prompts of one length, answers of one length."""
    rng = np.random.default_rng(seed)
    return [Ask(ids, output_len) for ids in random_prompts(rng, tokenizer, count, input_len)]


def dataset_asks(
    file: Path, seed: int, tokenizer: Encoder, count: int, session_len: int, output_len: int | None
) -> list[Ask]:
    """``count`` prompts drawn from ``file`` in a seeded order, over again when it has fewer.

    ``output_len`` None = as long as the dataset's own answer (``.txt``, which has none: 128). Entries that do not fit
    into ``session_len`` are left out. Raises UsageError when nothing usable is found.
    """
    return [Ask(ids, length) for _, ids, length in _drawn(file, seed, tokenizer.encode, count, session_len, output_len)]


def dataset_texts(
    file: Path, seed: int, tokenizer: Encoder | None, count: int, output_len: int | None
) -> list[tuple[str, int]]:
    """The same as texts, and how many tokens to generate from each; without a tokenizer a word is a token."""
    encode = str.split if tokenizer is None else tokenizer.encode
    return [(text, length) for text, _, length in _drawn(file, seed, encode, count, None, output_len)]


def _drawn(
    file: Path,
    seed: int,
    encode: Callable[[str], list[Any]],
    count: int,
    session_len: int | None,
    output_len: int | None,
) -> list[tuple[str, list[Any], int]]:
    """(prompt, its tokens, tokens of its answer) of ``count`` entries."""
    pairs = _read_pairs(file)
    order = np.random.default_rng(seed).permutation(len(pairs))
    found: list[tuple[str, list[Any], int]] = []
    for index in order:
        prompt, answer = pairs[index]
        ids = encode(prompt)
        length = output_len or (len(encode(answer)) if answer is not None else 128)
        fits = session_len is None or len(ids) + length <= session_len
        worth = output_len is not None or length >= MIN_TOKENS
        if len(ids) >= MIN_TOKENS and worth and fits:
            found.append((prompt, ids, length))
        if len(found) == count:
            break
    if not found:
        room = "" if session_len is None else f" and fits into the session of {session_len} tokens"
        raise UsageError(f"--dataset {file}: {len(pairs)} entries, but none has {MIN_TOKENS} tokens or more{room}")
    return [found[i % len(found)] for i in range(count)]


def random_texts(seed: int, tokenizer: Encoder | None, count: int, length: int) -> list[str]:
    """``count`` texts of ``length`` tokens of everyday words in random order; without a tokenizer, of so many words."""
    rng = np.random.default_rng(seed)
    texts = [" ".join(words) for words in rng.choice(np.array(WORDS), (count, length)).tolist()]
    if tokenizer is None:
        return texts
    return [tokenizer.decode(tokenizer.encode(text, False)[:length]) for text in texts]


def _read_pairs(file: Path) -> list[tuple[str, str | None]]:
    """(question, answer or None) from ShareGPT's JSON, JSON lines, or a text with blank lines between prompts."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        raise UsageError(f"--dataset {file}: cannot be read ({why}); expected 'random' or a file") from error
    pairs: list[tuple[str, str | None]]
    if file.suffix == ".txt":
        pairs = [(part.strip(), None) for part in text.split("\n\n") if part.strip()]
    elif file.suffix in (".json", ".jsonl"):
        pairs = [pair for entry in _entries(file, text) if (pair := _pair(entry)) is not None]
    else:
        raise UsageError(f"--dataset {file}: expected .json, .jsonl or .txt, found {file.suffix or 'no ending'!r}")
    if not pairs:
        raise UsageError(
            f"--dataset {file}: no prompts found; expected entries with "
            "'conversations' (ShareGPT), 'messages', 'prompt', 'question', 'instruction' or 'text'"
        )
    return pairs


def _entries(file: Path, text: str) -> Sequence[Any]:
    try:
        if file.suffix == ".jsonl":
            return [parse_json(line, f"--dataset {file}") for line in text.split("\n") if line.strip()]
        data = parse_json(text, f"--dataset {file}")
    except ToolkitError as error:
        raise UsageError(str(error)) from error
    if not isinstance(data, list):
        raise UsageError(f"--dataset {file}: expected a JSON list, found {type(data).__name__}")
    return data


def _pair(entry: Any) -> tuple[str, str | None] | None:
    """The first question and answer of one entry, None if it has no such thing."""
    if isinstance(entry, str):
        return (entry, None) if entry.strip() else None
    if not isinstance(entry, dict):
        return None
    turns = entry.get("conversations") or entry.get("conversation") or entry.get("messages")
    if isinstance(turns, list):
        said = (
            turn for turn in turns if isinstance(turn, dict) and turn.get("from", turn.get("role")) not in INSTRUCTS
        )
        found = [turn.get("value", turn.get("content")) for turn in said]
        texts = [text for text in found if isinstance(text, str)]
        if len(texts) >= 2:
            return texts[0], texts[1]
        return (texts[0], None) if texts else None
    question = _first_text(entry, ("prompt", "question", "instruction", "text"))
    return None if question is None else (question, _first_text(entry, ("completion", "response", "answer", "output")))


def _first_text(entry: dict[str, Any], keys: Sequence[str]) -> str | None:
    return next((text for key in keys if isinstance(text := entry.get(key), str) and text.strip()), None)
