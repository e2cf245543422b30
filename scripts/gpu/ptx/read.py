"""PTX text into what each of its instructions does to a warp (``warp``): those that our kernels have."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from gpu.ptx.arithmetic import ONE, PLAIN, Numbers
from gpu.ptx.lanes import Lanes
from gpu.ptx.warp import Fault, Kernel, Step

NOTHING = ("griddepcontrol.launch", "membar", "pragma", "bar.warp", "fence")


def read(text: str, symbols: Mapping[str, int] | None = None) -> Kernel:
    """The kernel whose body is ``text``; ``symbols``: where its parameters lie, 0 for those that are not named. Fault
    for an instruction that is not known here.
    """
    return _Reader(text, symbols or {}).kernel


class _Reader(Numbers, Lanes):
    """Registers that were declared, and the kernel as far as it is read."""

    def __init__(self, text: str, symbols: Mapping[str, int]) -> None:
        super().__init__(symbols)
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

    def step(self, opcode: str, operands: list[str]) -> Step | None:
        """What an instruction does."""
        if opcode in ("bar.sync", "bra", "ret") or opcode.startswith(NOTHING):
            return None
        parts = opcode.split(".")
        made = getattr(self, f"_{parts[0]}", None)
        if parts[0] in PLAIN and parts[1] not in ("wide", "hi"):
            made = functools.partial(self.plain, PLAIN[parts[0]])
        if parts[0] in ONE:
            made = functools.partial(self.one, ONE[parts[0]])
        if opcode.startswith("griddepcontrol.wait"):
            return lambda w: setattr(w, "waited", True)
        if made is None:
            raise Fault(f"no such instruction here: {opcode}")
        found: Step = made(parts, operands)
        return found
