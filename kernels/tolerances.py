"""How far an implementation may stand from the reference: one table by dtype, overrides with their reason."""

from __future__ import annotations

from typing import Any

from .op import Case, Implementation, Op, Target

TORCH_NAMES = {"rocm": "cuda"}  # devices that torch calls otherwise

# dtype of the activations: (relative, absolute). Roughly four units in the last place of a sum of some hundred terms.
TOLERANCES: dict[str, tuple[float, float]] = {
    "float32": (2e-5, 2e-5),
    "float16": (4e-3, 4e-3),
    "bfloat16": (3e-2, 3e-2),
}

_ROUNDED_INSIDE = "values are rounded to 8 bits between two products, so that a last place becomes a code"
# (op, implementation, dtype): ((relative, absolute), reason)
OVERRIDES: dict[tuple[str, str, str], tuple[tuple[float, float], str]] = {
    (op, implementation, dtype): ((limit, limit), _ROUNDED_INSIDE)
    for op in ("moe_experts_int8", "moe_experts_fp8", "moe_experts_block_fp8")
    for implementation in ("torch", "triton")
    for dtype, limit in (("float32", 2e-3), ("float16", 2e-2), ("bfloat16", 8e-2))
}

# a model of them, 20000 sums of 4096 to 14336 products: off by 0.0013 to 0.003 of their root mean square, 0.04 once;
# of 9520 sums of 384 products, 22 of the model were outside a limit, 21 of an H100
_FEW_BITS = "Hopper's tensor cores sum products of float8 in about 14 bits, along the whole input"
OVERRIDES |= {
    (op, "triton", dtype): ((limit, limit), _FEW_BITS)
    for op, half in (("linear_fp8", 3e-2), ("matmul_fp8", 3e-2), ("moe_experts_fp8", 3e-2), ("linear_block_fp8", 8e-3))
    for dtype, limit in (("float32", 2e-3), ("float16", half))
}

_BYTES = "activations are rounded to 8 bits, a scale a group"
OVERRIDES |= {("linear_group_int", "cpu", "float32"): ((2e-2, 4e-2), _BYTES)}


def tolerance(op: str, implementation: str, dtype: str) -> tuple[float, float]:
    """(relative, absolute) tolerance of an implementation for activations of ``dtype``."""
    if (op, implementation, dtype) in OVERRIDES:
        return OVERRIDES[op, implementation, dtype][0]
    return TOLERANCES[dtype]


def compare(
    op: Op, implementation: Implementation, case: Case, target: Target, seed: int = 0, oracle: str = "cpu"
) -> str | None:
    """Run ``case`` through the reference and ``implementation``; None, or what differs, and where first.

    Results and mutated arguments are compared: floats within tolerance, NaN only where the reference has it, integers
    exactly, but for codes and draws that lie on a border (``rounding``). The reference runs on ``oracle``, the CPU
    unless shapes are too large for it.
    """
    import torch

    from .rounding import values

    results: list[list[Any]] = []
    for run, device in (
        (op.reference, oracle),
        (implementation.run_on(target), TORCH_NAMES.get(target.device, target.device)),
    ):
        generator = torch.Generator("cpu").manual_seed(seed)
        with torch.inference_mode():
            inputs = case.make(getattr(torch, target.dtype), device, generator)
            output = run(**inputs)
        outputs = list(output) if isinstance(output, tuple) else [output]
        results.append([None if t is None else t.cpu() for t in (*outputs, *(inputs[name] for name in op.mutates))])
    close_to = tolerance(op.name, implementation.family, target.dtype)
    expected, found = (values(op.name, inputs, result) for result in results)
    for index, (a, b) in enumerate(zip(expected, found, strict=True)):
        if results[0][index] is None and results[1][index] is None:
            continue
        where = f"{op.name}[{implementation.family}] case {case.label} output {index}"
        given, wanted = results[1][index], results[0][index]
        if wanted.shape != given.shape or wanted.dtype != given.dtype:
            return f"{where}: {given.dtype}{tuple(given.shape)} instead of {wanted.dtype}{tuple(wanted.shape)}"
        close = _close(a[0], b[0], a[1], close_to)
        if op.name == "sample" and not bool(close.all()):
            close |= _drawn(inputs, found[0][0])
        if not bool(close.all()):
            return f"{where}: {differs(a[0], b[0], close)}"
    return None


def _close(a: Any, b: Any, step: Any, close_to: tuple[float, float]) -> Any:
    """Where ``b`` agrees with ``a``; ``step``: how far each may lie aside, or None."""
    import torch

    if step is None and not a.dtype.is_floating_point:
        return a == b
    rtol, atol = close_to
    a, b = a.double(), b.double()
    close = torch.isclose(b, a, rtol=rtol, atol=atol, equal_nan=True)
    return close if step is None else close | ((a - b).abs() <= step + atol + rtol * a.abs())


def _drawn(inputs: dict[str, Any], found: Any) -> Any:
    """Which of the tokens ``found`` lie on the border of what is drawn."""
    from .reference.kept import kept_mass
    from .rounding import drawn

    names = ("logits", "temperature", "top_k", "top_p", "min_p")
    return drawn(inputs, kept_mass(*(inputs[name].cpu() for name in names)), found)


def differs(a: Any, b: Any, close: Any) -> str:
    """In one line how ``b`` differs from the expected ``a``; ``close``: where it does not."""
    worst = (a.double() - b.double()).abs().nan_to_num(float("inf")).max().item()
    first = tuple((~close).nonzero()[0].tolist())
    said = f"{int((~close).sum())} of {close.numel()} values differ, by up to {worst:.3g}"
    return f"{said}; the first at {list(first)}: {b[first].item():.6g} instead of {a[first].item():.6g}"
