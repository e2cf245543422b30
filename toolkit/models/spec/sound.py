"""Checks that the mixers share. All raise ValueError, one line, for numbers that cannot be."""

from __future__ import annotations

from typing import Any

from toolkit.models.spec.parts import ROPE_KINDS, LinearSpec, NormSpec, RopeSpec


def expect(field: str, good: bool, found: object, expected: str) -> None:
    """``field`` is ``good``."""
    if not good:
        shown = "a huge integer" if isinstance(found, int) and found.bit_length() > 64 else f"{found!r:.60}"
        raise ValueError(f"{field}: found {shown}, expected {expected}")


def norm(norm: NormSpec, *sizes: int, heads: int = 1) -> None:
    """One of ``sizes`` numbers at once; ``heads``: how many may have weights of their own."""
    expect(f"{norm.name}.size", norm.size in sizes, norm.size, " or ".join(map(str, sizes)))
    expect(f"{norm.name}.eps", 0 < norm.eps < 1, norm.eps, "a number between 0 and 1")
    expect(f"{norm.name}.spread", norm.spread is None, norm.spread, "none: only a rank's part of a model has one")
    layer = norm.kind == "layer"
    expect(f"{norm.name}.bias", layer or not norm.bias, norm.bias, "false for an RMS norm")
    plain = not (norm.bias or norm.weight_offset)
    expect(f"{norm.name}.weight", norm.weight or plain, norm.weight, "true for a norm with a bias or an offset")
    several = heads if layer and norm.size == sizes[0] else 1
    expect(f"{norm.name}.heads", norm.heads in (1, several), norm.heads, f"1 or {several}" if several > 1 else "1")


def linear(x: LinearSpec, n_in: int, n_out: int) -> None:
    """From ``n_in`` to ``n_out`` features."""
    found = (x.in_features, x.out_features)
    expect(x.name, found == (n_in, n_out), found, f"{(n_in, n_out)} input and output features")


def projections(mixer: Any, hidden: int) -> tuple[int, int]:
    """q, k, v and o of attention with grouped keys and values. Returns the outputs of q, and of k and v each."""
    q_size, kv_size = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    expect("kv_heads", mixer.heads % mixer.kv_heads == 0, mixer.kv_heads, f"a divisor of {mixer.heads}")
    linear(mixer.q, hidden, q_size)
    linear(mixer.k, hidden, kv_size)
    linear(mixer.v, hidden, kv_size)
    linear(mixer.o, q_size, hidden)
    return q_size, kv_size


def rope(rope: RopeSpec, head_dim: int) -> None:
    """Of heads of ``head_dim`` numbers."""
    dim = rope.rotary_dim
    expect("rotary_dim", dim % 2 == 0 and dim <= head_dim, dim, f"an even number up to {head_dim}")
    expect("kind", rope.kind in ROPE_KINDS, rope.kind, f"one of {', '.join(ROPE_KINDS)}")
    expect("theta", rope.theta > 1, rope.theta, "a number above 1")
    expect("factor", rope.factor > 0, rope.factor, "a number above 0")
    good = len(rope.sections) in (0, 3) and sum(rope.sections) in (0, dim // 2)
    expect("sections", good, rope.sections, f"three numbers that sum up to {dim // 2}")
    if rope.woven:
        expect("woven", 3 * max(rope.sections[1:], default=dim) <= dim // 2, rope.sections, "a third each at most")
    if rope.kind in ("dynamic", "longrope"):
        what = f"none for {rope.kind} rope, which has one position a token"
        expect("sections", not rope.sections, rope.sections, what)
    if rope.kind in ("dynamic", "llama3", "yarn", "longrope"):
        expect("original_max_position", rope.original_max_position > 0, rope.original_max_position, "at least 1")
    if rope.kind == "proportional":
        expect("turning", 0 < rope.turning <= dim // 2, rope.turning, f"1 to {dim // 2}")
    if rope.kind == "dynamic":
        expect("rotary_dim", dim >= 4, dim, "at least 4 for dynamic rope")
        expect("max_position", rope.max_position >= rope.original_max_position, rope.max_position, "the longer one")
        expect("factor", rope.factor >= 1, rope.factor, "at least 1 for dynamic rope")
    if rope.kind == "llama3":
        low, high = rope.low_freq_factor, rope.high_freq_factor
        expect("high_freq_factor", 0 < low <= high, high, f"at least low_freq_factor ({low})")
    if rope.kind == "yarn":
        expect("beta_fast", rope.beta_fast > 0 and rope.beta_slow > 0, rope.beta_fast, "betas above 0")
    if rope.kind == "longrope":
        for name, factors in (("short_factor", rope.short_factor), ("long_factor", rope.long_factor)):
            good = len(factors) == dim // 2 and all(f > 0 for f in factors)
            expect(name, good, f"{len(factors)} values", f"{dim // 2} numbers above 0")
