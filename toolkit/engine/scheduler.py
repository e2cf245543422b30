"""What the next step computes.

There are no prefill and decode phases: a request has ``length`` tokens of which ``computed`` are in the cache, and a
step computes some more of them under a token budget. First every request that decodes: one token, or where blocks of
tokens are guessed together a pass over such a block. Then prompts in chunks: half of the budget for the one whose turn
is first, so that each has its turn, the other half for those with the fewest tokens left, so that a short one need not
wait for a long one. Waiting requests start in their turn: by priority, then by arrival. When blocks run out the last in
turn is preempted: it gives up its blocks and is computed again later.
"""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from toolkit.engine.cache.block_manager import BlockManager, blocks_for
from toolkit.engine.cache.followers import Followers
from toolkit.engine.cache.prefix import extend_keys
from toolkit.engine.options import EngineOptions
from toolkit.engine.pace import Pace
from toolkit.engine.plan import Plan
from toolkit.engine.sequence import Sequence

SIDE_BY_SIDE = 8  # prompts that are begun while those begun before them use up the budget


_turn = attrgetter("turn")


class Scheduler:
    """Waiting and running requests, and the blocks of the running ones."""

    def __init__(self, blocks: BlockManager, options: EngineOptions, max_rows_per_step: int) -> None:
        self.blocks = blocks
        self.options = options
        self.followers = Followers(blocks, options.max_batch_size)
        self.pace = Pace(options.target_step_ms)
        self.max_rows_per_step = max_rows_per_step  # logits rows for chunks that want one for every token
        self._rows_left = max_rows_per_step
        self.waiting: list[Sequence] = []  # both by turn
        self.running: list[Sequence] = []
        self._free_rows = list(range(options.max_batch_size - 1, -1, -1))
        self.preemptions = 0
        self.hit_tokens = 0
        self.looked_up_tokens = 0

    def add(self, seq: Sequence) -> None:
        insort(self.waiting, seq, key=_turn)

    def schedule(self) -> Plan:
        """The next step; empty if nothing can run (nothing is there, or all wait for a step in flight)."""
        plan = Plan()
        before = self.preemptions
        self._rows_left = self.max_rows_per_step
        for seq in list(self.running):
            ready = seq.row >= 0 and seq.decodes and not (seq.ending or seq.at_picture)
            if not (ready and self._make_room(seq, seq.remaining)):
                continue
            if seq.canvas is None:
                plan.decodes.append(seq)
            else:
                plan.chunks.append((seq, seq.computed, seq.remaining))
                plan.passes += 1
        budget = self._budget(plan)
        if self.preemptions == before and self.waiting:
            self._admit(plan, budget)
        for seq, share in self._shares(plan, budget):
            if seq.row >= 0:
                self._add_chunk(plan, seq, share)
        if self.preemptions != before:
            plan.decodes = [s for s in plan.decodes if s.row >= 0]
            plan.passes = sum(c[0].row >= 0 for c in plan.chunks[: plan.passes])
            plan.chunks = [c for c in plan.chunks if c[0].row >= 0]
            plan.started = [s for s in plan.started if s.row >= 0]
        return plan

    def finish(self, seq: Sequence, *, keep: bool = False) -> None:
        """Take a request out and free its blocks now; ``keep``: its session holds on to them."""
        if seq.row >= 0:
            if keep and seq.request.session is not None:
                self.blocks.keep_for_session(seq.request.session, seq.row, seq.keys)
            self._leave(seq)
        else:
            self.waiting.remove(seq)
        seq.finished = True

    def label(self, seq: Sequence, stored: int) -> None:
        """After a step: make the blocks it filled findable. ``stored``: tokens that are in the cache for certain, not
        those that a step in flight computes.
        """
        if seq.keys_root is None or seq.row < 0:
            return
        seq.stored = min(stored, seq.computed, seq.known)
        if seq.stored // self.blocks.block_size > len(seq.keys):
            extend_keys(seq.keys, seq.keys_root, seq.tokens, seq.stored, self.blocks.block_size, seq.spans)
        before = self.blocks.labelled(seq.row)
        self.blocks.label(seq.row, seq.keys, seq.stored)
        self.followers.note(seq, before, self.blocks.labelled(seq.row))

    def preempt(self, seq: Sequence) -> None:
        """Give up a running request's blocks and queue it again in its turn."""
        self._leave(seq)
        seq.computed = seq.stored = 0
        self.preemptions += 1
        insort(self.waiting, seq, key=_turn)

    def _leave(self, seq: Sequence) -> None:
        self.followers.keep_tail(seq)
        self.blocks.release(seq.row)
        self._free_rows.append(seq.row)
        self.running.remove(seq)
        seq.row = -1

    def _make_room(self, seq: Sequence, count: int) -> bool:
        """Blocks for the next ``count`` tokens, at the cost of those behind it; False if it was preempted itself."""
        while not self.blocks.grow(seq.row, seq.computed, seq.computed + count):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def _chunk_len(self, seq: Sequence, budget: int) -> int:
        count = min(seq.remaining, budget)
        if seq.params.logits == "all" or seq.params.prompt_logprobs > 0:
            count = min(count, max(1, self._rows_left))
            self._rows_left -= count
        return count

    def _add_chunk(self, plan: Plan, seq: Sequence, budget: int) -> None:
        count = self._chunk_len(seq, budget)
        fits = self.blocks.fitting(seq.row, seq.computed, seq.computed + count)
        count = max(1, self.blocks.stop(seq.computed, fits, seq.branch) - seq.computed)
        whole = seq.uncut(seq.computed + count) - seq.computed
        if whole > count and plan.prompts:
            return  # a picture or block that goes beyond the budget goes alone
        count = whole
        if self._make_room(seq, count):
            plan.chunks.append((seq, seq.computed, count))

    def _prompts(self, plan: Plan) -> list[Sequence]:
        """Running requests with a prompt to compute, by turn."""
        return [s for s in self.running if not s.decodes or s.at_picture or s in plan.started]

    def _budget(self, plan: Plan) -> int:
        """Prompt tokens that this step may take."""
        passes = sum(count for _, _, count in plan.chunks)
        most = max(1, self.options.max_prefill_token_num - len(plan.decodes) - passes)
        before = max((s.computed for s in self._prompts(plan)), default=0)
        return self.pace.budget(plan.decoding, before, most)

    def _shares(self, plan: Plan, budget: int) -> list[tuple[Sequence, int]]:
        """The prompts of this step by turn, and how many tokens each may take of ``budget``."""
        prompts = self._prompts(plan)
        if not prompts:
            return []
        first = prompts[0]
        shares = {first.order: min(first.remaining, budget - budget // 2)}
        left = budget - shares[first.order]
        for seq in sorted(prompts[1:], key=lambda s: s.remaining):
            shares[seq.order] = min(seq.remaining, left)
            left -= shares[seq.order]
        shares[first.order] += left
        return [(s, shares[s.order]) for s in prompts if shares[s.order]]

    def _admit(self, plan: Plan, budget: int) -> None:
        """Start waiting requests while there is a row, budget and room for their whole prompts.

        One whose next block is being computed by a running prompt waits for it instead of computing it too.
        """
        size = self.blocks.block_size
        promised = sum(blocks_for(s.length, size) - blocks_for(s.computed, size) for s in self.running)
        coming = {k for s in self.running for k in s.keys[self.blocks.labelled(s.row) :]}
        begun = [s.remaining for s in self._prompts(plan)]
        for seq in list(self.waiting):
            if not self._free_rows or (len(begun) >= SIDE_BY_SIDE and sum(begun) >= budget):
                return
            if seq.looks_at and self.running:
                held = seq.looks_at.union(*(s.looks_at for s in self.running))
                if len(held) > self.options.pictures_kept:
                    return
            hit = self._match(seq)
            if hit < len(seq.keys) and seq.keys[hit] in coming and not seq.wants_all:
                continue
            row = self._free_rows.pop()
            self.blocks.open(row, seq.keys, hit)
            if self.running and not self.blocks.can_start(row, seq.length + 1, promised):
                self.blocks.release(row)
                self._free_rows.append(row)
                return
            self._start(seq, row, hit, promised)
            plan.started.append(seq)
            begun.append(seq.remaining)
            promised += blocks_for(seq.length, size) - blocks_for(seq.computed, size)
            coming.update(seq.keys[hit:])

    def _match(self, seq: Sequence) -> int:
        """Cached blocks that ``seq`` may start on, at least one token short of everything."""
        assert not seq.pending, "a preempted request's last token is known before it is looked at again"
        if seq.keys_root is None:
            return 0
        extend_keys(seq.keys, seq.keys_root, seq.tokens, seq.length, self.blocks.block_size, seq.spans)
        seq.branch = self.blocks.known(seq.keys)
        return self.blocks.match(seq.keys, _most(seq))

    def _start(self, seq: Sequence, row: int, hit: int, promised: int) -> None:
        self.waiting.remove(seq)
        insort(self.running, seq, key=_turn)
        seq.row = row
        seq.computed = hit * self.blocks.block_size
        key, more = self.followers.longest(seq, hit, _most(seq))
        if more and self.blocks.begin_like(row, key, seq.length + 1, promised):
            seq.computed += more
        if not seq.admitted:
            seq.admitted = True
            seq.cached_tokens = min(seq.computed, seq.prompt_len)
            self.looked_up_tokens += seq.prompt_len
            self.hit_tokens += seq.cached_tokens


def _most(seq: Sequence) -> int:
    """Tokens that may come from the cache: not the last one, nor those of which more is wanted than keys and values."""
    return min(seq.length - 1, seq.collected) if seq.wants_all else seq.length - 1
