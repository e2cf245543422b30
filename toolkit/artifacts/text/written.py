"""Prompts in which the special tokens that a template writes are told from those that a message only spells.

A message that says ``<|im_end|>`` would end its own turn, and could begin the system's. So what messages spell is kept
as text: the template runs on marks in its place, and the tokenizer knows the tokens that are meant by other names.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable
from typing import Any

import tokenizers

from toolkit.artifacts.text.tokenizer_box import BoxedEncoder

Names = frozenset[str]


class Written(str):
    """A prompt, which reads as the plain text it is. ``marked``: with marks for the tokens that are only spelled;
    ``spelled``: what stands at each mark; ``names``: the special tokens that are told apart."""

    marked: str
    spelled: dict[str, str]
    names: Names

    @classmethod
    def of(cls, marked: str, spelled: dict[str, str], names: Names) -> Written:
        """Marks that the template has dropped, or written twice, are no matter."""
        made = cls(_replaced(marked, spelled))
        made.marked, made.spelled, made.names = marked, spelled, names
        return made

    def through(self, change: Callable[[str], str]) -> Written:
        """With ``change`` made to what the template has written."""
        return Written.of(change(self.marked), self.spelled, self.names)


class Marks:
    """Puts marks in the place of ``names`` in whatever goes to a template; ``spelled`` grows."""

    def __init__(self, names: Names) -> None:
        self._pattern = _any_of(names)
        self._secret = secrets.token_hex(8)
        self._marks: dict[str, str] = {}
        self.spelled: dict[str, str] = {}

    def put(self, value: Any) -> Any:
        """A copy of plain JSON with marks in all its texts, names of fields too."""
        if isinstance(value, str):
            return self._pattern.sub(self._mark, value)
        if isinstance(value, dict):
            return {self.put(name): self.put(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self.put(inner) for inner in value]
        return value

    def _mark(self, found: re.Match[str]) -> str:
        mark = self._marks.get(found[0])
        if mark is None:  # letters alone, which no filter of a template changes
            mark = self._marks[found[0]] = f"q{self._secret}x{len(self.spelled)}q"
            self.spelled[mark] = found[0]
        return mark


class MeantEncoder:
    """Token ids of ``Written``: by a copy of the tokenizer in which ``names`` are called as no one can guess.

    Raises ValueError where the tokenizer cannot be copied so.
    """

    def __init__(self, backend: tokenizers.Tokenizer, names: Names, boxed: bool) -> None:
        secret = secrets.token_hex(8)
        self._called = {name: f"<|{secret}:{i}|>" for i, name in enumerate(sorted(names))}
        self._pattern = _any_of(names)
        self._ids: dict[int, int] = {}  # of the copy -> of the tokenizer, where they are not the same
        definition, copy = "", None if boxed else self._sharing(backend)
        if copy is None:
            definition = json.dumps(_renamed(json.loads(backend.to_str()), self._called), ensure_ascii=False)
            try:
                copy = tokenizers.Tokenizer.from_str(definition)
            except Exception as e:
                raise ValueError(" ".join(str(e).split())) from e
            self._ids = self._moved(backend, copy)
        boxes = BoxedEncoder(definition.encode()) if boxed else None
        self._encode = boxes.encode if boxes else lambda text: copy.encode(text, add_special_tokens=False).ids

    def encode(self, text: Written) -> list[int]:
        """Raises what the tokenizer raises."""
        meant = self._pattern.sub(lambda found: self._called[found[0]], text.marked)
        ids = self._encode(_replaced(meant, text.spelled))
        return [self._ids.get(i, i) for i in ids] if self._ids else ids

    def _sharing(self, backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer | None:
        """A copy with the same vocabulary in memory, made in no time; None where that has the names for itself."""
        copy = tokenizers.Tokenizer(backend.model)
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(backend, part)) is not None:
                setattr(copy, part, value)
        added = []  # all at once: for each call the library goes through all that it has
        for _, token in sorted(backend.get_added_tokens_decoder().items()):
            flags = {
                flag: getattr(token, flag) for flag in ("lstrip", "rstrip", "single_word", "normalized", "special")
            }
            added.append(tokenizers.AddedToken(self._called.get(token.content, token.content), **flags))
        copy.add_tokens(added)
        for name in self._called:
            if backend.token_to_id(name) in copy.encode(name, add_special_tokens=False).ids:
                return None
        self._ids = self._moved(backend, copy)
        return copy

    def _moved(self, backend: tokenizers.Tokenizer, copy: tokenizers.Tokenizer) -> dict[int, int]:
        added = {i: self._called.get(t.content, t.content) for i, t in backend.get_added_tokens_decoder().items()}
        return {new: i for i, called in added.items() if (new := copy.token_to_id(called)) not in (i, None)}


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """The longest of ``names`` at each place. Beginnings that they share are looked at once: some models have a
    thousand, and a message may be full of beginnings."""
    tree: dict[str, Any] = {}
    for name in filter(None, names):
        node = tree
        for letter in name:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(_ways(tree) or r"(?!)")


def _ways(node: dict[str, Any]) -> str:
    """A pattern of what may follow; behind a node that ends a name it may also be nothing."""
    tail = ""
    while len(node) == 1 and "" not in node:
        ((letter, node),) = node.items()
        tail += re.escape(letter)
    ways = [re.escape(letter) + _ways(inner) for letter, inner in sorted(node.items()) if letter]
    return tail + (f"(?:{'|'.join(ways)})" + "?" * ("" in node) if ways else "")


def _replaced(marked: str, spelled: dict[str, str]) -> str:
    return _any_of(spelled).sub(lambda found: spelled[found[0]], marked)


def _renamed(data: dict[str, Any], called: dict[str, str]) -> dict[str, Any]:
    """A tokenizer.json with other names for some of its added tokens; what it puts around a text is left out."""
    added = [{**token, "content": called.get(token["content"], token["content"])} for token in data["added_tokens"]]
    model = dict(data["model"])
    if isinstance(vocab := model.get("vocab"), dict):
        model["vocab"] = {called.get(name, name): i for name, i in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[called.get(name, name), score] for name, score in vocab]
    if model.get("unk_token") in called:
        model["unk_token"] = called[model["unk_token"]]
    return {**data, "added_tokens": added, "model": model, "post_processor": None}
