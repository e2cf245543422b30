"""How a text that becomes a vector is read: as it is, or as a user's turn in the model's chat template."""

from __future__ import annotations

from functools import cached_property

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.artifacts.text.written import Written
from toolkit.artifacts.text_head import chat_options
from toolkit.chat.template import ChatTemplate


class EmbeddedText:
    """``options``: what the template is told beside the turn; None: texts are read as they are. A folder that newer
    sentence-transformers have saved names the modality "message" where its tokenizer had a chat template,
    and they put every text through that (``sentence_transformers/base/modules/transformer.py``, 6.2.0)."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        """Raises ToolkitError for a folder that says of its texts what is not known here."""
        self._tokenizer, self._template = tokenizer, template
        self.options = chat_options(tokenizer.path)

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Token ids; of a text that takes more than ``most`` the beginning, with what stands around it."""
        if self.options is None:
            return self._tokenizer.encode(text) if most is None else self._tokenizer.encode_beginning(text, most)
        ids = self._ids(text)
        if most is None or len(ids) <= most:
            return ids
        end = self._end[-most:]
        return ids[: most - len(end)] + end

    def turn(self, text: str) -> Written:
        """The text in the template."""
        turn = {"role": "user", "content": text}
        return self._template.render([turn], **{"add_generation_prompt": False, **(self.options or {})})

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(self.turn(text), add_special_tokens=False)

    @cached_property
    def _end(self) -> list[int]:
        """What every turn ends with: what two of them have in common at their ends."""
        first, second = self._ids("0"), self._ids("1 2 3 4")
        count = 0
        while count < min(len(first), len(second)) and first[-1 - count] == second[-1 - count]:
            count += 1
        return first[len(first) - count :] if 0 < count < min(len(first), len(second)) else []
