"""What rounding leaves in the residual stream, and what linears behind make up for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.weights import canonical_weights
from toolkit.models.registry import get, load_spec, names
from toolkit.models.sites import writer
from toolkit.quant.layers import statistics
from toolkit.quant.layers.forward import layer_forward
from toolkit.quant.layers.layerwise import Flow
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.layers.statistics import Gram
from toolkit.quant.lite import Common, auto_gptq
from toolkit.quant.methods.carried import change
from toolkit.quant.options import Gptq

TOKENS, IN, OUT = 2048, 48, 24
SHAPES = [(name, shape) for name in names() for shape in range(len(get(name).tiny))]


def seen(x: Tensor, lacks: Tensor) -> Gram:
    gram = Gram.empty(x.shape[1])
    for rows, missing in zip(x.split(256), lacks.split(256), strict=True):
        gram.add(rows, missing)
    gram.finish()
    return gram


def text(seed: int) -> tuple[Tensor, torch.Generator]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(TOKENS, IN, generator=draw) @ torch.randn(IN, IN, generator=draw), draw


def test_what_follows_from_the_input_is_made_up_for() -> None:
    x, draw = text(0)
    wanted = torch.randn(OUT, IN, generator=draw)
    lacks = x @ wanted.T
    found = change(seen(x, lacks))
    assert found is not None
    left = lacks - x @ found.T
    assert float(left.square().sum() / lacks.square().sum()) < 0.3


def test_chance_is_not() -> None:
    x, draw = text(1)
    lacks = torch.randn(TOKENS, OUT, generator=draw)
    found = change(seen(x, lacks))
    unseen, more = text(2)[0], torch.randn(TOKENS, OUT, generator=draw)
    moved = 0.0 if found is None else float((unseen @ found.T).square().sum() / more.square().sum())
    assert moved < 0.002  # a plain regression of 48 inputs on 2,048 rows of chance moves 0.02


def test_without_a_stream_nothing_changes() -> None:
    assert change(seen(text(3)[0], torch.zeros(TOKENS, OUT))) is None
    gram = Gram.empty(IN)
    gram.add(text(4)[0])
    assert change(gram) is None


def behind_layers(source: LayerSource, weights: Any, ids: Tensor) -> Tensor:
    """The residual stream behind the last layer; ``weights``: of all layers, by name."""
    cpu = torch.device("cpu")
    flow = Flow(source, ids, source.outer_weights(cpu)[source.spec.embed], cpu, len(ids))
    for i, layer in enumerate(source.spec.layers):
        flow.advance(i, layer, source.layer(i, cpu) if weights is None else weights)
    return torch.cat(list(flow.hidden))


def dense(path: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(path)
    found = canonical_weights(checkpoint, load_spec(checkpoint)[1])
    return {name: (w if isinstance(w, Tensor) else w.dequantize()).float() for name, w in found.items()}


def test_less_is_left_in_the_stream_of_other_text(tiny_models: Any, tmp_path: Path) -> None:
    """``granite`` scales what it adds to the stream, ``gptj`` adds attention and MLP beside each other. With random
    weights one model may gain nothing, by how the processor rounds its sums; together they do."""
    ratios = [_left(tiny_models(family), tmp_path / family) for family in ("llama", "qwen3", "granite", "gptj")]
    assert max(ratios) < 1.01 and np.prod(ratios) < 0.96, ratios


def _left(model: Path, folder: Path) -> float:
    """What is left of the error in the stream with it, by what is without."""
    source = LayerSource(Path(model))
    ids = torch.randint(source.spec.vocab_size, (16, 64), generator=torch.Generator().manual_seed(5))
    exact = behind_layers(source, None, ids)
    common = Common(calib_samples=64, calib_seqlen=64, eval_tokens=256, dtype="float32")
    left = {}
    for carry in (False, True):
        # without gradients, by which the predictions count and not the stream
        options = Gptq(w_bits=3, w_sym=False, w_group_size=32, carry_error=carry, guide_samples=0, tune_steps=0)
        auto_gptq(str(model), folder / str(carry), options, common=common)
        left[carry] = float((behind_layers(source, dense(folder / str(carry)), ids) - exact).norm())
    return left[True] / left[False]


@pytest.mark.parametrize(("family", "shape"), SHAPES, ids=[f"{name}-{shape}" for name, shape in SHAPES])
def test_the_stream_moves_by_what_its_writer_gives(family: str, shape: int, tiny_models: Any) -> None:
    """Of the last sublayer of every layer: what is added to the linear's weights is added to the stream, scaled."""
    source = LayerSource(Path(tiny_models(family, shape=shape)))
    draw, cpu = torch.Generator().manual_seed(6), torch.device("cpu")
    hidden = torch.randn(2, 5, source.spec.hidden_size, generator=draw)
    for i, layer in enumerate(source.spec.layers):
        sub = layer.sublayers[-1]
        if (linear := writer(sub)) is None:
            continue
        weights, inputs, streams = source.layer(i, cpu), dict[str, Tensor](), dict[str, Tensor]()
        before = layer_forward(layer, weights, hidden, inputs.__setitem__, stream=streams.__setitem__)
        change = torch.randn(weights[linear.name].shape, generator=draw)
        moved = layer_forward(layer, {**weights, linear.name: weights[linear.name] + change}, hidden)
        given = (inputs[linear.name] @ change.T).view_as(hidden)
        torch.testing.assert_close(moved - before, sub.residual_scale * given, rtol=1e-3, atol=1e-3)
        assert streams[linear.name].shape == hidden.shape


def test_it_is_the_same_where_statistics_are_taken_in_turns(
    tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Gptq(w_group_size=32, tune_steps=0)
    common = Common(calib_samples=16, calib_seqlen=64, eval_tokens=128, dtype="float32")
    for name, beside in (("together", statistics.BESIDE), ("in turns", 0)):
        monkeypatch.setattr(statistics, "BESIDE", beside)
        auto_gptq(str(tiny_models("qwen3_moe")), tmp_path / name, options, common=common)
    for file in (tmp_path / "together").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "in turns" / file.name).read_bytes()
