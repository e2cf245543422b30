"""How memory is shared out before anything is allocated: weights, activations, logits, KV cache.

``plan`` fits session length and batch size to what is free, says what it reduced, and refuses with the numbers where
what the user asked for cannot fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.admission import longer
from toolkit.engine.cache.block_manager import blocks_for, window_blocks
from toolkit.engine.pace import MOST_MS
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.spec import CacheGroup
from toolkit.runners.base import MemoryNeed

DEFAULT_SHARE = 0.8  # the configs' default of cache_max_entry_count; on a CPU this very value stands for CPU_SHARE
CPU_SHARE = 0.25  # of free memory that KV may take on a CPU where nothing else is said
CPU_BATCH, CUDA_BATCH, LARGE_CUDA_BATCH = 64, 128, 256
LARGE_CUDA_BYTES = 40 << 30  # free bytes from which a device counts as large
SAFE_SHARE = 0.95  # of free memory that all of it together may take: other processes breathe too
LOGIT_COPIES = 3  # float32 copies of a row of logits while it is sampled


@dataclass(frozen=True)
class Wishes:
    """What the user asked for; None where it is ours to choose. ``kv``: a share of free memory, or blocks if an int.
    ``total``: bytes that all of it is to fit, unless that is too little."""

    session_len: int | None = None
    max_batch_size: int | None = None
    max_prefill_token_num: int = 8192
    kv: float | int = DEFAULT_SHARE
    target_step_ms: float | None = None
    patches: int = 0  # of pictures that are encoded together
    kept_patches: int = 0  # of pictures that are looked at together, where keys and values of them are kept
    total: int | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """What was decided. ``rows``: (what, bytes, remark) in the order they are allocated; ``notices``: what was reduced
    or is done in another way.

    ``num_blocks``: KV blocks of each cache group. ``model_len``: positions that the model states.
    """

    session_len: int
    max_batch_size: int
    max_prefill_token_num: int
    target_step_ms: float | None  # None on a CPU where nothing is said; on a GPU there is no limit then
    block_size: int
    num_blocks: tuple[int, ...]
    free: int
    rows: tuple[tuple[str, int, str], ...]
    notices: tuple[str, ...]
    model_len: int = 0

    @property
    def total(self) -> int:
        """Bytes of everything planned."""
        return sum(size for _, size, _ in self.rows)

    def table(self) -> list[tuple[str, str, str]]:
        """Rows to print: what, how much, a remark."""
        shown = [(what, show_bytes(size), remark) for what, size, remark in self.rows]
        return [*shown, ("free before", show_bytes(self.free), f"{show_bytes(self.free - self.total)} stay free")]

    def longer(self, session_len: str = "session_len", scaling: str = "rope_scaling_factor") -> str:
        """What helps whom the session is too short, by the options' names."""
        return longer(self.session_len, self.model_len, session_len, scaling)


def _step(tokens: int, batch: int, target: float | None) -> str:
    most = f"{MOST_MS:g} ms at most" if target is None else f"{target:g} ms"
    paced = "" if target == 0 else f" (while others decode: what takes {most})"
    return f"{tokens} prompt tokens{paced} and {batch} requests a step"


def show_bytes(size: int) -> str:
    """In MiB or GiB, as the size asks for."""
    return f"{size / 2**30:.2f} GiB" if abs(size) >= 1 << 30 else f"{size / 2**20:.1f} MiB"


def plan(
    need: MemoryNeed,
    groups: Sequence[CacheGroup],
    *,
    block_size: int,
    vocab_size: int,
    max_position: int,
    device: str,
    wishes: Wishes,
    guessed: int = 1,
    usual: int | None = None,
) -> MemoryPlan:
    """Share out ``need.free`` bytes. ``guessed``: tokens that a request draws in a step, at most; ``usual``: the
    session length where none is asked for, ``max_position`` unless given. Raises ToolkitError, one line with the
    numbers, where it cannot be done."""
    cpu = device == "cpu"
    usual = max_position if usual is None else usual
    planner = _Planner(need, groups, block_size, vocab_size, max_position, cpu, wishes, guessed, usual)
    if wishes.total is not None and wishes.total < int(need.free * SAFE_SHARE):
        within = replace(need, free=int(wishes.total / SAFE_SHARE))
        kv = wishes.kv if isinstance(wishes.kv, int) else 1.0
        with suppress(ToolkitError):
            return replace(replace(planner, need=within, wishes=replace(wishes, kv=kv)).run(), free=need.free)
    return planner.run()


@dataclass
class _Planner:
    """``size``: of a block; ``rows``: that a request draws in a step."""

    need: MemoryNeed
    groups: Sequence[CacheGroup]
    size: int
    vocab_size: int
    max_position: int
    cpu: bool
    wishes: Wishes
    rows: int
    usual: int

    def __post_init__(self) -> None:
        need, wishes = self.need, self.wishes
        self.logits = self.rows * self.vocab_size * 4 * LOGIT_COPIES  # bytes for a request that decodes
        self.each = 1 if self.rows == 1 else 2 * self.rows  # tokens of a step for it: those of the block before too
        self.notices: list[str] = []
        self.weights = 0 if need.loaded else need.weights
        self.tower = need.picture_patch * wishes.patches
        self.pictures = need.picture * wishes.kept_patches
        self.usable = int(need.free * SAFE_SHARE) - self.weights - self.tower - self.pictures

    def run(self) -> MemoryPlan:
        w = self.wishes
        target = 0.0 if w.target_step_ms is None and not self.cpu else w.target_step_ms
        if self.usable <= 0:
            tower = f", encoding pictures {show_bytes(self.tower)}" if self.tower else ""
            tower += f", keeping them {show_bytes(self.pictures)}" if self.pictures else ""
            raise ToolkitError(
                f"not enough memory: the weights take {show_bytes(self.weights)}{tower} and "
                f"{show_bytes(self.need.free)} are free; use a quantized model (tool lite auto_awq) or a machine with "
                "more memory"
            )
        batch = self._batch()
        tokens = self._step_tokens(batch)
        activations = self.need.activations_per_token * (tokens + batch * self.each)
        logits = batch * self.logits
        left = self.usable - activations - logits
        length = w.session_len or self.usual
        if w.session_len and w.session_len > self.max_position:
            self.notices.append(
                f"session_len {w.session_len} is beyond the {self.max_position} positions that the model states"
            )
        per_block = " + ".join(show_bytes(b) for b in self.need.block_bytes)
        length, batch, blocks = self._cache(length, batch, tokens, max(0, left))
        kv = self._bytes(blocks)
        held = f"{'/'.join(map(str, blocks))} blocks of {self.size} tokens, {per_block} each"
        if self.cpu:
            held += "; the process grows up to it as it is used"
        loaded = "loaded already" if self.need.loaded else "those of the tower among them" if w.patches else ""
        rows = (
            ("weights", self.weights, loaded),
            ("activations", activations, _step(tokens, batch, target)),
            *([("tower", self.tower, f"pictures of {w.patches} patches at once")] if self.tower else []),
            *([("pictures", self.pictures, "keys and values of those looked at")] if self.pictures else []),
            ("logits", logits, f"{batch * self.rows} rows of {self.vocab_size}"),
            ("KV cache", kv, held),
        )
        return MemoryPlan(
            length, batch, tokens, target, self.size, blocks, self.need.free, rows, tuple(self.notices),
            self.max_position,
        )  # fmt: skip

    def _batch(self) -> int:
        """The batch size before KV is looked at: as asked for, or the default as far as its logits fit."""
        row = self.logits + self.need.activations_per_token * self.each
        if self.wishes.max_batch_size is not None:
            batch = self.wishes.max_batch_size
            if batch * row > self.usable // 2:
                raise ToolkitError(
                    f"max_batch_size {batch}: its logits and activations take {show_bytes(batch * row)} of "
                    f"{show_bytes(self.usable)} left beside the weights; at most {self.usable // 2 // row} would do"
                )
            return batch
        default = CPU_BATCH if self.cpu else LARGE_CUDA_BATCH if self.need.free >= LARGE_CUDA_BYTES else CUDA_BATCH
        if self.rows > 1:
            default = min(default, self.wishes.max_prefill_token_num // self.each)
        return max(1, min(default, self.usable // 8 // row))

    def _step_tokens(self, batch: int) -> int:
        """Prompt tokens a step may take: as asked for, fewer where their activations would crowd out the rest."""
        asked = self.wishes.max_prefill_token_num
        most = self.usable // 4 // max(1, self.need.activations_per_token) - batch * self.each
        if asked <= most:
            return asked
        if most < 1:
            raise ToolkitError(
                f"not enough memory: {show_bytes(self.usable)} are left beside the weights, one token's activations "
                f"take {show_bytes(self.need.activations_per_token)}; free some memory or use a smaller max_batch_size"
            )
        self.notices.append(f"max_prefill_token_num reduced from {asked} to {most}: activations must fit")
        return most

    # -- KV -------------------------------------------------------------------------------------

    def _cache(self, length: int, batch: int, tokens: int, left: int) -> tuple[int, int, tuple[int, ...]]:
        """(session length, batch size, blocks of each group)."""
        w = self.wishes
        if isinstance(w.kv, int) and not isinstance(w.kv, bool):
            return self._given_blocks(w.kv, length, batch, tokens, left)
        limit = min(left, int(left * self._share()))
        one = self._bytes(self._one(length, tokens))
        if one > limit:
            if w.session_len is not None and one <= left:
                limit = one  # asked for by name: up to all that is left
            elif w.session_len is not None:
                best = self._longest(left, length, tokens)
                if best < min(length, self.size):
                    raise self._no_block(left)
                raise ToolkitError(
                    f"session_len {length}: its KV cache takes {show_bytes(one)}, {show_bytes(left)} are left beside "
                    f"weights and activations; use a session_len of at most {best}, or --quant-policy 8 or 4"
                )
            else:
                reduced = self._longest(limit, length, tokens)
                if reduced < min(length, self.size):
                    raise self._no_block(limit)
                self.notices.append(f"session_len reduced from {length} to {reduced}: the KV cache must fit")
                length = reduced
        blocks = self._spread(limit, length, batch, tokens)
        return self._fitted(length, batch, blocks)

    def _no_block(self, limit: int) -> ToolkitError:
        block = show_bytes(sum(self.need.block_bytes))
        return ToolkitError(
            f"not enough memory for a KV cache: {show_bytes(max(limit, 0))} are left for it beside weights and "
            f"activations, one block of {self.size} tokens takes {block}; free some memory, or use a quantized model "
            "or --quant-policy 8"
        )

    def _share(self) -> float:
        default = self.wishes.kv == DEFAULT_SHARE
        return CPU_SHARE if self.cpu and default else float(self.wishes.kv)

    def _given_blocks(
        self, count: int, length: int, batch: int, tokens: int, left: int
    ) -> tuple[int, int, tuple[int, ...]]:
        """Exactly ``count`` blocks a group (fewer for a window group that cannot use them)."""
        blocks = tuple(
            min(count, batch * self._most(g, length, tokens)) if g.reach is not None else count for g in self.groups
        )
        if self._bytes(blocks) > left:
            fits = left // max(1, sum(self.need.block_bytes))
            raise ToolkitError(
                f"cache_max_entry_count {count}: that many blocks take {show_bytes(self._bytes(blocks))}, "
                f"{show_bytes(left)} are left beside weights and activations; at most {fits} fit"
            )
        bounds = [
            n * self.size for g, n in zip(self.groups, blocks, strict=True) if g.reach is None or n < self._least(g)
        ]
        holds = min(bounds, default=length)
        if holds < length:
            if self.wishes.session_len is not None:
                raise UsageError(
                    f"session_len {length}: cache_max_entry_count {count} holds {holds} tokens; raise it to "
                    f"{blocks_for(length, self.size)}, or leave one of them out"
                )
            self.notices.append(f"session_len reduced from {length} to {holds}: {count} blocks hold no more")
            length = holds
        return self._fitted(length, batch, blocks)

    def _fitted(self, length: int, batch: int, blocks: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        """A batch cannot be larger than the blocks of a group."""
        if batch > min(blocks):
            self.notices.append(f"max_batch_size reduced from {batch} to {min(blocks)}: every request needs a block")
            batch = min(blocks)
        return length, batch, blocks

    def _least(self, group: CacheGroup) -> int:
        """Blocks that let a window or state group serve a request of any length, token by token."""
        return window_blocks(group, 1, self.size)

    def _most(self, group: CacheGroup, length: int, tokens: int) -> int:
        """Blocks a request of ``length`` tokens can use in a group, whole chunks at a time."""
        whole = blocks_for(length, self.size)
        if group.reach is None:
            return whole
        step = 1 if group.kind == "state" else tokens  # blocks that a step goes past have no state
        return min(whole, window_blocks(group, step, self.size))

    def _one(self, length: int, tokens: int) -> list[int]:
        return [self._most(g, length, tokens) for g in self.groups]

    def _bytes(self, blocks: Sequence[int]) -> int:
        return sum(n * b for n, b in zip(blocks, self.need.block_bytes, strict=True))

    def _longest(self, limit: int, length: int, tokens: int) -> int:
        """Longest session, a whole number of blocks, whose KV takes at most ``limit``; 0 if none."""
        low, high = 0, blocks_for(length, self.size)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._bytes(self._one(middle * self.size, tokens)) <= limit
            low, high = (middle, high) if fits else (low, middle - 1)
        return min(low * self.size, length)

    def _spread(self, limit: int, length: int, batch: int, tokens: int) -> tuple[int, ...]:
        """What ``batch`` requests of ``length`` tokens need, or as much of it as fits, the groups in proportion."""
        one = self._one(length, tokens)
        times = min(float(batch), limit / max(1, self._bytes(one)))
        return tuple(max(n, int(n * times)) for n in one)
