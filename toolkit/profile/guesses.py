"""What came of guessed tokens during a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def guesses_row(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of an engine's ``stats``, empty where it verified no guess: guesses, their tokens, what share of these
    came true, tokens that a step with a guess gave, and by place in the guess the share of guesses right so far."""
    guesses, tokens = stats.get("spec_drafts", 0), stats.get("spec_draft_tokens", 0)
    if not guesses:
        return {}
    right = stats["spec_accepted_tokens"]
    places = [round(count / guesses, 4) for count in stats["spec_accepted_by_place"]]
    while places and not places[-1]:
        places.pop()
    return {
        "drafts": guesses,
        "draft_tokens": tokens,
        "acceptance_rate": round(right / tokens, 4),
        "tokens_per_step": round(1 + right / guesses, 3),
        "acceptance_by_position": places,
        "by_method": stats.get("spec_by_method", {}),
    }
