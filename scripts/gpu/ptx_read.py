"""PTX text into what each of its instructions does to a warp (``ptx_warp``): those that our kernels have."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gpu.ptx_warp import LANES, SPECIAL, Fault, Kernel, Step, Warp

TYPES: dict[str, Any] = {
    "pred": np.bool_, "f64": np.float64, "f32": np.float32, "f16": np.uint16, "bf16": np.uint16,
    **{f"{kind}{bits}": getattr(np, f"{name}int{bits}")
       for kind, name in (("s", ""), ("u", "u"), ("b", "u")) for bits in (8, 16, 32, 64)},
}  # fmt: skip
COMPARE = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
HALVES = ("f16", "bf16", "f16x2", "bf16x2")
# Products of tensor cores: shape, (of the result, the two operands, what is added)
MATRICES = (("m16n8k16", ["f32", "f16", "f16", "f32"]), ("m16n8k16", ["f32", "bf16", "bf16", "f32"]),
            ("m16n8k32", ["s32", "s8", "s8", "s32"]))  # fmt: skip
ORDERED = {"num": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "nan": lambda a, b: np.isnan(a) | np.isnan(b)}  # fmt: skip
PLAIN = {"add": operator.add, "sub": operator.sub, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
         "min": np.fmin, "max": np.fmax, "mul": operator.mul}  # fmt: skip
NOTHING = ("griddepcontrol.launch", "membar", "pragma", "bar.warp", "fence")


def _bfloat16(x: np.ndarray) -> np.ndarray:
    """float64 to bfloat16's bits, to nearest even, at once."""
    u = np.ascontiguousarray(x, np.float64).view(np.uint64)
    u = (u + np.uint64((1 << 44) - 1) + (u >> np.uint64(45) & np.uint64(1))) >> np.uint64(45) << np.uint64(45)
    return (u.view(np.float64).astype(np.float32).view(np.uint32) >> 16).astype(np.uint32)


def _float16(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64).astype(np.float16).view(np.uint16).astype(np.uint32)


def _wide(half: str, bits: np.ndarray) -> np.ndarray:
    """The numbers of 16 bits in a word's low half, in float64."""
    low = bits.astype(np.uint32) & 0xFFFF
    if half.startswith("bf16"):
        return (low << 16).view(np.float32).astype(np.float64)
    return low.astype(np.uint16).view(np.float16).astype(np.float64)


def _pair(half: str, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    rounded = _bfloat16 if half.startswith("bf16") else _float16
    return rounded(low) | rounded(high) << 16


def read(text: str, symbols: Mapping[str, int] | None = None) -> Kernel:
    """The kernel whose body is ``text``; ``symbols``: where its parameters lie, 0 for those that are not named. Fault
    for an instruction that is not known here.
    """
    return _Reader(text, symbols or {}).kernel


class _Reader:
    """Registers that were declared, and the kernel as far as it is read."""

    def __init__(self, text: str, symbols: Mapping[str, int]) -> None:
        self.width = {"%p": "pred", "%rs": "b16", "%f": "b32", "%r": "b32", "%rd": "b64", "%fd": "b64"}
        self.symbols = symbols
        self.named: dict[str, str] = {}
        text = re.sub(r"//.*|^\s*\.(loc|file)\b.*$", "", text, flags=re.M)
        labels: dict[str, int] = {}
        branches: dict[int, str] = {}
        kernel = Kernel([], [], {}, [])
        for statement in text.split(";"):
            statement = statement.strip().lstrip("{} \t\n")
            while found := re.match(r"(\$\w+):\s*", statement):
                labels[found[1]] = len(kernel.names)
                statement = statement[found.end() :].lstrip("{} \t\n")
            if not statement or statement.startswith(".pragma"):
                continue
            if found := re.match(r"\.reg\s+\.(\w+)\s+([^%]+)$", statement):
                self.named |= {name.strip(): found[1] for name in found[2].split(",")}
            if statement.startswith(".reg"):
                continue
            guard = None
            if found := re.match(r"@(!?)(%p\d+)\s+", statement):
                guard, statement = (found[2], not found[1]), statement[found.end() :]
            opcode, _, rest = re.sub(r"\s+", " ", statement).partition(" ")
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
            if opcode.split(".")[0] == "bra":
                branches[len(kernel.names)], opcode = operands[0], "bra"
            kernel.names.append("bar.sync" if opcode == "bar.sync" else opcode)
            kernel.guards.append(guard)
            kernel.steps.append(self.step(opcode, operands))
        kernel.targets = {at: labels[name] for at, name in branches.items()}
        self.kernel = kernel

    def type_of(self, register: str) -> str:
        return self.named.get(register) or self.width[re.match(r"%[a-z]+", register)[0]]  # type: ignore[index]

    def get(self, operand: str, kind: str) -> Callable[[Warp], np.ndarray]:
        """What reads an operand as ``kind``."""
        wanted = np.dtype(TYPES[kind])
        if operand in SPECIAL:
            return lambda w: w.place[operand].view(wanted)
        if operand in self.named or operand.startswith("%"):
            if np.dtype(TYPES[self.type_of(operand)]).itemsize == wanted.itemsize:
                return lambda w: w.registers[operand].view(wanted)
            return lambda w: w.registers[operand].astype(wanted)
        if operand.startswith("0f"):
            value = np.full(LANES, int(operand[2:], 16), np.uint32).view(np.float32)
        elif operand.startswith("0d"):
            value = np.full(LANES, int(operand[2:], 16), np.uint64).view(np.float64)
        elif re.match(r"-?\d|-?0x", operand):
            bits = int(operand.rstrip("U"), 0) & ((1 << 8 * wanted.itemsize) - 1)
            value = np.full(LANES, bits, f"u{wanted.itemsize}")
        else:
            value = np.full(LANES, self.symbols.get(operand, 0), f"u{wanted.itemsize}")  # shared memory begins at 0
        return lambda w: value.view(wanted)

    def put(self, operand: str) -> Callable[[Warp, np.ndarray], None]:
        if operand == "_":
            return lambda w, value: None
        kept = np.dtype(TYPES[self.type_of(operand)])

        def write(w: Warp, value: np.ndarray) -> None:
            w.put(operand, value.view(kept) if value.dtype.itemsize == kept.itemsize else value.astype(kept))

        return write

    def address(self, operand: str, kind: str) -> Callable[[Warp], np.ndarray]:
        """Of ``[name+offset]``."""
        name, _, offset = operand.strip("[]").replace(" ", "").partition("+")
        read, more = self.get(name.strip(), kind), int(offset or "0")
        return lambda w: read(w).astype(np.int64) + more

    def step(self, opcode: str, operands: list[str]) -> Step | None:
        """What an instruction does."""
        if opcode in ("bar.sync", "bra", "ret") or opcode.startswith(NOTHING):
            return None
        parts = opcode.split(".")
        made = getattr(self, f"_{parts[0]}", None)
        if parts[0] in PLAIN and parts[1] not in ("wide", "hi"):
            made = functools.partial(self._plain, PLAIN[parts[0]])
        if opcode.startswith("griddepcontrol.wait"):
            return lambda w: setattr(w, "waited", True)
        if made is None:
            raise Fault(f"no such instruction here: {opcode}")
        found: Step = made(parts, operands)
        return found

    # -- arithmetic

    def _plain(self, does: Callable[..., np.ndarray], parts: list[str], operands: list[str]) -> Step:
        if parts[-1] in HALVES:
            return self._halves(does, parts[-1], operands)
        a, b = (self.get(o, parts[-1]) for o in operands[1:])
        write = self.put(operands[0])
        if "NaN" in parts:
            does = {np.fmin: np.minimum, np.fmax: np.maximum}[does]
        return lambda w: write(w, does(a(w), b(w)))

    def _halves(self, does: Callable[..., np.ndarray], kind: str, operands: list[str]) -> Step:
        """On numbers of 16 bits, one or a pair, rounded once."""
        pair = kind.endswith("x2")
        reads, write = [self.get(o, "b32" if pair else "b16") for o in operands[1:]], self.put(operands[0])

        def run(w: Warp) -> None:
            words = [read(w).astype(np.uint32) for read in reads]
            ends = [does(*(_wide(kind, word >> np.uint32(shift)) for word in words)) for shift in (0, 16)]
            both = _pair(kind, *ends)
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

    def _one(self, does: Callable[[np.ndarray], np.ndarray], parts: list[str], operands: list[str]) -> Step:
        read, write = self.get(operands[1], parts[-1]), self.put(operands[0])
        return lambda w: write(w, does(read(w)))

    def _neg(self, parts: list[str], operands: list[str]) -> Step:
        return self._one(operator.neg, parts, operands)

    def _abs(self, parts: list[str], operands: list[str]) -> Step:
        return self._one(np.abs, parts, operands)

    def _ex2(self, parts: list[str], operands: list[str]) -> Step:
        return self._one(np.exp2, parts, operands)

    def _lg2(self, parts: list[str], operands: list[str]) -> Step:
        return self._one(np.log2, parts, operands)

    def _rcp(self, parts: list[str], operands: list[str]) -> Step:
        return self._one(lambda x: np.float32(1) / x, parts, operands)

    def _sqrt(self, parts: list[str], operands: list[str]) -> Step:
        return self._one(np.sqrt, parts, operands)

    def _rsqrt(self, parts: list[str], operands: list[str]) -> Step:
        return self._one(lambda x: (1 / np.sqrt(x.astype(np.float64))).astype(np.float32), parts, operands)

    def _div(self, parts: list[str], operands: list[str]) -> Step:
        if parts[-1][0] == "f":
            return self._plain(operator.truediv, parts, operands)
        return self._plain(lambda a, b: _quotient(a, b), parts, operands)

    def _rem(self, parts: list[str], operands: list[str]) -> Step:
        return self._plain(lambda a, b: a - b * _quotient(a, b), parts, operands)

    def _fma(self, parts: list[str], operands: list[str]) -> Step:
        kind, write = parts[-1], self.put(operands[0])
        if kind in HALVES:
            return self._halves(lambda a, b, c: a * b + c, kind, operands)
        x = [self.get(o, kind) for o in operands[1:]]
        assert kind == "f32", parts
        return lambda w: write(w, _sum(*(read(w) for read in x)))

    def _cvt(self, parts: list[str], operands: list[str]) -> Step:
        write, to, kind = self.put(operands[0]), parts[-2], parts[-1]
        if to in ("f16x2", "bf16x2"):
            high, low = (self.get(o, "f32") for o in operands[1:])
            return lambda w: write(w, _pair(to, low(w).astype(np.float64), high(w).astype(np.float64)))
        read = self.get(operands[1], kind)
        if kind in ("f16", "bf16"):
            return lambda w: write(w, _wide(kind, read(w)).astype(np.float32))
        if to in ("f16", "bf16"):
            return lambda w: write(w, _pair(to, read(w).astype(np.float64), np.zeros(LANES)).astype(np.uint16))
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

    # -- memory

    def _ld(self, parts: list[str], operands: list[str]) -> Step:
        space, kind = parts[1].partition("::")[0], np.dtype(TYPES[parts[-1]])
        names = operands[0].strip("{} ").split(",")
        size, writes = kind.itemsize * len(names), [self.put(name.strip()) for name in names]
        address = self.address(operands[1], "u32" if space == "shared" else "u64")

        def run(w: Warp) -> None:
            memory, lanes = w.memory[space], w.running()
            at = memory.places(address(w)[lanes], size, w.waited) // kind.itemsize
            words = memory.words(kind.itemsize)
            for i, write in enumerate(writes):
                value = np.zeros(LANES, kind)
                value[lanes] = words[at + i].view(kind)
                write(w, value)

        return run

    def _st(self, parts: list[str], operands: list[str]) -> Step:
        space, kind = parts[1].partition("::")[0], np.dtype(TYPES[parts[-1]])
        reads = [self.get(name.strip(), parts[-1]) for name in operands[1].strip("{} ").split(",")]
        size, address = kind.itemsize * len(reads), self.address(operands[0], "u32" if space == "shared" else "u64")

        def run(w: Warp) -> None:
            memory, lanes = w.memory[space], w.running()
            at = memory.places(address(w)[lanes], size, w.waited) // kind.itemsize
            words = memory.words(kind.itemsize)
            for i, read in enumerate(reads):
                words[at + i] = np.ascontiguousarray(read(w)[lanes]).view(words.dtype)

        return run

    def _ldmatrix(self, parts: list[str], operands: list[str]) -> Step:
        """Of 8 x 8 matrices of 16 bits: lane 8m + r has the address of row r of matrix m."""
        writes = [self.put(name.strip()) for name in operands[0].strip("{} ").split(",")]
        address, turned = self.address(operands[1], "u32"), "trans" in parts
        g, t = np.arange(LANES) // 4, np.arange(LANES) % 4

        def run(w: Warp) -> None:
            if w.mask is not None:
                raise Fault("matrices are loaded without all lanes of a warp")
            memory = w.memory["shared"]
            at = memory.places(address(w)[: 8 * len(writes)], 16) // 2
            rows = memory.words(2)[at[:, None] + np.arange(8)].astype(np.uint32).reshape(len(writes), 8, 8)
            for matrix, write in zip(rows.transpose(0, 2, 1) if turned else rows, writes, strict=True):
                write(w, matrix[g, 2 * t] | matrix[g, 2 * t + 1] << np.uint32(16))

        return run

    # -- lanes

    def _shfl(self, parts: list[str], operands: list[str]) -> Step:
        read, by, write = self.get(operands[1], "b32"), self.get(operands[2], "s32"), self.put(operands[0])
        assert operands[3] == ("0" if parts[2] == "up" else "31"), operands
        lane = np.arange(LANES)
        does = {"bfly": operator.xor, "up": operator.sub, "down": operator.add, "idx": lambda _, b: b}[parts[2]]

        def run(w: Warp) -> None:
            if w.mask is not None:
                raise Fault("lanes are shuffled that do not run")
            source = does(lane, by(w))
            write(w, read(w)[np.where((source >= 0) & (source < LANES), source, lane)])

        return run

    def _redux(self, parts: list[str], operands: list[str]) -> Step:
        read, write, kind = self.get(operands[1], parts[-1]), self.put(operands[0]), TYPES[parts[-1]]
        does = {"add": np.sum, "max": np.max, "min": np.min}[parts[2]]

        def run(w: Warp) -> None:
            if w.mask is not None:
                raise Fault("lanes are added up that do not run")
            write(w, np.full(LANES, does(read(w)), kind))

        return run

    def _cp(self, parts: list[str], operands: list[str]) -> Step:
        if parts[2] == "commit_group":
            return lambda w: setattr(w, "groups", w.groups + (1 if w.mask is None else w.mask))
        if parts[2] == "wait_group":
            return lambda w: _arrive(w, int(operands[0]))
        to, source = self.address(operands[0], "u32"), self.address(operands[1], "u64")
        size = int(operands[2], 0)
        given = self.get(operands[3] if len(operands) > 3 else str(size), "u32")  # what is read; the rest becomes 0
        assert size in (4, 8, 16) and (parts[2] == "ca" or size == 16), (parts, operands)

        def run(w: Warp) -> None:
            lanes = w.running()
            there = w.memory["shared"].places(to(w)[lanes], size)
            bytes_ = given(w)[lanes]
            assert ((bytes_ == 0) | (bytes_ == size)).all()
            here = np.full(len(lanes), -1, np.int64)
            here[bytes_ > 0] = w.memory["global"].places(source(w)[lanes][bytes_ > 0], size, w.waited)
            w.copies.append((lanes, there // 4, here // 4, size, w.groups[lanes]))

        return run

    def _atom(self, parts: list[str], operands: list[str]) -> Step:
        address, value, write = self.address(operands[1], "u64"), self.get(operands[2], "u32"), self.put(operands[0])
        assert parts[1] == "add" and parts[-1] == "s32", parts

        def run(w: Warp) -> None:
            memory, before = w.memory["global"], np.zeros(LANES, np.uint32)
            words = memory.words(4)
            for lane in w.running():
                at = memory.places(address(w)[[lane]], 4, w.waited)[0] // 4
                before[lane] = words[at]
                words[at] += value(w)[lane]
            write(w, before)

        return run

    def _mma(self, parts: list[str], operands: list[str]) -> Step:
        shape, kinds = parts[3], parts[-4:]
        whole, kind = kinds[0] == "s32", kinds[1]
        if (shape, kinds) not in MATRICES or parts[4:6] != ["row", "col"]:
            raise Fault(f"no such instruction here: {'.'.join(parts)}")
        per = 4 if whole else 2  # numbers of a register
        names = [[n.strip() for n in o.strip("{} ").split(",")] for o in operands]
        writes = [self.put(n) for n in names[0]]
        a, b, c = ([self.get(n, k) for n in some] for some, k in zip(names[1:], ("b32", "b32", kinds[0]), strict=True))
        g, t = np.arange(LANES) // 4, np.arange(LANES) % 4

        def run(w: Warp) -> None:
            if w.mask is not None:
                raise Fault("tensor cores without all lanes of a warp")
            left, right, total = np.zeros((16, 8 * per)), np.zeros((8 * per, 8)), np.zeros((16, 8))
            for e in range(per):
                for i, read in enumerate(a):
                    left[g + 8 * (i % 2), per * (t + 4 * (i // 2)) + e] = _part(kind, read(w), e)
                for i, read in enumerate(b):
                    right[per * (t + 4 * i) + e, g] = _part(kind, read(w), e)
            for i, read in enumerate(c):
                total[g + 8 * (i // 2), 2 * t + i % 2] = read(w)
            total = (total + left @ right).astype(TYPES[kinds[0]])
            for i, write in enumerate(writes):
                write(w, total[g + 8 * (i // 2), 2 * t + i % 2])

        return run


def _part(kind: str, words: np.ndarray, e: int) -> np.ndarray:
    """The e-th number of each word."""
    if kind == "s8":
        return words.view(np.int8).reshape(LANES, 4)[:, e].astype(np.float64)
    return _wide(kind, words >> np.uint32(16 * e))


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of whole numbers, cut off towards zero."""
    far, near = a.astype(np.int64), np.where(b == 0, 1, b).astype(np.int64)
    return (np.abs(far) // np.abs(near) * np.sign(far) * np.sign(near)).astype(a.dtype)


def _sum(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _arrive(w: Warp, left: int) -> None:
    """Copies of all groups but the ``left`` newest of each lane that waits are there now."""
    running = np.ones(LANES, np.bool_) if w.mask is None else w.mask
    kept = []
    to, source = w.memory["shared"].words(4), w.memory["global"].words(4)
    for lanes, there, here, size, group in w.copies:
        done = running[lanes] & (group < w.groups[lanes] - left)
        read = done & (here >= 0)  # the others become 0
        for i in range(size // 4):
            to[there[done] + i] = 0
            to[there[read] + i] = source[here[read] + i]
        if not done.all():
            kept.append((lanes[~done], there[~done], here[~done], size, group[~done]))
    w.copies = kept
