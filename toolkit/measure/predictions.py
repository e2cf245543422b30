"""How far the predictions of two models are apart, from logits and log-probabilities in torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.measure.divergence import bounded, perplexity_of


def kl_divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) in nats of log-probabilities [n, vocab], summed over rows. Logarithm by logarithm: exact also where
    both are nearly the same, and with a gradient."""
    return F.kl_div(q, p, reduction="sum", log_target=True)


class Before:
    """Sums over the tokens so far of what a model said before and says after a change, from logits at about half the
    time that log-probabilities take."""

    def __init__(self) -> None:
        self._lost = [0.0, 0.0]
        self._kl = 0.0
        self._agreed = self._tokens = 0

    def add(self, p: Tensor, q: Tensor, targets: Tensor) -> None:
        """Count in logits before and after, [n, vocab], and the tokens that followed [n]. ``p`` is changed."""
        (shares, norm_p, best_p), (_, norm_q, best_q) = _distribution(p), _distribution(q)
        self._lost[0] += float((norm_p - p.gather(1, targets[:, None])[:, 0]).sum())
        self._lost[1] += float((norm_q - q.gather(1, targets[:, None])[:, 0]).sum())
        self._agreed += int((best_p == best_q).sum())
        self._kl += float(torch.dot(shares.flatten(), p.sub_(q).flatten()))  # in place: it is the largest by far
        self._kl += float((norm_q - norm_p).sum())
        self._tokens += len(targets)

    def figures(self) -> dict[str, Any]:
        """perplexity_before, perplexity_after, kl (mean over tokens of KL(before ‖ after), nats), top1_agreement (share
        of tokens where both prefer the same next one), tokens."""
        tokens = self._tokens
        return {
            "perplexity_before": perplexity_of(self._lost[0] / tokens),
            "perplexity_after": perplexity_of(self._lost[1] / tokens),
            "kl": bounded(self._kl / tokens),
            "top1_agreement": self._agreed / tokens,
            "tokens": tokens,
        }


def _distribution(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of ``logits`` [n, vocab]: probabilities, logarithms of their norms [n], the likeliest tokens [n]. The likeliest
    has the share 1 / norm of exp(logit - largest logit): no second pass of exponentials for the logarithm."""
    shares, (largest, best) = logits.softmax(-1), logits.max(-1)
    return shares, largest - shares.gather(1, best[:, None])[:, 0].log(), best
