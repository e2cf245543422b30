"""Guesses by looking up: a text often goes on as it, or an answer before it, went on before.

Where the end of a request's text has stood before, what came behind it there is guessed, and copied on as long as it
comes true. A token that differs is stepped over: edited text goes on behind the edit. Every new token is compared with
what would have been guessed, guessed or not, so the chances are known without a guess.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from toolkit.configs.speculative import Share
from toolkit.engine.drafts.draft import NO_GUESS, Draft, Guess
from toolkit.engine.drafts.odds import Kind, Odds, lookup_odds, place
from toolkit.engine.drafts.search import BORDER, LONGEST, Answers, IDs, Newest, Seen, longest, pair, pairs
from toolkit.engine.sequence import Sequence

LEAST = 2  # tokens of an answer that is kept
USERS = 64  # whose answers are kept, those that last asked
_NOTHING = np.zeros(0, np.int32)


class Lookup(Draft):
    """``share``: whose answers are looked up: of the same user, of all, of nobody."""

    name = "lookup"

    def __init__(self, share: Share = "user") -> None:
        self._share = share
        self._users = lookup_odds()
        self._copies: dict[Sequence, Copy] = {}
        self._answers: OrderedDict[tuple[int, str], Answers] = OrderedDict()  # by adapter and owner

    def propose(self, asked: Seq[tuple[Sequence, int]]) -> list[Guess]:
        """Behind what each request's known tokens ended with before."""
        return [self._of(seq).guess(most, self.least) for seq, most in asked]

    def forget(self, seq: Sequence) -> None:
        """Keep its answer for others."""
        self._copies.pop(seq, None)
        answer = seq.tokens[seq.prompt_len : seq.known]
        if self._share == "off" or len(answer) < LEAST:
            return
        key = self._key(seq)
        if key not in self._answers:
            self._answers[key] = Answers()
            if len(self._answers) > USERS:
                self._make_room()
        self._answers[key].add(seq.tokens[: seq.prompt_len], answer)

    def _make_room(self) -> None:
        """Forget the answers that were used longest ago of the API key that has most: behind one there may be many
        owners, for whoever has it can name some."""
        kept = Counter(_key_of(owner) for _, owner in self._answers)
        most = max(kept.values())
        del self._answers[next(name for name in self._answers if kept[_key_of(name[1])] == most)]

    def _of(self, seq: Sequence) -> Copy:
        copy = self._copies.get(seq)
        if copy is None:
            key = self._key(seq)
            others = self._answers.get(key)
            if others is not None:
                self._answers.move_to_end(key)
            odds = Odds(above=self._users.of(seq.request.whose.user))
            copy = self._copies[seq] = Copy(seq, others, odds)
        return copy

    def _key(self, seq: Sequence) -> tuple[int, str]:
        return seq.request.adapter, "" if self._share == "all" else seq.request.whose.owner


def _key_of(owner: str) -> str:
    return owner.partition("/")[0]


class Copy:
    """What a request copies, and how far it has come.

    ``kind`` says which text; the token at ``at`` in it is guessed next, ``agreed`` tokens before it were alike.
    """

    def __init__(self, seq: Sequence, others: Answers | None, odds: Odds) -> None:
        self.seq = seq
        self.kind: Kind | None = None
        self.at = self.agreed = 0
        self._others = others
        self._odds = odds
        self._text = Kind.OWN  # that is copied: ``kind``, but where it was resumed
        self._predicted = np.array(seq.request.prediction, np.int32)
        self._reached = 0  # in the predicted answer
        self._seen = seq.prompt_len
        prompt = pairs(seq.tokens[: seq.prompt_len])
        self._pair = int(prompt[-1]) if len(prompt) else -1  # the last two; most have never stood side by side before
        self._pairs = Seen(prompt[:-1], seq.prompt_len + seq.left)
        self._predicted_pairs = Seen(pairs(self._predicted))
        self._newest = Newest(seq.tokens[: seq.prompt_len - 1], seq.prompt_len + seq.left)
        if len(self._predicted):
            self._text = self.kind = Kind.PREDICTED
            self.agreed = LONGEST
        self._follow()
        if self.kind is None:
            self._search()

    def guess(self, most: int, least: float) -> Guess:
        """Up to ``most`` tokens behind the known ones. ``least``: of a draft."""
        if self._seen < self.seq.known:
            self._follow()
            if self.kind is None or self.kind == Kind.RESUMED:
                self._search()
        if self.kind is None or most < 1 or (first := self._odds.of(place(self.kind, self.agreed))) < least:
            return NO_GUESS
        tokens = self._next(most)
        return Guess(
            tokens, [first, *(self._odds.of(place(self.kind, self.agreed + i)) for i in range(1, len(tokens)))]
        )

    def _source(self) -> NDArray[np.int32]:
        if self._text == Kind.OWN:
            return self.seq.tokens[: self.seq.known]
        if self._text == Kind.PREDICTED:
            return self._predicted
        return _NOTHING if self._others is None else self._others.tokens

    def _next(self, most: int) -> list[int]:
        found: list[int] = self._source()[self.at : self.at + most].tolist()
        if self._text == Kind.OWN and 0 < len(found) < most:  # it ends where it is written: go round
            return (found * -(-most // len(found)))[:most]
        return found[: found.index(BORDER)] if BORDER in found else found

    def _follow(self) -> None:
        """Compare the tokens that have come with those that are copied."""
        last = int(self.seq.tokens[self._seen - 1]) if self._seen else 0
        for token in self.seq.tokens[self._seen : self.seq.known].tolist():
            if self._seen:
                self._newest.add(last, self._seen)
            self._seen += 1
            if self._pair >= 0:
                self._pairs.add(self._pair)
            self._pair, last = pair(last, token), token
            if self.kind is None:
                continue
            source = self._source()
            if self.at >= len(source) or source[self.at] < 0:
                self.kind = None
                continue
            right = bool(source[self.at] == token)
            self._odds.note(place(self.kind, self.agreed), right)
            self.at += 1
            if self._text == Kind.PREDICTED:
                self._reached = self.at
            if not right:  # two that differ, one behind the other: it is another text
                self.kind = None if self.kind == Kind.RESUMED and not self.agreed else Kind.RESUMED
            self.agreed = self.agreed + 1 if right else 0

    def _search(self) -> None:
        known = self.seq.tokens[: self.seq.known]
        tail = known[-LONGEST:]
        best = (0.0, 0)  # chance, tokens alike
        if self.kind == Kind.RESUMED:
            best = self._odds.of(place(self.kind, self.agreed)), self.agreed
        chosen: tuple[Kind, int, int] | None = None
        for text, at, agreed in self._found(known, tail):
            if agreed and (rank := (self._odds.of(place(text, agreed)), agreed)) > best:
                best, chosen = rank, (text, at, agreed)
        if chosen is not None:
            self.kind, self.at, self.agreed = chosen
            self._text = chosen[0]

    def _found(self, known: IDs, tail: IDs) -> Iterator[tuple[Kind, int, int]]:
        """Where the text's end has stood: a kind, the place behind it there, and how many tokens are alike."""
        shared = (0, 0) if self._others is None else self._others.find(tail)
        if self._pair in self._pairs or self._pair in self._predicted_pairs:
            at, agreed = longest(self._predicted, tail, self._reached)
            if agreed > 1:
                yield Kind.PREDICTED, at, agreed
            yield Kind.OWN, *longest(known, tail)
        elif not shared[1] and len(known):
            at = self._newest.of(int(known[-1]))
            yield Kind.OWN, at, int(at > 0 and known[at - 1] == known[-1])
        yield Kind.SHARED, *shared
