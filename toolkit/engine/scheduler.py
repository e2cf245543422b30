"""What the next step computes.

There are no prefill and decode phases: a request has ``length`` tokens of which ``computed`` are in the cache, and a
step computes some more of them under a token budget. First every request that decodes: one token, or where blocks of
tokens are guessed together a pass over such a block. Then prompts in chunks, which share the budget as ``feeding.py``
says. Waiting requests start as ``turns.py`` says: round by user, then by request, each user's by priority, then by
arrival. Where no place is free for a user who has few, one who has many gives one back. When blocks run out somebody is
preempted, of the user who has most the last in turn: it gives up its blocks and is computed again later.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from toolkit.engine.cache.block_manager import BlockManager, blocks_for
from toolkit.engine.cache.coming import Coming
from toolkit.engine.cache.followers import Followers
from toolkit.engine.cache.prefix import extend_keys
from toolkit.engine.cache.told import Told
from toolkit.engine.feeding import Begun, Feeding
from toolkit.engine.options import EngineOptions
from toolkit.engine.pace import ALONE, HASTY, SERVED, SHARED, Pace
from toolkit.engine.plan import Plan, side_by_side
from toolkit.engine.sequence import Sequence
from toolkit.engine.turns import LEAST_TOKENS, Held, Round, Waiting, group_of, turn

if TYPE_CHECKING:
    from toolkit.engine.cache.kept.keeper import Keeper

HELD = 16  # steps that a request waits for what another user's prompt computes: that one may have no turn for long
SPARED = 8  # preemptions of a request after which it is others' turn


Guesses = Callable[[Seq[Sequence]], Mapping[Sequence, list[int]]]


class Scheduler:
    """Waiting and running requests, and the blocks of the running ones. ``keeper``: has more of them elsewhere.
    ``guesses``: what may come next of those that are about to go on, to be verified."""

    def __init__(
        self, blocks: BlockManager, options: EngineOptions, max_rows_per_step: int, keeper: Keeper | None = None
    ) -> None:
        self.blocks = blocks
        self.keeper = keeper
        self.told: Told | None = None  # whom cached blocks are told to
        self.guesses: Guesses | None = None
        self.options = options
        self.followers = Followers(blocks, options.max_batch_size)
        self.pace = Pace(options.target_step_ms)
        self.max_rows_per_step = max_rows_per_step  # logits rows for chunks that want one for every token
        self._rows_left = max_rows_per_step
        self.waiting = Waiting()
        self.running: list[Sequence] = []  # by turn
        self._places: Held | None = None  # of ``running``, None: to be counted anew
        self._feeding = Feeding()
        self._free_rows = list(range(options.max_batch_size - 1, -1, -1))
        self.preemptions = 0
        self.hit_tokens = 0
        self.looked_up_tokens = 0

    @property
    def _held(self) -> Held:
        """The places of those that run; summed up in their order, so that equals are equal to the bit."""
        if self._places is None:
            self._places = Held(self.running)
        return self._places

    def schedule(self) -> Plan:
        """The next step; empty if nothing can run (nothing is there, or all wait for a step in flight)."""
        plan = Plan()
        before = self.preemptions
        self._rows_left = self.max_rows_per_step
        ready, prompts = self._sort_out()
        ready = self._in_turn(ready, prompts)
        guesses = {} if self.guesses is None else self.guesses(ready)
        for seq in ready:
            left = seq.remaining
            if seq.row < 0 or not (self.blocks.has(seq.row, seq.computed + left) or self._make_room(seq, left)):
                continue
            seq.decoded = self._feeding.steps
            if seq in guesses:
                self._add_guess(plan, seq, guesses[seq])
            if left == 1 and seq.canvas is None and seq not in plan.guesses:
                plan.decodes.append(seq)
            else:
                plan.chunks.append((seq, seq.computed, left + plan.guesses.get(seq, 0)))
                plan.passes += 1
        prompts = [s for s in prompts if s.row >= 0]
        budget = self._budget(plan, prompts)
        if self.preemptions == before and self.waiting:
            self._admit(plan, prompts, budget)
            prompts = sorted((s for s in [*prompts, *plan.started] if s.row >= 0), key=turn)
        for seq, share in self._feeding.shares(prompts, budget):
            if seq.row >= 0:
                self._add_chunk(plan, seq, share)
        self._feeding.note(plan, prompts)
        if self.preemptions != before:
            plan.decodes = [s for s in plan.decodes if s.row >= 0]
            plan.passes = sum(c[0].row >= 0 for c in plan.chunks[: plan.passes])
            plan.chunks = [c for c in plan.chunks if c[0].row >= 0]
            plan.guesses = {s: count for s, count in plan.guesses.items() if s.row >= 0}
            plan.started = [s for s in plan.started if s.row >= 0]
        plan.decodes = side_by_side(plan.decodes, self.blocks)
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
        before = self.blocks.labelled(seq.row)
        if seq.stored // self.blocks.block_size <= before:
            return
        if seq.stored // self.blocks.block_size > len(seq.keys):
            extend_keys(seq.keys, seq.keys_root, seq.tokens, seq.stored, self.blocks.block_size, seq.spans)
        self.blocks.label(seq.row, seq.keys, seq.stored)
        labelled = self.blocks.labelled(seq.row)
        self.followers.note(seq, before, labelled)
        if self.keeper is not None:
            self.keeper.note(seq, before, labelled)
        if self.told is not None and before < labelled:
            self.told.note(seq, labelled)

    def preempt(self, seq: Sequence) -> None:
        """Give up a running request's blocks and queue it again in its turn."""
        self._give_up(seq)
        self.waiting.add(seq)

    def check_integrity(self) -> None:
        """Assert that every running request has a row of its own, those that wait none, and that places are counted."""
        rows = [s.row for s in self.running]
        assert len({*rows, *self._free_rows}) == len(rows) + len(self._free_rows)
        assert not any(s.row >= 0 for s in self.waiting)
        assert self._held.rows == Held(self.running).rows

    def _give_up(self, seq: Sequence) -> None:
        self._leave(seq)
        seq.computed = seq.stored = seq.replay = 0
        seq.preempted += 1
        seq.fetches = 0
        self.preemptions += 1

    def _leave(self, seq: Sequence) -> None:
        self.followers.keep_tail(seq)
        self.blocks.release(seq.row)
        self._free_rows.append(seq.row)
        self.running.remove(seq)
        self._places = None
        seq.row = -1

    def _make_room(self, seq: Sequence, count: int) -> bool:
        """Blocks for the next ``count`` tokens, at the cost of others; False if it was preempted itself."""
        while not self.blocks.grow(seq.row, seq.computed, seq.computed + count):
            victim = self._victim()
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def _add_guess(self, plan: Plan, seq: Sequence, tokens: list[int]) -> None:
        """Verify what of a guess there is room for; nobody gives up a block for it."""
        end = self.blocks.room_for_guess(seq.row, seq.length + len(tokens), len(self.running))
        if end > seq.length and self.blocks.grow(seq.row, seq.computed, end):
            seq.suppose(tokens[: end - seq.length])
            plan.guesses[seq] = end - seq.length
        else:
            self.blocks.end_guess(seq.row)

    def _victim(self) -> Sequence:
        """Who is to give up its blocks: the last in turn of the user whose places cost most. One that has done so often
        is spared where another is there."""
        cost = self._held.cost
        left = [s for s in self.running if s.preempted < SPARED] or self.running
        most = max(cost[s.user] for s in left)
        return next(s for s in reversed(left) if cost[s.user] == most)

    def _add_chunk(self, plan: Plan, seq: Sequence, budget: int) -> None:
        count = min(seq.remaining, budget)
        if seq.params.logits == "all" or seq.params.prompt_logprobs > 0:
            count = min(count, max(1, self._rows_left))
            self._rows_left -= count
        fits = self.blocks.fitting(seq.row, seq.computed, seq.computed + count)
        count = max(1, self.blocks.stop(seq.computed, fits, seq.branch) - seq.computed)
        whole = seq.uncut(seq.computed + count) - seq.computed
        if whole > count and plan.prompts:
            return  # a picture or block that goes beyond the budget goes alone
        count = whole
        if self._make_room(seq, count):
            plan.chunks.append((seq, seq.computed, count))

    def _sort_out(self) -> tuple[list[Sequence], list[Sequence]]:
        """Running requests that could get on with their answers, and those with a prompt to compute, by turn."""
        ready, prompts = [], []
        for seq in self.running:
            if not seq.decodes or seq.at_picture:
                prompts.append(seq)
            elif not (seq.ending or seq.read):
                ready.append(seq)
        return ready, prompts

    def _in_turn(self, ready: list[Sequence], prompts: list[Sequence]) -> list[Sequence]:
        """Those that get on with their answers in this step, by turn: all, but where a user who has little waits for a
        first token. Then those with most take turns, so that the step is no longer than with prompts it should be."""
        cost = self._held.cost
        waiting = {s.user: s for s in [*prompts, *self._heads()] if not s.decodes}
        modest = min(waiting.values(), key=lambda s: cost.get(s.user, 0.0), default=None)
        if modest is None:
            return ready
        most = 2 * cost.get(modest.user, 0.0) + modest.cost
        if max(cost.values(), default=0.0) <= most:
            return ready
        greedy = [s for s in ready if cost[s.user] > most]
        few = len(ready) - len(greedy)
        turns = sorted(greedy, key=lambda s: s.decoded)[: max(1, self.pace.rows(len(ready)) - few)]
        chosen = set(turns)
        return [s for s in ready if cost[s.user] <= most or s in chosen]

    def _heads(self) -> list[Sequence]:
        """One that waits of each user."""
        return [next(iter(groups.values()))[0] for groups in map(self.waiting.of, self.waiting.users)]

    def _budget(self, plan: Plan, prompts: list[Sequence]) -> int:
        """Prompt tokens that this step may take; ``prompts``: of those that run."""
        passes = sum(count for _, _, count in plan.chunks)
        most = max(1, self.options.max_prefill_token_num - len(plan.decodes) - passes)
        before = max((s.computed for s in prompts), default=0)
        times, need = self._times(prompts)
        budget = self.pace.budget(plan.decoding, before, most, times, self._patient(plan, prompts))
        return budget if budget >= need else min(need, self.pace.budget(plan.decoding, before, most, 1.0))

    @staticmethod
    def _patient(plan: Plan, prompts: list[Sequence]) -> int:
        """Of those that get on with their answers in this step, how many are choices of a request that has prompts to
        compute: it is answered when its last choice is, and sooner the larger the steps are that compute them."""
        left = {group_of(s) for s in prompts if not s.generated}
        return sum(group_of(s) in left for s in plan.sequences()) if left else 0

    def _times(self, prompts: list[Sequence]) -> tuple[float, int]:
        """By how much a step may be longer while nobody decodes: users of a server may come at any time, and one whose
        short prompt is all that it has waits for no others' long ones in the same step. And what those have."""
        rows = self._held.rows
        users = rows.keys() | self.waiting.users
        if len(users) < 2:
            return ALONE if users <= {""} else SERVED, 0
        starts = (s for s in [*prompts, *self._heads()] if not s.decodes and s.remaining <= LEAST_TOKENS)
        need = sum(s.remaining for s in starts if rows[s.user] + self.waiting.count(s.user) == 1)
        return (HASTY, need) if need else (SHARED, 0)

    def _admit(self, plan: Plan, prompts: list[Sequence], budget: int) -> None:
        """Start waiting requests while there is a row, budget and room for their whole prompts.

        One whose next tokens are being computed by a running prompt waits for them instead of computing them too.
        """
        held = self._held
        if not self._free_rows and held.even(self.waiting.users):
            return
        queue = Round(self.waiting, held)
        begun = Begun(prompts, budget)
        given_back: list[Sequence] = []
        size = self.blocks.block_size
        promised = sum(blocks_for(s.length, size) - blocks_for(s.computed, size) for s in self.running)
        coming = Coming(self.blocks, self.followers, self.running)
        while queue:
            seq = queue.first
            most = max(1, int(seq.request.whose.share * self.options.max_batch_size))
            full = held.rows[seq.user] >= most
            victim = held.too_many(self.running, seq, own=full) if full or not self._free_rows else None
            if begun.enough(seq) or (victim is None and (full or not self._free_rows)):
                queue.leave_user()
                continue
            if seq.looks_at and self.running:
                seen = seq.looks_at.union(*(s.looks_at for s in self.running))
                if len(seen) > self.options.pictures_kept:
                    break
            hit = self._match(seq)
            if self.keeper is not None and self.keeper.awaited(seq, hit, _most(seq)):
                queue.leave(seq)
                continue
            other = None if seq.wants_all else coming.of(seq, hit, _most(seq))
            if other == seq.user or (other is not None and seq.held < HELD):
                seq.held += other != seq.user
                queue.leave(seq)
                continue
            if victim is not None:
                held.add(victim, -1)
                self._give_up(victim)
                victim.gives += 1
                given_back.append(victim)
            row = self._free_rows.pop()
            self.blocks.open(row, seq.keys, hit)
            if self.running and not self.blocks.can_start(row, seq.length + 1, promised):
                self.blocks.release(row)
                self._free_rows.append(row)
                break
            queue.take(seq)
            self._start(seq, row, hit, promised)
            plan.started.append(seq)
            begun.add(seq)
            promised += blocks_for(seq.length, size) - blocks_for(seq.computed, size)
            coming.add(seq, hit)
        for seq in given_back:
            self.waiting.add(seq)

    def _match(self, seq: Sequence) -> int:
        """Cached blocks that ``seq`` may start on, at least one token short of everything."""
        assert not seq.pending, "a preempted request's last token is known before it is looked at again"
        if seq.keys_root is None:
            return 0
        extend_keys(seq.keys, seq.keys_root, seq.tokens, seq.length, self.blocks.block_size, seq.spans)
        seq.branch = self.blocks.known(seq.keys)
        if seq.request.lend:  # another engine starts on the last block before the prompt's last token
            seq.branch = max(0, seq.prompt_len - 1) // self.blocks.block_size
        return self.blocks.match(seq.keys, _most(seq))

    def _start(self, seq: Sequence, row: int, hit: int, promised: int) -> None:
        insort(self.running, seq, key=turn)
        self._places = None
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
