"""What a command may write over: an artifact of ours, as its manifest lists it. Whatever else is there stays.

Symbolic links are not followed: a link inside an artifact is nobody's but the user's, and what lies behind a link that
is itself the target is never replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath

from toolkit.artifacts.gguf.container import TOOL_KEY, read_container
from toolkit.artifacts.manifest import MANIFEST, read_manifest
from toolkit.errors import ToolkitError, UsageError

_SHOWN = 5  # names in a message


def check_directory_target(target: Path | str, inputs: Iterable[Path] = (), overwrite: bool = False) -> None:
    """Whether ``target`` may become an artifact, asked before any work: it is new, empty, or an artifact of ours.

    Raises UsageError for ``/``, the home or current directory or one that holds them, a mount point, a file, a place
    inside or around one of ``inputs`` (directories or files that are read), and for anything in it that is not ours.
    """
    shown, real = Path(target), Path(target).resolve()
    _check_place(shown, real)
    for path in inputs:
        _check_apart(shown, real, path)
    if not real.is_dir():
        return
    if strangers := foreign(real):
        of = "the artifact" if _listed(real) else "an artifact of this tool"
        raise UsageError(
            f"{shown}: never replaced, for it holds what is not of {of}: {_names(strangers)}; choose another "
            "directory, or move that away"
        )
    if overwrite and shown.is_symlink() and any(real.iterdir()):
        raise UsageError(f"{shown}: is a symbolic link; to replace what it points to, give {real}")


def check_file_target(target: Path, source: Path, overwrite: bool) -> None:
    """Whether ``target`` may become a GGUF file: it is new, or a GGUF file that this tool wrote and ``overwrite``.

    Raises UsageError for anything else, a file of an artifact too, and if it is ``source``, which is read.
    """
    if target.is_dir():
        raise UsageError(f"{target}: expected a file name, found a directory of that name")
    if not os.path.lexists(target):
        return
    if target.exists() and target.resolve() == source.resolve():
        raise UsageError(f"{target}: is the model itself; choose another name")
    if target.is_symlink():
        raise UsageError(f"{target}: is a symbolic link, which is never replaced; choose another name")
    if (target.parent / MANIFEST).is_file() and target.name not in foreign(target.parent):
        raise UsageError(f"{target}: is a file of the artifact {target.parent}; choose another name")
    if not is_our_gguf(target):
        raise UsageError(
            f"{target}: never replaced, for it is not a GGUF file that this tool wrote; choose another name, or move it"
        )
    if not overwrite:
        raise UsageError(f"{target}: exists; give --overwrite to replace it")


def is_our_gguf(file: Path) -> bool:
    """Whether it is a GGUF file that this tool wrote."""
    try:
        return file.is_file() and TOOL_KEY in read_container(file).metadata
    except ToolkitError:
        return False


def foreign(directory: Path) -> list[str]:
    """What lies in ``directory`` that is not of an artifact of ours, sorted, folders with a slash at the end: all that
    its manifest does not list as a file, and all of it where there is no manifest of ours."""
    return _sorted_out(directory)[1]


def remove_artifact(directory: Path) -> None:
    """Delete an artifact file by file, its manifest last, so that a killed removal can be taken up again.

    What its manifest does not list stays, and with it the directory. OSError passes through.
    """
    for name in sorted(_sorted_out(directory)[0], key=lambda name: name == MANIFEST):
        (directory / name).unlink()
    for folder, _, _ in os.walk(directory, topdown=False):
        if not os.listdir(folder):
            os.rmdir(folder)


def _sorted_out(directory: Path) -> tuple[list[str], list[str]]:
    """(files of the artifact, everything else), links not followed."""
    listed = _listed(directory)
    folders = {str(parent) for name in listed for parent in PurePosixPath(name).parents}
    ours: list[str] = []
    others: list[str] = []

    def walk(folder: Path, prefix: str) -> None:
        for entry in os.scandir(folder):
            name = prefix + entry.name
            if entry.is_file(follow_symlinks=False) and name in listed:
                ours.append(name)
            elif not entry.is_dir(follow_symlinks=False):
                others.append(name)
            elif name in folders:
                walk(Path(entry.path), f"{name}/")
            else:
                others.append(f"{name}/")

    walk(directory, "")
    return ours, sorted(others)


def _listed(directory: Path) -> set[str]:
    """Names, relative and with slashes, of the files that make up the artifact; none where it is not ours."""
    try:
        manifest = read_manifest(directory)
    except ToolkitError:
        return set()
    return {MANIFEST, *(str(PurePosixPath(entry.name)) for entry in manifest.files)} if manifest else set()


def _names(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _check_place(shown: Path, real: Path) -> None:
    if not real.name:
        raise UsageError(f"{shown}: expected a directory that may be replaced as a whole, found the root")
    if real.exists() and not real.is_dir():
        raise UsageError(f"{shown}: expected a directory or a new name, found a file")
    for ancestor in real.parents:
        if ancestor.exists():
            if not ancestor.is_dir():
                raise UsageError(f"{shown}: cannot be made: {ancestor} is a file")
            break
    places = [("current", Path.cwd())]
    with suppress(RuntimeError):  # a user without a home
        places.insert(0, ("home", Path.home()))
    for what, place in places:
        if place.resolve().is_relative_to(real):
            raise UsageError(f"{shown}: is or holds the {what} directory, {place}; choose another directory")
    if str(real) in _mount_points():
        raise UsageError(f"{shown}: is a mount point, which cannot be replaced as a whole; give a directory inside it")


def _check_apart(shown: Path, real: Path, path: Path) -> None:
    source = path.resolve()
    if source.is_relative_to(real):
        raise UsageError(f"{shown}: replacing it would delete {path}, which is read; choose another directory")
    if source.is_dir() and real.is_relative_to(source):
        raise UsageError(f"{shown}: lies inside {path}, which is read; choose a directory outside it")


def _mount_points() -> set[str]:
    """Where file systems are mounted, bind mounts too; empty where the system does not tell."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return set()
    return {line.split()[4].encode("latin-1", "ignore").decode("unicode_escape") for line in lines}
