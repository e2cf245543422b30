"""How many tokens of an answer belong to its thoughts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from toolkit.engine.text.detokenizer import Detokenizer
from toolkit.parsers import registry
from toolkit.parsers.formats import ReasoningFormat
from toolkit.parsers.thinking import Begun
from toolkit.serve.generation.choice import Choice

if TYPE_CHECKING:
    from toolkit.artifacts.text.tokenizer import Tokenizer


class ThoughtTokens:
    """Counts those of one choice, with the marks around a thought, one by one: how many come in a delta is chance."""

    def __init__(self, choice: Choice, form: ReasoningFormat, begun: Begun, tokenizer: Tokenizer) -> None:
        config = choice.config
        shown = config.shown_special_tokens or ()
        self._detokenizer = Detokenizer(tokenizer, config.skip_special_tokens, choice.token_ids, shown)
        self._parser = registry.open_parser(None, form, None, seed="", begun=begun)

    def add(self, token_ids: Iterable[int]) -> int:
        """How many of the answer's next tokens belong to a thought."""
        count = 0
        for token in token_ids:
            before = self._parser.thinking
            self._parser.add(self._detokenizer.add_one(token))
            count += before or self._parser.thinking
        return count
