"""A runner whose model is a hash: every output depends on all of the context that the cache shows, and on nothing else.

Two layers. The first caches a number made of token id, position and rope set; its output at a position is a hash of
every cached number visible there, in every group. The second caches that output, so that a wrong context at any earlier
time stays visible; logits are a hash of all visible second-layer entries. Of a state group the cache has the sums of
both numbers so far. Whatever the block manager mixes up changes tokens. On every step the arrays are also checked
against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.engine.constraints import host_sampler
from toolkit.engine.core import EngineCore
from toolkit.engine.options import EngineOptions
from toolkit.engine.request import EngineOutput, EngineRequest, SamplingParams
from toolkit.models.spec import CacheGroup, DecoderSpec, NormSpec
from toolkit.runners.base import MemoryNeed, RunnerOptions
from toolkit.runners.step import StepBatch, StepOutput

U64 = NDArray[np.uint64]


def mix(x: Any) -> U64:
    """splitmix64's finaliser."""
    z = np.asarray(x, np.uint64)
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def first_layer(tokens: NDArray, positions: NDArray, rope_set: int) -> U64:
    return mix(
        tokens.astype(np.uint64) * np.uint64(1_000_003)
        + mix(positions.astype(np.uint64) * np.uint64(2) + np.uint64(rope_set))
    )


Window = int | str | tuple[int, int] | None
"""Of a cache group: its window, None for a full one, "state"; a pair: the window and the first tokens beside it."""


def _pair(window: Window) -> tuple[int | None, int]:
    if isinstance(window, tuple):
        return window
    return (window if isinstance(window, int) else None), 0


def window_sums(values: U64, start: int, stop: int, window: Window) -> U64:
    """For each position p in [start, stop): the sum of values[q] over visible q <= p; values begin at position 0."""
    with np.errstate(over="ignore"):
        total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])
        size, sinks = _pair(window)
        low = 0 if size is None else np.maximum(np.arange(start, stop) - size + 1, 0)
        return total[start + 1 : stop + 1] - total[low] + total[np.minimum(low, sinks)]


def fake_groups(*windows: Window) -> tuple[CacheGroup, ...]:
    kinds = {None: ("full", None), "state": ("state", None)}

    def group(i: int, window: Window) -> CacheGroup:
        size, sinks = _pair(window)
        return CacheGroup(*(("window", size) if size is not None else kinds[window]), (i,), sinks)

    return tuple(group(i, w) for i, w in enumerate(windows))


def fake_spec(windows: tuple[Window, ...], vocab_size: int, max_position: int = 1 << 20) -> DecoderSpec:
    groups = fake_groups(*windows)
    return DecoderSpec(
        family="fake",
        vocab_size=vocab_size,
        hidden_size=4,
        layers=(),
        final_norm=NormSpec("model.norm", 4, 1e-6),
        cache_groups=groups,
        max_position=max_position,
        tied=True,
    )


def make_logits(states: U64, vocab_size: int) -> NDArray[np.float32]:
    """Spread-out logits [n, V], distinct with overwhelming probability."""
    ids = np.arange(vocab_size, dtype=np.uint64)
    with np.errstate(over="ignore"):
        bits = mix(states[:, None] + mix(ids)[None] * np.uint64(3))
    return ((bits >> np.uint64(40)).astype(np.float32) / (1 << 24) * 16 - 8).astype(np.float32)


def reference_states(tokens: list[int], windows: tuple[Window, ...], rope_set: int = 0) -> U64:
    """The state at every position, computed without any cache."""
    ids, n = np.array(tokens, np.int64), len(tokens)
    first = first_layer(ids, np.arange(n), rope_set)
    middle = np.zeros(n, np.uint64)
    with np.errstate(over="ignore"):
        for g, w in enumerate(windows):
            middle += mix(window_sums(first, 0, n, w) + np.uint64(g))
        second, final = mix(middle), np.zeros(n, np.uint64)
        for g, w in enumerate(windows):
            final += mix(window_sums(second, 0, n, w) + np.uint64(g + 77))
    return final


@dataclass
class Handle:
    runner: FakeRunner
    batch: StepBatch
    out: StepOutput | None = None

    def result(self) -> StepOutput:
        if self.out is None:
            self.runner.flush()
        assert self.out is not None
        if isinstance(self.out, Exception):
            raise self.out
        return self.out


class FakeRunner:
    """``windows``: one entry a cache group. ``asynchronous``: steps run when their result is asked for."""

    name = "fake"
    backend = "turbomind"
    device = "cpu"
    dtype = "float32"
    layout = "fake"

    def __init__(
        self,
        windows: tuple[Window, ...] = (None,),
        vocab_size: int = 61,
        block_size: int = 4,
        asynchronous: bool = False,
        cheap: bool = False,
    ) -> None:
        self.windows = windows
        self.spec = fake_spec(windows, vocab_size)
        self.options = RunnerOptions(block_size=block_size)
        self.batch_invariant, self.asynchronous = True, asynchronous
        self.notes: list[str] = []
        self.cheap = cheap  # constant tokens, no checks: for timing the engine itself
        self.queue: list[Handle] = []
        self.previous: NDArray[np.int32] = np.zeros(0, np.int32)
        self.fail_on: set[int] = set()  # steps, counted from 0, that raise
        self.refused: set[int] = set()  # token ids: a step that holds one raises, its slots full of rubbish
        self.nan_on: set[int] = set()  # token ids: a row whose last token is one gets NaN logits
        self.steps = 0
        self.tokens_computed = 0
        self.max_tokens = 0
        self.closed = False

    def memory(self) -> MemoryNeed:
        return MemoryNeed(1 << 20, 1 << 10, (1 << 12,) * len(self.windows), 1 << 30, True)

    def load_weights(self) -> None: ...

    def settle(self) -> None: ...

    def release_weights(self) -> None: ...

    def use_weights(self, weights: Callable[[], Mapping[str, Any]]) -> Callable[[], Mapping[str, Any]]:
        return weights

    def allocate_cache(self, num_blocks: tuple[int, ...]) -> None:
        size = self.options.block_size
        shape = [n if w == "state" else n * size for n, w in zip(num_blocks, self.windows, strict=True)]
        self.first = [np.full(n, 0xDEAD, np.uint64) for n in shape]
        self.second = [np.full(n, 0xBEEF, np.uint64) for n in shape]

    def release_cache(self) -> None:
        self.first, self.second = [], []

    def warm_up(self, most: int, length: int, tokens: int) -> None: ...

    def look(self) -> None: ...

    def discard_blocks(self, group: int, blocks: Sequence[int]) -> None: ...

    def part(self, group: int, block: int) -> slice:
        size = 1 if self.windows[group] == "state" else self.options.block_size
        return slice(block * size, (block + 1) * size)

    def export_block(self, group: int, block: int, into: memoryview | None = None) -> bytes:
        part = self.part(group, block)
        return self.first[group][part].tobytes() + self.second[group][part].tobytes()

    def import_block(self, group: int, block: int, data: bytes) -> None:
        part = self.part(group, block)
        both = np.frombuffer(data, np.uint64)
        self.first[group][part], self.second[group][part] = np.split(both, 2)

    def close(self) -> None:
        self.closed = True

    def submit(self, batch: StepBatch) -> Handle:
        handle = Handle(self, batch)
        self.queue.append(handle)
        if not self.asynchronous:
            self.flush()
        return handle

    def flush(self) -> None:
        queue, self.queue = self.queue, []
        for handle in queue:
            step, self.steps = self.steps, self.steps + 1
            if step in self.fail_on:
                handle.out = RuntimeError(f"step {step} broke")  # type: ignore[assignment]
                continue
            try:
                handle.out = self.run(handle.batch)
            except RuntimeError as error:
                handle.out = error  # type: ignore[assignment]

    def run(self, b: StepBatch) -> StepOutput:
        n = len(b.sample_index)
        self.tokens_computed += len(b.token_ids)
        self.max_tokens = max(self.max_tokens, len(b.token_ids))
        if self.cheap:
            return output(np.ones(n, np.int32))
        self.check(b)
        ids = b.token_ids.copy()
        given = b.from_previous >= 0
        ids[given] = self.previous[b.from_previous[given]]
        if bad := self.refused & set(ids.tolist()):
            for g in range(len(self.windows)):
                written = b.block_tables[g][:, 1] if self.windows[g] == "state" else b.slot_mapping[g]
                self.first[g][written] = self.second[g][written] = 0xBAD
            raise RuntimeError(f"token {min(bad)} is refused")
        for g, pairs in enumerate(b.copy_blocks):
            for source, target in pairs:
                self.import_block(g, int(target), self.export_block(g, int(source)))
        states = self.forward(b, ids)
        logits = make_logits(states, self.spec.vocab_size)
        for token in self.nan_on:
            logits[ids == token] = np.nan
        out = self.sample(b, logits)
        self.previous = out.tokens[:, 0] if n else np.zeros(0, np.int32)
        out.logits = logits[b.logits_index]
        out.hidden = np.stack(
            [(states[b.hidden_index] >> np.uint64(8 * i)) % np.uint64(251) for i in range(4)], -1
        ).astype(np.float32)
        targets = (
            host_sampler.log_softmax(logits[b.target_index]) if len(b.target_index) else np.zeros((0, 1), np.float32)
        )
        out.target_logprobs = targets[np.arange(len(b.target_ids)), b.target_ids].astype(np.float32)
        return out

    def forward(self, b: StepBatch, ids: NDArray[np.int32]) -> U64:
        cu, spans = b.cu_seqlens, range(len(b.seq_lens))
        groups = [g for g, w in enumerate(self.windows) if w != "state"]
        fresh = np.zeros(len(ids), np.uint64)
        for s in spans:
            part = slice(cu[s], cu[s + 1])
            values = fresh[part] = first_layer(ids[part], b.positions[0, part], int(b.rope_set[s]))
            for g in groups:
                self.first[g][b.slot_mapping[g][part]] = values
        middle = mix(self.attend(b, self.first, fresh, 0))
        for g in groups:
            self.second[g][b.slot_mapping[g]] = middle
        return self.attend(b, self.second, middle, 77)

    def attend(self, b: StepBatch, cache: list[U64], fresh: U64, salt: int) -> U64:
        """Of every new token, whose own numbers are ``fresh``."""
        total = np.zeros(len(b.token_ids), np.uint64)
        size = self.options.block_size
        for s in range(len(b.seq_lens)):
            start, stop = int(b.positions[0, b.cu_seqlens[s]]), int(b.seq_lens[s])
            for g, window in enumerate(self.windows):
                new = slice(b.cu_seqlens[s], b.cu_seqlens[s + 1])
                if window == "state":
                    read, write = b.block_tables[g][s]
                    with np.errstate(over="ignore"):
                        sums = np.cumsum(fresh[new]) + (cache[g][read] if read >= 0 else np.uint64(0))
                        total[new] += mix(sums + np.uint64(g + salt))
                    cache[g][write] = sums[-1]
                    continue
                width, sinks = _pair(window)
                low = 0 if width is None else max(0, start - width + 1)
                at = np.concatenate([np.arange(min(sinks, low)), np.arange(low, stop)])
                blocks = b.block_tables[g][s, at // size]
                assert (blocks >= 0).all(), f"sequence {s} reads a block that is not there"
                values = np.zeros(stop, np.uint64)
                values[at] = cache[g][blocks.astype(np.int64) * size + at % size]
                with np.errstate(over="ignore"):
                    total[new] += mix(window_sums(values, start, stop, window) + np.uint64(g + salt))
        return total

    def check(self, b: StepBatch) -> None:
        """Dtypes, shapes, and that lengths, positions, block tables and slots tell the same story."""
        for name in (
            "token_ids",
            "from_previous",
            "positions",
            "cu_seqlens",
            "seq_lens",
            "sample_index",
            "logits_index",
            "hidden_index",
            "target_index",
            "target_ids",
            "adapter",
        ):
            a = getattr(b, name)
            assert a.dtype == np.int32 and a.flags.c_contiguous, name
        tokens, size = len(b.token_ids), self.options.block_size
        assert tokens and b.positions.shape == (1, tokens) and len(b.from_previous) == tokens
        assert b.cu_seqlens[0] == 0 and b.cu_seqlens[-1] == tokens and (np.diff(b.cu_seqlens) > 0).all()
        assert len(b.seq_lens) == len(b.cu_seqlens) - 1 == len(b.rope_set) and b.rope_set.dtype == np.int8
        for s in range(len(b.seq_lens)):
            part = b.positions[0, b.cu_seqlens[s] : b.cu_seqlens[s + 1]]
            assert part[-1] == b.seq_lens[s] - 1 and (np.diff(part) == 1).all()
        owner = np.repeat(np.arange(len(b.seq_lens)), np.diff(b.cu_seqlens))
        for g, n in enumerate(b.block_tables):
            slots = b.slot_mapping[g]
            assert n.dtype == np.int32 and slots.dtype == np.int64
            if self.windows[g] == "state":
                self.check_states(b, n)
                continue
            assert len(slots) == tokens
            assert len(np.unique(slots)) == tokens, "two tokens go to one slot"
            assert (slots >= 0).all() and (slots < len(self.first[g])).all()
            expected = n[owner, b.positions[0] // size].astype(np.int64) * size + b.positions[0] % size
            assert (slots == expected).all(), "slots are not where the block table points"
            written = set((slots // size).tolist())
            for s in range(len(b.seq_lens)):  # nobody else may read a block that is being written
                mine = set((slots[b.cu_seqlens[s] : b.cu_seqlens[s + 1]] // size).tolist())
                used = -(-int(b.seq_lens[s]) // size)
                visible = {int(x) for x in n[s, :used] if x >= 0}
                assert not (visible & written) - mine, "a block is read by one request and written by another"
        assert (b.token_ids[b.from_previous < 0] >= 0).all() and (b.token_ids < self.spec.vocab_size).all()
        assert (b.from_previous < max(1, len(self.previous))).all() or self.asynchronous
        self.check_sampling(b)

    def check_sampling(self, b: StepBatch) -> None:
        x = b.sampling
        rows = len(b.sample_index)
        for name, dtype in {
            "temperature": np.float32,
            "top_k": np.int32,
            "top_p": np.float32,
            "min_p": np.float32,
            "repetition_penalty": np.float32,
            "presence_penalty": np.float32,
            "frequency_penalty": np.float32,
            "seed": np.uint64,
            "position": np.int64,
            "logprobs": np.int32,
        }.items():
            a = getattr(x, name)
            assert a.dtype == dtype and a.shape == (rows,), name
        for ptr, values in (
            (x.history_ptr, x.history_ids),
            (x.history_ptr, x.history_count),
            (x.bias_ptr, x.bias_ids),
            (x.bias_ptr, x.bias_values),
        ):
            assert ptr.dtype == np.int32 and ptr.shape == (rows + 1,) and ptr[-1] == len(values)
        for i in range(rows):
            for ptr, values in ((x.history_ptr, x.history_ids), (x.bias_ptr, x.bias_ids)):
                row = values[ptr[i] : ptr[i + 1]]
                assert len(set(row.tolist())) == len(row), "ids of a row must be distinct"
        if x.grammar is not None:
            assert x.grammar.dtype == np.int32 and x.grammar.shape == (rows, -(-self.spec.vocab_size // 32))

    @staticmethod
    def check_states(b: StepBatch, table: NDArray[np.int32]) -> None:
        assert table.shape == (len(b.seq_lens), 2) and (table[:, 1] >= 0).all()
        assert ((table[:, 0] >= 0) == (b.seq_lens > np.diff(b.cu_seqlens))).all()
        assert len(np.unique(table[:, 1])) == len(table), "two states go to one slot"
        for s, write in enumerate(table[:, 1]):
            assert write not in np.delete(table[:, 0], s), "a state is read by one request and written by another"

    def sample(self, b: StepBatch, logits: NDArray[np.float32]) -> StepOutput:
        n, most = len(b.sample_index), max(b.sampling.logprobs.tolist(), default=-1)
        out = output(np.zeros(n, np.int32))
        out.logprob = np.full((n, 1), np.nan, np.float32)
        out.top_ids = np.full((n, max(0, most)), -1, np.int32)
        out.top_logprobs = np.zeros((n, max(0, most)), np.float32)
        bad = []
        for i, at in enumerate(b.sample_index):
            if np.isnan(logits[at]).any():
                bad.append(i)
                continue
            x = host_sampler.adjust(logits[at], b.sampling, i)
            out.tokens[i, 0] = host_sampler.draw(x, b.sampling, i)
            k = int(b.sampling.logprobs[i])
            if k >= 0:
                logprobs = host_sampler.log_softmax(x)
                out.logprob[i, 0] = logprobs[out.tokens[i, 0]]
                for j, (token, value) in enumerate(host_sampler.top(logprobs, k)):
                    out.top_ids[i, j], out.top_logprobs[i, j] = token, value
        out.bad_rows = np.array(bad, np.int32)
        return out


def output(tokens: NDArray[np.int32]) -> StepOutput:
    n = len(tokens)
    empty = np.zeros((0, 1), np.float32)
    return StepOutput(
        tokens=tokens.reshape(n, 1),
        logprob=np.zeros((n, 1), np.float32),
        top_ids=np.zeros((n, 0), np.int32),
        top_logprobs=np.zeros((n, 0), np.float32),
        logits=empty,
        hidden=empty,
        target_logprobs=np.zeros(0, np.float32),
    )


def make_core(
    windows: tuple[Any, ...] = (None,),
    vocab_size: int = 64,
    *,
    blocks: int = 200,
    block_size: int = 4,
    asynchronous: bool = False,
    cheap: bool = False,
    tokenizer: Any = None,
    shelf: Any = None,
    moving: Any = None,
    **options: Any,
) -> EngineCore:
    """The engine's loop over a fake runner: ``blocks`` for each window, ``options`` of ``EngineOptions``."""
    runner = FakeRunner(windows, vocab_size, block_size, asynchronous=asynchronous, cheap=cheap)
    defaults: dict[str, Any] = {"session_len": 200, "max_batch_size": 8, "max_prefill_token_num": 64, "check": True}
    chosen = EngineOptions(**(defaults | {"num_blocks": (blocks,) * len(windows)} | options))
    runner.allocate_cache(chosen.num_blocks)
    opened = None if tokenizer is None else lambda: tokenizer
    return EngineCore(runner, chosen, opened, read_weights=lambda files: dict, shelf=shelf, moving=moving)


def run(core: EngineCore, limit: int = 5000) -> dict[str, list[EngineOutput]]:
    """Step until everything is done; outputs by request."""
    found: dict[str, list[EngineOutput]] = {}
    for _ in range(limit):
        if not core.has_work:
            return found
        for output in core.step():
            found.setdefault(output.id, []).append(output)
        core.check_integrity()
    raise AssertionError("the engine does not come to an end")


def ask(core: EngineCore, tokens: list[int], n: int = 8, processors: Any = (), **params: Any) -> list[EngineOutput]:
    """The outputs of one request; ``params`` of ``SamplingParams``, and ``session`` and ``only``."""
    fields = {k: params.pop(k) for k in ("session", "only") if k in params}
    core.add(EngineRequest("r", tokens, SamplingParams(n, **params), **fields), processors)
    return run(core)["r"]


def tokens_of(outputs: Iterable[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]
