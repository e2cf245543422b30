"""Whole experts shared out over ranks by how often tokens chose them, so that no rank has much more to do than others.

As DeepSeek's EPLB packs them (https://github.com/deepseek-ai/EPLB), without copies of experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from toolkit.models.spec import portion

TOKENS = 16384  # that choose experts before these are placed anew
WORTH = 0.95  # experts move where the busiest rank then has at most so much of what it had

Held = list[list[int]]
"""The experts of each seat, in the order in which it has them."""


def evenly(count: int, seats: int) -> Held:
    """So many experts by number, where nothing is known of them."""
    return [list(range(*portion(count, seat, seats))) for seat in range(seats)]


def balanced(load: Sequence[int], held: Held) -> Held:
    """Each seat keeps as many experts as it has: the most wanted first, each where least is wanted yet, and of seats
    alike where it is."""
    home = {expert: seat for seat, experts in enumerate(held) for expert in experts}
    found: Held = [[] for _ in held]
    wanted = [0] * len(held)
    for expert in sorted(home, key=lambda expert: (-load[expert], expert)):
        free = [seat for seat in range(len(held)) if len(found[seat]) < len(held[seat])]
        seat = min(free, key=lambda seat: (wanted[seat], seat != home[expert], seat))
        found[seat].append(expert)
        wanted[seat] += load[expert]
    return [sorted(experts) for experts in found]


def busiest(load: Sequence[int], held: Held) -> int:
    """What the seat has to do that has most."""
    return max(sum(load[expert] for expert in experts) for experts in held)


def better(loads: Mapping[int, Sequence[int]], held: Mapping[int, Held]) -> dict[int, Held]:
    """Of layers, by number, those whose experts are to move, and where to."""
    found = {}
    for layer, load in loads.items():
        new = balanced(load, held[layer])
        if any(load) and busiest(load, new) <= WORTH * busiest(load, held[layer]):
            found[layer] = new
    return found
