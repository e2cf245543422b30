"""How what a family sees with is spelled in a second GGUF file, beside that of the language model: llama.cpp's mmproj.

Names are those of the ``gguf`` package's table, keys those of its ``Clip`` and ``ClipVision``; what no key tells,
readers know of the projector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.models.eyes.pictures import Recipe
from toolkit.models.eyes.vision import PREFIX, Tower, VisionSpec
from toolkit.models.gguf import Gguf

BREAK = "v.token_embd.img_break"  # the embedding of what stands between a picture's lines, for towers that have lines
# Canonical names of the tower, ``vision.`` and layers' numbers apart → stems of tensors there.
TOWER = {
    "patch": "v.patch_embd",
    "class": "v.class_embd",
    "position": "v.position_embd.weight",
    "pre_norm": "v.pre_ln",
    "post_norm": "v.post_ln",
    "norm1": "v.blk.{}.ln1",
    "norm2": "v.blk.{}.ln2",
    **{name: f"v.blk.{{}}.attn_{name}" for name in ("q", "k", "v", "q_norm", "k_norm")},
    "o": "v.blk.{}.attn_out",
    **{name: f"v.blk.{{}}.ffn_{name}" for name in ("gate", "up", "down")},
    "scale1": "v.blk.{}.ls1.weight",
    "scale2": "v.blk.{}.ls2.weight",
    "newline": "v.image_newline",
    "begin": "v.boi",
    "end": "v.eoi",
}
JOINED = "v.blk.{}.attn_qkv"
DEEP = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}  # of v.deepstack.LAYER
LAYER = "clip.vision.feature_layer"


class Clip(Protocol):
    """The entries ``clip.vision.<key>`` of a file, with types; what is missing or impossible raises ToolkitError."""

    def top(self, key: str) -> int:
        """The whole number ``clip.<key>``."""

    def whole(self, key: str, default: int | None = None) -> int: ...

    def number(self, key: str, default: float | None = None) -> float: ...

    def wholes(self, key: str) -> list[int]:
        """A list of whole numbers, empty where the file has none."""

    def has(self, tensor: str) -> bool: ...

    def text(self, key: str) -> str:
        """Empty where the file has none."""

    def rows(self, tensor: str) -> int:
        """Of a matrix, or of each in a stack."""

    @property
    def inner(self) -> int:
        """Width of the tower's MLP, as its tensors have it."""

    @property
    def activation(self) -> str:
        """ "silu", "gelu" or "quick_gelu"."""

    def token(self, text: str) -> int:
        """The id of a token of the language model."""

    def knows(self, text: str) -> bool:
        """Whether the language model has the token."""


@dataclass(frozen=True)
class Mmproj:
    """One value of ``clip.projector_type``.

    ``names``: canonical names of the projector, ``vision.projector.`` apart → stems of tensors there. ``read``: what
    config.json says besides the language model, and preprocessor_config.json besides mean and deviation. ``write``:
    further metadata by whole keys; raises ToolkitError for what llama.cpp does not compute. ``family``: the one that a
    file is read as, where several write it and ``read`` gives no ``model_type``. ``text``: how the language model is
    spelled, where not as its own family's; of several with one projector, the one whose language model the file is
    beside. ``plus_one``: names of norms that are stored with the 1 that the model adds. ``heads``: rows of q and k
    stand neighbour by neighbour, as those of language models. ``lines``: ``BREAK`` is there. ``tower``: names that
    differ from ``TOWER``. ``joined``: q, k and v stand one below the other. ``as_stored``: rows stand as checkpoints
    have them, which the canonical parameter has in another order. ``turned``: canonical names of matrices that are
    stored transposed; ``kernels``: of those whose columns are stored as a square of so many pixels along a side.
    ``vectors``: of matrices that nothing is multiplied by, which are float32. ``more``: tensors that are no parameters.
    """

    projector: str
    names: Mapping[str, str]
    read: Callable[[Clip], tuple[dict[str, Any], dict[str, Any]]]
    write: Callable[[VisionSpec, Recipe], dict[str, Any]]
    family: str
    text: Gguf | None = None
    plus_one: frozenset[str] = field(default_factory=frozenset)
    heads: bool = False
    lines: bool = False
    tower: Mapping[str, str] = field(default_factory=dict)
    joined: bool = False
    as_stored: bool = False
    turned: frozenset[str] = field(default_factory=frozenset)
    kernels: frozenset[str] = field(default_factory=frozenset)
    vectors: frozenset[str] = field(default_factory=frozenset)
    more: Callable[[VisionSpec], Mapping[str, NDArray[np.float32]]] | None = None

    def spelled(self, name: str, spec: VisionSpec) -> str:
        """The tensor of a canonical parameter. KeyError where it has no place."""
        part, *rest = name.removeprefix(PREFIX).split(".")
        tower = {**TOWER, **self.tower}
        if part == "layers":
            number, part, *rest = rest
            stem = JOINED if self.joined and part in ("q", "k", "v") else tower[part]
            return ".".join([stem.format(number), *rest])
        if part == "projector":
            if (whole := self.names.get(".".join(rest))) is not None:
                return whole
            return ".".join([self.names[rest[0]], *rest[1:]]) if rest[0] in self.names else self._deep(rest)
        if part == "deep":
            branch, part, *rest = rest
            return ".".join([f"v.deepstack.{spec.deep[int(branch)].layer}.{DEEP[part]}", *rest])
        return ".".join([tower[part], *rest])

    def _deep(self, rest: list[str]) -> str:
        """Of a linear whose name has several parts."""
        return ".".join([self.names[".".join(rest[:-1])], rest[-1]])


def by_pixel(name: str, tower: Tower) -> bool:
    """Whether numbers of a patch stand pixel by pixel in the canonical parameter, which there stand colour by
    colour."""
    return tower.patch_last and name.removeprefix(PREFIX) in ("patch.weight", "patch_norm.weight", "patch_norm.bias")


def kernel(shape: tuple[int, ...], side: int) -> tuple[int, ...]:
    """[outputs, inputs, side, side] of a matrix whose inputs are those of a square of pixels, channel by channel."""
    return (shape[0], shape[1] // side**2, side, side)


def tower_fields(clip: Clip, gelu: str) -> dict[str, Any]:
    """``vision_config`` of towers like CLIP's. ``gelu``: which of them is meant."""
    act = clip.activation
    return {
        "hidden_size": clip.whole("embedding_length"),
        "intermediate_size": clip.inner,
        "num_hidden_layers": clip.whole("block_count"),
        "num_attention_heads": clip.whole("attention.head_count"),
        "image_size": clip.whole("image_size"),
        "patch_size": clip.whole("patch_size"),
        "layer_norm_eps": clip.number("attention.layer_norm_epsilon"),
        "hidden_act": gelu if act == "gelu" else act,
    }


def feature_layer(clip: Clip) -> int:
    """Behind which layer rows leave the tower; where no key says it, behind the last. llama.cpp drops one more then,
    and runs one too few of its own converter's files (its issue 25817)."""
    layers = clip.wholes("feature_layer")
    if len(layers) > 1:
        raise ToolkitError(f"{LAYER}: expected one layer, found {layers}: no model here reads rows of several")
    return layers[0] if layers else clip.whole("block_count")


def square(clip: Clip) -> dict[str, int]:
    side = clip.whole("image_size")
    return {"height": side, "width": side}
