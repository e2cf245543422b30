"""A StepOutput -> what each request gets: tokens, log-probabilities, rows, and whether it has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.engine.constraints import host_sampler
from toolkit.engine.request import EngineOutput
from toolkit.engine.sequence import Sequence
from toolkit.engine.step import Step, Verified
from toolkit.engine.step_builder import StepBuilder
from toolkit.runners.step import StepOutput

log = logging.getLogger(__name__)
NAN_LOGITS = (
    "no token can be drawn: the logits are NaN or infinite (check the model's weights and dtype), "
    "or the request's constraints rule every token out"
)


class StepResults:
    """Hands a step's results to its requests. ``verified``: told of each guess how many tokens it had, and how many
    came true."""

    def __init__(self, vocab_size: int, builder: StepBuilder) -> None:
        self.vocab_size = vocab_size
        self.builder = builder
        self.verified: Callable[[Sequence, int, int], None] = _count

    def expect(self, step: Step) -> None:
        """The step has been submitted: the requests that it draws a token for have one more, not known yet."""
        for seq in step.sampled:
            seq.expect()
        self.builder.advance([s.row for s in step.sampled])

    def take(self, step: Step, out: StepOutput) -> Iterator[tuple[Sequence, EngineOutput]]:
        """What each request produced; a request that ended meanwhile produces nothing."""
        bad = set(out.bad_rows.tolist())
        drawn = out.tokens[:, 0].tolist() if len(step.sampled) else []
        own = drawn[: len(step.sampled)]  # behind them are those of guesses
        tokens = [t if s.grammar is None else s.grammar.meant(t) for s, t in zip(step.sampled, own, strict=True)]
        rows = self._rows(step, out) if step.has_rows else {}
        live = [(s, t) for s, t in zip(step.sampled, tokens, strict=True) if s.row >= 0 and s.pending == 1]
        self.builder.arrived([s.row for s, _ in live], [t for _, t in live])
        now = time.perf_counter()
        for i, (seq, token) in enumerate(zip(step.sampled, tokens, strict=True)):
            if seq.finished:
                continue
            if seq.grammar is not None and seq.grammar.failure is not None:
                yield seq, _error(seq, seq.grammar.failure, 400)
                continue
            if i in bad:
                yield seq, _error(seq, NAN_LOGITS)
                continue
            yield seq, _or_error(seq, lambda: self._sampled(seq, token, out, i, rows, now))  # noqa: B023
        yield from self._guessed(step, out, bad)
        yield from self._verified(step, out, bad)
        for seq in step.processed:
            if not seq.finished:
                yield seq, _or_error(seq, lambda: self._drawn_here(seq, step, out, rows))  # noqa: B023
        if rows:
            yield from self._rest(step, rows)

    def _sampled(
        self, seq: Sequence, token: int, out: StepOutput, row: int, rows: dict[str, Any], now: float
    ) -> EngineOutput:
        """The token that the runner drew."""
        output = self._token(seq, token, now)
        if seq.params.logprobs >= 0:
            output.logprobs.append(_logprobs(token, float(out.logprob[row, 0]), seq.params.logprobs, out, row))
        if rows:
            self._attach(seq, output, rows)
        return output

    def _guessed(self, step: Step, out: StepOutput, bad: set[int]) -> Iterator[tuple[Sequence, EngineOutput]]:
        """The tokens of blocks that this step's guesses have made whole."""
        at = 0
        for seq, count in step.guesses:
            rows, at = range(at, at + count), at + count
            if seq.finished:
                continue
            if bad.intersection(rows):
                yield seq, _error(seq, NAN_LOGITS)
                continue
            output = _or_error(seq, lambda: self._pass(seq, out, rows))  # noqa: B023  # called at once
            if output.token_ids or output.finish_reason is not None:
                yield seq, output

    def _verified(self, step: Step, out: StepOutput, bad: set[int]) -> Iterator[tuple[Sequence, EngineOutput]]:
        """The tokens of guesses that came true, and the one behind each."""
        at = len(step.sampled)
        for v in step.verified:
            first, at = at, at + (v.count + 1 if v.drawn else 0)
            if v.seq.finished:
                continue
            output, guess = EngineOutput(v.seq.id, cached_tokens=v.seq.cached_tokens), v.guess
            start, ended = v.seq.length, None
            for i in range(v.count + 1):
                one = _or_error(v.seq, lambda: self._draw_behind(v, i, first + i, step, out, bad))  # noqa: B023
                if one.finish_reason == "error":
                    ended = one
                    break
                output.token_ids += one.token_ids
                output.logprobs += one.logprobs
                output.finish_reason, output.stop_token, output.time = one.finish_reason, one.stop_token, one.time
                if one.finish_reason is not None or (i < v.count and one.token_ids != [guess[i]]):
                    break
            self._settle(v, start, len(output.token_ids))
            output.guessed, output.guessed_right = v.seq.guessed, v.seq.guessed_right
            if output.token_ids:
                yield v.seq, output
            if ended is not None:
                yield v.seq, ended

    def _draw_behind(self, v: Verified, i: int, row: int, step: Step, out: StepOutput, bad: set[int]) -> EngineOutput:
        """The token behind the first ``i`` of a guess, all of which came true."""
        seq = v.seq
        if not v.drawn:
            return self._drawn_here(seq, step, out, {}, i)
        if v.places and seq.grammar is not None:
            mark = v.places[i].mark
            assert mark is not None
            seq.grammar.resume(mark)
            if seq.grammar.failure is not None:
                return _error(seq, seq.grammar.failure, 400)
        if row in bad:
            return _error(seq, NAN_LOGITS)
        drawn = int(out.tokens[row, 0])
        seq.expect()
        token = drawn if seq.grammar is None else seq.grammar.meant(drawn)
        return self._sampled(seq, token, out, row, {}, time.perf_counter())

    def _settle(self, v: Verified, start: int, tokens: int) -> None:
        """Of a guess behind ``start`` known tokens ``tokens`` rows were drawn."""
        seq, right = v.seq, max(0, tokens - 1)
        blocks = self.builder.blocks
        whole = tokens == v.count + 1
        if whole or not blocks.has_states:
            seq.computed = start + right
            blocks.end_guess(seq.row, seq.computed if whole else 0)
        else:
            seq.replay = start + right - seq.computed
            blocks.end_guess(seq.row)
        self.builder.reached(seq)
        self.verified(seq, v.count, right)

    def _pass(self, seq: Sequence, out: StepOutput, rows: range) -> EngineOutput:
        """What a pass over its canvas, whose masks have ``rows``, gives a request: no token, or all of a block."""
        canvas = seq.canvas
        assert canvas is not None
        places, drawn = canvas.places(), out.tokens[rows.start : rows.stop, 0]
        for i in canvas.keep(drawn, np.exp(out.logprob[rows.start : rows.stop, 0])).tolist():
            logprob = float(out.logprob[rows[i], 0])
            canvas.logprobs[places[i]] = _logprobs(int(drawn[i]), logprob, max(seq.params.logprobs, 0), out, rows[i])
        whole = EngineOutput(seq.id, cached_tokens=seq.cached_tokens)
        if canvas.masked.any():
            return whole
        for place in range(seq.length - canvas.first, canvas.length):
            seq.expect()
            output = self._token(seq, int(canvas.tokens[place]), time.perf_counter())
            output.token_ids = [*whole.token_ids, *output.token_ids]
            output.logprobs = [*whole.logprobs, canvas.logprobs[place]] if seq.params.logprobs >= 0 else []
            whole = output
            if whole.finish_reason is not None:
                return whole
        canvas.begin(seq.tokens[: seq.length])
        return whole

    def _token(self, seq: Sequence, token: int, now: float) -> EngineOutput:
        """Take a token that was there at ``now`` into the request; sets the finish reason."""
        seq.arrive(token)
        output = EngineOutput(seq.request.id, [token], cached_tokens=seq.cached_tokens, time=now)
        circling = seq.repeats is not None and seq.repeats.add(token)
        if token in seq.stop_ids or (seq.grammar is not None and token in seq.grammar.stops):
            output.finish_reason, output.stop_token = "stop", token
        elif seq.grammar is not None and seq.grammar.accept(token):
            output.finish_reason = "stop"
        elif circling and seq.known - seq.prompt_len >= seq.params.min_new_tokens:
            output.finish_reason = "stop"
        elif seq.left <= 0:
            output.finish_reason = "length"
        return output

    def _drawn_here(
        self, seq: Sequence, step: Step, out: StepOutput, rows: dict[str, Any], guessed: int | None = None
    ) -> EngineOutput:
        """Draw the token of a request with logits processors or filters: processors see the raw logits, then the usual
        rules apply.
        ``guessed``: behind so many tokens of a guess, None: there is none."""
        at = 0
        for owner, _, count in step.logits:
            at += count
            if owner is seq:
                break
        logits = out.logits[at - 1 if guessed is None else at - count + guessed]
        if np.isnan(logits).any():
            return _error(seq, NAN_LOGITS)
        if seq.processors:
            try:
                logits = _processed(seq, logits)
            except Exception as e:
                return _error(seq, f"logits_processors: {type(e).__name__}: {e}")
        sampling = self.builder.host_sampling(seq)
        if seq.grammar is not None and seq.grammar.failure is not None:
            return _error(seq, seq.grammar.failure, 400)
        x = host_sampler.adjust(logits, sampling, 0)
        if seq.filtering is not None:
            x = seq.filtering.penalized(x, seq.tokens[: seq.known])
        if not host_sampler.drawable(x, sampling, 0):
            what = "logits_processors: what they return holds NaN or infinity, or rules every token out"
            return _error(seq, what if seq.processors else NAN_LOGITS)
        token = host_sampler.draw(x, sampling, 0) if seq.filtering is None else seq.filtering.draw(x, sampling, 0)
        token = token if seq.grammar is None else seq.grammar.meant(token)
        logprobs = host_sampler.log_softmax(x) if seq.params.logprobs >= 0 else None
        seq.expect()
        self.builder.advance([seq.row])
        self.builder.arrived([seq.row], [token])
        output = self._token(seq, token, time.perf_counter())
        if logprobs is not None:
            output.logprobs.append(
                {token: float(logprobs[token]), **dict(host_sampler.top(logprobs, seq.params.logprobs))}
            )
        self._attach(seq, output, rows)
        return output

    def _rows(self, step: Step, out: StepOutput) -> dict[str, Any]:
        """Logits, hidden states, experts and prompt log-probabilities by request id, as far as this step has them."""
        rows: dict[str, Any] = {}
        for seq, start, block in _apart(step.logits, out.logits):
            if seq.finished:
                continue
            if seq.params.prompt_logprobs > 0:
                self._prompt_top(seq, start, block)
            skip = 0 if seq.params.logits == "all" else max(0, seq.prompt_len - 1 - start)
            if seq.params.logits is not None and skip < len(block):
                rows.setdefault(seq.id, {})["logits"] = block[skip:].copy()
        for seq, _, block in _apart(step.hidden, out.hidden):
            if seq.request.only == "mean":
                seq.hidden_sum = seq.hidden_sum + block.sum(0, np.float64)
            elif seq.request.only == "cls":
                seq.hidden_sum = block[0].astype(np.float64)
            else:
                rows.setdefault(seq.id, {})["hidden"] = block.copy()
        for seq, _, block in _apart(step.routes, out.routes):
            rows.setdefault(seq.id, {})["routes"] = block.copy()
        for seq, start, block in _apart(step.targets, out.target_logprobs):
            ids = seq.tokens[start + 1 : start + 1 + len(block)].tolist()
            seq.prompt_logprobs.extend({t: v} for t, v in zip(ids, block.tolist(), strict=True))
        for seq in step.plan.sequences():
            if seq.wants_all:
                rows.setdefault(seq.id, {})
        return rows

    @staticmethod
    def _prompt_top(seq: Sequence, start: int, logits: NDArray[np.float32]) -> None:
        """Log-probabilities of the prompt tokens after positions ``start`` …, the chosen one's and the best ones'."""
        count = min(len(logits), seq.prompt_len - 1 - start)
        if count <= 0:
            return
        logprobs = host_sampler.log_softmax(logits[:count])
        for i in range(count):
            token = int(seq.tokens[start + 1 + i])
            best = dict(host_sampler.top(logprobs[i], seq.params.prompt_logprobs))
            seq.prompt_logprobs.append({token: float(logprobs[i, token]), **best})

    @staticmethod
    def _attach(seq: Sequence, output: EngineOutput, rows: dict[str, Any]) -> None:
        """Add the rows of this step to the request's output, and its prompt's log-probabilities once they are whole."""
        mine = rows.pop(seq.id, None)
        if mine is None:
            return
        output.logits, output.hidden, output.routes = mine.get("logits"), mine.get("hidden"), mine.get("routes")
        seq.collected = max(seq.collected, seq.known if seq.request.only else seq.known - 1)
        if seq.params.prompt_logprobs >= 0 or seq.request.only == "score":
            if len(seq.prompt_logprobs) == seq.prompt_len:
                output.prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, []

    def _rest(self, step: Step, rows: dict[str, Any]) -> Iterator[tuple[Sequence, EngineOutput]]:
        """Requests that drew no token in this step: chunks of prompts, and prompts that draw none."""
        ends = {s.id: s for s in step.plan.decodes}
        stops = {s.id: s.length for s in step.plan.decodes} | {s.id: a + n for s, a, n in step.plan.chunks}
        ends |= {s.id: s for s, _, _ in step.plan.chunks}
        for request_id in list(rows):
            seq = ends[request_id]
            if seq.finished:
                continue
            stop = stops[request_id]
            if seq.request.only and stop == seq.length:
                if seq.request.only in ("mean", "cls"):
                    count = seq.length if seq.request.only == "mean" else 1
                    rows[request_id]["hidden"] = (seq.hidden_sum / count).astype(np.float32)[None]
                output = EngineOutput(seq.id, finish_reason="length", cached_tokens=seq.cached_tokens)
                self._attach(seq, output, rows)
                yield seq, output
                continue
            mine = rows.pop(request_id)
            seq.collected = max(seq.collected, stop)
            if mine:
                yield seq, EngineOutput(seq.id, cached_tokens=seq.cached_tokens, **mine)


def progress_of(reached: Iterable[tuple[Sequence, int]]) -> Iterator[EngineOutput]:
    """How far prompts have come, of those requests that asked for it: up to the given places. One that is computed
    again, since it had to give up its blocks, is told of once it is farther than before."""
    for seq, stop in reached:
        processed = min(stop, seq.prompt_len)
        if seq.request.progress and not seq.finished and seq.known == seq.prompt_len and processed > seq.told:
            seq.told = processed
            now = time.perf_counter()
            yield EngineOutput(seq.id, cached_tokens=seq.cached_tokens, processed=processed, time=now)


def _apart(asked: list[tuple[Sequence, int, int]], rows: NDArray[Any]) -> Iterator[tuple[Sequence, int, NDArray[Any]]]:
    """(request, first position, its rows) of those that ``Step`` says were asked for."""
    ends = np.cumsum([count for _, _, count in asked])
    for (seq, start, count), end in zip(asked, ends, strict=True):
        yield seq, start, rows[end - count : end]


def _processed(seq: Sequence, logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Raw logits [V] through the request's callables, as torch tensors (token ids [n] so far, logits [V])."""
    import torch

    x = torch.from_numpy(np.array(logits, np.float32))
    ids = torch.from_numpy(seq.tokens[: seq.known].astype(np.int64))
    for processor in seq.processors:
        x = torch.as_tensor(processor(ids, x))
    result = x.detach().to("cpu", torch.float32).numpy().reshape(-1)
    if result.shape != logits.shape:
        raise ValueError(f"expected logits of shape {logits.shape}, found {tuple(x.shape)}")
    return result


def _logprobs(token: int, logprob: float, k: int, out: StepOutput, row: int) -> dict[int, float]:
    """{token id: log-probability}: the chosen token's and those of the best ``k``."""
    found = {token: logprob}
    if k:
        ids, values = out.top_ids[row, :k].tolist(), out.top_logprobs[row, :k].tolist()
        found.update((i, v) for i, v in zip(ids, values, strict=True) if i >= 0)
        found[token] = logprob
    return found


def _or_error(seq: Sequence, make: Callable[[], EngineOutput]) -> EngineOutput:
    """What ``make`` gives; where it fails, the end of this request alone."""
    try:
        return make()
    except Exception as e:
        log.error("request %s: its token cannot be taken", seq.id, exc_info=e)
        return _error(seq, f"the engine failed over this request's token ({type(e).__name__}: {e})")


def _count(seq: Sequence, guessed: int, right: int) -> None:
    """Without a speculator nothing is guessed."""


def _error(seq: Sequence, text: str, code: int = 500) -> EngineOutput:
    return EngineOutput(seq.id, finish_reason="error", error=text, error_code=code, cached_tokens=seq.cached_tokens)
