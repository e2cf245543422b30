"""What a step takes by its rows: as many tokens of one text are verified together.

    python scripts/bench/step_rows.py [MODEL] [--rows 1 2 4 8 16 32 64] [--json FILE]

Steps of all sizes run in turn; times are medians. *at best*: tokens a second if every guess came true, over those of
steps of one row. A guess pays where it brings more than its rows cost.
"""

from __future__ import annotations

import argparse
import statistics
import time

from native import need_native
from second_choices import Model

from toolkit.artifacts.source import resolve_model
from toolkit.commands.output import stdout, table, write_json

WARM = 3  # steps of each size before those that count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64])
    parser.add_argument("--context", type=int, default=256, help="tokens before them")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    need_native()
    model = Model(resolve_model(args.model), ())
    taken: dict[int, list[float]] = {rows: [] for rows in args.rows}
    for turn in range(WARM + args.rounds):
        for rows, mine in taken.items():
            begun = time.perf_counter()
            model.step([5] * rows, args.context)
            if turn >= WARM:
                mine.append(time.perf_counter() - begun)
    seconds = {rows: statistics.median(mine) for rows, mine in taken.items()}
    one = seconds[min(seconds)] / min(seconds)
    shown = [
        [str(rows), f"{1000 * took:.1f}", f"{took / one:.2f}", f"{rows * one / took:.2f}"]
        for rows, took in seconds.items()
    ]
    stdout().print(table(f"{args.model}, {args.context} tokens before", ["rows", "ms", "of one", "at best"], shown))
    write_json(args.json, {"model": args.model, "context": args.context, "seconds": seconds})


if __name__ == "__main__":
    main()
