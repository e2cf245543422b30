"""A stage writes one directory, whole or not at all, and goes on where it was killed.

Everything is built in a hidden sibling of the target, ``.NAME.partial/``:

    lock        held (flock) by the process at work
    key.json    digest of input, options and tool version; a run with another key starts anew
    state/      results saved on the way (one file a layer, say), which a later run with the same key takes over
    out/        the future artifact; renamed to the target as the last act
    old/        the artifact that was the target while it is being replaced; deleted file by file (``replace.py``)

A single file (``write_file``) has a lock of the same kind and is built as ``.NAME.partial/file``, what belongs to it in
``beside/``; what that takes the place of waits in ``replaced/`` until the file is in its own.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

from toolkit import __version__
from toolkit.artifacts.manifest import Manifest, describe_file, read_manifest, write_manifest
from toolkit.artifacts.output.partial import discard_partial, drop_old, drop_partial, lock_partial, partial_dir
from toolkit.artifacts.output.replace import check_directory_target, foreign
from toolkit.artifacts.weight_files.safetensors_file import array_bytes, read_metadata, write_tensors
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.whole_file import sync
from toolkit.errors import ToolkitError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

_FULL = (errno.ENOSPC, errno.EDQUOT)


_begun: list[Stage] = []


def left_behind() -> Path | None:
    """Where a stage of this process that has not ended has saved what it has done; the same command goes on there."""
    for run in _begun:
        if not (run.finished or run.already_there) and any((run.partial / "state").glob("*.safetensors")):
            return run.partial
    return None


@dataclass
class Stage:
    """A run of a stage; made by ``open_stage``. ``dir`` is where the artifact's files are to be written."""

    target: Path
    kind: str
    stage: str
    parent: dict[str, Any]
    options: dict[str, Any]
    already_there: bool = False
    finished: bool = field(default=False, repr=False)

    @property
    def partial(self) -> Path:
        return partial_dir(self.target)

    @property
    def earlier(self) -> Manifest | None:
        """Of this very result, where the target held it before: nothing is to be done."""
        return read_manifest(self.target) if self.already_there else None

    @property
    def dir(self) -> Path:
        return self.partial / "out"

    def _state(self, key: str) -> Path:
        return self.partial / "state" / f"{quote(key, safe='')}.safetensors"

    def done(self, key: str) -> bool:
        """Whether an earlier or this run saved ``key`` and the file is intact (its digest is checked)."""
        if not self._state(key).is_file():
            return False
        try:
            found = {name: _digest(tensor) for name, tensor in self.load(key).items()}
            return read_metadata(self._state(key)).get("digest") == _together(found)
        except ToolkitError:  # torn by a power failure: as good as absent
            return False

    def saved(self) -> set[str]:
        """The keys that this or an earlier run has saved something under, whether intact or not."""
        return {unquote(file.stem) for file in (self.partial / "state").glob("*.safetensors")}

    def load(self, key: str) -> Mapping[str, Tensor]:
        """The tensors saved under ``key``, each read when it is asked for."""
        from toolkit.artifacts.weight_files.tensor_file import TensorFile

        return TensorFile(self._state(key))

    def load_meta(self, key: str) -> dict[str, Any]:
        """The ``meta`` saved under ``key``."""
        return json.loads(read_metadata(self._state(key))["meta"])

    def save(
        self,
        key: str,
        tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        """Keep tensors and JSON values so that a killed run need not compute them again. Atomic.

        ``tensors`` may be a stream, of which one is held at a time; ``meta`` is read after the last of them.
        """
        digests: dict[str, str] = {}
        metadata: dict[str, str] = {}

        def watched() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
                digests[name] = _digest(tensor)
                yield name, tensor
                del tensor  # before the next one is made
            metadata.update(digest=_together(digests), meta=json.dumps(dict(meta or {})))

        write_tensors(self._state(key), watched(), metadata)

    def finish(self, quality: Mapping[str, Any] | None = None, boot: str = "") -> Manifest:
        """Write the manifest, bring everything to disk and rename the artifact to its target.

        ``boot``: nothing is brought to disk, and digests of tensors are ``manifest.pending``: who opens it looks after
        that, and takes it for none once the system has been started again.
        """
        assert not self.already_there and not self.finished
        files = [describe_file(self.dir, file, boot) for file in sorted(self.dir.rglob("*")) if file.is_file()]
        manifest = Manifest(
            kind=self.kind,
            stage=self.stage,
            tool_version=__version__,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            parent=self.parent,
            options=self.options,
            quality=dict(quality or {}),
            files=files,
            size_bytes=sum(entry.size for entry in files),
        )
        write_manifest(self.dir, manifest)
        if not boot:
            for file in sorted(self.dir.rglob("*"), reverse=True):
                sync(file)
            sync(self.dir)
        if self.target.exists():
            check_directory_target(self.target, overwrite=True)  # what came into it while the stage was at work
            os.rename(self.target, self.partial / "old")
        os.rename(self.dir, self.target)
        if not boot:
            sync(self.target.parent)
        self.finished = True
        return manifest


@contextmanager
def open_stage(
    target: Path | str,
    *,
    kind: str,
    stage: str,
    parent: dict[str, Any],
    options: Mapping[str, Any],
    overwrite: bool = False,
    reuse: bool | None = None,
    wait: bool = False,
) -> Iterator[Stage]:
    """Run a stage that writes ``target``. ``parent``: from ``manifest.describe_parent``; ``options``: JSON values, all
    that the result depends on.

    The stage has ``already_there`` set if the target holds the result of the same input, options and tool version, and
    ``reuse`` (default: not ``overwrite``). ``wait`` for another process at work on the same target.
    Raises UsageError where ``replace.check_directory_target`` does, or if the target is not empty and ``overwrite`` is
    not given; ToolkitError if the disk is full or another process writes the same target.
    A body that fails leaves the target as it was; what it has saved stays for the next run.
    """
    shown, target = Path(target), Path(target).resolve()
    run = Stage(target, kind, stage, parent, json.loads(json.dumps(dict(options))))
    inputs = [Path(parent["path"])] if parent.get("path") and parent.get("hub_id") is None else []
    key = _key(kind, stage, parent, run.options, __version__)
    reuse = not overwrite if reuse is None else reuse
    if reuse and _holds(target, key):
        run.already_there = True
        if _left_by(run, key):  # the run that made the target was killed when it was in its place already
            discard_partial(run.target)
        yield run
        return
    check_directory_target(shown, inputs, overwrite)
    try:
        lock = lock_partial(run.partial, shown, wait)
    except OSError as error:
        raise ToolkitError(f"{shown}: cannot be written: {error.strerror}") from error
    try:
        _restore(run)
        run.already_there = reuse and _holds(target, key)
        if not run.already_there:
            check_directory_target(shown, inputs, overwrite)  # another run may just have ended
            if not overwrite and target.is_dir() and any(target.iterdir()):
                raise UsageError(
                    f"{shown}: not empty, and not the result of this command; give --overwrite to replace it"
                )
            _prepare(run, key)
        _begun.append(run)
        yield run
        assert run.finished or run.already_there, "a stage ended without finish()"
    except Exception as error:
        _explain(shown, error)
        raise
    finally:
        _clean(run)
        lock.close()


@contextmanager
def write_file(target: Path, beside: Sequence[str] = ()) -> Iterator[Path]:
    """A path to write a single file at, which replaces ``target`` when the body ends; nothing of it stays if it fails.

    ``beside``: names of files in the same directory that belong to it. What the body has written by them in the folder
    ``beside`` next to that path replaces them with ``target``; those that it has not written go.
    Raises ToolkitError if it cannot be written, the disk is full or another process writes the same target.
    """
    real = target.resolve()
    partial = partial_dir(real)
    try:
        lock = lock_partial(partial, target, wait=False)
    except OSError as error:
        raise ToolkitError(f"{target}: cannot be written: {error.strerror}") from error
    try:
        _settle(partial, real)
        if beside:
            (partial / "beside").mkdir()
        yield partial / "file"
        _replace(partial, real, beside)
    except Exception as error:
        _explain(target, error)
        if isinstance(error, OSError):
            raise ToolkitError(f"{target}: cannot be written: {error.strerror}") from error
        raise
    finally:
        _settle(partial, real)
        (partial / "file").unlink(missing_ok=True)
        if len(list(partial.iterdir())) == 1:  # what a killed run left for a directory of that name stays, and the lock
            drop_partial(partial)
        lock.close()


def _replace(partial: Path, target: Path, beside: Sequence[str]) -> None:
    """Put what was written in place. All of it is on disk before: what follows takes no time."""
    new = sorted((partial / "beside").iterdir()) if beside else []
    for path in (partial / "file", *new):
        sync(path)
    if beside:
        (partial / "replaced").mkdir()
    for name in beside:
        if (target.parent / name).exists():
            os.rename(target.parent / name, partial / "replaced" / name)
    os.replace(partial / "file", target)
    _settle(partial, target)
    sync(target.parent)


def _settle(partial: Path, target: Path) -> None:
    """Beside ``target`` all is of the new one if it is in place, else of the old, wherever a run was killed."""
    if (partial / "replaced").is_dir():
        source = partial / ("replaced" if (partial / "file").exists() else "beside")
        for file in source.iterdir():
            os.rename(file, target.parent / file.name)
        shutil.rmtree(partial / "replaced")
    shutil.rmtree(partial / "beside", ignore_errors=True)


def _explain(shown: Path, error: Exception) -> None:
    """Raise ToolkitError where ``error`` says that there is no room for what is written."""
    if _disk_full(error):
        raise ToolkitError(f"{shown}: disk full while writing; free some space and run the same command") from error
    if isinstance(error, OSError) and error.errno == errno.EFBIG:
        raise ToolkitError(
            f"{shown}: a file grew beyond what the disk or ulimit -f allows; run it elsewhere"
        ) from error


def _key(kind: str, stage: str, parent: dict[str, Any], options: dict[str, Any], tool_version: str) -> str:
    facts = [kind, stage, parent.get("digest"), options, tool_version]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _holds(target: Path, key: str) -> bool:
    """Whether ``target`` is a complete artifact made under ``key``."""
    try:
        found = read_manifest(target)
    except ToolkitError:
        return False
    if found is None or _key(found.kind, found.stage, found.parent, found.options, found.tool_version) != key:
        return False
    files = [(target / entry.name, entry.size) for entry in found.files]
    return all(file.is_file() and file.stat().st_size == size for file, size in files)


def _restore(run: Stage) -> None:
    """Put the target back if the former holder of the lock was killed between the two renames of ``finish``."""
    old = run.partial / "old"
    if old.exists() and not run.target.exists():
        os.rename(old, run.target)


def _prepare(run: Stage, key: str) -> None:
    """Empty ``out``, keep ``state`` if it was saved under the same key."""
    drop_old(run.partial)
    if (run.partial / "old").exists():
        names = ", ".join(foreign(run.partial / "old")[:5])
        raise UsageError(f"{run.partial / 'old'}: holds {names}, which this tool did not make; move it away")
    for name in ("out", *(() if _left_by(run, key) else ("state",))):
        shutil.rmtree(run.partial / name, ignore_errors=True)
    (run.partial / "key.json").write_text(key, encoding="utf-8")
    (run.partial / "state").mkdir(exist_ok=True)
    run.dir.mkdir()


def _left_by(run: Stage, key: str) -> bool:
    """Whether a run under ``key`` has left the partial directory."""
    file = run.partial / "key.json"
    return file.is_file() and file.read_text(encoding="utf-8") == key


def _clean(run: Stage) -> None:
    """After success nothing of the partial directory stays; after a failure what was saved does."""
    _restore(run)
    state = run.partial / "state"
    if run.finished or not state.is_dir() or not any(state.glob("*.safetensors")):
        drop_partial(run.partial)
    else:
        shutil.rmtree(run.dir, ignore_errors=True)


def _disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return "No space left on device" in str(error)  # as torch and safetensors report it


def _digest(tensor: Any) -> str:
    return hashlib.sha256(array_bytes(tensor)[0].data).hexdigest()


def _together(digests: Mapping[str, str]) -> str:
    """One digest of tensors by name, whatever their order."""
    return hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()
