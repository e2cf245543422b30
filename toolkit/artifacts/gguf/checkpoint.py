"""A GGUF file as a Hugging Face checkpoint: same config fields, same tensor names, weights kept as they are stored."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit import __version__
from toolkit.artifacts.gguf.architectures import NUMBER, Change, family_of, hf_tensors, listed_numbers
from toolkit.artifacts.gguf.container import GgufContainer, read_container
from toolkit.artifacts.gguf.eyes import Eyes, open_eyes
from toolkit.artifacts.gguf.hf_config import hf_config
from toolkit.artifacts.gguf.keys import check_kinds
from toolkit.artifacts.gguf.parts import join_parts
from toolkit.artifacts.gguf.tokenizer import end_ids, never_drawn, write_tokenizer
from toolkit.artifacts.home import toolkit_home
from toolkit.artifacts.json_file import write_json_object
from toolkit.artifacts.made_once import made_once
from toolkit.artifacts.weight_files.safetensors_file import TensorInfo
from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.drafts.mtp import COPIES, FURTHER, NEXTN, deeper, nextn_of
from toolkit.models.eyes.vision import VisionSpec
from toolkit.models.gguf import Gguf
from toolkit.models.registry import build
from toolkit.models.spec import DecoderSpec, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import Weight

# What the config of a model that sees says of its language model too.
SHARED = (
    "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "max_position_embeddings",
)  # fmt: skip
POOLING = "pooling_config.json"
_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}  # by llama.cpp's numbers
_PADDING = "tokenizer.ggml.padding_token_id"
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass
class GgufFile:
    """An open file. ``infos`` and ``sources`` are keyed by Hugging Face name; dtypes are GGML type names, and an expert
    is the part of a tensor of the file that its info says.
    """

    container: GgufContainer
    config: dict[str, Any]
    generation_config: dict[str, Any]
    infos: dict[str, TensorInfo]
    sources: dict[str, tuple[str, Change]]
    eyes: Eyes | None = None
    vision: VisionSpec | None = None
    towers: dict[str, StoredTensor] = field(default_factory=dict)  # what ``eyes`` has, by name

    def files(self) -> dict[str, Path]:
        """Tensor name → the file that holds it."""
        found = {
            name: self.container.path if change.number is not None else self.container.file(source)
            for name, (source, change) in self.sources.items()
        }
        return found | {name: self.eyes.container.path for name in self.towers if self.eyes is not None}

    def weight(self, name: str) -> Weight:
        """A matrix in canonical form, its codes and scales as stored; float types are ``Dense``."""
        import torch

        from toolkit.artifacts.gguf.blocks import from_blocks
        from toolkit.artifacts.gguf.columns import take_columns

        source, change = self.sources[name]
        if change.keys is not None:
            return self._of_both(source, change.keys, self.infos[name])
        rows, info = change.rows, self.infos[name]
        weight = from_blocks(info.dtype, self.container.at(info.start, info.end), info.shape)
        if change.columns is not None:
            weight = take_columns(weight, torch.from_numpy(change.columns))
        return weight if rows is None else weight.take_rows(torch.from_numpy(rows))

    def _of_both(self, values: str, keys: str, info: TensorInfo) -> Weight:
        """The matrix of a latent attention, head by head keys and then values."""
        import torch

        from toolkit.artifacts.canonical import Dense
        from toolkit.artifacts.gguf.blocks import FLOATS, from_blocks

        found = []
        for name in (keys, values):
            own = self.container.tensors[name]
            flat = (own.shape[0] * own.shape[1], own.shape[2])
            dense = from_blocks(own.dtype, self.container.raw(name), flat).dequantize()
            found.append(dense.view(own.shape))
        whole = torch.cat([found[0].transpose(1, 2), found[1]], dim=1).reshape(info.shape)
        return Dense(whole.to(FLOATS[info.dtype]))

    def tensor(self, name: str) -> Tensor:
        """Any tensor as plain numbers: float types as stored, quantized ones dequantized to float32."""
        from toolkit.artifacts.canonical import Dense

        if name in self.towers:
            assert self.eyes is not None and self.vision is not None
            return self.eyes.tensor(self.vision, self.towers[name])
        if (number := self.sources[name][1].number) is not None:
            import torch

            return torch.full(self.infos[name].shape, number)
        weight = self.weight(name)
        tensor = weight.weight if isinstance(weight, Dense) else weight.dequantize()
        change = self.sources[name][1]
        tensor = (-tensor).log() if change.decay else tensor
        return tensor - 1 if change.plus_one else tensor

    def write_side_files(self) -> Path:
        """Directory in the cache with the tokenizer and configs of this file, written on first use of this version.
        Atomic."""
        whole = hashlib.sha256(f"{__version__}\n".encode())
        whole.update(self.container.data[: _data_start(self.container)].data)
        if self.eyes is not None:
            whole.update(self.eyes.container.data[: _data_start(self.eyes.container)].data)
        return made_once(toolkit_home() / "gguf" / whole.hexdigest()[:32], self.write_configs)

    def write_configs(self, target: Path) -> None:
        """Write config.json, generation_config.json, tokenizer files and chat template."""
        context = self.config["max_position_embeddings"]
        write_tokenizer(self.container.path, self.container.metadata, context, target)
        write_json_object(target / "config.json", self.config)
        write_json_object(target / "generation_config.json", self.generation_config)
        if (pooling := _pooling(self.container.metadata)) is not None:
            write_json_object(target / POOLING, {"pooling_mode": pooling})
        if self.eyes is not None:
            write_json_object(target / "preprocessor_config.json", self.eyes.preprocessor)


def _pooling(metadata: Mapping[str, Any]) -> str | None:
    """What a file says of how a vector is made of a text, in sentence-transformers' words; None: nothing."""
    return _POOLINGS.get(metadata.get(f"{metadata['general.architecture']}.pooling_type", 0))


def _data_start(container: GgufContainer) -> int:
    return min((info.start for info in container.tensors.values()), default=0)


def open_gguf(path: Path) -> GgufFile:
    """Open and check a GGUF file from its tables alone, and what stands beside it that the model sees with. Raises
    ToolkitError, one line that names file and cause."""
    container = join_parts(read_container(path))
    metadata = container.metadata
    check_kinds(path, metadata)
    tokens, padding = metadata.get("tokenizer.ggml.tokens") or (), metadata.get(_PADDING)
    if padding is not None and not 0 <= padding < len(tokens):
        del metadata[_PADDING]  # as llama.cpp does, and nothing is padded
    family, spelling = family_of(path, metadata)
    factors = {
        name: container.raw(name).view("<f4")
        for name in _FACTORS
        if name in container.tensors and container.tensors[name].dtype == "F32"
    }
    config = hf_config(path, family, spelling, metadata, container.tensors, factors)
    infos: dict[str, TensorInfo] = {}
    found: dict[str, tuple[str, Change]] = {}
    eyes, text = open_eyes(path, container), config
    if eyes is not None:
        shared = {name: text[name] for name in SHARED if name in text}
        config = {"text_config": text, **shared, **eyes.config}
    spec, stored = build(config, f"{path}: config.json")
    read = [item for item in stored if item.kind != "vision"]
    tensors, whole = dict(container.tensors), spec
    if text.get(FURTHER):
        spelling, whole, more = _with_mtp(path, spelling, config, spec, tensors)
        read += more
    for name, info, source, change in hf_tensors(path, spelling, tensors, whole, read, text):
        infos[name], found[name] = info, (source, change)
    for name, info, change in listed_numbers(path, spelling, metadata, spec, read):
        infos[name], found[name] = info, ("", change)
    generation = _generation_config(path, metadata)
    if eyes is None or spec.vision is None:
        return GgufFile(container, config, generation, infos, found)
    towers = eyes.find(spec.vision, stored)
    infos |= {name: info for name, (info, _) in towers.items()}
    items = {name: item for name, (_, item) in towers.items()}
    return GgufFile(container, config, generation, infos, found, eyes, spec.vision, items)


def _with_mtp(
    path: Path, spelling: Gguf, config: dict[str, Any], spec: DecoderSpec, tensors: dict[str, TensorInfo]
) -> tuple[Gguf, DecoderSpec, list[StoredTensor]]:
    """Names, spec and modules of a file with a layer for multi-token prediction behind the model's, the first of which
    is read; of ``tensors`` what is left out is taken."""
    n = len(spec.layers)
    for name in list(tensors):
        begin, block, rest = (*name.split(".", 2), "", "")[:3]
        if begin == "blk" and NUMBER.fullmatch(block) and int(block) >= n + (not rest.startswith(COPIES)):
            del tensors[name]
    deep = build(deeper(config, spec), f"{path}: config.json")
    names = {stem: stem for stem in NEXTN}
    more = nextn_of(deep, n, apart=spelling.mtp_apart)
    return replace(spelling, names={**spelling.names, **names}), deep[0], more


def _generation_config(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    ends = end_ids(metadata)
    found = {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": metadata.get(_PADDING),
        "suppress_tokens": never_drawn(path, metadata) or None,
    }
    return {name: value for name, value in found.items() if value is not None}
