"""Requests and outputs of the engine loop: plain records that serialise to JSON, so that the loop can live in
another process than the front end. Text, templates and stop strings are the front end's business (``frontend.py``).
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.eyes.pictures import Picture
from toolkit.runners.step import Draw

Only = Literal["score", "cls", "last", "mean"]


@dataclass(frozen=True)
class Filters:
    """Fields of GenerationConfig of the same names, by ``constraints/filters.py``. The defaults change nothing."""

    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: list[str] = field(default_factory=list)

    @property
    def draws(self) -> bool:
        """Whether any of them changes what is drawn at random."""
        return self.typical_p < 1 or self.top_n_sigma > 0 or self.xtc_probability > 0 or self.dynatemp_range > 0

    @property
    def repeats(self) -> bool:
        """Whether DRY is on, which likeliest tokens heed too."""
        return self.dry_multiplier > 0 and self.dry_penalty_last_n != 0

    @property
    def reads(self) -> bool:
        """Whether they look at what tokens say."""
        return self.repeats and bool(self.dry_sequence_breakers)


@dataclass
class SamplingParams(Draw):
    """Resolved numbers of one request (from a GenerationConfig; greedy is temperature 0), and how its tokens are
    chosen."""

    max_new_tokens: int
    min_new_tokens: int = 0
    stop_token_ids: list[int] = field(default_factory=list)  # eos included unless ignored
    bad_token_ids: list[int] = field(default_factory=list)
    bad_words: list[str] = field(default_factory=list)  # any number of tokens each
    logit_bias: dict[int, float] = field(default_factory=dict)
    ngram_size: int = 0  # the answer ends when its last so many tokens
    ngram_limit: int = 0  # are in it so many times; 0 = never
    logprobs: int = -1  # -1 none, 0 the chosen token's, k the top k too
    prompt_logprobs: int = -1
    grammar: dict[str, Any] | None = None  # a response_format
    filters: Filters | None = None  # None: none that changes anything
    hurried: bool = False  # it is not to wait long to be compiled: hopeless ones come
    logits: Literal["all", "generation"] | None = None
    hidden: Literal["all", "generation"] | None = None
    routes: bool = False  # which experts each token went to


@dataclass(frozen=True)
class Whose:
    """``user``: any name; ``group``: of which request of theirs this one is a part, "" = of its own. ``weight``: the
    user's part beside others'. ``share``: of all places in the batch that the user may have at most. ``owner``: whose
    is what is kept of it, "" = of all who have no key."""

    user: str = ""
    group: str = ""
    weight: float = 1.0
    share: float = 1.0
    owner: str = ""


@dataclass
class EngineRequest:
    """``session``: whose blocks stay pinned in the cache after the request ends (None = none). ``adapter``: which LoRA
    adapter of the engine's, counted from 0, -1 = none. ``only``: draw no token; "score" gives the prompt's
    log-probabilities, "cls", "last" and "mean" one row ``hidden``, the first or the last token's hidden state or the
    mean of all. ``second``: where in the prompt the second text of a pair begins, 0 = there is one alone.
    ``priority``: the lower, the sooner it starts and the later it gives up its blocks for others. ``pictures``: in the
    order in which their places stand in the prompt. ``progress``: tell how far the prompt has come after each step.
    ``whose``: among whom the engine is shared out. ``prediction``: tokens that much of the answer may be, which are
    guessed first. ``lend``: other engines are to find its prompt's blocks, of which the last output tells
    (``block_ids``); ``room``: tokens that one of those may write behind it; ``source``: the id of the engine that has
    computed them, "" = none has. ``salt``: its blocks are shared with requests alone that have the same."""

    id: str
    token_ids: list[int]
    params: SamplingParams
    session: str | None = None
    only: Only | None = None
    priority: int = 0
    adapter: int = -1
    pictures: list[Picture] = field(default_factory=list)
    progress: bool = False
    whose: Whose = field(default_factory=Whose)
    prediction: list[int] = field(default_factory=list)
    second: int = 0
    lend: bool = False
    room: int = 0
    source: str = ""
    salt: str = ""


@dataclass
class EngineOutput:
    """What one step produced for a request. ``finish_reason`` set = the last one.

    ``stop_token``: the stop token id that ended it (it is in ``token_ids`` too). Arrays are numpy, in process only or
    carried beside the JSON as raw bytes. ``logits`` and ``hidden``: of "generation" one row a drawn token, that it was
    drawn from; of "all" one row a computed position (prompt and generated tokens but the last). ``processed``: prompt
    tokens that are in the cache by now, at ``time``; of requests that asked for it, first what the prefix cache had.
    """

    id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: Literal["stop", "length", "error", "abort"] | None = None
    stop_token: int | None = None
    cached_tokens: int = 0
    guessed: int = 0  # tokens of guesses that were verified so far,
    guessed_right: int = 0  # and that came true
    prompt_logprobs: list[dict[int, float] | None] | None = None  # [0] is None
    processed: int | None = None
    time: float | None = None  # when the tokens were there, ``time.perf_counter()``: one clock for all processes
    logits: Any = None  # float32 [rows, V]
    hidden: Any = None  # float32 [rows, hidden]
    routes: Any = None  # uint16 [rows, layers, chosen experts], of "all" rows
    block_ids: list[str] | None = None  # of the prompt's whole blocks, where they were asked for: digests of content
    error: str | None = None
    error_code: int | None = (
        None  # as HTTP has them: 400 the request's fault, 500 the engine's, 503 no engine or none free
    )
