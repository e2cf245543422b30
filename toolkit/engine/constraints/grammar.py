"""Constrained output: a ``response_format`` becomes a bitmask of the tokens that may come next (by xgrammar).

Grammars come from strangers, and compiling one can take all memory, minutes, or crash. So it is done in a box
(``grammar_job.py``); what comes back is kept by content, and here it is only followed, token by token.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.threads import usable_cores
from toolkit.box.box import STAND_BACK, Box, Crowded, LimitError, Limits, OutOfTime, Ticket
from toolkit.engine.constraints.grammar_cost import SMALLER, Hostility, check_cost, given_seconds
from toolkit.engine.constraints.grammar_ends import end_is_near
from toolkit.engine.constraints.grammar_format import check_format, fitted_format, kinds_of_nodes
from toolkit.engine.constraints.grammar_job import Compilers
from toolkit.engine.constraints.grammar_pace import Pace
from toolkit.engine.constraints.json_tokens import JsonTokens, has
from toolkit.engine.constraints.xgrammar_core import CORE, unreachable, vocabulary
from toolkit.errors import BusyError, UsageError

if TYPE_CHECKING:
    from toolkit.artifacts.text.tokenizer import Tokenizer

LIMITS = Limits(memory=2 << 30, cpu_seconds=100.0, seconds=100.0, reply=128 << 20)
_TOKENS = 1 << 16  # of a vocabulary with which a format has the seconds of grammar_cost; with more it has longer
_LONG_TURNS = 2 if usable_cores() > 2 else 1  # that may take all their time at once; what comes meanwhile
_SHORT_TURN = 0.4  # has so many seconds of processor time first: most need less, to be taken or refused;
_LINE = 6  # and so many may then wait for a long turn, which stands back for the short ones
_DEAR_S = 2.0  # who may take more has turns, and a line, of its own, one at a time, and stands back for all others
_WAIT_S = 1.2  # from its arrival on that a format waits for a long turn at most while there are hostile ones
_KEPT, _KEPT_BYTES = 64, 256 << 20  # compiled grammars
_JSON = ("json_object", "json_schema")  # formats whose texts are JSON
SPARE = 32  # tokens, or an eighth of what a text may have: so much longer a token may make the way to its end
DEAD_END = "response_format: has come to a place from which no text goes on: part of it can never be fulfilled"
_REMEMBERED = 1024  # grammars that were refused: they are not tried again
_SPELLED = 1024  # texts that grammars force, kept as tokens,
_FORCED = 512  # of so many characters: no guess is longer


@dataclass(frozen=True)
class Compiled:
    """``grammar``: xgrammar's. ``json``: whether its texts are JSON, or have it in them. ``size``: bytes. ``near``:
    whether the end of a text is never far, so that it may be asked what is forced."""

    grammar: Any
    json: bool
    size: int
    near: bool = False


class Grammars:
    """Compiled grammars over one vocabulary; ``vocab_size`` is the model's, which may exceed the tokenizer's."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._size = vocab_size
        self._eos = [i for i in tokenizer.eos_ids if i < vocab_size]
        tokens = list(tokenizer.token_bytes[:vocab_size])
        self._json = JsonTokens.of(tokens, self._eos, vocab_size)
        for i in tokenizer.special_ids:
            if i < len(tokens):
                tokens[i] = unreachable(tokens[i]) if i not in self._eos else b""
        self._info = vocabulary(tokens, vocab_size, self._eos)
        self._compilers = Compilers(self._info)
        setup = {"lengths": [len(t) for t in tokens], "size": vocab_size, "stops": self._eos}
        size = _LONG_TURNS + 2
        self._box = Box(
            "toolkit.engine.constraints.grammar_job:Compiling", LIMITS, setup, b"".join(tokens), size, forks=True
        )
        self._long_turns, self._dear_turns = _Turns(_LONG_TURNS), _Turns(1)
        self._compiled: OrderedDict[bytes, Compiled] = OrderedDict()  # the one used last is last
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._compiling: set[bytes] = set()
        self._changed = threading.Condition()  # over the three above
        self._spelled = lru_cache(_SPELLED)(lambda text: tokenizer.encode(text, add_special_tokens=False))
        self._hostility = Hostility()  # of those that were refused after a process had worked on them
        self._looking = threading.Lock()

    def find(self, response_format: dict[str, Any]) -> Compiled | None:
        """What ``compiled`` gives where it is there; waits for nothing that is being compiled."""
        key = _key(response_format)
        with self._changed:
            if key in self._compiled:
                self._compiled.move_to_end(key)
            return self._compiled.get(key)

    def compiled(self, response_format: dict[str, Any], ticket: Ticket | None = None) -> Compiled:
        """The grammar, for ``state``.

        Raises UsageError, one line, for a schema, regex or grammar that is too large or does not compile, BusyError
        where others left it no time, and Cancelled when ``ticket`` says so.
        """
        with self._looking:  # one at a time: many threads in Python would keep the engine's from it
            check_format(response_format)
            wanted = fitted_format(response_format)
            check_cost(wanted)
        return self._get(_key(response_format), wanted, ticket or Ticket())

    def why_not(self, waited: float, hurried: bool) -> str | None:
        """Why a format that came ``waited`` seconds ago, and for which a short turn was not enough, is to be asked for
        again later: while there are hostile ones nobody waits long for a long turn. Honest ones wait for each other.
        ``hurried``: hostile ones are known of elsewhere."""
        if waited < _WAIT_S or not (hurried or self._hostility.there):
            return None
        return f"it has waited for {_WAIT_S:g} s beside others that cannot be compiled; try again"

    def state(self, compiled: Compiled, stop_token_ids: list[int]) -> GrammarState:
        """A matcher at the start of a grammar; it allows the stop ids (else eos) where the grammar may end."""
        stops = stop_token_ids or self._eos
        matcher = CORE.GrammarMatcher(compiled.grammar, stops or None, not stops, -1, None)
        spelled = self._spelled if compiled.near else None
        return GrammarState(matcher, frozenset(stops), self._json if compiled.json else None, spelled)

    def _get(self, key: bytes, response_format: dict[str, Any], ticket: Ticket) -> Compiled:
        with self._changed:
            while key in self._compiling:  # another request asked for the same
                ticket.check()
                self._changed.wait(0.1)
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
            if key in self._refused:
                raise UsageError(self._refused[key])
            self._compiling.add(key)
        try:
            compiled = self._compile(key, response_format, ticket)
        finally:
            with self._changed:
                self._compiling.remove(key)
                self._changed.notify_all()
        return compiled

    def _compile(self, key: bytes, response_format: dict[str, Any], ticket: Ticket) -> Compiled:
        kind = response_format["type"]
        try:
            found, size = self._in_turn(response_format, ticket)
        except Crowded as e:
            raise BusyError(f"response_format: the {kind} cannot be compiled now: {e}") from e
        except (ValueError, LimitError) as e:
            why = f"cannot be compiled: {e}; {SMALLER}" if isinstance(e, LimitError) else str(e)
            text = f"response_format: the {kind} {why}"
            self._hostility.met()
            with self._changed:
                self._refused[key] = text
                if len(self._refused) > _REMEMBERED:
                    self._refused.popitem(last=False)
            raise UsageError(text) from e
        near = end_is_near(response_format)
        compiled = Compiled(found, _is_json(response_format), max(size, found.memory_size_bytes()), near)
        with self._changed:
            self._compiled[key] = compiled
            while len(self._compiled) > 1 and (
                len(self._compiled) > _KEPT or sum(c.size for c in self._compiled.values()) > _KEPT_BYTES
            ):
                self._compiled.popitem(last=False)
        return compiled

    def _in_turn(self, response_format: dict[str, Any], ticket: Ticket) -> tuple[Any, int]:
        """xgrammar's grammar, and the bytes it came in. While others take long it has a short turn, which is enough for
        most, and only then waits: so the formats of one client do not hold up those of others. A box stands back for
        the engine; what is known to take long stands back for the other boxes, too."""

        def run(cpu_seconds: float, nice: int) -> tuple[Any, int]:
            again, data = self._box.run(response_format, ticket=ticket, cpu_seconds=cpu_seconds, nice=nice)
            if again:  # in this thread, as it went well in the box
                return self._compilers.compile(response_format), 0
            return CORE.CompiledGrammar.deserialize_json(data.decode(), self._info), len(data)

        larger, given = max(1.0, self._size / _TOKENS), given_seconds(response_format)
        dear = given > _DEAR_S
        turns, nice = (self._dear_turns, 2 * STAND_BACK) if dear else (self._long_turns, 0)
        if not turns.begun():
            try:
                return run(_SHORT_TURN * larger, 0)
            except OutOfTime:
                turns.wait(ticket)
                nice = max(nice, STAND_BACK)
        try:
            return run(given * larger, nice)
        finally:
            turns.end()


def _is_json(response_format: dict[str, Any]) -> bool:
    """Whether its texts are JSON, or have it in them and nothing that a pattern or a grammar says: there a quote may be
    allowed and the end of a line not, which is else so in a string alone."""
    if response_format["type"] != "structural_tag":
        return response_format["type"] in _JSON
    kinds = kinds_of_nodes(response_format["structural_tag"])
    return "json_schema" in kinds and kinds.isdisjoint(("regex", "grammar"))


class _Turns:
    """``count`` at a time, and ``_LINE`` that wait."""

    def __init__(self, count: int) -> None:
        self._free = threading.Semaphore(count)
        self._places = threading.Semaphore(_LINE)

    def begun(self) -> bool:
        """Whether one was free; it is taken."""
        return self._free.acquire(blocking=False)

    def wait(self, ticket: Ticket) -> None:
        """Until one is this format's. Raises Crowded where too many wait or ``ticket`` says so, Cancelled likewise."""
        if not self._places.acquire(blocking=False):
            raise Crowded(f"{_LINE} others that take long wait already; try again later")
        try:
            while not self._free.acquire(timeout=0.1):
                ticket.check_wait()
        finally:
            self._places.release()

    def end(self) -> None:
        self._free.release()


def _key(response_format: dict[str, Any]) -> bytes:
    return hashlib.sha256(
        json.dumps(response_format, default=repr).encode()
    ).digest()  # the order of properties is part of it


@dataclass(frozen=True)
class Mark:
    """A place of a ``GrammarState`` that can be gone back to: its fields then."""

    taken: int
    end: tuple[int, ...]
    spare: int
    look: int
    meant: NDArray[np.int32] | None
    pace: tuple[float, int]
    failure: str | None


class GrammarState:
    """How far one request's output has got in its grammar. ``stops``: tokens that may end it, no part of it.

    ``failure``: why the grammar can be followed no further; from then on no token is allowed. ``json``: None where the
    text is no JSON. ``spelled``: a text as tokens; None where it is not asked what is forced.
    """

    def __init__(
        self,
        matcher: Any,
        stops: frozenset[int],
        json: JsonTokens | None = None,
        spelled: Callable[[str], list[int]] | None = None,
    ) -> None:
        self._matcher = matcher
        self._json = json
        self._spelled = spelled
        self._taken = 0  # tokens that the matcher has
        self._meant: NDArray[np.int32] | None = None  # tokens that stand for the quote that ends a string
        self._spare = -1  # not known yet
        self._look = 0  # the end is looked for when so many tokens are left
        self._end: list[int] = []  # tokens that have to come, the last first
        self._pace = Pace()
        self.stops = stops
        self.failure: str | None = None

    def fill(self, mask: NDArray[np.int32], row: int, among: int = 1, left: int = 1 << 30) -> None:
        """Write the tokens that may come next into ``mask[row]``, one bit a token. ``among``: grammars of this step.
        ``left``: tokens that the output may still have."""
        self._pace.among = among
        self._meant = None
        if self._json is not None and self.failure is None and not self._end:
            self._look_for_end(self._json, left)
        if self._end:
            mask[row] = 0
            mask[row, self._end[-1] >> 5] = np.uint32(1 << (self._end[-1] & 31)).astype(np.int32)
            return
        if self.failure is None:
            self._call(self._matcher.fill_next_token_bitmask, mask, row, False)
            if self.failure is None and not mask[row].any():
                self.failure = DEAD_END
        if self.failure is not None:
            mask[row] = 0
        elif self._json is not None:
            self._json.drop_controls(mask[row])
            self._meant = self._json.open_string(mask[row])
            if self._meant is not None:
                mask[row] |= self._meant

    def meant(self, token: int) -> int:
        """The token that a drawn one stands for."""
        if self._meant is not None and self._json is not None and has(self._meant, token):
            return self._json.quote
        return token

    def accept(self, token: int) -> bool:
        """Take a generated token; True once the output is complete."""
        self._pace.next_token()
        if self._end:
            self._end.pop()
        accepted = self._call(self._matcher.accept_token, token, False)
        self._taken += bool(accepted)
        return self.failure is None and (not accepted or self._matcher.is_terminated())

    # -- along a guess ------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """Where it stands, between ``fill`` and ``accept``."""
        left = self._pace.left, self._pace.among
        return Mark(self._taken, tuple(self._end), self._spare, self._look, self._meant, left, self.failure)

    def back(self, mark: Mark) -> None:
        """To where ``mark`` was made, whatever was accepted since."""
        if self._taken > mark.taken:
            self._matcher.rollback(self._taken - mark.taken)
            self._taken = mark.taken
        self.resume(mark)

    def resume(self, mark: Mark) -> None:
        """What ``fill`` had found when ``mark`` was made; the same tokens have been accepted."""
        self._end, self._spare, self._look, self._meant = list(mark.end), mark.spare, mark.look, mark.meant
        self._pace.left, self._pace.among = mark.pace
        self.failure = mark.failure

    def allows(self, mask: NDArray[np.int32], token: int) -> bool:
        """Whether a token may come next and stands for itself; ``mask``: the row that ``fill`` has just written."""
        return has(mask, token) and not (self._meant is not None and has(self._meant, token))

    def forced(self) -> list[int]:
        """The tokens that come next, as far as the grammar leaves no choice of text."""
        if self._end:
            return self._end[::-1]
        if self.failure is not None or self._spelled is None:
            return []
        text = self._call(self._forced_text)
        return self._spelled(text[:_FORCED]) if text else []

    def _forced_text(self) -> str:
        """As far as it is whole: xgrammar looks at bytes, and what it gives may end within a character, as before "ö"
        or "ü", or begin in one, behind a token that is a part of it. It cannot be read as a text then."""
        try:
            return str(self._matcher.find_jump_forward_string())
        except UnicodeDecodeError as e:
            return e.object[: e.start].decode()

    def _look_for_end(self, json: JsonTokens, left: int) -> None:
        """Before max_tokens cuts a JSON text, bring it to its end: close what is open, make short what has to come."""
        if self._spare < 0:
            self._spare, self._look = min(SPARE, left // 8), left * 3 // 4
        if left > self._look:
            return
        way = self._call(json.way_out, self._matcher, self.stops, left - 1)
        if way is None:
            self._look = left // 2  # nearer to the end it may be simpler
        elif (slack := left - 1 - len(way) - self._spare) > 0:
            self._look = left - (slack + 1) // 2
        else:
            self._end = way[::-1]

    def _call(self, function: Any, *args: Any) -> Any:
        try:
            with self._pace:
                result = function(*args)
        except Exception as e:
            result, self.failure = None, f"response_format: cannot be followed: {' '.join(str(e).split()):.300}"
        if self._pace.lost:
            self.failure = "response_format: takes too long to follow: this text can be read by it in too many ways"
        return result
