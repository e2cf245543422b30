"""How far an implementation may stand from the reference: one table by dtype, overrides with their reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .registry import Case, Implementation, Op, Target

# dtype of the activations: (relative, absolute). Roughly four units in the last place of a sum of some hundred terms.
TOLERANCES: dict[str, tuple[float, float]] = {
    "float32": (2e-5, 2e-5),
    "float16": (4e-3, 4e-3),
    "bfloat16": (3e-2, 3e-2),
}

# (op, implementation, dtype): ((relative, absolute), reason)
_ROUNDED_INSIDE = "values are rounded to 8 bits between two products, so that a last place becomes a code"
OVERRIDES: dict[tuple[str, str, str], tuple[tuple[float, float], str]] = {
    (op, implementation, dtype): ((limit, limit), _ROUNDED_INSIDE)
    for op in ("moe_experts_int8", "moe_experts_fp8", "moe_experts_block_fp8")
    for implementation in ("torch", "triton")
    for dtype, limit in (("float32", 2e-3), ("float16", 2e-2), ("bfloat16", 8e-2))
}

_FEW_BITS = "Hopper's tensor cores sum products of float8 in about 14 bits, along the whole input"
OVERRIDES |= {
    (op, "triton", dtype): ((limit, limit), _FEW_BITS)
    for op in ("linear_fp8", "matmul_fp8", "linear_block_fp8")
    for dtype, limit in (("float32", 2e-3), ("float16", 8e-3))
}

# Ops whose first result are codes and whose second is the scale of each row: compared are the values they stand for. A
# value within tolerance may be rounded to the neighbouring code.
CODED = frozenset({"rms_norm_quant", "add_rms_norm_quant", "act_and_mul_quant"})


def tolerance(op: str, implementation: str, dtype: str) -> tuple[float, float]:
    """(relative, absolute) tolerance of an implementation for activations of ``dtype``."""
    if (op, implementation, dtype) in OVERRIDES:
        return OVERRIDES[op, implementation, dtype][0]
    return TOLERANCES[dtype]


def compare(
    op: Op, implementation: Implementation, case: Case, target: Target, seed: int = 0, oracle: str = "cpu"
) -> str | None:
    """Run ``case`` through the reference and ``implementation``; None, or what differs.

    Results and mutated arguments are compared: floats within tolerance, NaN only where the reference has it, integers
    exactly. The reference runs on ``oracle``, the CPU unless shapes are too large for it: on a GPU torch divides by
    multiplying with a reciprocal, and sums in another order, so that a rounded code could be off by one.
    """
    import torch

    rtol, atol = tolerance(op.name, implementation.family, target.dtype)
    results: list[list[Any]] = []
    for run, device in ((op.reference, oracle), (implementation.run, target.device)):
        generator = torch.Generator("cpu").manual_seed(seed)
        inputs = case.make(getattr(torch, target.dtype), device, generator)
        with torch.inference_mode():
            output = run(**inputs)
        outputs = list(output) if isinstance(output, tuple) else [output]
        found = [*outputs, *(inputs[name] for name in op.mutates)]
        results.append([None if t is None else t.cpu() for t in found])
    steps = _decode(results) if op.name in CODED else None
    for index, (expected, found) in enumerate(zip(*results, strict=True)):
        if expected is None and found is None:
            continue
        where = f"{op.name}[{implementation.family}] case {case.label} output {index}"
        if expected.shape != found.shape or expected.dtype != found.dtype:
            return f"{where}: {found.dtype}{tuple(found.shape)} instead of {expected.dtype}{tuple(expected.shape)}"
        exact = not expected.dtype.is_floating_point
        a, b = expected.double(), found.double()
        close = (a == b) if exact else torch.isclose(b, a, rtol=rtol, atol=atol, equal_nan=True)
        if index == 0 and steps is not None:
            close = (a - b).abs() <= steps + atol + rtol * a.abs()
        if not bool(close.all()):
            worst = (a - b).abs().nan_to_num(float("inf")).max().item()
            return f"{where}: {int((~close).sum())} of {close.numel()} values differ, by up to {worst:.3g}"
    return None


def _decode(results: list[list[Any]]) -> Any:
    """Replace the codes of both results by their values; returns how far the next code of each is (float64)."""
    import torch

    steps = None
    for result in results:
        codes, scales = result[0], result[1].double()[:, None]
        values = codes.double() * scales
        if steps is None and codes.dtype == torch.int8:
            steps = scales.expand_as(values)
        elif steps is None:
            steps = torch.maximum(values.abs() * torch.finfo(codes.dtype).eps, torch.finfo(codes.dtype).tiny * scales)
        result[0] = values
    return steps
