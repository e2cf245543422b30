"""What an engine is to be opened with: from a model's name and a config to what another process can be told."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import IO, Any

from toolkit.artifacts.engine.adapters import packed_adapters
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import read
from toolkit.configs.engine import EngineConfig, PytorchEngineConfig, TurbomindEngineConfig
from toolkit.configs.moving import EngineRole
from toolkit.engine.load import ranks
from toolkit.engine.load.drafts.find import DraftFiles, find_draft
from toolkit.engine.load.memory_plan import MemoryPlan
from toolkit.errors import UsageError
from toolkit.runners.base import Backend

log = logging.getLogger(__name__)
Progress = Callable[[str], None]
# A model's path → where its weights are to be read, and the lock that keeps them there, held until the engine ends.
Packed = Callable[[Path], tuple[Path, IO[bytes] | None]]
CONFIGS: dict[str, type[TurbomindEngineConfig] | type[PytorchEngineConfig]] = {
    "turbomind": TurbomindEngineConfig,
    "pytorch": PytorchEngineConfig,
}


@dataclass(frozen=True)
class Setup:
    """What to open. ``path``: local directory or .gguf file with the weights; ``backend`` None: what runs here.

    ``lock``: open as long as ``path`` is to stay; not told to another process. ``pictures_together``: as of
    ``EngineOptions``. ``source``: the model that ``path`` is a packed copy of, else ``path`` too. ``updated``: where
    the weights are that have taken the place of the model's. ``loaded``: adapters that have come since by their
    numbers, ``unloaded``: those that have gone. ``sources``: the engines that lend, by their ids: where, and whether
    they speak TLS. ``draft``: the model that guesses.
    """

    path: Path
    tokenizer_dir: Path
    config: EngineConfig
    backend: Backend | None
    lock: IO[bytes] | None = None
    pictures_together: int = 1
    source: Path | None = None
    updated: Path | None = None
    loaded: dict[int, str] = field(default_factory=dict)
    unloaded: tuple[int, ...] = ()
    sources: dict[str, tuple[str, bool]] = field(default_factory=dict)
    draft: DraftFiles | None = None

    @property
    def locks(self) -> list[IO[bytes]]:
        """Those of all that is read."""
        found = (self.lock, None if self.draft is None else self.draft.lock)
        return [lock for lock in found if lock is not None]

    @property
    def adapters(self) -> tuple[tuple[str, str], ...]:
        """Those of the start by their numbers, (name, directory); no directory of one that has gone: its files may be
        gone too."""
        given = enumerate((self.config.adapters or {}).items())
        return tuple((name, "" if number in self.unloaded else path) for number, (name, path) in given)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for another process."""
        kind = "pytorch" if isinstance(self.config, PytorchEngineConfig) else "turbomind"
        return {
            "path": str(self.path),
            "tokenizer_dir": str(self.tokenizer_dir),
            "kind": kind,
            "config": asdict(self.config),
            "backend": self.backend,
            "pictures_together": self.pictures_together,
            "source": None if self.source is None else str(self.source),
            "updated": None if self.updated is None else str(self.updated),
            "loaded": list(self.loaded.items()),
            "unloaded": list(self.unloaded),
            "sources": {engine: list(at) for engine, at in self.sources.items()},
            "draft": None if self.draft is None else self.draft.to_json(),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Setup:
        config = read(CONFIGS[data["kind"]], data["config"])
        paths = Path(data["path"]), Path(data["tokenizer_dir"])
        source, updated = (None if data[name] is None else Path(data[name]) for name in ("source", "updated"))
        adapters = {int(number): str(where) for number, where in data["loaded"]}, tuple(data["unloaded"])
        sources = {engine: (str(at), bool(secure)) for engine, (at, secure) in data["sources"].items()}
        together = data["pictures_together"]
        draft = None if data["draft"] is None else DraftFiles.from_json(data["draft"])
        return Setup(*paths, config, data["backend"], None, together, source, updated, *adapters, sources, draft)


def set_up_after(name: str, arguments: list[Any], setup: Setup) -> Setup:
    """What an engine is to be opened with again once its core's method ``name`` has been called."""
    if name == "update_weights":
        return replace(setup, updated=Path(arguments[0]))
    if name == "load_adapter":
        return replace(setup, loaded=setup.loaded | {arguments[0]: arguments[1]})
    if name == "unload_adapter":
        return replace(setup, unloaded=(*setup.unloaded, arguments[0]))
    if name == "use_source":
        return replace(setup, sources=setup.sources | {arguments[0]: (arguments[1], arguments[2])})
    if name == "drop_source":
        return replace(setup, sources={engine: at for engine, at in setup.sources.items() if engine != arguments[0]})
    return setup


@dataclass(frozen=True)
class Facts:
    """What a front end wants to know of an opened engine. ``runner_why``: why the model runs otherwise than was asked
    for or is fastest, "" if it does not; ``runner_note``: what else is worth knowing of the runner. ``blind``: pictures
    are not taken, whatever the model. ``engine_id``: of this start; ``lends_at``: where others ask for blocks, "" =
    nowhere, by TLS or not; ``in_common``: what two engines must have in common to hand blocks over, by name, {} where
    this one does not."""

    plan: MemoryPlan
    runner_why: str
    runner_note: str
    runner: str
    backend: Backend
    device: str
    dtype: str
    vocab_size: int
    blind: bool = False
    engine_id: str = ""
    lends_at: str = ""
    lends_by_tls: bool = False
    in_common: dict[str, str] = field(default_factory=dict)

    def alone(self) -> Facts:
        """Of an engine that hands no blocks over."""
        return replace(self, engine_id="", lends_at="", lends_by_tls=False, in_common={})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Facts:
        return read(Facts, data)


def find(model: str, config: EngineConfig | None, backend: Backend | None, packed: Packed | None = None) -> Setup:
    """Resolve MODEL (fetching it where needed) and settle the backend. ``packed``: where a model at a path lies packed.
    Raises ToolkitError or UsageError."""
    from toolkit.artifacts.source import resolve_adapters, resolve_model

    if config is None:
        config = PytorchEngineConfig() if backend == "pytorch" else TurbomindEngineConfig()
    elif not isinstance(config, (TurbomindEngineConfig, PytorchEngineConfig)):
        wanted = "a TurbomindEngineConfig or PytorchEngineConfig"
        raise UsageError(f"backend_config: expected {wanted}, found {type(config).__name__}")
    elif backend is None:
        backend = "pytorch" if isinstance(config, PytorchEngineConfig) else "turbomind"
    ranks.check(config)
    if config.role != EngineRole.Hybrid:
        from toolkit.engine.load.moving import check_moving_files

        check_moving_files(config)
    path = resolve_model(model, revision=config.revision, download_dir=config.download_dir)
    held = packed_adapters(path)
    if config.adapters or held:
        asked = {
            name: where for name, where in (config.adapters or {}).items() if held.get(name) is None or where != name
        }
        found = {name: str(where) for name, where in resolve_adapters(asked, path).items()}
        order = dict.fromkeys([*(config.adapters or {}), *held])  # those asked for first: chats take the first
        config = replace(config, adapters={name: (held | found)[name] for name in order})
    weights, lock = (path, None) if packed is None else packed(path)
    draft = find_draft(config, tokenizer_dir, packed)
    return Setup(weights, tokenizer_dir(path), config, backend, lock, source=path, draft=draft)


def tokenizer_dir(path: Path) -> Path:
    """Where the tokenizer of a model lies: its directory; for a GGUF file what was extracted from it."""
    from toolkit.artifacts.checkpoint import check_directory, open_checkpoint

    if path.is_dir():
        check_directory(path)  # before anything says that a directory of another kind lacks a tokenizer
        return path
    return open_checkpoint(path).tokenizer_dir
