"""The engine artifact as it is once opened, the same for every target; ``engine`` opens and writes it. Importing this
imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.artifacts.weight_files.safetensors_file import TensorInfo, map_arrays
from toolkit.models.spec import DecoderSpec

ENGINE_JSON = "engine.json"
ENGINE_ARRAYS = "engine.safetensors"
ENGINE_SCHEMA = 1
TORCH_TARGET = "torch"

Arrays = Iterator[tuple[str, Any, str | None]]


@dataclass(frozen=True)
class EngineArtifact:
    """An open artifact. ``params``: canonical name → {"form", …}, what its arrays mean (see the target's packer)."""

    path: Path
    spec: DecoderSpec
    target: str
    params: dict[str, dict[str, Any]]
    infos: dict[str, TensorInfo]

    @property
    def array_file(self) -> Path:
        return self.path / ENGINE_ARRAYS

    def arrays(self) -> dict[str, Any]:
        """Every array as a read-only, page-aligned numpy view of the mapped file (BF16 as uint16)."""
        return map_arrays(self.array_file)
