"""Gradients that tell what errors of a linear's outputs do beside each other, and rounding that goes by them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from toolkit.models.sites import Site, layer_sites
from toolkit.models.spec import LinearSpec
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.layers.spill import Spill
from toolkit.quant.layers.statistics import Statistics
from toolkit.quant.lite import Common, auto_gptq
from toolkit.quant.methods import guide
from toolkit.quant.methods.awq import Grid
from toolkit.quant.methods.gptq import Rounding, inverse_factor, round_columns, round_rows
from toolkit.quant.methods.guide import Curvature, Guide, blocks
from toolkit.quant.methods.sensitivity import feel
from toolkit.quant.options import Gptq
from toolkit.runners.weights.folding import Folded

CPU = torch.device("cpu")


def positive(n: int, seed: int, rank: int = 0) -> Tensor:
    x = torch.randn(rank or 4 * n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.T @ x / len(x)


@pytest.mark.parametrize("rows", [7, 96, 160, 500])
def test_a_block_makes_up_for_what_those_before_have_lost(rows: int) -> None:
    """Of all changes of the rows that are left the one that costs least, in the block that is next."""
    curve = positive(rows, 0)
    lost = torch.randn(rows, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    damped = curve + guide.DAMP * curve.diagonal().mean() * torch.eye(rows, dtype=torch.float64)
    seen: list[int] = []
    for block, pull, before in blocks(curve.clone(), None, 0.0):
        assert sorted(before.tolist()) == sorted(seen)
        left = [i for i in range(rows) if i not in set(before.tolist())]
        wanted = -torch.linalg.solve(damped[left][:, left], damped[left][:, before] @ lost[before])
        places = [left.index(int(i)) for i in block]
        torch.testing.assert_close(-(pull @ lost[before]), wanted[places])
        seen += block.tolist()
    assert sorted(seen) == list(range(rows))


def test_pairs_that_turn_together_are_in_different_blocks() -> None:
    for rows, half in ((576, 32), (2048, 64), (4096, 32), (4096, 1)):
        for block, _, _ in blocks(torch.eye(rows), None, 0.0):
            assert not set(block.tolist()) & {i + half for i in block.tolist()}


def cost(lost: Tensor, curve: Tensor, xtx: Tensor) -> float:
    """tr(H Δ XᵀX Δᵀ)."""
    return float(((curve @ lost @ xtx) * lost).sum())


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize(("desc_act", "static"), [(False, False), (True, True), (True, False)])
def test_predictions_lose_less_where_outputs_go_together(divided: bool, desc_act: bool, static: bool) -> None:
    rows, n = 160, 64
    xtx, curve = positive(n, 2), positive(rows, 3, rank=40)
    weight = torch.randn(rows, n, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    folded = Folded({"w": weight})
    divisor = torch.ones(rows, 1, dtype=torch.float64)
    if divided:
        divisor = 0.5 + torch.rand(rows, 1, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        folded.rows["w"] = divisor
    grid = Grid(3, 32, False)
    rounding = Rounding(shrink=0.0, clip=False, desc_act=desc_act, static_groups=static)
    factor = inverse_factor(xtx, rounding)
    plain = round_columns(folded["w"], factor, grid, rounding)
    guided = round_rows(folded, "w", factor, grid, rounding, [curve])
    before, after = (cost((x.dense() - folded["w"]) * divisor, curve, xtx) for x in (plain, guided))
    assert after < 0.6 * before
    alone = round_rows(folded, "w", factor, grid, rounding, [torch.eye(rows, dtype=torch.float64)])
    if not divided:  # outputs that have nothing to do with each other
        assert torch.equal(alone.codes, plain.codes) and torch.equal(alone.scale, plain.scale)


def test_a_large_linear_is_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide, "MOST_ROWS", 20)
    weights = {"w": torch.randn(50, 8)}
    seen = Curvature(1, 6)
    x = torch.randn(1, 6, 8, requires_grad=True)
    with torch.enable_grad():
        y = seen.linear("w", weights)(x)
    g = torch.randn(1, 6, 50)
    y.backward(g)
    rows = g[0] * x[0].detach().norm(dim=1, keepdim=True)
    whole = rows.T @ rows
    assert len(seen.found["w"]) == guide.parts(50) == 3
    for c, own in enumerate(seen.found["w"]):
        torch.testing.assert_close(own, whole[c::3, c::3], rtol=0.02, atol=0.02 * float(whole.diagonal().mean()))
    assert guide.curve_bytes(LinearSpec("w", 8, 50)) >= sum(h.numel() * 4 for h in seen.found["w"])
    folded, grid, rounding = Folded(weights), Grid(4, 8, False), Rounding()
    made = round_rows(folded, "w", inverse_factor(torch.eye(8), rounding), grid, rounding, seen.found["w"])
    assert float((made.dense() - weights["w"]).abs().max()) < 1


@pytest.mark.parametrize(("rows", "guides"), [((6, 6), True), ((6, 4), False), ((4, 4), False), ((6,), False)])
def test_an_expert_that_tokens_pass_by_guides_nothing(rows: tuple[int, ...], guides: bool) -> None:
    seen, weights = Curvature(2, 6), {"w": torch.randn(5, 8)}
    for count in rows:
        with torch.enable_grad():
            seen.linear("w", weights)(torch.randn(count, 8, requires_grad=True)).square().sum().backward()
    site = Site("site", 8, (LinearSpec("w", 8, 5),), (), None)
    assert seen.whole == ({"w"} if guides else set())
    share = seen.weights(site)
    assert (share is not None and share.shape == (2, 6)) if guides else share is None


def test_rows_count_as_they_are_weighed() -> None:
    x, lacks, share = torch.randn(12, 8), torch.randn(12, 4), torch.rand(12)
    found = Statistics(["site"], weigh=lambda name: share)
    for rows in (slice(0, 5), slice(5, 12)):
        found.lacks["site"] = lacks[rows]
        found.observe("site", x[rows])
    gram = found.finish()["site"]
    torch.testing.assert_close(gram.xtx, (x * share[:, None]).T @ x)
    torch.testing.assert_close(gram.missing.sum(0), (lacks * share[:, None]).T @ x)
    assert gram.rows == 12


def test_what_gradients_tell_is_kept_and_taken_once(tiny_models: Any, tmp_path: Path) -> None:
    source = LayerSource(tiny_models("llama"))
    ids = torch.randint(0, source.spec.vocab_size, (3, 24))
    found, room = Guide.of(tmp_path), partial(Spill, tmp_path / "spill", 0)
    found.measure(source, ids, 2, CPU, room, lambda done, total: None)
    found.measure(source, ids, 2, CPU, room, lambda done, total: pytest.fail("taken twice"))
    for layer in source.spec.layers:
        for site in layer_sites(layer):
            share = found.tokens(site.name)
            assert share is not None and share.shape == (72,)
            passed = torch.cat([share[:24], share[48:]])
            assert float(passed.mean()) == pytest.approx(1, abs=1e-5) and float(passed.std()) > 0.01
            assert bool((share[24:48] == 1).all())
            for linear in site.linears:
                curves = found.curves(linear.name)
                assert curves is not None
                (curve,) = curves
                assert curve.shape == (linear.out_features,) * 2
                assert float(torch.linalg.eigvalsh(curve.double())[0]) > -0.02 * float(curve.diagonal().max())
    assert found.curves("model.layers.0.other") is None and found.tokens("other") is None


def test_samples_by_turns_tell_what_they_do_alone(
    tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = LayerSource(tiny_models("llama"))
    ids = torch.randint(0, source.spec.vocab_size, (5, 24))
    monkeypatch.setattr(guide, "AT_ONCE", 2)
    monkeypatch.setattr(guide, "feel", lambda *args, seed: feel(*args))  # the same draws for each
    heard: list[tuple[int, int]] = []

    def told_by(text: Tensor) -> Guide:
        heard.clear()
        one = Guide(tmp_path / str(len(list(tmp_path.iterdir()))))
        one.measure(source, text, len(text), CPU, partial(Spill, tmp_path / "s", 0), lambda *at: heard.append(at))
        return one

    alone = [told_by(part) for part in ids.split(2)]
    together = told_by(ids)
    assert heard == sorted(heard) and len({total for _, total in heard}) == 1
    for site in layer_sites(source.spec.layers[0]):
        shares = [one.tokens(site.name) for one in (*alone, together)]
        assert all(share is not None for share in shares)
        torch.testing.assert_close(torch.cat(shares[:-1]), shares[-1])  # type: ignore[arg-type]
        for linear in site.linears:
            curves = [(one.curves(linear.name) or [])[0] for one in (*alone, together)]
            torch.testing.assert_close(sum(curves[:-1]), curves[-1], rtol=0.02, atol=0.01 * float(curves[-1].max()))


def test_a_run_tells_that_it_was_guided_and_goes_on_where_it_was_killed(
    tiny_models: Any, tmp_path: Path, harbour: str
) -> None:
    model, options = str(tiny_models("llama")), Gptq(guide_samples=3, tune_steps=0)
    common = Common(calib_dataset=harbour, calib_samples=4, calib_seqlen=48, eval_tokens=64)
    plain = auto_gptq(model, tmp_path / "plain", Gptq(guide_samples=0, tune_steps=0), common=common)
    whole = auto_gptq(model, tmp_path / "whole", options, common=common)
    assert whole.options["guide_samples"] == 3 and "guide_samples" not in plain.options
    taken: list[str] = []

    def killed(what: str, done: int, total: int) -> None:
        taken.append(what)
        if what.startswith("quantizing") and done == 1:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        auto_gptq(model, tmp_path / "killed", options, common=common, progress=killed)
    assert "taking gradients" in taken
    taken.clear()
    again = lambda what, done, total: taken.append(what)  # noqa: E731
    auto_gptq(model, tmp_path / "killed", options, common=common, progress=again)
    assert "taking gradients" not in taken
    data = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "killed", "plain")]
    assert data[0] == data[1] != data[2]


def test_gradients_that_do_not_fit_guide_nothing(
    tiny_models: Any, tmp_path: Path, harbour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guide, "needed", lambda layer: 5 << 30)
    said: list[str] = []
    common = Common(
        calib_dataset=harbour, calib_samples=4, calib_seqlen=48, eval_tokens=64, cache_memory=2,
        notice=said.append,
    )  # fmt: skip
    model = str(tiny_models("llama"))
    found = auto_gptq(model, tmp_path / "out", Gptq(tune_steps=0), common=common)
    assert "guide_samples" not in found.options
    why = "no gradients guide the rounding: they take 5.0 GiB, 2.0 are allowed for; --guide-samples 4 takes them"
    assert any(line.startswith(why) for line in said)
    found = auto_gptq(model, tmp_path / "all", Gptq(tune_steps=0, guide_samples=9), common=common)
    assert found.options["guide_samples"] == 4
