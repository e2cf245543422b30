"""Rounding to trellis codes: whole streams, close to the cheapest there are, and better than codes one by one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.streams import places, streams
from toolkit.artifacts.weights import canonical_weights
from toolkit.convert.formats import rewrite
from toolkit.errors import UsageError
from toolkit.models.registry import load_spec
from toolkit.models.spec import LinearSpec
from toolkit.quant import artifact_size
from toolkit.quant.grids import integers
from toolkit.quant.lite import Common, auto_awq, auto_gptq, search
from toolkit.quant.methods import gptq, trellis
from toolkit.quant.methods.awq import Grid
from toolkit.quant.methods.rounded import Rounding, inverse_factor
from toolkit.quant.options import Awq, Gptq, Search
from toolkit.runners.native.packing.pack import packed_meta

HOW = Rounding(shrink=0.0)


def related(n: int, seed: int) -> Tensor:
    """XᵀX of inputs that have much to do with each other."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * n, n, generator=draw) @ torch.randn(n, n, generator=draw)
    return x.T @ x / len(x)


def cheapest(x: Tensor, table: Tensor, bits: int) -> float:
    """The mean squared error of the best streams (Viterbi in torch)."""
    states = torch.arange(1 << (8 - bits))
    ways = (states[:, None] << bits) + torch.arange(1 << bits)
    cost = torch.full((len(x), len(states)), torch.inf)
    cost[:, 0] = 0
    for column in x.T:
        cost = (cost[:, ways & (len(states) - 1)] + (column[:, None, None] - table[ways]).square()).min(-1).values
    return float(cost.min(1).values.sum() / x.numel())


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_streams_are_nearly_the_cheapest(bits: int) -> None:
    """Of inputs that do not depend on each other, at the scales that were found."""
    weight = torch.randn(64, 384, generator=torch.Generator().manual_seed(bits))
    found = trellis.round_columns(weight, inverse_factor(torch.eye(384), Rounding(0.01, 0.0)), bits, 384)
    words = streams(found.codes, bits)
    assert torch.equal(places(words, bits), found.codes)  # each place has the bits of those before it
    table = trellis.trellis_table(bits).float()
    lost = (weight - found.dense()).square().mean(1)
    best = [cheapest(row[None] / s, table, bits) * s * s for row, s in zip(weight, found.scale[:, 0], strict=True)]
    assert float(lost.mean()) < 1.05 * float(torch.stack(best).mean())
    assert float(lost.mean()) < {2: 0.085, 3: 0.0225, 4: 0.0062}[bits]  # what is known of such trellises


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("size", [32, 64, 256])
@pytest.mark.parametrize("guided", [False, True])
def test_it_loses_less_than_codes_one_by_one(bits: int, size: int, guided: bool) -> None:
    weight, gram = torch.randn(96, 256, generator=torch.Generator().manual_seed(bits)), related(256, 1)
    curves = [related(96, 2)] if guided else None

    def cost(grid: Grid) -> float:
        factor = inverse_factor(gram.clone(), HOW)
        if curves is None:
            dense = gptq._round_alone(weight.clone(), factor, grid, HOW).dense()
        else:
            folded: Any = type("One", (dict,), {"rows": {}})({"x": weight.clone()})
            dense = gptq.round_rows(folded, "x", factor, grid, HOW, curves).dense()
        off = weight - dense
        across = off if curves is None else curves[0] @ off
        return float((across @ gram * off).sum())

    assert cost(Grid(bits, size, trellis=True)) < (0.8 if size == 32 else 0.7) * cost(Grid(bits, size))


def test_zeros_and_single_weights() -> None:
    weight = torch.zeros(20, 128)
    weight[3, 70] = 1.0
    found = trellis.round_columns(weight, inverse_factor(torch.eye(128), HOW), 3, 64)
    assert bool(torch.isfinite(found.dense()).all())
    assert float(found.dense()[3, 70]) == pytest.approx(1.0, abs=0.1)
    assert float((found.dense() - weight).square().sum()) < 0.1


@pytest.mark.parametrize("command", [auto_awq, auto_gptq])
@pytest.mark.parametrize("guided", [0, 4])
def test_a_model_loses_less_in_trellis_codes(
    command: Any, guided: int, tiny_models: Any, tmp_path: Path, harbour: str
) -> None:
    """Tuned behind it, or guided by gradients."""
    kind = Awq if command is auto_awq else Gptq
    options = kind(w_bits=3, w_group_size=32, guide_samples=guided)
    errors = {}
    for name in ("trellis", "gptq_v2"):
        common = Common(format=name, calib_dataset=harbour, calib_samples=8, calib_seqlen=64, eval_tokens=64)
        found = command(str(tiny_models("llama")), tmp_path / name, options, common=common)
        errors[name] = sum(x["rel_error"] for x in found.quality["layers"])
    assert errors["trellis"] < 0.9 * errors["gptq_v2"]
    checkpoint = open_checkpoint(tmp_path / "trellis")
    assert checkpoint.quantization is not None
    assert (checkpoint.quantization["quant_method"], checkpoint.quantization["bits"]) == ("trellis", 3)


def test_it_goes_with_the_preset_fast(tiny_models: Any, tmp_path: Path, harbour: str) -> None:
    """Whose AWQ rounds to nearest otherwise."""
    common = Common(format="trellis", preset="fast", calib_dataset=harbour, calib_seqlen=64, eval_tokens=64)
    found = auto_awq(str(tiny_models("llama")), tmp_path / "out", Awq(w_bits=4), common=common)
    assert found.options["rounding"] == "gptq"


def test_a_search_chooses_among_their_widths(tiny_models: Any, tmp_path: Path, harbour: str) -> None:
    common = Common(format="trellis", calib_dataset=harbour, calib_samples=8, calib_seqlen=64, eval_tokens=64)
    search(str(tiny_models("llama")), tmp_path / "out", Search(bits=3.6, guide_samples=0), common=common)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.quantization is not None
    widths = {x["bits"] for x in checkpoint.quantization["modules"].values()} | {checkpoint.quantization["bits"]}
    assert len(widths) > 1 and widths <= {2, 3, 4}
    sizes = {name: checkpoint.info(name).shape for name in checkpoint.names() if name.endswith((".qweight", ".scales"))}
    bits = sum(math.prod(shape) * (32 if name.endswith("t") else 16) for name, shape in sizes.items())
    own = {f"{name}.qweight": x["bits"] for name, x in checkpoint.quantization["modules"].items()}
    weights = sum(
        math.prod(shape) * 32 // own.get(name, checkpoint.quantization["bits"])
        for name, shape in sizes.items()
        if name.endswith("t")
    )
    assert 3.3 < bits / weights <= 3.6


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (Awq(w_bits=8), "--w-bits: trellis codes have 2, 3 or 4 bits, found 8"),
        (Awq(w_bits=3, sweeps=2), "--desc-act, --sweeps: trellis codes of a row hang together"),
        (Awq(w_bits=3, desc_act=True), "--desc-act, --sweeps: trellis codes of a row hang together"),
        (Awq(w_bits=3, rounding="nearest"), "--rounding nearest: trellis codes are rounded with error feedback"),
    ],
)
def test_options_that_do_not_go_together(options: Awq, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        auto_awq("demo", tmp_path, options, common=Common(format="trellis"))
    assert told in str(error.value)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_rows_that_fill_no_words_are_refused_before_anything_runs(bits: int, tiny_models: Any, tmp_path: Path) -> None:
    model = str(tiny_models("llama", intermediate_size=184))  # in 2 and 3 bits as many words as 192 would fill
    with pytest.raises(UsageError, match="184 input features are no multiple of 32"):
        auto_gptq(model, tmp_path / "out", Gptq(w_bits=bits), common=Common(format="trellis"))


@pytest.mark.parametrize("native", [True, False])
def test_a_search_by_size_counts_what_the_artifact_will_hold(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels for them, 8-bit codes."""
    monkeypatch.setattr(artifact_size, "runs_natively", lambda source: native)
    source: Any = None
    cost = artifact_size.cost_of(source, lambda grid, *shape: integers(grid, False, *shape))
    linear, weight = LinearSpec("x", 512, 256), torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    for bits in (2, 3, 4):
        found = trellis.round_columns(weight, inverse_factor(torch.eye(512), HOW), bits, 64).part(slice(None), bits, 64)
        held = packed_meta(found if native else found.integers()).nbytes
        assert cost(linear, Grid(bits, 64, trellis=True)) == pytest.approx(8 * held, rel=0.08)


def test_a_gguf_file_holds_them_in_eight_bits(tiny_models: Any, tmp_path: Path, harbour: str) -> None:
    common = Common(format="trellis", calib_dataset=harbour, calib_samples=8, calib_seqlen=64, eval_tokens=64)
    options = Gptq(w_bits=3, guide_samples=0, tune_steps=0)
    auto_gptq(str(tiny_models("llama")), tmp_path / "out", options, common=common)
    found = []
    for kind, matrices in (("auto", 14), ("q8_0", 16)):  # embedding and head are rounded too where it is asked for
        written = rewrite(str(tmp_path / "out"), tmp_path / f"{kind}.gguf", to="gguf", gguf_type=kind, quiet=True)
        assert f"{matrices} × Q8_0" in written.notes[0]
    for path in (tmp_path / "out", tmp_path / "auto.gguf"):
        checkpoint = open_checkpoint(path)
        found.append(canonical_weights(checkpoint, load_spec(checkpoint)[1]))
    for name, weight in found[0].items():
        other = found[1][name]
        if not isinstance(weight, Tensor):
            assert not isinstance(other, Tensor) and torch.equal(weight.dequantize(), other.dequantize()), name


@pytest.mark.parametrize("to", ["gptq", "compressed-tensors", "auto_round"])
def test_a_head_is_written_in_eight_bits_too(to: str, tiny_models: Any, tmp_path: Path, harbour: str) -> None:
    common = Common(
        format="trellis", calib_dataset=harbour, calib_samples=8, calib_seqlen=64, eval_tokens=64, quantize_lm_head=True
    )
    options = Gptq(w_bits=3, guide_samples=0, tune_steps=0)
    auto_gptq(str(tiny_models("llama")), tmp_path / "out", options, common=common)
    rewrite(str(tmp_path / "out"), tmp_path / to, to=to, quiet=True)
    heads = []
    for path in (tmp_path / "out", tmp_path / to):
        checkpoint = open_checkpoint(path)
        assert "lm_head.weight" not in checkpoint
        heads.append(canonical_weights(checkpoint, load_spec(checkpoint)[1])["lm_head"].dequantize())
    assert torch.equal(*heads)
