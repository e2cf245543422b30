"""The CUDA kernels' source, built by g++ and run lane by lane, against products in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.kernels.cuda import linear as cuda
from toolkit.kernels.cuda import plan as planning
from toolkit.kernels.cuda.pack import Packed, pack, unpack
from toolkit.kernels.op import KernelError
from toolkit.kernels.reference.linear import dequantize_groups, pack_codes

HALVES = (torch.float16, torch.bfloat16)
# Relative to the largest output: rounding of the result, and of scaled weights where a tile's tokens share them.
ERROR = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(scope="module")
def cuda_host(support):
    return support("cuda_host")


class Weight:
    """A random canonical weight, and what it means."""

    def __init__(self, bits, n_out, n_in, group, *, symmetric=False, order=False, scale=torch.float16, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.bits, groups = bits, n_in // group
        self.codes = torch.randint(0, 1 << bits, (n_out, n_in), generator=g, dtype=torch.uint8)
        self.scales = ((torch.rand(n_out, groups, generator=g) + 0.5) / (4 << bits)).to(scale)
        self.zeros = torch.randint(0, 1 << bits, (n_out, groups), generator=g, dtype=torch.uint8)
        if symmetric:
            self.zeros.fill_(1 << (bits - 1))
        self.index = (torch.randperm(n_in, generator=g) // group).int() if order else None

    def packed(self) -> Packed:
        return pack(self.codes, self.scales, self.zeros, self.bits, self.index)

    def dense(self) -> torch.Tensor:
        return dequantize_groups(
            pack_codes(self.codes, self.bits), self.scales, self.zeros, None, self.bits, self.index
        )


def inputs(tokens, n_in, n_out, dtype, seed=1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, n_in, generator=g).to(dtype)
    return x, torch.randn(n_out, generator=g).to(dtype), torch.randn(tokens, n_out, generator=g)


def assert_close(found, expected, dtype):
    assert found.shape == expected.shape
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < ERROR[dtype], float(error)


def check(host, weight, tokens, dtype, *, bias=True, residual=None, packed=None):
    """One product through the kernels on ``host``; returns it."""
    n_out, n_in = weight.codes.shape
    x, b, r = inputs(tokens, n_in, n_out, dtype)
    expected = x.double() @ weight.dense().double().T
    expected = expected + b.double() if bias else expected
    if residual is not None:
        r = r.to(residual)
        expected = expected + r.double()
    found = cuda.linear(x, packed or weight.packed(), b if bias else None, r if residual else None, machine=host)
    assert found.dtype == (residual or dtype)
    assert_close(found, expected, dtype)
    return found


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, 256])  # 256: one scale a row
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_form_of_weight(cuda_host, dtype, bits, group, symmetric):
    weight = Weight(bits, 56, 256, group, symmetric=symmetric)
    packed = weight.packed()
    assert (packed.zeros is None) == symmetric
    ran: list = []
    for tokens in (1, 8, 19):
        check(cuda_host.host(log=ran), weight, tokens, dtype, packed=packed)
    assert [name.split("_")[0] for name, _ in ran] == ["few", "few", "tile"]
    assert all(f"_w{bits}_" in name for name, _ in ran)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "tokens, n_in, symmetric", [(40, 640, True), (40, 576, False), (64, 128, True), (130, 448, False)]
)
def test_unpacked_ahead_gives_the_same_bits(cuda_host, dtype, tokens, n_in, symmetric):
    weight, ran = Weight(4, 136, n_in, 64, symmetric=symmetric), []
    packed = weight.packed()
    hosts = (cuda_host.host(seed=seed, log=ran, ahead=ahead) for seed, ahead in ((0, False), (3, True)))
    plain, ahead = (check(host, weight, tokens, dtype, packed=packed, residual=torch.float32) for host in hosts)
    assert [name.split("_")[0] for name, _ in ran] == ["tile", "ahead"]
    assert torch.equal(plain, ahead)


@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_of_rows(cuda_host, dtype):
    weight = Weight(4, 24, 128, 64)
    packed = weight.packed()
    for tokens in range(1, 41):
        check(cuda_host.host(seed=tokens), weight, tokens, dtype, packed=packed)


@pytest.mark.parametrize("n_out, n_in", [(16, 64), (1, 192), (33, 64), (272, 128), (24, 704)])
@pytest.mark.parametrize("bits, tokens", [(4, 2), (4, 9), (4, 70), (8, 9), (8, 70)])
def test_ragged_sizes(cuda_host, n_out, n_in, bits, tokens):
    check(cuda_host.host(seed=3), Weight(bits, n_out, n_in, 32), tokens, torch.float16)


@pytest.mark.parametrize("bits, tokens", [(4, 3), (8, 3), (4, 20), (8, 40)])
@pytest.mark.parametrize("scale", [torch.bfloat16, torch.float32])
def test_scales_of_other_types(cuda_host, bits, tokens, scale):
    group = 128 if scale == torch.float32 else 64  # float32: where a row has one
    check(cuda_host.host(), Weight(bits, 40, 128, group, scale=scale), tokens, torch.bfloat16)


@pytest.mark.parametrize("tokens", [1, 12])
@pytest.mark.parametrize("group", [32, 128])
def test_act_order_is_undone_by_the_order_of_the_inputs(cuda_host, tokens, group):
    check(cuda_host.host(), Weight(4, 40, 384, group, order=True), tokens, torch.float16)


@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bias", [True, False])
def test_residuals_are_added_and_decide_the_type(cuda_host, tokens, dtype, bias):
    weight = Weight(4, 40, 128, 128)
    for residual in (None, dtype, torch.float32):
        check(cuda_host.host(), weight, tokens, dtype, bias=bias, residual=residual)


def test_the_residual_may_be_the_result(cuda_host):
    weight = Weight(4, 40, 256, 64)
    x, _, r = inputs(3, 256, 40, torch.float16)
    expected = x.double() @ weight.dense().double().T + r
    assert cuda.linear(x, weight.packed(), None, r, out=r, machine=cuda_host.host()) is r
    assert_close(r, expected, torch.float16)


@pytest.mark.parametrize(
    "bits, tokens, kind",
    [(4, 1, "few"), (8, 6, "few"), (4, 10, "few"), (4, 18, "tile"), (4, 40, "tile"), (8, 20, "tile")],
)
@pytest.mark.parametrize("dtype", HALVES)
def test_split_sums_are_the_same_in_every_order(cuda_host, bits, tokens, kind, dtype):
    weight, results = Weight(bits, 40, 2112, 64), []  # 33 steps: the last part is shorter
    packed = weight.packed()
    x, b, _ = inputs(tokens, 2112, 40, dtype)
    workspace = cuda.Workspace("cpu")
    workspace.reserve(8 * 256 * 64)
    workspace.partial.fill_(float("nan"))
    for seed in (0, 1, 2, 7):
        ran: list = []
        machine = cuda_host.host(multiprocessors=8, seed=seed, log=ran)
        results.append(cuda.linear(x, packed, b, machine=machine, workspace=workspace))
        assert ran[0][0].startswith(kind) and ran[0][1][1] > 1, ran
        assert int(workspace.arrivals.abs().sum()) == 0, "counters are zero again"
    assert all(torch.equal(results[0], r) for r in results[1:])
    assert_close(results[0], x.double() @ weight.dense().double().T + b.double(), dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("residual", [None, torch.float32])
def test_rows_may_be_alike_whatever_comes_with_them(cuda_host, bits, residual):
    weight, ran = Weight(bits, 40, 1088, 64), []
    packed, machine = weight.packed(), cuda_host.host(multiprocessors=8, log=ran)
    x, b, r = inputs(300, 1088, 40, torch.float16)

    def run(at):
        more = r[at] if residual is not None else None
        return cuda.linear(x[at], packed, b, more, machine=machine, alike=True)

    whole = run(slice(None))
    expected = x.double() @ weight.dense().double().T + b.double() + (0 if residual is None else r.double())
    assert_close(whole, expected, torch.float16)
    for at in ([0], [299], list(range(250, 267)), list(range(5, 75))):
        assert torch.equal(run(at), whole[at])
    assert len({(name, grid[:2]) for name, grid in ran}) == 1 and ran[0][1][1] > 1, "one kernel, one way to split"


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("tokens", [3, 12, 20])
def test_warps_that_end_at_different_times(cuda_host, tokens, seed):
    machine = cuda_host.host(multiprocessors=1, seed=seed)  # 33 steps among 8 or 2 warps, nothing split
    check(machine, Weight(4, 40, 2112, 64), tokens, torch.float16)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 128, 256])
def test_the_expanded_weight_is_the_reference_to_the_bit(cuda_host, dtype, bits, group):
    weight = Weight(bits, 40, 256, group)
    found = cuda.expand(weight.packed(), dtype, cuda_host.host())
    assert torch.equal(found, weight.dense().to(dtype))


@pytest.mark.parametrize("order", [False, True])
def test_many_rows_are_expanded(cuda_host, order):
    ran: list = []
    weight = Weight(4, 40, 128, 32, order=order)
    check(cuda_host.host(log=ran), weight, planning.MANY + 1, torch.float16, residual=torch.float32)
    assert [name for name, _ in ran] == ["expand_float16_w4"]


@pytest.mark.parametrize("dtype", HALVES)
def test_channel_int8(cuda_host, dtype):
    g = torch.Generator().manual_seed(5)
    weight = torch.randint(-128, 128, (40, 192), generator=g, dtype=torch.int8)
    scales = torch.rand(40, generator=g) / 100
    x, b, _ = inputs(20, 192, 40, dtype)
    packed = pack(weight.view(torch.uint8) ^ 128, scales[:, None], None, 8)
    found = cuda.linear(x, packed, b, machine=cuda_host.host())
    assert_close(found, x.double() @ (weight.double() * scales[:, None].double()).T + b.double(), dtype)


@pytest.mark.parametrize("tokens", [3, 20, planning.MANY + 1])
def test_sums_come_in_float32_where_asked(cuda_host, tokens):
    """Logits: what x's type would round away stays."""
    weight = Weight(8, 40, 128, 64)
    x, b, _ = inputs(tokens, 128, 40, torch.float16)
    run = cuda.PackedLinear(weight.packed(), b, cuda.Workspace("cpu"), cuda_host.host(), wide=True)
    found, expected = run(x), x.double() @ weight.dense().double().T + b.double()
    assert found.dtype == torch.float32
    assert_close(found, expected, torch.float16)
    if tokens <= planning.FEW:  # above, weights are rounded as well
        assert (found.double() - expected).abs().max() < 1e-5 * expected.abs().max()


def test_activations_that_are_not_aligned_are_copied(cuda_host):
    weight, wide = Weight(4, 24, 64, 32), torch.randn(5, 77).half()
    expected = wide[:, 3:67].double() @ weight.dense().double().T
    assert_close(cuda.linear(wide[:, 3:67], weight.packed(), machine=cuda_host.host()), expected, torch.float16)
    strided = torch.randn(10, 64).half()[::2]
    expected = strided.double() @ weight.dense().double().T
    assert_close(cuda.linear(strided, weight.packed(), machine=cuda_host.host()), expected, torch.float16)


@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 5)])
def test_kernels_are_given_addresses_that_loads_of_16_bytes_take(rows):
    """Also where torch calls the rows contiguous: one row always is, and so are all of a buffer that begins aside."""
    packed, given = Weight(4, 24, 64, 32).packed(), []

    def launch(kernel, grid, arguments, dependent):
        given.append((arguments.x % 16, arguments.stride_x))

    x = torch.randn(5 * 64 + 3).half()[3:].view(5, 64)[rows]
    assert x.is_contiguous() and x.data_ptr() % 16
    cuda.linear(x, packed, machine=planning.Machine(launch, 4, 227 * 1024))
    assert given == [(0, 64)]


@pytest.mark.parametrize("bits, tokens", [(4, 1), (4, 8), (4, 40), (8, 3), (8, 20)])
def test_nothing_of_the_kernel_before_is_touched_before_it_has_ended(cuda_host, bits, tokens):
    """Programmatic dependent launch: weights alone may be read at once."""
    weight = Weight(bits, 40, 2112, 64)
    x, b, r = inputs(tokens, 2112, 40, torch.bfloat16)
    for multiprocessors in (1, 8):  # whole and split sums
        machine = cuda_host.host(multiprocessors=multiprocessors, dependent=True)
        found = cuda.PackedLinear(weight.packed(), b, cuda.Workspace("cpu"), machine)(x, r)
        assert_close(found, x.double() @ weight.dense().double().T + b.double() + r.double(), torch.bfloat16)


def test_a_kernel_that_waits_for_nobody_is_noticed(cuda_host):
    packed, out = Weight(4, 40, 128, 64).packed(), torch.empty(40, 128, dtype=torch.bfloat16)
    arguments = cuda._weight_arguments(packed)
    arguments.out, arguments.tokens = out.data_ptr(), 128
    launch, name, grid = cuda_host.host().launch, "expand_bfloat16_w4", (3, 1, 1)
    launch(name, grid, arguments, False)
    with pytest.raises(AssertionError, match="3"):
        launch(name, grid, arguments, True)


def test_no_rows():
    weight = Weight(4, 24, 64, 32)
    machine = planning.Machine(lambda *_: pytest.fail("launched"), 1, 1)
    assert cuda.linear(torch.empty(0, 64).half(), weight.packed(), machine=machine).shape == (0, 24)


@pytest.mark.parametrize("mutation", ["zeros", "scales", "codes", "order"])
def test_a_wrong_weight_is_noticed(cuda_host, mutation):
    weight = Weight(4, 24, 128, 64, order=True)
    packed = weight.packed()
    changed = getattr(packed, mutation).clone()
    changed.view(-1)[:8] = changed.view(-1)[8:16].clone()
    object.__setattr__(packed, mutation, changed)
    with pytest.raises(AssertionError):
        check(cuda_host.host(), weight, 2, torch.float16, packed=packed)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([4, 8]),
    st.integers(1, 50),
    st.integers(1, 5),
    st.sampled_from([32, 64, 128, 0]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    st.integers(0, 1000),
)
def test_unpacking_is_the_exact_inverse(bits, n_out, steps, group, symmetric, order, scale, seed):
    n_in = 128 * steps
    if scale == torch.float32:
        group = 0
    weight = Weight(bits, n_out, n_in, group or n_in, symmetric=symmetric, order=order, scale=scale, seed=seed)
    codes, scales, zeros, index = unpack(weight.packed())
    assert torch.equal(codes, weight.codes) and torch.equal(zeros, weight.zeros)
    assert scales.dtype == scale and torch.equal(scales, weight.scales)
    assert (index is None) == (not order) and (weight.index is None or torch.equal(index, weight.index))


def test_what_cannot_be_packed_says_why():
    weight = Weight(4, 8, 192, 64)
    with pytest.raises(ValueError, match="groups of 32, 64, 128 … inputs or one for all, not of 96"):
        pack(weight.codes, weight.scales[:, :2], None, 4)
    with pytest.raises(ValueError, match="a multiple of 64 inputs, not 96"):
        pack(weight.codes[:, :96], weight.scales, None, 4)
    with pytest.raises(ValueError, match="16-bit scales, not float32"):
        pack(weight.codes, weight.scales.float(), None, 4)
    with pytest.raises(ValueError, match="4 or 8 bits, not 3"):
        pack(weight.codes, weight.scales, None, 3)
    with pytest.raises(ValueError, match="act-order index with 64 inputs in each of 3 groups"):
        pack(weight.codes, weight.scales, None, 4, torch.zeros(192, dtype=torch.int32))
    with pytest.raises(KernelError, match="zero points, not with minima"):
        cuda.pack_canonical(pack_codes(weight.codes, 4), weight.scales, None, weight.scales, 4)


WORDS = torch.arange(1 << 16, dtype=torch.int32)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("zeros", [(8, 8), (0, 15), (16, 3)])
def test_nibbles_over_all_16_bit_inputs(cuda_host, dtype, zeros):
    for shift in (0, 16):
        codes = torch.stack([WORDS >> 4 * i & 15 for i in range(4)], 1).float()  # register r is nibble r
        found = cuda_host.fragments(dtype, 4, (WORDS << shift) ^ (0x5A5A << (16 - shift)), *zeros)
        for r in range(4):
            assert torch.equal(found[:, r, shift // 16], codes[:, r] - zeros[r % 2])
            other = 0x5A5A >> 4 * r & 15
            assert (found[:, r, 1 - shift // 16] == other - zeros[r % 2]).all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("zeros", [(128, 128), (0, 255)])
def test_bytes_over_all_16_bit_inputs(cuda_host, dtype, zeros):
    words = torch.stack([WORDS | (WORDS << 16), (WORDS ^ 0xFFFF) | (WORDS << 16)], 1)
    found = cuda_host.fragments(dtype, 8, words, *zeros)
    low, high = (WORDS & 255).float(), (WORDS >> 8).float()
    for r, e in itertools.product(range(4), range(2)):
        code = (low, high)[e]
        code = 255 - code if r == 2 else code  # the first half of the second word is inverted
        assert torch.equal(found[:, r, e], code - zeros[r % 2])


def test_python_knows_what_the_kernels_take(cuda_host):
    for name in planning.names():
        exact = cuda_host.library().tk_host_shared(name.encode())
        assert planning.shared_bytes(name) == exact, (name, exact)
    assert cuda_host.library().tk_host_shared(b"no_such_kernel") == -1


def test_short_kernels_fill_the_multiprocessors_that_hold_more_of_them():
    def grid(resident, n_out=4096):
        machine = planning.Machine(lambda *_: None, 132, 227 * 1024, resident=resident)
        return planning.plan("float16", 4, 1, n_out, 4096, 128, machine).grid

    name = planning.few_name("float16", 4, 64, 1)
    assert grid({}) == grid({name: 2}) == (128, 2, 1)
    assert grid({name: 3}) == (128, 3, 1) and grid({name: 4}) == grid({name: 8}) == (128, 4, 1)
    assert grid({name: 4}, 28672) == (896, 1, 1)


def test_scratch_is_reserved_for_both_types_of_activations(cuda_host):
    """A GPU may hold more blocks of one than of the other; memory that grew later would move under captured graphs."""
    weight = Weight(4, 64, 4096, 128)
    resident = {planning.few_name("bfloat16", 4, 64, 1): 4}
    machine = planning.Machine(lambda *_: None, 8, 227 * 1024, resident=resident)
    codes = pack_codes(weight.codes, 4)
    run = cuda.prepare(codes, weight.scales, weight.zeros, None, 4, scratch={}, machine=machine)
    most = max(
        found.partial
        for dtype in HALVES
        for tokens in range(1, planning.MANY + 1)
        if (found := cuda.plan_for(run.weight, tokens, dtype, machine)) is not None
    )
    assert run.workspace.partial.numel() == most > 0


@pytest.mark.parametrize("limit, widest", [(227, 16), (163, 16), (99, 8)])
def test_plans_fit_the_gpu(limit, widest):
    machine = planning.Machine(lambda *_: None, 132, limit * 1024)
    for dtype, bits, tokens, group in itertools.product(
        planning.DTYPES, (4, 8), (1, 8, 9, 17, 32, 64, planning.MANY), (32, 128, 4096)
    ):
        for n_out, n_in in ((6144, 4096), (28672, 4096), (4096, 14336), (16, 64)):
            found = planning.plan(dtype, bits, tokens, n_out, n_in, group if n_in == 4096 else 64, machine)
            assert found is not None and planning.shared_bytes(found.kernel) <= limit * 1024
            assert found.splits * found.split_steps >= n_in // 64 > (found.splits - 1) * found.split_steps
            assert found.grid[0] * found.grid[2] <= cuda.COLUMNS
            if found.kernel.startswith("tile") and "_s0_" not in found.kernel:
                assert int(found.kernel.rpartition("n")[2]) <= (16 if bits == 4 else widest)
    for bits in (4, 8):
        assert planning.plan("float16", bits, planning.MANY + 1, 64, 64, 64, machine) is None
