"""What a request's parameters ask of its logits beyond plain sampling numbers, made once when it arrives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.engine.request import EngineRequest
from toolkit.engine.sequence import Biases, History
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.artifacts.tokenizer import Tokenizer
    from toolkit.engine.bad_words import BadWords
    from toolkit.engine.grammar import Grammars


class Constraints:
    """Bad words and grammars over one tokenizer, both built when first asked for."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._bad_words: BadWords | None = None
        self._grammars: Grammars | None = None

    def of(self, request: EngineRequest) -> dict[str, Any]:
        """``Sequence`` fields grammar, bad_words, history and biases. Raises UsageError for a bad grammar."""
        p = request.params
        penalised = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        biased = p.logit_bias or p.bad_token_ids or (p.min_new_tokens and p.stop_token_ids)
        found: dict[str, Any] = {
            "history": History(np.array(request.token_ids, np.int32)) if penalised else None,
            "biases": Biases(p) if biased else None,
        }
        if p.bad_words:
            found["bad_words"] = self._words().state(p.bad_words)
        if p.grammar and p.grammar.get("type", "text") != "text":
            found["grammar"] = self._compiler().state(p.grammar, p.stop_token_ids)
        return found

    def _words(self) -> BadWords:
        if self._bad_words is None:
            from toolkit.engine.bad_words import BadWords

            self._bad_words = BadWords(self._text().token_bytes[: self._vocab_size])
        return self._bad_words

    def _compiler(self) -> Grammars:
        if self._grammars is None:
            from toolkit.engine.grammar import Grammars

            self._grammars = Grammars(self._text(), self._vocab_size)
        return self._grammars

    def _text(self) -> Tokenizer:
        if self._tokenizer is None:
            raise UsageError("bad_words and response_format need a tokenizer, and this engine was opened without one")
        return self._tokenizer
