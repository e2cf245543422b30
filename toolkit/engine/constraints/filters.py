"""Rules of drawing that users of llama.cpp know, beyond those of ``SamplingBatch``, on the host in numpy.

What they are from: DRY and XTC by p-e-w (text-generation-webui, pull requests 5677 and 6335), locally typical sampling
(Meister and others, 2022, as transformers has it), top-nσ (Tang and others, 2024), dynamic temperature as in llama.cpp
(``llama-sampler.cpp``). All but the draw itself depends on nothing but the text so far and its logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from toolkit.engine.constraints import host_sampler
from toolkit.engine.request import Filters
from toolkit.runners.step import SamplingBatch, uniform

F32 = NDArray[np.float32]
OTHER_DRAW = 0x9E3779B97F4A7C15  # what the seed of XTC's own draw differs by from that of the token's
DEAD = 1e6  # a penalty that no logit outlives: longer repeats need not be told apart
LONGEST = 1024  # tokens of a repeat that are looked at


class Filtering:
    """The filters of one request. ``spoken``: the bytes that each token says; only with DRY they are looked at."""

    def __init__(self, filters: Filters, spoken: Sequence[bytes] = ()) -> None:
        self.filters = filters
        self._spoken = spoken
        self._breakers = [text.encode("utf-8", "surrogatepass") for text in filters.dry_sequence_breakers]

    def penalized(self, x: F32, tokens: NDArray[np.int32]) -> F32:
        """Logits [V], changed in place, after DRY: the penalty of a token that would go on with a repeat of the end of
        ``tokens`` is multiplier × base^(length of the repeat − allowed length)."""
        f = self.filters
        if not f.repeats:
            return x
        if f.dry_penalty_last_n > 0:
            tokens = tokens[-f.dry_penalty_last_n :]
        for token, length in self._longest_repeats(tokens).items():
            if length >= f.dry_allowed_length and token < len(x):
                power = min((length - f.dry_allowed_length) * math.log(f.dry_base), math.log(DEAD))
                x[token] -= f.dry_multiplier * math.exp(power)
        return x

    def draw(self, x: F32, s: SamplingBatch, row: int) -> int:
        """``host_sampler.draw`` of adjusted logits [V] with these filters: top-nσ, then its own cuts, typical, XTC.
        Temperature comes first, except that with ``dynatemp_range`` it is found from what the cuts leave."""
        f, temperature = self.filters, float(s.temperature[row])
        if temperature == 0 or not f.draws:
            return host_sampler.draw(x, s, row)
        if f.top_n_sigma > 0:
            known = x[np.isfinite(x)].astype(np.float64)
            x = np.where(x >= x.max() - f.top_n_sigma * known.std(), x, -np.inf).astype(np.float32)
        moves = f.dynatemp_range > 0
        p = host_sampler.probabilities(x, 1.0 if moves else temperature)
        kept = host_sampler.kept(p, s, row)
        kept = typical(p, kept[np.isfinite(x[kept])], f.typical_p)  # what is ruled out is no choice
        if f.xtc_probability > 0 and uniform(int(s.seed[row]) ^ OTHER_DRAW, int(s.position[row])) < f.xtc_probability:
            kept = without_top_choices(p if moves else host_sampler.probabilities(x, 1.0), kept, f.xtc_threshold)
        if moves:
            temperature = self._moved(p[kept], temperature)
        p = np.zeros(len(x))
        p[kept] = host_sampler.probabilities(x[kept], temperature)  # beside those cut they may be too small for numbers
        return host_sampler.chosen(p, kept, s, row)

    def _moved(self, p: NDArray[np.float64], temperature: float) -> float:
        """The temperature for probabilities [n] of what may be drawn: low where one token is nearly certain."""
        f = self.filters
        low, high = max(0.0, temperature - f.dynatemp_range), temperature + f.dynatemp_range
        if len(p) <= 1:
            return high
        p = p / p.sum()
        entropy = -(p * np.log(np.maximum(p, np.finfo(np.float64).tiny))).sum() / math.log(len(p))
        return max(low + (high - low) * float(min(max(entropy, 0.0), 1.0)) ** f.dynatemp_exponent, 1e-3)

    def _longest_repeats(self, tokens: NDArray[np.int32]) -> dict[int, int]:
        """Tokens that stood behind an earlier place which ends as ``tokens`` end, with how many tokens are alike there
        at most. What is alike holds no sequence breaker."""
        length, found = len(tokens), dict[int, int]()
        most = min(self._since_breaker(tokens), self._tell_apart(), length - 1)
        if most <= 0:
            return found
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])  # where those places end
        alike = 1
        while len(ends):
            going_on = np.zeros(0, np.int64)
            if alike < most:
                inside = ends[ends >= alike]
                going_on = inside[tokens[inside - alike] == tokens[length - 1 - alike]]
            for token in np.unique(tokens[np.setdiff1d(ends, going_on) + 1]).tolist():
                found[token] = alike  # later ones are longer
            ends, alike = going_on, alike + 1
        return found

    def _tell_apart(self) -> int:
        """From which length on repeats need not be told apart."""
        f = self.filters
        rise = math.log(f.dry_base)
        return min(LONGEST, f.dry_allowed_length + (math.ceil(math.log(DEAD) / rise) if rise > 0 else 1))

    def _since_breaker(self, tokens: NDArray[np.int32]) -> int:
        """Tokens behind the one in which the last breaker ends, which may have begun in one before it."""
        last = tokens[-LONGEST:].tolist()
        if not self._breakers:
            return len(last)
        said = [self._spoken[token] if token < len(self._spoken) else b"" for token in last]
        text = b"".join(said)
        end = max((at + len(b) for b in self._breakers if (at := text.rfind(b)) >= 0), default=0)
        left, count = len(text) - end, 0
        for part in reversed(said):
            left -= len(part)
            if left < 0:
                break
            count += 1
        return count


def typical(p: NDArray[np.float64], kept: NDArray[np.int64], mass: float) -> NDArray[np.int64]:
    """Of tokens ``kept``, with probabilities ``p`` [V], those whose information is nearest to the expected one and that
    have ``mass`` together; at least one."""
    if mass >= 1:
        return kept
    own = p[kept] / p[kept].sum()
    information = -np.log(np.maximum(own, np.finfo(np.float64).tiny))
    far = np.abs(information - (own * information).sum())
    order = np.argsort(far, kind="stable")
    last = min(int((np.cumsum(own[order]) < mass).sum()), len(order) - 1)
    return kept[far <= far[order[last]]]


def without_top_choices(p: NDArray[np.float64], kept: NDArray[np.int64], threshold: float) -> NDArray[np.int64]:
    """Of tokens ``kept``, where two or more have at least the probability ``threshold``, not those but the least
    probable of them (of equal ones the highest id)."""
    own = p[kept] / p[kept].sum()
    viable = np.flatnonzero(own >= threshold)
    if len(viable) < 2:
        return kept
    stays = viable[np.flatnonzero(own[viable] == own[viable].min())[-1]]
    return np.delete(kept, viable[viable != stays])
