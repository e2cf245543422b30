"""A step's arrays as the device wants them; for a graph padded to the size that it was captured at.

Padding adds sequences of one token at position 0 in the spare block of each group, which no request ever has: they are
computed like the others and looked at by nobody. So no kernel needs to know of padding, and no value is made up of
memory that nobody wrote.
"""

from __future__ import annotations

import numpy as np

from toolkit.base.lazy_dataclass import dataclass
from toolkit.kernels.triton.attention.plan import PROMPT_KEYS
from toolkit.models.spec import DecoderSpec
from toolkit.runners.step import StepBatch
from toolkit.runners.tensor.step.draws import columns
from toolkit.runners.tensor.step.tiles import (
    Cut,
    DecodeCut,
    Heads,
    Kind,
    TileRows,
    cut_decode,
    kind_of_decode,
    sight_of,
)

ADAPTER = "adapter"  # the array of tokens' adapters, where there is one
TAPPED = "tapped"  # flat tokens whose streams come back
TURNED = "turned"  # the lengths that dynamic rope reaches, of tokens that have their own
LEAST_TABLE = 16  # entries of the shortest block tables that graphs have


@dataclass(frozen=True)
class GraphKey:
    """What a graph is captured for: sequences, entries of a block table, tiles of attention by kind and heads.

    ``draws``: it ends with tokens, not with logits. ``adapted``: some tokens may have adapters.
    """

    rows: int
    table: int
    tiles: tuple[tuple[Kind, Heads, int], ...]
    draws: bool
    adapted: bool


def graph_rows(sequences: int) -> int:
    """The next size that graphs are captured at: 1, 2, 4, 8, 16, 24 … 256, then in steps of 32."""
    if sequences <= 8:
        return 1 << (sequences - 1).bit_length()
    step = 8 if sequences <= 256 else 32
    return -(-sequences // step) * step


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()


def token_arrays(
    batch: StepBatch, spec: DecoderSpec, rope_offset: int, adapters: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Of each token: id, source, row of the rope tables (``rope_offset``: rows from short to long frequencies), slot in
    each group, and its adapter where ``adapters`` (int32 [T]) are given.
    """
    rope = batch.positions[0].astype(np.int64)
    if batch.rope_set.any():
        rope += np.repeat(batch.rope_set, np.diff(batch.cu_seqlens)).astype(np.int64) * rope_offset
    arrays = {"ids": batch.token_ids.astype(np.int64), "source": batch.from_previous.astype(np.int64), "rope": rope}
    if batch.rope_length is not None:
        arrays[TURNED] = batch.rope_length.astype(np.int64)
    for group, kept in enumerate(spec.cache_groups):
        if kept.kind != "state":
            arrays[f"slots{group}"] = batch.slot_mapping[group]
    return arrays if adapters is None else arrays | {ADAPTER: adapters}


def axes_array(batch: StepBatch) -> dict[str, np.ndarray]:
    """The positions in time, rows and columns of each token, where it has three, int64 [3, T]."""
    return {"axes": batch.positions.astype(np.int64)} if len(batch.positions) > 1 else {}


def table_arrays(batch: StepBatch) -> dict[str, np.ndarray]:
    """The block table of each group, and where sequences start."""
    tables = {f"table{group}": table for group, table in enumerate(batch.block_tables)}
    return tables | {"starts": batch.cu_seqlens}


def is_decode(batch: StepBatch) -> bool:
    """Whether the step adds one token to every sequence, draws for all of them and returns nothing else."""
    n = len(batch.seq_lens)
    return (
        len(batch.token_ids) == n == len(batch.sample_index)
        and batch.embeds is None
        and batch.views is None
        and not any(map(len, (batch.logits_index, batch.hidden_index, batch.target_index, batch.routes_index)))
        and not len(batch.aux_index)
        and bool((batch.sample_index == np.arange(n)).all())
    )


@dataclass
class DecodeArrays:
    """One token of each of ``rows`` sequences, those that pad included, before tables and tiles are padded.

    ``batch``: the step as it came.
    """

    batch: StepBatch
    arrays: dict[str, np.ndarray]
    lengths: np.ndarray  # int32 [rows]
    cuts: dict[tuple[Kind, Heads], Cut]
    rows: int
    draws: bool

    def key(self) -> GraphKey:
        """The least graph that holds the step."""
        width = max(a.shape[1] for name, a in self.arrays.items() if name.startswith("table"))
        tiles = tuple((kind, heads, power_of_2(max(len(c.items), self.rows))) for (kind, heads), c in self.cuts.items())
        return GraphKey(self.rows, max(LEAST_TABLE, power_of_2(width)), tiles, self.draws, ADAPTER in self.arrays)

    def padded(self, key: GraphKey) -> dict[str, np.ndarray]:
        """All arrays in the shapes of ``key``."""
        arrays = dict(self.arrays)
        for name, table in self.arrays.items():
            if name.startswith("table"):
                arrays[name] = np.zeros((key.rows, key.table), np.int32)
                arrays[name][:, : table.shape[1]] = table
        for kind, heads, room in key.tiles:
            cut = self.cuts[kind, heads].padded(room, key.rows)
            arrays[tile_name("items", kind, heads)] = cut.items
            arrays[tile_name("merges", kind, heads)] = cut.merges
        return arrays


def tile_name(what: str, kind: Kind, heads: Heads) -> str:
    """The name of a kind's tiles among a step's arrays."""
    return f"{what} {kind} {heads}"


def decode_arrays(
    batch: StepBatch,
    spec: DecoderSpec,
    spare: tuple[int, ...],
    block_size: int,
    rope_offset: int,
    tile_rows: dict[Kind, TileRows],
    kept: dict[tuple[Kind, Heads], DecodeCut],
    draws: bool,
    adapters: np.ndarray | None,
) -> DecodeArrays:
    """A decode step, padded to ``graph_rows``. ``spare``: of each group the block for what pads; ``tile_rows``: by
    kind, as far as known: without those of all kinds there are no cuts, as after a step that broke off; ``kept``: the
    cuts of the step before, which become those of this one; ``adapters``: see ``token_arrays``.
    """
    n = len(batch.seq_lens)
    rows = graph_rows(n)
    arrays = token_arrays(batch, spec, rope_offset, adapters) | (columns(batch.sampling) if draws else {})
    fills = {"source": -1, ADAPTER: -1} | {f"slots{g}": block * block_size for g, block in enumerate(spare)}
    arrays = {name: pad(a, rows, fills.get(name, 0)) for name, a in arrays.items()}
    for group, table in enumerate(batch.block_tables):
        arrays[f"table{group}"] = pad(table, rows, spare[group])
    lengths = pad(batch.seq_lens, rows, 1)
    cuts, known = {}, True
    for kind, by_heads in tile_rows.items():
        mine = [(heads, count) for (step, heads), count in by_heads.items() if step == kind_of_decode(heads)]
        known &= bool(mine)
        for heads, count in mine:
            if heads[1] == PROMPT_KEYS:  # sums that are alike: tiles end at fixed positions
                cuts[kind, heads] = cut_decode(lengths, sight_of(spec, kind), heads, count)
                continue
            before = kept.get((kind, heads))
            found = before.at(lengths) if before is not None and before.rows == count else None
            if found is None:
                kept[kind, heads] = before = DecodeCut.of(lengths, sight_of(spec, kind), heads, count)
                found = before.made
            cuts[kind, heads] = found
    return DecodeArrays(batch, arrays, lengths, cuts if known else {}, rows, draws)


def pad(array: np.ndarray, rows: int, fill: float) -> np.ndarray:
    """``array`` with as many more rows of ``fill``."""
    if len(array) == rows:
        return array
    out = np.full((rows, *array.shape[1:]), fill, array.dtype)
    out[: len(array)] = array
    return out
