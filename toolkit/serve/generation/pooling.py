"""Prompts that are run for a number or a vector each, and pairs of texts that are scored by them."""

from __future__ import annotations

import base64
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.request import Only
from toolkit.errors import ToolkitError
from toolkit.messages import GenerationConfig, Response
from toolkit.serve.generation.choice import Choice
from toolkit.serve.generation.choices import run_choices
from toolkit.serve.generation.read import encode_embedded, encode_pair, encode_text
from toolkit.serve.generation.sampling import ONLY_THESE
from toolkit.serve.http.errors import ApiError, bad_field
from toolkit.serve.state import ServerState

Pair = tuple[list[int], int]  # token ids of two texts read together, and where the second begins (0: nowhere)
# Prompts of one request that are tokens at a time: of a long query beside each of many documents few are held.
WAVE = 64
POOLED = GenerationConfig(max_new_tokens=1)
# The words that Qwen3-Reranker was trained with; other models understand them, too.
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


async def run_prompts(
    state: ServerState,
    name: str,
    count: int,
    encode: Callable[[int], Awaitable[list[int] | Pair]],
    config: GenerationConfig,
    adapter: str | None,
    only: Only | None = None,
) -> list[Response]:
    """The whole answers to prompts 0 … ``count`` - 1, which ``encode`` gives, in order: token ids, or for a pair of
    texts these and where the second one begins.

    Raises ApiError, before the engine has them, for prompts that are too many tokens together.
    """
    answers: list[Response] = []
    tokens = 0
    for start in range(0, count, WAVE):
        numbers = range(start, min(start + WAVE, count))
        choices = []
        for i in numbers:
            found = await encode(i)
            ids, second = found if isinstance(found, tuple) else (found, 0)
            choices.append(Choice(i, i, ids, config, adapter, only, second=second))
        tokens += sum(len(choice.token_ids) for choice in choices)
        state.settings.limits.check_read(tokens, state.engine.session_len)
        wave = {i: Response() for i in numbers}
        async with aclosing(run_choices(state, name, choices)) as stream:
            async for index, delta in stream:
                wave[index].extend(delta)
        answers += wave.values()
    return answers


def usage(answers: Sequence[Response]) -> dict[str, Any]:
    """Token counts of prompts that nothing was generated from."""
    total = sum(answer.input_token_len for answer in answers)
    cached = sum(answer.cached_tokens for answer in answers)
    return {"prompt_tokens": total, "total_tokens": total, "prompt_tokens_details": {"cached_tokens": cached}}


async def embed(
    state: ServerState,
    name: str,
    count: int,
    encode: Callable[[int], Awaitable[list[int]]],
    adapter: str | None,
    write: Callable[[NDArray[np.float32]], Any],
) -> tuple[list[Any], dict[str, Any]]:
    """What ``write`` makes of the pooled hidden states of prompts 0 … ``count`` - 1, each alone, and token counts."""
    async with state.slot():
        answers = await run_prompts(state, name, count, encode, POOLED, adapter, state.head.pooling)
    rows = [answer.last_hidden_state[0] for answer in answers]
    size = sum(row.nbytes for row in rows)
    return await state.lanes.run(lambda: [write(row) for row in rows], size), usage(answers)


def as_base64(values: NDArray[np.float32]) -> str:
    """A vector as OpenAI's clients ask for it."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def as_numbers(values: NDArray[np.float32]) -> Any:
    """A vector as JSON, written here: lists of Python's numbers would take far longer."""
    return orjson.Fragment(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY))


@dataclass(frozen=True)
class Pairs:
    """Pairs of one of ``queries`` (or the only one) and one of ``documents``; ``params``: what a request calls them.
    ``most``: tokens that texts are cut to, see ``encode_embedded``."""

    state: ServerState
    name: str
    queries: Sequence[str]
    documents: Sequence[str]
    params: tuple[str, str]
    instruction: str | None
    most: int | None

    async def scores(self, method: str | None, adapter: str | None) -> tuple[list[float], dict[str, Any]]:
        """One score a document, and the usage. ``method`` None: "classifier" for a model that was trained to score,
        "embedding" for one that says how its embeddings are made or reads alone, else "yes_no". Raises ApiError (400)
        for an instruction that nobody would be told."""
        head = self.state.head
        method = method or ("classifier" if head.scores else "embedding" if head.told or not head.asks else "yes_no")
        if method == "classifier" and not head.scores:
            raise bad_field("method", "classifier needs a model that has one; use embedding or yes_no")
        told = method == "yes_no" or (method == "classifier" and head.writes)
        if self.instruction and not told:
            raise bad_field("instruction", "only with method yes_no; vectors and classifiers are of the texts alone")
        ways = {"classifier": self._classified, "embedding": self._cosines, "yes_no": self._yes_or_no}
        async with self.state.slot():
            return await ways[method](adapter)

    async def _classified(self, adapter: str | None) -> tuple[list[float], dict[str, Any]]:
        """What the model's own classifier says of each pair."""
        state, head = self.state, self.state.head
        encode = self._asked if head.writes else self._pair
        answers = await run_prompts(state, self.name, len(self.documents), encode, POOLED, adapter, head.spec.pooling)
        rows = [answer.last_hidden_state[0] for answer in answers]
        return [head.score(row) for row in rows], usage(answers)

    async def _pair(self, i: int) -> Pair:
        """Both texts as the tokenizer joins them."""
        return await encode_pair(self.state, self._query(i), self.documents[i], f"{self.params[1]}.{i}", self.most)

    def _query(self, i: int) -> str:
        return self.queries[i if len(self.queries) > 1 else 0]

    async def _cosines(self, adapter: str | None) -> tuple[list[float], dict[str, Any]]:
        texts, ahead = [*self.queries, *self.documents], len(self.queries)
        first, second = self.params

        async def encode(i: int) -> list[int]:
            param = first if i < ahead else f"{second}.{i - ahead}"
            return await encode_embedded(self.state, texts[i], param, self.most)

        state = self.state
        answers = await run_prompts(state, self.name, len(texts), encode, POOLED, adapter, state.head.pooling)
        vectors = [state.head.embedding(answer.last_hidden_state[0], None, True) for answer in answers]
        queries = vectors[:ahead] * (len(self.documents) if ahead == 1 else 1)
        scores = [float(np.dot(q, d)) for q, d in zip(queries, vectors[ahead:], strict=True)]
        return scores, usage(answers)

    async def _yes_or_no(self, adapter: str | None) -> tuple[list[float], dict[str, Any]]:
        """How likely the model says yes, of the two words: exp(yes) / (exp(yes) + exp(no)) of their logits."""
        tokenizer = self.state.engine.tokenizer
        yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))
        if yes == no:
            raise ApiError(400, "method: this model's tokenizer begins 'yes' and 'no' with one token; use embedding")
        bias = {yes: ONLY_THESE, no: ONLY_THESE}
        config = GenerationConfig(max_new_tokens=1, ignore_eos=True, logprobs=2, logit_bias=bias)
        answers = await run_prompts(self.state, self.name, len(self.documents), self._asked, config, adapter)
        return [_share(answer, yes, no) for answer in answers], usage(answers)

    async def _asked(self, i: int) -> list[int]:
        """The question whether a document answers a query, as a chat."""
        query = self._query(i)
        text = f"<Instruct>: {self.instruction or INSTRUCTION}\n<Query>: {query}\n<Document>: {self.documents[i]}"
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]

        def render() -> str:
            return self.state.template.render(messages, enable_thinking=False)

        return await encode_text(self.state, render, f"{self.params[1]}.{i}", len(text))


def _share(answer: Response, yes: int, no: int) -> float:
    found = (answer.logprobs or [{}])[0]
    if not math.isfinite(found.get(yes, math.nan)) or no not in found:
        raise ToolkitError("logits: those for yes and no cannot be compared; check the model's weights and dtype")
    return 1 / (1 + math.exp(min(found[no] - found[yes], 700.0)))
