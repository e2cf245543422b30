"""Guesses by a smaller model, which reads what a request has read and draws as the request draws.

It has a cache of its own: blocks, prefixes and all, as the engine's are. What a request's tokens turned out to be is
compared with what was guessed when the next guess is asked for; from the first that differs the cache is written anew.
Whether guesses are verified or not, so it is known how often they come true.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import field, replace

import numpy as np

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.admission import long_rope_from
from toolkit.engine.cache.block_manager import BlockManager
from toolkit.engine.cache.prefix import extend_keys
from toolkit.engine.drafts.along import supposing
from toolkit.engine.drafts.cost import StepCost
from toolkit.engine.drafts.draft import NO_GUESS, Draft, Guess, Outlook
from toolkit.engine.drafts.odds import ANY, Odds, Users, compare, sureness
from toolkit.engine.drafts.vocabulary import Vocabulary
from toolkit.engine.plan import Plan
from toolkit.engine.request import EngineRequest
from toolkit.engine.sequence import Sequence
from toolkit.engine.step import Step
from toolkit.engine.step_builder import StepBuilder
from toolkit.runners.base import Runner
from toolkit.runners.step import StepOutput

TOKENS = 512  # that a step of the draft has at most: of what it has not read yet, some at a time
ROUNDS = 64  # guesses over which the time to read a prompt is spread, at most
_FIRST = (0.1, 0.2, 0.3, 0.4, 0.5, 0.55, 0.65, 0.7, 0.8, 0.9, 0.95, 0.7)  # of each what is thought before; of any


@dataclass
class Follower:
    """What the draft model has of a request: ``own`` is the request in its tokens, to the end of what is known of it.

    ``known``: tokens that were, when it was last asked for a guess; ``guessed``: those behind them, in its own ids, of
    the classes ``sure``.
    """

    own: Sequence
    odds: Odds
    known: int = 0
    guessed: list[int] = field(default_factory=list)
    sure: list[int] = field(default_factory=list)


class DraftModel(Draft):
    """``runner``: with weights and cache; ``num_blocks``: of its cache groups; ``rows``: requests at once, of at most
    ``max_len`` tokens."""

    name = "draft_model"
    costs = True

    def __init__(
        self, runner: Runner, num_blocks: tuple[int, ...], rows: int, max_len: int, vocabulary: Vocabulary
    ) -> None:
        spec, size = runner.spec, runner.options.block_size
        self.runner = runner
        self.vocabulary = vocabulary
        self.cost = StepCost()
        self._num_blocks = num_blocks
        self._max_len = min(max_len, spec.max_position)
        self.blocks = BlockManager(spec.cache_groups, num_blocks, size, rows, max(1, max_len))
        self._builder = StepBuilder(self.blocks, rows, spec.vocab_size)
        self._long_from = long_rope_from(runner)
        self._free_rows = list(range(rows))
        self._users = Users(_FIRST)
        self._followers: dict[Sequence, Follower] = {}

    def outlook(self, asked: Seq[tuple[Sequence, int]]) -> Outlook:
        """By how often its tokens came true of late, and how long its steps take."""
        chances, behind, rounds = [], 0, 1
        for seq, most in asked:
            follower = self._followers.get(seq)
            odds = self._users.of(seq.request.whose.user) if follower is None else follower.odds
            chances.append(odds.of(ANY))
            new = seq.known - (0 if follower is None else min(follower.own.computed, follower.known))
            behind += max(0, new - 1 - most)  # of tokens that have come since the last guess few are read in one step
            rounds = max(rounds, min(seq.left, ROUNDS))
        steps = np.arange(1 + max(most for _, most in asked))
        if not self.cost.known:
            return Outlook(np.array(chances), np.where(steps, np.inf, 0.0))
        one, many = self.cost.of(np.array([len(asked), len(asked) + TOKENS])).tolist()
        reading = behind * (many - one) / TOKENS / rounds
        return Outlook(np.array(chances), steps * one + np.where(steps, reading, 0.0))

    def propose(self, asked: Seq[tuple[Sequence, int]]) -> list[Guess]:
        """What it draws itself, token by token for all requests together."""
        for seq in [s for s in self._followers if s.row < 0]:  # it has given up its place, and may come back
            self._leave(seq)
        budget, reading, whole = TOKENS, [], {}
        for seq, most in asked:
            most = min(most, self._max_len - seq.known)
            follower = self._follow(seq) if most > 0 and budget > 0 else None
            if follower is None:
                continue
            own = follower.own
            count = min(own.remaining, budget)
            if not self.blocks.grow(
                own.row, own.computed, own.computed + count + (most if count == own.remaining else 0)
            ):
                continue
            budget -= count
            reading.append((own, own.computed, count))
            if count == own.remaining:
                whole[own] = seq, follower, most
        chances: dict[Sequence, list[float]] = {}
        if reading:
            with ExitStack() as stack:
                added = {own: stack.enter_context(supposing(own)) for own in whole}
                self._draw(Plan(chunks=reading), whole, added, chances)
        guesses = []
        for seq, _ in asked:
            found = self._followers.get(seq)
            if found is None or seq not in chances:
                guesses.append(NO_GUESS)
                continue
            tokens = self.vocabulary.to_target[found.guessed].tolist()  # what the target does not know ends a guess
            guesses.append(Guess(tokens, chances[seq]))
        return guesses

    def forget(self, seq: Sequence) -> None:
        """Keep its blocks for those that begin like it."""
        if seq in self._followers:
            self._follow(seq)
            self._leave(seq)

    def rest(self) -> None:
        """Give weights and cache back."""
        for seq in list(self._followers):
            self._leave(seq)
        self.blocks.reset_cache()
        self.runner.release_cache()
        self.runner.release_weights()

    def wake(self) -> None:
        """Load them again."""
        self.runner.load_weights()
        self.runner.allocate_cache(self._num_blocks)

    def close(self) -> None:
        """Free the model."""
        self.runner.close()

    # -- followers ------------------------------------------------------------------------------

    def _follow(self, seq: Sequence) -> Follower | None:
        """What it has of a request, brought up to the tokens that are known; None where there is no place for more."""
        follower = self._followers.get(seq)
        if follower is None:
            if not self._free_rows or seq.finished:
                return None
            follower = self._followers[seq] = self._open(seq)
        own, start = follower.own, follower.known
        tokens = self.vocabulary.read(seq.tokens[start : seq.known]).tolist()
        right = compare(follower.odds, follower.guessed, follower.sure, tokens)
        own.length = start
        own.suppose(tokens)
        own.length = follower.known = seq.known
        own.computed = max(0, min(own.computed, start + right, seq.known - 1))
        follower.guessed, follower.sure = [], []
        if own.keys_root is not None:
            extend_keys(own.keys, own.keys_root, seq.tokens, own.computed, self.blocks.block_size)
            self.blocks.label(own.row, own.keys, own.computed)
        self._builder.reached(own)
        return follower

    def _open(self, seq: Sequence) -> Follower:
        """Begin to follow a request, with what the cache has of its beginning."""
        params = replace(
            seq.params,
            logprobs=0,
            prompt_logprobs=-1,
            grammar=None,
            logits=None,
            hidden=None,
            routes=False,
            ngram_size=0,
        )
        tokens = self.vocabulary.read(seq.tokens[: seq.prompt_len]).tolist()
        own = Sequence(
            EngineRequest(seq.id, tokens, params),
            order=seq.order,
            max_len=max(seq.max_len, seq.known + 1),
            rope_set=int(self._long_from is not None and seq.end > self._long_from),
            keys_root=seq.keys_root,
        )
        if self.vocabulary.same:  # what its target's tokens are drawn by rules its own out too
            own.grammar, own.bad_words, own.history, own.biases = seq.grammar, seq.bad_words, seq.history, seq.biases
        own.row = self._free_rows.pop()
        hit = 0
        if own.keys_root is not None:
            extend_keys(own.keys, own.keys_root, seq.tokens, seq.known, self.blocks.block_size)
            hit = self.blocks.match(own.keys, seq.known - 1)
            del own.keys[hit:]
        self.blocks.open(own.row, own.keys, hit)
        own.computed = hit * self.blocks.block_size
        self._builder.enter(own)
        odds = Odds(above=self._users.of(seq.request.whose.user))
        return Follower(own, odds, known=seq.prompt_len)

    def _leave(self, seq: Sequence) -> None:
        own = self._followers.pop(seq).own
        self.blocks.release(own.row)
        self._free_rows.append(own.row)

    # -- steps ----------------------------------------------------------------------------------

    def _draw(
        self,
        plan: Plan,
        whole: dict[Sequence, tuple[Sequence, Follower, int]],
        added: dict[Sequence, list[int]],
        chances: dict[Sequence, list[float]],
    ) -> None:
        """Steps until every guess is as long as asked for, or too unsure to go on."""
        while plan:
            started = time.perf_counter()
            step = self._builder.build(plan)
            step.batch.waited = True
            out = self.runner.submit(step.batch).result()
            for own, _, count in plan.chunks:
                own.computed += count
            for own in plan.decodes:
                own.computed += 1
            going = self._take(step, out, whole, added, chances)
            self.cost.note(len(step.batch.token_ids), time.perf_counter() - started)
            plan = Plan(decodes=going)

    def _take(
        self,
        step: Step,
        out: StepOutput,
        whole: dict[Sequence, tuple[Sequence, Follower, int]],
        added: dict[Sequence, list[int]],
        chances: dict[Sequence, list[float]],
    ) -> list[Sequence]:
        """Take the tokens that were drawn; returns of which requests more are."""
        going = []
        bad = set(out.bad_rows.tolist())
        drawn = out.tokens[:, 0].tolist()
        self._builder.advance([own.row for own in step.sampled])
        self._builder.arrived([own.row for own in step.sampled], drawn[: len(step.sampled)])
        for i, own in enumerate(step.sampled):
            seq, follower, most = whole[own]
            token = drawn[i] if own.grammar is None else own.grammar.meant(drawn[i])
            if i in bad or not 0 <= token < len(self.vocabulary.to_target):
                continue
            sure = math.exp(min(0.0, float(out.logprob[i, 0])))
            follower.guessed.append(token)
            follower.sure.append(sureness(sure))
            so_far = chances.setdefault(seq, [])
            so_far.append(follower.odds.of(follower.sure[-1]))
            own.expect()
            own.arrive(token)
            added[own].append(token)
            pays = self.pays_behind(so_far, follower.odds.of(ANY))
            if len(so_far) < most and pays and self._goes_on(own, token):
                going.append(own)
        return going

    @staticmethod
    def _goes_on(own: Sequence, token: int) -> bool:
        if token in own.stop_ids or own.grammar is None:
            return token not in own.stop_ids
        return not (token in own.grammar.stops or own.grammar.accept(token) or own.grammar.failure is not None)
