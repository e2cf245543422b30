"""The CUDA kernels lane by lane in the shapes that are served: their steps, splits and tokens, a few outputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from toolkit.kernels.cuda import linear as cuda
from toolkit.kernels.cuda import plan as planning
from toolkit.kernels.reference.linear import dequantize_groups, pack_codes

# An H200 as far as plans go
RESIDENT = {name: 4 for name in planning.names() if name.startswith("few") and planning.shared_bytes(name) < 56 * 1024}
SERVED = planning.Machine(lambda *_: None, 132, 227 * 1024, resident=RESIDENT)


def narrow(host, how: planning.Plan, outputs: int, n_out: int):
    """(a machine on which ``n_out`` outputs are split as ``how`` splits a served width, what it ran); ``outputs``: of a
    block.
    """
    ran: list = []
    machine = host(multiprocessors=how.splits * -(-n_out // outputs) * how.grid[2], log=ran, seed=3)
    return replace(machine, resident={how.kernel: 1}), ran


@pytest.mark.parametrize(
    "bits, group, n_out, n_in, tokens",
    [
        (4, 128, 4096, 14336, 1),
        (4, 32, 6144, 4096, 8),
        (8, 0, 4096, 14336, 3),
        (4, 128, 6144, 4096, 9),
        (4, 0, 4096, 14336, 17),
        (8, 32, 6144, 4096, 33),
        (4, 128, 4096, 4096, 65),
        pytest.param(8, 128, 4096, 14336, 128, marks=pytest.mark.slow),
        pytest.param(4, 32, 6144, 14336, 128, marks=pytest.mark.slow),
    ],
)
def test_products_as_long_as_served_ones(support, bits, group, n_out, n_in, tokens):
    group = group or n_in
    how = planning.plan("float16", bits, tokens, n_out, n_in, group, SERVED)
    outputs = 32 if how.kernel.startswith("few") else 128
    machine, ran = narrow(support("cuda_host").host, how, outputs, 24)
    g = torch.Generator().manual_seed(tokens)
    codes = torch.randint(0, 1 << bits, (24, n_in), generator=g, dtype=torch.uint8)
    scales = ((torch.rand(24, n_in // group, generator=g) + 0.5) / (4 << bits)).half()
    zeros = torch.randint(0, 1 << bits, scales.shape, generator=g, dtype=torch.uint8)
    x = torch.randn(tokens, n_in, generator=g).half()
    packed = cuda.pack_canonical(pack_codes(codes, bits), scales, zeros, None, bits)
    found = cuda.linear(x, packed, machine=machine)
    ((kernel, grid),) = ran
    assert kernel == how.kernel and grid[1:] == how.grid[1:], "the served kernel, splits and columns of tokens"
    dense = dequantize_groups(pack_codes(codes, bits), scales, zeros, None, bits, None).double()
    expected = x.double() @ dense.T
    assert (found.double() - expected).abs().max() < 1e-3 * expected.abs().max()
