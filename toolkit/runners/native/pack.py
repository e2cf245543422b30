"""From canonical weights to the native library's tiles and back, exactly. Imports torch: used only to pack.

What has no packed form of its own becomes the nearest one: float8 and group sizes that are no multiple of 16 become
dense, a head or embedding can be quantized to 8 or 4 bits. ``pack_model`` lists such changes as notes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.artifacts.canonical import ChannelInt8, Dense, Fp8, GroupInt, Weight
from toolkit.artifacts.formats.words import Words
from toolkit.artifacts.outline import taller
from toolkit.artifacts.rounding import to_group_int
from toolkit.models.routed import ROUTED
from toolkit.models.spec import DecoderSpec
from toolkit.models.vision import PREFIX
from toolkit.runners.native import library
from toolkit.runners.native.agreement import Agreement
from toolkit.runners.native.packed import (
    BF16,
    DENSE,
    F16,
    F32,
    INT,
    LANES,
    VECTOR,
    PackedMeta,
    PackedTensor,
    PackedWeights,
    vector,
)
from toolkit.runners.native.rounding import Scales, fits, round_groups
from toolkit.runners.native.tower import matrices as matrices_of
from toolkit.runners.weight_info import info_of
from toolkit.threads import usable_cores

U8 = NDArray[np.uint8]
_TORCH = {F32: torch.float32, BF16: torch.bfloat16, F16: torch.float16}
_OURS = {v: k for k, v in _TORCH.items()}
# how names of matrices that may have 8 bits begin, or go on
ROUNDED = (f"{PREFIX}layers.", f"{PREFIX}over_all.", ROUTED)
ROUNDED_INSIDE = (".attn.", ".mlp.")
_LAYOUTS = {"rows": 1, "gptq": 2, "awq": 3}  # CodeLayout of pack_tiles.h
_ALONE = 1 << 18  # bytes that one thread packs sooner than two begin
_SPLITS = (128, 96, 64, 48, 32, 16)  # activation groups that a long weight group is cut into


def _bits_of(t: Tensor) -> NDArray[Any]:
    """A float tensor as numpy; bfloat16 and float16 as their 16 bits."""
    t = t.detach().contiguous()
    return t.numpy() if t.dtype == torch.float32 else t.view(torch.int16).numpy().view(np.uint16)


def _without_memory(meta: PackedMeta, perm: NDArray[np.int32] | None = None) -> PackedTensor:
    """What an outline is packed to: as many bytes as it will have, of which none is there."""
    return PackedTensor(np.broadcast_to(np.uint8(0), (meta.nbytes,)), meta, perm)


# -- dense


def _filled(meta: PackedMeta, **source: Any) -> U8:
    """What the library packs from ``source``, fields of ``PackSource`` (arrays and tensors for their addresses)."""
    lib = library.load(library.library_path())
    out = np.empty(meta.nbytes, np.uint8)
    record = library.tensor_records([PackedTensor(out, meta)])
    fields = {name: value.data_ptr() if isinstance(value, Tensor) else value for name, value in source.items()}
    threads = usable_cores() if out.nbytes > _ALONE else 1
    if lib.tk_pack(record, library.address(out), library.PackSource(**fields), threads):
        raise AssertionError(library.error(lib))
    return out


def pack_dense(weight: Tensor) -> PackedTensor:
    """[out, in] float to tiles [in][16 rows]."""
    meta = packed_meta(Dense(weight))
    if weight.is_meta:
        return _without_memory(meta)
    held = weight.detach().to(_TORCH[meta.dtype])
    held = held if held.stride(1) == 1 else held.contiguous()
    return PackedTensor(_filled(meta, codes=held, ld=held.stride(0)), meta)


def _unpack_dense(p: PackedTensor) -> Tensor:
    m = p.meta
    items = p.data.view(np.float32 if m.dtype == F32 else np.uint16).reshape(m.tiles, m.cols, LANES)
    rows = np.ascontiguousarray(items.transpose(0, 2, 1)).reshape(-1, m.cols)[: m.rows]
    t = torch.from_numpy(rows.copy() if m.dtype == F32 else rows.view(np.int16).copy())
    return t if m.dtype == F32 else t.view(_TORCH[m.dtype])


# -- integers in groups


def _unpack_codes(data: U8, rows: int, cols: int, bits: int) -> U8:
    tiles = data.shape[0]
    if bits == 8:
        return np.ascontiguousarray(data.reshape(tiles, -1, LANES, 4).transpose(0, 2, 1, 3)).reshape(-1, cols)[:rows]
    both = data.reshape(tiles, -1, LANES, 4)
    quads = np.stack([both & 15, both >> 4], axis=3)
    return np.ascontiguousarray(quads.transpose(0, 2, 1, 3, 4)).reshape(-1, cols)[:rows]


def _split(group_size: int) -> int:
    """Activation group for a weight group: itself up to 128 columns, else the largest listed divisor (or itself)."""
    if group_size <= 128:
        return group_size
    return next((s for s in _SPLITS if group_size % s == 0), group_size)


def _permutation(w: GroupInt) -> NDArray[np.int32] | None:
    """Columns sorted by group, or None where they are. ValueError where groups are of different sizes."""
    if w.group_index is None:
        return None
    index = w.group_index.numpy()
    counts = np.bincount(index, minlength=w.scales.shape[1])
    if index.size != w.shape[1] or (counts != w.group_size).any():
        raise ValueError("groups of different sizes")
    order = np.argsort(index, kind="stable").astype(np.int32)
    return None if (order == np.arange(order.size)).all() else order


def pack_group_int(w: GroupInt) -> PackedTensor:
    """Codes below 16 in 4 bits, others in 8. ValueError where the groups do not fit the kernels."""
    meta = packed_meta(w)
    perm = _permutation(w)
    codes, layout = _codes_of(w, meta, perm)
    if codes.is_meta:
        return _without_memory(meta, perm)
    scales = w.scales.to(_TORCH[meta.dtype]).contiguous()
    if w.minima is not None:
        offsets = w.minima.to(scales.dtype)
    else:
        assert w.zeros is not None
        # exact: the product of a zero below 2^8 and a 16-bit float's scale fits float32
        offsets = -w.zeros.float() * scales if meta.minima else w.zeros
    if offsets.shape != scales.shape:
        offsets = offsets.expand(scales.shape)
    source = {"codes": codes, "ld": codes.stride(0), "layout": layout, "perm": library.address(perm)}
    return PackedTensor(_packed_int(meta, scales, offsets, w.group_size // meta.group, **source), meta, perm)


def _codes_of(w: GroupInt, meta: PackedMeta, perm: NDArray[np.int32] | None) -> tuple[Tensor, int]:
    """Bytes or words of the codes, and their layout as ``PackSource`` numbers it."""
    words = w.stored
    if isinstance(words, Words) and words.bits == meta.bits and (perm is None or words.layout == "gptq"):
        held = words.words
        return held if held.stride(1) == 1 else held.contiguous(), _LAYOUTS[words.layout]
    return w.codes if w.codes.stride(1) == 1 else w.codes.contiguous(), 0


def _packed_int(meta: PackedMeta, scales: Tensor, offsets: Tensor, repeat: int, **source: Any) -> U8:
    """``scales`` and ``offsets``: [rows, groups], each for ``repeat`` groups of the packed matrix. Raises ValueError
    where there are not as many."""
    wanted = meta.rows, -(-meta.cols // (meta.group * repeat))
    if scales.shape != wanted or offsets.shape != wanted:
        raise ValueError(f"scales {tuple(scales.shape)} and offsets {tuple(offsets.shape)}, expected {wanted}")
    offsets = offsets.contiguous()
    return _filled(meta, scales=scales, offsets=offsets, ld_scales=scales.shape[1], repeat=repeat, **source)


def _unpack_group_int(p: PackedTensor) -> GroupInt:
    m, o = p.meta, p.meta.origin
    blocks = p.data.reshape(m.tiles, m.cols // m.group, m.group_bytes)
    codes = _unpack_codes(
        np.ascontiguousarray(blocks[:, :, m.header_bytes :]).reshape(m.tiles, -1), m.rows, m.cols, m.bits
    )
    half = 64 if m.dtype == F32 else 32

    def floats(part: U8) -> Tensor:
        kind = np.float32 if m.dtype == F32 else np.int16
        raw = np.ascontiguousarray(part).view(kind).transpose(0, 2, 1).reshape(-1, part.shape[1])[: m.rows]
        t = torch.from_numpy(np.array(raw, order="C"))  # a copy: a mapped file is not writable
        return t if m.dtype == F32 else t.view(_TORCH[m.dtype])

    step = o["group_size"] // m.group
    scales = floats(blocks[:, :, :half])[:, ::step]
    zeros = minima = None
    if m.minima:
        minima = floats(blocks[:, :, half : 2 * half])[:, ::step]
        if o["zeros"]:  # 8-bit codes with zeros of their own
            safe = torch.where(scales == 0, torch.ones_like(scales), scales)
            zeros, minima = torch.round(-minima / safe).to(torch.uint8), None
    else:
        raw = np.ascontiguousarray(blocks[:, :, half : half + LANES]).transpose(0, 2, 1)
        stored = np.ascontiguousarray(raw).reshape(-1, m.cols // m.group)[: m.rows, ::step]
        zeros = torch.from_numpy(np.array(stored, order="C"))
    index = None
    if o["act_order"]:
        order = np.arange(m.cols) if p.perm is None else p.perm
        groups = np.empty(m.cols, np.int32)
        groups[order] = np.arange(m.cols) // o["group_size"]
        index = torch.from_numpy(groups)
        original = np.empty_like(codes)
        original[:, order] = codes
        codes = original
    scales = scales.to(getattr(torch, o["scales"])).contiguous()
    if minima is not None:
        minima = minima.to(getattr(torch, o["minima"])).contiguous()
    return GroupInt(torch.from_numpy(codes), scales, zeros, o["bits"], o["group_size"], minima, index)


def pack_channel_int8(w: ChannelInt8) -> PackedTensor:
    """One group as long as the row: activations are quantized per token. ValueError where it does not fit."""
    meta = packed_meta(w)
    if w.weight.is_meta:
        return _without_memory(meta)
    codes = w.weight.contiguous()
    zeros = torch.full((codes.shape[0], 1), 128, dtype=torch.uint8)
    scales = w.scales.float()[:, None].contiguous()
    return PackedTensor(_packed_int(meta, scales, zeros, 1, codes=codes, ld=codes.stride(0), flip=128), meta)


def packed_meta(w: Weight) -> PackedMeta:
    """How ``pack_weight`` packs ``w``, whose matrices need not have memory. ValueError where it has no packed form."""
    rows, cols = w.shape
    if isinstance(w, Dense):
        return PackedMeta(DENSE, rows, cols, _OURS.get(w.weight.dtype, F32), origin={"form": "dense"})
    if isinstance(w, ChannelInt8):
        if cols % 16 or cols >= 65536:
            raise ValueError(f"{cols} columns")
        return PackedMeta(INT, rows, cols, F32, 8, cols, origin={"form": "channel_int8"})
    if not isinstance(w, GroupInt):
        raise ValueError(type(w).__name__)
    group = _split(w.group_size)
    if group % 16 or cols % group:
        raise ValueError(f"groups of {w.group_size} in {cols} columns")
    bits, own_zeros = (4 if w.bits <= 4 else 8), False
    if w.minima is None and bits == 8:
        assert w.zeros is not None
        own_zeros = w.zeros.is_meta or bool((w.zeros != 128).any())
    odd = own_zeros or (w.minima is not None and w.minima.dtype != w.scales.dtype)
    origin = {
        "form": "group_int",
        "bits": w.bits,
        "group_size": w.group_size,
        "zeros": w.zeros is not None,
        "act_order": w.group_index is not None,
        "scales": str(w.scales.dtype).removeprefix("torch."),
        "minima": "" if w.minima is None else str(w.minima.dtype).removeprefix("torch."),
    }
    dtype = F32 if odd else _OURS.get(w.scales.dtype, F32)
    return PackedMeta(INT, rows, cols, dtype, bits, group, own_zeros or w.minima is not None, origin=origin)


def pack_weight(w: Weight) -> PackedTensor:
    """Pack any canonical weight. ValueError where it has no packed form (``pack_nearest`` then makes it dense)."""
    if isinstance(w, GroupInt):
        return pack_group_int(w)
    if isinstance(w, ChannelInt8):
        return pack_channel_int8(w)
    if isinstance(w, Dense):
        return pack_dense(w.weight)
    raise ValueError(type(w).__name__)


def unpack(p: PackedTensor) -> Weight:
    """Exact inverse of ``pack_weight``; of a turned head, its numbers in float32."""
    if p.meta.turned:
        head = _unpack_group_int(p).dequantize(torch.float32)
        for a in range(0, head.shape[0], _HEAD_ROWS):
            head[a : a + _HEAD_ROWS] = turn(head[a : a + _HEAD_ROWS])
        return Dense(head)
    form = p.meta.origin["form"]
    if form == "dense":
        return Dense(_unpack_dense(p))
    m = p.meta
    if form == "channel_int8":
        blocks = p.data.reshape(m.tiles, 1, m.group_bytes)
        codes = _unpack_codes(np.ascontiguousarray(blocks[:, :, 128:]).reshape(m.tiles, -1), m.rows, m.cols, 8)
        scales = np.ascontiguousarray(blocks[:, 0, :64]).view(np.float32).reshape(-1)[: m.rows]
        return ChannelInt8(
            torch.from_numpy((codes.astype(np.int16) - 128).astype(np.int8)), torch.from_numpy(scales.copy())
        )
    return _unpack_group_int(p)


# -- head and embedding


_HEAD_ROWS = 4096  # rows of a head that are rounded at a time


def _head_group(cols: int) -> int | None:
    """The longest group of at most 128 columns that divides the row."""
    return next((g for g in range(128, 15, -16) if cols % g == 0), None)


def turn(x: Tensor) -> Tensor:
    """x·H for float32 [rows, cols], H as ``Ops::hadamard`` has it: blocks as long as the largest power of two that
    divides ``cols``, normalised, its own inverse. A product of two small Hadamard matrices at a time.
    """
    cols = x.shape[1]
    block = cols & -cols
    low = 1 << ((block.bit_length() - 1) // 2)
    h = x.reshape(-1, block // low, low) @ _hadamard_matrix(low)
    return (_hadamard_matrix(block // low) @ h).view(x.shape)


def _hadamard_matrix(n: int) -> Tensor:
    h = torch.ones(1, 1)
    while h.shape[0] < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h * n**-0.5


def quantize_head(w: Dense, bits: int) -> GroupInt | None:
    """Round a head or embedding; None where its columns make no groups.

    8 bits: symmetric groups of up to 128 of the *turned* matrix w·H. What an 8-bit head loses, it loses by rounding its
    input: the final norm's output has few channels far above the others. H spreads them over its block, which brings
    the loss down to that of the weights. 4 bits: groups of 32 with zeros, as they are.
    """
    cols = w.shape[1]
    group = _head_group(cols) if bits == 8 else 32 if cols % 32 == 0 else None
    if group is None:
        return None
    if w.weight.is_meta:
        return taller(to_group_int(torch.zeros(1, cols), bits, group), w.shape[0])
    if fits(w.weight, group):
        return round_groups(w.weight, bits, group, Scales(), turned=bits == 8)
    return to_group_int(w.weight, bits, group, (lambda rows, _: turn(rows)) if bits == 8 else None)


# -- a whole model


def pack_nearest(name: str, w: Weight, notes: list[str]) -> PackedTensor:
    """Pack ``w``; where it has no packed form, dense in bfloat16. What grows so, or by codes in more bits than they
    have, is said in ``notes``.
    """
    try:
        packed = pack_weight(w)
    except ValueError as reason:
        what = "float8" if isinstance(w, Fp8) else str(reason)
        notes.append(f"{name}: {what} has no kernel here; held as bfloat16")
        return pack_as_bfloat16(w)
    if isinstance(w, GroupInt) and packed.meta.bits > w.bits:
        notes.append(f"{name}: codes of {w.bits} bits have no kernel here; held in {packed.meta.bits}")
    return packed


def pack_as_bfloat16(w: Weight) -> PackedTensor:
    """Dense, whatever it was."""
    outline = any(isinstance(t := getattr(w, f.name), Tensor) and t.is_meta for f in fields(w))
    if outline:
        return pack_dense(torch.empty(w.shape, dtype=torch.bfloat16, device="meta"))
    return pack_dense(w.dequantize(torch.bfloat16))


def gathered(notes: list[str]) -> list[str]:
    """``notes`` with those that say the same of several weights as one."""
    names: dict[str, list[str]] = {}
    for note in notes:
        name, _, what = note.partition(": ")
        names.setdefault(what, []).append(name)
    return [f"{n[0]}{f' and {len(n) - 1} more' if n[1:] else ''}: {what}" for what, n in names.items()]


def pack_model(
    spec: DecoderSpec,
    weights: Iterable[tuple[str, Weight | Tensor]],
    head_bits: int | None,
    notes: list[str],
    vision_bits: int = 16,
) -> Iterator[tuple[str, PackedTensor]]:
    """Every parameter of the model, packed, one at a time, as ``weights`` brings them.

    ``head_bits``: of a dense head and embedding, 16, 8 or 4; None = 8 where the layers are quantized, else as stored
    (they are then held back until the first layer tells). ``vision_bits``: see ``pack_tower``.
    """
    seeing = {} if spec.vision is None else matrices_of(spec.vision)
    layers = {linear.name for linear in spec.linears()}
    matrices = {linear.name for _, mixer in spec.mixers() for linear in mixer.matrices()}
    unused = {spec.head} if spec.tied else set()
    waiting: list[tuple[str, Dense]] = []
    out = Agreement(spec, notes, pack_as_bfloat16)
    for name, value in weights:
        if name in unused:
            continue
        if name in seeing and isinstance(value, Tensor):
            out.add(name, pack_tower(name, value.reshape(seeing[name]), vision_bits))
        elif isinstance(value, Tensor):
            out.add(name, _pack_vector(name, value))
        elif name in layers:
            if head_bits is None:
                head_bits = 16 if isinstance(value, Dense) else 8
            widened = name in matrices and not isinstance(value, Dense)
            out.add_linear(name, value, pack_as_bfloat16(value) if widened else pack_nearest(name, value, notes))
        elif isinstance(value, Dense):
            waiting.append((name, value))
        else:
            out.add(name, pack_nearest(name, value, notes))
        if head_bits is not None:
            for held, dense in waiting:
                out.add(held, _pack_head(held, dense, head_bits, notes))
            waiting = []
        yield from out.take()
    for held, dense in waiting:
        out.add(held, _pack_head(held, dense, 16, notes))
    yield from out.take(last=True)


def pack_tower(name: str, weight: Tensor, bits: int) -> PackedTensor:
    """A matrix of what a model sees with, or of what tokens of pictures have in the language model.

    ``bits``: 8 = those of layers rounded in groups of up to 128 inputs, or of a whole row where none of 64 or more
    divides it; 16 = as stored, but float16 of the tower as bfloat16, which processors multiply; 32 = as stored.
    """
    group = _tower_group(weight.shape[1])
    rounded = name.startswith(ROUNDED) or any(part in name for part in ROUNDED_INSIDE)
    if bits == 8 and group is not None and rounded and name.endswith(".weight"):
        if weight.is_meta:
            return pack_weight(taller(to_group_int(torch.zeros(1, weight.shape[1]), 8, group), weight.shape[0]))
        return pack_weight(to_group_int(weight, 8, group))
    narrow = bits != 32 and weight.dtype == torch.float16 and not name.startswith(ROUTED)
    return pack_dense(weight.bfloat16() if narrow else weight)


def _tower_group(cols: int) -> int | None:
    whole = cols if cols % 16 == 0 else None
    return next((g for g in range(128, 63, -16) if cols % g == 0), whole)


def _pack_vector(name: str, value: Tensor) -> PackedTensor:
    """In float32; what a model sees with in the type that it was stored in."""
    dtype = _OURS.get(value.dtype, F32) if name.startswith(PREFIX) else F32
    if value.is_meta:
        return _without_memory(PackedMeta(VECTOR, value.numel(), dtype=dtype))
    return vector(_bits_of(value.to(_TORCH[dtype])), dtype)


def packed_bytes(spec: DecoderSpec, weights: Mapping[str, Weight | Tensor]) -> int:
    """Bytes of what ``pack_model`` makes of canonical weights, told from their headers. Of 8-bit codes with stored zero
    points, which may all be in the middle, it is what they take at most.
    """
    outlines = ((name, info_of(weights, name)) for name in weights)
    return sum(packed.data.nbytes for _, packed in pack_model(spec, outlines, None, []))


def _pack_head(name: str, w: Dense, bits: int, notes: list[str]) -> PackedTensor:
    """Quantized where asked for; its origin then still names the float type that the model was stored in."""
    rounded = None if bits == 16 else quantize_head(w, bits)
    packed = pack_nearest(name, w if rounded is None else rounded, notes)
    origin = packed.meta.origin | {"stored": str(w.weight.dtype).removeprefix("torch.")}
    turned = rounded is not None and bits == 8
    return replace(packed, meta=replace(packed.meta, turned=turned, origin=origin))


class UnpackedWeights(Mapping[str, "Weight | Tensor"]):
    """Packed weights in canonical form again, each made when asked for. A quantized head stays what it became; a turned
    one has the type that it was stored in, by which runners choose theirs.
    """

    def __init__(self, packed: PackedWeights) -> None:
        self._packed = packed

    def __getitem__(self, name: str) -> Weight | Tensor:
        p = self._packed[name]
        if p.meta.kind == VECTOR:
            return torch.from_numpy(p.data.copy()).view(_TORCH[p.meta.dtype])[: p.meta.rows]
        found, stored = unpack(p), p.meta.origin.get("stored")
        if p.meta.turned and stored is not None:
            return Dense(found.dequantize(getattr(torch, stored)))
        return found

    def info(self, name: str) -> Weight | Tensor:
        """``self[name]`` as its meta tells it: matrices are without memory, but with act-order."""
        p = self._packed[name]
        m = p.meta
        if m.kind == VECTOR or (m.origin.get("act_order") and not m.turned):
            return self[name]
        stored = getattr(torch, m.origin.get("stored", "float32")) if m.turned else _TORCH[m.dtype]
        if m.kind == DENSE or m.turned:
            return Dense(torch.empty(m.rows, m.cols, dtype=stored, device="meta"))
        one = unpack(PackedTensor(p.data[: m.tile_bytes], replace(m, rows=1)))
        return taller(one, m.rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)
