"""Whether a tree of guesses would pay: how often the second and third choice are right where the first is wrong.

    python scripts/bench/second_choices.py [MODEL] [--head HEAD] [--step-ms BASE ROW] [--json FILE]

The prompts of speculation_workloads/ are answered greedily; at every token of the answers each draft is asked what
comes next, with all before it known. *lookup* has the continuations of the longest occurrences of the text's end, as
far as they differ, *head* its likeliest tokens. Steps of 1 to 16 rows are timed, in turn, and a line is laid through
their times. By both the tokens a second of the best chain of guesses are computed, or of none, and of the best chain
with the second choice (and the third) beside its first token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from native import need_native
from numpy.typing import NDArray
from speculation import WORKLOADS

from toolkit.artifacts.drafts.draft_head import HeadSpec, read_head
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.artifacts.weight_files.safetensors_file import widened
from toolkit.base.threads import usable_cores
from toolkit.chat.template import ChatTemplate
from toolkit.commands.output import stdout, table, write_json
from toolkit.measure.next_logits import texts_batch
from toolkit.quant.draft.layer import Passes
from toolkit.runners.base import Runner, RunnerOptions
from toolkit.runners.choose import open_model, open_runner
from toolkit.runners.drafts.head import Rows
from toolkit.runners.native.draft.eagle3 import NativeHead
from toolkit.runners.step import NONE, SamplingBatch, StepOutput

LEAST = 2  # tokens that an occurrence shares with the text's end, as the engine's lookup wants
LONGEST = 16
CHOICES = 3
DEEPEST = 16  # tokens of a chain
TIMED = (1, 2, 4, 6, 8, 12, 16)  # rows


class Model:
    """A runner that reads one text after another."""

    def __init__(self, path: Path, layers: tuple[int, ...]) -> None:
        self.runner: Runner = open_runner(path, backend="turbomind", options=RunnerOptions(device="cpu"))[0]
        self.layers, self.size = layers, self.runner.options.block_size
        self.runner.load_weights()
        self.runner.allocate_cache((64,))

    def step(self, tokens: list[int], start: int) -> StepOutput:
        """``tokens`` behind the first ``start`` of the text: what comes behind each."""
        count, blocks = len(tokens), -(-(start + len(tokens)) // self.size)
        every = np.arange(count, dtype=np.int32)
        batch = replace(
            texts_batch(self.runner, np.array([tokens], np.int32), start, blocks),
            sample_index=every,
            sampling=SamplingBatch.greedy(count),
            aux_layers=self.layers,
            aux_index=every if self.layers else NONE,
        )
        return self.runner.submit(batch).result()

    def seconds(self, rounds: int = 25, start: int = 256) -> tuple[float, float]:
        """What a step takes, and each row of it."""
        taken: dict[int, list[float]] = {rows: [] for rows in TIMED}
        for _ in range(rounds):
            for rows, mine in taken.items():
                begun = time.perf_counter()
                self.step([5] * rows, start)
                mine.append(time.perf_counter() - begun)
        slope, base = np.polyfit(TIMED, [statistics.median(mine) for mine in taken.values()], 1)
        return float(base), max(float(slope), 0.0)


def looked_up(text: list[int], end: int) -> list[int]:
    """Tokens that may follow the first ``end``: those behind its end's longest occurrences, the latest first."""
    tail, before = np.array(text[:end]), np.array(text[: end - 1])
    agreed = np.zeros(len(before), np.int64)
    alive = np.ones(len(before), bool)
    for back in range(min(LONGEST, end - 1)):
        shifted = np.full(len(before), -1)
        shifted[back:] = before[: len(before) - back]
        alive &= shifted == tail[-1 - back]
        agreed += alive
    found = [at for at in np.lexsort((-np.arange(len(agreed)), -agreed)) if agreed[at] >= LEAST]
    return list(dict.fromkeys(text[at + 1] for at in found))[:CHOICES]


class Head:
    """An EAGLE-3 head, computed in float32; ``native``: the same as an engine has it."""

    def __init__(self, path: Path, layers: int) -> None:
        self.spec: HeadSpec
        self.spec, tensors = read_head(path, layers)
        embed, d2t = tensors.pop("embed_tokens.weight"), tensors.pop("d2t", None)
        weights = {name: widened(x) for name, x in tensors.items()}
        self.native = NativeHead(self.spec, weights, lambda ids: widened(embed[ids]), d2t, usable_cores())
        self._weights = {name: torch.from_numpy(x) for name, x in weights.items()}
        self._embed = torch.from_numpy(widened(embed))

    @torch.inference_mode()
    def likeliest(self, text: list[int], states: NDArray[np.float32]) -> list[list[int]]:
        """Behind each token of a text but the first: its likeliest tokens."""
        taps = torch.from_numpy(states).flatten(1)[None]
        logits = Passes(self.spec, self._weights, self._embed, torch.tensor([text]), taps).next()[0]
        return [self.native.ids[row].tolist() for row in logits.topk(CHOICES).indices.numpy()]

    def seconds(self) -> float:
        """What one more token of a guess takes."""
        kept, hidden, taken = self.native.open(1), np.zeros((1, self.native.width), np.float32), []
        for _ in range(15):
            begun = time.perf_counter()
            self.native.step(np.array([5]), hidden, [Rows(kept, 1)])
            taken.append(time.perf_counter() - begun)
        return statistics.median(taken)


def count(guesses: list[list[int]], answer: list[int]) -> dict[str, int]:
    """How often there were choices, and which was right; ``more``: the first of a token, that of the token before too
    (``chances``)."""
    found = dict.fromkeys(("asked", "1", "2", "3", "chances", "more"), 0)
    before = False
    for choices, right in zip(guesses, answer, strict=False):
        found["asked"] += bool(choices)
        for place, choice in enumerate(choices, 1):
            found[str(place)] += choice == right
        found["chances"] += before
        found["more"] += before and choices[:1] == [right]
        before = choices[:1] == [right]
    return found


def best(first: float, more: float, others: list[float], step: tuple[float, float], draw: float) -> tuple[float, str]:
    """Tokens a second of the best chain with so many ``others`` beside its first token, and what that is. ``first``,
    ``more``: how often the first token of a chain is right, and each further one where those before are; ``others``:
    how often another choice is; ``step``: seconds, and of each row; ``draw``: of a guessed token."""
    found = []
    for length in range(1 if others else 0, DEEPEST + 1):
        tokens = 1 + first * sum(more**i for i in range(length)) + sum(others)
        seconds = step[0] + step[1] * (length + 1 + len(others)) + draw * length
        found.append((tokens / seconds, f"{length} deep" if length else "none"))
    return max(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo", type=Path)
    parser.add_argument("--head", type=Path, help="an EAGLE-3 head of the model")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--step-ms", type=float, nargs=2, metavar=("BASE", "ROW"), help="a step's times, measured before"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    need_native()
    head = None if given.head is None else Head(given.head, len(open_model(given.model).spec.layers))
    model = Model(given.model, () if head is None else head.spec.layers)
    tokenizer = Tokenizer.open(given.model)
    template = ChatTemplate.open(tokenizer, given.model)
    counts: dict[tuple[str, str], Counter[str]] = {}
    for file in sorted(WORKLOADS.glob("*.json")):
        work = json.loads(file.read_text())
        for prompt in work["prompts"]:
            ids = tokenizer.encode(template.render([{"role": "user", "content": prompt}], add_generation_prompt=True))
            outs = [model.step(ids, 0)]
            text = [*ids, int(outs[0].tokens[-1, 0])]
            while len(text) < len(ids) + given.tokens:
                outs.append(model.step(text[-1:], len(text) - 1))
                text.append(int(outs[-1].tokens[0, 0]))
            made: dict[str, list[list[int]]] = {"lookup": [looked_up(text, end) for end in range(len(ids), len(text))]}
            if head is not None:
                states = np.concatenate([out.aux for out in outs])
                made["head"] = head.likeliest(text[:-1], states[: len(text) - 1])[len(ids) - 2 :]
            for name, guesses in made.items():
                counts.setdefault((name, work["what"]), Counter()).update(count(guesses, text[len(ids) :]))
    step = model.seconds() if given.step_ms is None else (given.step_ms[0] / 1e3, given.step_ms[1] / 1e3)
    rows, told = [], []
    for (name, what), found in counts.items():
        if not found["asked"]:
            continue
        first, second, third = (found[i] / found["asked"] for i in "123")
        more = found["more"] / max(found["chances"], 1)
        draw = 0.0 if name == "lookup" or head is None else head.seconds()
        chain, how = best(first, more, [], step, draw)
        two, _ = best(first, more, [second], step, draw)
        three, _ = best(first, more, [second, third], step, draw)
        told.append({"draft": name, "text": what, **found, "chain": chain, "two": two, "three": three})
        shares = [f"{100 * share:.0f} %" for share in (first, second, third)]
        rows.append([name, what, str(found["asked"]), *shares, how, f"{two / chain:.2f}", f"{three / chain:.2f}"])
    columns = ["draft", "text", "guesses", "first right", "second", "third", "best chain", "with 2", "with 3"]
    stdout().print(table(f"{given.model}: speed of a tree to that of a chain", columns, rows))
    print(f"a step takes {1e3 * step[0]:.2f} ms and {1e3 * step[1]:.2f} ms a row")
    if given.json is not None:
        write_json(given.json, {"step_seconds": step, "rows": told})


if __name__ == "__main__":
    main()
