"""Which ops there are, who implements them, and who is chosen.

An op is declared once: the decorated torch function is its schema, its documentation, the oracle of the tests and the
implementation of last resort ("reference"). Other implementations register for it under the name of their family.
Choice follows ``PRIORITY``; the environment variable ``TOOLKIT_KERNELS`` puts one family first. An implementation
asked for by name that cannot run raises ``KernelError`` with its reason: nothing falls back in silence.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from .op import FAMILIES, FLOATS, Case, Implementation, KernelError, Op, Target
from .tolerances import compare

log = logging.getLogger("toolkit.kernels")
PRIORITY: dict[str, tuple[str, ...]] = {
    "cpu": ("torch", "reference"),
    "cuda": ("cuda", "triton", "torch", "reference"),
}  # on any other device: what is registered under its own name, then torch's and the reference
# Used unseen. Others come of compilers and drivers that we do not know: on a device they must pass a self-test first.
TRUSTED = ("reference", "torch", "cpu")
_DECLARATIONS = (
    *("norm", "rope", "activation", "embedding", "linear", "linear_blocks", "lora"),
    *("attention", "rope_kv_write", "latent_write", "causal_conv", "recurrent", "moe", "sampling"),
)
_IMPLEMENTATIONS = (
    *("torch.dense", "torch.kv_write", "torch.attention", "torch.causal_conv", "torch.recurrent"),
    *("torch.linear", "torch.lora", "torch.moe", "torch.sampling", "cuda.linear"),
)
_TRITON = (  # imported where triton is installed: on Linux
    *("elementwise.norm", "elementwise.activation", "elementwise.rope", "elementwise.embedding"),
    *("cache.kv_write", "cache.rope_kv_write", "attention.paged", "attention.latent_write"),
    *("states.causal_conv", "states.scan", "states.delta_rule"),
    *("linear.dense", "linear.group", "linear.row", "linear.block", "linear.fp4", "linear.lora"),
    *("moe.dense", "moe.quant", "moe.block", "moe.fp4", "sampling.logits", "sampling.draw"),
)

FORMS = (
    "bits",
    "minima",
    "cache",
    "codes",
    "latent",
    "alike",
)  # traits by which a kernel takes another path; others are sizes
SIGHTS = ("chunked", "alibi", "block")  # those of few models: more paths, which others need not be tried on

_OPS: dict[str, Op] = {}


def op(
    cases: Callable[[], Iterable[Case]],
    *,
    mutates: tuple[str, ...] = (),
    dtypes: tuple[str, ...] = FLOATS,
    gate: tuple[str, ...] = (),
    alike: bool = False,
) -> Callable[[Callable[..., Any]], Op]:
    """Decorator that declares an op: the function is its reference implementation; ``alike``: see ``Op.register``."""

    def declare(reference: Callable[..., Any]) -> Op:
        declared = Op(reference.__name__, reference, cases, mutates, dtypes, choose, gate=gate)
        declared.__doc__ = reference.__doc__
        declared.register("reference", alike=alike)(reference)
        assert declared.name not in _OPS, declared.name
        _OPS[declared.name] = declared
        return declared

    return declare


def load() -> dict[str, Op]:
    """Import every declaration and implementation (this imports torch) and return the ops by name."""
    names = [*(f"reference.{name}" for name in _DECLARATIONS), *_IMPLEMENTATIONS]
    if importlib.util.find_spec("triton") is not None:
        names += [f"triton.{name}" for name in _TRITON]
    for name in names:
        importlib.import_module(f"{__package__}.{name}")
    return dict(_OPS)


def _forced() -> str | None:
    value = os.environ.get("TOOLKIT_KERNELS", "").strip()
    known = {family: None for op in load().values() for family in op.implementations} if value else {}
    if value and value not in (*FAMILIES, *known):
        expected = ", ".join(dict.fromkeys((*FAMILIES, *known)))
        raise KernelError(f"TOOLKIT_KERNELS: expected one of {expected}, found {value!r}")
    if value and value not in known:
        raise KernelError(f"TOOLKIT_KERNELS: {value!r} selects nothing, for no op has such a kernel here; leave it out")
    return value or None


def _disagreement(op: Op, implementation: Implementation, case: Case, target: Target) -> str | None:
    """How ``implementation`` differs from the reference on ``case``, or what it raised, one line; None: it agrees."""
    try:
        return compare(op, implementation, case, target)
    except Exception as failure:  # whatever a compiler or driver raises
        lines = str(failure).strip().splitlines()
        return f"{type(failure).__name__}: {lines[0] if lines else 'no reason given'}"


def _for_case(target: Target, case: Case) -> Target:
    """``target`` for the inputs of ``case``."""
    asked = {"alike": True} if target.traits.get("alike") else {}
    return replace(target, traits={**case.traits, **asked})


def gate_cases(op: Op, implementation: Implementation, target: Target) -> list[Case]:
    """What ``implementation`` is tried on before it is used on ``target``: the cases of the op's gate in the forms that
    ``target`` asks for, or where there are none of these the first case that it takes."""

    def asked(case: Case) -> bool:
        both = [name for name in FORMS if name in case.traits and name in target.traits]
        more = [name for name in SIGHTS if case.traits.get(name)]
        return all(case.traits[n] == target.traits[n] for n in both) and all(target.traits.get(n) for n in more)

    taken = [case for case in op.cases() if implementation.unsupported(_for_case(target, case)) is None]
    return [case for case in taken if case.label in op.gate and asked(case)] or taken[:1]


def tested(op: Op, implementation: Implementation, target: Target) -> str | None:
    """Why ``implementation`` is not to be trusted on ``target``: on one of its ``gate_cases`` it failed, or differed
    from the reference. None where it agreed. Once a process and form; a failure is logged as a warning."""
    forms = tuple(target.traits.get(name) for name in (*FORMS, *SIGHTS))
    key = (implementation.family, target.dtype, target.capability, *forms)
    if key not in op.verdicts:
        error: str | None = None
        for case in gate_cases(op, implementation, target):
            error = error or _disagreement(op, implementation, case, _for_case(target, case))
        op.verdicts[key] = error
        if error is not None:
            family = implementation.family
            log.warning("%s: the %s kernel failed its self-test and is not used (%s)", op.name, family, error)
    error = op.verdicts[key]
    return None if error is None else f"failed its self-test: {error}"


def choose(op: Op, target: Target, family: str | None = None, *, trusted: bool = True) -> Implementation:
    """The implementation of ``op`` for ``target``: ``family``, or by TOOLKIT_KERNELS, or by priority.

    TOOLKIT_KERNELS decides for the ops that its family implements; the others keep their priority list. Without
    ``trusted``, what the priority list proposes must be of ``TRUSTED`` or pass ``tested`` first. Raises KernelError
    when the family asked for does not implement the op or cannot run there, with the reason.
    """
    if family is not None and family not in op.implementations:
        raise KernelError(f"{op.name}: no implementation {family!r}; there are {', '.join(op.implementations)}")
    wanted = family or _forced()
    if wanted is not None and wanted in op.implementations:
        reason = op.implementations[wanted].unsupported(target)
        if reason is not None:
            raise KernelError(f"{op.name}: the {wanted} implementation cannot run: {reason}")
        return op.implementations[wanted]
    reasons = []
    for name in PRIORITY.get(target.device, (target.device, "torch", "reference")):
        if name in op.implementations:
            reason = op.implementations[name].unsupported(target)
            if reason is None and not trusted and name not in TRUSTED:
                reason = tested(op, op.implementations[name], target)
            if reason is None:
                return op.implementations[name]
            reasons.append(f"{name}: {reason}")
    raise KernelError(
        f"{op.name}: no implementation runs on {target.device} with {target.dtype} ({'; '.join(reasons)})"
    )


@dataclass(frozen=True)
class Row:
    """One line of ``describe``: ``reason`` is None where it can run; ``chosen``: it is what would run."""

    op: str
    implementation: str
    reason: str | None
    chosen: bool


def describe(target: Target) -> list[Row]:
    """Op by implementation: which can run on ``target``, which is chosen, and why the others are not."""
    rows = []
    for declared in load().values():
        try:
            chosen = choose(declared, target).family
        except KernelError:
            chosen = ""
        for family, implementation in declared.implementations.items():
            rows.append(Row(declared.name, family, implementation.unsupported(target), family == chosen))
    return rows


@dataclass(frozen=True)
class TestRow:
    """One line of ``self_test``: ``error`` is None where every case agreed with the reference."""

    op: str
    implementation: str
    cases: int
    seconds: float
    error: str | None


def self_test(target: Target, budget_seconds: float = 10.0) -> list[TestRow]:
    """Run every implementation that ``target`` supports against the reference, within about ``budget_seconds``."""
    rows, start = [], time.perf_counter()
    for declared in load().values():
        for family, implementation in declared.implementations.items():
            if implementation.unsupported(target) is not None:
                continue
            count, error, begun = 0, None, time.perf_counter()
            for case in declared.cases():
                at = replace(target, traits=case.traits)
                late = count > 0 and time.perf_counter() - start > budget_seconds
                if late or error is not None or implementation.unsupported(at) is not None:
                    continue
                error = _disagreement(declared, implementation, case, at)
                count += 1
            rows.append(TestRow(declared.name, family, count, time.perf_counter() - begun, error))
    return rows
