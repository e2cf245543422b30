"""What programs of towers say of their stages, a record each; C++ reads them in tower_read.cpp."""

from __future__ import annotations

import math

import numpy as np

from toolkit.models.eyes.vision import BOUNDS, Stage, Tower
from toolkit.runners.native.mixers import ACTIVATIONS
from toolkit.runners.native.packing.packed import DENSE, LANES, Floats, PackedMeta, PackedTensor, floats
from toolkit.runners.native.tensors import Record, Tensors

TOWER_ACTIVATIONS = ACTIVATIONS | {"quick_gelu": 7}


def product(t: Tensors, name: str, bias: bool) -> Record:
    return {"linear": linear(t, name, bias)}


def linear(t: Tensors, name: str, bias: bool) -> Record:
    return {"matrix": t.named(f"{name}.weight"), "bias": vector_of(t, f"{name}.bias") if bias else None}


def vector_of(t: Tensors, name: str, offset: float = 0.0) -> int:
    return t.numbers(floats(t.weights[name]) + np.float32(offset))


def norm(t: Tensors, name: str, tower: Tower) -> Record:
    return norm_of(t, name, tower.hidden, tower.norm == "layer", tower.eps)


def norm_of(t: Tensors, name: str, size: int, layer: bool, eps: float, offset: float = 0.0) -> Record:
    weight = vector_of(t, f"{name}.weight", offset) if name else t.numbers(np.ones(size))
    bias = vector_of(t, f"{name}.bias") if layer else None
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
        **(_by_head(t, tower, name) if tower.by_head else {}),
        **{f"after{k}": norm(t, f"{name}.after{k}", tower) for k in (1, 2) if tower.norm_both},
        **({"scale": tower.scale} if tower.scale else {}),
        **({"clips": {part: _clip(t, f"{name}.{part}_clip") for part in (*"qkvo", *parts)}} if tower.clipped else {}),
        **{x: linear(t, f"{name}.{x}", tower.qkv_bias) for x in "qkv"},
        "o": linear(t, f"{name}.o", tower.o_bias),
        **{f"scale{k}": scale for k in (1, 2) if (scale := _scale(t, tower, name, k)) is not None},
        "mlp": {"activation": TOWER_ACTIVATIONS[tower.activation], "gate_scale": 1.0, "width": tower.inner, **mlp},
    }


def _by_head(t: Tensors, tower: Tower, name: str) -> Record:
    """Norms of each head of queries and keys, and of values."""
    names = {"q_norm": f"{name}.q_norm", "k_norm": f"{name}.k_norm", **({"v_norm": ""} if tower.norm_values else {})}
    norms = {key: norm_of(t, of, tower.head_dim, False, tower.eps) for key, of in names.items()}
    return {"by_head": True, **norms}


def _clip(t: Tensors, name: str) -> Record:
    return {bound: float(floats(t.weights[f"{name}.{bound}"]).reshape(())) for bound in BOUNDS}


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
    matrix = floats(t.weights[name]).reshape(inputs, outputs).T
    return {"linear": {"matrix": t.add(dense(matrix)), "bias": None}}


def dense(matrix: Floats) -> PackedTensor:
    """[outputs, inputs] as the library multiplies by it."""
    outputs, inputs = matrix.shape
    padded = np.zeros((-(-outputs // LANES) * LANES, inputs), np.float32)
    padded[:outputs] = matrix
    tiles = np.ascontiguousarray(padded.reshape(-1, LANES, inputs).transpose(0, 2, 1))
    return PackedTensor(tiles.view(np.uint8).reshape(-1), PackedMeta(DENSE, outputs, inputs))


def near(t: Tensors, name: str, channels: int) -> Record:
    """A convolution of each channel by itself, [channels, 1, kernel, kernel]."""
    stored = floats(t.weights[f"{name}.weight"]).reshape(channels, -1)
    kernel = math.isqrt(stored.shape[1])
    weight = np.zeros((kernel * kernel, -(-channels // LANES) * LANES), np.float32)
    weight[:, :channels] = stored.T
    return {"kernel": kernel, "weight": t.numbers(weight), "bias": vector_of(t, f"{name}.bias")}


def unfolded(cells: Floats, kernel: int, step: int) -> Floats:
    """What a convolution reads of [rows, columns, numbers] at each place: [rows, columns, numbers * kernel * kernel],
    as its weights have them."""
    found = np.lib.stride_tricks.sliding_window_view(cells, (kernel, kernel), (0, 1))[::step, ::step]
    return found.reshape(*found.shape[:2], -1)


Parts = dict[str, tuple[int, int, Record]]  # stages that one is made of, by name: inputs, outputs and what each does


def parts_of(t: Tensors, stage: Stage) -> Parts:
    """Of a stage whose rows numpy puts in order inside."""
    return _PARTS[stage.kind](t, stage)


def _resampler(t: Tensors, stage: Stage) -> Parts:
    name, wide = stage.name, stage.outputs
    entry = stage.inputs, wide, {"product": product(t, f"{name}.kv_proj", False)}
    last = wide, wide, {"product": turned_product(t, f"{name}.proj", wide, wide)}
    middle = {of: _part(t, stage, of, wide) for of in ("ln_kv", "k", "v", "ln_q", "q", "o", "ln_post")}
    return {"kv_proj": entry, **middle, "proj": last}


def _part(t: Tensors, stage: Stage, of: str, inputs: int) -> tuple[int, int, Record]:
    name = f"{stage.name}.{of}"
    if of.startswith("ln") or of.endswith("norm"):
        return inputs, inputs, {"norm": norm_of(t, name, inputs, True, stage.eps)}
    return inputs, stage.outputs, {"product": product(t, name, True)}


def _asking(t: Tensors, stage: Stage) -> Parts:
    return {of: _part(t, stage, of, stage.outputs if of == "o" else stage.inputs) for of in "qkvo"}


def _mining(t: Tensors, stage: Stage) -> Parts:
    widths = {"query": stage.inputs, "aux": stage.rows, "val": stage.rows}
    return {f"{of}{end}": _part(t, stage, f"{of}{end}", n) for of, n in widths.items() for end in ("_norm", "")}


_PARTS = {"resample": _resampler, "attend": _asking, "mine": _mining}
