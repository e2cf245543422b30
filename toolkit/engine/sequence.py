"""A request inside the engine loop: its tokens so far and how far the cache has got."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.canvas import Canvas
from toolkit.engine.constraints.ngrams import RepeatedNgrams
from toolkit.engine.pictures.spans import Span
from toolkit.engine.request import EngineRequest, SamplingParams

if TYPE_CHECKING:
    from toolkit.engine.constraints.bad_words import BadWordState
    from toolkit.engine.constraints.filters import Filtering
    from toolkit.engine.constraints.grammar import GrammarState

LogitsProcessor = Callable[[Any, Any], Any]
DOUBLED_BY = 25  # of a priority: so much lower, and others' requests count half as much
MOST_URGENT, LEAST_URGENT = 100, 200  # what is beyond counts no more


@dataclass(eq=False)
class Sequence:
    """``tokens[:length]`` are the prompt and what was generated; keys and values of the first ``computed`` are cached.

    While steps are in flight, the last ``pending`` of ``length`` tokens are not known yet (at most 2). ``stored``:
    of these, how many are there for certain, no step in flight being needed. ``row`` is the place in the block
    tables while it runs, else -1. ``order``: by arrival. ``max_len``: where generation is cut; ``end``: the length
    at which no more is drawn. ``collected``: positions whose all-position results (logits, hidden, experts, prompt
    log-probabilities) have been gathered; they are not asked for again after a preemption. ``spans``: the pictures
    of the prompt; ``axes``: the positions of its tokens, [1 or 3, prompt], None: their places; ``shift``: what is
    added to the places of tokens behind it. ``runs``: (first, stop) of the tokens that see each other both ways, so
    that no chunk may end among them; ``looks_at``: digests of the pictures whose keys and values the runner keeps
    for it. ``branch``: blocks at the start that requests before it had too, where a state is worth keeping.
    ``canvas``: the block of tokens behind the known ones, where such are guessed together. ``turned_by``: the
    length that dynamic rope reaches for it where that is its own, 0 = as trained. ``whole``: its prompt is computed
    in one step; ``second``: where in it the second text of a pair begins, 0 = nowhere.
    """

    request: EngineRequest
    order: int
    max_len: int
    rope_set: int
    keys_root: bytes | None  # None: its blocks are never shared
    processors: list[LogitsProcessor] = field(default_factory=list)
    grammar: GrammarState | None = None
    bad_words: BadWordState | None = None
    filtering: Filtering | None = None
    history: History | None = None
    biases: Biases | None = None
    spans: list[Span] = field(default_factory=list)
    axes: NDArray[np.int32] | None = None
    shift: int = 0
    runs: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    looks_at: frozenset[bytes] = frozenset()
    canvas: Canvas | None = None
    turned_by: int = 0
    whole: bool = False
    second: int = 0

    def __post_init__(self) -> None:
        prompt = self.request.token_ids
        self.prompt_len = len(prompt)
        self.tokens: NDArray[np.int32] = np.empty(min(self.max_len, self.prompt_len + 64) + 1, np.int32)
        self.tokens[: self.prompt_len] = prompt
        self.length = self.prompt_len
        self.end = min(self.prompt_len + self.params.max_new_tokens, self.max_len)
        self.pending = 0
        self.computed = 0
        self.stored = 0
        self.replay = 0  # tokens of a guess that came true, to be computed again: a state was left where it began
        self.guessed = self.guessed_right = 0  # tokens of guesses that were verified, and that came true
        self.row = -1
        self.keys: list[bytes] = []
        self.branch = 0
        self.fetches = 0  # tries to bring blocks back that are kept outside the cache
        self.cached_tokens = 0
        self.admitted = False
        self.told = -1  # prompt tokens that its client knows to be computed, where it asked
        self.finished = False
        self.user = self.request.whose.user
        self.group = self.request.whose.group or self.request.id
        urgency = max(-MOST_URGENT, min(self.request.priority, LEAST_URGENT)) / DOUBLED_BY
        self.cost = 2.0**urgency / self.request.whose.weight  # of its place in the batch, to its user
        self.preempted = 0
        self.decoded = -1  # the step in which it was last to decode
        self.unfed = 0  # steps in which others of its user had tokens of their prompts computed and it had none
        self.gives = 0  # places that it had and gave to others
        self.held = 0  # steps in which it waited for what another user's prompt was to compute
        self.collected = 0
        self.stop_ids = frozenset(self.params.stop_token_ids)
        self.prompt_logprobs: list[dict[int, float] | None] = [None]
        self.hidden_sum: Any = (
            0.0  # of a request for the mean of its hidden states: their sum so far, [hidden]; for the first's, that
        )
        wants_all = self.params.logits == "all" or self.params.hidden == "all" or self.params.prompt_logprobs >= 0
        self.wants_all = wants_all or self.params.routes or self.request.only in ("score", "mean", "cls")
        wants_rows = self.params.logits is not None or self.params.hidden is not None
        self.wants_rows = wants_rows or self.request.only == "last"
        counts = self.params.ngram_size and self.params.ngram_limit
        self.repeats = RepeatedNgrams(self.params.ngram_size, self.params.ngram_limit) if counts else None
        self.drawn_here = bool(self.processors or self.filtering)  # from its logits, which come back
        # the runner draws its next token
        self.draws = not (self.request.only or self.drawn_here or self.canvas)
        # The next step's input depends on this step's token by more than its id: no running ahead of results.
        self.needs_host = bool(self.drawn_here or self.grammar or self.bad_words or self.history or self.canvas)
        if self.canvas is not None:
            self.canvas.begin(self.tokens[: self.length])

    def parent(self, block: int) -> bytes:
        """The key of what stands before ``block``."""
        assert self.keys_root is not None
        return self.keys[block - 1] if block else self.keys_root

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def turn(self) -> tuple[int, int]:
        """Whose turn is first: by priority, then by arrival."""
        return self.request.priority, self.order

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def generated(self) -> int:
        """New tokens so far, one still pending included."""
        return self.length - self.prompt_len

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are not in the cache yet, those of the canvas included."""
        return (self.length if self.canvas is None else self.canvas.end) - self.computed

    @property
    def decodes(self) -> bool:
        """Whether its prompt is computed, but for what goes with a pass over the canvas."""
        if self.canvas is None:
            return self.length - self.computed <= 1 + self.replay
        return self.remaining <= 2 * self.canvas.length

    def settled(self, end: int) -> int:
        """How many of the first ``end`` tokens, once computed, stay what they are."""
        return end if self.canvas is None else min(end, self.canvas.first)

    def ids(self, start: int, count: int) -> NDArray[np.int32]:
        """The token ids of ``count`` places from ``start`` on, those of a guess among them."""
        if self.canvas is None or start + count <= self.canvas.first:
            return self.tokens[start : start + count]
        return np.concatenate([self.tokens[start : self.canvas.first], self.canvas.tokens])

    @property
    def at_picture(self) -> bool:
        """Whether the one token left is a picture's, whose row a chunk of the prompt is given, and no decode."""
        if not self.spans or self.length != self.prompt_len or self.remaining != 1:
            return False
        return int(self.spans[-1].places[-1]) == self.prompt_len - 1

    @property
    def ending(self) -> bool:
        """Whether the token that a step in flight draws is its last."""
        return self.length >= self.end and self.pending > 0

    @property
    def read(self) -> bool:
        """Whether no token is to be drawn, and a step in flight computes the last one of its prompt."""
        return self.request.only is not None and self.remaining == 0

    @property
    def known(self) -> int:
        """Tokens whose ids are known."""
        return self.length - self.pending

    @property
    def left(self) -> int:
        """Tokens that it may still have."""
        return self.end - self.length + self.pending

    def uncut(self, end: int) -> int:
        """Where a chunk ends that is to end at ``end``, or at most so: before a run or block that it would cut, or
        behind one that it begins in."""
        if self.whole:
            return self.length
        if self.canvas is not None:
            border = end - end % self.canvas.length
            return border if border > self.computed else self.computed + self.canvas.length
        for first, stop in self.runs.tolist():
            if first < end < stop:
                return int(first if first > self.computed else stop)
        return end

    def positions(self, start: int, count: int) -> NDArray[np.int32]:
        """Of ``count`` tokens from place ``start`` on, [count], or by axis [1 or 3, count]."""
        places = np.arange(start, start + count, dtype=np.int32)
        if self.axes is None:
            return places
        known = self.axes[:, start : start + count]
        behind = places[known.shape[1] :] + self.shift
        return np.concatenate([known, np.tile(behind, (len(known), 1))], 1)

    def suppose(self, tokens: list[int]) -> None:
        """Write a guess behind the known tokens, which these are none of yet."""
        end = self.length + len(tokens)
        if end > len(self.tokens):
            self._grow(end)
        self.tokens[self.length : end] = tokens

    def _grow(self, least: int) -> None:
        grown = np.empty(max(least, min(self.max_len + 1, 2 * self.length)), np.int32)
        grown[: len(self.tokens)] = self.tokens
        self.tokens = grown

    def expect(self) -> None:
        """A step in flight draws the next token."""
        if self.length == len(self.tokens):
            self._grow(self.length + 1)
        self.length += 1
        self.pending += 1

    def arrive(self, token: int) -> None:
        """The oldest expected token is known."""
        self.tokens[self.length - self.pending] = token
        self.pending -= 1
        if self.history is not None:
            self.history.add(token)
        if self.bad_words is not None:
            self.bad_words.add(token)

    def forget_expected(self) -> None:
        """The steps in flight are lost."""
        self.length -= self.pending
        self.pending = 0


class History:
    """Distinct token ids of a request, for its penalties, and how often each was generated (the prompt not counted)."""

    def __init__(self, prompt: NDArray[np.int32]) -> None:
        ids = np.unique(prompt).astype(np.int32)
        self._size = len(ids)
        self._ids = np.concatenate([ids, np.zeros(64, np.int32)])
        self._counts = np.zeros(len(self._ids), np.int32)
        self._index = {int(t): i for i, t in enumerate(ids)}

    @property
    def ids(self) -> NDArray[np.int32]:
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.int32]:
        return self._counts[: self._size]

    def add(self, token: int) -> None:
        """Count a generated token."""
        at = self._index.get(token)
        if at is None:
            at = self._index[token] = self._size
            if at == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(at, np.int32)])
                self._counts = np.concatenate([self._counts, np.zeros(at, np.int32)])
            self._ids[at] = token
            self._size += 1
        self._counts[at] += 1

    def copy(self) -> Counted:
        """What it holds now."""
        return Counted(self.ids.copy(), self.counts.copy())

    def back(self, then: Counted, added: list[int]) -> None:
        """To what it held ``then``, before ``added`` came."""
        for token in added:
            if self._index.get(token, -1) >= len(then.ids):
                del self._index[token]
        self._size = len(then.ids)
        self._counts[: self._size] = then.counts
        self._counts[self._size :] = 0


@dataclass(frozen=True)
class Counted:
    """``History`` at one time: token ids and how often each was generated."""

    ids: NDArray[np.int32]
    counts: NDArray[np.int32]


class Biases:
    """What is added to a request's logits: logit_bias and banned ids, the stop ids too for the first tokens.

    Not under a grammar: it says itself where the output may end, and there a stop token may be all that is left.
    """

    def __init__(self, params: SamplingParams) -> None:
        steady = dict(params.logit_bias) | dict.fromkeys(params.bad_token_ids, -np.inf)
        early = steady | dict.fromkeys(params.stop_token_ids, -np.inf)
        self._min_new_tokens = params.min_new_tokens if params.grammar is None else 0
        self._steady = _pairs(steady)
        self._early = _pairs(early)

    def rows(self, generated: int, banned: NDArray[np.int32] | None) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """(distinct ids, values) for the token after ``generated`` new ones; ``banned``: ids ruled out besides."""
        ids, values = self._early if generated < self._min_new_tokens else self._steady
        if banned is None or not len(banned):
            return ids, values
        keep = ~np.isin(ids, banned)
        return (
            np.concatenate([ids[keep], banned]),
            np.concatenate([values[keep], np.full(len(banned), -np.inf, np.float32)]),
        )


def _pairs(biases: dict[int, float]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    return np.fromiter(biases.keys(), np.int32, len(biases)), np.fromiter(biases.values(), np.float32, len(biases))
