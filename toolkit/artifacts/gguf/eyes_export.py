"""Writing llama.cpp's second file: what a model sees with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit import __version__
from toolkit.artifacts.checkpoint import Checkpoint
from toolkit.artifacts.gguf.architectures import row_order
from toolkit.artifacts.gguf.blocks import FLOATS
from toolkit.artifacts.gguf.container import TOOL_KEY
from toolkit.artifacts.gguf.writer import Entry, write_gguf
from toolkit.artifacts.manifest import title
from toolkit.artifacts.recipe import open_recipe
from toolkit.artifacts.weights import is_present, load_stored, split_parts
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.models.eyes.mmproj import BREAK, Mmproj, by_pixel, kernel
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.vision import VisionSpec, tensors
from toolkit.models.registry import get
from toolkit.models.spec import DecoderSpec, StoredTensor

FILE_TYPES = {"F32": 0, "F16": 1, "BF16": 32}
NO_BF16 = "mm.input_projection.weight"  # which llama.cpp multiplies in float16 or float32 alone
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu", "silu": "silu"}


@dataclass(frozen=True)
class _Piece:
    entry: Entry
    read: Callable[[], Tensor]


def write_eyes(checkpoint: Checkpoint, spec: DecoderSpec, stored: list[StoredTensor], path: Path) -> None:
    """Write the tower of ``checkpoint`` to ``path``, matrices in the 16 or 32 bits that they are stored in, everything
    else in float32. Raises ToolkitError for one that llama.cpp does not compute."""
    metadata, pieces = _planned(checkpoint, spec, stored)
    data = (piece.read().contiguous() for piece in pieces)
    write_gguf(path, metadata, [piece.entry for piece in pieces], (_bytes(tensor) for tensor in data))


def check_eyes(checkpoint: Checkpoint, spec: DecoderSpec, stored: list[StoredTensor]) -> None:
    """Raise what ``write_eyes`` would, reading headers alone."""
    _planned(checkpoint, spec, stored)


def _planned(
    checkpoint: Checkpoint, spec: DecoderSpec, stored: list[StoredTensor]
) -> tuple[dict[str, Any], list[_Piece]]:
    vision, spelling = spec.vision, get(spec.family).gguf
    assert vision is not None and isinstance(spelling, Mmproj)
    recipe = open_recipe(checkpoint.tokenizer_dir)
    assert recipe is not None
    pieces = list(_pieces(checkpoint, vision, stored, spelling))
    if spelling.lines:
        pieces.append(_break(checkpoint, spec, stored, recipe))
    kinds = [piece.entry.kind for piece in pieces if len(piece.entry.shape) == 2]
    metadata = _metadata(spec, vision, recipe, spelling) | {
        "general.name": title(checkpoint.path),
        "general.file_type": FILE_TYPES[max(set(kinds), key=kinds.count)],
    }
    return metadata, pieces


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    return tensor.view(torch.uint8).numpy().reshape(-1)


def _metadata(spec: DecoderSpec, vision: VisionSpec, recipe: Recipe, spelling: Mmproj) -> dict[str, Any]:
    tower = vision.tower
    if tower.taken and tower.heads * tower.head_dim != tower.hidden:
        raise ToolkitError(f"gguf: llama.cpp's towers have heads of {tower.hidden // tower.heads} numbers here")
    found: dict[str, Any] = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        TOOL_KEY: __version__,
        "clip.has_vision_encoder": True,
        "clip.projector_type": spelling.projector,
        "clip.vision.projection_dim": spec.hidden_size,
        "clip.vision.image_size": tower.grid[0] * tower.patch or recipe.long,
        "clip.vision.patch_size": tower.patch,
        "clip.vision.embedding_length": tower.hidden,
        "clip.vision.feed_forward_length": tower.inner,
        "clip.vision.block_count": tower.taken,
        "clip.vision.attention.head_count": tower.heads,
        "clip.vision.attention.layer_norm_epsilon": float(tower.eps),
        "clip.vision.image_mean": np.array(recipe.mean, np.float32),
        "clip.vision.image_std": np.array(recipe.std, np.float32),
    }
    if tower.activation in ACTIVATIONS:
        found[f"clip.use_{ACTIVATIONS[tower.activation]}"] = True
    return found | spelling.write(vision, recipe)


def _pieces(
    checkpoint: Checkpoint, vision: VisionSpec, stored: list[StoredTensor], spelling: Mmproj
) -> Iterator[_Piece]:
    for item in stored:
        if item.kind != "vision" or (item.optional and not is_present(checkpoint, item)):
            continue
        for parts in _together(item, spelling):
            name = item.parts[parts[0]].name
            if not _runs(name, vision):
                continue
            try:
                target = spelling.spelled(name, vision)
            except KeyError:
                raise ToolkitError(f"gguf: {name} has no place in llama.cpp's {spelling.projector}") from None
            shape = _shape([item.parts[i].name for i in parts], vision, spelling)
            if spelling.as_stored and not by_pixel(name, vision.tower):
                shape = item.shape or (1,)
            kind = _kind(checkpoint, item, name, shape, target, spelling)
            for frame in range(vision.tower.frames if name == "vision.patch.weight" else 1):
                entry = Entry(target + (f".{frame}" if frame else ""), shape, kind)
                yield _Piece(entry, _reader(checkpoint, item, parts, vision, spelling, entry, frame))
    for target, values in (spelling.more(vision) if spelling.more is not None else {}).items():
        yield _Piece(Entry(target, values.shape, "F32"), partial(torch.from_numpy, values))


def _together(item: StoredTensor, spelling: Mmproj) -> list[range]:
    """Which parts of a stored tensor become one there."""
    count = len(item.parts)
    return [range(count)] if spelling.joined and count == 3 else [range(i, i + 1) for i in range(count)]


def _runs(name: str, vision: VisionSpec) -> bool:
    """Whether the tower needs it: layers behind the last that runs do not, nor a norm that is not used."""
    parts = name.split(".")
    if parts[1] == "layers":
        return int(parts[2]) < vision.tower.taken
    return parts[1] != "post_norm" or vision.tower.post_norm == "used"


def _shape(names: list[str], vision: VisionSpec, spelling: Mmproj) -> tuple[int, ...]:
    """Of the tensor that these parameters, one below the other, become."""
    shapes, tower = tensors(vision), vision.tower
    if names[0] == "vision.patch.weight" and not tower.patch_norm:
        return (tower.hidden, 3, tower.patch, tower.patch)
    if names[0] == "vision.position" and tower.sides:
        return (2, tower.sides, tower.hidden)
    found = shapes[names[0]]
    if names[0] in spelling.kernels:
        return kernel(found, vision.merge)
    return found[::-1] if names[0] in spelling.turned else (len(names) * found[0], *found[1:])


def _kind(
    checkpoint: Checkpoint, item: StoredTensor, name: str, shape: tuple[int, ...], target: str, spelling: Mmproj
) -> str:
    if len(shape) != 2 or name in ("vision.patch.weight", "vision.position") or name in spelling.vectors:
        return "F32"
    stored = checkpoint.info(item.weight_name).dtype
    kind = stored if stored in FLOATS else "F32"
    return "F16" if target == NO_BF16 and kind == "BF16" else kind


def _reader(
    checkpoint: Checkpoint,
    item: StoredTensor,
    parts: range,
    vision: VisionSpec,
    spelling: Mmproj,
    entry: Entry,
    frame: int,
) -> Callable[[], Tensor]:
    def read() -> Tensor:
        name, found = item.parts[parts[0]].name, _numbers(checkpoint, item, parts, spelling)
        if name == "vision.patch.weight" and vision.tower.frames > 1:
            found = found.reshape(vision.tower.hidden, 3, vision.tower.frames, -1)[:, :, frame]
        if by_pixel(name, vision.tower):
            found = found.reshape(-1, vision.tower.patch**2, 3).transpose(1, 2)
        found = found.reshape(entry.shape[::-1]).T if name in spelling.turned else found.reshape(entry.shape)
        if spelling.heads and name.split(".")[3:4] in (["q"], ["k"]):
            found = found[torch.from_numpy(np.argsort(row_order(found.shape[0], vision.tower.heads)))]
        if name.removesuffix(".weight") in spelling.plus_one:
            found = found.float() + 1
        return found.to(FLOATS[entry.kind])

    return read


def _numbers(checkpoint: Checkpoint, item: StoredTensor, parts: range, spelling: Mmproj) -> Tensor:
    weight, bias = load_stored(checkpoint, item)
    if spelling.as_stored:
        assert isinstance(weight, Tensor)
        return weight.reshape(-1)
    found = [value for _, value in split_parts(item, weight, bias)]
    return torch.cat([torch.as_tensor(found[i]).reshape(-1) for i in parts])


def _break(checkpoint: Checkpoint, spec: DecoderSpec, stored: list[StoredTensor], recipe: Recipe) -> _Piece:
    from toolkit.artifacts.text.tokenizer import Tokenizer

    ids = Tokenizer.open(checkpoint.tokenizer_dir).encode(recipe.before, add_special_tokens=False)
    if len(ids) != 1:
        raise ToolkitError(f"gguf: the tokenizer has no token {recipe.before}, which llama.cpp keeps with the tower")
    item = next(item for item in stored if item.kind == "embed")

    def read() -> Tensor:
        table, _ = load_stored(checkpoint, item)
        return (table if isinstance(table, Tensor) else table.dequantize())[ids[0]].float()

    return _Piece(Entry(BREAK, (spec.hidden_size,), "F32"), read)
