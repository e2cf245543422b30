"""Calibration statistics on disk: ``tool lite calibrate`` writes them, ``--calibration DIR`` reads them.

One ``statistics-NNNNN.safetensors`` a layer (the head's input is the last): for each site ``SITE:xtx`` float32 [n, n],
``SITE:abs_sum`` and ``SITE:abs_max`` float32 [n], ``SITE:rows`` int64 [1], ``SITE:sample`` float32 [at most 256, n]
(some of the inputs themselves). ``abs_sum / rows`` is the mean of |x|.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from toolkit.artifacts.manifest import content_digest, read_manifest
from toolkit.artifacts.weight_files.safetensors_file import write_tensors
from toolkit.artifacts.weight_files.tensor_file import TensorFile
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.sites import layer_sites
from toolkit.quant.layers.lazy import Lazy
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.layers.statistics import SAMPLE, Gram

KIND = "calibration"
PARTS = ("xtx", "abs_sum", "abs_max", "sample")


def file_name(index: int) -> str:
    return f"statistics-{index:05d}.safetensors"


def planned_bytes(source: LayerSource) -> int:
    """Bytes of the statistics of every site of ``source``, the head's included."""
    sizes = [site.size for layer in source.spec.layers for site in layer_sites(layer)] + [source.spec.hidden_size]
    return sum(4 * n * n + 8 * n + 8 + 4 * SAMPLE * n for n in sizes)


def raw_state(grams: Iterable[tuple[str, Gram | None]]) -> tuple[Iterator[tuple[str, Tensor]], dict[str, int]]:
    """Statistics by site as a stage saves them: ``SITE:part`` for all of ``PARTS``, and the rows by site, which are
    whole when the stream has ended."""
    rows: dict[str, int] = {}

    def stream() -> Iterator[tuple[str, Tensor]]:
        for site, gram in grams:
            if gram is not None:
                rows[site] = gram.rows
                yield from ((f"{site}:{part}", getattr(gram, part).cpu()) for part in PARTS)

    return stream(), rows


def write_statistics(path: Path, tensors: Mapping[str, Tensor], rows: Mapping[str, int]) -> None:
    """Write the statistics of one layer. ``tensors``: ``SITE:part`` for all of ``PARTS``; ``rows`` by site."""

    def stream() -> Iterator[tuple[str, Tensor]]:
        for site, count in rows.items():
            for part in PARTS:
                yield f"{site}:{part}", tensors[f"{site}:{part}"]
            yield f"{site}:rows", torch.tensor([count])

    write_tensors(path, stream())


@dataclass(frozen=True)
class SavedStatistics:
    """An opened directory of statistics. ``digest``: of its content, for the key of what is made with it."""

    path: Path
    digest: str

    def grams(self, index: int) -> Mapping[str, Gram]:
        """Statistics of layer ``index`` by site, read when asked for; the layer after the last is the head."""
        tensors = TensorFile(self.path / file_name(index))

        def read(site: str) -> Gram:
            return Gram(rows=int(tensors[f"{site}:rows"][0]), **{part: tensors[f"{site}:{part}"] for part in PARTS})

        return Lazy(sorted({name.rsplit(":", 1)[0] for name in tensors}), read)


def open_statistics(path: Path, model_digest: str, source: LayerSource) -> SavedStatistics:
    """Open what ``tool lite calibrate`` wrote for the model whose content digest is ``model_digest``.

    Raises UsageError or ToolkitError where it is none, is incomplete, or belongs to another model.
    """
    if not path.is_dir():
        raise UsageError(f"--calibration {path}: expected a directory written by tool lite calibrate, found none")
    manifest = read_manifest(path)
    if manifest is None or manifest.kind != KIND:
        found = "another" if manifest is None else f"one made by {manifest.stage!r}"
        raise UsageError(f"--calibration {path}: expected a directory written by tool lite calibrate, found {found}")
    if manifest.parent.get("digest") != model_digest:
        raise ToolkitError(
            f"--calibration {path}: taken from {manifest.parent.get('path')}, whose content is not that of "
            f"{source.path}; run tool lite calibrate on this model"
        )
    for index in range(len(source.spec.layers) + 1):
        if not (path / file_name(index)).is_file():
            raise ToolkitError(f"--calibration {path}: {file_name(index)} is missing; run tool lite calibrate again")
    return SavedStatistics(path, content_digest(path))
