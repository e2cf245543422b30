"""W8A8 linears in integers, as held-out text goes through them on processors with AVX-512 VNNI."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.artifacts.canonical import ChannelInt8
from toolkit.kernels.torch.product import int8_product, prefers_int8
from toolkit.models.sites import Site
from toolkit.models.spec import LinearSpec
from toolkit.quant.layers import activations, layerwise
from toolkit.quant.layers.activations import Int8Linears, round_tokens
from toolkit.quant.lite import Common, smooth_quant
from toolkit.quant.methods.smooth import quantize_rows

TOP = 127 if prefers_int8() else 63  # with AVX-512 and no VNNI, two products are added in 16 bits


@pytest.mark.parametrize(("rows", "columns", "outputs"), [(1, 16, 8), (33, 576, 40), (257, 96, 1536)])
def test_products_are_exact(rows: int, columns: int, outputs: int) -> None:
    x = torch.randint(-TOP, TOP + 1, (rows, columns), dtype=torch.int8)
    weight = torch.randint(-TOP, TOP + 1, (outputs, columns), dtype=torch.int8)
    found = int8_product(x, weight)
    assert found.dtype is torch.float32 and torch.equal(found.double(), x.double() @ weight.double().T)


def made() -> tuple[list[Site], dict[str, Any]]:
    """Three sites, of which the first alone has linears that are all W8A8, and their weights."""

    def site(name: str, *linears: str) -> Site:
        return Site(name, 48, tuple(LinearSpec(x, 48, 24) for x in linears), (), None)

    weights: dict[str, Any] = {x: quantize_rows(torch.randn(24, 48), torch.int8) for x in ("a", "b", "c")}
    weights |= {"b.bias": torch.randn(24), "d": quantize_rows(torch.randn(24, 48), torch.float8_e4m3fn)}
    return [site("both", "a", "b"), site("mixed", "c", "d"), site("other", "d")], weights


def test_linears_give_what_rounded_inputs_and_dense_weights_give() -> None:
    sites, weights = made()
    found = Int8Linears(sites, weights, 0)
    assert found.sites == sites[:1] and found.names == ["a", "b"]
    first = torch.randn(2, 5, 48) * torch.randn(48).exp()
    for x in (first, torch.zeros(1, 1, 48), first.clone()):
        near = round_tokens(x.reshape(-1, 48), torch.int8)
        for name in found.names:
            expected = near.double() @ weights[name].dequantize().double().T + weights.get(f"{name}.bias", 0)
            y = found.run(name, x)
            torch.testing.assert_close(y.double(), expected.view(*x.shape[:-1], 24), rtol=1e-5, atol=1e-4)


def test_codes_are_read_one_by_one_and_gone_with_the_layer() -> None:
    sites, weights = made()
    alive: list[weakref.ref[Any]] = []

    class Stage(dict[str, Any]):  # gives copies, as what is read from a file
        def __getitem__(self, name: str) -> Any:
            found = super().__getitem__(name)
            if isinstance(found, ChannelInt8):
                found = ChannelInt8(found.weight.clone(), found.scales)
                alive.append(weakref.ref(found.weight))
            return found

    def count() -> int:
        return sum(ref() is not None for ref in alive)

    gc.disable()  # what is left to it piles up: it does not see how large tensors are
    try:
        for room, held in ((0, 0), (24 * 48, 1), (1 << 20, 2)):
            found = Int8Linears(sites, Stage(weights), room)
            assert count() == 0
            modules = {name: partial(found.run, name) for name in found.names}
            for module in modules.values():
                module(torch.randn(4, 48))
            assert count() == held
            del found, modules, module
            assert count() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "mixtral"])
def test_a_run_states_the_same_figures(
    family: str, tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quality, counted, text = [], [], tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog, and the dog does not mind it at all. " * 60)

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        counted.append(weight.shape)
        return int8_product(x, weight)

    monkeypatch.setattr(activations, "int8_product", product)
    for integers in (False, True):
        monkeypatch.setattr(layerwise, "prefers_int8", lambda integers=integers: integers)
        options = Common(calib_dataset=str(text), calib_samples=8, calib_seqlen=64, eval_tokens=256, dtype="float32")
        quality.append(smooth_quant(str(tiny_models(family)), tmp_path / str(integers), common=options).quality)
        assert bool(counted) == integers
    for key in ("perplexity_before", "perplexity_after", "kl"):
        assert quality[0][key] == pytest.approx(quality[1][key], rel=2e-2 if key == "kl" else 1e-3)
