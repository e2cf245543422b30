"""Opening a checkpoint: everything is validated from headers before any tensor is read.

A checkpoint is a directory in the Hugging Face layout (plain, sharded, quantized, or written by one of our stages), or
in Meta's, or a ``.gguf`` file; these two are presented under Hugging Face names. No torch is needed until ``tensor`` is
called.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.json_file import read_json_object
from toolkit.artifacts.manifest import check_tensors, read_manifest
from toolkit.artifacts.quantization import with_quantization
from toolkit.artifacts.weight_files.find import INDEX, file_headers, find_weights
from toolkit.artifacts.weight_files.meta_llama import Split, is_meta_llama, open_meta_llama
from toolkit.artifacts.weight_files.safetensors_file import TensorInfo
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import find_family

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.gguf.checkpoint import GgufFile
    from toolkit.artifacts.weight_files.read_ahead import ReadAhead

HEADLESS_MARK = "embed_tokens.weight"
_ID = re.compile(r"[0-9]{1,9}")
_FORMAT_NAMES = {None: "hf", "smooth_quant": "w8a8"}  # quant_method → model_format, where they are spelled differently


@dataclass
class Checkpoint:
    """A model on disk. ``config`` and ``generation_config`` are JSON objects; ``gguf`` is set for a GGUF file."""

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    infos: dict[str, TensorInfo]
    files: dict[str, Path]  # tensor name → the file that holds it
    gguf: GgufFile | None = None
    splits: dict[str, Split] = field(default_factory=dict)  # of those of which several files hold a part
    _maps: dict[Path, Any] = field(default_factory=dict, repr=False)
    _ahead: ReadAhead | None = field(default=None, repr=False)
    checked: dict[str, Any] | None = field(default=None, repr=False)  # the ``quantization`` that was found to be sound

    @property
    def quantization(self) -> dict[str, Any] | None:
        """``quantization_config`` of config.json, {"quant_method": "gguf"} for a GGUF file, None where dense."""
        return {"quant_method": "gguf"} if self.gguf is not None else self.config.get("quantization_config")

    @property
    def model_format(self) -> str:
        """What ``--model-format`` calls it."""
        return "meta_llama" if is_meta_llama(self.path) else format_name(self.quantization)

    @cached_property
    def tokenizer_dir(self) -> Path:
        """Directory with tokenizer.json and kin; for a GGUF file it is written to the cache on first use."""
        return self.gguf.write_side_files() if self.gguf is not None else self.path

    def names(self) -> list[str]:
        """All tensor names, in the order of the files."""
        return list(self.infos)

    def __contains__(self, name: str) -> bool:
        return name in self.infos

    def info(self, name: str) -> TensorInfo:
        """Dtype and shape of a tensor. Raises ToolkitError if it is missing."""
        if name not in self.infos:
            raise ToolkitError(f"{self.where(None)}: tensor {name} is missing; fetch or convert the model again")
        return self.infos[name]

    def where(self, name: str | None) -> Path:
        """The file to blame for a tensor (the checkpoint itself where there is no such tensor)."""
        return self.files.get(name, self.path) if name else self.path

    def tensor(self, name: str) -> Tensor:
        """A tensor over the mapped file; pages are read when touched, writing to it changes memory alone.

        A quantized GGUF tensor comes dequantized to float32. While ``reading_ahead`` it may be in memory of its own.
        """
        info = self.info(name)
        if self.gguf is not None:
            return self.gguf.tensor(name)
        if self._ahead is not None and (found := self._ahead.take(name)) is not None:
            return found
        if (split := self.splits.get(name)) is None:
            return self._view(self.files[name], info)
        import torch

        return torch.cat([self._view(path, part) for path, part in split.parts], split.axis)

    def _view(self, path: Path, info: TensorInfo) -> Tensor:
        from toolkit.artifacts.weight_files.mapped import map_file, view_tensor

        if path not in self._maps:
            self._maps[path] = map_file(path)
        return view_tensor(self._maps[path], info)

    @contextmanager
    def reading_ahead(self, names: Iterable[str]) -> Iterator[None]:
        """Read the tensors called ``names`` before they are asked for, which is best done once and in this order. Those
        of a GGUF file, and those in parts, stay mapped."""
        if self.gguf is not None:
            yield
            return
        from toolkit.artifacts.weight_files.read_ahead import ReadAhead

        alone = (name for name in names if name in self and name not in self.splits)
        self._ahead = ReadAhead((name, self.files[name], self.info(name)) for name in alone)
        try:
            yield
        finally:
            self._ahead.close()
            self._ahead = None

    def is_cached(self) -> bool:
        """Whether its files seem to be in the system's memory."""
        from toolkit.artifacts.weight_files.read_ahead import is_cached

        return is_cached(dict.fromkeys(self.files.values()))

    def release(self) -> None:
        """Let go of what is mapped: memory that was read from the files is given back as soon as no tensor uses it."""
        self._maps.clear()


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a checkpoint directory or a ``.gguf`` file, reading headers only.

    Raises UsageError if the path does not exist or is neither; ToolkitError, one line that names the file, for a
    missing or broken config.json, truncated or corrupt weights, pickles that hold more than tensors, an index at odds
    with its files.
    """
    path = Path(path)
    if not path.exists():
        raise UsageError(f"{path}: no such file or directory")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UsageError(f"{path}: expected a directory with config.json, or a .gguf file")
        from toolkit.artifacts.gguf.checkpoint import open_gguf

        gguf = open_gguf(path)
        return Checkpoint(path, gguf.config, gguf.generation_config, gguf.infos, gguf.files(), gguf)
    if (path / "engine.json").is_file():
        raise ToolkitError(
            f"{path}: this is an engine artifact, whose weights are packed; expected a checkpoint: "
            "give the directory it was converted from (tool inspect shows it)"
        )
    splits: dict[str, Split] = {}
    if is_meta_llama(path):
        meta = open_meta_llama(path)
        config, infos, files, splits = meta.config, meta.infos, meta.files, meta.splits
    else:
        config, (infos, files) = read_config(path), read_headers(path)
    manifest = read_manifest(path)
    if manifest is not None:
        check_tensors(path, manifest)
    side = path / "generation_config.json"
    return Checkpoint(path, config, read_json_object(side) if side.is_file() else {}, infos, files, splits=splits)


def format_name(quantization: dict[str, Any] | None) -> str:
    """What ``--model-format`` calls weights with this ``quantization_config``."""
    method = (quantization or {}).get("quant_method")
    return _FORMAT_NAMES.get(method, str(method))


def check_directory(path: Path) -> None:
    """Raise ToolkitError unless ``path`` is a model directory at first sight: it has a config.json or engine.json, or
    Meta's files."""
    if not any((path / name).is_file() for name in ("config.json", "engine.json")) and not is_meta_llama(path):
        files = sorted(path.glob("*.gguf"))
        advice = f"or the file {files[0].name} in it" if files else "or a .gguf file"
        raise ToolkitError(
            f"{path}: expected config.json in it; give the directory of a Hugging Face checkpoint, {advice}"
        )


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a model's directory, with the token ids that its family asks for. Raises ToolkitError."""
    check_directory(path)
    if is_meta_llama(path):
        return open_meta_llama(path).config
    return _with_token_ids(path, with_quantization(read_json_object(path / "config.json"), path))


def _with_token_ids(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """``config`` with the ids of the special tokens that its family asks for and that it does not tell."""
    try:
        wanted = find_family(config).token_fields
    except ToolkitError:  # one that the user has brought along, or none
        return config
    missing = {name: token for name, token in wanted.items() if config.get(name) is None}
    ids = _special_ids(path) if missing else {}
    return config | {name: ids[token] for name, token in missing.items() if token in ids}


def _special_ids(path: Path) -> dict[str, int]:
    """Special tokens and their ids, from the first of a tokenizer's files that tells them."""
    for name in ("tokenizer.json", "tokenizer_config.json", "added_tokens.json"):
        values = read_json_object(path / name) if (path / name).is_file() else {}
        if isinstance(added := values.get("added_tokens"), list):
            found = [(token.get("content"), token.get("id")) for token in added if isinstance(token, dict)]
        elif isinstance(added := values.get("added_tokens_decoder"), dict):
            named = [(i, token) for i, token in added.items() if _ID.fullmatch(i) and isinstance(token, dict)]
            found = [(token.get("content"), int(i)) for i, token in named]
        else:
            found = list(values.items()) if name == "added_tokens.json" else []
        if found:
            return {content: i for content, i in found if isinstance(content, str) and isinstance(i, int)}
    return {}


def has_weights(path: Path) -> bool:
    """Whether a directory holds weights, whatever wrote them."""
    found = find_weights(path)
    return found.index is not None or bool(found.files)


def read_headers(path: Path) -> tuple[dict[str, TensorInfo], dict[str, Path]]:
    """Headers of all the weight files of a directory: tensor name → info, tensor name → file. Raises ToolkitError."""
    found = find_weights(path)
    weight_map = _read_index(found.index) if found.index is not None else None
    shards = found.files if weight_map is None else [path / name for name in dict.fromkeys(weight_map.values())]
    listed = found.index.name if found.index is not None else ""
    whole = path / listed.removesuffix(".index.json")
    if weight_map is not None and whole.is_file() and not any(shard.is_file() for shard in shards):
        weight_map, shards = None, [whole]  # transformers deletes shards that it saves a whole file over, not the index
    if not shards:
        raise ToolkitError(f"{path}: expected model.safetensors (or an index and its shards), found no weights")
    for shard in shards:
        if not shard.is_file():
            raise ToolkitError(f"{shard}: missing, though {listed} lists it; fetch the model again")
    infos: dict[str, TensorInfo] = {}
    files: dict[str, Path] = {}
    for shard, header in file_headers(shards):
        for name, info in header.items():
            if name in files and weight_map is None:
                raise ToolkitError(f"{shard}: tensor {name} is also in {files[name].name}; keep one set of weights")
            if weight_map is None or weight_map.get(name) == shard.name:
                infos[name], files[name] = info, shard
    for name, file_name in (weight_map or {}).items():
        if name not in infos:
            raise ToolkitError(f"{path / file_name}: tensor {name} is missing, though {listed} lists it")
    return _with_prefix(infos, files)


def _with_prefix(infos: dict[str, TensorInfo], files: dict[str, Path]) -> tuple[dict[str, TensorInfo], dict[str, Path]]:
    """The same by the names of a whole model: those of one saved without its head, as embedding models are, lack
    "model."."""
    if HEADLESS_MARK not in infos:
        return infos, files
    whole = {name: name if name.startswith("lm_head.") else f"model.{name}" for name in infos}
    return {whole[name]: info for name, info in infos.items()}, {whole[name]: file for name, file in files.items()}


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    ending = ".safetensors" if index.name == INDEX else ".bin"
    if not isinstance(weight_map, dict) or not weight_map:
        raise ToolkitError(f"{index}: expected an object weight_map of tensor names to files, found {weight_map!r:.40}")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name or not file_name.endswith(ending):
            raise ToolkitError(f"{index}: weight_map: {name}: expected a {ending} file name, found {file_name!r:.80}")
    return weight_map
