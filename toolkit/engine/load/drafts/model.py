"""A smaller model that drafts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.drafts.model import TOKENS, DraftModel
from toolkit.engine.drafts.vocabulary import LEAST, Vocabulary, by_text, equal
from toolkit.engine.load.drafts.beside import FLAG, ShareOut, flagged, plan_beside
from toolkit.engine.load.drafts.find import DraftFiles
from toolkit.engine.load.memory_plan import MemoryPlan, show_bytes
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import from_files
from toolkit.models.spec import CacheGroup, DecoderSpec
from toolkit.runners.base import Backend, MemoryNeed, Runner, RunnerError

if TYPE_CHECKING:
    from toolkit.configs.engine import EngineConfig


@dataclass
class OpenDraft:
    """A draft model that is not loaded yet. ``blocks``: of its cache, once they are planned."""

    path: Path
    runner: Runner
    vocabulary: Vocabulary
    blocks: tuple[int, ...] = ()

    def plan(self, need: MemoryNeed, groups: Seq[CacheGroup], share_out: ShareOut) -> MemoryPlan:
        """How memory is shared out among a target that needs ``need`` and this. Raises ToolkitError."""
        mine, own = self.runner.memory(), self.runner.spec.cache_groups
        name = f"{FLAG}: no room for {self.path}"
        plan, self.blocks = plan_beside(mine, own, need, groups, share_out, (name, "draft model", str(self.path)))
        return plan

    @property
    def told(self) -> str:
        """For who waits while it is loaded."""
        return f"loading the draft model with the {self.runner.name} runner"

    def close(self) -> None:
        """Free what was opened."""
        self.runner.close()

    def load(self, plan: MemoryPlan) -> DraftModel:
        """Weights, cache, and what guesses with them. Raises ToolkitError."""
        try:
            self.runner.load_weights()
            self.runner.allocate_cache(self.blocks)
            self.runner.warm_up(plan.max_batch_size, plan.session_len, TOKENS)
        except (RunnerError, MemoryError) as e:
            raise ToolkitError(f"{FLAG}: {self.path}: cannot be loaded: {e}; use a smaller one") from e
        return DraftModel(self.runner, self.blocks, plan.max_batch_size, plan.session_len, self.vocabulary)


def open_draft(
    files: DraftFiles, target: Runner, tokenizer_dir: Path, config: EngineConfig, backend: Backend | None
) -> OpenDraft:
    """The draft of ``target``, without weights. Raises ToolkitError or UsageError where it is none for it."""
    from toolkit.runners.choose import open_runner

    families = from_files(getattr(config, "family_files", ()))
    options = replace(target.options, adapters=(), adapter_memory=0, kv_layers=(), key_means="")
    options = replace(options, batch_invariant=False)  # guesses change no answer
    with flagged():
        runner, _ = open_runner(files.path, backend=backend, options=options, blind=True, families=families)
    try:
        if why := _unfit(runner.spec):
            raise UsageError(f"{FLAG}: {files.source} {why}; use a decoder with attention alone")
        mine, its = config.tp * target.memory().weights, runner.memory().weights  # a rank has about a part of all
        if its > mine:
            sizes = f"{show_bytes(its)} of weights, the model has {show_bytes(mine)}"
            raise UsageError(
                f"{FLAG}: {files.source} is larger than the model it guesses for ({sizes}); use a smaller one"
            )
        vocabulary = match(tokenizer_dir, files, target.spec.vocab_size, runner.spec.vocab_size)
        return OpenDraft(files.source, runner, vocabulary)
    except BaseException:
        runner.close()
        raise


def _unfit(spec: DecoderSpec) -> str:
    """Why a model cannot guess, "" if it can."""
    if any(group.kind == "state" for group in spec.cache_groups):
        return "keeps recurrent states, which cannot be cut back to the tokens that came true"
    if spec.mask_token is not None or spec.encodes or spec.mutual:
        return "does not write a text token by token"
    return ""


def match(tokenizer_dir: Path, files: DraftFiles, rows: int, draft_rows: int) -> Vocabulary:
    """How the tokens of a draft are those of its target, which have so many. Raises UsageError where too few are."""
    from toolkit.artifacts.text.tokenizer import Tokenizer

    names = tokenizer_dir / "tokenizer.json", files.tokenizer_dir / "tokenizer.json"
    if all(name.is_file() for name in names) and names[0].read_bytes() == names[1].read_bytes():
        return equal(rows, draft_rows)
    with flagged():
        mine, its = (Tokenizer.open(where).token_bytes for where in (tokenizer_dir, files.tokenizer_dir))
    if mine == its:
        return equal(rows, draft_rows)
    vocabulary, share = by_text(mine, its, (rows, draft_rows))
    if share < LEAST:
        raise UsageError(
            f"{FLAG}: {files.source} has another vocabulary: of the model's {len(mine)} tokens it knows "
            f"{100 * share:.0f} %, expected {100 * LEAST:.0f} % or more; use a draft of the same family"
        )
    return vocabulary
