"""Layers beside a model's that draft: all kinds that a runner computes, with the embedding and head, or the cache, of
the model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.drafts.head import ROOM, DraftHead
from toolkit.engine.load.drafts.beside import FLAG, ShareOut, plan_beside
from toolkit.engine.load.memory_plan import MemoryPlan
from toolkit.errors import ToolkitError
from toolkit.models.spec import CacheGroup
from toolkit.runners.base import MemoryNeed, RunnerError

if TYPE_CHECKING:
    from toolkit.runners.drafts.assistant import AssistantHead
    from toolkit.runners.drafts.dflash import DFlashHead
    from toolkit.runners.drafts.mtp import MtpHead


@dataclass
class OpenLayers:
    """Layers whose weights are not loaded yet. ``asked``: they were named; ``option``: by which, as errors begin;
    ``blocks``: of their cache, once planned; ``called``: what they are, to users."""

    path: Path
    head: MtpHead | AssistantHead | DFlashHead
    taps: tuple[int, ...]  # of the model, whose inputs they read
    called: str
    option: str = FLAG
    asked: bool = True
    blocks: tuple[int, ...] = ()
    draft: type[DraftHead] = DraftHead

    @property
    def told(self) -> str:
        """For who waits while it is loaded."""
        return f"loading the {self.called}"

    def plan(self, need: MemoryNeed, groups: Sequence[CacheGroup], share_out: ShareOut) -> MemoryPlan:
        """How memory is shared out among a model that needs ``need`` and this. Raises ToolkitError."""
        names = f"{self.option}: no room for the {self.called} of {self.path}", self.called, str(self.path)
        mine, own = self.head.memory(), self.head.groups
        states = ROOM if own and self.head.runner.device == "cpu" else 0  # they are the host's
        plan, self.blocks = plan_beside(mine, own, need, groups, share_out, names, states)
        return plan

    def load(self, plan: MemoryPlan) -> DraftHead:
        """Weights, cache, and what guesses with them. Raises ToolkitError."""
        try:
            self.head.load(self.blocks)
        except (RunnerError, MemoryError) as e:
            raise ToolkitError(f"{self.option}: {self.path}: its {self.called} cannot be loaded: {e}") from e
        head: Any = self.head  # of the kind that its draft asks
        return self.draft(head, self.taps, plan.session_len, plan.max_prefill_token_num)

    def close(self) -> None:
        """Free what was opened."""
        self.head.close()
