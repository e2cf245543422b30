"""Drives a runner by hand: sequences, their blocks, and the ``StepBatch`` of one step, without an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from toolkit.runners.step import SamplingBatch, StepBatch, StepOutput


def sampling(rows: int, **columns: Any) -> SamplingBatch:
    """Greedy rows; ``columns`` replace fields, scalars standing for every row."""
    dtypes = {"top_k": np.int32, "seed": np.uint64, "position": np.int64, "logprobs": np.int32}
    neutral = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 0,
        "position": 0,
        "logprobs": -1,
    }
    fields: dict[str, Any] = {
        name: np.ascontiguousarray(np.broadcast_to(columns.pop(name, value), (rows,)), dtypes.get(name, np.float32))
        for name, value in neutral.items()
    }
    fields["history_ptr"] = np.zeros(rows + 1, np.int32)
    fields["bias_ptr"] = np.zeros(rows + 1, np.int32)
    fields["history_ids"] = fields["history_count"] = fields["bias_ids"] = np.zeros(0, np.int32)
    fields["bias_values"] = np.zeros(0, np.float32)
    return SamplingBatch(**(fields | columns))


@dataclass
class Sequence:
    """One request: its tokens in the cache so far and its blocks in each group, of states the slots in turn."""

    blocks: list[list[int]]
    length: int = 0
    long: bool = False


@dataclass
class Driver:
    """Hands out blocks in a scattered order (or in a row), and runs steps."""

    runner: Any
    num_blocks: int = 64
    scattered: bool = True
    sequences: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runner.load_weights()
        groups = len(self.runner.spec.cache_groups)
        self.runner.allocate_cache((self.num_blocks,) * groups)
        order = np.random.default_rng(0).permutation(self.num_blocks) if self.scattered else np.arange(self.num_blocks)
        self._states = [group.kind == "state" for group in self.runner.spec.cache_groups]
        self._free = [[int(b) for b in order] for _ in range(groups)]

    def add(self, long: bool = False) -> int:
        """A new, empty sequence; returns its number."""
        self.sequences.append(Sequence([[] for _ in self._free], long=long))
        return len(self.sequences) - 1

    def free(self, number: int) -> None:
        """Give the blocks of a sequence back, to be handed out next."""
        for group, blocks in enumerate(self.sequences[number].blocks):
            self._free[group] = list(dict.fromkeys(blocks)) + self._free[group]
        self.sequences[number] = Sequence([[] for _ in self._free])

    def batch(self, new: dict[int, list[int]], want: str = "last", **extra: Any) -> StepBatch:
        """The step that appends ``new`` tokens to each sequence. ``want``: "last" samples each one's last token,
        "all" also returns all logits and hidden states.
        """
        size = self.runner.options.block_size
        slots: list[list[int]] = [[] for _ in self._free]
        tokens: list[int] = []
        positions: list[int] = []
        cu, lens, last = [0], [], []
        for number, ids in new.items():
            s = self.sequences[number]
            at = range(s.length, s.length + len(ids))
            for group, blocks in enumerate(s.blocks):
                if self._states[group]:
                    moved = s.length // size < (at.stop - 1) // size or not blocks
                    blocks.append(self._free[group].pop(0) if moved else blocks[-1])
                    continue
                while len(blocks) * size < at.stop:
                    blocks.append(self._free[group].pop(0))
                slots[group] += [blocks[p // size] * size + p % size for p in at]
            tokens += ids
            positions += at
            s.length = at.stop
            cu.append(len(tokens))
            lens.append(s.length)
            last.append(len(tokens) - 1)
        tables = []
        for group, cache in enumerate(self.runner.spec.cache_groups):
            rows = [list(self.sequences[n].blocks[group]) for n in new]
            if self._states[group]:
                tables.append(np.array([[-1, *row][-2:] for row in rows], np.int32))
                continue
            table = np.full((len(rows), max(map(len, rows))), -1, np.int32)
            for i, row in enumerate(rows):
                start = lens[i] - (cu[i + 1] - cu[i])
                first = 0 if cache.window is None else max(0, start + 1 - cache.window) // size
                table[i, first : len(row)] = row[first:]
                heads = min(first, -(-cache.sink_tokens // size))
                table[i, :heads] = row[:heads]
            tables.append(table)
        every = np.arange(len(tokens), dtype=np.int32) if want == "all" else np.zeros(0, np.int32)
        fields: dict[str, Any] = {
            "token_ids": np.asarray(tokens, np.int32),
            "from_previous": np.full(len(tokens), -1, np.int32),
            "positions": np.asarray([positions], np.int32),
            "cu_seqlens": np.asarray(cu, np.int32),
            "seq_lens": np.asarray(lens, np.int32),
            "block_tables": tuple(tables),
            "slot_mapping": tuple(np.asarray(x, np.int64) for x in slots),
            "rope_set": np.asarray([self.sequences[n].long for n in new], np.int8),
            "adapter": np.full(len(new), -1, np.int32),
            "sample_index": np.asarray(last, np.int32),
            "sampling": sampling(len(last)),
            "logits_index": every,
            "hidden_index": every,
            "target_index": np.zeros(0, np.int32),
            "target_ids": np.zeros(0, np.int32),
        }
        return StepBatch(**(fields | extra))

    def step(self, new: dict[int, list[int]], want: str = "last", **extra: Any) -> StepOutput:
        """Run the step and wait for it."""
        return self.runner.submit(self.batch(new, want, **extra)).result()

    def generate(self, prompt: list[int], count: int, chunk: int = 1 << 30) -> list[int]:
        """Greedy continuation of one prompt, prefilled in chunks."""
        number = self.add()
        for start in range(0, len(prompt), chunk):
            output = self.step({number: prompt[start : start + chunk]})
        found = [int(output.tokens[0, 0])]
        while len(found) < count:
            found.append(int(self.step({number: [found[-1]]}).tokens[0, 0]))
        return found


def leaves_and_comes_back(runner: Any, block: int) -> bytes:
    """A block of the first group is exported, lost and imported; its bytes."""
    data = runner.export_block(0, block)
    runner.import_block(0, block, bytes(len(data)))
    assert any(data) and not any(runner.export_block(0, block))
    runner.import_block(0, block, data)
    assert runner.export_block(0, block) == data
    return data
