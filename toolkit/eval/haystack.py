"""What a model finds again in a long text, by the text's length and the depth at which it stands.

``passkey`` asks as LMDeploy's script does: a number between sentences that say nothing (Mohtashami & Jaggi, "Landmark
Attention", 2023). ``needle`` hides a sentence in a book and scores answers as OpenCompass's NeedleBench does (Li et
al. 2024, after G. Kamradt's test): 100 where the keyword is in the answer, else a fifth of how like it is to the
sentence. Depths are percent of the text before what is hidden. What is asked depends on the seed, the length, the depth
and the round alone.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.checks import number
from toolkit.errors import ToolkitError, UsageError
from toolkit.eval.tasks import CITIES, GARBAGE, PEOPLE, hidden_key, is_key

Kind = Literal["passkey", "needle"]
ANSWER = {"passkey": 16, "needle": 64}  # tokens that an answer may take
SPARE = 4  # tokens: where template and text meet they may be cut otherwise
ENDS = (".", "!", "?")
NEAR = 0.05  # of the text: so far from its depth a needle may stand, to be between two sentences
LEAST = 64  # tokens of text, at least: less holds nothing to look for
TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. I will quiz you "
    "about the important information there."
)
QUIZ = "What is the pass key? The pass key is"
THINGS = ("silver key", "old map", "red lantern", "glass ship", "brass clock", "blue violin", "ivory box", "green lamp")

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Question:
    """``prompt``: what the user says. ``hidden``: the sentence to be found; ``keyword``: what its answer has."""

    prompt: str
    hidden: str
    keyword: str


@dataclass(frozen=True)
class Asked:
    """What a model answers to texts of users, greedy, each of at most so many tokens: the text, and how many tokens the
    prompt took with its template."""

    encode: Encode
    answer: Callable[[list[str], int], list[tuple[str, int]]]


@dataclass(frozen=True)
class Grid:
    """``lengths``: tokens of prompt, template and answer together. ``depths``: percent. ``rounds``: questions each."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    rounds: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        number("--rounds", self.rounds, 1, 10_000, whole=True)
        if not self.lengths or min(self.lengths) < 1:
            raise UsageError(f"--lengths: expected numbers of tokens, found {', '.join(map(str, self.lengths))}")
        if not self.depths or not all(0 <= depth <= 100 for depth in self.depths):
            raise UsageError(f"--depths: expected percent, 0 to 100, found {', '.join(f'{d:g}' for d in self.depths)}")

    @property
    def cells(self) -> list[tuple[int, float]]:
        return [(length, depth) for length in self.lengths for depth in self.depths]


def passkey(encode: Encode, room: int, depth: float, draw: random.Random) -> Question:
    """A question of at most ``room`` tokens."""
    key = str(draw.randrange(1, 50_000))
    told = hidden_key(key)

    def written(times: int) -> str:
        before = round(times * depth / 100)
        lines = [TASK, *[GARBAGE] * before, told, *[GARBAGE] * (times - before), QUIZ]
        return " ".join(lines)

    most = max(0, (room - len(encode(written(0)))) // max(1, len(encode(f" {GARBAGE}")) - 1) + 1)
    return Question(written(_fitting(encode, written, most, room)), told, key)


def needle(encode: Encode, text: str, room: int, depth: float, draw: random.Random) -> Question:
    """A question of at most ``room`` tokens, about a sentence in ``text``, which begins with a sentence of it, ends
    where the room does, and is repeated if short."""
    who, thing = draw.choice(PEOPLE), draw.choice(THINGS)
    city = draw.choice([name for name in CITIES if name not in text] or list(CITIES))
    told = f"{who} hid the {thing} in {city}."
    words = re.findall(r"\S+\s*", f"{text.strip()}\n")
    begins = [i for i in range(len(words)) if words[i - 1].rstrip().endswith(ENDS)] or [0]
    first = draw.choice(begins)
    words = words[first:] + words[:first]

    def written(count: int) -> str:
        taken = [words[i % len(words)] for i in range(count)]
        before = _between(taken, depth)
        book = f"{''.join(taken[:before])}{told} {''.join(taken[before:])}".rstrip()
        return (
            "Answer the question about this document, concisely, and of nothing else.\n"
            f"The document:\n{book}\n\nThe question: In which city did {who} hide the {thing}?"
        )

    return Question(written(_fitting(encode, written, room, room)), told, city)


def _between(words: Sequence[str], depth: float) -> int:
    """Where a sentence may stand at ``depth`` percent: between others, or where none is near, between any two words."""
    wanted = len(words) * depth / 100
    places = [0, len(words), *(i for i in range(1, len(words)) if words[i - 1].rstrip().endswith(ENDS))]
    nearest = min(places, key=lambda place: abs(place - wanted))
    return nearest if abs(nearest - wanted) <= len(words) * NEAR else round(wanted)


def _fitting(encode: Encode, written: Callable[[int], str], most: int, room: int) -> int:
    """How many pieces, ``most`` at most, fit into ``room`` tokens."""
    low, high = 0, 1
    while high < most and len(encode(written(high))) <= room:
        low, high = high, high * 2
    high = min(high, most)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(encode(written(middle))) <= room else (low, middle - 1)
    return low


def likeness(answer: str, hidden: str) -> float:
    """1 − (letters to change, Levenshtein) / (those of the longer), blanks left out."""
    a, b = re.sub(r"\s+", "", answer), re.sub(r"\s+", "", hidden)
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return 1.0 - row[-1] / max(len(a), len(b), 1)


def score(kind: Kind, answer: str, question: Question) -> float:
    """0 to 100."""
    if kind == "passkey":
        return 100.0 * is_key(answer, question.keyword)
    return 100.0 if question.keyword in answer else 20.0 * likeness(answer, question.hidden)


def _check_lengths(grid: Grid, least: int) -> None:
    if (length := min(grid.lengths)) < least:
        raise UsageError(f"--lengths {length}: expected {least} tokens or more, of prompt, template and answer")


def search(kind: Kind, model: Asked, grid: Grid, text: str = "") -> Iterator[dict[str, Any]]:
    """Of each length and depth {"length", "depth", "rounds", "score", "found", "tokens", "seconds"}: the mean score, 0
    to 100, how many rounds had it, the longest prompt's tokens with its template, and the time.

    ``text``: what needles are hidden in. Raises UsageError for a length without room, ToolkitError where the model
    fails.
    """
    least = ANSWER[kind] + LEAST + len(model.encode(TASK + QUIZ))
    _check_lengths(grid, least)  # before a prompt that the shortest does not hold
    (_, bare), *_ = model.answer(["."], 1)
    extra = bare - len(model.encode("."))  # what the template takes
    _check_lengths(grid, extra + least)
    for length, depth in grid.cells:
        room = length - extra - ANSWER[kind] - SPARE
        draws = [random.Random(f"{kind} {grid.seed} {length} {depth:g} {i}") for i in range(grid.rounds)]
        if kind == "passkey":
            asked = [passkey(model.encode, room, depth, draw) for draw in draws]
        else:
            asked = [needle(model.encode, text, room, depth, draw) for draw in draws]
        started = time.perf_counter()
        answers = model.answer([question.prompt for question in asked], ANSWER[kind])
        seconds = time.perf_counter() - started
        if any(tokens + ANSWER[kind] > length for _, tokens in answers):
            raise ToolkitError(f"--lengths {length}: the chat template takes more than it took of a short prompt")
        scores = [score(kind, answer, question) for (answer, _), question in zip(answers, asked, strict=True)]
        yield {
            "length": length,
            "depth": depth,
            "rounds": grid.rounds,
            "score": sum(scores) / len(scores),
            "found": sum(one == 100.0 for one in scores),
            "tokens": max(tokens for _, tokens in answers),
            "seconds": round(seconds, 3),
        }
