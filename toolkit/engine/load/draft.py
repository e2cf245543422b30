"""The draft model of an engine: found, checked against its target, planned for and loaded beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.speculative import ALGORITHMS
from toolkit.engine.load.memory_plan import MemoryPlan, show_bytes
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import from_files
from toolkit.models.spec import CacheGroup, DecoderSpec
from toolkit.runners.base import Backend, MemoryNeed, Runner, RunnerError

if TYPE_CHECKING:
    from toolkit.configs.engine import EngineConfig
    from toolkit.engine.drafts.model import DraftModel
    from toolkit.engine.drafts.vocabulary import Vocabulary

FLAG = "speculative_draft_model"
ShareOut = Callable[[MemoryNeed, Seq[CacheGroup]], MemoryPlan]
Found = Callable[[Path], tuple[Path, IO[bytes] | None]]


@dataclass(frozen=True)
class DraftFiles:
    """``path``: where its weights are read, those of ``source``; ``lock``: open as long as ``path`` is to stay."""

    path: Path
    tokenizer_dir: Path
    source: Path
    lock: IO[bytes] | None = field(default=None, compare=False)

    def to_json(self) -> list[str]:
        """Plain values, for another process."""
        return [str(self.path), str(self.tokenizer_dir), str(self.source)]

    @staticmethod
    def from_json(data: list[str]) -> DraftFiles:
        return DraftFiles(Path(data[0]), Path(data[1]), Path(data[2]))


def find_draft(config: EngineConfig, tokenizer_dir: Callable[[Path], Path], packed: Found | None) -> DraftFiles | None:
    """Where the draft model is that a config asks for, fetched where needed. Raises ToolkitError or UsageError."""
    name = config.speculative_draft_model
    if name is None:
        return None
    from toolkit.artifacts.drafts.eagle import is_eagle
    from toolkit.artifacts.source import resolve_model

    if (config.pp, config.dp, config.ep) != (1, 1, 1):
        raise UsageError(f"{FLAG}: runs with tp at most; leave it out, or pp, dp and ep")
    if config.empty_init:
        raise UsageError(f"{FLAG}: not with empty_init: nothing is known of the weights that it is to guess for")
    with flagged():
        path = resolve_model(name, download_dir=config.download_dir)
        if means_assistant(config, path) or means_dflash(config, path):
            return DraftFiles(path, path, path)
        head = means_head(config, path)
        if head:
            if config.speculative_algorithm == "draft_model":
                raise UsageError(f"{path} is a head, no model; use {'eagle' if is_eagle(path) else 'eagle3'}")
            return DraftFiles(path, path, path)
        weights, lock = (path, None) if packed is None else packed(path)
        return DraftFiles(weights, tokenizer_dir(path), path, lock)


def means_assistant(config: EngineConfig, path: Path) -> bool:
    """Whether what is to guess is a small model that reads the larger one's cache. Raises as ``_means``."""
    from toolkit.artifacts.drafts.assistant import is_assistant

    none = f"is no assistant, as {config.speculative_algorithm} expects"
    return _means(config, path, "mtp", is_assistant(path), none, "is an assistant, no head")


def means_dflash(config: EngineConfig, path: Path) -> bool:
    """Whether what is to guess is a draft of DFlash. Raises as ``_means``."""
    from toolkit.artifacts.drafts.dflash import is_dflash

    return _means(config, path, "dflash", is_dflash(path), "is no DFlash draft", "is a DFlash draft")


def _means(config: EngineConfig, path: Path, own: str, found: bool, none: str, one: str) -> bool:
    """``found``: whether ``path`` is a draft of the method ``own``. Raises UsageError where it was to be and is
    ``none``, and where it is ``one`` and was to be another."""
    name = config.speculative_algorithm
    method = None if name is None else ALGORITHMS[name]
    if method == own and not found:
        raise UsageError(f"{FLAG}: {path} {none}; use draft_model, eagle or eagle3")
    if found and method not in (None, own, "draft_model"):
        raise UsageError(f"{FLAG}: {path} {one}; use {own}")
    return found


def means_head(config: EngineConfig, path: Path) -> bool:
    """Whether what is to guess is a head, no model."""
    from toolkit.artifacts.drafts.draft_head import is_head

    return config.speculative_algorithm in ("eagle", "eagle3") or is_head(path)


def means_eagle(config: EngineConfig, path: Path) -> bool:
    """Whether that is an EAGLE head, none of EAGLE-3."""
    from toolkit.artifacts.drafts.eagle import is_eagle

    return config.speculative_algorithm == "eagle" or (config.speculative_algorithm is None and is_eagle(path))


@contextmanager
def flagged() -> Iterator[None]:
    """Errors say that they are about what guesses."""
    try:
        yield
    except ToolkitError as e:
        if str(e).startswith(FLAG):
            raise
        raise type(e)(f"{FLAG}: {e}") from e


def plan_beside(
    mine: MemoryNeed, own: Seq[CacheGroup], need: MemoryNeed, groups: Seq[CacheGroup], share_out: ShareOut,
    names: tuple[str, str, str], states: int = 0,
) -> tuple[MemoryPlan, tuple[int, ...]]:  # fmt: skip
    """How memory is shared out among a target that needs ``need`` and what guesses for it, ``mine``, with a cache of
    its ``own`` groups and ``states`` bytes of hidden states; and the blocks of that cache. ``names``: how errors begin,
    what the plan calls it, and what it says of it. Raises ToolkitError."""
    both = replace(
        need,
        weights=need.weights + mine.weights + states,
        activations_per_token=need.activations_per_token + mine.activations_per_token,
        block_bytes=(*need.block_bytes, *mine.block_bytes),
    )
    begin, name, told = names
    try:
        plan = share_out(both, (*groups, *own))
    except ToolkitError as e:
        share_out(need, groups)  # without it there is not enough either: then it is not about it
        size = f"weights {show_bytes(mine.weights)}" + (f", up to {show_bytes(states)} of states" if states else "")
        raise ToolkitError(f"{begin} ({size}){' and its KV cache' if own else ''}: {e}") from e
    blocks = plan.num_blocks[len(groups) :]
    cache = sum(n * size for n, size in zip(blocks, mine.block_bytes, strict=True))
    taken = {"weights": mine.weights + states, "KV cache": cache}
    rows = [(what, size - taken.get(what, 0), about) for what, size, about in plan.rows]
    counts = "/".join(map(str, blocks))
    rows.append((name, mine.weights, told))
    rows += [("its KV cache", cache, f"{counts} blocks of {plan.block_size} tokens")] if own else []
    rows += [("its states", states, "at most")] if states else []
    return replace(plan, num_blocks=plan.num_blocks[: len(groups)], rows=tuple(rows)), blocks


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
        from toolkit.engine.drafts.model import TOKENS, DraftModel

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
    from toolkit.engine.drafts.vocabulary import LEAST, by_text, equal

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
