"""The drafts of an engine, as its options have them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from toolkit.engine.drafts.draft import Draft
from toolkit.engine.drafts.forced import Forced
from toolkit.engine.drafts.lookup import Lookup
from toolkit.engine.drafts.speculator import Speculator

if TYPE_CHECKING:
    from toolkit.engine.options import EngineOptions
    from toolkit.runners.base import Runner


def speculator(runner: Runner, options: EngineOptions, models: Seq[Draft] = ()) -> Speculator | None:
    """What guesses for the requests of a runner; None where nothing is to be guessed, or blocks of tokens are anyway
    (``DecoderSpec.mask_token``). ``models``: further drafts, that were loaded."""
    chosen, spec = options.speculation, runner.spec
    if chosen is None or spec.mask_token is not None:
        return None
    if not (runner.batch_invariant or chosen.asked or chosen.always):
        return None  # unasked, a guess shall change no bit
    states = any(group.kind == "state" for group in spec.cache_groups)
    rows = max(options.max_batch_size, options.max_logit_bytes // (4 * spec.vocab_size))
    drafts: list[Draft] = [Forced(), Lookup(chosen.shared), *models]
    border = runner.options.block_size if states else 0
    return Speculator(chosen, drafts, spec.vocab_size, border, min(rows, options.max_prefill_token_num))
