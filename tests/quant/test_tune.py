"""Tuning scales and norms behind the layers: same model before, better after, codes untouched, resumable, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import toolkit.quant.methods.tune as tuning
import toolkit.quant.run
from toolkit.artifacts.canonical import GroupInt
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.artifacts.weights import canonical_weights
from toolkit.errors import UsageError
from toolkit.measure.text import heldout_text
from toolkit.models.registry import load_spec
from toolkit.quant.layers.activations import round_tokens
from toolkit.quant.layers.forward import embed, head_logits, layer_forward
from toolkit.quant.layers.result import LayerResult
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.lite import Common, auto_awq, auto_gptq, search, smooth_quant
from toolkit.quant.methods.smooth import quantize_rows
from toolkit.quant.methods.tune import ROWS, Linear, Student
from toolkit.quant.options import Awq, Gptq, Search, SmoothQuant

CPU = torch.device("cpu")

CHOOSE_EFFORT = toolkit.quant.run._choose_effort  # as it is before conftest.py has it choose few steps


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("The ship had been at sea for eleven days when the wind fell and the sails hung slack. " * 60)
    return path


@pytest.fixture
def quick(text: Path) -> Common:
    return Common(calib_dataset=str(text), calib_samples=6, calib_seqlen=48, eval_tokens=400, batch_size=4)


def weights_of(path: Path, source: LayerSource) -> list[LayerResult]:
    """A quantized checkpoint's canonical weights by layer, as its own reader gives them."""
    checkpoint = open_checkpoint(path)
    _, stored = load_spec(checkpoint)
    weights = canonical_weights(checkpoint, stored)
    names = [{p.name for item in items for p in item.parts} for items in source.stored]
    return [LayerResult({n: w for n, w in weights.items() if n.removesuffix(".bias") in own}, []) for own in names]


def test_the_student_starts_as_the_quantized_model(
    family: str, tiny_models: Any, tmp_path: Path, quick: Common
) -> None:
    auto_awq(str(tiny_models(family)), tmp_path / "out", Awq(tune_steps=0), common=quick)
    source = LayerSource(tiny_models(family))
    results = weights_of(tmp_path / "out", source)
    student = Student(source, results, None, CPU)
    ids = torch.randint(0, source.spec.vocab_size, (40,), generator=torch.Generator().manual_seed(1))
    x = embed(source.spec, source.outer_weights(CPU)[source.spec.embed], ids[None])
    for layer, result in zip(source.spec.layers, results, strict=True):
        x = layer_forward(layer, result.dense(), x)
    with torch.no_grad():
        torch.testing.assert_close(student.hidden(ids), x, rtol=1e-4, atol=1e-4)


def test_the_student_of_an_encoder_reads_places_and_types_too(tiny_models: Any) -> None:
    """Else it would be tuned to make up for what it alone lacks."""
    source = LayerSource(tiny_models("bert"))
    layers = [source.layer(i, CPU) for i in range(len(source.spec.layers))]
    student = Student(source, [LayerResult(dict(own), []) for own in layers], None, CPU)
    ids = torch.randint(0, source.spec.vocab_size, (40,), generator=torch.Generator().manual_seed(1))
    assert source.added is not None
    x = embed(source.spec, source.outer_weights(CPU)[source.spec.embed], ids[None], added=source.added)
    for layer, own in zip(source.spec.layers, layers, strict=True):
        x = layer_forward(layer, own, x)
    with torch.no_grad():
        torch.testing.assert_close(student.hidden(ids), x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2"])  # the second caps its logits
def test_the_gradient_is_that_of_the_divergence(family: str, tiny_models: Any) -> None:
    source = LayerSource(tiny_models(family))
    results = [LayerResult(dict(source.layer(i, CPU)), []) for i in range(len(source.spec.layers))]
    student = Student(source, results, None, CPU)
    draw = torch.Generator().manual_seed(2)
    hidden, exact = (torch.randn(1, ROWS + 20, source.spec.hidden_size, generator=draw) for _ in range(2))
    leaf = hidden.clone().requires_grad_()
    (sum(student.divergence(leaf, exact[0])) / len(exact[0])).backward()
    torch.testing.assert_close(student.gradient(hidden, exact[0]), leaf.grad)


@pytest.mark.parametrize("act_order", [False, True])
def test_gradients_of_scales_are_those_of_plain_arithmetic(act_order: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    index = torch.randperm(64, generator=draw).to(torch.int32) // 16
    code = GroupInt(
        torch.randint(0, 16, (24, 64), generator=draw, dtype=torch.uint8),
        (torch.rand(24, 4, generator=draw) + 0.1).half(),
        torch.randint(0, 16, (24, 4), generator=draw, dtype=torch.uint8),
        4,
        16,
        group_index=index if act_order else None,
    )
    bias = torch.randn(24, generator=draw)
    linear = Linear.of(code, bias, CPU)
    x = torch.randn(7, 64, generator=draw, requires_grad=True)
    with torch.no_grad():
        linear.change.normal_(std=0.1, generator=draw)
    y = linear(x)
    target = torch.randn(7, 24, generator=draw)
    y.backward(target)
    place = index.long() if act_order else torch.arange(64) // 16
    change = linear.change.detach().clone().requires_grad_()
    again = x.detach().clone().requires_grad_()
    scale = (code.scales.float() * (1 + change))[:, place]
    plain = F.linear(again, (code.codes.float() - code.zeros.float()[:, place]) * scale, bias)
    plain.backward(target)
    torch.testing.assert_close(y, plain)
    torch.testing.assert_close(x.grad, again.grad)
    torch.testing.assert_close(linear.change.grad, change.grad)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_linears_with_8_bit_inputs_round_them_and_pass_gradients_on(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    code = quantize_rows(torch.randn(24, 64, generator=draw), dtype)
    bias = torch.randn(24, generator=draw)
    linear = Linear.of(code, bias, CPU)
    x = torch.randn(7, 64, generator=draw, requires_grad=True)
    with torch.no_grad():
        linear.change.normal_(std=0.1, generator=draw)
    y = linear(x)
    target = torch.randn(7, 24, generator=draw)
    y.backward(target)
    change = linear.change.detach().clone().requires_grad_()
    rounded = round_tokens(x.detach(), dtype).requires_grad_()
    plain = F.linear(rounded, code.weight.float() * code.scales[:, None] * (1 + change), bias)
    plain.backward(target)
    torch.testing.assert_close(y, plain)
    torch.testing.assert_close(x.grad, rounded.grad)
    torch.testing.assert_close(linear.change.grad, change.grad)
    assert linear.stored().shape == code.scales.shape and linear.stored().dtype == code.scales.dtype


@pytest.mark.parametrize("quant_dtype", ["fp8", "float8_e5m2"])
def test_w8a8_models_are_tuned_as_they_will_run(
    quant_dtype: str, tiny_models: Any, tmp_path: Path, quick: Common
) -> None:
    model = str(tiny_models("llama"))
    plain = smooth_quant(model, tmp_path / "plain", SmoothQuant(quant_dtype=quant_dtype), common=quick)
    tuned = smooth_quant(model, tmp_path / "tuned", SmoothQuant(quant_dtype=quant_dtype, tune_steps=60), common=quick)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "tuned"))
    changed = {k for k in a if not torch.equal(a[k], b[k])}
    assert changed and all("norm" in k or "scale" in k for k in changed)
    assert tuned.quality["tuning"]["kept"] and tuned.quality["kl"] < plain.quality["kl"]


def test_codes_stay_and_predictions_come_closer(tiny_models: Any, tmp_path: Path, quick: Common) -> None:
    model = tiny_models("llama")
    usual = Awq(rounding="nearest")
    plain = auto_awq(str(model), tmp_path / "plain", replace(usual, tune_steps=0), common=quick)
    tuned = auto_awq(str(model), tmp_path / "tuned", replace(usual, tune_steps=60), common=quick)
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "tuned"))
    assert a.keys() == b.keys()
    same = {k.rsplit(".", 1)[-1] for k in a if torch.equal(a[k], b[k])}
    changed = {k for k in a if not torch.equal(a[k], b[k])}
    assert {"qweight", "qzeros"} <= same
    assert {k.rsplit(".", 1)[-1] for k in changed} == {"scales", "weight"}
    assert all("norm" in k or k.endswith(".scales") for k in changed)
    figures = tuned.quality["tuning"]
    assert figures["kept"] and figures["kl_after"] < 0.9 * figures["kl_before"]
    assert tuned.quality["kl"] < plain.quality["kl"]
    assert tuned.options["tune_steps"] == 60 and "tune_steps" not in plain.options


def test_the_manifest_states_the_divergence_of_what_was_written(
    tiny_models: Any, tmp_path: Path, quick: Common
) -> None:
    model = tiny_models("qwen3")
    result = auto_awq(str(model), tmp_path / "out", Awq(tune_steps=20), common=quick)
    source = LayerSource(model)
    outer = source.outer_weights(CPU)
    ids = torch.tensor(Tokenizer.open(source.checkpoint.tokenizer_dir).encode(heldout_text(400))[:400])[None]
    x = y = embed(source.spec, outer[source.spec.embed], ids)
    for i, (layer, result_) in enumerate(zip(source.spec.layers, weights_of(tmp_path / "out", source), strict=True)):
        x = layer_forward(layer, source.layer(i, CPU), x)
        y = layer_forward(layer, result_.dense(), y)
    p, q = (head_logits(source.spec, outer, h[0, :-1]).log_softmax(-1) for h in (x, y))
    kl = F.kl_div(q, p, reduction="batchmean", log_target=True)
    assert result.quality["kl"] == pytest.approx(float(kl), rel=1e-3)


@pytest.mark.parametrize("where", ["before tuning", "before tuning, a layer torn", "putting scales in place"])
def test_a_killed_run_ends_with_the_same_bits(
    where: str, tiny_models: Any, tmp_path: Path, quick: Common, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tiny_models("llama"))
    auto_awq(model, tmp_path / "whole", Awq(tune_steps=8), common=quick)

    def killed(what: str = "tuning scales", *_: Any) -> None:
        if what == "tuning scales":
            raise KeyboardInterrupt

    put, options = tuning.replace_layer, Awq(tune_steps=8)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if where.startswith("before tuning"):
            auto_awq(model, tmp_path / "broken", options, common=quick, progress=killed)
        else:
            patch.setattr(tuning, "replace_layer", lambda s, i, r: put(s, i, r) if i == 0 else killed())
            auto_awq(model, tmp_path / "broken", options, common=quick)
    again: list[str] = []
    if where == "before tuning, a layer torn":  # it is made again, and the text stops behind it
        torn = tmp_path / ".broken.partial" / "state" / "layer.0.safetensors"
        data = bytearray(torn.read_bytes())
        data[-1] ^= 1
        torn.write_bytes(data)
    auto_awq(model, tmp_path / "broken", options, common=quick, progress=lambda what, *_: again.append(what))
    assert ("tuning scales" in again) == where.startswith("before tuning"), "what was found is not looked for again"
    whole, broken = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "broken"))
    assert all(torch.equal(whole[k], broken[k]) for k in whole)


def test_what_does_not_help_is_not_kept(
    tiny_models: Any, tmp_path: Path, quick: Common, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(tiny_models("llama"))
    auto_awq(model, tmp_path / "plain", Awq(tune_steps=0), common=quick)
    monkeypatch.setattr(tuning, "RATES", (0.5, 0.5))  # steps far too long
    result = auto_awq(model, tmp_path / "wild", Awq(tune_steps=8), common=quick)
    assert result.quality["tuning"]["kept"] is False
    plain, wild = (load_file(tmp_path / n / "model.safetensors") for n in ("plain", "wild"))
    assert all(torch.equal(plain[k], wild[k]) for k in plain)


@pytest.mark.parametrize(("bits", "guides", "usual"), [(4, 0, 64), (4, 4, 0), (3, 0, 64), (3, 4, 64), (2, 4, 64)])
def test_few_bits_are_tuned_behind_gradients_too(
    bits: int, guides: int, usual: int, tiny_models: Any, tmp_path: Path, quick: Common, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def steps(source: Any, wanted: int | None, usual: int, *rest: Any) -> int:
        asked.append(usual)
        return 0

    monkeypatch.setattr(toolkit.quant.run, "_choose_effort", CHOOSE_EFFORT)
    monkeypatch.setattr(toolkit.quant.run, "choose_steps", steps)
    options = Gptq(w_bits=bits, guide_samples=guides)
    auto_gptq(str(tiny_models("llama")), tmp_path / "out", options, common=quick)
    assert asked == [usual]


@pytest.mark.parametrize("form", ["gptq_v2", "trellis"])
def test_two_bits_are_tuned_by_steps_of_another_size(
    form: str, tiny_models: Any, tmp_path: Path, quick: Common, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "RATES", (0.0, 1e-3))
    for bits in (2, 3):
        options = Gptq(w_bits=bits, tune_steps=8)
        found = auto_gptq(
            str(tiny_models("llama")), tmp_path / f"{bits}", options, common=replace(quick, format=form)
        ).quality["tuning"]
        assert (found["kl_after"] == found["kl_before"]) == (bits == 3)


@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_is_tuned_too(act_order: bool, tiny_models: Any, tmp_path: Path, quick: Common) -> None:
    options = Gptq(desc_act=act_order, static_groups=not act_order, tune_steps=40)
    result = auto_gptq(str(tiny_models("llama")), tmp_path / "out", options, common=quick)
    assert result.quality["tuning"]["kept"]


def test_a_mixture_of_widths_is_tuned_too(tiny_models: Any, tmp_path: Path, quick: Common) -> None:
    model = str(tiny_models("llama"))
    plain = search(model, tmp_path / "plain", Search(bits=5.6, tune_steps=0), common=quick)
    tuned = search(model, tmp_path / "tuned", Search(bits=5.6, tune_steps=40), common=quick)
    assert len({(row["bits"], row["group_size"]) for row in tuned.quality["search"]}) > 1
    assert tuned.quality["tuning"]["kept"]
    assert tuned.quality["kl"] < plain.quality["kl"]


def test_left_out_by_itself_where_memory_is_short(tiny_models: Any, tmp_path: Path, quick: Common) -> None:
    said: list[str] = []
    common = replace(quick, cache_memory=1e-6, notice=said.append)
    result = auto_awq(str(tiny_models("llama")), tmp_path / "out", common=common)
    assert "tune_steps" not in result.options and "tuning" not in result.quality
    assert any("--cache-memory" in line and "--tune-steps" in line for line in said)


def test_refusals(tiny_models: Any, tmp_path: Path, quick: Common) -> None:
    model = str(tiny_models("llama"))
    with pytest.raises(UsageError, match="--tune-steps: expected 0 or more, found -1"):
        auto_awq(model, tmp_path / "a", Awq(tune_steps=-1), common=quick)
    with pytest.raises(UsageError, match="--tune-steps: not with --format gguf"):
        auto_awq(model, tmp_path / "b", Awq(tune_steps=5, w_group_size=32), common=replace(quick, format="gguf"))
    assert not list(tmp_path.iterdir())
