"""The inline assembly that unpacks codes, run by a small interpreter of its PTX instructions, for all inputs."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from toolkit.kernels.reference.linear_blocks import FP4_VALUES
from toolkit.kernels.triton import codes, float_codes
from toolkit.kernels.triton.cache import cache_codes

WORDS = np.arange(1 << 16, dtype=np.uint32)


def halves(register: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """[N, 2] of ``dtype``, the lower half first."""
    return torch.from_numpy(register.astype(np.uint32).view(np.int16).reshape(-1, 2).copy()).view(dtype)


def packed(values: torch.Tensor) -> np.ndarray:
    """Inverse of ``halves``."""
    return values.contiguous().view(torch.int16).numpy().view(np.uint32).reshape(-1)


def run(assembly: str, word: np.ndarray, other: np.ndarray | None = None) -> list[np.ndarray]:
    """Registers $0 and $1 after ``assembly`` with ``word`` in $2 and ``other`` in $3."""
    registers: dict[str, np.ndarray] = {"$2": word} | ({} if other is None else {"$3": other})

    def value(name: str) -> np.ndarray:
        if name in registers:
            return registers[name]
        return np.full(len(word), int(re.sub(r"^0f", "0x", name), 0), np.uint32)

    for line in assembly.strip("{} \n").splitlines():
        if line.startswith(".reg"):
            continue
        name, target, *sources = re.split(r"[ ,]+", line.strip().rstrip(";"))
        a = [value(s) for s in sources]
        if name in ("mov.b32", "mov.f32"):
            result = a[0]
        elif name == "and.b32":
            result = a[0] & a[1]
        elif name == "or.b32":
            result = a[0] | a[1]
        elif name == "lop3.b32":
            assert sources[3] == "0xEA"
            result = a[0] & a[1] | a[2]
        elif name == "shr.u32":
            result = a[0] >> a[1]
        elif name == "shl.b32":
            result = a[0] << a[1]
        elif name == "prmt.b32":
            bytes_of = np.concatenate([x.astype("<u4").view(np.uint8).reshape(-1, 4) for x in a[:2]], axis=1)
            picks = np.stack([a[2] >> (4 * i) & 15 for i in range(4)], axis=1)
            assert (picks < 8).all(), "a selector above 7 repeats a sign"
            result = np.take_along_axis(bytes_of, picks.astype(np.intp), axis=1).view("<u4").reshape(-1)
        elif name == "sub.f16x2":
            result = packed(halves(a[0], torch.float16) - halves(a[1], torch.float16))
        elif name == "fma.rn.bf16x2":
            x, y, z = (halves(s, torch.bfloat16).float() for s in a)
            result = packed((x * y + z).bfloat16())
        elif name == "sub.f32":
            result = (a[0].view(np.float32) - a[1].view(np.float32)).view(np.uint32)
        else:
            assert name == "cvt.rn.bf16x2.f32", name
            upper, lower = (torch.from_numpy(s.view(np.float32).copy()).bfloat16() for s in a)
            result = packed(torch.stack([lower, upper], dim=1))
        registers[target] = result
    return [registers["$0"], registers["$1"]]


@pytest.mark.parametrize("dtype, suffix", [(torch.float16, "FP16"), (torch.bfloat16, "BF16")])
@pytest.mark.parametrize("kind", ["LOW", "HIGH", "BYTES"])
@pytest.mark.parametrize("shift", [0, 16])
def test_every_code_is_unpacked_exactly(dtype, suffix, kind, shift):
    word = WORDS << shift | (0xA5C3 << (16 - shift))
    found = torch.cat([halves(r, dtype) for r in run(getattr(codes, f"{kind}_{suffix}").value, word)], dim=1)
    stored = torch.from_numpy(word.astype("<u4").view(np.uint8).reshape(-1, 4).copy())
    expected = {"LOW": stored & 15, "HIGH": stored >> 4, "BYTES": stored}[kind]
    assert torch.equal(found.float(), expected.float())


@pytest.mark.parametrize("dtype, suffix", [(torch.float16, "FP16"), (torch.bfloat16, "BF16")])
@pytest.mark.parametrize("half", ["LOW", "HIGH"])
@pytest.mark.parametrize("shift", [0, 16])
def test_every_fp4_code_is_looked_up_exactly(dtype, suffix, half, shift):
    word = WORDS << shift | (0xA5C3 << (16 - shift))
    assembly = getattr(float_codes, f"FP4_{half}_{suffix}").value
    found = torch.cat([halves(r, dtype) for r in run(assembly, word)], dim=1).float()
    stored = torch.from_numpy(word.astype("<u4").view(np.uint8).reshape(-1, 4).copy())
    expected = torch.tensor(FP4_VALUES)[(stored & 15 if half == "LOW" else stored >> 4).long()]
    assert torch.equal(found, expected) and torch.equal(found.signbit(), expected.signbit())


def test_every_e4m3_number_becomes_an_fp16_of_a_256th():
    found = torch.cat([halves(r, torch.float16) for r in run(float_codes.E4M3_FP16.value, WORDS << 16 | WORDS)], dim=1)
    stored = torch.from_numpy((WORDS << 16 | WORDS).astype("<u4").view(np.uint8).reshape(-1, 4).copy())
    numbers = (stored & 0x7F) != 0x7F
    expected = stored.view(torch.float8_e4m3fn).float()
    assert torch.equal(found.float()[numbers] * 256, expected[numbers]) and (found[~numbers].abs() == 1.875).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("quarter", range(4))
def test_every_six_bit_code_is_put_together_exactly(dtype, quarter):
    g = np.random.default_rng(quarter)
    low, high = (g.permutation(WORDS) << 16 | g.permutation(WORDS) for _ in range(2))
    assembly = cache_codes.six_bits_assembly.fn(quarter, dtype == torch.float16)
    found = torch.cat([halves(r, dtype) for r in run(assembly, low.astype(np.uint32), high.astype(np.uint32))], dim=1)
    nibbles, pairs = (torch.from_numpy(w.astype("<u4").view(np.uint8).reshape(-1, 4).copy()) for w in (low, high))
    nibble = nibbles & 15 if quarter < 2 else nibbles >> 4
    assert torch.equal(found.float(), (nibble | (pairs >> 2 * quarter & 3) << 4).float())


def test_every_e5m2_number_becomes_itself():
    found = torch.cat([halves(r, torch.float16) for r in run(cache_codes.FROM_E5M2.value, WORDS << 16 | WORDS)], dim=1)
    stored = torch.from_numpy((WORDS << 16 | WORDS).astype("<u4").view(np.uint8).reshape(-1, 4).copy())
    expected = stored.view(torch.float8_e5m2).float()
    assert torch.equal(found.float().nan_to_num(1e6), expected.nan_to_num(1e6))
