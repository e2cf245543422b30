"""What the engine loop is told: limits and policies, resolved before it starts."""

from __future__ import annotations

from dataclasses import field

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.speculative import Speculation
from toolkit.configs.unmasking import Unmasking


@dataclass(frozen=True)
class EngineOptions:
    """``session_len``: prompt and new tokens of one request together. ``max_prefill_token_num``: tokens of prompts that
    one step computes at most, decode tokens included. ``num_blocks``: KV blocks of each cache group.

    ``target_step_ms``: what a step with prompts in it should take while other requests decode; 0 = no limit but
    ``max_prefill_token_num``; None = as ``Pace`` has it.
    ``prefix_caching``: requests share the KV blocks of equal prefixes; without it only the turns of one session do.
    ``max_logit_bytes``: float32 logits rows that one step may return to the host (it limits the chunks of requests
    that want a row for every token; a picture whose tokens see each other is computed whole, though).
    ``lookahead``: schedule the next step while one runs; None = where the runner's ``submit`` returns at once.
    ``pictures_together``: pictures that are encoded at once, at most. ``pictures_kept``: of running requests to models
    that keep keys and values of pictures; one request may have more.
    ``unmasking``: which guesses stay, of models that guess blocks of tokens together.
    ``speculation``: how tokens are guessed that a step then verifies, None: they are not.
    ``never``: tokens that no request draws.
    ``check``: verify the block manager's books whenever the engine falls idle (debugging).
    """

    session_len: int
    max_batch_size: int
    max_prefill_token_num: int
    num_blocks: tuple[int, ...]
    target_step_ms: float | None = 0.0
    prefix_caching: bool = True
    max_logit_bytes: int = 64 << 20
    lookahead: bool | None = None
    pictures_together: int = 1
    pictures_kept: int = 8
    unmasking: Unmasking = field(default_factory=Unmasking)
    speculation: Speculation | None = None
    never: tuple[int, ...] = ()
    check: bool = False
