"""What gpu_check runs, in order: first what a user of a GPU relies on most, then everything else."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, replace
from pathlib import Path

SMOKE_OPS = ("rms_norm", "rope_kv_write", "paged_attention", "linear_group_int", "sample")
SERVED_FIRST = ("paged_attention", "rope_kv_write", "kv_write")  # of the manifest, behind the linears
# Seconds an item may go without a word, of a kernel that it compiles too; one of a runner builds models first
SILENCE, SILENCE_RUNNER = 30.0, 40.0
SMOKE_SECONDS = 60.0
PREPARE_SECONDS = 240.0  # compiling before a stage, all of it
COMPILED = ("triton", "cuda")
TEST_MODULES = ("test_steps.py", "test_speculation.py", "test_parity.py")
# Small cases that go round a ring of copies or split columns, and those of attention.
RACED = ("linear_group_int [cuda]", "paged_attention [triton]", "sample [triton]")
_GPU = Path(__file__).resolve().parents[1]
CHECK, PRECOMPILE = _GPU / "check.py", _GPU / "compiling" / "precompile.py"
NVCC = "compile cuda"


@dataclass(frozen=True)
class Where:
    """``families`` of kernels are checked, on a GPU of ``capability``, whose name in tuned/ is ``gpu``, or ``dry``.
    ``compiled``: all that is launched is there already.
    """

    families: tuple[str, ...]
    dry: bool = False
    capability: int | None = None
    gpu: str = ""
    compiled: bool = False


@dataclass(frozen=True)
class Item:
    """One process of ``script``. ``limit``: seconds it may take; ``silence``: those between two rows; ``wrapper``: what
    it runs under; ``after``: items that end before it begins; ``cases``: it can be asked for some of its cases.
    """

    stage: str
    name: str
    arguments: tuple[str, ...]
    limit: float
    wrapper: tuple[str, ...] = ()
    script: Path = CHECK
    silence: float = SILENCE
    after: tuple[str, ...] = ()
    cases: bool = False

    @property
    def compiles(self) -> bool:
        """Whether it needs cores alone, not the GPU."""
        return self.script == PRECOMPILE

    def command(self, device: str, more: tuple[str, ...] = ()) -> list[str]:
        """What to run."""
        on = () if self.compiles else ("--device", device)
        return [*self.wrapper, sys.executable, str(self.script), *self.arguments, *more, *on]


def runner_items() -> list[tuple[str, int]]:
    """(family, quant_policy) of what the runner is checked with: that of the smoke stage, those as wide as served ones,
    the others.
    """
    from gpu.checking.runner import FAMILIES, POLICIES

    first = [("llama", 0), ("wide awq", 0), ("wide", 0), ("wide", 8), ("wide", 4)]
    caches = (("llama", policy) for policy in POLICIES if policy)
    return [*first, *caches, *((family, 0) for family in FAMILIES if family != "llama")]


def _compiling(name: str, stages: tuple[str, ...], where: Where) -> list[Item]:
    """What compiles ``stages``, if there is anything to compile."""
    wanted = {"cuda"} if stages == ("cuda",) else {"triton"}
    if where.dry or where.compiled or not wanted & set(where.families):
        return []
    arguments = (*stages, "--arch", str(where.capability), "--device", where.gpu, "--seconds", str(PREPARE_SECONDS))
    limit = PREPARE_SECONDS + 60
    return [Item("compile", name, arguments, limit, script=PRECOMPILE, silence=limit)]


def items(where: Where, smoke_only: bool, sanitizer: str | None, limit: float) -> list[Item]:
    """Everything there is to run, in order. Beside it runs what compiles for the items behind it."""
    from toolkit.kernels.registry import load

    ops = [(name, f) for name, op in load().items() for f in where.families if f in op.implementations]
    smoke = [(name, f) for name, f in ops if name in SMOKE_OPS]
    quick = limit if where.dry else SMOKE_SECONDS
    found = _compiling(NVCC, ("cuda",), where) + _compiling("compile smoke", ("smoke",), where)
    first = {"triton": ("compile smoke",), "cuda": (NVCC,)}
    found += [_op("smoke", n, f, quick, ("--smoke",), first.get(f, ())) for n, f in smoke]
    runner = Item("smoke", "runner llama", ("--runner", "llama"), quick, silence=SILENCE_RUNNER)
    found.append(replace(runner, after=("compile smoke",)))
    if smoke_only:
        return found
    found += _linears(where, limit)
    found += _compiling("compile attention", ("attention",), where)
    found += _compiling("compile runner", ("runner", "self-test"), where)
    found += _compiling("compile served", ("manifest",), where) + _compiling("compile ops", ("ops",), where)
    from gpu.checking.alike import FAMILIES as ALIKE

    from toolkit.kernels.triton.ahead_of_time.manifest import calls

    called = {call.op for call in calls()}
    served = [n for n, f in ops if f == "triton" and not where.dry and n in called]
    served.sort(key=lambda n: SERVED_FIRST.index(n) if n in SERVED_FIRST else len(SERVED_FIRST))
    found += [_served(n, limit, "compile attention") for n in served if n in SERVED_FIRST]
    from gpu.models import WIDE

    all_but_smoke = runner_items()[1:]
    wide = [_runner(family, policy, limit) for family, policy in all_but_smoke if family in WIDE and not where.dry]
    found += wide[:1]
    if not where.dry:
        late = ("env", "TOOLKIT_DEPENDENT_LAUNCH=0")
        wide.append(replace(wide[0], name="runner wide awq, no dependent launches", wrapper=late))
    found += wide[1:]
    found += [_served(n, limit, "compile served") for n in served if n not in SERVED_FIRST]
    found += [_runner(family, policy, limit) for family, policy in all_but_smoke if family not in WIDE]
    alike = ("llama",) if where.dry else ALIKE
    found += [_alike(family, limit) for family in alike]
    found.append(Item("runner", "ranks", ("--ranks",), limit, silence=SILENCE_RUNNER, after=("compile runner", NVCC)))
    if all(importlib.util.find_spec(name) for name in ("pytest", "transformers")):
        tests = Item("runner", "", (), 2 * limit, silence=SILENCE_RUNNER, after=("compile runner", NVCC))
        found += [replace(tests, name=f"tests {m}", arguments=("--tests", m)) for m in TEST_MODULES]
    short = ("--smoke",) if where.dry else ()
    after_ops = {"triton": ("compile ops",), "cuda": (NVCC,)}
    found += [_op("ops", n, f, limit, short, after_ops.get(f, ())) for n, f in ops]
    return found + (_sanitized(smoke, where, sanitizer, limit) if sanitizer is not None else [])


def _op(stage: str, name: str, family: str, limit: float, more: tuple[str, ...], after: tuple[str, ...]) -> Item:
    return Item(stage, f"{name} [{family}]", ("--op", name, "--family", family, *more), limit, after=after, cases=True)


def _served(name: str, limit: float, after: str) -> Item:
    return Item("served", f"served {name}", ("--manifest", name), 2 * limit, after=(after,), cases=True)


def _runner(family: str, policy: int, limit: float) -> Item:
    name, arguments = f"runner {family}, quant_policy {policy}", ("--runner", family, "--policy", str(policy))
    return Item("runner", name, arguments, limit, silence=SILENCE_RUNNER, after=("compile runner", NVCC))


def _alike(family: str, limit: float) -> Item:
    arguments = ("--alike", family)
    return Item("runner", f"batch_invariant {family}", arguments, limit, silence=60, after=("compile runner", NVCC))


def _linears(where: Where, limit: float) -> list[Item]:
    """Of the CUDA kernels; in a dry run on the CPU, where a compiler builds them for it."""
    from gpu.checking.linears import AHEAD_FORMS, FORMS

    if not where.dry and "cuda" not in where.families:
        return []
    wanted = [(f"{bits} bits, {dtype}", f"{bits},{dtype}") for bits, dtype in FORMS]
    wanted += [(f"{bits} bits, {dtype}, ahead", f"{bits},{dtype},ahead") for bits, dtype in AHEAD_FORMS]
    return [
        Item("linears", f"served linears, {name}", ("--linears", asked), 2 * limit, after=(NVCC,), cases=True)
        for name, asked in wanted
    ]


def _sanitized(smoke: list[tuple[str, str]], where: Where, sanitizer: str, limit: float) -> list[Item]:
    """Under compute-sanitizer: accesses of the smoke cases, races of those that share memory among warps."""
    # each tensor in memory of its own, so that what lies beyond it is nobody's
    alone, code = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1"), ("--error-exitcode", "99")

    def under(tool: str) -> tuple[str, ...]:
        return (*alone, sanitizer, "--tool", tool, *code)

    # long before the others: rings of copies, split columns
    form = ("--linears", "4,float16", "--smoke")
    found = [Item("sanitizer", "served linears, races", form, 2 * limit, under("racecheck"), after=(NVCC,))]
    for tool in ("memcheck", "racecheck"):
        for name, family in smoke:
            label = f"{name} [{family}]"
            if tool == "memcheck" or label in RACED:
                arguments = ("--op", name, "--family", family, "--smoke")
                found.append(Item("sanitizer", f"{label}, {tool}", arguments, limit, under(tool)))
    return found if "cuda" in where.families else found[1:]
