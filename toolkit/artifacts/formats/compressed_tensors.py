"""compressed-tensors, the format of llm-compressor: several packings of a linear under one ``quant_method``.

pack-quantized: ``weight_packed`` int32 [out, ceil(in*bits/32)], codes with 2**(bits-1) added, along *in*, in order;
``weight_scale`` [out, groups]; ``weight_zero_point`` int32 [ceil(out*bits/32), groups], packed along *out* likewise;
``weight_g_idx`` int32 [in]; ``weight_shape`` int64 [2]. Widths that do not divide 32 run on over word borders; in
earlier versions of the library a word held 32 // bits codes instead (told apart by the shape).
int-quantized, float-quantized, naive-quantized: ``weight`` int8 or float8_e4m3fn [out, in], ``weight_scale`` [out, 1],
[out, groups], [row blocks, column blocks] or one number; ``weight_zero_point`` int8 of the same shape.
nvfp4-pack-quantized, mxfp4-pack-quantized: ``weight_packed`` uint8 [out, in/2], the first code low; ``weight_scale``
float8_e4m3fn [out, in/16] or uint8 (e8m0) [out, in/32]; nvfp4: ``weight_global_scale`` float32 [1], a divisor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.formats.bits import pack_words, unpack_pairs, unpack_whole_words, unpack_words
from toolkit.artifacts.formats.ct_scheme import Scheme, check_config, scheme_of
from toolkit.artifacts.formats.describe import Layout, common_layout, form_name, layout_fits
from toolkit.artifacts.formats.gptq import group_index
from toolkit.artifacts.formats.layout import FLOATS, Expected
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from torch import Tensor

    from toolkit.artifacts.canonical import BlockFp8, ChannelInt8, Fp4, Fp8, GroupInt, Weight
    from toolkit.artifacts.checkpoint import Checkpoint

METHOD = "compressed-tensors"
_ROWS = (1, -1)  # tiles of float8 that are whole rows, however long those are: weights alone are rounded

__all__ = ["METHOD", "cannot_hold", "check_config", "config", "expected", "is_quantized", "read_linear", "write_linear"]


def is_quantized(checkpoint: Checkpoint, name: str) -> bool:
    return f"{name}.weight_packed" in checkpoint or f"{name}.weight_scale" in checkpoint


def _group_size(scheme: Scheme, name: str, n_in: int) -> int:
    if scheme.group_size <= 0:
        return n_in
    if n_in % scheme.group_size:
        raise ToolkitError(
            f"config.json: quantization_config.config_groups: group_size {scheme.group_size} does not divide the "
            f"{n_in} input features of {name}"
        )
    return scheme.group_size


def expected(quantization: dict[str, Any], name: str, shape: tuple[int, ...]) -> list[Expected]:
    """The tensors of a linear with dense shape [out, in]."""
    n_out, n_in = shape
    scheme = scheme_of(quantization, name)
    scales = _scale_shapes(scheme, name, n_out, n_in)
    if scheme.format == "pack-quantized":
        return _expected_packed(scheme, name, n_out, n_in, scales)
    if scheme.format in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        nv = scheme.format.startswith("nv")
        if n_in % 2:
            raise ToolkitError(f"{name}: {n_in} input features of 4 bits do not fill whole bytes")
        found = [
            Expected(f"{name}.weight_packed", (n_out, n_in // 2), ("U8",)),
            Expected(f"{name}.weight_scale", scales[0], ("F8_E4M3",) if nv else ("U8", "F8_E8M0")),
        ]
        return [*found, Expected(f"{name}.weight_global_scale", (1,), ("F32",), also=((),))] if nv else found
    found = [
        Expected(f"{name}.weight", (n_out, n_in), ("F8_E4M3",) if scheme.floating else ("I8",)),
        Expected(f"{name}.weight_scale", scales[0], FLOATS, also=scales[1:]),
    ]
    if not scheme.symmetric:
        found.append(Expected(f"{name}.weight_zero_point", scales[0], ("I8",), also=scales[1:]))
    return found


def _scale_shapes(scheme: Scheme, name: str, n_out: int, n_in: int) -> tuple[tuple[int, ...], ...]:
    if scheme.block is not None:
        return ((-(-n_out // scheme.block[0]), -(-n_in // scheme.block[1])),)
    if scheme.group_size == 0:
        return ((1,), (), (1, 1))
    groups = n_in // _group_size(scheme, name, n_in)
    return ((n_out, groups), (n_out,)) if groups == 1 else ((n_out, groups),)


def _expected_packed(
    scheme: Scheme, name: str, n_out: int, n_in: int, scales: tuple[tuple[int, ...], ...]
) -> list[Expected]:
    bits, per_word = scheme.bits, 32 // scheme.bits
    groups = n_in // _group_size(scheme, name, n_in)
    found = [
        Expected(
            f"{name}.weight_packed", (n_out, -(-n_in * bits // 32)), ("I32",), also=((n_out, -(-n_in // per_word)),)
        ),
        Expected(f"{name}.weight_scale", scales[0], FLOATS, also=scales[1:]),
        Expected(f"{name}.weight_shape", (2,), ("I64", "I32"), optional=True),
        Expected(f"{name}.weight_g_idx", (n_in,), ("I32",), optional=True),
    ]
    if not scheme.symmetric:
        other = ((-(-n_out // per_word), groups), (n_out, groups))
        shape = (-(-n_out * bits // 32), groups)
        found.append(Expected(f"{name}.weight_zero_point", shape, ("I32", "I8"), also=other))
    return found


def read_linear(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Weight:
    """The linear ``name`` of dense shape [out, in] in canonical form."""
    scheme = scheme_of(checkpoint.quantization or {}, name)
    if scheme.symmetric and not scheme.floating:
        _check_no_zero_points(checkpoint, name, scheme.bits)
    if scheme.format == "pack-quantized":
        return _read_packed(checkpoint, name, scheme, shape[0], shape[1])
    if scheme.format in ("nvfp4-pack-quantized", "mxfp4-pack-quantized"):
        return _read_fp4(checkpoint, name, scheme)
    return _read_plain(checkpoint, name, scheme, shape[1])


def _read_packed(checkpoint: Checkpoint, name: str, scheme: Scheme, n_out: int, n_in: int) -> GroupInt:
    import torch

    from toolkit.artifacts.canonical import GroupInt
    from toolkit.artifacts.formats.words import stored_codes

    bits, size = scheme.bits, _group_size(scheme, name, n_in)
    packed = checkpoint.tensor(f"{name}.weight_packed")
    scales = _as_rows(checkpoint.tensor(f"{name}.weight_scale"), n_out)
    if scales.shape[1] != n_in // size:
        scales = scales.expand(n_out, n_in // size).contiguous()
    zeros = torch.full(scales.shape, 1 << (bits - 1), dtype=torch.uint8)
    if not scheme.symmetric:
        stored = checkpoint.tensor(f"{name}.weight_zero_point")
        if stored.dtype == torch.int8:
            zeros = (stored.to(torch.int16) + (1 << (bits - 1))).to(torch.uint8)
        else:
            zeros = _unpack(stored.t(), bits, n_out).t().contiguous()
    return GroupInt(
        codes=stored_codes(packed, bits, "rows", n_in) if bits in (4, 8) else _unpack(packed, bits, n_in),
        scales=scales,
        zeros=zeros,
        bits=bits,
        group_size=size,
        group_index=_order(checkpoint, f"{name}.weight_g_idx", n_in, size),
    )


def _check_no_zero_points(checkpoint: Checkpoint, name: str, bits: int) -> None:
    """Zero points beside a scheme that has none: all in the middle (or left at 0) they say nothing, others are lost."""
    import torch

    tensor = f"{name}.weight_zero_point"
    if tensor not in checkpoint:
        return
    stored = checkpoint.tensor(tensor)
    if stored.is_meta:  # an outline: what is looked for shows when the weight is read
        return
    codes = stored if stored.dtype == torch.int8 else unpack_words(stored.t().contiguous(), bits)
    middle = 0 if stored.dtype == torch.int8 else 1 << (bits - 1)
    if bool(((codes != middle) & (codes != 0)).any()):
        raise ToolkitError(
            f"{checkpoint.where(tensor)}: tensor {tensor}: found zero points, expected none, for by config.json "
            "(config_groups, symmetric) the weights are symmetric"
        )


def _order(checkpoint: Checkpoint, name: str, n_in: int, size: int) -> Tensor | None:
    if name in checkpoint and bool((checkpoint.tensor(name) == -1).all()):
        return None  # how the library marks one that is not used
    return group_index(checkpoint, name, n_in, size)


def _unpack(words: Tensor, bits: int, count: int) -> Tensor:
    dense = words.shape[-1] == -(-count * bits // 32)
    codes = unpack_words(words, bits) if dense else unpack_whole_words(words, bits)
    return codes[..., :count].contiguous()


def _as_rows(scale: Tensor, n_out: int) -> Tensor:
    """A scale in any of its shapes as [out, groups]."""
    if scale.dim() == 2 and scale.shape[0] == n_out:
        return scale
    return scale.reshape(-1, 1).expand(n_out, 1).contiguous()


def _read_fp4(checkpoint: Checkpoint, name: str, scheme: Scheme) -> Fp4:
    import torch

    from toolkit.artifacts.canonical import Fp4

    codes = unpack_pairs(checkpoint.tensor(f"{name}.weight_packed"))
    scales = checkpoint.tensor(f"{name}.weight_scale")
    if scheme.format.startswith("mx"):
        return Fp4(codes, scales.view(torch.uint8), scheme.group_size)
    return Fp4(codes, scales, scheme.group_size, checkpoint.tensor(f"{name}.weight_global_scale").reshape(1))


def _read_plain(
    checkpoint: Checkpoint, name: str, scheme: Scheme, n_in: int
) -> ChannelInt8 | Fp8 | BlockFp8 | GroupInt:
    import torch

    from toolkit.artifacts.canonical import BlockFp8, ChannelInt8, Fp8, GroupInt

    weight = checkpoint.tensor(f"{name}.weight")
    stored = checkpoint.tensor(f"{name}.weight_scale")
    if scheme.block is not None and scheme.floating:
        return BlockFp8(weight, stored.float(), scheme.block)
    scales = _as_rows(stored, weight.shape[0])
    if scheme.floating:
        if scheme.group_size > 0:
            return BlockFp8(weight, scales.float(), (1, scheme.group_size))
        if not scheme.activations:  # weight only: tiles of a row have no kernel that would round activations
            return BlockFp8(weight, scales.float(), (1, n_in))
        return Fp8(weight, scales.float().reshape(-1))
    half = 1 << (scheme.bits - 1)
    size = _group_size(scheme, name, n_in)
    if scheme.symmetric and scheme.activations and scheme.bits == 8 and size == n_in:
        return ChannelInt8(weight, scales.float().reshape(-1))
    zeros = torch.full(scales.shape, half, dtype=torch.uint8)
    if not scheme.symmetric:
        zeros = _as_rows(checkpoint.tensor(f"{name}.weight_zero_point"), weight.shape[0]).to(torch.int16) + half
    codes = (weight.to(torch.int16) + half).to(torch.uint8)
    return GroupInt(codes, scales, zeros.to(torch.uint8), scheme.bits, size)


# -- writing


def cannot_hold(weight: Weight) -> str | None:
    """Why ``weight`` has no form in compressed-tensors, or None."""
    import torch

    from toolkit.artifacts.canonical import BlockFp8, ChannelInt8, Fp4, Fp8, GroupInt

    if isinstance(weight, ChannelInt8):
        return None
    if isinstance(weight, (Fp8, BlockFp8)):
        if weight.weight.dtype != torch.float8_e4m3fn:
            return f"compressed-tensors holds float8 as e4m3, found {form_name(weight)}"
        torn = isinstance(weight, BlockFp8) and weight.row_blocks is not None
        return "its rows were taken out of their tiles" if torn else None
    if isinstance(weight, Fp4):
        mx = weight.scales.dtype == torch.uint8
        good = (weight.group_size, weight.global_scale is None) == ((32, True) if mx else (16, False))
        return None if good else f"compressed-tensors holds mxfp4 and nvfp4, found {form_name(weight)}"
    if not isinstance(weight, GroupInt) or weight.zeros is None:
        return f"compressed-tensors holds integers with zero points, float8 and fp4, found {form_name(weight)}"
    if weight.group_index is not None:
        return "compressed-tensors' readers no longer take act-order (groups that are not consecutive); use gptq"
    return None


def write_linear(name: str, weight: Weight) -> dict[str, Tensor]:
    """Tensors of an integer, float8 or 4-bit float weight. Raises ToolkitError for any other."""
    import torch

    from toolkit.artifacts.canonical import BlockFp8, ChannelInt8, Fp4, Fp8, GroupInt

    if reason := cannot_hold(weight):
        raise ToolkitError(f"{name}: {reason}")
    if isinstance(weight, (ChannelInt8, Fp8)):
        return {f"{name}.weight": weight.weight, f"{name}.weight_scale": weight.scales.float().view(-1, 1)}
    if isinstance(weight, BlockFp8):
        return {f"{name}.weight": weight.weight, f"{name}.weight_scale": weight.scales}
    if isinstance(weight, Fp4):
        pairs = weight.codes.unflatten(1, (-1, 2))
        found = {f"{name}.weight_packed": pairs[..., 0] | pairs[..., 1] << 4, f"{name}.weight_scale": weight.scales}
        return found if weight.global_scale is None else {**found, f"{name}.weight_global_scale": weight.global_scale}
    assert isinstance(weight, GroupInt) and weight.zeros is not None
    found = {
        f"{name}.weight_packed": pack_words(weight.codes, weight.bits),
        f"{name}.weight_scale": weight.scales.contiguous(),
        f"{name}.weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }
    if not weight.symmetric:
        found[f"{name}.weight_zero_point"] = pack_words(weight.zeros.t().contiguous(), weight.bits).t().contiguous()
    return found


def config(layouts: Mapping[str, Layout | None]) -> dict[str, Any]:
    """``quantization_config`` of linears by name (None: left dense) that ``write_linear`` has written."""
    common_layout(layouts)  # at least one
    kinds: list[tuple[Layout, list[str]]] = []
    for name, layout in layouts.items():
        if layout is None:
            continue
        if layout.block == (1, layout.in_features):
            layout = replace(layout, block=_ROWS)
        place = next((names for base, names in kinds if layout_fits(layout, base)), None)
        if place is None:
            kinds.append((layout, [name]))
        else:
            place.append(name)
    groups: dict[str, Any] = {}
    for i, (layout, names) in enumerate(kinds):
        groups[f"group_{i}"] = {"targets": ["Linear"] if len(kinds) == 1 else names, **_scheme(layout)}
    forms = {group["format"] for group in groups.values()}
    return {
        "quant_method": METHOD,
        "format": forms.pop() if len(forms) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        # a tied head is no module of the checkpoint, but is one to readers
        "ignore": [name for name, layout in {"lm_head": None, **layouts}.items() if layout is None],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _scheme(layout: Layout) -> dict[str, Any]:
    """One group of ``config_groups`` without its targets."""
    weights: dict[str, Any] = {"num_bits": layout.bits, "type": "int", "symmetric": layout.symmetric, "dynamic": False}
    if layout.form == "group_int":
        weights["strategy"] = "channel" if layout.group_size == -1 else "group"
        weights["group_size"] = None if layout.group_size == -1 else layout.group_size
        return {"format": "pack-quantized", "weights": weights, "input_activations": None, "output_activations": None}
    kind = "int" if layout.form == "channel_int8" else "float"
    inputs: dict[str, Any] | None = {
        "num_bits": 8, "type": kind, "symmetric": True, "dynamic": True, "strategy": "token", "group_size": None,
    }  # fmt: skip
    weights |= {"type": kind, "strategy": "channel", "group_size": None}
    form = "int-quantized" if layout.form == "channel_int8" else "float-quantized"
    if layout.block == _ROWS:
        inputs = None
    elif layout.form == "block_fp8":
        assert layout.block is not None and inputs is not None
        weights |= {"strategy": "block", "block_structure": list(layout.block)}
        inputs |= {"strategy": "group", "group_size": layout.block[1]}
    if layout.form == "fp4":
        mx = layout.dtype == "uint8"
        form, inputs = ("mxfp4-pack-quantized" if mx else "nvfp4-pack-quantized"), None
        weights |= {"strategy": "group" if mx else "tensor_group", "group_size": layout.group_size}
        weights["scale_dtype"] = "torch.uint8" if mx else "torch.float8_e4m3fn"
    return {"format": form, "weights": weights, "input_activations": inputs, "output_activations": None}
