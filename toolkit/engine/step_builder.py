"""A scheduler's plan -> the flat arrays of a StepBatch.

What every decoding request contributes each step (last token, lengths, sampling numbers) lives in arrays indexed by its
row, so that a decode step is a handful of gathers whatever the batch; only prompts, penalties and constraints are
looked at one request at a time. Where the same requests decode once more, what cannot have changed is taken over as it
is: between two short steps every array counts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.cache.block_manager import BlockManager
from toolkit.engine.canvas import PASS_BITS
from toolkit.engine.drafts.along import Place, places
from toolkit.engine.plan import Plan
from toolkit.engine.sequence import Sequence
from toolkit.engine.step import Step, Verified, ask_for_rows, joined
from toolkit.runners.step import COLUMNS, NONE, Draw, SamplingBatch, StepBatch

_EMPTY_F32 = np.zeros(0, np.float32)


@dataclass(frozen=True)
class Growth:
    """How requests turn that do so by their own length: beyond ``trained`` tokens, and where it ``grows`` each further
    token by the length up to itself, as transformers does while it generates."""

    trained: int
    grows: bool


class StepBuilder:
    """Arrays by row, and the batches made from them. ``vocab_size`` is the model's; ``axes``: numbers that a token's
    position has; ``growth``: where requests turn by their own length."""

    def __init__(
        self, blocks: BlockManager, rows: int, vocab_size: int, axes: int = 1, growth: Growth | None = None
    ) -> None:
        self.blocks = blocks
        self.vocab_size = vocab_size
        self.axes = axes
        self._growth = growth
        self._turned = np.zeros(rows, np.int32)
        self._shift = np.zeros(rows, np.int32)
        self._length = np.zeros(rows, np.int32)
        self._generated = np.zeros(rows, np.int64)
        self._last = np.zeros(rows, np.int32)
        self._source = np.full(rows, -1, np.int32)  # the sampled row of the step in flight that draws the last token
        self._rope_set = np.zeros(rows, np.int8)
        self._adapter = np.full(rows, -1, np.int32)
        self._columns = {name: np.full(rows, getattr(Draw, name), dtype) for name, dtype in COLUMNS.items()}
        self._logprobs = np.full(rows, -1, np.int32)
        self._host_fields = np.zeros(rows, bool)  # has penalties, biases or a grammar
        self._known: tuple[NDArray[np.intp], Step] | None = None  # rows and step of those that decoded last
        self._aux_layers: tuple[int, ...] = ()  # whose inputs come back from every step
        self._newest = False

    def tap(self, layers: tuple[int, ...], newest: bool = False) -> None:
        """From now on the inputs of these layers come back, for who guesses by them; ``newest``: of a prompt's tokens
        those of the last in each step alone."""
        if layers != self._aux_layers:
            self._aux_layers, self._known = layers, None
        self._newest = newest

    def enter(self, seq: Sequence) -> None:
        """Fill the arrays for a request that has just been given its row."""
        row, p = seq.row, seq.params
        self._known = None
        self.reached(seq)
        self._rope_set[row] = seq.rope_set
        self._turned[row] = seq.turned_by
        self._shift[row] = seq.shift
        self._adapter[row] = seq.request.adapter
        for name, column in self._columns.items():
            column[row] = value = getattr(p, name)
            if column.dtype.kind != "f" and column[row] != value:  # numpy below 2 takes what does not fit
                raise OverflowError(f"{name}: {value} does not fit {column.dtype}")
        self._logprobs[row] = p.logprobs if seq.canvas is None else max(p.logprobs, 0)  # what a guess is judged by
        self._host_fields[row] = any(x is not None for x in (seq.history, seq.biases, seq.bad_words, seq.grammar))

    def reached(self, seq: Sequence) -> None:
        """All tokens of the request are known."""
        row = seq.row
        self._length[row] = seq.length
        self._generated[row] = seq.generated
        self._last[row] = seq.tokens[seq.length - 1]
        self._source[row] = -1

    def advance(self, rows: list[int]) -> None:
        """These rows draw one more token each in a step just submitted, as its sampled rows 0, 1, …"""
        index = np.array(rows, np.intp)
        self._length[index] += 1
        self._generated[index] += 1
        self._source[index] = np.arange(len(rows), dtype=np.int32)

    def arrived(self, rows: list[int], tokens: list[int]) -> None:
        """The last tokens of these rows are known."""
        self._last[rows] = tokens
        self._source[rows] = -1

    def build(self, plan: Plan) -> Step:
        """The arrays of one step."""
        if self._known is not None and not plan.chunks and plan.decodes == self._known[1].sampled:
            return self._again(plan, *self._known)
        return self._anew(plan)

    def _again(self, plan: Plan, rows: NDArray[np.intp], known: Step) -> Step:
        """The step behind ``known``, of the same requests, which draw a token each and want nothing else."""
        seq_lens = self._length[rows]
        places = seq_lens - 1
        positions = (places + self._shift[rows])[None]
        batch = replace(
            known.batch,
            token_ids=self._last[rows],
            from_previous=self._source[rows],
            positions=positions if self.axes == 1 else np.repeat(positions, self.axes, 0),
            seq_lens=seq_lens,
            block_tables=self._block_tables(rows, places, seq_lens),
            slot_mapping=self._slots(rows, places),
            sampling=replace(known.batch.sampling, position=self._generated[rows]),
            rope_length=self._rope_length(rows, places),
            copy_blocks=self.blocks.copies.take(),
        )
        return Step(plan, batch, known.sampled)

    def _rope_length(self, owners: NDArray[np.intp], places: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """By which length each token turns, 0 = as trained, where requests turn by their own."""
        if self._growth is None:
            return None
        turned, ends = self._turned[owners], places + 1
        if not self._growth.grows:
            return turned
        return np.where(ends > self._growth.trained, np.maximum(turned, ends), turned)

    def _anew(self, plan: Plan) -> Step:
        verified = self._verified(plan) if plan.guesses else []
        sequences = list(plan.sequences())
        rows = np.fromiter((s.row for s in sequences), np.intp, len(sequences))
        decodes = len(plan.decodes)
        counts = np.ones(len(sequences), np.int32)
        for i, (_, _, count) in enumerate(plan.chunks, start=decodes):
            counts[i] = count
        cu = np.zeros(len(sequences) + 1, np.int32)
        np.cumsum(counts, out=cu[1:])
        seq_lens = np.empty(len(sequences), np.int32)
        seq_lens[:decodes] = self._length[rows[:decodes]]
        seq_lens[decodes:] = [start + count for _, start, count in plan.chunks]

        token_ids = np.empty(cu[-1], np.int32)
        places = np.empty(cu[-1], np.int32)
        positions = np.empty((self.axes, cu[-1]), np.int32)
        previous = np.full(cu[-1], -1, np.int32)
        token_ids[:decodes] = self._last[rows[:decodes]]
        places[:decodes] = seq_lens[:decodes] - 1
        positions[:, :decodes] = places[:decodes] + self._shift[rows[:decodes]]
        previous[:decodes] = self._source[rows[:decodes]]
        for i, (seq, start, count) in enumerate(plan.chunks, start=decodes):
            token_ids[cu[i] : cu[i + 1]] = seq.ids(start, count)
            places[cu[i] : cu[i + 1]] = np.arange(start, start + count, dtype=np.int32)
            positions[:, cu[i] : cu[i + 1]] = seq.positions(start, count)
        owners = rows if len(rows) == len(places) else np.repeat(rows, counts)
        sampled, sample_index = self._sampled(plan, cu)
        guesses, mask_index = self._guesses(plan, seq_lens, cu)
        if verified:
            sample_index = np.concatenate([sample_index, _rows_of(plan, verified, cu)])
        mutual = [
            (cu[i] + max(int(first) - start, 0), cu[i] + int(stop) - start, i)
            for i, (seq, start, count) in enumerate(plan.chunks, start=decodes)
            for first, stop in seq.runs
            if first < start + count and stop > start
        ]
        batch = StepBatch(
            token_ids=token_ids,
            from_previous=previous,
            positions=positions,
            cu_seqlens=cu,
            seq_lens=seq_lens,
            block_tables=self._block_tables(rows, seq_lens - counts, seq_lens),
            slot_mapping=self._slots(owners, places),
            rope_set=self._rope_set[rows],
            adapter=self._adapter[rows],
            sample_index=mask_index if guesses else sample_index,
            sampling=self._guessing(guesses) if guesses else self._verifying(sampled, verified),
            aux_layers=self._aux_layers,
            aux_index=self._tapped(plan, cu),
            mutual=np.array(mutual, np.int32).reshape(-1, 3),
            types=self._types(plan, places, cu),
            rope_length=self._rope_length(owners, places),
            copy_blocks=self.blocks.copies.take(),
        )
        step = Step(plan, batch, sampled, guesses, verified)
        if any(s.wants_all or s.wants_rows or s.drawn_here for s in sequences):
            ask_for_rows(step)
        elif len(sampled) == decodes == len(sequences) and not self._host_fields[rows].any():
            self._known = rows, replace(step, batch=replace(batch))
        return step

    def _tapped(self, plan: Plan, cu: NDArray[np.int32]) -> NDArray[np.int32]:
        """The flat tokens of which layers' inputs come back: of a sequence its last ones, or all. A guess may turn out
        right up to any of its tokens."""
        if not (self._aux_layers and self._newest):
            return np.arange(cu[-1] if self._aux_layers else 0, dtype=np.int32)
        first, decodes = cu[1:] - 1, len(plan.decodes)
        for i, (seq, _, _) in enumerate(plan.chunks, start=decodes):
            if seq in plan.guesses:
                first[i] = cu[i]
        return np.concatenate([np.arange(a, b, dtype=np.int32) for a, b in zip(first, cu[1:], strict=True)])

    @staticmethod
    def _types(plan: Plan, places: NDArray[np.int32], cu: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """Of tokens of a pair's second text 1, of others 0; None where there are no pairs."""
        if not any(seq.second for seq, _, _ in plan.chunks):
            return None
        types = np.zeros(cu[-1], np.int32)
        for i, (seq, _, _) in enumerate(plan.chunks, start=len(plan.decodes)):
            mine = slice(cu[i], cu[i + 1])
            types[mine] = bool(seq.second) & (places[mine] >= seq.second)
        return types

    def _block_tables(
        self, rows: NDArray[np.intp], starts: NDArray[np.int32], seq_lens: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], ...]:
        size = self.blocks.block_size
        longest = -(-max(seq_lens.tolist()) // size)
        found = []
        for table, state, scratch in zip(self.blocks.tables, self.blocks.states, self.blocks.scratch, strict=True):
            if state:
                before = np.where(starts, table[rows, np.maximum(starts - 1, 0) // size], np.int32(-1))
                apart = scratch[rows]
                found.append(np.stack([before, np.where(apart < 0, table[rows, (seq_lens - 1) // size], apart)], 1))
            else:
                found.append(np.ascontiguousarray(table[rows, :longest]))
        return tuple(found)

    def _slots(self, owner: NDArray[np.intp], places: NDArray[np.int32]) -> tuple[NDArray[np.int64], ...]:
        """``owner``: each token's row."""
        size = self.blocks.block_size
        # All of one type: where numpy converts within an operation it lets other threads run, before this step does.
        entry, offset = np.divmod(places.astype(np.int64), size)
        return tuple(
            np.zeros(0, np.int64) if state else table[owner, entry].astype(np.int64) * size + offset
            for table, state in zip(self.blocks.tables, self.blocks.states, strict=True)
        )

    @staticmethod
    def _sampled(plan: Plan, cu: NDArray[np.int32]) -> tuple[list[Sequence], NDArray[np.int32]]:
        """Requests whose last known token is in this step, and where it stands; the host's own draws left out."""
        decodes = len(plan.decodes)
        if not plan.chunks and all(s.draws for s in plan.decodes):
            return list(plan.decodes), np.arange(decodes, dtype=np.int32)
        sampled, index = [], []
        for i, seq in enumerate(plan.sequences()):
            done = seq.computed + int(cu[i + 1] - cu[i]) == seq.length
            if done and seq.draws and seq not in plan.guesses:
                sampled.append(seq)
                index.append(cu[i + 1] - 1)
        return sampled, np.array(index, np.int32)

    def _verified(self, plan: Plan) -> list[Verified]:
        """The guesses of a step, those that could not come cut off; the plan's chunks are made that much shorter."""
        among = sum(s.grammar is not None for s in plan.sequences())
        words = -(-self.vocab_size // 32)
        found = []
        for seq, count in plan.guesses.items():
            along: list[Place] = []
            if self._host_fields[seq.row] and seq.draws:
                along = places(seq, count, words, among)
                count = len(along) - 1
            found.append(Verified(seq, count, along, seq.draws))
        plan.guesses = {v.seq: v.count for v in found}
        plan.chunks = [
            (seq, start, seq.length + plan.guesses[seq] - start if seq in plan.guesses else count)
            for seq, start, count in plan.chunks
        ]
        return found

    @staticmethod
    def _guesses(
        plan: Plan, seq_lens: NDArray[np.int32], cu: NDArray[np.int32]
    ) -> tuple[list[tuple[Sequence, int]], NDArray[np.int32]]:
        """Requests whose canvas is in this step with the number of its masks, and where these stand."""
        found, index = [], []
        for i, (seq, _, _) in enumerate(plan.chunks, start=len(plan.decodes)):
            if seq.canvas is not None and seq_lens[i] == seq.canvas.end:
                places = seq.canvas.places()
                found.append((seq, len(places)))
                index.append(cu[i + 1] - seq.canvas.length + places)
        return found, joined(index)

    def _verifying(self, sampled: list[Sequence], verified: list[Verified]) -> SamplingBatch:
        """The sampling arrays of ``sampled``, and of every row of the guesses behind them."""
        if not verified:
            return self._sampling(sampled)
        owners: list[Sequence | Place] = list(sampled)
        new = [seq.generated for seq in sampled]
        for v in verified:
            if v.drawn:
                owners += v.places or [v.seq] * (v.count + 1)
                new += range(v.seq.generated, v.seq.generated + v.count + 1)
        return self._sampling(owners, np.array(new, np.int64))

    def _guessing(self, guesses: list[tuple[Sequence, int]]) -> SamplingBatch:
        """The sampling arrays of every mask; the draws of another pass are others."""
        owners = [seq for seq, count in guesses for _ in range(count)]
        new = [seq.canvas.first - seq.prompt_len + seq.canvas.places() for seq, _ in guesses if seq.canvas is not None]
        passes = np.array([seq.canvas.passes for seq in owners if seq.canvas is not None], np.int64)
        return self._sampling(owners, np.concatenate(new), passes << PASS_BITS)

    def _sampling(
        self, sampled: Seq[Sequence | Place], new: NDArray[np.int64] | None = None, passes: NDArray[np.int64] | int = 0
    ) -> SamplingBatch:
        """``new`` [rows]: which of their request's new tokens they draw, None: the next; ``passes``: what is added to
        that for its draw."""
        rows = np.fromiter((s.row for s in sampled), np.intp, len(sampled))
        n = len(rows)
        history_ptr = bias_ptr = np.zeros(n + 1, np.int32)
        history_ids = history_count = bias_ids = NONE
        bias_values, grammar = _EMPTY_F32, None
        new = self._generated[rows] if new is None else new
        if self._host_fields[rows].any():
            history_ptr, (history_ids, history_count) = _csr(
                [(s.history.ids, s.history.counts) if s.history else None for s in sampled], (np.int32, np.int32)
            )
            biases = [biases_of(s, n) for s, n in zip(sampled, new.tolist(), strict=True)]
            bias_ptr, (bias_ids, bias_values) = _csr(biases, (np.int32, np.float32))
            grammar = self._grammar(sampled)
        return SamplingBatch(
            **{name: column[rows] for name, column in self._columns.items()},
            position=new + passes,
            history_ptr=history_ptr,
            history_ids=history_ids,
            history_count=history_count,
            bias_ptr=bias_ptr,
            bias_ids=bias_ids,
            bias_values=bias_values,
            logprobs=self._logprobs[rows],
            grammar=grammar,
        )

    def _grammar(self, sampled: Seq[Sequence | Place]) -> NDArray[np.int32] | None:
        among = len({s.row for s in sampled if s.grammar is not None})
        if not among:
            return None
        mask = np.full((len(sampled), -(-self.vocab_size // 32)), -1, np.int32)
        for i, seq in enumerate(sampled):
            if seq.grammar is not None:
                seq.grammar.fill(mask, i, among, seq.left)
        return mask

    def host_sampling(self, seq: Sequence) -> SamplingBatch:
        """The sampling arrays of one request alone, for drawing its token on the host."""
        return self._sampling([seq], np.array([seq.generated], np.int64))


def biases_of(seq: Sequence | Place, new: int) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
    """(ids, values) added to the logits of the request's new token ``new``, counted from 0, or None."""
    if seq.biases is None and seq.bad_words is None:
        return None
    banned = seq.bad_words.banned() if seq.bad_words is not None else None
    if seq.biases is None:
        assert banned is not None
        return banned, np.full(len(banned), -np.inf, np.float32)
    return seq.biases.rows(new, banned)


def _rows_of(plan: Plan, verified: list[Verified], cu: NDArray[np.int32]) -> NDArray[np.int32]:
    """The flat tokens that the rows of guesses are drawn behind."""
    ends = {seq: int(cu[i + 1]) for i, (seq, _, _) in enumerate(plan.chunks, start=len(plan.decodes))}
    return joined([np.arange(ends[v.seq] - v.count - 1, ends[v.seq]) for v in verified if v.drawn])


def _csr(
    pairs: list[tuple[NDArray, NDArray] | None], dtypes: tuple[type, type]
) -> tuple[NDArray[np.int32], tuple[NDArray, NDArray]]:
    """Row pointers and the two value arrays of ragged rows."""
    ptr = np.zeros(len(pairs) + 1, np.int32)
    np.cumsum([len(p[0]) if p is not None else 0 for p in pairs], out=ptr[1:])
    given = [p for p in pairs if p is not None and len(p[0])]
    if not given:
        return ptr, (np.zeros(0, dtypes[0]), np.zeros(0, dtypes[1]))
    return ptr, (
        np.concatenate([p[0] for p in given]).astype(dtypes[0], copy=False),
        np.concatenate([p[1] for p in given]).astype(dtypes[1], copy=False),
    )
