"""From a request that came to one that can be scheduled: it is checked, and its constraints are built."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from toolkit.engine.adapters import Adapters
from toolkit.engine.admission import check_request, in_blocks, long_rope_from, own_rope, turned_by
from toolkit.engine.cache.prefix import root_key
from toolkit.engine.canvas import Canvas
from toolkit.engine.constraints.request import Building, Built, Constraints
from toolkit.engine.options import EngineOptions
from toolkit.engine.pictures.spans import find_spans, positions_of, runs_of
from toolkit.engine.request import EngineOutput, EngineRequest
from toolkit.engine.sequence import LogitsProcessor, Sequence
from toolkit.errors import BusyError, ToolkitError

if TYPE_CHECKING:
    from toolkit.artifacts.text.tokenizer import Tokenizer
    from toolkit.runners.base import Runner

log = logging.getLogger(__name__)

INVALID_REQUEST = 400  # error codes of EngineOutput, as HTTP has them
INTERNAL_ERROR = 500
UNAVAILABLE = 503
LOOK_SECONDS = 0.005  # that a loop without anything else to do waits for constraints, before it takes requests in


class Held(NamedTuple):
    """A request whose constraints are being built, or whose adapter is being read."""

    building: Building | Built
    request: EngineRequest
    processors: Seq[LogitsProcessor]


class Intake:
    """Of one runner. ``held``: by their ids, requests that wait for their constraints or adapters. ``max_len``: tokens
    that a request may have."""

    def __init__(
        self,
        runner: Runner,
        options: EngineOptions,
        max_len: int,
        adapters: Adapters,
        open_tokenizer: Callable[[], Tokenizer] | None,
    ) -> None:
        self.held: dict[str, Held] = {}
        self.constraints = Constraints(open_tokenizer, runner.spec.vocab_size)
        self._runner = runner
        self._options = options
        self._max_len = max_len
        self._adapters = adapters
        self._arrivals = 0
        self._long_from, self._own_rope = long_rope_from(runner), own_rope(runner)

    def take(self, request: EngineRequest, processors: Seq[LogitsProcessor]) -> Sequence | None:
        """What is to be scheduled; None: it is held. Raises what ``refusal`` tells."""
        check_request(request, self._runner, self._max_len, self._options.session_len)
        if self._runner.spec.mask_token is not None:
            request = in_blocks(request, self._runner.spec.mask_token, bool(processors))
        if never := self._options.never:
            params = request.params
            request = replace(request, params=replace(params, bad_token_ids=[*params.bad_token_ids, *never]))
        built = self.constraints.find(request.params)
        if built is not None and self._adapters.ready(request.adapter):
            return self._sequence(request, processors, built)
        building = built or self.constraints.begin(request.params, request.whose.user)
        self.held[request.id] = Held(building, request, processors)
        return None

    def ready(self, idle: bool) -> Iterator[Sequence | EngineOutput]:
        """What was held and can be scheduled now, or what refuses it. ``idle``: there is nothing else to do, so that
        the first may be waited for a little."""
        self.constraints.proceed()
        if idle:
            building, request, _ = next(iter(self.held.values()))
            if building.done:
                self._adapters.ready(request.adapter, LOOK_SECONDS)
            else:
                building.wait(LOOK_SECONDS)
        for request_id, (building, request, processors) in list(self.held.items()):
            if building.done and self._adapters.ready(request.adapter):
                del self.held[request_id]
                try:
                    found: Sequence | EngineOutput = self._sequence(request, processors, building.result())
                except Exception as e:
                    found = refusal(request, e)
                yield found

    def drop(self, request_id: str) -> bool:
        """Forget a request that is held; False if it is not."""
        held = self.held.pop(request_id, None)
        if held is not None:
            held.building.leave()
        return held is not None

    def _sequence(self, request: EngineRequest, processors: Seq[LogitsProcessor], built: Built) -> Sequence:
        spec, options = self._runner.spec, self._options
        prompt = len(request.token_ids)
        new = max(request.params.max_new_tokens, request.room)  # keys are turned as whoever goes on has them
        longest = prompt if request.only else min(prompt + new, self._max_len)
        rope_set = int(self._long_from is not None and longest > self._long_from)
        turned = rope_set if self._own_rope is None else turned_by(self._own_rope, prompt)
        pairs = spec.encoder is not None and spec.encoder.type_rows > 1
        shares = not spec.mutual and (options.prefix_caching or request.session is not None)
        owner = "" if options.prefix_caching else f"session {request.session}"
        vision, spans = spec.vision, []
        if vision is not None and request.pictures:
            spans = find_spans(request.token_ids, request.pictures, vision.image_token)
        axes, shift = positions_of(vision, prompt, spans)
        seq = Sequence(
            request,
            order=self._arrivals,
            max_len=self._max_len,
            rope_set=rope_set,
            turned_by=turned,
            keys_root=root_key(turned, self._adapters.told(request.adapter), owner, request.salt) if shares else None,
            processors=list(processors),
            spans=spans,
            axes=axes,
            shift=shift,
            canvas=None if spec.mask_token is None else Canvas(spec.block, spec.mask_token, options.unmasking),
            whole=spec.mutual,
            second=request.second if pairs else 0,
            **self.constraints.fields(request, built),
        )
        if vision is not None and vision.mutual and spans:
            seq.runs = runs_of(spans)
        if vision is not None and vision.crossed:
            seq.looks_at = frozenset(picture.digest for picture in request.pictures)
        self._arrivals += 1
        return seq


def refusal(request: EngineRequest, error: Exception) -> EngineOutput:
    """The output that ends a request which cannot run."""
    code, text = INVALID_REQUEST, str(error)
    if isinstance(error, BusyError):
        code = UNAVAILABLE
    elif not isinstance(error, ToolkitError):
        log.error("request %s cannot be taken in", request.id, exc_info=error)
        code, text = INTERNAL_ERROR, f"the engine cannot take this request in ({type(error).__name__}: {error})"
    return EngineOutput(request.id, finish_reason="error", error=text, error_code=code)
