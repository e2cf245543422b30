"""A step in several, each of some of its sequences, for ranks that work at the same time; what they gave as one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.runners.step import I32, NO_EXPERT, SamplingBatch, StepBatch, StepOutput, Views

Rows = NDArray[np.int64]
Share = list[int]
"""Sequences of a step, in their order."""
# Fields of a batch: of one entry a token, of one a sequence, and of flat tokens.
_OF_TOKENS = ("token_ids", "from_previous", "rope_length")
_OF_SEQUENCES = ("seq_lens", "rope_set", "adapter")
_ASKED = ("logits_index", "hidden_index", "routes_index", "aux_index", "routed")


def in_a_row(batch: StepBatch, most: int) -> list[Share]:
    """Its sequences in up to ``most`` shares of about as many tokens each."""
    count, total = len(batch.seq_lens), len(batch.token_ids)
    parts, inner = min(most, count), batch.cu_seqlens[1:-1]
    cuts = (1 + int(np.argmin(np.abs(inner - total * i // parts))) for i in range(1, parts))
    at = sorted({0, count, *cuts})
    return [list(range(a, b)) for a, b in itertools.pairwise(at)]


def select(batch: StepBatch, share: Share, leads: bool = True) -> StepBatch:
    """The step of some sequences. ``leads``: blocks that are to be copied first, and pictures that are new, are its."""
    if len(share) == len(batch.seq_lens):
        return batch
    cu = batch.cu_seqlens
    tokens = np.concatenate([np.arange(cu[s], cu[s + 1]) for s in share])
    where = np.full(len(batch.token_ids), -1, np.int32)
    where[tokens] = np.arange(len(tokens))
    mine: dict[str, Any] = {}
    for name in _OF_TOKENS:
        value = getattr(batch, name)
        mine[name] = None if value is None else value[tokens]
    mine |= {name: getattr(batch, name)[share] for name in _OF_SEQUENCES}
    mine |= {name: _inside(getattr(batch, name), where) for name in _ASKED}
    sampled = np.flatnonzero(where[batch.sample_index] >= 0)
    target = where[batch.target_index] >= 0
    if batch.embeds is not None:
        mine |= {
            "embeds": batch.embeds[where[batch.embed_index] >= 0],
            "embed_index": _inside(batch.embed_index, where),
        }
    mutual = batch.mutual[where[batch.mutual[:, 0]] >= 0]
    number = {s: i for i, s in enumerate(share)}
    moved = [(where[a], where[b - 1] + 1, number[s]) for a, b, s in mutual.tolist()]
    return replace(
        batch,
        **mine,
        positions=np.ascontiguousarray(batch.positions[:, tokens]),
        cu_seqlens=np.concatenate([[0], np.cumsum(np.diff(cu)[share])]).astype(np.int32),
        block_tables=tuple(table[share] for table in batch.block_tables),
        slot_mapping=tuple(slots[tokens] if len(slots) else slots for slots in batch.slot_mapping),
        sample_index=_inside(batch.sample_index, where),
        sampling=_draws(batch.sampling, sampled),
        target_index=_inside(batch.target_index, where),
        target_ids=batch.target_ids[target],
        mutual=np.array(moved, np.int32).reshape(-1, 3),
        views=None if batch.views is None else _views(batch.views, where, leads),
        copy_blocks=batch.copy_blocks if leads else (),
    )


def _inside(index: I32, where: I32) -> I32:
    found = where[index]
    return found[found >= 0]


def _draws(draws: SamplingBatch, rows: Rows) -> SamplingBatch:
    """Those of some rows."""
    lists = {"history_ptr": ("history_ids", "history_count"), "bias_ptr": ("bias_ids", "bias_values")}
    apart = {"grammar", *lists, *(name for names in lists.values() for name in names)}
    mine = {f.name: getattr(draws, f.name)[rows] for f in fields(draws) if f.name not in apart}
    for pointers, values in lists.items():
        ptr = getattr(draws, pointers)
        taken = np.concatenate([np.zeros(0, np.int64), *(np.arange(ptr[row], ptr[row + 1]) for row in rows)])
        mine |= {name: getattr(draws, name)[taken] for name in values}
        mine[pointers] = np.concatenate([[0], np.cumsum(np.diff(ptr)[rows])]).astype(np.int32)
    return SamplingBatch(**mine, grammar=None if draws.grammar is None else draws.grammar[rows])


def _views(views: Views, where: I32, leads: bool) -> Views:
    """What tokens of a share look at; what is new and what is gone comes with one of them."""
    runs = [i for i, first in enumerate(views.tokens[:, 0]) if where[first] >= 0]
    seen = [views.seen[views.ptr[i] : views.ptr[i + 1]] for i in runs]
    ptr = np.concatenate([[0], np.cumsum([len(x) for x in seen])]).astype(np.int32)
    news = (views.rows, views.new, views.gone) if leads else (views.rows[:0], views.new[:0], views.gone[:0])
    moved = [(where[views.tokens[i, 0]], where[views.tokens[i, 1] - 1] + 1) for i in runs]
    return Views(*news, np.array(moved, np.int32).reshape(-1, 2), ptr, np.concatenate([views.seen[:0], *seen]))


_ROWS = {
    **dict.fromkeys(("tokens", "logprob", "top_ids", "top_logprobs"), "sample_index"),
    "logits": "logits_index",
    "hidden": "hidden_index",
    "routes": "routes_index",
    "aux": "aux_index",
    "target_logprobs": "target_index",
}
"""What a step gives a row each of, and which rows those are."""


def joined(batch: StepBatch, outputs: Sequence[StepOutput], shares: Sequence[Share]) -> StepOutput:
    """What a step gives of which ``outputs`` are those of its ``shares``."""
    if len(outputs) == 1:
        return outputs[0]
    owner = np.zeros(len(batch.seq_lens), np.int64)
    for i, share in enumerate(shares):
        owner[share] = i
    whose = np.repeat(owner, np.diff(batch.cu_seqlens))
    wide = max(output.top_ids.shape[1] for output in outputs)
    made = {}
    for name, asked in _ROWS.items():
        parts = [getattr(output, name) for output in outputs]
        if name.startswith("top"):
            fill = -1 if name == "top_ids" else -np.inf
            parts = [np.pad(x, ((0, 0), (0, wide - x.shape[1])), constant_values=fill) for x in parts]
        filled = [x for x in parts if len(x)]
        made[name] = np.concatenate(filled)[np.argsort(_order(whose, getattr(batch, asked)))] if filled else parts[0]
    back, starts = _order(whose, batch.sample_index), np.cumsum([0, *(len(output.tokens) for output in outputs)])
    bad = [output.bad_rows + start for output, start in zip(outputs, starts, strict=False)]
    return StepOutput(**made, bad_rows=np.sort(back[np.concatenate(bad).astype(np.int64)]).astype(np.int32))


def _order(whose: Rows, index: I32) -> Rows:
    """Of the rows of all shares, one behind the other, which they are of those asked for."""
    return np.argsort(whose[index], kind="stable")


def layers_of_all(outputs: Sequence[StepOutput]) -> StepOutput:
    """The last stage's output, with the experts that were chosen in every stage."""
    routes = [output.routes for output in outputs if output.routes.size]
    if not routes:
        return outputs[-1]
    width = max(part.shape[2] for part in routes)
    whole = np.full((*routes[0].shape[:2], width), NO_EXPERT, np.uint16)
    for part in routes:
        np.minimum(whole[:, :, : part.shape[2]], part, out=whole[:, :, : part.shape[2]])
    return replace(outputs[-1], routes=whole)
