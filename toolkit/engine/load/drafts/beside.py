"""What drafts of all kinds have in common while they are opened: how errors begin, and memory beside a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace

from toolkit.engine.load.memory_plan import MemoryPlan, show_bytes
from toolkit.errors import ToolkitError
from toolkit.models.spec import CacheGroup
from toolkit.runners.base import MemoryNeed

FLAG = "speculative_draft_model"
ShareOut = Callable[[MemoryNeed, Seq[CacheGroup]], MemoryPlan]


@contextmanager
def flagged() -> Iterator[None]:
    """Errors say that they are about what guesses."""
    try:
        yield
    except ToolkitError as e:
        if str(e).startswith(FLAG):
            raise
        raise type(e)(f"{FLAG}: {e}") from e


def plan_beside(
    mine: MemoryNeed, own: Seq[CacheGroup], need: MemoryNeed, groups: Seq[CacheGroup], share_out: ShareOut,
    names: tuple[str, str, str], states: int = 0,
) -> tuple[MemoryPlan, tuple[int, ...]]:  # fmt: skip
    """How memory is shared out among a target that needs ``need`` and what guesses for it, ``mine``, with a cache of
    its ``own`` groups and ``states`` bytes of hidden states; and the blocks of that cache. ``names``: how errors begin,
    what the plan calls it, and what it says of it. Raises ToolkitError."""
    both = replace(
        need,
        weights=need.weights + mine.weights + states,
        activations_per_token=need.activations_per_token + mine.activations_per_token,
        block_bytes=(*need.block_bytes, *mine.block_bytes),
    )
    begin, name, told = names
    try:
        plan = share_out(both, (*groups, *own))
    except ToolkitError as e:
        share_out(need, groups)  # without it there is not enough either: then it is not about it
        size = f"weights {show_bytes(mine.weights)}" + (f", up to {show_bytes(states)} of states" if states else "")
        raise ToolkitError(f"{begin} ({size}){' and its KV cache' if own else ''}: {e}") from e
    blocks = plan.num_blocks[len(groups) :]
    cache = sum(n * size for n, size in zip(blocks, mine.block_bytes, strict=True))
    taken = {"weights": mine.weights + states, "KV cache": cache}
    rows = [(what, size - taken.get(what, 0), about) for what, size, about in plan.rows]
    counts = "/".join(map(str, blocks))
    rows.append((name, mine.weights, told))
    rows += [("its KV cache", cache, f"{counts} blocks of {plan.block_size} tokens")] if own else []
    rows += [("its states", states, "at most")] if states else []
    return replace(plan, num_blocks=plan.num_blocks[: len(groups)], rows=tuple(rows)), blocks
