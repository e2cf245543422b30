"""Make ``kernels/cpu/linear/trellis_tables.h``: the values that trellis codes of 2, 3 and 4 bits look up. With other
values codes that are packed already mean something else: TRELLIS_VERSION in ops.h then has to be another.

    python scripts/bench/trellis_tables.py [--rounds N] > kernels/cpu/linear/trellis_tables.h

Lloyd's algorithm with paths: numbers of a normal distribution are rounded to the cheapest path, then each value becomes
the mean of the numbers that took it. It begins with the distribution's quantiles, so spread that what one state can
reach next lies all over it.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor

ROWS, COLUMNS = 1024, 512
HEAD = """// Values that trellis codes of 2, 3 and 4 bits look up. Made by scripts/bench/trellis_tables.py.
#pragma once

#include <stdint.h>

namespace tk {

constexpr int8_t TRELLIS_TABLES[3][256] = {"""
TAIL = """};

inline const int8_t* trellis_table(int32_t bits) { return TRELLIS_TABLES[bits - 2]; }

}  // namespace tk"""
SPREAD = {2: 53, 3: 75, 4: 149}  # of eight that were tried, the best


def cheapest(x: Tensor, table: Tensor, bits: int) -> Tensor:
    """Places of the cheapest paths, [rows, columns] (Viterbi, exact)."""
    states, ways = 1 << (8 - bits), 1 << bits
    places = (torch.arange(states)[:, None] << bits) + torch.arange(ways)
    before, values = places & (states - 1), table[places]
    cost = torch.full((len(x), states), torch.inf)
    cost[:, 0] = 0
    way = torch.empty(x.shape[1], len(x), states, dtype=torch.uint8)
    for column in range(x.shape[1]):
        cost, best = (cost[:, before] + (x[:, column, None, None] - values).square()).min(-1)
        way[column] = best
    state, found = cost.argmin(1), torch.empty(x.shape, dtype=torch.long)
    for column in reversed(range(x.shape[1])):
        found[:, column] = (state << bits) + way[column].gather(1, state[:, None])[:, 0]
        state = found[:, column] & (states - 1)
    return found


def trained(bits: int, rounds: int) -> tuple[Tensor, float]:
    """The table as int8, and the mean squared error of numbers that it was not made from."""
    torch.manual_seed(bits)
    mirrored = torch.tensor([int(f"{i:08b}"[::-1], 2) for i in range(256)])
    table = torch.special.ndtri(((mirrored * SPREAD[bits]) % 256 + 0.5) / 256)
    for _ in range(rounds):
        x = torch.randn(ROWS, COLUMNS)
        places = cheapest(x, table, bits).flatten()
        sums, counts = torch.zeros(256).index_add(0, places, x.flatten()), places.bincount(minlength=256)
        table = torch.where(counts > 10, sums / counts.clamp(min=1), table)
    unit = 127 / float(table.abs().max())
    whole = (table * unit).round()
    x = torch.randn(ROWS, COLUMNS)
    return whole.to(torch.int8), float((x - (whole / unit)[cheapest(x, whole / unit, bits)]).square().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    print(HEAD)
    for bits in (2, 3, 4):
        table, error = trained(bits, rounds)
        print(f"{bits} bits: mean squared error {error:.4f} of a normal distribution", file=sys.stderr)
        print(f"    {{  // {bits} bits")
        for part in table.split(24):
            print(f"        {', '.join(map(str, part.tolist()))},")
        print("    },")
    print(TAIL)


if __name__ == "__main__":
    main()
