"""Which files draft for an engine, and of which kind they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.speculative import ALGORITHMS
from toolkit.engine.load.drafts.beside import FLAG, flagged
from toolkit.errors import UsageError

if TYPE_CHECKING:
    from toolkit.configs.engine import EngineConfig

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
