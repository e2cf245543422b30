"""Weights that are to take the place of a running model's, gathered in safetensors files of their own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from toolkit.artifacts.weight_files.safetensors_file import array_bytes, read_header, write_tensors
from toolkit.base.user_path import user_path
from toolkit.errors import ToolkitError, UsageError

Weights = str | Path | Mapping[str, Any] | Iterable[tuple[str, Any]]
PART_BYTES = 1 << 30  # after which tensors go on in another file
SPARE_BYTES = 1 << 28  # of the disk, which stay free
_PICKLES = (b"\x80", b"PK\x03\x04")  # how a pickle begins, and what torch.save writes around one


class WeightFiles:
    """A folder below the system's folder for temporary files, with parts that hold each tensor once.

    Nothing else writes to it, so an engine may map its files. Only headers are read here; nothing is unpickled.
    """

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="toolkit-weights-", ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        self.names: set[str] = set()
        self._parts = 0

    @classmethod
    def of(cls, weights: Weights) -> WeightFiles:
        """Those of a file or directory, or of tensors by name. Raises as ``add_copy`` and ``add_tensors`` do."""
        files = cls()
        try:
            if isinstance(weights, (str, Path)):
                files.add_copy(user_path(weights))
            else:
                files.add_tensors(weights.items() if isinstance(weights, Mapping) else weights)
        except BaseException:
            files.close()
            raise
        return files

    def add_bytes(self, data: bytes) -> None:
        """The tensors of a safetensors file that is in memory. Raises ToolkitError for what is none, and for a tensor
        that is there already."""
        if data.startswith(_PICKLES):
            raise ToolkitError(
                "expected a safetensors file, found a pickle, which is not read here since it can run code; "
                "safetensors.torch.save(tensors) makes one"
            )
        self._check_room(len(data))
        self._add(lambda part: part.write_bytes(data))

    def add_copy(self, source: Path) -> None:
        """Those of a file, or of a directory's *.safetensors. Raises ToolkitError as ``add_bytes`` does."""
        files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
        if not files or not all(file.is_file() and file.suffix == ".safetensors" for file in files):
            raise ToolkitError(f"{source}: expected a .safetensors file, or a directory with some")
        self._check_room(sum(file.stat().st_size for file in files))
        for file in files:
            read_header(file)  # so that the message names it, not its copy
            self._add(lambda part, file=file: shutil.copyfile(file, part))  # type: ignore[misc]

    def add_tensors(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Torch tensors, on whatever device, or numpy arrays, of which about ``PART_BYTES`` are held at a time."""
        held, size = {}, 0
        for name, tensor in _checked(tensors):
            if name in held:
                raise UsageError(f"{name}: the tensor is there twice")
            held[name], size = tensor, size + tensor.nbytes
            if size >= PART_BYTES:
                self._add_held(held)
                held, size = {}, 0
        if held or not self._parts:
            self._add_held(held)

    def _add_held(self, held: dict[str, Any]) -> None:
        self._check_room(2 * sum(tensor.nbytes for tensor in held.values()))  # while it is written it stands twice
        self._add(lambda part: write_tensors(part, held))

    def close(self) -> None:
        """Delete them; where an engine has mapped them, they go when it lets go."""
        self._folder.cleanup()

    def _check_room(self, needed: int) -> None:
        try:
            free = shutil.disk_usage(self.path).free - SPARE_BYTES
        except OSError as e:  # something has tidied up there
            raise self._lost(e) from e
        if needed > free:
            raise ToolkitError(
                f"{self.path.parent}: new weights are kept here until the next ones: they need {needed >> 20} MiB, and "
                f"{max(0, free) >> 20} are free; make room, or set TMPDIR to a folder with more"
            )

    def _lost(self, error: OSError) -> ToolkitError:
        return ToolkitError(f"{self.path.parent}: the new weights cannot be kept: {error.strerror or error}")

    def _add(self, write: Callable[[Path], Any]) -> None:
        part = self.path / f"part-{self._parts:05d}.safetensors"
        told = f"part {self._parts + 1} of the new weights"
        try:
            write(part)
            found = read_header(part)
        except OSError as e:
            raise self._lost(e) from e
        except ToolkitError as e:
            raise ToolkitError(str(e).replace(str(part), told)) from None
        if twice := next((name for name in found if name in self.names), None):
            raise ToolkitError(f"{told}: tensor {twice} is there already; send each tensor once")
        self.names.update(found)
        self._parts += 1


def _checked(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Each in the memory of this machine. Raises UsageError that names one that is no tensor."""
    for entry in tensors:
        if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[0], str):
            raise UsageError(f"weights: expected names and tensors, found {entry!r:.60}")
        name, tensor = entry
        tensor = tensor.cpu() if hasattr(tensor, "cpu") else tensor
        try:
            array_bytes(tensor[:0] if getattr(tensor, "ndim", 0) else tensor)
        except (AttributeError, KeyError, TypeError, RuntimeError):
            found = f"{type(tensor).__name__} {getattr(tensor, 'dtype', '')}".strip()
            raise UsageError(f"{name}: expected a torch tensor or numpy array of numbers, found {found}") from None
        yield name, tensor
