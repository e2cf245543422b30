"""What programs of towers say of their stages, a record each; C++ reads them in tower_read.cpp."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from toolkit.models.vision import Stage, Tower
from toolkit.runners.native.mixers import ACTIVATIONS, Record, Tensors
from toolkit.runners.native.packed import BF16, DENSE, F16, LANES, PackedMeta, PackedTensor

Floats = NDArray[np.float32]
TOWER_ACTIVATIONS = ACTIVATIONS | {"quick_gelu": 7}


def floats(tensor: PackedTensor, part: slice = slice(None)) -> Floats:
    """The numbers of a vector, or a part of them, whatever type they are stored in."""
    dtype, data = tensor.meta.dtype, tensor.data
    stored = data.view({BF16: np.uint16, F16: np.float16}.get(dtype, np.float32))[: tensor.meta.rows][part]
    if dtype == BF16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def product(t: Tensors, name: str, bias: bool) -> Record:
    return {"linear": linear(t, name, bias)}


def linear(t: Tensors, name: str, bias: bool) -> Record:
    return {"matrix": t.named(f"{name}.weight"), "bias": vector_of(t, f"{name}.bias") if bias else None}


def vector_of(t: Tensors, name: str, offset: float = 0.0) -> int:
    return t.numbers(floats(t.weights[name]) + np.float32(offset))


def norm(t: Tensors, name: str, tower: Tower) -> Record:
    return norm_of(t, name, tower.hidden, tower.norm == "layer", tower.eps)


def norm_of(t: Tensors, name: str, size: int, layer: bool, eps: float, offset: float = 0.0) -> Record:
    weight, bias = vector_of(t, f"{name}.weight", offset), vector_of(t, f"{name}.bias") if layer else None
    return {"size": size, "sets": 1, "layer": layer, "weight": weight, "bias": bias, "eps": eps}


def layer(t: Tensors, tower: Tower, name: str, near: bool = False) -> Record:
    """``name``: how its tensors begin; ``near``: its tokens see those of their window alone."""
    width = tower.heads * tower.head_dim
    parts = ("gate", "up", "down") if tower.gated else ("up", "down")
    mlp = {part: linear(t, f"{name}.{part}", tower.mlp_bias) for part in parts}
    return {
        "heads": tower.heads,
        "head_dim": tower.head_dim,
        "turned": tower.positions != "learned" or tower.turned,
        "norm_after": tower.norm_after,
        "division": near,
        "norm1": norm(t, f"{name}.norm1", tower),
        "norm2": norm(t, f"{name}.norm2", tower),
        **{f"{x}_norm": norm_of(t, f"{name}.{x}_norm", width, False, 1e-6) for x in "qk" if tower.qk_norm},
        **{x: linear(t, f"{name}.{x}", tower.qkv_bias) for x in "qkv"},
        "o": linear(t, f"{name}.o", tower.o_bias),
        **{f"scale{k}": scale for k in (1, 2) if (scale := _scale(t, tower, name, k)) is not None},
        "mlp": {"activation": TOWER_ACTIVATIONS[tower.activation], "gate_scale": 1.0, "width": tower.inner, **mlp},
    }


def _scale(t: Tensors, tower: Tower, name: str, half: int) -> int | None:
    """What a half of the layer adds is multiplied by."""
    if tower.scaled:
        return vector_of(t, f"{name}.scale{half}")
    gate = t.weights.get(f"{name}.gate{half}")
    return None if gate is None else t.numbers(np.repeat(np.tanh(floats(gate)), tower.hidden))


def projected(t: Tensors, stage: Stage, width: int) -> Record:
    """A stage of the projector."""
    if stage.kind in ("rms", "layer"):
        return {"norm": norm_of(t, stage.name, width, stage.kind == "layer", stage.eps, stage.offset)}
    if stage.kind == "matrix":
        return {"product": turned_product(t, stage.name, stage.inputs, stage.outputs)}
    if stage.kind == "linear":
        return {"product": product(t, stage.name, stage.bias)}
    if stage.kind == "gated":
        gate, up = (linear(t, f"{stage.name}.{part}_proj", stage.bias) for part in ("gate", "up"))
        return {"product": {"gate": gate, "linear": up}}
    return {"activation": TOWER_ACTIVATIONS[stage.kind]}


def turned_product(t: Tensors, name: str, inputs: int, outputs: int) -> Record:
    """Of a matrix that is stored [inputs, outputs], without a bias."""
    rows = -(-outputs // LANES) * LANES
    matrix = np.zeros((rows, inputs), np.float32)
    matrix[:outputs] = floats(t.weights[name]).reshape(inputs, outputs).T
    tiles = np.ascontiguousarray(matrix.reshape(-1, LANES, inputs).transpose(0, 2, 1))
    packed = PackedTensor(tiles.view(np.uint8).reshape(-1), PackedMeta(DENSE, outputs, inputs))
    return {"linear": {"matrix": t.add(packed), "bias": None}}


def resampler(t: Tensors, stage: Stage) -> dict[str, tuple[int, int, Record]]:
    """The stages of one that asks, by name: inputs, outputs and what each does."""
    name, wide = stage.name, stage.outputs

    def part(of: str) -> tuple[int, int, Record]:
        if of.startswith("ln"):
            return wide, wide, {"norm": norm_of(t, f"{name}.{of}", wide, True, stage.eps)}
        return wide, wide, {"product": product(t, f"{name}.{of}", True)}

    entry = stage.inputs, wide, {"product": product(t, f"{name}.kv_proj", False)}
    last = wide, wide, {"product": turned_product(t, f"{name}.proj", wide, wide)}
    middle = {of: part(of) for of in ("ln_kv", "k", "v", "ln_q", "q", "o", "ln_post")}
    return {"kv_proj": entry, **middle, "proj": last}
