"""Triton kernels, interpreted, on what the registry's cases leave out: strides, many tiles, large offsets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.kernels import registry
from toolkit.kernels.reference.attention import random_cache
from toolkit.kernels.reference.cache import slots_of
from toolkit.kernels.reference.linear import pack_codes
from toolkit.kernels.triton.attention import latent
from toolkit.kernels.triton.attention import paged as attention
from toolkit.kernels.triton.attention import plan as attention_plan
from toolkit.kernels.triton.linear import group as linear_group
from toolkit.kernels.triton.sampling import draw as sampling
from toolkit.kernels.triton.sampling import flat as sampling_flat

OPS = registry.load()
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def both(name, **inputs):
    """(triton's result, the reference's), each on its own copy of the inputs; mutated arguments are appended."""
    results = []
    for run in (OPS[name].implementations["triton"].run, OPS[name].reference):
        mine = {k: v.clone() if k in OPS[name].mutates and v is not None else v for k, v in inputs.items()}
        out = run(**mine)
        results.append([*(out if isinstance(out, tuple) else [out]), *(mine.get(k) for k in OPS[name].mutates)])
    return results


def close(name, tolerance=2e-5, **inputs):
    for found, expected in zip(*both(name, **inputs), strict=True):
        if expected is not None:
            if expected.dtype in (E4M3, E5M2):
                found, expected = found.float(), expected.float()
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def test_slices_of_a_fused_projection_are_read_as_they_are():
    qkv = torch.randn(5, 3 * 4 * 64, generator=gen())
    q, k, v = (t.unflatten(1, (4, 64)) for t in qkv.chunk(3, dim=1))
    angle = torch.rand(5, 32, generator=gen(1))
    close("rms_norm", x=k, weight=torch.randn(64, generator=gen(2)), eps=1e-5)
    close("rope", x=q, cos=angle.cos(), sin=angle.sin())
    cache = {"k_cache": torch.zeros(2, 16, 4, 64), "v_cache": torch.zeros(2, 16, 4, 64)}
    close("kv_write", k=k, v=v, slot_mapping=torch.tensor([3, 0, 31, 7, 9]), **cache)


def test_a_constant_head_and_a_head_with_nan_are_stored_like_the_reference():
    k = torch.randn(3, 2, 64, generator=gen())
    k[0, 0], k[1, 1, 5] = 7.5, float("nan")
    cache = random_cache(2, 16, 2, 64, 8, torch.float32, "cpu", gen(1))
    found, expected = both("kv_write", k=k, v=k + 1, slot_mapping=torch.tensor([4, 20, 9]), bits=8, **cache)
    for a, b in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(a.float().nan_to_num(-1), b.float().nan_to_num(-1))


def attention_inputs(new, total, heads, kv_heads, dim, bits, page, seed=0, window=None, kind=torch.float32):
    """A ragged batch over a shuffled cache; slots that belong to nobody hold NaN, in the cache or its parameters."""
    g = gen(seed)
    per_sequence = -(-max(total) // page)
    blocks = per_sequence * len(total) + 1
    cache = random_cache(blocks, page, kv_heads, dim, bits, kind, "cpu", g)
    order = torch.randperm(blocks, generator=g).int().numpy()
    table = np.full((len(total), per_sequence + 1), -1, np.int32)
    owned = torch.zeros(blocks * page, dtype=torch.bool)
    for i, n in enumerate(total):
        used = -(-n // page)
        table[i, :used] = order[i * per_sequence : i * per_sequence + used]
        first = 0 if window is None else max(0, n - new[i] + 1 - window)
        table[i, : first // page] = -1
        where = np.arange(first, n)
        owned[torch.from_numpy(table[i][where // page].astype(np.int64) * page + where % page)] = True
    for name in ("k_cache", "v_cache") if bits == 0 else ("k_params", "v_params"):
        slots_of(cache[name])[~owned] = float("nan") if kind == torch.float32 else 0x7F
    q = torch.randn(sum(new), heads, dim, generator=g)
    lengths = {"cu_seqlens": np.cumsum([0, *new], dtype=np.int32), "seq_lens": np.asarray(total, np.int32)}
    scales = {} if kind == torch.float32 else {"k_scale": 0.9, "v_scale": 2.5}
    return {"q": q, "block_table": table, "scale": dim**-0.5, "bits": bits, "window": window} | cache | lengths | scales


@pytest.mark.parametrize(
    "bits, kind, page, window",
    [(0, torch.float32, 16, 70), (8, torch.float32, 64, None), (4, torch.float32, 16, 70), (0, E4M3, 64, None)],
)
def test_attention_over_several_ranges_is_merged(monkeypatch, bits, kind, page, window):
    monkeypatch.setattr(attention, "DECODE_KEYS", {0: 64, 8: 64, 4: 64})
    monkeypatch.setattr(attention_plan, "PROMPT_KEYS", 128)
    inputs = attention_inputs((1, 1, 9, 1), (200, 64, 150, 129), 6, 2, 64, bits, page, window=window, kind=kind)
    sinks = torch.randn(6, generator=gen(9))
    close("paged_attention", tolerance=1e-4, **inputs, sinks=sinks)


@pytest.mark.parametrize("bits, kind, page", [(0, torch.float32, 16), (0, E4M3, 64)])
def test_attention_to_latent_rows_is_merged(monkeypatch, bits, kind, page):
    monkeypatch.setattr(latent, "DECODE_KEYS", {0: 64})
    monkeypatch.setattr(attention_plan, "PROMPT_KEYS", 128)
    inputs = attention_inputs((1, 3, 1), (150, 70, 20), 6, 1, 48, bits, page, kind=kind)
    same = {"v_cache": inputs["k_cache"], "v_params": inputs["k_params"], "k_scale": 1.0, "v_scale": 1.0}
    close("paged_attention", tolerance=1e-4, **inputs | same | {"latent": 40})


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_attention_of_every_head_dim_over_pages_of_the_engine(dim):
    for bits, kind in ((0, torch.float32), (4, torch.float32), (8, torch.float32), (0, E5M2)):
        inputs = attention_inputs((1, 20), (65, 70), 4, 1, dim, bits, 64, seed=dim, kind=kind)
        close("paged_attention", tolerance=1e-4, **inputs)


def test_queries_turned_by_the_write_are_not_turned_again():
    """What the write returns goes into attention with keys of its own, for every form of the cache."""
    for bits, kind in ((0, torch.float32), (8, torch.float32), (4, torch.float32), (0, E4M3)):
        inputs = attention_inputs((7,), (7,), 4, 2, 64, bits, 16, kind=kind)
        inputs["block_table"] = np.array([[1, 0]], np.int32)
        g = gen(bits)
        new = {name: torch.randn(7, heads, 64, generator=g) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
        angle = torch.rand(7, 32, generator=g) * 9
        told = {n: inputs[n] for n in inputs if n.startswith(("k_", "v_")) or n == "bits"}
        write = {"slot_mapping": torch.arange(16, 23), "cos": angle.cos(), "sin": angle.sin()} | told
        results = []
        for family in ("triton", "reference"):
            cache = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in told.items()}
            q = OPS["rope_kv_write"].implementations[family].run(**(new | write | cache))
            found = OPS["paged_attention"].implementations[family].run(**(inputs | cache | {"q": q, "turned": True}))
            results.append(found)
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)
        if bits == 4:
            plain = inputs | cache | {"q": OPS["rope"].reference(new["q"], angle.cos(), angle.sin())}
            torch.testing.assert_close(OPS["paged_attention"].reference(**plain), results[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits, kind", [(0, torch.float32), (8, torch.float32), (4, torch.float32), (0, E4M3)])
def test_slices_of_a_projection_go_through_the_fused_write(bits, kind):
    g = gen(bits)
    qkv = torch.randn(6, 10 * 96, generator=g).unflatten(1, (10, 96))
    q, k, v = qkv.split([6, 2, 2], dim=1)
    angle = torch.rand(6, 16, generator=g) * 9
    weights = {name: torch.rand(96, generator=g) + 0.5 for name in ("q_weight", "k_weight")}
    cache = random_cache(2, 16, 2, 96, bits, kind, "cpu", g) | {"slot_mapping": torch.tensor([3, 0, 31, 7, 9, 16])}
    inputs = {"q": q, "k": k, "v": v, "cos": angle.cos(), "sin": angle.sin(), "bits": bits, "eps": 1e-5}
    close("rope_kv_write", **inputs, **cache, **weights)


@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_float8_is_rounded_like_torch_rounds(kind):
    """All values between neighbouring numbers and at their midpoints, the smallest and what is too large."""
    codes = torch.arange(256, dtype=torch.uint8).view(kind).float()
    finite = codes[codes.isfinite()].sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    x = torch.cat([finite, middle, middle * (1 + 2**-20), middle * (1 - 2**-20), torch.tensor([1e6, -1e6, 0.0, -0.0])])
    x = torch.nn.functional.pad(x, (0, -len(x) % 64)).view(-1, 1, 64)
    cache = torch.zeros(2, 1, -(-len(x) // 16) * 16, 1, 64).to(kind)
    inputs = {"k": x, "v": -x, "k_cache": cache[0], "v_cache": cache[1], "slot_mapping": torch.arange(len(x))}
    found, expected = both("kv_write", **inputs)
    for a, b in zip(found[1:3], expected[1:3], strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert found[1].float().abs().max() == torch.finfo(kind).max


def test_a_tokens_result_does_not_depend_on_its_batch():
    inputs = attention_inputs((1, 1, 1), (90, 300, 17), 4, 2, 64, 0, 64)
    run = OPS["paged_attention"].implementations["triton"].run
    together = run(**inputs)
    for i in range(3):
        one = {"q": inputs["q"][i : i + 1], "block_table": inputs["block_table"][i : i + 1]}
        lengths = {"cu_seqlens": np.array([0, 1], np.int32), "seq_lens": inputs["seq_lens"][i : i + 1]}
        assert torch.equal(run(**(inputs | one | lengths))[0], together[i])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 900)), min_size=1, max_size=5),
    st.sampled_from([1, 3, 8, 24]),
    st.sampled_from([(), (1,), (50,), (5000,), (50, True), (None, False, 4)]),
    st.sampled_from([16, 64, 128]),
)
def test_tiles_cover_every_key_of_every_token_once(sequences, group, sees, rows):
    sight = attention_plan.Sight(*sees)
    new = np.array([n for n, _ in sequences])
    lens = np.array([n + past for n, past in sequences], np.int32)
    cu = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    items, merges, parts = attention_plan.cut(cu, lens, sight, group, 256, max(rows, group))
    covered = [np.zeros(n, np.int64) for n in lens]
    seen_parts = []
    for seq, row, tokens, position, low, high, part, _ in items:
        assert tokens * group <= max(rows, group) and cu[seq] <= row and row + tokens <= cu[seq + 1]
        assert position == lens[seq] - new[seq] + row - cu[seq]
        assert low < high <= min(lens[seq], sight.newest(position + tokens - 1) + 1)
        oldest = sight.oldest(position)
        assert low == oldest or low in attention_plan.borders(256, 4096) or low in attention_plan.borders(8192, 9000)
        if row + tokens == cu[seq + 1]:
            covered[seq][low:high] += 1
        if part >= 0:
            seen_parts.append(part)
    for seq, hits in enumerate(covered):
        last_tile = max(p for s, _, _, p, *_ in items if s == seq)
        oldest = sight.oldest(last_tile)
        assert (hits[oldest:] == 1).all() and not hits[:oldest].any()
    assert sorted(seen_parts) == list(range(parts))
    assert len({tuple(m) for m in merges}) == len(merges) and all(m[3] > 1 for m in merges)


def group_inputs(tokens, n_in, n_out, bits, group, minima=False, order=False, seed=0):
    g = gen(seed)
    groups = n_in // group
    scales = (torch.rand(n_out, groups, generator=g) + 0.1) / (8 << bits)
    offsets = torch.randn(n_out, groups, generator=g) / 8
    zeros = torch.randint(0, 1 << bits, (n_out, groups), generator=g, dtype=torch.uint8)
    codes = torch.randint(0, 1 << bits, (n_out, n_in), generator=g, dtype=torch.uint8)
    return {
        "x": torch.randn(tokens, n_in, generator=g),
        "packed": pack_codes(codes, bits),
        "scales": scales.half(),
        "zeros": None if minima else zeros,
        "minima": offsets.half() if minima else None,
        "bits": bits,
        "group_index": (torch.randperm(n_in, generator=g) // group).int() if order else None,
        "bias": torch.randn(n_out, generator=g),
    }


@pytest.mark.parametrize("n_in, group", [(256, 32), (256, 64), (256, 128), (192, 192), (288, 96), (320, 40)])
@pytest.mark.parametrize("bits, minima", [(4, False), (4, True), (8, False), (2, False)])
def test_groups_of_every_size(n_in, group, bits, minima):
    close("linear_group_int", tolerance=1e-4, **group_inputs(19, n_in, 40, bits, group, minima))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("order", [False, True])
def test_many_tokens_are_multiplied_by_the_expanded_weight(bits, order):
    inputs = group_inputs(400, 128, 24, bits, 32, order=order)
    close("linear_group_int", tolerance=1e-4, **inputs)
    args = (inputs["packed"], inputs["scales"], inputs["zeros"], False, bits, inputs["group_index"], torch.float32)
    eye = OPS["linear_group_int"].reference(**(inputs | {"x": torch.eye(128), "bias": None})).T
    assert torch.equal(linear_group.expand(*args), eye)


@pytest.mark.parametrize("name, dtype", [("linear_int8", torch.int8), ("linear_fp8", torch.float8_e5m2)])
def test_row_scaled_linears_over_several_bands_of_tiles(name, dtype):
    g = gen()
    weight = (torch.randn(150, 96, generator=g) * 30).to(dtype)
    x = torch.randn(70, 96, generator=g)
    x[3] = 0  # a row of zeros has scale 1
    close(name, tolerance=2e-4, x=x, weight=weight, scales=torch.rand(150, generator=g) / 99, bias=None)


@pytest.mark.parametrize("tokens, count, top_k", [(1, 60, 6), (33, 9, 4), (70, 3, 1)])
def test_experts_of_uneven_size(tokens, count, top_k):
    g = gen(tokens)
    logits = torch.randn(tokens, count, generator=g)
    logits[:, 1] += 3  # a favourite, and experts without tokens
    experts, weights = both("moe_route", logits=logits, top_k=top_k, scoring="softmax", norm_topk=True)[0]
    x, up = torch.randn(tokens, 48, generator=g), torch.randn(count, 2 * 40, 48, generator=g) / 6
    down = torch.randn(count, 48, 40, generator=g) / 6
    inputs = {"x": x, "experts": experts, "weights": weights, "gate_up": up, "down": down}
    close("moe_experts", tolerance=1e-4, **inputs, activation="gelu_tanh")


@pytest.mark.parametrize("k, p, least", [(0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.9, 0.0), (200, 0.7, 0.01), (1, 1.0, 0.0)])
def test_draws_from_a_vocabulary_of_several_chunks(k, p, least):
    g, rows, vocab = gen(k), 4, 9001
    logits = torch.randn(rows, vocab, generator=g) * 3
    logits[1, 100:] = float("-inf")
    columns = {
        "temperature": torch.tensor([1.0, 0.6, 2.0, 0.0]),
        "top_k": torch.full((rows,), k),
        "top_p": torch.full((rows,), p),
        "min_p": torch.full((rows,), least),
    }
    for u in ([0.0, 0.01, 0.5, 0.5], [0.999, 0.93, 0.25, 0.1]):
        found, expected = both("sample", logits=logits, u=torch.tensor(u), **columns)
        assert found[0].tolist() == expected[0].tolist()


def filters(rows, k=0, p=1.0, least=0.0, temperature=1.0):
    columns = {"temperature": temperature, "top_p": p, "min_p": least}
    return {n: torch.full((rows,), v) for n, v in columns.items()} | {"top_k": torch.full((rows,), k)}


@pytest.mark.parametrize(
    "k, p, least, vocab",
    [
        *((k, 1.0, 0.0, vocab) for k, vocab in ((7, 300), (7, 5200), (3000, 5200))),
        *((0, 0.5, 0.0, vocab) for vocab in (300, 5200)),
        *((0, 1.0, 0.3, vocab) for vocab in (300, 5200)),
        *((k, 0.6, 0.0, vocab) for k, vocab in ((7, 300), (7, 5200), (3000, 5200), (9001, 9001))),
        (60, 0.9, 0.01, 300),
        (2000, 0.9, 0.7, 9001),
    ],
)
@pytest.mark.parametrize("between", [4096, 256])
def test_draws_are_the_same_whether_candidates_fit_their_lists_or_not(monkeypatch, k, p, least, vocab, between):
    """Rows of every kind: steep, flat, equal, stepped, banned but for few, one alone, a step at the cut."""
    for name, value in {"LISTED": 256, "CHUNK": 1024, "BETWEEN": between}.items():
        monkeypatch.setattr(sampling, name, value)
    g = gen(vocab + k)
    logits = torch.randn(8, vocab, generator=g)
    logits[0] *= 12
    logits[1] *= 0.01
    logits[2] = 1.5
    logits[3] = (logits[3] * 2).round()
    logits[4, 5:] = float("-inf")
    logits[5, torch.arange(vocab) != vocab - 2] = float("-inf")
    logits[6, -3:] = 30.0
    logits[7] = logits[7].clamp(max=0.5)
    ends = torch.tensor([1e-6, 1 - 2**-24]).repeat(4)
    u = torch.where(torch.rand(8, generator=g) < 0.5, ends, torch.rand(8, generator=g))
    found, expected = both("sample", logits=logits, u=u, **filters(8, k, p, least))
    assert found[0].tolist() == expected[0].tolist()


@pytest.mark.parametrize(
    "k, p, least", [(0, 1.0, 0.0), (30, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (900, 0.97, 1e-3)]
)
def test_temperatures_from_almost_greedy_to_almost_uniform(k, p, least):
    temperature = torch.tensor([1e-6, 1e-3, 0.1, 3.0, 50.0, 1e3])
    g = gen(k + 1)
    logits, u = torch.randn(6, 2500, generator=g) * 4, torch.rand(6, generator=g)
    columns = filters(6, k, float(p), float(least)) | {"temperature": temperature}
    found, expected = both("sample", logits=logits, u=u, **columns)
    assert found[0].tolist() == expected[0].tolist()


def test_a_row_gives_the_same_token_whatever_else_is_in_the_batch():
    g = gen(5)
    logits, u = torch.randn(5, 9001, generator=g) * torch.tensor([4.0, 1.0, 0.01, 1.0, 8.0])[:, None], torch.rand(5)
    run, columns = OPS["sample"].implementations["triton"].run, filters(5, p=0.9)
    together = run(logits=logits, u=u, **columns)
    alone = [int(run(logits=logits[i, None], u=u[i, None], **filters(1, p=0.9))[0]) for i in range(5)]
    assert together.tolist() == alone


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_rows_that_are_no_distribution_give_some_id(broken):
    """Their requests end with an error; the token must not lie outside the tables that it is looked up in."""
    logits = torch.randn(3, 5000, generator=gen())
    logits[0, 17], logits[1], logits[2] = broken, broken, float("-inf")
    for columns in (filters(3), filters(3, k=9), filters(3, p=0.9), filters(3, least=0.1), filters(3, temperature=0.0)):
        found = OPS["sample"].implementations["triton"].run(logits=logits, u=torch.full((3,), 0.999), **columns)
        assert ((found >= 0) & (found < 5000)).all()


def test_the_whole_row_is_read_only_where_lists_do_not_decide(monkeypatch):
    """Where they do the last launches do nothing. Where not, few lie between two pivots, and passes by one program are
    not entered unless these too are too many.
    """
    passed, rows = [], []

    def passes(row_start, t, base, vocab, k, *rest):
        passed.append(int(k.handle.data.item()))
        return search(row_start, t, base, vocab, k, *rest)

    def pivots(*given):
        rows.append(given)
        return leave(*given)

    search, leave = sampling_flat.search_row, sampling.leave_pivots
    monkeypatch.setattr(sampling_flat, "search_row", passes)
    monkeypatch.setattr(sampling, "leave_pivots", pivots)
    run = OPS["sample"].implementations["triton"].run
    steep, flat = torch.randn(3, 9001, generator=gen()) * 4, torch.randn(3, 9001, generator=gen()) * 0.01
    run(logits=steep, u=torch.rand(3), **filters(3, k=50, p=0.95))
    run(logits=steep, u=torch.rand(3), **filters(3, least=0.05))
    assert not rows
    monkeypatch.setattr(sampling, "BETWEEN", 4096)
    run(logits=flat, u=torch.rand(3), **filters(3, k=8000))
    run(logits=flat.round(decimals=3), u=torch.rand(3), **filters(3, p=0.7))
    assert len(rows) == 6 and not passed
    monkeypatch.setattr(sampling, "BETWEEN", 64)
    run(logits=flat, u=torch.rand(3), **filters(3, k=8000))
    assert passed and set(passed) == {8000}


def untouched(*shape, dtype):
    """Zeros whose pages take no memory before they are touched."""
    return torch.from_numpy(np.zeros(shape, dtype))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_cache_offsets_beyond_two_to_the_31(bits, fused):
    widths = (64, 64) if bits == 8 else (48, 32)
    blocks = 2**31 // (64 * 2 * min(widths)) + 2  # of 64 slots, 2 heads
    cache = {f"{n}_cache": untouched(blocks, 64, 2, w, dtype=np.uint8) for n, w in zip("kv", widths, strict=True)}
    params = {name: untouched(blocks, 64, 2, 2, dtype=np.float16) for name in ("k_params", "v_params")}
    assert cache["v_cache"].numel() > 2**31
    q, k, v = torch.randn(3, 4, 64, generator=gen(1)), *torch.randn(2, 3, 2, 64, generator=gen())
    written = {"k": k, "v": v, "slot_mapping": torch.arange(3) + (blocks - 1) * 64, "bits": bits} | cache | params
    if fused:
        OPS["rope_kv_write"].implementations["triton"].run(q, **written)
    else:
        OPS["kv_write"].implementations["triton"].run(**written)
    inputs = {"block_table": np.array([[blocks - 1]], np.int32), "cu_seqlens": np.array([0, 1], np.int32)}
    inputs |= {"seq_lens": np.array([3], np.int32), "q": q[:1], "scale": 0.125, "bits": bits}
    found = OPS["paged_attention"].implementations["triton"].run(**inputs, **cache, **params)
    small = {name: t[-1:].clone() for name, t in (cache | params).items()}
    first = inputs | {"block_table": np.zeros((1, 1), np.int32)}
    torch.testing.assert_close(found, OPS["paged_attention"].reference(**first, **small))
    assert small["k_cache"].any() and found.abs().max() > 0.1


def test_rows_of_an_embedding_beyond_two_to_the_31():
    table = torch.from_numpy(np.zeros((2**31 // 4096 + 3, 4096), np.float16))
    last = len(table) - 1
    table[last] = torch.randn(4096, generator=gen()).half()
    found = OPS["embedding"].implementations["triton"].run(torch.tensor([last, 5]), table, 2.0)
    assert torch.equal(found[0], table[last] * 2) and not found[1].any()


@pytest.mark.parametrize("tokens, count, top_k", [(1, 20, 3), (37, 7, 2)])
@pytest.mark.parametrize("form", ["group_int", "int8", "fp8"])
def test_quantized_experts_of_uneven_size(tokens, count, top_k, form):
    g, hidden, inner = gen(tokens), 64, 128
    logits = torch.randn(tokens, count, generator=g)
    logits[:, 2] += 3
    experts, weights = both("moe_route", logits=logits, top_k=top_k, scoring="softmax", norm_topk=True)[0]
    inputs = {"x": torch.randn(tokens, hidden, generator=g), "experts": experts, "weights": weights}
    for name, shape in (("gate_up", (count, 2 * inner, hidden)), ("down", (count, hidden, inner))):
        if form == "group_int":
            codes = torch.randint(0, 16, shape, generator=g, dtype=torch.uint8)
            inputs[name] = torch.stack([pack_codes(c, 4) for c in codes])
            grid = (*shape[:2], shape[2] // 64)
            inputs[f"{name}_scales"] = ((torch.rand(grid, generator=g) + 0.1) / 100).half()
            inputs[f"{name}_zeros"] = torch.randint(0, 16, grid, generator=g, dtype=torch.uint8)
        else:
            kind = torch.int8 if form == "int8" else torch.float8_e4m3fn
            inputs[name] = (torch.randn(shape, generator=g) * 40).to(kind)
            inputs[f"{name}_scales"] = torch.rand(shape[:2], generator=g) / 300
    more = {"bits": 4} if form == "group_int" else {}
    close(f"moe_experts_{form}", tolerance=2e-4, **inputs, **more, activation="silu")
