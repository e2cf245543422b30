"""Activations between layers: in memory up to a limit, beyond it in files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor


class Spill:
    """Room for tensors: ``memory`` bytes, what does not fit goes to files in ``directory`` (made empty when first
    needed). Files are read and written, not mapped, so that they do not count as the process's memory."""

    def __init__(self, directory: Path, memory: int) -> None:
        self.directory, self.left = directory, memory
        self.count = 0
        shutil.rmtree(directory, ignore_errors=True)  # of a run that was killed

    def __enter__(self) -> Spill:
        return self

    def __exit__(self, *error: object) -> None:
        """Delete the files."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def place(self, size: int) -> Path | None:
        """Where a tensor of ``size`` bytes goes: None is memory."""
        if size <= self.left:
            self.left -= size
            return None
        self.directory.mkdir(parents=True, exist_ok=True)
        self.count += 1
        return self.directory / f"{self.count}.bin"


class Tensors:
    """A list of float32 tensors on the CPU; its entries may be replaced by others of their shape.

    ``spill`` None: all in memory. OSError passes through.
    """

    def __init__(self, values: Iterable[Tensor], spill: Spill | None = None) -> None:
        self._held: list[Tensor | None] = []
        self._files: list[Path | None] = []
        self._shapes: list[torch.Size] = []
        for value in values:
            self._shapes.append(value.shape)
            self._files.append(None if spill is None else spill.place(value.numel() * value.element_size()))
            self._held.append(None)
            self[len(self._shapes) - 1] = value

    def __len__(self) -> int:
        return len(self._shapes)

    def __getitem__(self, index: int) -> Tensor:
        held, file = self._held[index], self._files[index]
        if held is not None:
            return held
        assert file is not None
        found = torch.empty(self._shapes[index])
        with file.open("rb", buffering=0) as source:
            buffer = memoryview(found.numpy().data).cast("B")
            done = 0
            while done < len(buffer):
                count = source.readinto(buffer[done:])
                assert count, f"{file} was cut short under our hands"
                done += count
        return found

    def __setitem__(self, index: int, value: Tensor) -> None:
        assert value.shape == self._shapes[index] and value.dtype == torch.float32
        file = self._files[index]
        if file is None:
            self._held[index] = value
            return
        with file.open("wb", buffering=0) as target:
            data = memoryview(value.contiguous().numpy().data).cast("B")
            done = 0
            while done < len(data):
                done += os.write(target.fileno(), data[done:])

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))
