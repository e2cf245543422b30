"""The step boundary: what the engine hands a runner and what it gets back, as plain numpy arrays.

Neither torch nor Python objects cross it, so that a runner can be a C++ call, a captured graph or
another process. Letters in shapes: S sequences in the batch, T tokens in all (flat, sequence after sequence), N sampled
rows, V vocabulary, G cache groups, B the longest block table of a group. Arrays are C-contiguous, of exactly the
dtype stated.
"""

from __future__ import annotations

from dataclasses import field, fields, replace

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]
NO_EXPERT = 0xFFFF
NONE: I32 = np.zeros(0, np.int32)
"""Indexes of nothing. It is one array everywhere: what comes again in its place is not looked at again."""


def _none() -> I32:
    return NONE


@dataclass(kw_only=True)
class Draw:
    """How one row chooses its token, see ``SamplingBatch``. The defaults take the likeliest, and change nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # 0 … 2^64-1


# The arrays of SamplingBatch that are a Draw a row: name -> type.
COLUMNS = {
    f.name: np.dtype(np.uint64 if f.name == "seed" else np.int32 if isinstance(f.default, int) else np.float32)
    for f in fields(Draw)
}


@dataclass
class SamplingBatch:
    """How each of the N sampled rows chooses its token. Field order is the order of application:

    1. penalties over the row's history, CSR rows ``history_ptr[i]:history_ptr[i+1]`` of distinct token ids:
       repetition (logit / p if > 0 else logit * p) for every listed id, then
       ``logit -= frequency * count + presence * (count > 0)`` with ``history_count`` = occurrences in the *output* (0
       for ids that stand in the prompt alone);
    2. biases, CSR likewise: ``logit[id] += value`` (-inf bans);
    3. ``grammar``: bit (id & 31) of word id >> 5 clear bans the id (xgrammar's layout);
    4. log-probabilities are taken here (log-softmax of the logits so far, before temperature);
    5. ``temperature`` 0 takes the argmax, lowest id on a tie. Else logits / temperature, softmax, then keep the
       ``top_k`` (0 = all) most probable, of those the smallest set that has ``top_p`` of their mass, of those the ones
       with at least ``min_p`` times the top probability (ties at a border: lowest id first); draw with
       u = uniform(seed, position) by walking the kept ids in ascending order over their renormalised mass.
    """

    temperature: F32  # [N]
    top_k: I32  # [N]
    top_p: F32  # [N]
    min_p: F32  # [N]
    repetition_penalty: F32  # [N] 1 = off
    presence_penalty: F32  # [N] 0 = off
    frequency_penalty: F32  # [N] 0 = off
    seed: NDArray[np.uint64]  # [N]
    position: I64  # [N] index of the token to be drawn among the request's new tokens, in higher bits how often it was
    history_ptr: I32  # [N+1]
    history_ids: I32
    history_count: I32
    bias_ptr: I32  # [N+1]
    bias_ids: I32
    bias_values: F32
    logprobs: I32  # [N] how many top log-probabilities to return; -1 = none, 0 = the chosen token's alone
    grammar: NDArray[np.int32] | None = None  # [N, ceil(V/32)] all ones = no grammar

    @classmethod
    def greedy(cls, rows: int) -> SamplingBatch:
        """``rows`` rows that take their likeliest token, and nothing else."""
        return cls(
            **{name: np.full(rows, getattr(Draw, name), dtype) for name, dtype in COLUMNS.items()},
            position=np.zeros(rows, np.int64),
            history_ptr=np.zeros(rows + 1, np.int32),
            history_ids=NONE,
            history_count=NONE,
            bias_ptr=np.zeros(rows + 1, np.int32),
            bias_ids=NONE,
            bias_values=np.zeros(0, np.float32),
            logprobs=np.full(rows, -1, np.int32),
        )

    def senseless(self) -> NDArray[np.bool_]:
        """Rows [N] whose parameters cannot be drawn by: NaN, infinite or below their ranges. A runner gives them any
        token and names them in ``bad_rows``."""
        sound = (self.temperature >= 0) & np.isfinite(self.temperature) & (self.top_k >= 0)
        return ~(sound & (self.top_p >= 0) & (self.min_p >= 0) & (self.repetition_penalty > 0))


@dataclass
class Views:
    """Which pictures tokens look at, in models with cross layers; a runner keeps pictures by their numbers.

    ``rows`` [R, hidden]: of the pictures ``new`` [K, 2] (number, rows), in their order, which take the place of what
    was kept under those numbers; of ``gone`` nothing is kept any more. ``tokens`` [W, 2]: (first, stop) of flat tokens
    that see the same pictures, ``seen[ptr[i]:ptr[i + 1]]``. Tokens in none of them see none.
    """

    rows: F32
    new: I32
    gone: I32
    tokens: I32
    ptr: I32
    seen: I32

    def looks(self) -> Views:
        """Who looks at what alone, where the pictures are there already."""
        return replace(self, rows=self.rows[:0], new=self.new[:0], gone=self.gone[:0])


@dataclass
class StepBatch:
    """One forward pass over a ragged batch of prefill chunks and decode tokens mixed.

    ``block_tables[g]`` names, for cache group g, the blocks of each sequence in order of position: entry j holds
    positions [j·block_size, (j+1)·block_size); entries of a window group that lie wholly before the window are -1
    and never read. Of a state group they are [S, 2]: the slot of the state that each sequence begins with (-1: none, as
    of all zeros), and the slot that takes the one it ends with; both may be the same.
    ``slot_mapping[g][t]`` = block·block_size + offset is where token t's key and value go; empty for a state group.
    """

    token_ids: I32  # [T]; where from_previous >= 0 the value is ignored
    from_previous: I32  # [T]; -1, or the sampled row of the previous step whose token stands here
    positions: I32  # [R, T], R = 1 (3 for M-RoPE)
    cu_seqlens: I32  # [S+1] where each sequence's tokens start in the flat arrays
    seq_lens: I32  # [S] tokens in the cache after this step, new ones included
    block_tables: tuple[I32, ...]  # G of [S, B]
    slot_mapping: tuple[I64, ...]  # G of [T]
    rope_set: NDArray[np.int8]  # [S] 0 = short frequencies, 1 = long
    adapter: I32  # [S] LoRA adapter, -1 = none
    sample_index: I32  # [N] flat token whose logits row is sampled
    sampling: SamplingBatch  # rows as in sample_index
    logits_index: I32 = field(default_factory=_none)  # flat tokens whose raw float32 logits come back: no penalty yet
    hidden_index: I32 = field(default_factory=_none)  # flat tokens whose hidden state comes back, after the final norm
    target_index: I32 = field(default_factory=_none)  # flat tokens t for which log p(target) comes back …
    target_ids: I32 = field(default_factory=_none)  # … of this token
    routes_index: I32 = field(default_factory=_none)  # those whose chosen experts come back
    aux_layers: tuple[int, ...] = ()  # what goes into these layers (at most 8; their number: out of the last) …
    aux_index: I32 = field(default_factory=_none)  # … comes back of these flat tokens
    embeds: F32 | None = None  # [E, hidden, and more for deep branches] rows that replace the embedding of …
    embed_index: I32 = field(default_factory=_none)  # … these flat tokens
    fills: bool = False  # keys and values of all layers are made of ``embeds``, a row a token, and nothing else
    routed: I32 = field(default_factory=_none)  # flat tokens with linears of their own
    # (first, stop, sequence) of flat tokens that see each other both ways; the last is the last of its run
    mutual: I32 = field(default_factory=lambda: np.zeros((0, 3), np.int32))  # [M, 3]
    views: Views | None = None
    types: I32 | None = None  # [T] of pairs of texts read together: 1 for tokens of the second; None = all are 0
    rope_length: I32 | None = None  # [T] length that dynamic rope reaches for each token, where that is its own
    copy_blocks: tuple[NDArray[np.int32], ...] = ()  # per group [C, 2] (source, destination), done before the step
    waited: bool = False  # its result is asked for before anything else: it need not run beside the caller


@dataclass
class StepOutput:
    """What a step produced. ``tokens[i, 0]`` is the new token of sampled row i.

    ``bad_rows``: sampled rows whose logits hold NaN or have no finite maximum, or that are ``SamplingBatch.senseless``;
    every other row's token is one that its grammar and biases allow. ``routes``: of each layer the experts that it
    chose, those of the largest weights first; ``NO_EXPERT`` fills, also the layers that are no mixture.
    """

    tokens: I32  # [N, 1]
    logprob: F32  # [N, 1] log-probability of each chosen token (nan where not asked for)
    top_ids: I32  # [N, P] P = max of sampling.logprobs, -1 fills
    top_logprobs: F32  # [N, P]
    logits: F32  # [len(logits_index), V]
    hidden: F32  # [len(hidden_index), hidden]
    target_logprobs: F32  # [len(target_index)]
    routes: U16 = field(default_factory=lambda: np.zeros((0, 0, 0), np.uint16))  # [len(routes_index), layers, chosen]
    aux: F32 = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))  # [len(aux_index), aux_layers, hidden]
    bad_rows: I32 = field(default_factory=_none)  # sampled rows with no number to draw by


_MASK = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """The draw for token ``position`` of a request: splitmix64 of both, 24 bits, in [0, 1).

    Depends on nothing else, so a request's samples depend neither on its neighbours in the batch nor on
    chunking. Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    z = (seed + 0x9E3779B97F4A7C15 * (position + 1)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return (z >> 40) * (1.0 / (1 << 24))
