"""Steps with prompts as graphs: a step of any sequences, padded to a number of tokens that graphs are captured at.

Launching a step kernel by kernel takes the host 0.8 ms a layer, whatever the tokens (measured on an H200,
docs/figures/gpu-h200.md). Of few tokens the GPU needs far less. What pads is one sequence more, at position 0 of the
spare blocks, which no request ever has. Norms, heads and drawing follow a graph kernel by kernel, for the rows that
were asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from toolkit.base.lazy_dataclass import dataclass
from toolkit.kernels.triton.attention.plan import cut, kind_of
from toolkit.models.spec import DecoderSpec, LinearSpec
from toolkit.models.spec.decoder import Mixer
from toolkit.runners.step import StepBatch
from toolkit.runners.tensor.step.inputs import ADAPTER, LEAST_TABLE, TAPPED, pad, power_of_2, tile_name, token_arrays
from toolkit.runners.tensor.step.tiles import Cut, Heads, Kind, TileRows, sight_of

SIZES = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # tokens that graphs are captured at
EXPANDED = 256  # beyond it some weights in few bits become dense for a product, which a graph would hold memory for
LEAST_PARTS = 16  # partial results of attention that a graph has room for, if any
WORK = 1e13  # operations of a step beyond which the GPU takes longer than launching does


def most_tokens(spec: DecoderSpec, expands: bool) -> int:
    """The largest of ``SIZES`` that is worth a graph; 0 where steps with prompts cannot be graphs, for what their
    layers do is decided on the host. ``expands``: some weights become dense for a product of more than ``EXPANDED``
    rows.
    """
    crossed = any(mixer.kind == "cross" for _, mixer in spec.mixers())
    states = any(kept.kind == "state" for kept in spec.cache_groups)
    if states or crossed or spec.mutual or spec.block != 1:
        return 0
    weights = sum(_multiplied(mixer) for _, mixer in spec.mixers())
    most = min(WORK / (2 * max(weights, 1)), EXPANDED if expands else SIZES[-1])
    return max((size for size in SIZES if size <= most), default=0)


def _multiplied(mixer: Mixer) -> float:
    """Weights that a token meets: of a mixture those of the experts that it chooses."""
    total = _size(mixer.linears())
    if mixer.kind != "moe":
        return total
    experts = _size(linear for expert in mixer.experts for linear in expert.linears())
    return total - experts * (1 - mixer.top_k / len(mixer.experts))


def _size(linears: Iterable[LinearSpec]) -> int:
    return sum(linear.in_features * linear.out_features for linear in linears)


def fits(batch: StepBatch, most: int, absorbed: float) -> bool:
    """Whether a step is of token ids alone, ``most`` at most, ``absorbed`` of a sequence, and no routes are asked."""
    return (
        len(batch.token_ids) <= most
        and int(np.diff(batch.cu_seqlens).max(initial=0)) <= absorbed
        and batch.embeds is None
        and batch.views is None
        and batch.types is None
        and bool((batch.positions == batch.positions[0]).all())  # by rows and columns are those of pictures
        and not any(map(len, (batch.routed, batch.routes_index, batch.mutual)))
    )


def parts_room(parts: int) -> int:
    """For so many partial results of attention: 0, 16, 64, 256 … Most tiles have none, and of large tiles one takes up
    to two megabytes.
    """
    return 0 if not parts else max(LEAST_PARTS, 1 << 2 * -(-(parts - 1).bit_length() // 2))


@dataclass(frozen=True)
class PromptKey:
    """What a graph is captured for: tokens, rows and entries of block tables, tiles of attention by kind, heads and
    kind of step with room for so many and for so many partial results, 0: none are merged. ``adapted``: some tokens may
    have adapters; ``tapped``: layers of which what goes in is kept.
    """

    rows: int
    sequences: int
    table: int
    tiles: tuple[tuple[Kind, Heads, str, int, int], ...]
    adapted: bool
    tapped: tuple[int, ...]


@dataclass
class PromptArrays:
    """A step of ``tokens`` tokens, those that pad included. ``batch``: the step as it came; ``own``: its sequences;
    ``starts``, ``lengths``: of them and of the one that pads; ``room``: rows and entries that block tables have at
    least.
    """

    batch: StepBatch
    arrays: dict[str, np.ndarray]
    spare: tuple[int, ...]
    own: int
    starts: np.ndarray
    lengths: np.ndarray
    cuts: dict[tuple[Kind, Heads, str], Cut]
    tokens: int
    room: tuple[int, int]

    def key(self) -> PromptKey:
        """The least graph that holds the step."""
        sequences = max(power_of_2(self.own + 1), self.room[0])
        width = max(LEAST_TABLE, power_of_2(max(t.shape[1] for t in self.batch.block_tables)), self.room[1])
        tiles = tuple(
            (*which, power_of_2(max(len(made.items), self.tokens)), parts_room(made.parts))
            for which, made in self.cuts.items()
        )
        return PromptKey(self.tokens, sequences, width, tiles, ADAPTER in self.arrays, self.batch.aux_layers)

    def padded(self, key: PromptKey) -> dict[str, np.ndarray]:
        """All arrays in the shapes of ``key``."""
        arrays = dict(self.arrays)
        for group, table in enumerate(self.batch.block_tables):
            wide = np.zeros((key.sequences, key.table), np.int32)
            wide[: len(table), : table.shape[1]] = table
            wide[self.own :] = self.spare[group]
            arrays[f"table{group}"] = wide
        for kind, heads, step, room, parts in key.tiles:
            made = self.cuts[kind, heads, step].padded(room, self.tokens if parts else 0)
            arrays[tile_name("items", kind, heads)] = made.items
            arrays[tile_name("merges", kind, heads)] = made.merges
        return arrays


def prompt_arrays(
    batch: StepBatch,
    spec: DecoderSpec,
    spare: tuple[int, ...],
    block_size: int,
    rope_offset: int,
    tile_rows: Mapping[Kind, TileRows],
    adapters: np.ndarray | None,
    room: tuple[int, int],
) -> PromptArrays:
    """A step that ``fits``. ``spare``: of each group the block for what pads; ``tile_rows``: as far as known: without
    those that this step needs there are no cuts; ``adapters``: see ``token_arrays``; ``room``: see ``PromptArrays``.
    """
    n, own = len(batch.token_ids), len(batch.seq_lens)
    tokens = next(size for size in SIZES if size >= n)
    more = np.arange(tokens - n)
    arrays = token_arrays(batch, spec, rope_offset, adapters)
    fills = {"source": -1, ADAPTER: -1}
    arrays = {name: pad(a, tokens, fills.get(name, 0)) for name, a in arrays.items()}
    arrays["rope"][n:] = more
    if batch.aux_layers:
        arrays[TAPPED] = np.arange(tokens)
    for group, block in enumerate(spare):
        arrays[f"slots{group}"][n:] = block * block_size + more % block_size
    padding = len(more) > 0
    starts = np.append(batch.cu_seqlens, np.int32(tokens)) if padding else batch.cu_seqlens
    lengths = np.append(batch.seq_lens, np.int32(len(more))) if padding else batch.seq_lens
    new, cuts, known = np.diff(batch.cu_seqlens), {}, True
    for kind, rows in tile_rows.items():
        heads_of = {heads for _, heads in rows}
        known &= bool(heads_of)
        for heads in heads_of:
            step = kind_of(new, *heads)
            if (step, heads) not in rows:
                known = False
                continue
            made = cut(starts, lengths, sight_of(spec, kind), *heads, rows[step, heads])
            cuts[kind, heads, step] = Cut(*made)
    return PromptArrays(batch, arrays, spare, own, starts, lengths, cuts if known else {}, tokens, room)
