"""The engine artifact as it is once opened, the same for every target; ``engine`` opens and writes it. Importing this
imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from toolkit.artifacts.weight_files.safetensors_file import TensorInfo, map_arrays
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import UsageError
from toolkit.models.spec import DecoderSpec, MtpSpec

ENGINE_JSON = "engine.json"
ENGINE_ARRAYS = "engine.safetensors"
ENGINE_SCHEMA = 1
TORCH_TARGET = "torch"

Arrays = Iterator[tuple[str, Any, str | None]]
Tiles = Mapping[str, tuple[int, int]]
"""Of matrices that a rank has a part of, by name: which tiles, (first, end)."""


def rank_file(rank: int, ranks: int) -> str:
    """The name of a rank's arrays in an artifact that was packed for so many."""
    return f"rank-{rank}-of-{ranks}.safetensors"


def is_rank_file(name: str) -> bool:
    """Whether it is such a name."""
    return re.fullmatch(r"rank-\d+-of-\d+\.safetensors", name) is not None


@dataclass(frozen=True)
class EngineArtifact:
    """An open artifact. ``params``: canonical name → {"form", …}, what its arrays mean (see the target's packer).

    ``mtp``: its layer for multi-token prediction, whose arrays are among the others, and ``mtp_params`` what they mean.
    ``ranks``: for how many ranks it is packed, 1: its arrays are the whole model, in one file. Else each rank has a
    file, ``tiles`` say of each rank what of matrices is in it, and ``rank`` whose is opened here, None: no one's.
    """

    path: Path
    spec: DecoderSpec
    target: str
    params: dict[str, dict[str, Any]]
    infos: dict[str, TensorInfo]
    ranks: int = 1
    rank: int | None = None
    tiles: tuple[Tiles, ...] = field(default=())
    mtp: MtpSpec | None = None
    mtp_params: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def array_file(self) -> Path:
        """Raises UsageError where that depends on the rank, and none was opened."""
        if self.ranks == 1:
            return self.path / ENGINE_ARRAYS
        if self.rank is None:
            raise UsageError(
                f"{self.path}: packed in a file for each of {self.ranks} ranks of the native runner; start it with "
                f"--tp {self.ranks} and nothing else that splits it, or convert the model again"
            )
        return self.path / rank_file(self.rank, self.ranks)

    def arrays(self) -> dict[str, Any]:
        """Every array as a read-only, page-aligned numpy view of the mapped file (BF16 as uint16)."""
        return map_arrays(self.array_file, self.infos or None)
