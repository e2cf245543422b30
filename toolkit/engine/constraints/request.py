"""What a request's parameters ask of its logits beyond plain sampling numbers, made once when it arrives.

Building some of it takes long (loading xgrammar, compiling a large schema, sorting the vocabulary for bad words): that
is done in a few threads of its own, so that running requests do not wait. The engine's thread only looks things up.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from toolkit.base import extras
from toolkit.base.lazy_dataclass import dataclass
from toolkit.box.box import STAND_BACK, Ticket
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.engine.sequence import Biases, History
from toolkit.errors import BusyError, ToolkitError, UsageError

if TYPE_CHECKING:
    from toolkit.artifacts.text.tokenizer import Tokenizer
    from toolkit.engine.constraints.bad_words import BadWords, WordList
    from toolkit.engine.constraints.grammar import Grammars

PATIENCE = 120.0  # seconds that building a request's constraints may take, waiting for a thread included
OF_ONE = 12  # threads that build at once for one user
THREADS = 16  # that build at once; most only wait for a box, and more than may wait there for a longer turn


@dataclass(frozen=True)
class Built:
    """What requests with the same bad words and the same response format share. Asked as a ``Building``, it is done."""

    words: WordList | None
    grammar: Any | None  # compiled
    done: ClassVar[bool] = True

    def wait(self, seconds: float) -> None:
        """It is there."""

    def leave(self) -> None:
        """Nothing is on its way."""

    def result(self) -> Built:
        return self


class Constraints:
    """Bad words and grammars over one tokenizer, which ``open_tokenizer`` opens; all set up when first asked for.

    All but ``build`` is the engine thread's.
    """

    def __init__(self, open_tokenizer: Callable[[], Tokenizer] | None, vocab_size: int) -> None:
        self._open_tokenizer = open_tokenizer
        self._tokenizer: Tokenizer | None = None
        self._vocab_size = vocab_size
        self._bad_words: BadWords | None = None
        self._grammars: Grammars | None = None
        self._setting_up = threading.Lock()  # held by those that build, while they make the two above
        self._under_way: dict[tuple[tuple[str, ...], str | None], Building] = {}  # by content: requests may join these
        self._running: list[Building] = []

    def find(self, params: SamplingParams) -> Built | None:
        """What a request needs, if all of it is there."""
        words = grammar = None
        if params.bad_words:
            words = self._bad_words.find(params.bad_words) if self._bad_words else None
            if words is None:
                return None
        if (wanted := _grammar(params)) is not None:
            grammar = self._grammars.find(wanted) if self._grammars else None
            if grammar is None:
                return None
        if params.filters is not None and params.filters.reads and self._tokenizer is None:
            return None
        return Built(words, grammar)

    def begin(self, params: SamplingParams, user: str = "") -> Building:
        """Have it built for ``user``; requests that ask for the same share one ``Building``."""
        wanted = _grammar(params)
        content = (tuple(params.bad_words), None if wanted is None else json.dumps(wanted, default=repr))
        building = self._under_way.get(content)
        if building is None or building.over:
            building = self._under_way[content] = Building(self, params, content[1])
        building.join(user)
        self.proceed()
        return building

    def proceed(self) -> None:
        """Start what waits for a thread: the next is of the user who has fewest, and of theirs the first that came. Of
        those with the same grammar one at a time, for the others would only wait for it. Some threads are for others
        than the one who has most."""
        self._under_way = {content: b for content, b in self._under_way.items() if not b.over}
        self._running = [b for b in self._running if b.running]
        compiling = {b.grammar for b in self._running if b.grammar is not None}
        used = Counter(user for b in self._running for user in b.users)

        def has(building: Building) -> int:
            return min(used[user] for user in building.users)

        while len(self._running) < THREADS:
            waiting = (b for b in self._under_way.values() if not b.started and b.grammar not in compiling)
            building = min(waiting, key=has, default=None)
            if building is None or has(building) >= OF_ONE:
                return
            building.start()
            self._running.append(building)
            used.update(building.users)
            if building.grammar is not None:
                compiling.add(building.grammar)

    def fields(self, request: EngineRequest, built: Built) -> dict[str, Any]:
        """``Sequence`` fields grammar, bad_words, filtering, history and biases."""
        p = request.params
        penalised = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        biased = p.logit_bias or p.bad_token_ids or (p.min_new_tokens and p.stop_token_ids)
        found: dict[str, Any] = {
            "history": History(np.array(request.token_ids, np.int32)) if penalised else None,
            "biases": Biases(p) if biased else None,
        }
        if p.filters is not None:
            from toolkit.engine.constraints.filters import Filtering

            found["filtering"] = Filtering(p.filters, self._tokenizer.token_bytes if self._tokenizer else ())
        if built.words is not None:
            from toolkit.engine.constraints.bad_words import BadWordState

            found["bad_words"] = BadWordState(built.words)
        if built.grammar is not None:
            assert self._grammars is not None
            found["grammar"] = self._grammars.state(built.grammar, p.stop_token_ids)
        return found

    def why_not(self, waited: float, hurried: bool) -> str | None:
        """As of ``Grammars``."""
        return None if self._grammars is None else self._grammars.why_not(waited, hurried)

    def build(self, params: SamplingParams, ticket: Ticket) -> Built:
        """What ``find`` would find, by any thread. Raises UsageError for a bad grammar, BusyError where others left it
        no time, Cancelled when ``ticket`` says so."""
        wanted = _grammar(params)
        if params.filters is not None and params.filters.reads:
            with self._setting_up:
                self._text()
        words = self._words().list_of(params.bad_words) if params.bad_words else None
        return Built(words, self._compiler().compiled(wanted, ticket) if wanted is not None else None)

    def prepare(self) -> None:
        """Open the tokenizer at a time that suits: nothing else runs meanwhile. Where it fails, a request will tell."""
        with self._setting_up, suppress(ToolkitError):
            self._text()

    def _words(self) -> BadWords:
        with self._setting_up:
            if self._bad_words is None:
                from toolkit.engine.constraints.bad_words import BadWords

                self._bad_words = BadWords(*_spoken(self._text(), self._vocab_size))
            return self._bad_words

    def _compiler(self) -> Grammars:
        with self._setting_up:
            if self._grammars is None:
                with extras.named():
                    from toolkit.engine.constraints.grammar import Grammars

                self._grammars = Grammars(self._text(), self._vocab_size)
            return self._grammars

    def _text(self) -> Tokenizer:
        if self._open_tokenizer is None:
            raise UsageError(
                "bad_words, response_format, dry_sequence_breakers: not with this engine, which was opened without a "
                "tokenizer; leave them out"
            )
        if self._tokenizer is None:
            self._tokenizer = self._open_tokenizer()
        return self._tokenizer


class Building:
    """Constraints on their way, for all requests that joined. All but ``_build`` is the engine thread's. ``grammar``:
    what is compiled for them, as text; ``users``: whose requests they are."""

    def __init__(self, constraints: Constraints, params: SamplingParams, grammar: str | None) -> None:
        self.started = False
        self.grammar = grammar
        self.users: set[str] = set()
        self._constraints = constraints
        self._params = params
        self._requests = 0
        self._built: Built | None = None
        self._error: Exception | None = None
        self._arrived = time.monotonic()
        self._ticket = Ticket(self._why_not)
        self._ended = threading.Event()

    @property
    def done(self) -> bool:
        """Whether ``result`` has an answer: the constraints, an error, or that it took too long."""
        return self._ended.is_set() or time.monotonic() > self._arrived + PATIENCE

    @property
    def over(self) -> bool:
        """Whether it is done, or nobody wants it any more."""
        return self._ticket.cancelled or self.done

    @property
    def running(self) -> bool:
        """Whether it has a thread."""
        return self.started and not self._ended.is_set()

    def join(self, user: str) -> None:
        """Another request, of ``user``, wants the result."""
        self._requests += 1
        self.users.add(user)

    def leave(self) -> None:
        """One of those does not want it any more."""
        self._requests -= 1
        if not self._requests:
            self._ticket.cancel()

    def start(self) -> None:
        self.started = True
        try:
            threading.Thread(target=self._build, name="toolkit-constraints", daemon=True).start()
        except RuntimeError as e:  # these requests' end, not that of the engine, whose thread this is
            self._error = BusyError(f"response_format, bad_words: the system has no thread for them ({e}); try again")
            self._ended.set()

    def wait(self, seconds: float) -> None:
        """Until it is built, at most so long."""
        self._ended.wait(seconds)

    def result(self) -> Built:
        """What ``Constraints.build`` gives. Raises what it raises, and BusyError after ``PATIENCE`` seconds."""
        if not self._ended.is_set():
            self._ticket.cancel()
            raise BusyError(f"response_format: not compiled after {PATIENCE:.0f} s, waiting included; try again")
        if self._error is not None:
            raise self._error
        assert self._built is not None
        return self._built

    def _why_not(self) -> str | None:
        return self._constraints.why_not(time.monotonic() - self._arrived, self._params.hurried)

    def _build(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + STAND_BACK)
        try:
            self._built = self._constraints.build(self._params, self._ticket)
        except Exception as e:
            self._error = e
        self._ended.set()


def _spoken(tokenizer: Tokenizer, size: int) -> tuple[list[bytes], dict[bytes, int]]:
    """What each token says, special ones and those that end an answer nothing; and these by their names."""
    tokens = list(tokenizer.token_bytes[:size])
    silent = [i for i in {*tokenizer.special_ids, *tokenizer.eos_ids} if i < len(tokens)]
    special = {tokens[i]: i for i in silent}
    for i in silent:
        tokens[i] = b""
    return tokens, special


def _grammar(params: SamplingParams) -> dict[str, Any] | None:
    """The response format where it constrains anything."""
    wanted = params.grammar
    return wanted if wanted and wanted.get("type", "text") != "text" else None
