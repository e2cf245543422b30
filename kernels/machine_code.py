"""What the machine code of a GPU kernel shows, and what must hold of it: registers, memory, instructions, inner loops.

Works on the listing that ``cuobjdump -sass`` prints, which comes with triton; no GPU is needed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

_REGISTERS, _THREADS = 65536, {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}  # of a multiprocessor
_SHARED = {80: 164 * 1024, 86: 100 * 1024, 89: 100 * 1024, 90: 228 * 1024, 100: 228 * 1024, 120: 100 * 1024}

# What a listing may show, by the name that claims use.
EVIDENCE = {
    "vector": re.compile(r"\bLDG(\.\w+)*\.128\b"),
    "stores": re.compile(r"\bSTG(\.\w+)*\.128\b"),
    "shared vector": re.compile(r"\bLDS(\.\w+)*\.128\b"),
    "async": re.compile(r"\bLDGSTS\b"),
    "async vector": re.compile(r"\bLDGSTS(\.\w+)*\.128\b"),
    "ldmatrix": re.compile(r"\bLDSM\b"),
    "mma": re.compile(r"\b([HIQ]G?MMA|UTC[HIQ]MMA)\b"),
    "wgmma": re.compile(r"\b[HIQ]GMMA\b"),
    "lop3": re.compile(r"\bLOP3\.LUT\b"),
}
_CONVERSION = re.compile(r"\bI2FP?\b")
_LOCAL = re.compile(r"\b(LDL|STL)\b")
# What no inner loop may hold. 32-bit divisions begin with a reciprocal of the divisor, 64-bit ones are calls.
_COSTLY = {
    "integer division": re.compile(r"\bI2F(\.\w+)*\.RP\b"),
    "integer to float": re.compile(r"\bI2FP?(?!(\.\w+)*\.RP)\b"),
    "call": re.compile(r"\bCALL\b"),
}
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);")
_JUMP = re.compile(r"^(@\S+\s+)?(?:BRA|CALL)(?:\.\w+)*\s+(.*?,\s*)?(0x[0-9a-f]+)$")
_END = re.compile(r"^(EXIT|RET|BRX|JMP|KILL)\b")
_LEAVES = re.compile(r"\b(EXIT|RET)\b")


@dataclass(frozen=True)
class Usage:
    """``registers`` a thread, bytes of ``stack`` and of ``local`` memory a thread."""

    registers: int
    stack: int
    local: int


@dataclass(frozen=True)
class Built:
    """One variant on one architecture. ``blocks``: how many fit a multiprocessor; ``faults``: what does not hold."""

    op: str
    label: str
    dtype: str
    kernel: str
    architecture: int
    seconds: float
    registers: int
    stack: int
    shared: int
    warps: int
    stages: int
    blocks: int
    shows: tuple[str, ...]
    faults: tuple[str, ...]


def occupancy(architecture: int, threads: int, registers: int, shared: int) -> int:
    """How many blocks fit a multiprocessor. ``registers``: a thread's; ``shared``: bytes of a block."""
    return min(
        _THREADS[architecture] // threads,
        _REGISTERS // max(1, threads * -(-registers // 8) * 8),
        _SHARED[architecture] // (shared + 1024),
    )


def shown(code: str) -> tuple[str, ...]:
    """What the listing of a kernel gives evidence of; "no conversion": no integer becomes a float anywhere."""
    found = tuple(name for name, pattern in EVIDENCE.items() if pattern.search(code))
    return found if _CONVERSION.search(code) else (*found, "no conversion")


def faults(
    code: str, usage: Usage, shared: int, limit: int, blocks: int, claims: frozenset[str], excused: frozenset[str]
) -> tuple[str, ...]:
    """What does not hold, a phrase each. ``shared``: bytes of a block, at most ``limit``; ``blocks``: see
    ``occupancy``; ``claims``: what the listing must show; ``excused``: what an inner loop may hold nevertheless.
    """
    found = [f"{claim} missing" for claim in sorted(claims - set(shown(code)))]
    if usage.stack or usage.local or _LOCAL.search(code):
        found.append(f"spills: {usage.stack} bytes of stack, {usage.local} of local memory")
    if shared > limit:
        found.append(f"{shared} bytes of shared memory, more than {limit}")
    if blocks < 1:
        found.append("not one block fits a multiprocessor")
    return (*found, *(f"{what} in an inner loop" for what in costly(code) if what not in excused))


def costly(code: str) -> list[str]:
    """Which instructions that do not belong there the inner loops of a kernel hold."""
    lines = [line for loop in inner_loops(code) for line in loop]
    return [name for name, pattern in _COSTLY.items() if any(pattern.search(line) for line in lines)]


def inner_loops(code: str) -> list[list[str]]:
    """The instructions of every loop of a kernel that has no loop inside, in the order of their addresses.

    A loop is what can come back to the target of a jump backwards that every way there passes (Aho et al.,
    "Compilers", 9.6): code that the assembler laid elsewhere belongs to it, code that lies between does not.
    """
    found = [(int(at, 16), text.strip()) for at, text in _INSTRUCTION.findall(code)]
    index = {at: i for i, (at, _) in enumerate(found)}
    before: list[list[int]] = [[] for _ in found]
    backwards, far = [], set()  # jumps back, jumps that are written as calls
    for i, (_, text) in enumerate(found):
        jump = _JUMP.match(text)
        target = None if jump is None else index.get(int(jump[3], 16))
        if jump is None or target is None or _returns(found, text, target):
            always = _END.match(text) is not None
        else:
            always = jump[1] is None and jump[2] is None
            before[target].append(i)
            if "CALL" in text:
                far.add(i)
            if target < i:  # the last instruction jumps to itself, which is no loop
                backwards.append((i, target))
        if not always and i + 1 < len(found):
            before[i + 1].append(i)
    loops: dict[int, set[int]] = {}
    for end, head in backwards:
        body, open_ends = {head}, [end]
        while open_ends:
            if (i := open_ends.pop()) not in body:
                body.add(i)
                open_ends += before[i]
        if head == 0 or 0 not in body:
            loops.setdefault(head, set()).update(body)
    inner = [body for head, body in loops.items() if not any(other in body for other in loops if other != head)]
    return [[found[i][1] for i in sorted(body) if i not in far] for body in inner]


def _returns(found: list[tuple[int, str]], text: str, target: int) -> bool:
    """Whether ``text`` calls a function, which lie behind the kernel's end: the assembler writes far jumps so too."""
    ends = (end[1] for _, line in found[target:] if (end := _LEAVES.search(line)))
    return "CALL" in text and next(ends, "EXIT") == "RET"


def listings(cubin: Path | bytes) -> dict[str, tuple[Usage, str]]:
    """(use of resources, listing) of every kernel of a cubin, by its name."""
    if isinstance(cubin, bytes):
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            return listings(Path(file.name))
    pattern = r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)"
    usage = {name: Usage(*map(int, rest)) for name, *rest in re.findall(pattern, _tool("-res-usage", cubin))}
    parts = {part.split(maxsplit=1)[0]: part for part in _tool("-sass", cubin).split("Function : ")[1:]}
    return {name: (usage[name], parts[name]) for name in usage}


def _tool(option: str, cubin: Path) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, cubin], capture_output=True, text=True, check=True).stdout
