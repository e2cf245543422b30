"""Texts into vectors: what a pipeline reads once of the model's folder, and each call's work."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.chat.embedded_text import EmbeddedText
from toolkit.chat.template import ChatTemplate
from toolkit.configs.checks import shown
from toolkit.engine.pooling import Head, open_head
from toolkit.errors import UsageError
from toolkit.pipeline.jobs import JobRunner


class Embedder:
    """Usable from several threads. Reads the folder when it is first asked, most pipelines never are."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, runner: JobRunner) -> None:
        self._tokenizer, self._template, self._runner = tokenizer, template, runner
        self._heads: dict[str, Head] = {}  # by pooling

    def vectors(
        self, inputs: Any, pooling: str, normalize: bool, dimensions: int | None, adapter_name: str | None
    ) -> NDArray[np.float32]:
        """As ``Pipeline.get_embeddings``."""
        head = self._head(pooling)
        states = self._runner.hidden_states(self._rows(inputs), adapter_name, head.pooling)
        return np.stack([head.embedding(state, dimensions, normalize) for state in states])

    def judged(self, inputs: Any, adapter_name: str | None, rewards: bool) -> tuple[Head, list[NDArray[np.float32]]]:
        """The model's classifier, and the state by which it judges each input. ``rewards``: of one label. Raises
        UsageError for a model that has none."""
        head = self._head("auto")
        head.check_labels(rewards)
        rows = [head.ended(ids) for ids in self._rows(inputs)]
        return head, self._runner.hidden_states(rows, adapter_name, head.spec.pooling)

    def _head(self, pooling: str) -> Head:
        if (head := self._heads.get(pooling)) is None:
            head = self._heads[pooling] = open_head(self._tokenizer.path, pooling)
        return head

    @cached_property
    def _text(self) -> EmbeddedText:
        return EmbeddedText(self._tokenizer, self._template)

    def _rows(self, inputs: Any) -> list[list[int]]:
        """Token ids of a text, of several, or of one or several sequences of token ids. Raises UsageError."""
        single = isinstance(inputs, str) or (isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], int))
        many = [inputs] if single else inputs
        if not isinstance(many, list) or not many:
            raise UsageError(f"inputs: expected texts or token ids, found {shown(inputs, 60)}")
        rows, limit = [], self._tokenizer.vocab_size
        for i, item in enumerate(many):
            ids = self._text.encode(item) if isinstance(item, str) else item
            if not isinstance(ids, list) or not ids or not all(type(t) is int and 0 <= t < limit for t in ids):
                raise UsageError(f"inputs[{i}]: expected a text or token ids in [0, {limit}), found {shown(item, 60)}")
            rows.append(ids)
        return rows
