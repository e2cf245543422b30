"""A file for each rank of an artifact that is packed for several: what it computes of matrices, and what all have.

The first rank's has the LM head whole, which a draft head borrows, and the layer for multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.artifacts.engine.artifact import ENGINE_ARRAYS, EngineArtifact, Tiles, rank_file
from toolkit.artifacts.engine.files import describe_engine
from toolkit.artifacts.weight_files.safetensors_file import write_arrays
from toolkit.errors import ToolkitError
from toolkit.runners.native.packing.artifact import CPU_TARGET, of_first_alone, open_packed
from toolkit.runners.native.packing.mtp import open_mtp
from toolkit.runners.native.packing.packed import PackedTensor
from toolkit.runners.native.share import Parts, Share


def write_rank_files(artifact: EngineArtifact, ranks: int) -> None:
    """Cut a whole artifact, which ``share.unsupported`` has no word against, in place. OSError passes through."""
    weights, tiles = open_packed(artifact), []
    first = weights if artifact.mtp is None else {**weights, **open_mtp(artifact)}
    for rank in range(ranks):
        own = _tiles(artifact, weights, rank, ranks)
        own = own if rank else _but_head(artifact, own)
        told = {"format": "toolkit-engine", "target": CPU_TARGET, "rank": f"{rank} of {ranks}"}
        write_arrays(artifact.path / rank_file(rank, ranks), _arrays(weights if rank else first, own, rank), told)
        tiles.append(own)
    (artifact.path / ENGINE_ARRAYS).unlink()
    mtp = None if artifact.mtp is None else (artifact.mtp, artifact.mtp_params)
    describe_engine(artifact.path, artifact.spec, artifact.target, artifact.params, tiles, mtp)


def open_rank(artifact: EngineArtifact) -> Mapping[str, PackedTensor]:
    """As ``open_packed``, of a whole artifact or a rank's file. Raises ToolkitError where that was cut otherwise than a
    rank computes."""
    found = open_packed(artifact)
    if artifact.rank is not None:
        own, cut = artifact.tiles[artifact.rank], _tiles(artifact, found, artifact.rank, artifact.ranks)
        # version 0.3 cut the first one's head too
        if own != cut and (artifact.rank or own != _but_head(artifact, cut)):
            raise ToolkitError(f"{artifact.path}: cut for ranks by another version; convert the model again")
    return found


def _tiles(artifact: EngineArtifact, weights: Mapping[str, PackedTensor], rank: int, ranks: int) -> Tiles:
    found = Parts(artifact.spec, weights, Share(rank, ranks)).tiles
    return {name: (tiles.first, tiles.last) for name, tiles in found.items()}


def _but_head(artifact: EngineArtifact, tiles: Tiles) -> Tiles:
    return {name: cut for name, cut in tiles.items() if name != artifact.spec.head}


def _arrays(weights: Mapping[str, PackedTensor], own: Tiles, rank: int) -> Iterator[tuple[str, Any, str | None]]:
    for name, tensor in weights.items():
        if rank and of_first_alone(name):
            continue
        first, end = own.get(name, (0, tensor.meta.tiles))
        size = tensor.meta.tile_bytes
        yield name, tensor.data[first * size : end * size] if name in own else tensor.data, None
        if tensor.perm is not None:
            yield f"{name}.perm", tensor.perm, None
