"""One request on the front-end side: engine outputs in, text and Responses out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.request import EngineOutput, Only, Whose
from toolkit.engine.sampling_params import special_stops
from toolkit.engine.text.detokenizer import Detokenizer
from toolkit.engine.text.stop_words import StopWords
from toolkit.messages import GenerationConfig, PromptProgress, Response

if TYPE_CHECKING:
    from toolkit.artifacts.text.tokenizer import Tokenizer
    from toolkit.models.eyes.pictures import Picture


@dataclass
class Timings:
    """When things happened to a request, ``time.perf_counter()`` seconds; 0 = not yet.

    ``drawn``: when the engine had each token, whenever its consumer got to see it.
    """

    first_token: float = 0.0
    finish: float = 0.0
    drawn: list[float] = field(default_factory=list)


@dataclass
class Asked:
    """One generation.

    ``gen_config.n`` is the caller's business. ``session``: its KV blocks stay in the cache for the next turn until
    ``end_session``. ``timings`` is filled in as things happen. ``adapter``: one of the engine's, None for the plain
    model. ``only``: no token is drawn; "score" gives the prompt's log-probabilities (``prompt_logprobs``), "cls",
    "last" and "mean" its ``last_hidden_state`` as one row. ``priority``: the lower, the sooner it starts.
    ``pictures``: in the order of their places in the prompt. ``progress``: deltas say how far the prompt has come
    (``prompt_progress``). ``whose``: whose request it is. ``prediction``: token ids that much of the answer may be,
    for guesses. ``second``, ``room``, ``salt``: see ``EngineRequest``.
    """

    token_ids: list[int]
    gen_config: GenerationConfig | None = None
    request_id: str | None = None
    session: str | None = None
    timings: Timings | None = None
    adapter: str | None = None
    only: Only | None = None
    priority: int = 0
    pictures: Sequence[Picture] = ()
    progress: bool = False
    whose: Whose = field(default_factory=Whose)
    prediction: Sequence[int] = ()
    second: int = 0
    room: int = 0
    salt: str = ""


class RequestStream:
    """Collects a request's outputs (from the receiving thread) and turns them into deltas (in the consumer's).

    Several outputs that wait become one delta, so a slow consumer gets longer ones. The stop token is neither in
    ``text`` nor in ``token_ids`` (unless ``include_stop_str_in_output``), but is counted in ``generate_token_len``.
    Tokens that the engine drew after the one that completed a stop word are dropped and not counted. Stop words may end
    the answer once ``min_new_tokens`` tokens are there.
    """

    def __init__(
        self,
        request_id: str,
        token_ids: list[int],
        config: GenerationConfig,
        tokenizer: Tokenizer,
        wake: Callable[[], None],
        timings: Timings | None = None,
        name: str | None = None,
    ) -> None:
        """``name``: what its caller calls the request, None: ``request_id``, which is the engine's."""
        self.id = request_id
        self.name = request_id if name is None else name
        self.wake = wake
        self.timings = timings or Timings()
        self.ended = False  # no more Responses will come
        self.engine_done = False  # the engine loop has forgotten the request
        self._waiting: deque[EngineOutput] = deque()
        self._config = config
        self._prompt_len = len(token_ids)
        self._generated = 0
        self._guessed = 0, 0  # right, and wrong
        self._routes = 0  # tokens whose experts have been told
        self._begun = 0.0  # when the first token of the prompt was
        shown = config.shown_special_tokens or ()
        self._detokenizer = Detokenizer(tokenizer, config.skip_special_tokens, token_ids, shown)
        words = config.stop_words or []
        self._stop_words = StopWords(words, config.include_stop_str_in_output) if words else None
        self._special_stops = special_stops(config, tokenizer)

    def deliver(self, output: EngineOutput) -> None:
        """Take an output; called by the receiving thread, which wakes the consumer afterwards."""
        now = time.perf_counter()
        if output.token_ids:
            self.timings.first_token = self.timings.first_token or now
            self.timings.drawn += [output.time or now] * len(output.token_ids)
        if output.finish_reason is not None:
            self.engine_done = True
            self.timings.finish = now
        self._waiting.append(output)

    def poll(self) -> Response | None:
        """Everything that has arrived as one delta; None if nothing has."""
        if not self._waiting or self.ended:
            return None
        delta = Response(input_token_len=self._prompt_len)
        text: list[str] = []
        logits, hidden, routes = [], [], []
        while self._waiting and not self.ended:
            output = self._waiting.popleft()
            delta.cached_tokens = output.cached_tokens
            if output.guessed:
                self._guessed = output.guessed_right, output.guessed - output.guessed_right
            delta.cache_block_ids = output.block_ids
            if output.logits is not None:
                logits.append(output.logits)
            if output.hidden is not None:
                hidden.append(output.hidden)
            if output.routes is not None:
                routes.append(output.routes)
            if output.prompt_logprobs is not None:
                delta.prompt_logprobs = output.prompt_logprobs
            if output.processed is not None:
                delta.prompt_progress = self._progress(output, output.processed)
            self._take(output, delta, text)
        delta.text = "".join(text)
        delta.generate_token_len = self._generated
        delta.accepted_tokens, delta.rejected_tokens = self._guessed
        delta.logits = np.concatenate(logits) if logits else None
        delta.last_hidden_state = np.concatenate(hidden) if hidden else None
        if routes:
            delta.routed_experts = self._routed(np.concatenate(routes))
        return delta

    def _routed(self, rows: NDArray[np.uint16]) -> NDArray[np.uint16]:
        """The part of ``rows`` that belongs to tokens of the prompt and the answer, but for the last: where a stop word
        was complete the engine may have gone on."""
        left = self._prompt_len + self._generated - 1 - self._routes
        kept = rows[: max(0, left)] if self.ended else rows
        self._routes += len(kept)
        return kept

    def _progress(self, output: EngineOutput, processed: int) -> PromptProgress:
        now = output.time or time.perf_counter()
        self._begun = self._begun or now
        passed = round(1000 * (now - self._begun), 3)
        return PromptProgress(self._prompt_len, output.cached_tokens, processed, passed)

    def _take(self, output: EngineOutput, delta: Response, text: list[str]) -> None:
        show_stop = self._config.include_stop_str_in_output
        for i, token in enumerate(output.token_ids):
            self._generated += 1
            if output.stop_token is not None and i == len(output.token_ids) - 1 and not show_stop:
                break
            delta.token_ids.append(token)
            if output.logprobs:
                delta.logprobs = [*(delta.logprobs or ()), output.logprobs[i]]
            if self._show(self._detokenizer.add_one(token), delta, text):
                self._drop_guesses(len(output.token_ids) - 1 - i)
                return
        if output.finish_reason is not None:
            self._finish(output, delta, text)

    def _drop_guesses(self, dropped: int) -> None:
        """A stop word left out a step's last ``dropped`` tokens, all of which are guesses but the last."""
        right, wrong = self._guessed
        lost = min(right, max(0, dropped - 1))
        self._guessed = right - lost, wrong + lost

    def _show(self, new: str, delta: Response, text: list[str]) -> bool:
        """Append text as far as it may be shown; True if a stop word ended the answer."""
        if self._stop_words is None:
            text.append(new)
            return False
        shown, word = self._stop_words.add(new, self._generated >= (self._config.min_new_tokens or 0))
        text.append(shown)
        if word is None:
            return False
        delta.finish_reason, delta.stop_reason = "stop", word
        self.ended = True
        return True

    def _finish(self, output: EngineOutput, delta: Response, text: list[str]) -> None:
        if self._show(self._detokenizer.flush(), delta, text):
            return
        if self._stop_words is not None:
            text.append(self._stop_words.flush())
        self.ended = True
        delta.finish_reason = output.finish_reason
        if output.stop_token is not None:
            if output.stop_token in (self._config.stop_token_ids or ()):
                delta.stop_reason = output.stop_token
            else:
                delta.stop_reason = self._special_stops.get(output.stop_token)
        if output.finish_reason == "error":
            delta.error_message = output.error
            delta.error_code = output.error_code or 500
