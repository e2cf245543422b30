"""Tensors of a safetensors file that are read one at a time, into memory of their own: nothing stays mapped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from toolkit.artifacts.weight_files.safetensors_file import TORCH_DTYPES, read_header


class TensorFile(Mapping[str, Tensor]):
    """The file at ``path`` as a mapping; a tensor is read each time that it is asked for. Raises ToolkitError for a
    file that is none."""

    def __init__(self, path: Path) -> None:
        self.path, self.infos = path, read_header(path)

    def __getitem__(self, name: str) -> Tensor:
        info = self.infos[name]
        raw = torch.empty(info.nbytes, dtype=torch.uint8)
        with self.path.open("rb") as file:
            file.seek(info.start)
            found = file.readinto(raw.numpy().data)
        assert found == info.nbytes, f"{self.path} was cut short under our hands"
        return raw.view(getattr(torch, TORCH_DTYPES[info.dtype])).view(info.shape)

    def __contains__(self, name: object) -> bool:
        return name in self.infos

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)
