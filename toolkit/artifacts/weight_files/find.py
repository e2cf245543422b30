"""Which files of a model's directory are its weights, and their headers, whatever wrote them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from toolkit.artifacts.weight_files.safetensors_file import TensorInfo, read_header
from toolkit.base.lazy_dataclass import dataclass

log = logging.getLogger("toolkit.artifacts")

INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".pth", ".pt")  # how names of files of torch.save end
_PICKLED_INDEX = "pytorch_model.bin.index.json"
# Of torch.save, the first of these that is there: as transformers names them, as Meta does, whatever there is.
_PICKLED_NAMES = ("pytorch_model.bin", "pytorch_model-*.bin", "consolidated.*.pth", "*.bin", "*.pth", "*.pt")
# A model in several GGUF files, as llama.cpp and gguf-py name them: NAME-00001-of-00003.gguf
GGUF_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
_MOST_PARTS = 10_000
# What a training leaves beside the weights, and macOS beside every file it copies.
_OTHERS = (
    ".", "adapter_model", "optimizer", "random_states", "rng_state", "scheduler", "trainer_state", "training_args"
)  # fmt: skip


@dataclass(frozen=True)
class WeightFiles:
    """``files``: those without an index, by name; ``index``: the file that lists them."""

    files: list[Path]
    index: Path | None = None


def find_weights(directory: Path) -> WeightFiles:
    """The weights of a directory: safetensors where there are any, else what torch.save wrote; no files where there
    are none."""
    if (directory / INDEX).is_file():
        return WeightFiles([], directory / INDEX)
    if (directory / "model.safetensors").is_file():
        return WeightFiles([directory / "model.safetensors"])
    if files := _safetensors(directory):
        return WeightFiles(files)
    index = directory / _PICKLED_INDEX
    return WeightFiles(pickled_weights(directory), index if index.is_file() else None)


def pickled_weights(directory: Path) -> list[Path]:
    """What torch.save wrote of the model in a directory, by name; none where safetensors are there."""
    if _safetensors(directory):
        return []
    for pattern in _PICKLED_NAMES:
        files = [f for f in sorted(directory.glob(pattern)) if f.is_file() and not f.name.startswith(_OTHERS)]
        if files:
            return files
    return []


def _safetensors(directory: Path) -> list[Path]:
    return [file for file in sorted(directory.glob("*.safetensors")) if not file.name.startswith(_OTHERS)]


def file_headers(files: Sequence[Path]) -> Iterator[tuple[Path, dict[str, TensorInfo]]]:
    """Each file with its tensors by name. Raises ToolkitError as ``read_header`` and ``read_torch_headers`` do; a line
    in the log says so, once a directory, where files are pickles."""
    old = [file for file in files if file.suffix in PICKLED]
    headers: dict[Path, dict[str, TensorInfo]] = {}
    if old:
        from toolkit.artifacts.weight_files.torch_file import read_torch_headers

        headers = read_torch_headers(old)
        _tell_pickles(tuple(old))
    for file in files:
        yield file, headers[file] if file in headers else read_header(file)


@cache
def _tell_pickles(files: tuple[Path, ...]) -> None:
    names = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"
    log.warning("%s: %s of torch.save: read as data, no code in them runs", files[0].parent, names)


def gguf_name(path: Path) -> str:
    """What a GGUF file is called, were it whole: NAME.gguf of NAME-00001-of-00003.gguf, of any other file its name."""
    found = GGUF_PART.fullmatch(path.name)
    return path.name if found is None or len(gguf_parts(path)) == 1 else found[1] + found[4]


def gguf_parts(path: Path) -> list[Path]:
    """All files of the model whose first is the GGUF file ``path``, by its name; that alone where it is no part."""
    found = GGUF_PART.fullmatch(path.name)
    if found is None or int(found[2]) != 1 or not 1 < int(found[3]) <= _MOST_PARTS:
        return [path]
    return [path.with_name(f"{found[1]}-{i:05d}-of-{found[3]}{found[4]}") for i in range(1, int(found[3]) + 1)]
