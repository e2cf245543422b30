"""The CUDA kernels' PTX, as nvcc makes it, executed by numpy: what the GPU gets is right, what is wrong is noticed."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from toolkit.kernels.cuda import build
from toolkit.kernels.cuda import linear as cuda
from toolkit.kernels.cuda import plan as planning
from toolkit.kernels.cuda.pack import pack
from toolkit.kernels.reference.linear import dequantize_groups, pack_codes

SCRIPTS = str(Path(__file__).resolve().parents[2] / "scripts")
ERROR = {torch.float16: 1e-3, torch.bfloat16: 8e-3}
FEW, TILE = "few_float16_w4_s64_n1", "tile_float16_w4_s64_n4"

# nvcc takes ten seconds and more, once
pytestmark = [pytest.mark.slow, pytest.mark.skipif(build.nvcc() is None, reason="no nvcc")]


@pytest.fixture(scope="module")
def ptx():
    sys.path.insert(0, SCRIPTS)
    try:
        from gpu.ptx import cuda_kernels
    finally:
        sys.path.remove(SCRIPTS)
    return cuda_kernels


@pytest.fixture(scope="module")
def texts(ptx):
    return ptx.texts(90)


class Product:
    """A random weight, activations, and what they come to in float64."""

    def __init__(self, bits, n_out, n_in, group, tokens, dtype, *, symmetric=False, residual=None):
        g = torch.Generator().manual_seed(tokens)
        codes = torch.randint(0, 1 << bits, (n_out, n_in), generator=g, dtype=torch.uint8)
        scales = ((torch.rand(n_out, n_in // group, generator=g) + 0.5) / (4 << bits)).half()
        zeros = torch.randint(0, 1 << bits, scales.shape, generator=g, dtype=torch.uint8)
        if symmetric:
            zeros.fill_(1 << (bits - 1))
        self.weight = pack(codes, scales, zeros, bits, None)
        self.dense = dequantize_groups(pack_codes(codes, bits), scales, zeros, None, bits, None)
        self.x = torch.randn(tokens, n_in, generator=g).to(dtype)
        self.bias = torch.randn(n_out, generator=g).to(dtype)
        self.residual = None if residual is None else torch.randn(tokens, n_out, generator=g).to(residual)

    def run(self, machine, workspace=None):
        dependent = machine.dependent
        more = {"workspace": workspace, "machine": machine, "dependent": dependent}
        return cuda.linear(self.x, self.weight, self.bias, self.residual, **more)

    def error(self, found):
        """How far ``found`` is off, to what is allowed."""
        expected = self.x.double() @ self.dense.double().T + self.bias.double()
        expected += 0 if self.residual is None else self.residual.double()
        off = (found.double() - expected).abs().nan_to_num(float("inf")).max() / expected.abs().max()
        return float(off) / ERROR[self.x.dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 128, 256])  # 256: one scale a row
def test_every_form_of_weight(ptx, texts, dtype, bits, group):
    for tokens, symmetric in ((1, True), (9, False), (19, False)):
        ran: list = []
        product = Product(bits, 40, 256, group, tokens, dtype, symmetric=symmetric)
        found = product.run(ptx.machine(texts, dependent=True, seed=tokens, log=ran))
        assert product.error(found) < 1
        assert ran[0][0].startswith("few" if tokens <= planning.FEW else "tile") and f"_w{bits}_" in ran[0][0]


@pytest.mark.parametrize(
    "bits, group, tokens, width", [(4, 64, 17, 4), (4, 32, 40, 8), (4, 128, 70, 16), (8, 128, 70, 16)]
)
@pytest.mark.parametrize("dtype, residual", [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_larger_tiles_that_go_round_their_rings(ptx, texts, bits, group, tokens, width, dtype, residual):
    ran: list = []
    product = Product(bits, 72, 768, group, tokens, dtype, residual=residual)
    found = product.run(ptx.machine(texts, multiprocessors=1, dependent=True, log=ran))
    assert ran[0][0].endswith(f"_n{width}")
    assert product.error(found) < 1 and found.dtype == residual


@pytest.mark.parametrize("tokens, n_in, dtype", [(40, 704, torch.float16), (70, 320, torch.bfloat16)])
def test_unpacked_ahead_gives_the_same_bits(ptx, texts, tokens, n_in, dtype):
    product, ran = Product(4, 72, n_in, 64, tokens, dtype, residual=torch.float32), []
    machine = ptx.machine(texts, multiprocessors=1, dependent=True, log=ran)
    plain, ahead = (product.run(replace(machine, ahead=lambda tile, ahead=ahead: ahead)) for ahead in (False, True))
    assert [name.partition("_")[0] for name, _ in ran] == ["tile", "ahead"]
    assert torch.equal(plain, ahead) and product.error(ahead) < 1


@pytest.mark.parametrize("bits, tokens, n_in", [(4, 2, 2112), (8, 9, 2112), (8, 19, 1088)])  # the last part is shorter
def test_split_sums_are_the_same_in_every_order(ptx, texts, bits, tokens, n_in):
    product, results = Product(bits, 40, n_in, 64, tokens, torch.float16), []
    workspace = cuda.Workspace("cpu")
    workspace.reserve(8 * 128 * 128)
    workspace.partial.fill_(float("nan"))
    for seed in (0, 1):
        ran: list = []
        machine = ptx.machine(texts, multiprocessors=8, seed=seed, dependent=True, log=ran)
        results.append(product.run(machine, workspace))
        assert ran[0][1][1] > 1, ran
        assert int(workspace.arrivals.abs().sum()) == 0, "counters are zero again"
    assert torch.equal(*results) and product.error(results[0]) < 1


@pytest.mark.parametrize("bits, dtype", [(4, torch.float16), (8, torch.bfloat16)])
def test_the_expanded_weight_is_the_reference_to_the_bit(ptx, texts, bits, dtype):
    product = Product(bits, 40, 128, 64, 1, dtype)
    found = cuda.expand(product.weight, dtype, ptx.machine(texts))
    assert torch.equal(found, product.dense.to(dtype))


def drop(pattern):
    return lambda text: re.sub(rf"^.*{pattern}.*$", "", text, flags=re.M)


def swap_operands(text):
    return re.sub(r"(mma\S+ \{[^}]*\}, )\{([^,]+), *([^,]+),", r"\1{\3,\2,", text)


@pytest.mark.parametrize(
    "name, change",
    [
        (FEW, drop(r"cp\.async\.wait_group")),
        (FEW, drop(r"bar\.sync")),
        (TILE, drop(r"cp\.async\.wait_group")),
        (TILE, drop(r"bar\.sync")),
        (FEW, swap_operands),
        (TILE, swap_operands),
        (FEW, lambda text: text.replace("0xea;", "0xe8;").replace(", 234;", ", 232;")),  # of lop3
        (FEW, lambda text: text.replace("cp.async.commit_group", "membar.gl", 1)),
    ],
)
def test_wrong_ptx_gives_wrong_numbers(ptx, texts, name, change):
    wrong = change(texts[name])
    assert wrong != texts[name]
    product = Product(4, 40, 1088, 64, 2 if name == FEW else 19, torch.float16)
    errors = []
    for seed in (0, 1):
        machine = ptx.machine(texts | {name: wrong}, multiprocessors=1, seed=seed)
        errors.append(product.error(product.run(machine)))
    assert max(errors) > 1


@pytest.mark.parametrize(
    "change, said",
    [
        (drop(r"griddepcontrol\.wait"), "before it has ended"),
        (lambda text: re.sub(r"(ld\.global\.v4\.u32[^;]*)\]", r"\1+4]", text), "not aligned"),
        (lambda text: re.sub(r"(ld\.global\.v4\.u32[^;]*)\]", r"\1+65536]", text), "where no tensor is"),
        (lambda text: text.replace("shl.b32", "shx.b32"), "no such"),
    ],
)
def test_what_a_gpu_would_refuse_is_a_fault(ptx, texts, change, said):
    product = Product(4, 40, 256, 64, 2, torch.float16)
    machine = ptx.machine(texts | {FEW: change(texts[FEW])}, dependent=True)
    with pytest.raises(AssertionError, match=said):
        product.run(machine)


@pytest.mark.parametrize("architecture", [80, 90])
def test_every_instruction_of_every_kernel_is_known(ptx, architecture):
    texts = ptx.texts(architecture)
    assert set(texts) == set(planning.names())
    for text in texts.values():
        ptx.read(text)
