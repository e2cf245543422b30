"""Sampling that sorts only what it must: the ``top_k`` candidates of a row rather than its whole vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference import sampling


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """The best of each row stays 0, however small the temperature."""
    return (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]


def _draw(probabilities: Tensor, u: Tensor) -> Tensor:
    """The first id at which the running mass of a row passes u times the whole."""
    mass = probabilities.cumsum(-1, dtype=torch.float64)
    drawn = torch.searchsorted(mass, (u.double() * mass[:, -1])[:, None], right=True)[:, 0]
    return drawn.clamp_(max=probabilities.shape[1] - 1)


@sampling.sample.register("torch", devices=("cpu",))
def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    """Rows are split by what they need: argmax; the whole softmax; the ``top_k`` best; everything sorted."""
    tokens = torch.empty(logits.shape[0], dtype=torch.int64)
    greedy = temperature == 0
    plain = ~greedy & (top_k == 0) & (top_p >= 1) & (min_p <= 0)
    limit = min(1024, logits.shape[1] - 1)
    few = ~greedy & (top_k > 0) & (top_k <= limit)
    sorts = ~(greedy | plain | few)
    if greedy.any():
        tokens[greedy] = logits[greedy].argmax(-1)
    if plain.any():
        tokens[plain] = _draw(_scaled(logits[plain], temperature[plain]).softmax(-1), u[plain])
    if few.any():
        rows = few.nonzero()[:, 0]
        k, best = top_k[rows], int(top_k[rows].max())
        scaled = _scaled(logits[rows], temperature[rows])
        values, ids = scaled.topk(best + 1, dim=-1)
        border = values.gather(1, k[:, None]) == values.gather(1, k[:, None] - 1)
        tied = border[:, 0]  # which of the tied ids are kept is the sort's to say
        sorts[rows[tied]] = True
        rows, k, values, ids, scaled = rows[~tied], k[~tied], values[~tied], ids[~tied], scaled[~tied]
        p = (values - scaled.logsumexp(-1, keepdim=True)).double().exp_()
        order = _lowest_id_first(values, ids)
        p, ids = p.gather(1, order), ids.gather(1, order)
        keep = torch.arange(best + 1) < k[:, None]
        mass = (p * keep).cumsum(-1)
        keep &= (mass - p < top_p[rows].double()[:, None] * mass[:, -1:]) | (top_p[rows] >= 1)[:, None]
        keep &= p >= min_p[rows].double()[:, None] * p[:, :1]
        keep[:, 0] = True
        ids, ascending = ids.sort(-1)
        drawn = _draw((p * keep).gather(1, ascending), u[rows])
        tokens[rows] = ids.gather(1, drawn[:, None])[:, 0]
    if sorts.any():
        some = (logits[sorts], temperature[sorts], top_k[sorts], top_p[sorts], min_p[sorts], u[sorts])
        tokens[sorts] = sampling.sample.reference(*some)
    return tokens


def _lowest_id_first(values: Tensor, ids: Tensor) -> Tensor:
    """Order of candidates by falling value, equal values by rising id."""
    by_id = ids.argsort(-1)
    by_value = values.gather(1, by_id).argsort(stable=True, dim=-1, descending=True)
    return by_id.gather(1, by_value)
