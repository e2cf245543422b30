"""A checkpoint as a GGUF file: what goes where, in which type, and the bytes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit import __version__
from toolkit.artifacts.canonical import Codebook, Dense, GroupInt, Trellis, Weight
from toolkit.artifacts.checkpoint import Checkpoint
from toolkit.artifacts.formats.describe import form_name
from toolkit.artifacts.gguf.architectures import layouts_of, row_order, turns_neighbours
from toolkit.artifacts.gguf.blocks import FLOATS, to_blocks
from toolkit.artifacts.gguf.columns import take_columns
from toolkit.artifacts.gguf.container import TOOL_KEY
from toolkit.artifacts.gguf.fit import ORDER, fit, smallest
from toolkit.artifacts.gguf.hf_config import NEXTN as PREDICTS
from toolkit.artifacts.gguf.metadata import ModelMetadata, model_metadata
from toolkit.artifacts.gguf.mixtures import MIXTURES, Mixture, Place, columns_of, find_mixture, type_of
from toolkit.artifacts.gguf.quantize import Search, quantize
from toolkit.artifacts.gguf.vocabulary import vocabulary
from toolkit.artifacts.gguf.writer import Entry, write_gguf
from toolkit.artifacts.manifest import title
from toolkit.artifacts.weights import is_present, load_stored, split_parts
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError
from toolkit.models.drafts.mtp import NEXTN, Mtp, as_nextn
from toolkit.models.gguf import EXPERTS, PLAIN, Gguf, Layout
from toolkit.models.spec import AttentionSpec, DecoderSpec, Part, StoredTensor

AT_ONCE = 1 << 28  # numbers of a matrix that are rounded at once: Gemma 4's tables have nine times as many
Load = Callable[[StoredTensor], tuple[Weight | Tensor, Tensor | None]]
"""A stored module → (canonical weight or plain tensor, bias or None), as ``weights.load_stored`` gives it."""


@dataclass
class Piece:
    """One tensor of the file. ``sources``: (stored module, name of the part) of each matrix it is made of, more than
    one for experts; ``suffix`` "weight" or "bias". ``heads``: rows are interleaved for llama.cpp's rope in so many;
    ``as_stored``: the checkpoint has them as llama.cpp does.
    """

    name: str
    sources: list[tuple[StoredTensor, str]]
    suffix: str
    place: Place
    heads: int = 0
    as_stored: bool = False
    add: float = 0.0
    layout: Layout = PLAIN
    kind: str = "F32"
    rounded: bool = False


@dataclass
class Export:
    """A planned file. ``notes``: one line each on fall-backs and on what the file cannot say. ``folded``: what
    parameters are multiplied by, one number or one a row."""

    load: Load
    metadata: dict[str, Any]
    factors: dict[str, NDArray[np.float32]]
    pieces: list[Piece]
    notes: list[str]
    importance: Mapping[str, Tensor] = field(default_factory=dict)
    folded: Mapping[str, Tensor] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def types(self) -> dict[str, int]:
        """GGML type → how many matrices have it."""
        return dict(Counter(piece.kind for piece in self.pieces if piece.place.columns))

    def write(
        self, path: Path, progress: Callable[[int, int], None] | None = None, search: Search | None = None
    ) -> None:
        """Write the file; fills ``errors``: relative error of every matrix that is rounded, by canonical name.

        ``progress``: called with (tensors done, of how many). ``search``: of ``quantize``.
        """
        write_gguf(path, self.metadata, self._entries(), self._bytes(progress, search))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.size for entry in self._entries())

    def _entries(self) -> list[Entry]:
        factors = [Entry(name, factors.shape, "F32") for name, factors in self.factors.items()]
        return factors + [Entry(piece.name, _shape(piece), piece.kind) for piece in self.pieces]

    def _bytes(self, progress: Callable[[int, int], None] | None, search: Search | None) -> Iterator[NDArray[np.uint8]]:
        for factors in self.factors.values():
            yield factors.view(np.uint8)
        for i, piece in enumerate(self.pieces):
            if progress is not None:
                progress(i + 1, len(self.pieces))
            parts = [self._one(piece, item, name, search) for item, name in piece.sources]
            whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
            rows = list(piece.layout.rows)
            yield whole.reshape(len(rows), -1)[rows] if rows else whole

    def _one(self, piece: Piece, item: StoredTensor, name: str, search: Search | None) -> NDArray[np.uint8]:
        value = load_part(self.load, item, name, piece)
        if isinstance(value, Tensor):
            numbers = value.float() * self.folded.get(name, 1.0) + piece.add
            numbers = -numbers.exp() if piece.layout.decay else numbers
            return numbers.contiguous().numpy().view(np.uint8).reshape(-1)
        found: list[NDArray[np.uint8]] = []
        if not piece.rounded:
            for _, part in _at_once(value):
                exact = fit(part, piece.kind)
                assert exact is not None, (name, piece.kind)
                found.append(to_blocks(piece.kind, exact))
            return np.concatenate(found)
        importance = self.importance.get(name)
        if importance is not None and piece.layout.columns:
            importance = importance[list(piece.layout.columns)]
        lost = all_of_it = 0.0
        for some, part in _at_once(value):
            dense = part.dequantize()
            if name in self.folded:
                factors = self.folded[name].reshape(-1, 1)
                dense = dense * (factors if len(factors) == 1 else factors[some])
            rounded = quantize(dense, piece.kind, importance, name, search)
            lost += float((rounded.dequantize() - dense).norm()) ** 2
            all_of_it += float(dense.norm()) ** 2
            found.append(to_blocks(piece.kind, rounded))
        self.errors[name] = (lost / all_of_it) ** 0.5 if all_of_it else 0.0
        return np.concatenate(found)


def _at_once(value: Weight) -> Iterator[tuple[slice, Weight]]:
    """Its rows, as many as are rounded at once, and the weight of those."""
    size = max(1, AT_ONCE // value.shape[1])
    if size >= value.shape[0]:
        yield slice(None), value
        return
    for at in range(0, value.shape[0], size):
        rows = slice(at, at + size)
        yield rows, value.take_rows(rows)


def _shape(piece: Piece) -> tuple[int, ...]:
    rows = [sum(item.count(part) for part in item.parts if part.name == name) for item, name in piece.sources]
    experts = len({_expert(name) for _, name in piece.sources}) if f"{EXPERTS}." in piece.name else 0
    stack = (experts, sum(rows) // experts) if experts else (sum(rows),)
    item = piece.sources[0][0]
    if piece.layout.shape:
        return piece.layout.shape
    if len(item.matrix) == 1:
        return tuple(size for size in item.shape if size > 1) or item.shape
    if piece.suffix == "bias":
        return stack
    if not piece.place.columns:
        return (item.matrix[1],)  # the one row of a gate
    return (*stack, item.matrix[1])


def load_part(load: Load, item: StoredTensor, name: str, piece: Piece) -> Weight | Tensor:
    """The weight or bias that a piece is made of, as llama.cpp wants it but for ``Layout.rows``."""
    value, bias = load(item)
    value = value.integers() if isinstance(value, Trellis) else value
    parts = [part for part in item.parts if part.name == name]
    if piece.as_stored and parts[0].rows is not None:
        rows = sorted(item.rows_of(parts[0]))
        straight = rows == list(range(rows[0], rows[-1] + 1))
        parts = [Part(name, ((rows[0], rows[-1] + 1),) if straight else tuple((row, row + 1) for row in rows))]
    one = replace(item, parts=tuple(parts))
    found = dict(split_parts(one, value, bias))[f"{name}.bias" if piece.suffix == "bias" else name]
    if piece.layout.columns and not isinstance(found, Tensor):
        found = take_columns(found, torch.tensor(piece.layout.columns))
    if not piece.heads:
        return found
    order = torch.from_numpy(np.argsort(row_order(found.shape[0], piece.heads)))
    return found[order] if isinstance(found, Tensor) else found.take_rows(order)


def _last(load: Load) -> Load:
    """``load`` that keeps the stack of experts it read last, whose matrices are asked for one by one."""
    kept: dict[str, tuple[Weight | Tensor, Tensor | None]] = {}

    def one(item: StoredTensor) -> tuple[Weight | Tensor, Tensor | None]:
        if len(item.shape) < 3:
            return load(item)
        if item.name not in kept:
            kept.clear()
            kept[item.name] = load(item)
        return kept[item.name]

    return one


def plan_export(
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    stored: list[StoredTensor],
    gguf_type: str = "auto",
    importance: Mapping[str, Tensor] | None = None,
    load: Load | None = None,
    mtp: Mtp | None = None,
) -> Export:
    """Decide on every tensor. ``gguf_type``: a mixture's name, or "auto": each matrix as it is stored, in the smallest
    type that holds it exactly. ``importance``: canonical name → float [in], mean squared inputs. ``load``: where
    modules come from if not from ``checkpoint``, which then gives the names and the tokenizer alone. ``mtp``: the layer
    for multi-token prediction, where the file is to have it.

    Raises ToolkitError for a quantized matrix that the type cannot hold exactly, and for a model GGUF cannot express.
    """
    model = model_metadata(spec)
    if mtp is not None:
        model, stored = _deeper(model, spec), [*stored, *as_nextn(mtp, len(spec.layers))]
    mixture = None if gguf_type == "auto" else find_mixture(gguf_type)
    pieces = _pieces(spec, stored, model, checkpoint, mtp)
    load = _last(load or partial(load_stored, checkpoint))
    falls: dict[tuple[str, str, int], set[str]] = {}
    grown: dict[tuple[str, str], set[str]] = {}
    for piece in pieces:
        if piece.place.columns:
            _choose(checkpoint, load, piece, mixture, falls, grown)
            _fold(piece, model.folded)
    notes = list(model.notes)
    for (wanted, kind, columns), roles in sorted(falls.items()):
        names = ", ".join(sorted(roles))
        notes.append(
            f"{kind} instead of {wanted} for {names}: blocks of {columns_of(wanted)} do not divide {columns} columns"
        )
    for (kind, form), roles in sorted(grown.items()):
        notes.append(
            f"{kind} for {', '.join(sorted(roles))}, which makes the file larger: no smaller type holds {form} "
            "exactly; a small file is made of the unquantized model, by --gguf-type q4_k_m"
        )
    general = {
        "general.architecture": model.gguf.arch,
        "general.type": "model",
        "general.name": title(checkpoint.path),
        "general.quantization_version": 2,
        TOOL_KEY: __version__,
        "general.file_type": mixture.file_type if mixture else _file_type(pieces),
    }
    configs = checkpoint.config, checkpoint.generation_config
    words, lost = vocabulary(checkpoint.tokenizer_dir, spec.vocab_size, *configs, model.gguf.words)
    notes += lost
    metadata = {**general, **model.values, **words, **_listed(stored, model.gguf, load)}
    folded = {name: torch.as_tensor(times, dtype=torch.float32) for name, times in model.folded.items()}
    return Export(load, metadata, model.factors, pieces, notes, importance or {}, folded)


def _listed(stored: list[StoredTensor], gguf: Gguf, load: Load) -> dict[str, NDArray[np.float32]]:
    """Keys with a number a layer."""
    found: dict[str, list[float]] = {}
    for item in stored:
        if (key := gguf.listed.get(_inside(item.name))) is not None:
            value = load(item)[0]
            assert isinstance(value, Tensor), item.name
            found.setdefault(key, []).append(float(value))
    return {key: np.array(numbers, np.float32) for key, numbers in found.items()}


def _file_type(pieces: list[Piece]) -> int:
    most = Counter(piece.kind for piece in pieces if piece.place.columns).most_common(1)[0][0]
    named = {"Q4_K": "q4_k_m", "Q5_K": "q5_k_m"}.get(most, most.lower())
    others = {"Q2_K": 10, "Q3_K": 12, "IQ4_NL": 25, "IQ4_XS": 30, "MXFP4": 38}
    return MIXTURES[named].file_type if named in MIXTURES else others[most]


def _fold(piece: Piece, folded: Mapping[str, Any]) -> None:
    """Let a matrix that is multiplied be rounded to its type anew. Raises ToolkitError for one that is quantized."""
    if not any(name in folded for _, name in piece.sources):
        return
    if not piece.rounded and piece.kind not in FLOATS:
        raise ToolkitError(
            f"gguf: {piece.sources[0][1]} is quantized, and this architecture has the model's multipliers in "
            "its weights; convert the unquantized model, with --gguf-type"
        )
    piece.rounded = True


def _choose(
    checkpoint: Checkpoint,
    load: Load,
    piece: Piece,
    mixture: Mixture | None,
    falls: dict[tuple[str, str, int], set[str]],
    grown: dict[tuple[str, str], set[str]],
) -> None:
    """Set the type of a matrix. ``falls``, ``grown``: by types and columns, and by type and what it was, the roles of
    matrices that get another type than is wanted, and of quantized ones that are stored as floats."""
    weights = [load_part(load, item, name, piece) for item, name in piece.sources]
    if piece.sources[0][0].kind == "router":
        return  # they stay in float32
    matrices = [weight for weight in weights if not isinstance(weight, Tensor)]
    if mixture is None:
        kinds = [smallest(weight) for weight in matrices]
        piece.kind = kinds[0] if len(set(kinds)) == 1 else _common(matrices)
        packed = next((weight for weight in matrices if isinstance(weight, GroupInt | Codebook)), None)
        if packed is not None and piece.kind in ("F16", "F32"):
            form = f"{form_name(packed)} of {piece.place.columns} columns"
            grown.setdefault((piece.kind, form), set()).add(piece.place.role)
        return
    kind, wanted = type_of(mixture, piece.place)
    if all(isinstance(weight, Dense) for weight in matrices):
        stored = {weight.weight.dtype for weight in matrices if isinstance(weight, Dense)}
        piece.kind, piece.rounded = kind, not (kind == "F32" or stored == {FLOATS.get(kind)})
        if wanted:
            falls.setdefault((wanted, kind, piece.place.columns), set()).add(piece.place.role)
        return
    for kind_tried in dict.fromkeys((kind, mixture.base)):
        if all(fit(weight, kind_tried) is not None for weight in matrices):
            piece.kind = kind_tried
            return
    raise ToolkitError(
        f"{checkpoint.path}: {piece.sources[0][1]}: {form_name(matrices[0])} cannot be {kind} without rounding once "
        f"more; use --gguf-type auto ({smallest(matrices[0])} holds it exactly), or convert the unquantized model"
    )


def _common(weights: list[Weight]) -> str:
    """The smallest type that holds each of several matrices exactly."""
    return next(kind for kind in ORDER if all(fit(weight, kind) is not None for weight in weights))


def _deeper(model: ModelMetadata, spec: DecoderSpec) -> ModelMetadata:
    """The same of a file with one layer more, for multi-token prediction."""
    arch, n = model.gguf.arch, len(spec.layers)
    names = {**model.gguf.names, **{stem: stem for stem in NEXTN}}
    values = {**model.values, f"{arch}.block_count": n + 1, f"{arch}.{PREDICTS}": 1}
    return replace(model, gguf=replace(model.gguf, names=names), values=values)


def _pieces(
    spec: DecoderSpec, stored: list[StoredTensor], model: ModelMetadata, checkpoint: Checkpoint, mtp: Mtp | None
) -> list[Piece]:
    """Every tensor of the file, in the order of the checkpoint."""
    whole = spec if mtp is None else replace(spec, layers=(*spec.layers, *mtp.spec.layer.layers))
    attention = dict(whole.attention_layers())
    neighbours = turns_neighbours(stored)
    if not neighbours and model.gguf.interleaved_qk and not attention:
        raise ToolkitError(f"gguf: llama.cpp's {model.gguf.arch} turns neighbours, the two halves turn in this model")
    beside = (item.parts[0].name for item in stored if item.kind == "norm")  # also those of NEXTN
    offsets = dict.fromkeys(beside, spec.final_norm.weight_offset)
    offsets |= {norm.name: norm.weight_offset for norm in whole.norms()}
    together = {**model.gguf.joined, **model.gguf.stacks}
    order = {name: i for names in together.values() for i, name in enumerate(names)}
    stems = {ours: theirs for theirs, ours in model.gguf.names.items()}
    stems |= {name: theirs for theirs, names in together.items() for name in names}
    top = {ours: theirs for theirs, ours in model.gguf.top.items()}
    layout_of = layouts_of(model.gguf, whole)
    count = model.values.get(f"{model.gguf.arch}.expert_count", 0)
    pieces: dict[str, Piece] = {}
    for item in stored:
        absent = item.optional and not is_present(checkpoint, item)
        if item.kind == "vision" or absent or _inside(item.name) in model.gguf.listed:
            continue
        for name in [part.name for part in item.parts]:
            if name == spec.head and spec.tied:
                continue
            stem, role, layer = _spell(name, stems, top, model.gguf)
            layout = layout_of(name if stem.startswith("blk.") else "", role)
            columns = item.matrix[1] if len(item.matrix) == 2 and item.matrix[0] > 1 else 0
            heads = _heads(role, attention.get(layer), model.gguf, neighbours)
            for suffix in ("weight", "bias") if item.bias else ("weight",):
                full = stem if item.kind == "vector" or role in model.gguf.bare else f"{stem}.{suffix}"
                place = Place(role, layer, len(spec.layers), columns if suffix == "weight" else 0, spec.tied, count)
                add = offsets.get(name, 0.0) if suffix == "weight" else 0.0
                as_stored = neighbours and model.gguf.interleaved_qk
                piece = pieces.setdefault(full, Piece(full, [], suffix, place, heads, as_stored, add, layout))
                piece.sources.append((item, name))
    if spec.tied and model.folded.get(spec.embed) != model.folded.get(spec.head):  # the two are multiplied otherwise
        embed = pieces["token_embd.weight"]
        head = [(replace(item, parts=(Part(spec.head),)), spec.head) for item, _ in embed.sources]
        place = replace(embed.place, role="output", tied=False)
        pieces["output.weight"] = replace(embed, name="output.weight", sources=head, place=place)
    for piece in pieces.values():
        piece.sources.sort(key=lambda source: (_expert(source[1]), order.get(_inside(source[1]), 0)))
    return list(pieces.values())


def _inside(name: str) -> str:
    """A canonical name without its layer, {} in place of an expert's number."""
    return re.sub(r"\.experts\.\d+\.", ".experts.{}.", name).split(".", 3)[-1]


def _expert(name: str) -> int:
    """The number of the expert that a canonical name is of, 0 where it is of none."""
    found = re.search(r"\.experts\.(\d+)\.", name)
    return 0 if found is None else int(found[1])


def _spell(name: str, stems: dict[str, str], top: dict[str, str], gguf: Gguf) -> tuple[str, str, int]:
    """(tensor name without suffix, of a vector with it, role, layer) of a canonical name."""
    if name in top:
        return top[name], top[name], 0
    parts = name.split(".", 3)
    if len(parts) == 4 and parts[:2] == ["model", "layers"]:
        role = stems.get(_inside(name))
        if role is not None:
            return f"blk.{parts[2]}.{role}", role, int(parts[2])
    raise ToolkitError(f"gguf: {name} has no place in llama.cpp's {gguf.arch}")


def _heads(role: str, attention: AttentionSpec | None, gguf: Gguf, neighbours: bool) -> int:
    """Into how many heads rows are interleaved; 0 where they stay, as ``neighbours`` do: the checkpoint has them so."""
    if attention is None or not gguf.interleaved_qk or neighbours:
        return 0
    return {"attn_q": attention.heads, "attn_k": attention.kv_heads}.get(role, 0)
