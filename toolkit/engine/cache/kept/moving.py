"""Both ends of handing blocks over: what this engine lends, and from whom it takes.

What is lent lies sealed in a folder of this engine's own in memory (``/dev/shm``). Engines of the same user on this
machine read it there; others ask at the port. The folder goes with the engine; that of one that was killed goes when
the next one starts, for nobody holds its lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import ssl
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.base.lazy_dataclass import dataclass
from toolkit.engine.cache.block_manager import BlockManager
from toolkit.engine.cache.kept.block import Cipher, Digest, Seal
from toolkit.engine.cache.kept.folder import Folder, open_root
from toolkit.engine.cache.kept.lender import Lender
from toolkit.engine.cache.kept.peer import Peer
from toolkit.engine.cache.kept.port import Port
from toolkit.engine.cache.kept.shelf import Counts, Files, Source
from toolkit.errors import ToolkitError, UsageError

if TYPE_CHECKING:
    from toolkit.runners.base import Runner

FLAG = "kv_transfer_memory"
KEEP_SECONDS = 600.0  # that blocks are lent which nobody asks for
ENGINE = re.compile(r"[0-9a-f]{32}")
_MODEL = 32  # digits of a model's folder
_SHORT = 64  # characters


def shared_memory() -> Path:
    """Where this user's engines lend."""
    memory = Path("/dev/shm")
    return (memory if memory.is_dir() else Path(tempfile.gettempdir())) / f"toolkit-kv-{os.geteuid()}"


@dataclass
class Moving:
    """``facts``: by name what two engines must have in common, for people too; ``sizes``: bytes of a block of each
    cache group; ``secret``: None: this machine alone. ``lends``, ``takes``: what this engine does; ``port_at``: where
    others ask, None: nowhere; ``most``: bytes that are lent; ``backends``: of "shm" and "tcp", ways to take. ``id``:
    the engine's, new at every start."""

    facts: dict[str, str]
    sizes: Sequence[int]
    secret: bytes | None
    lends: bool
    takes: bool
    port_at: str | None = None
    tls: ssl.SSLContext | None = None
    most: int = 1 << 30
    backends: tuple[str, ...] = ("shm", "tcp")
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        """Raises UsageError, ToolkitError for a folder or port that cannot be had, or no room for a block."""
        if self.lends and self.most < (block := max(self.sizes)):
            raise UsageError(f"{FLAG}: expected at least {block} bytes, a block of this model, found {self.most}")
        self.seal: Seal = Digest() if self.secret is None else Cipher(self.secret)
        self._told = {**self.facts, "kv_transfer_key": self.seal.name}
        self.model = hashlib.sha256(json.dumps(self._told, sort_keys=True).encode()).digest()
        self.port: Port | None = None
        self._root: Path | None = None
        if self.lends:
            self._shelf = self._open()

    @property
    def address(self) -> str:
        """Where others ask for blocks, "": nowhere."""
        return "" if self.port is None else self.port.address

    @property
    def in_common(self) -> dict[str, str]:
        """``facts`` and which key, for others to compare; what is long as a digest of it."""
        return {name: _short(value) for name, value in self._told.items()}

    def lender(self, runner: Runner, blocks: BlockManager) -> Lender | None:
        return Lender(self._shelf, runner, blocks, self.close) if self.lends else None

    def source(self, engine_id: str, address: str, secure: bool) -> Source:
        """Another engine: in this machine's memory where its folder is there, else at ``address``. Raises ToolkitError
        where there is no way to it, UsageError for an address that is none."""
        if not ENGINE.fullmatch(engine_id):
            raise ToolkitError(f"remote_engine_id: expected 32 hexadecimal digits, found {engine_id!r:.80}")
        root = shared_memory() / engine_id
        if "shm" in self.backends and root.is_dir():
            files = Folder(FLAG, root, self.model.hex()[:_MODEL], {})
            return Files(files, self.model, self.seal, self.sizes, 0, KEEP_SECONDS)
        if "tcp" not in self.backends or not address or self.secret is None:
            whys = ["it is not in this machine's memory"] if "shm" in self.backends else []
            if "tcp" not in self.backends:
                whys.append("by migration_backend no address is asked here")
            else:
                whys.append("no kv_transfer_key is given here" if address else "it lends at no address")
            raise ToolkitError(f"engine {engine_id[:8]} cannot be reached: {', and '.join(whys)}")
        return Peer(address, self.secret, self.model, self.seal, self.sizes, self.counts, secure)

    def close(self) -> None:
        """Lend nothing any more."""
        if self.port is not None:
            self.port.close()
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            os.close(self._lock)
            self.port, self._root = None, None

    def _open(self) -> Files:
        base = shared_memory()
        os.close(open_root(FLAG, base))
        _remove_abandoned(base)
        root = base / self.id
        self._lock = _locked(root)
        while not root.exists():  # another engine that starts has found it before it was locked
            os.close(self._lock)
            self._lock = _locked(root)
        self._root = root
        folder = Folder(FLAG, root, self.model.hex()[:_MODEL], self.facts)
        try:
            if self.port_at is not None:
                assert self.secret is not None  # the options say so
                self.port = Port("kv_transfer_address", self.port_at, self.secret, self.model, folder, self.tls)
        except BaseException:
            self.close()
            raise
        return Files(folder, self.model, self.seal, self.sizes, self.most, KEEP_SECONDS)


def _locked(root: Path) -> int:
    fd = open_root(FLAG, root)
    fcntl.flock(fd, fcntl.LOCK_EX)
    return fd


def _short(value: str) -> str:
    return value if len(value) <= _SHORT else hashlib.sha256(value.encode()).hexdigest()


def _remove_abandoned(base: Path) -> None:
    """Folders of engines that have ended without doing so."""
    for folder in base.iterdir():
        if ENGINE.fullmatch(folder.name) and not folder.is_symlink():
            with suppress(OSError):
                fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
                finally:
                    os.close(fd)
