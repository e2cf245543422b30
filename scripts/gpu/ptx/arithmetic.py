"""What PTX instructions do to numbers and bits, each lane for itself."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
from gpu.ptx.operands import TYPES, Operands, packed, wide
from gpu.ptx.warp import LANES, Step, Warp

COMPARE = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
ORDERED = {"num": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "nan": lambda a, b: np.isnan(a) | np.isnan(b)}  # fmt: skip
PLAIN = {"add": operator.add, "sub": operator.sub, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
         "min": np.fmin, "max": np.fmax, "mul": operator.mul}  # fmt: skip
ONE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "neg": operator.neg, "abs": np.abs, "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt,
    "rcp": lambda x: np.float32(1) / x,
    "rsqrt": lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(np.float32),
}  # fmt: skip


class Numbers(Operands):
    """A method an instruction, ``_`` before its name; ``plain`` and ``one`` are those of ``PLAIN`` and ``ONE``."""

    def plain(self, does: Callable[..., np.ndarray], parts: list[str], operands: list[str]) -> Step:
        if parts[-1] in HALVES:
            return self._halves(does, parts[-1], operands)
        a, b = (self.get(o, parts[-1]) for o in operands[1:])
        write = self.put(operands[0])
        if "NaN" in parts:
            does = np.minimum if does is np.fmin else np.maximum
        return lambda w: write(w, does(a(w), b(w)))

    def _halves(self, does: Callable[..., np.ndarray], kind: str, operands: list[str]) -> Step:
        """On numbers of 16 bits, one or a pair, rounded once."""
        pair = kind.endswith("x2")
        reads, write = [self.get(o, "b32" if pair else "b16") for o in operands[1:]], self.put(operands[0])

        def run(w: Warp) -> None:
            words = [read(w).astype(np.uint32) for read in reads]
            ends = [does(*(wide(kind, word >> np.uint32(shift)) for word in words)) for shift in (0, 16)]
            both = packed(kind, *ends)
            write(w, both if pair else both.astype(np.uint16))

        return run

    def _mov(self, parts: list[str], operands: list[str]) -> Step:
        to, source = operands
        if to.startswith("{"):
            half = np.dtype(TYPES[parts[-1]]).itemsize // 2
            ends, word = [self.put(name.strip()) for name in to.strip("{} ").split(",")], self.get(source, parts[-1])

            def apart(w: Warp) -> None:
                both = word(w).reshape(LANES, 1).view(f"u{half}")
                for i, write in enumerate(ends):
                    write(w, both[:, i].copy())

            return apart
        if source.startswith("{"):
            names, kind = source.strip("{} ").split(","), f"b{4 * np.dtype(TYPES[parts[-1]]).itemsize}"
            reads, join, whole = [self.get(n.strip(), kind) for n in names], self.put(to), TYPES[parts[-1]]
            return lambda w: join(w, np.stack([read(w) for read in reads], 1).view(whole)[:, 0])
        read, write = self.get(source, parts[-1]), self.put(to)
        return lambda w: write(w, read(w).copy())

    _cvta = _mov

    def _mul(self, parts: list[str], operands: list[str]) -> Step:
        a, b, write = *(self.get(o, parts[-1]) for o in operands[1:3]), self.put(operands[0])
        assert parts[1] in ("wide", "hi") and parts[-1] in ("s32", "u32"), parts
        double, down = TYPES[f"{parts[-1][0]}64"], 32 if parts[1] == "hi" else 0
        to = TYPES[parts[-1]] if down else double
        return lambda w: write(w, (a(w).astype(double) * b(w).astype(double) >> double(down)).astype(to))

    def _mad(self, parts: list[str], operands: list[str]) -> Step:
        kind = parts[-1]
        whole = f"{kind[0]}64" if parts[1] == "wide" else kind
        a, b, c = (*(self.get(o, kind) for o in operands[1:3]), self.get(operands[3], whole))
        write, to = self.put(operands[0]), TYPES[whole]
        assert parts[1] in ("lo", "wide"), parts
        return lambda w: write(w, a(w).astype(to) * b(w).astype(to) + c(w))

    def one(self, does: Callable[[np.ndarray], np.ndarray], parts: list[str], operands: list[str]) -> Step:
        read, write = self.get(operands[1], parts[-1]), self.put(operands[0])
        return lambda w: write(w, does(read(w)))

    def _div(self, parts: list[str], operands: list[str]) -> Step:
        if parts[-1][0] == "f":
            return self.plain(operator.truediv, parts, operands)
        return self.plain(lambda a, b: _quotient(a, b), parts, operands)

    def _rem(self, parts: list[str], operands: list[str]) -> Step:
        return self.plain(lambda a, b: a - b * _quotient(a, b), parts, operands)

    def _fma(self, parts: list[str], operands: list[str]) -> Step:
        kind, write = parts[-1], self.put(operands[0])
        if kind in HALVES:
            return self._halves(lambda a, b, c: a * b + c, kind, operands)
        x = [self.get(o, kind) for o in operands[1:]]
        assert kind in ("f32", "f64"), parts
        return lambda w: write(w, _sum(*(read(w) for read in x)))

    def _cvt(self, parts: list[str], operands: list[str]) -> Step:
        write, to, kind = self.put(operands[0]), parts[-2], parts[-1]
        if to in ("f16x2", "bf16x2"):
            high, low = (self.get(o, "f32") for o in operands[1:])
            return lambda w: write(w, packed(to, low(w).astype(np.float64), high(w).astype(np.float64)))
        read = self.get(operands[1], kind)
        if kind in ("f16", "bf16"):
            return lambda w: write(w, wide(kind, read(w)).astype(np.float32))
        if to in ("f16", "bf16"):
            return lambda w: write(w, packed(to, read(w).astype(np.float64), np.zeros(LANES)).astype(np.uint16))
        rounded = {"rpi": np.ceil, "rmi": np.floor, "rzi": np.trunc, "rni": np.rint}.get(parts[1], lambda x: x)
        if to[0] in "su" and kind[0] == "f":  # it saturates
            limits = np.iinfo(TYPES[to])

            def whole(w: Warp) -> None:
                x = np.nan_to_num(rounded(read(w).astype(np.float64)), nan=0.0)
                write(w, np.clip(x, limits.min, limits.max).astype(TYPES[to]))

            return whole
        return lambda w: write(w, rounded(read(w)).astype(TYPES[to]))

    # -- bits

    def _not(self, parts: list[str], operands: list[str]) -> Step:
        read, write = self.get(operands[1], parts[-1]), self.put(operands[0])
        return lambda w: write(w, ~read(w))

    def _shift(self, parts: list[str], operands: list[str]) -> Step:
        read, by, write = self.get(operands[1], parts[-1]), self.get(operands[2], "u32"), self.put(operands[0])
        kind = np.dtype(TYPES[parts[-1]])
        most = 8 * kind.itemsize

        def run(w: Warp) -> None:
            count = by(w)
            near = np.minimum(count, most - 1).astype(kind)
            value = read(w) << near if parts[0] == "shl" else read(w) >> near
            write(w, value if parts[-1][0] == "s" else np.where(count < most, value, kind.type(0)))

        return run

    _shl = _shr = _shift

    def _prmt(self, parts: list[str], operands: list[str]) -> Step:
        a, b, chosen = (self.get(o, "b32") for o in operands[1:])
        write = self.put(operands[0])

        def run(w: Warp) -> None:
            both = a(w).astype(np.uint64) | b(w).astype(np.uint64) << np.uint64(32)
            out = np.zeros(LANES, np.uint32)
            for i in range(4):
                nibble = chosen(w) >> np.uint32(4 * i)
                byte = (both >> (8 * (nibble & 7)).astype(np.uint64) & np.uint64(255)).astype(np.uint32)
                byte = np.where(nibble & 8, np.where(byte & 128, 255, 0), byte).astype(np.uint32)
                out |= byte << np.uint32(8 * i)
            write(w, out)

        return run

    def _lop3(self, parts: list[str], operands: list[str]) -> Step:
        a, b, c = (self.get(o, "b32") for o in operands[1:4])
        table, write = int(operands[4], 0), self.put(operands[0])

        def run(w: Warp) -> None:
            x, out = (a(w), b(w), c(w)), np.zeros(LANES, np.uint32)
            for i in (i for i in range(8) if table >> i & 1):
                terms = [v if i >> (2 - n) & 1 else ~v for n, v in enumerate(x)]
                out |= terms[0] & terms[1] & terms[2]
            write(w, out)

        return run

    def _bfi(self, parts: list[str], operands: list[str]) -> Step:
        a, b = (self.get(o, "b32") for o in operands[1:3])
        at, count = int(operands[3]), int(operands[4])
        ones, write = ((1 << count) - 1) << at & 0xFFFFFFFF, self.put(operands[0])
        return lambda w: write(w, b(w) & np.uint32(~ones & 0xFFFFFFFF) | a(w) << np.uint32(at) & np.uint32(ones))

    def _bfe(self, parts: list[str], operands: list[str]) -> Step:
        read, write = self.get(operands[1], parts[-1]), self.put(operands[0])
        at, count, kind = int(operands[2], 0), int(operands[3], 0), TYPES[parts[-1]]
        left, right = kind(32 - at - count), kind(32 - count)
        return lambda w: write(w, (read(w) << left) >> right)

    def _setp(self, parts: list[str], operands: list[str]) -> Step:
        a, b = (self.get(o, parts[-1]) for o in operands[1:])
        write, name = self.put(operands[0]), parts[1]
        assert len(parts) == 3 or parts[2] == "ftz", parts
        if name in ORDERED:
            return lambda w: write(w, ORDERED[name](a(w), b(w)))
        if name.endswith("u") and name[:-1] in COMPARE and parts[-1][0] == "f":  # or not ordered
            return lambda w: write(w, COMPARE[name[:-1]](a(w), b(w)) | np.isnan(a(w)) | np.isnan(b(w)))
        does = COMPARE[name]
        if name == "ne" and parts[-1][0] == "f":
            return lambda w: write(w, (a(w) != b(w)) & ~np.isnan(a(w)) & ~np.isnan(b(w)))
        return lambda w: write(w, does(a(w), b(w)))

    def _selp(self, parts: list[str], operands: list[str]) -> Step:
        a, b, p = (*(self.get(o, parts[-1]) for o in operands[1:3]), self.get(operands[3], "pred"))
        write = self.put(operands[0])
        return lambda w: write(w, np.where(p(w), a(w), b(w)))


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of whole numbers, cut off towards zero."""
    far, near = a.astype(np.int64), np.where(b == 0, 1, b).astype(np.int64)
    return (np.abs(far) // np.abs(near) * np.sign(far) * np.sign(near)).astype(a.dtype)


def _sum(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Rounded once, as far as a wider type tells: products of float32 are whole in float64, those of float64 nearly so
    in what the processor has beyond."""
    wide = np.float64 if a.dtype == np.float32 else np.longdouble
    return (a.astype(wide) * b + c).astype(a.dtype)
