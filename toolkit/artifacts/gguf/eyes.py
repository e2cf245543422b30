"""Reading llama.cpp's second file: what a model sees with, presented under Hugging Face names."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.artifacts.formats.layout import FLOATS
from toolkit.artifacts.gguf.architectures import row_order
from toolkit.artifacts.gguf.container import GgufContainer, read_container
from toolkit.artifacts.gguf.keys import Keys, check_kinds
from toolkit.artifacts.manifest import EYES
from toolkit.artifacts.weight_files.find import gguf_parts
from toolkit.artifacts.weight_files.safetensors_file import TensorInfo
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.models.eyes.mmproj import Mmproj, by_pixel
from toolkit.models.eyes.vision import Shapes, VisionSpec, tensors
from toolkit.models.family import Family
from toolkit.models.gguf import MOST_LAYERS
from toolkit.models.registry import families, get
from toolkit.models.spec import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("toolkit.artifacts")

FILE = "mmproj.gguf"  # beside model.gguf
_SWAPPED = {"up": "down", "down": "up"}
_OLDER = {"v.image_newline": "model.image_newline"}  # names of tensors in files of older versions


class _OfAnother(ToolkitError):
    """The file is not for the language model beside it, as far as can be told."""


@dataclass(frozen=True)
class _Clip(Keys):
    """``toolkit.models.eyes.mmproj.Clip`` over a file. ``tokens``: of the language model."""

    tensors: Mapping[str, TensorInfo]
    tokens: Sequence[str]

    def top(self, key: str) -> int:
        value = self.metadata.get(f"clip.{key}")
        if not isinstance(value, int) or isinstance(value, bool):
            raise ToolkitError(f"{self.path}: clip.{key}: expected a whole number, found {value!r:.40}")
        return value

    def numbers(self, key: str) -> list[float]:
        value = self.value(key)
        if not isinstance(value, np.ndarray) or len(value) != 3:
            raise self.fail(key, value, "three numbers")
        return [float(str(x)) for x in value.astype(np.float32)]

    def wholes(self, key: str) -> list[int]:
        value = self.value(key, np.zeros(0, np.int32))
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu" or value.size > MOST_LAYERS:
            raise self.fail(key, value, "a list of whole numbers")
        return [int(x) for x in value]

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors

    def text(self, key: str) -> str:
        value = self.value(key, "")
        if not isinstance(value, str):
            raise self.fail(key, value, "a text")
        return value

    def rows(self, tensor: str) -> int:
        info = self.tensors.get(tensor)
        if info is None or len(info.shape) not in (2, 3):
            raise ToolkitError(f"{self.path}: tensor {tensor}: expected a matrix, found {info}")
        return info.shape[-2]

    @property
    def inner(self) -> int:
        rows = self.rows("v.blk.0.ffn_up.weight")
        columns = self.tensors["v.blk.0.ffn_up.weight"].shape[1]
        return rows if columns == self.whole("embedding_length") else columns

    @property
    def activation(self) -> str:
        flags = {name: bool(self.metadata.get(f"clip.use_{name}")) for name in ("silu", "gelu")}
        return next((name for name, there in flags.items() if there), "quick_gelu")

    def knows(self, text: str) -> bool:
        return text in self.tokens

    def token(self, text: str) -> int:
        if not self.knows(text):
            raise _OfAnother(f"{self.path}: the model beside it has no token {text}, which its pictures need")
        return self.tokens.index(text)


@dataclass(frozen=True)
class Eyes:
    """``config``: of the whole model but for the language model inside; ``preprocessor``: preprocessor_config.json."""

    container: GgufContainer
    family: Family
    spelling: Mmproj
    config: dict[str, Any]
    preprocessor: dict[str, Any]

    def find(self, spec: VisionSpec, stored: Sequence[StoredTensor]) -> dict[str, tuple[TensorInfo, StoredTensor]]:
        """What stands for each stored tensor of the tower, by its name. Raises ToolkitError for one that is missing or
        has another size."""
        found, shapes = {}, tensors(spec)
        for item in stored:
            if item.kind != "vision" or (item.optional and not self._there(spec, item, shapes)):
                continue
            kinds = {info.dtype for part in item.parts for _, info in self._sources(spec, part.name, shapes)}
            kind = kinds.pop() if len(kinds) == 1 and kinds <= set(FLOATS) else "F32"
            found[item.name] = (TensorInfo(kind, item.shape, 0, 0), item)
        return found

    def tensor(self, spec: VisionSpec, item: StoredTensor) -> Tensor:
        """A stored tensor of the tower."""
        import torch

        shapes = tensors(spec)
        if self.spelling.as_stored:
            return self._numbers(spec, item.parts[0].name, shapes).reshape(item.shape)
        parts = [self._canonical(spec, part.name, shapes).reshape(-1) for part in item.parts]
        wide = parts if len({part.dtype for part in parts}) == 1 else [part.float() for part in parts]
        found = torch.empty(math.prod(item.shape), dtype=wide[0].dtype)
        for part, numbers in zip(item.parts, wide, strict=True):
            places = [found[slice(*rows)] for rows in part.rows or ((0, len(found)),)]
            for place, some in zip(places, numbers.split([len(place) for place in places]), strict=True):
                place.copy_(some)
        return found.reshape(item.shape)

    def _there(self, spec: VisionSpec, item: StoredTensor, shapes: Shapes) -> bool:
        return all(self._name(spec, part.name, shapes) in self.container.tensors for part in item.parts)

    def _name(self, spec: VisionSpec, name: str, shapes: Shapes) -> str:
        """Of the tensor; older files have the MLP's two matrices the other way round."""
        found, parts = self.spelling.spelled(name, spec), name.split(".")
        if len(parts) == 5 and parts[3] in _SWAPPED:
            weight = self.container.tensors.get(found.rpartition(".")[0] + ".weight")
            wanted = shapes[".".join([*parts[:4], "weight"])]
            if weight is not None and weight.shape != wanted and weight.shape == wanted[::-1]:
                return found.replace(f"ffn_{parts[3]}", f"ffn_{_SWAPPED[parts[3]]}")
        return found if found in self.container.tensors else _OLDER.get(found, found)

    def _sources(self, spec: VisionSpec, name: str, shapes: Shapes) -> Iterator[tuple[str, TensorInfo]]:
        """The tensors that hold a parameter: of a patch's two frames each has one."""
        first = self._name(spec, name, shapes)
        names = [first, f"{first}.1"] if f"{first}.1" in self.container.tensors else [first]
        size, wanted = 0, (3 if self._is_joined(name) else 1) * math.prod(shapes[name])
        for one in names:
            info = self.container.tensors.get(one)
            if info is None:
                raise ToolkitError(f"{self.container.path}: tensor {one} is missing; fetch the file again")
            size += math.prod(info.shape)
            yield one, info
        if size != wanted:
            raise ToolkitError(f"{self.container.path}: tensor {first}: expected {shapes[name]}, found {size} numbers")

    def _is_joined(self, name: str) -> bool:
        return self.spelling.joined and name.split(".")[3:4] in (["q"], ["k"], ["v"])

    def _numbers(self, spec: VisionSpec, name: str, shapes: Shapes) -> Tensor:
        """Of a parameter, as they stand there."""
        import torch

        from toolkit.artifacts.canonical import Dense
        from toolkit.artifacts.gguf.blocks import from_blocks

        parts = []
        for source, info in self._sources(spec, name, shapes):
            flat = (math.prod(info.shape[:-1]), info.shape[-1])
            weight = from_blocks(info.dtype, self.container.raw(source), flat)
            parts.append((weight.weight if isinstance(weight, Dense) else weight.dequantize()).reshape(info.shape))
        found = parts[0] if len(parts) == 1 else torch.stack(parts, 2)
        return found.reshape(-1, 3, spec.tower.patch**2).transpose(1, 2) if by_pixel(name, spec.tower) else found

    def _canonical(self, spec: VisionSpec, name: str, shapes: Shapes) -> Tensor:
        import torch

        found = self._numbers(spec, name, shapes)
        if self._is_joined(name):
            found = found.chunk(3)["qkv".index(name.split(".")[3])]
        if name in self.spelling.turned:
            found = found.T
        if self.spelling.heads and name.split(".")[3:4] in (["q"], ["k"]):
            found = found[torch.from_numpy(row_order(found.shape[0], spec.tower.heads))]
        if name.removesuffix(".weight") in self.spelling.plus_one:
            found = found - 1
        return found


def open_eyes(path: Path, language: GgufContainer) -> Eyes | None:
    """What stands beside the language model at ``path``: ``mmproj-`` and its name, or the first by name that fits it
    (width, architecture, tokens); None where there is none. Raises ToolkitError for one that cannot be read, unless it
    may be another model's: where several lie there, and it has not this one's name."""
    named = path.with_name(f"mmproj-{path.name}")
    others = [file for file in sorted(path.parent.glob(EYES)) if file not in (named, path)]
    width = language.metadata.get(f"{language.metadata.get('general.architecture')}.embedding_length")
    for file in [named] * named.is_file() + others:
        try:
            container = read_container(file)
            check_kinds(file, container.metadata)
        except ToolkitError as error:
            parts = gguf_parts(path)
            if file == named or not set(path.parent.glob("*.gguf")).difference([path], others, parts):
                raise
            _tell(path, str(error))
            continue
        if file != named and container.metadata.get("clip.vision.projection_dim") != width:
            continue
        try:
            return _read(container, language.metadata)
        except _OfAnother as error:  # several models may lie in a directory
            if file == named:
                raise
            _tell(path, str(error))
    return None


@cache
def _tell(path: Path, why: str) -> None:
    log.warning("%s is read without a file beside it: %s", path, why)


def _read(container: GgufContainer, language: Mapping[str, Any]) -> Eyes:
    """``language``: the metadata of the file beside it."""
    metadata = container.metadata
    kind = metadata.get("clip.vision.projector_type", metadata.get("clip.projector_type"))
    known = [family.gguf for family in families() if isinstance(family.gguf, Mmproj)]
    fitting = [one for one in known if one.projector == kind]
    if not fitting:
        names = ", ".join(dict.fromkeys(one.projector for one in known))
        where = f"{container.path}: clip.projector_type"
        raise _OfAnother(f"{where}: expected {names}, found {kind!r:.40}; without the file texts are read")
    spelling = _spelling(container.path, fitting, language.get("general.architecture"))
    tokens = language.get("tokenizer.ggml.tokens") or []
    clip = _Clip(container.path, metadata, "clip.vision", container.tensors, tokens)
    try:
        fields, preprocessor = spelling.read(clip)
    except ToolkitError as error:  # a family names its key alone
        named = str(error).startswith(str(container.path))
        raise error if named else ToolkitError(f"{container.path}: {error}") from None
    fields = {"model_type": spelling.family, **fields}
    family = get(fields["model_type"])
    config = {"architectures": [family.architectures[0]], **fields}
    colours = {"image_mean": clip.numbers("image_mean"), "image_std": clip.numbers("image_std")}
    return Eyes(container, family, spelling, config, preprocessor | colours)


def _spelling(path: Path, fitting: Sequence[Mmproj], arch: Any) -> Mmproj:
    """The one of a language model of ``arch``, else one for those of any."""
    own = [one for one in fitting if one.text is not None and one.text.arch == arch]
    found = own or [one for one in fitting if one.text is None]
    if not found:
        archs = ", ".join(dict.fromkeys(one.text.arch for one in fitting if one.text is not None))
        raise _OfAnother(f"{path}: it is for models of {archs}, the one beside it is {arch}")
    return found[0]
