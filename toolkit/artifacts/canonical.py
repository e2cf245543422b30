"""The one form in memory that every weight format is read into and every packer starts from.

A format on disk (AWQ, GPTQ, GGUF, W8A8 …) is one reader, and where we produce it one writer, to the
classes below; a runner's packing is one packer from them. All tensors live on the CPU; ``out`` is the
number of output features (rows), ``in`` the number of input features. Weights act as ``y = x @ W.T``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from toolkit.artifacts.streams import places
from toolkit.base.lazy_dataclass import dataclass


class ByRow:
    """A form whose tensors named in ``BY_ROW`` have a row for each row of the weight; the others are of all rows."""

    BY_ROW: ClassVar[tuple[str, ...]]

    def take_rows(self, rows: Tensor | slice) -> Self:
        """The weight of some rows."""
        found = {name: getattr(self, name) for name in self.BY_ROW}
        taken = {n: x.take_rows(rows) if isinstance(x, ByRow) else x[rows] for n, x in found.items() if x is not None}
        return replace(self, **taken)  # type: ignore[type-var]


class Cut(ByRow):
    """A weight that is cut for ranks that compute a part of it each."""

    @property
    def shape(self) -> tuple[int, int]:
        raise NotImplementedError

    @property
    def unit(self) -> int:
        """Inputs that belong together: columns are cut between multiples of it."""
        return 1

    @property
    def cut_anywhere(self) -> bool:
        """Whether columns can be taken off the borders of ``unit`` too."""
        return self.unit == 1

    def take_columns(self, start: int, stop: int) -> Any:
        """The weight of the inputs from ``start`` to ``stop`` - 1. Raises ValueError off the borders of a form that
        cannot be cut there."""
        if not self.cut_anywhere and (start % self.unit or (stop % self.unit and stop != self.shape[1])):
            raise ValueError(f"inputs {start} to {stop} are cut inside a group of {self.unit}")
        return self._columns(start, stop)

    def _columns(self, start: int, stop: int) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Matrix(Cut):
    """``weight``: a number for each weight, [out, in]."""

    weight: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]


@dataclass(frozen=True)
class Dense(Matrix):
    """Plain floating point weight. ``weight``: [out, in], float32 / float16 / bfloat16."""

    BY_ROW = ("weight",)

    def _columns(self, start: int, stop: int) -> Dense:
        return Dense(self.weight[:, start:stop].contiguous())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.weight.to(dtype)


@dataclass(frozen=True)
class SuperScales(ByRow):
    """What the scales and minima of a ``GroupInt`` or ``Codebook`` were computed from (GGUF's K-quants and IQ4_XS):
    small integers times one float a super-block, kept so that a file can be written again bit by bit.

    ``d``, ``dmin``: float16 [out, super-blocks]; ``codes``, ``min_codes``: int8 [out, groups].
        scale = d * code, minimum = -(dmin * min_code), in float32
    """

    BY_ROW = ("d", "codes", "dmin", "min_codes")

    d: Tensor
    codes: Tensor
    dmin: Tensor | None = None
    min_codes: Tensor | None = None

    def scales(self) -> Tensor:
        """float32 [out, groups]."""
        return _spread(self.d, self.codes)

    def minima(self) -> Tensor | None:
        """float32 [out, groups], None where there are none."""
        if self.dmin is None or self.min_codes is None:
            return None
        return -_spread(self.dmin, self.min_codes)

    def take_groups(self, start: int, stop: int) -> SuperScales | None:
        """Those of the groups from ``start`` to ``stop`` - 1, None where super-blocks would be cut."""
        each = self.codes.shape[1] // self.d.shape[1]
        if start % each or stop % each:
            return None
        blocks, groups = slice(start // each, stop // each), slice(start, stop)
        dmin = None if self.dmin is None else self.dmin[:, blocks].contiguous()
        least = None if self.min_codes is None else self.min_codes[:, groups].contiguous()
        return SuperScales(self.d[:, blocks].contiguous(), self.codes[:, groups].contiguous(), dmin, least)


def _spread(floats: Tensor, codes: Tensor) -> Tensor:
    each = floats.float().repeat_interleave(codes.shape[1] // floats.shape[1], dim=1)
    return each * codes.float()


class Stored(Protocol):
    """Codes [out, in] as a file holds them."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def unpack(self) -> Tensor:
        """uint8, one code a byte."""

    def take_rows(self, rows: slice) -> Self | None:
        """Those of some rows, or None where they do not stand apart."""


@dataclass(frozen=True)
class GroupInt(Cut):
    """Integers in groups along the input dimension, one scale (and offset) a group.

    ``codes``: uint8 [out, in], each below ``2**bits``, one code a byte. Given as ``Stored``, they stay so, are unpacked
    when they are first asked for, and a packer finds them in ``stored``.
    ``scales``: [out, in/group_size], float16, bfloat16 or float32, exactly as stored on disk.
    ``zeros``: uint8 [out, in/group_size] or None; ``minima``: [out, in/group_size] float or None.
        w = (code - zero) * scale     with ``zeros``
        w = code * scale + minimum    with ``minima`` (GGUF Q4_1 and kin)
    Exactly one of the two is given; a symmetric grid is ``zeros`` filled with ``2**(bits-1)``.
    ``group_index``: int32 [in] or None: the group of every input feature where groups are not
    consecutive (GPTQ act-order).
    ``super_scales``: what ``scales`` and ``minima`` (then float32) were computed from, for K-quants, else None.
    """

    BY_ROW = ("codes", "scales", "zeros", "minima", "super_scales")

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int
    group_size: int
    minima: Tensor | None = None
    group_index: Tensor | None = None
    super_scales: SuperScales | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.codes, Tensor):
            self.__dict__["stored"] = self.__dict__.pop("codes")

    if TYPE_CHECKING:
        stored: ClassVar[Stored | None]
    else:
        stored = None

        def __getattr__(self, name: str) -> Any:
            if name != "codes" or self.stored is None:
                raise AttributeError(name)
            return self.__dict__.setdefault("codes", self.stored.unpack())

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = (self.codes if self.stored is None else self.stored).shape
        return rows, columns

    def take_rows(self, rows: Tensor | slice) -> Self:
        """The weight of some rows; of a range mostly still as stored."""
        part: Any = self.stored.take_rows(rows) if self.stored is not None and isinstance(rows, slice) else None
        if part is None:
            return super().take_rows(rows)
        rest = (getattr(self, name) for name in self.BY_ROW if name != "codes")
        scales, zeros, minima, supers = (None if x is None else x[rows] for x in rest)
        assert supers is None and scales is not None
        return type(self)(part, scales, zeros, self.bits, self.group_size, minima, self.group_index)

    @property
    def unit(self) -> int:
        return self.group_size if self.group_index is None else 1

    @property
    def cut_anywhere(self) -> bool:
        return True

    def _columns(self, start: int, stop: int) -> GroupInt:
        """A group that is cut is one of which some inputs are here: those in groups are told one by one then."""
        size = self.group_size
        if self.group_index is not None:
            used, index = torch.unique(self.group_index[start:stop], return_inverse=True)
            groups: Tensor | slice = used.long()
            among: Tensor | None = index.to(self.group_index.dtype)
            above = None
        else:
            first, last = start // size, -(-stop // size)
            groups, above = slice(first, last), self.super_scales and self.super_scales.take_groups(first, last)
            whole = start % size == 0 and stop % size == 0
            among = None if whole else torch.arange(start, stop, dtype=torch.int32) // size - first
        parts = (self.scales, self.zeros, self.minima)
        scales, zeros, minima = (None if x is None else x[:, groups].contiguous() for x in parts)
        assert scales is not None
        codes = self.codes[:, start:stop].contiguous()
        return GroupInt(codes, scales, zeros, self.bits, size, minima, among, above if among is None else None)

    @property
    def symmetric(self) -> bool:
        return self.zeros is not None and bool((self.zeros == 1 << (self.bits - 1)).all())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        if self.group_index is not None:
            index = self.group_index.long()
            scale = self.scales.float()[:, index]
            if self.minima is not None:
                return self.codes.float().mul_(scale).add_(self.minima.float()[:, index]).to(dtype)
            assert self.zeros is not None
            return self.codes.float().sub_(self.zeros.float()[:, index]).mul_(scale).to(dtype)
        out, n_in = self.codes.shape
        codes = self.codes.view(out, -1, self.group_size).float()  # a copy, changed in place: it can be large
        scale = self.scales.float()[..., None]
        if self.minima is not None:
            codes.mul_(scale).add_(self.minima.float()[..., None])
        else:
            assert self.zeros is not None
            codes.sub_(self.zeros.float()[..., None]).mul_(scale)
        return codes.view(out, n_in).to(dtype)


@dataclass(frozen=True)
class ScaledRows(Matrix):
    """Codes with one float32 scale a row: w = weight * scale. ``weight``: [out, in]; ``scales``: [out]."""

    BY_ROW = ("weight", "scales")

    scales: Tensor

    def _columns(self, start: int, stop: int) -> ScaledRows:
        return replace(self, weight=self.weight[:, start:stop].contiguous())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return (self.weight.float() * self.scales[:, None]).to(dtype)


class ChannelInt8(ScaledRows):
    """W8A8: int8 weights; activations are quantized per token at run time."""


class Fp8(ScaledRows):
    """W8A8 in floating point: float8_e4m3fn or float8_e5m2."""


@dataclass(frozen=True)
class BlockFp8(Matrix):
    """float8 weights with one scale a tile of rows and columns (DeepSeek's blocked fp8).

    ``weight``: float8_e4m3fn [out, in]; ``scales``: float32 [row blocks, ceil(in / block[1])], w = weight * scale;
    ``block``: rows and columns of a tile, those at the border may be smaller. ``row_blocks``: int32 [out], the row
    block of every row where rows were taken out of their tiles, None for row // block[0].
    """

    BY_ROW = ("weight", "row_blocks")

    scales: Tensor
    block: tuple[int, int]
    row_blocks: Tensor | None = None

    @property
    def unit(self) -> int:
        return self.block[1]

    def _columns(self, start: int, stop: int) -> BlockFp8:
        tiles = slice(start // self.block[1], -(-stop // self.block[1]))
        scales = self.scales[:, tiles].contiguous()
        return replace(self, weight=self.weight[:, start:stop].contiguous(), scales=scales)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        each = self.scales[self.block_of_rows()].repeat_interleave(self.block[1], dim=1)
        return (self.weight.float() * each[:, : self.weight.shape[1]]).to(dtype)

    def take_rows(self, rows: Tensor | slice) -> BlockFp8:
        """The weight of some rows, which stay in their tiles."""
        return super(BlockFp8, replace(self, row_blocks=self.block_of_rows())).take_rows(rows)

    def block_of_rows(self) -> Tensor:
        """int32 [out], the row of ``scales`` for each row of the weight."""
        if self.row_blocks is not None:
            return self.row_blocks
        return torch.arange(self.weight.shape[0], dtype=torch.int32) // self.block[0]


FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the sixteen e2m1 codes mean (OCP Microscaling Formats, 5.3.3)."""


class Coded(Cut):
    """Codes of groups along the input dimension, with a scale each, and perhaps what scales were computed from."""

    codes: Tensor
    scales: Tensor
    group_size: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def unit(self) -> int:
        return self.group_size

    def _columns(self, start: int, stop: int) -> Self:
        first, last = start // self.group_size, stop // self.group_size
        cut: dict[str, Any] = {"codes": self.codes[:, start:stop], "scales": self.scales[:, first:last]}
        changed = {name: found.contiguous() for name, found in cut.items()}
        if (above := getattr(self, "super_scales", None)) is not None:
            changed["super_scales"] = above.take_groups(first, last)
        return replace(self, **changed)  # type: ignore[type-var]


@dataclass(frozen=True)
class Fp4(Coded):
    """4-bit floats (e2m1) in blocks along the input dimension: MXFP4 and NVFP4.

    ``codes``: uint8 [out, in], each below 16, indices into ``FP4_VALUES``. ``scales``: [out, in/group_size], uint8
    (e8m0: 2 ** (scale - 127)) or float8_e4m3fn. ``global_scale``: float32 [1] that scales are *divided* by, or None.
    """

    BY_ROW = ("codes", "scales")

    codes: Tensor
    scales: Tensor
    group_size: int
    global_scale: Tensor | None = None

    def float_scales(self) -> Tensor:
        """The factors of the blocks, float32 [out, in/group_size]."""
        if self.scales.dtype == torch.uint8:
            found = torch.exp2(self.scales.float() - 127)
        else:
            found = self.scales.float()
        return found if self.global_scale is None else found / self.global_scale.float()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        table = torch.tensor(FP4_VALUES)
        values = table[self.codes.long()].unflatten(1, (-1, self.group_size))
        return (values * self.float_scales()[..., None]).flatten(1).to(dtype)


@dataclass(frozen=True)
class Codebook(Coded):
    """Codes that index a table of values: GGUF's IQ4_NL and IQ4_XS. w = table[code] * scale.

    ``codes``: uint8 [out, in]; ``table``: float32 [2**bits]; ``scales``: [out, in/group_size] float;
    ``super_scales`` as in ``GroupInt``.
    """

    BY_ROW = ("codes", "scales", "super_scales")

    codes: Tensor
    table: Tensor
    scales: Tensor
    bits: int
    group_size: int
    super_scales: SuperScales | None = None

    def integers(self) -> GroupInt:
        """8-bit codes: the same numbers where the table has whole ones within ±127 (IQ4_NL), else the nearest."""
        most = float(self.table.abs().max()) or 1.0
        table = self.table.double() / most
        steps = torch.arange(64, 128, dtype=torch.float64, device=table.device)[:, None]
        errors = ((table * steps).round() / steps - table).square().sum(1)
        best = float(steps[errors.argmin()])
        values = ((table * best).round() + 128).to(torch.uint8)
        codes = self.codes if self.codes.is_meta else values[self.codes.int()]
        scales = self.scales.float() * (most / best)
        zeros = torch.full(scales.shape, 128, dtype=torch.uint8, device=scales.device)
        return GroupInt(codes, scales, zeros, 8, self.group_size)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        values = self.table[self.codes.long()].unflatten(1, (-1, self.group_size))
        return (values * self.scales.float()[..., None]).flatten(1).to(dtype)


@dataclass(frozen=True)
class Trellis(Cut):
    """Values that are looked up by the last 8 bits of a row's stream of ``bits`` bits a weight, times a scale.

    ``words``: int32 [out, in*bits/32]; ``table``: int8 [256]; ``scales``: float16 [out, in/group_size].
        w = table[place] * scale    (``streams.places``)
    """

    BY_ROW = ("words", "scales")

    words: Tensor
    table: Tensor
    scales: Tensor
    bits: int
    group_size: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.words.shape[0], self.scales.shape[1] * self.group_size

    @property
    def cut_anywhere(self) -> bool:
        return True

    def _columns(self, start: int, stop: int) -> GroupInt:
        """Of some inputs, which are looked up by bits that stand before them."""
        return self.integers().take_columns(start, stop)

    def integers(self) -> GroupInt:
        """The same numbers as 8-bit codes."""
        values = (self.table.short() + 128).to(torch.uint8)
        codes = torch.empty(self.shape, dtype=torch.uint8, device=self.words.device)
        if not codes.is_meta:
            step = max(1, (1 << 22) // self.shape[1])
            for words, part in zip(self.words.split(step), codes.split(step), strict=True):
                part.copy_(values[places(words, self.bits).long()])
        zeros = torch.full(self.scales.shape, 128, dtype=torch.uint8, device=self.scales.device)
        return GroupInt(codes, self.scales, zeros, 8, self.group_size)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.integers().dequantize(dtype)


Weight = Dense | GroupInt | ChannelInt8 | Fp8 | BlockFp8 | Fp4 | Codebook | Trellis
