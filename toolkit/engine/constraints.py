"""What a request's parameters ask of its logits beyond plain sampling numbers, made once when it arrives.

Building some of it takes long (loading xgrammar, compiling a large schema, sorting the vocabulary for bad words): that
is done in a thread of its own, so that running requests do not wait.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit import extras
from toolkit.box.box import Ticket
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.engine.sequence import Biases, History
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.artifacts.tokenizer import Tokenizer
    from toolkit.engine.bad_words import BadWords
    from toolkit.engine.grammar import Grammars

PATIENCE = 60.0  # seconds that building a request's constraints may take


class Constraints:
    """Bad words and grammars over one tokenizer, both set up when first asked for."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._bad_words: BadWords | None = None
        self._grammars: Grammars | None = None
        self._lock = threading.Lock()  # over the two above

    def slow(self, request: EngineRequest) -> bool:
        """Whether ``of`` may take longer than a step should wait."""
        p = request.params
        if p.bad_words and (self._bad_words is None or not self._bad_words.knows(p.bad_words)):
            return True
        wanted = _grammar(p)
        return wanted is not None and (self._grammars is None or not self._grammars.has(wanted))

    def of(self, request: EngineRequest, ticket: Ticket | None = None) -> dict[str, Any]:
        """``Sequence`` fields grammar, bad_words, history and biases. Raises UsageError for a bad grammar, Cancelled
        when ``ticket`` says so."""
        p = request.params
        penalised = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        biased = p.logit_bias or p.bad_token_ids or (p.min_new_tokens and p.stop_token_ids)
        found: dict[str, Any] = {
            "history": History(np.array(request.token_ids, np.int32)) if penalised else None,
            "biases": Biases(p) if biased else None,
        }
        if p.bad_words:
            found["bad_words"] = self._words().state(p.bad_words)
        if (wanted := _grammar(p)) is not None:
            found["grammar"] = self._compiler().state(wanted, p.stop_token_ids, ticket)
        return found

    def _words(self) -> BadWords:
        with self._lock:
            if self._bad_words is None:
                from toolkit.engine.bad_words import BadWords

                self._bad_words = BadWords(self._text().token_bytes[: self._vocab_size])
            return self._bad_words

    def _compiler(self) -> Grammars:
        with self._lock:
            if self._grammars is None:
                with extras.named():
                    from toolkit.engine.grammar import Grammars

                self._grammars = Grammars(self._text(), self._vocab_size)
            return self._grammars

    def _text(self) -> Tokenizer:
        if self._tokenizer is None:
            raise UsageError("bad_words and response_format need a tokenizer, and this engine was opened without one")
        return self._tokenizer


class Building:
    """A request's constraints on their way, in a thread of their own."""

    def __init__(self, constraints: Constraints, request: EngineRequest) -> None:
        self._constraints = constraints
        self._request = request
        self._found: dict[str, Any] = {}
        self._error: Exception | None = None
        self._deadline = time.monotonic() + PATIENCE
        self._ticket = Ticket()
        self._thread = threading.Thread(target=self._build, name="toolkit-constraints", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether ``result`` has an answer: the constraints, an error, or that it took too long."""
        return not self._thread.is_alive() or time.monotonic() > self._deadline

    def cancel(self) -> None:
        """Nobody wants the result any more."""
        self._ticket.cancel()

    def wait(self, seconds: float) -> None:
        """Until it is done, at most so long."""
        self._thread.join(seconds)

    def result(self) -> dict[str, Any]:
        """What ``Constraints.of`` gives. Raises what it raises, and UsageError after ``PATIENCE`` seconds."""
        if self._thread.is_alive():
            self.cancel()
            raise UsageError(f"response_format: not compiled after {PATIENCE:.0f} s; use a smaller one")
        if self._error is not None:
            raise self._error
        return self._found

    def _build(self) -> None:
        try:
            self._found = self._constraints.of(self._request, self._ticket)
        except Exception as e:
            self._error = e


def _grammar(params: SamplingParams) -> dict[str, Any] | None:
    """The response format where it constrains anything."""
    wanted = params.grammar
    return wanted if wanted and wanted.get("type", "text") != "text" else None
