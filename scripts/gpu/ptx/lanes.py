"""PTX instructions by which lanes meet: memory, shuffles, copies, tensor cores."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from gpu.ptx.operands import TYPES, Operands, wide
from gpu.ptx.warp import LANES, Fault, Step, Warp

# Products of tensor cores: shape, (of the result, the two operands, what is added)
MATRICES = (("m16n8k16", ["f32", "f16", "f16", "f32"]), ("m16n8k16", ["f32", "bf16", "bf16", "f32"]),
            ("m16n8k32", ["s32", "s8", "s8", "s32"]))  # fmt: skip


class Lanes(Operands):
    """A method an instruction, ``_`` before its name."""

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
        does: Any = {"add": np.sum, "max": np.max, "min": np.min}[parts[2]]

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
    return wide(kind, words >> np.uint32(16 * e))


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
