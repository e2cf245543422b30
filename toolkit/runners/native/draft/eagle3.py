"""A draft head (EAGLE-3) on the native library, its vocabulary in 8 bits and all before it in 4: the fewer bytes, the
sooner a token is guessed."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from toolkit.artifacts.canonical import Dense
from toolkit.artifacts.drafts.draft_head import HeadSpec
from toolkit.models.rope import inv_freq
from toolkit.runners.base import RunnerError
from toolkit.runners.drafts.head import F32, I64, Drawn, Rows, Words
from toolkit.runners.native import library
from toolkit.runners.native.draft.join import NativeJoin, Normed
from toolkit.runners.native.mixers import flat
from toolkit.runners.native.packing.pack_model import pack_head
from toolkit.runners.native.packing.packed import LANES, PackedTensor
from toolkit.runners.native.tensors import Record, Tensors

BITS = 4  # a wrong guess costs time alone, and a trained head guesses as well so
WORD_BITS = 8  # of its vocabulary; in 4 it would be right less often
GROUP = 32  # inputs that have a scale in 4 bits; where they make no groups there are 8
_LAYER = "layers.0."
_MATRICES = {  # of draft_read.cpp
    **{x: f"{_LAYER}self_attn.{x}_proj" for x in "qkvo"},
    **{x: f"{_LAYER}mlp.{x}_proj" for x in ("gate", "up", "down")},
    "vocabulary": "lm_head",
}
_NORMS = {
    "word_norm": f"{_LAYER}input_layernorm",
    "state_norm": f"{_LAYER}hidden_norm",
    "mlp_norm": f"{_LAYER}post_attention_layernorm",
    "last_norm": "norm",
}


def packed_bytes(name: str, shape: tuple[int, ...]) -> int:
    """Of a matrix [out, in] of a head."""
    return _packed(name, torch.empty(shape, device="meta")).meta.nbytes


def _packed(name: str, weight: torch.Tensor) -> PackedTensor:
    few = name != "lm_head.weight" and weight.shape[1] % GROUP == 0
    return pack_head("draft head", Dense(weight), BITS if few else WORD_BITS, [])


class Cells:
    """Of one text the keys and values of its rows ``first``, ``first`` + 1 …, ``length`` of them: cells of 16 rows."""

    def __init__(self, first: int, cell: int) -> None:
        self.first, self.length = first, 0
        self.keys, self.values = (np.zeros((4, cell), np.uint8) for _ in range(2))  # finite behind the last row too

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def grow(self, count: int) -> None:
        """Make room for so many rows more."""
        need, cells = -(-(self.length + count) // LANES), len(self.keys)
        if need > cells:
            more = np.zeros((max(need, 2 * cells) - cells, self.keys.shape[1]), np.uint8)
            self.keys, self.values = (np.concatenate([held, more]) for held in (self.keys, self.values))


class NativeHead:
    """``weights``: by the names of ``HeadSpec.shapes``, float32; ``words``: its embedding; ``d2t``: see
    ``draft_head.py`` of artifacts. Implements ``Reader``."""

    name = "eagle3"

    def __init__(self, spec: HeadSpec, weights: Mapping[str, F32], words: Words, d2t: I64 | None, threads: int) -> None:
        self.spec = spec
        self.width = spec.hidden_size
        self._words = words
        ids = np.arange(spec.draft_vocab_size)
        self.ids: I64 = ids if d2t is None else ids + d2t  # in the model's vocabulary, of each of its own
        self._cell = 2 * LANES * spec.kv_heads * -(-spec.head_dim // LANES) * LANES  # bytes of one cell, in bfloat16
        self._library = library.load(library.library_path())
        self._join = NativeJoin(_packed_of(weights, "fc"), threads, norm=_before_join(spec, weights))
        tensors = Tensors({})
        names, values = zip(*flat(_record(spec, weights, tensors)), strict=True)
        self._held = tensors.found  # which the library points into
        self._head = library.create(self._library.tk_draft_create, names, values, self._held, threads)
        if not self._head:
            raise RunnerError(f"the draft head cannot be made: {library.error(self._library)}")

    def open(self, first: int) -> Cells:
        return Cells(first, self._cell)

    def grow(self, text: Cells, count: int) -> bool:
        return True

    def forget(self, text: Cells) -> None:
        """Its memory goes with it."""

    def release(self) -> None:
        """Its weights stay."""

    def wake(self) -> None:
        """Nothing is gone."""

    def close(self) -> None:
        """Free what the library holds; does nothing the second time."""
        if self._head:
            self._library.tk_draft_free(self._head)
        self._head = None

    def __del__(self) -> None:
        if hasattr(self, "_head"):
            self.close()

    def fuse(self, states: F32) -> F32:
        """[rows, fused, hidden] of the model's hidden states → [rows, hidden]."""
        self._loaded()
        return self._join(states)

    def step(self, ids: I64, states: F32, rows: Sequence[Rows]) -> Drawn:
        """See ``Reader``. Raises RunnerError where it fails."""
        words, given = self._words(ids), np.ascontiguousarray(states, np.float32)
        counts = np.array([r.count for r in rows], np.int64)
        lengths = np.array([r.kept.length for r in rows], np.int64)
        places = lengths + [r.kept.first for r in rows]
        for r in rows:
            r.kept.grow(r.count)
        keys = np.array([r.kept.keys.ctypes.data for r in rows], np.uintp)
        values = np.array([r.kept.values.ctypes.data for r in rows], np.uintp)
        out, best = np.empty((len(rows), self.width), np.float32), np.empty(len(rows), np.int64)
        sure = np.empty(len(rows), np.float32)
        passed = (words, given, counts, places, lengths, keys, values, out, best, sure)
        arrays = library.DraftArrays(len(ids), len(rows), *(library.address(array) for array in passed))
        self._check(self._library.tk_draft_step(self._loaded(), ctypes.byref(arrays)))
        for r in rows:
            r.kept.length += r.count
        return Drawn(out, self.ids[best], sure)

    def _loaded(self) -> int:
        if self._head is None:
            raise RunnerError("the draft head is closed")
        return int(self._head)

    def _check(self, code: int) -> None:
        if code:
            raise RunnerError(f"the draft head: {library.error(self._library)}")


def _packed_of(weights: Mapping[str, F32], name: str) -> PackedTensor:
    whole = torch.from_numpy(np.ascontiguousarray(weights[f"{name}.weight"]))
    return _packed(f"{name}.weight", whole).in_memory()


def _before_join(spec: HeadSpec, weights: Mapping[str, F32]) -> Normed | None:
    """Of each state that is joined, or of all together; None where there is none."""
    count = weights["fc.weight"].shape[1] // spec.reads
    names = ["input_norm"] if spec.norm_before_fc else [f"fc_norm.{i}" for i in range(count if spec.fc_norm else 0)]
    if not names:
        return None
    return Normed(np.concatenate([weights[f"{name}.weight"] for name in names]), len(names), spec.eps)


def _record(spec: HeadSpec, weights: Mapping[str, F32], t: Tensors) -> Record:
    """What draft_read.cpp reads."""

    def norm(name: str) -> Record:
        made = weights[f"{name}.weight"]
        return {"size": made.size, "sets": 1, "layer": False, "weight": t.numbers(made), "eps": spec.eps}

    freq, factor = inv_freq(spec.rope)
    return {
        "hidden": spec.hidden_size,
        "inner": spec.intermediate_size,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "norm_before_residual": spec.norm_before_residual,
        "norm_output": spec.norm_output,
        "freq": t.numbers(freq),
        "factor": factor,
        **{key: norm(name) for key, name in _NORMS.items()},
        **{f"{x}_norm": norm(f"{_LAYER}self_attn.{x}_norm") for x in "qk" if spec.qk_norm},
        **{key: {"matrix": t.add(_packed_of(weights, name))} for key, name in _MATRICES.items()},
    }
