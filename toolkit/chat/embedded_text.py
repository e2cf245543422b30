"""How a text that becomes a vector is read: behind a prompt, and as it is or as a turn of the model's chat template."""

from __future__ import annotations

from functools import cached_property

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.artifacts.text_head import chat_options, default_prompt
from toolkit.chat.template import ChatTemplate


class EmbeddedText:
    """What sentence-transformers makes of a text (6.2.0): the folder's default prompt stands before it. A folder that
    newer ones have saved names the modality "message" where its tokenizer had a chat template, and every text goes
    through that, a default prompt as the system's turn (``base/modules/transformer.py``).

    ``alone``: texts are read as they are, with the tokens that the tokenizer adds; else ``written`` has all of them.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        """Raises ToolkitError for a folder that says of its texts what is not known here."""
        self._tokenizer, self._template = tokenizer, template
        self._options, self._prompt = chat_options(tokenizer.path), default_prompt(tokenizer.path)
        self.alone = self._options is None

    def written(self, text: str) -> str:
        """The text with its prompt, in the template where it goes through that."""
        if self._options is None:
            return self._prompt + text
        ahead = [{"role": "system", "content": self._prompt}] if self._prompt else []
        turns = [*ahead, {"role": "user", "content": text}]
        return self._template.render(turns, **{"add_generation_prompt": False, **self._options})

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Token ids; of a text that takes more than ``most`` the beginning, with what stands around it."""
        if self.alone and most is not None:
            return self._tokenizer.encode_beginning(self.written(text), most)
        ids = self._ids(text)
        if most is None or len(ids) <= most:
            return ids
        end = self._end[-most:]
        return ids[: most - len(end)] + end

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(self.written(text), add_special_tokens=self.alone)

    @cached_property
    def _end(self) -> list[int]:
        """What every turn ends with: what two of them have in common at their ends."""
        first, second = self._ids("0"), self._ids("1 2 3 4")
        count = 0
        while count < min(len(first), len(second)) and first[-1 - count] == second[-1 - count]:
            count += 1
        return first[len(first) - count :] if 0 < count < min(len(first), len(second)) else []
