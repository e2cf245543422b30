"""PTX text into what each of its instructions does to a warp (``ptx_warp``): those that the CUDA kernels have."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from gpu.ptx_warp import LANES, SPECIAL, Fault, Kernel, Step, Warp

TYPES: dict[str, Any] = {
    "pred": np.bool_, "f32": np.float32, "f16": np.uint16,
    **{f"{kind}{bits}": getattr(np, f"{name}int{bits}")
       for kind, name in (("s", ""), ("u", "u"), ("b", "u")) for bits in (8, 16, 32, 64)},
}  # fmt: skip
COMPARE = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt,
           "ge": operator.ge}  # fmt: skip
PLAIN = {"add": operator.add, "sub": operator.sub, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
         "min": np.minimum, "max": np.maximum}  # fmt: skip
NOTHING = ("membar", "pragma", "bar.warp", "griddepcontrol.launch_dependents")


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


def read(text: str) -> Kernel:
    """The kernel whose body is ``text``. Fault for an instruction that is not known here."""
    return _Reader(text).kernel


class _Reader:
    """Registers that were declared, and the kernel as far as it is read."""

    def __init__(self, text: str) -> None:
        self.width = {"%p": "pred", "%rs": "b16", "%f": "b32", "%r": "b32", "%rd": "b64"}
        self.named: dict[str, str] = {}
        text = re.sub(r"//.*", "", text)
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
        elif re.match(r"-?\d|-?0x", operand):
            bits = int(operand, 0) & ((1 << 8 * wanted.itemsize) - 1)
            value = np.full(LANES, bits, f"u{wanted.itemsize}")
        else:
            value = np.zeros(LANES, f"u{wanted.itemsize}")  # of shared memory, or of the parameters: where they begin
        return lambda w: value.view(wanted)

    def put(self, operand: str) -> Callable[[Warp, np.ndarray], None]:
        kept = np.dtype(TYPES[self.type_of(operand)])

        def write(w: Warp, value: np.ndarray) -> None:
            w.put(operand, value.view(kept) if value.dtype.itemsize == kept.itemsize else value.astype(kept))

        return write

    def address(self, operand: str, kind: str) -> Callable[[Warp], np.ndarray]:
        """Of ``[name+offset]``."""
        name, _, offset = operand.strip("[] ").partition("+")
        read, more = self.get(name.strip(), kind), int(offset or "0")
        return lambda w: read(w).astype(np.int64) + more

    def step(self, opcode: str, operands: list[str]) -> Step | None:
        """What an instruction does."""
        if opcode in ("bar.sync", "bra", "ret") or opcode.startswith(NOTHING):
            return None
        parts = opcode.split(".")
        made = getattr(self, f"_{parts[0]}", None)
        if parts[0] in PLAIN:
            made = functools.partial(self._plain, PLAIN[parts[0]])
        if opcode.startswith("griddepcontrol.wait"):
            return lambda w: setattr(w, "waited", True)
        if made is None:
            raise Fault(f"no such instruction here: {opcode}")
        found: Step = made(parts, operands)
        return found

    # -- arithmetic

    def _plain(self, does: Callable[..., np.ndarray], parts: list[str], operands: list[str]) -> Step:
        a, b = (self.get(o, parts[-1]) for o in operands[1:])
        write = self.put(operands[0])
        return lambda w: write(w, does(a(w), b(w)))

    def _mov(self, parts: list[str], operands: list[str]) -> Step:
        to, source = operands
        if to.startswith("{"):
            first, second = (self.put(name.strip()) for name in to.strip("{} ").split(","))
            word = self.get(source, "b32")

            def apart(w: Warp) -> None:
                first(w, word(w).astype(np.uint16))
                second(w, (word(w) >> np.uint32(16)).astype(np.uint16))

            return apart
        read, write = self.get(source, parts[-1]), self.put(to)
        return lambda w: write(w, read(w).copy())

    _cvta = _mov

    def _mul(self, parts: list[str], operands: list[str]) -> Step:
        a, b, write = *(self.get(o, parts[-1]) for o in operands[1:3]), self.put(operands[0])
        if parts[1] == "wide":
            double = TYPES[f"{parts[-1][0]}64"]
            return lambda w: write(w, a(w).astype(double) * b(w).astype(double))
        assert parts[1] == "lo" or parts[-1] == "f32", parts
        return lambda w: write(w, a(w) * b(w))

    def _mad(self, parts: list[str], operands: list[str]) -> Step:
        a, b, c = (self.get(o, parts[-1]) for o in operands[1:])
        write = self.put(operands[0])
        assert parts[1] == "lo", parts
        return lambda w: write(w, a(w) * b(w) + c(w))

    def _fma(self, parts: list[str], operands: list[str]) -> Step:
        kind, write = parts[-1], self.put(operands[0])
        if kind == "f32":
            x = [self.get(o, kind) for o in operands[1:]]
            return lambda w: write(w, _sum(*(read(w) for read in x)))
        y = [self.get(o, "b32") for o in operands[1:]]

        def run(w: Warp) -> None:
            words = [read(w) for read in y]
            ends = []
            for shift in (0, 16):
                a, b, c = (_wide(kind, word >> np.uint32(shift)) for word in words)
                ends.append(a * b + c)
            write(w, _pair(kind, *ends))

        return run

    def _cvt(self, parts: list[str], operands: list[str]) -> Step:
        write = self.put(operands[0])
        if parts[2] in ("f16x2", "bf16x2"):
            high, low = (self.get(o, "f32") for o in operands[1:])
            return lambda w: write(w, _pair(parts[2], low(w).astype(np.float64), high(w).astype(np.float64)))
        read, to = self.get(operands[1], parts[2]), TYPES[parts[1]]
        if parts[2] == "f16":
            return lambda w: write(w, _wide("f16", read(w)).astype(np.float32))
        return lambda w: write(w, read(w).astype(to))

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

    def _setp(self, parts: list[str], operands: list[str]) -> Step:
        a, b = (self.get(o, parts[-1]) for o in operands[1:])
        does, write = COMPARE[parts[1]], self.put(operands[0])
        return lambda w: write(w, does(a(w), b(w)))

    def _selp(self, parts: list[str], operands: list[str]) -> Step:
        a, b, p = (*(self.get(o, parts[-1]) for o in operands[1:3]), self.get(operands[3], "pred"))
        write = self.put(operands[0])
        return lambda w: write(w, np.where(p(w), a(w), b(w)))

    # -- memory

    def _ld(self, parts: list[str], operands: list[str]) -> Step:
        space, kind = parts[1], np.dtype(TYPES[parts[-1]])
        names = operands[0].strip("{} ").split(",")
        size, writes = kind.itemsize * len(names), [self.put(name.strip()) for name in names]
        address = self.address(operands[1], "u32" if space == "shared" else "u64")

        def run(w: Warp) -> None:
            memory, lanes = w.memory[space], w.running()
            at = memory.places(address(w)[lanes], size, w.waited)
            each = min(kind.itemsize, 4)
            words = memory.words(size if size < 4 else 4)
            for i, write in enumerate(writes):
                value = np.zeros(LANES, kind)
                step = i * kind.itemsize // 4
                low = words[at + step]
                if kind.itemsize == 8:
                    low = low.astype(np.uint64) | words[at + step + 1].astype(np.uint64) << np.uint64(32)
                value[lanes] = low.view(kind) if each != 8 else low
                write(w, value)

        return run

    def _st(self, parts: list[str], operands: list[str]) -> Step:
        space, kind = parts[1], np.dtype(TYPES[parts[-1]])
        reads = [self.get(name.strip(), parts[-1]) for name in operands[1].strip("{} ").split(",")]
        size, address = kind.itemsize * len(reads), self.address(operands[0], "u32" if space == "shared" else "u64")
        assert kind.itemsize <= 4, parts

        def run(w: Warp) -> None:
            memory, lanes = w.memory[space], w.running()
            at = memory.places(address(w)[lanes], size, w.waited)
            words = memory.words(size)
            for i, read in enumerate(reads):
                words[at + i] = np.ascontiguousarray(read(w)[lanes]).view(words.dtype)

        return run

    def _cp(self, parts: list[str], operands: list[str]) -> Step:
        if parts[2] == "commit_group":
            return lambda w: setattr(w, "groups", w.groups + (1 if w.mask is None else w.mask))
        if parts[2] == "wait_group":
            return lambda w: _arrive(w, int(operands[0]))
        to, source = self.address(operands[0], "u32"), self.address(operands[1], "u64")
        size = int(operands[2])
        assert size in (4, 8, 16) and (parts[2] == "ca" or size == 16), (parts, operands)

        def run(w: Warp) -> None:
            lanes = w.running()
            there = w.memory["shared"].places(to(w)[lanes], size)
            here = w.memory["global"].places(source(w)[lanes], size, w.waited)
            w.copies.append((lanes, there, here, size, w.groups[lanes]))

        return run

    def _atom(self, parts: list[str], operands: list[str]) -> Step:
        address, value, write = self.address(operands[1], "u64"), self.get(operands[2], "u32"), self.put(operands[0])
        assert parts[1] == "add" and parts[-1] == "s32", parts

        def run(w: Warp) -> None:
            memory, before = w.memory["global"], np.zeros(LANES, np.uint32)
            words = memory.words(4)
            for lane in w.running():
                at = memory.places(address(w)[[lane]], 4, w.waited)[0]
                before[lane] = words[at]
                words[at] += value(w)[lane]
            write(w, before)

        return run

    def _mma(self, parts: list[str], operands: list[str]) -> Step:
        assert parts[1:6] == ["sync", "aligned", "m16n8k16", "row", "col"] and parts[6] == parts[9] == "f32", parts
        half = parts[7]
        names = [[n.strip() for n in o.strip("{} ").split(",")] for o in operands]
        writes = [self.put(n) for n in names[0]]
        a, b, c = ([self.get(n, k) for n in some] for some, k in zip(names[1:], ("b32", "b32", "f32"), strict=True))
        g, t = np.arange(LANES) // 4, np.arange(LANES) % 4

        def run(w: Warp) -> None:
            if w.mask is not None:
                raise Fault("tensor cores without all lanes of a warp")
            left, right, total = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
            for i, read in enumerate(a):
                for e in (0, 1):
                    left[g + 8 * (i % 2), 2 * t + 8 * (i // 2) + e] = _wide(half, read(w) >> np.uint32(16 * e))
            for i, read in enumerate(b):
                for e in (0, 1):
                    right[2 * t + 8 * i + e, g] = _wide(half, read(w) >> np.uint32(16 * e))
            for i, read in enumerate(c):
                total[g + 8 * (i // 2), 2 * t + i % 2] = read(w)
            total = (total + left @ right).astype(np.float32)
            for i, write in enumerate(writes):
                write(w, total[g + 8 * (i // 2), 2 * t + i % 2])

        return run


def _sum(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _arrive(w: Warp, left: int) -> None:
    """Copies of all groups but the ``left`` newest of each lane that waits are there now."""
    running = np.ones(LANES, np.bool_) if w.mask is None else w.mask
    kept = []
    to, source = w.memory["shared"].words(4), w.memory["global"].words(4)
    for lanes, there, here, size, group in w.copies:
        done = running[lanes] & (group < w.groups[lanes] - left)
        for i in range(size // 4):
            to[there[done] + i] = source[here[done] + i]
        if not done.all():
            kept.append((lanes[~done], there[~done], here[~done], size, group[~done]))
    w.copies = kept
