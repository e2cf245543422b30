"""Every method of ``lite`` in every format that holds it: what is written reads back as what was measured."""

from __future__ import annotations

import json
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from toolkit.artifacts.canonical import Dense
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.weights import canonical_weights, validate_checkpoint
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import load_spec
from toolkit.quant.calibrate import calibrate
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.layers.statistics_file import planned_bytes
from toolkit.quant.lite import Common, auto_awq, auto_gptq, auto_round, blocked_fp8, mxfp4, search, smooth_quant
from toolkit.quant.methods.kv import kv
from toolkit.quant.options import AutoRound, Awq, BlockedFp8, Gptq, Search, SmoothQuant

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "internlm2", "gemma2", "phi3", "mixtral", "qwen3_moe")
# Whose linears, or what these can be folded into, differ; the others go through all methods with the slow tests.
APART = ("llama", "qwen2", "internlm2", "gemma2", "phi3", "mixtral", "qwen3_moe")
METHODS: dict[str, Any] = {
    "awq": lambda m, d, c: auto_awq(m, d, common=c),
    "awq-sym": lambda m, d, c: auto_awq(m, d, Awq(w_sym=True), common=c),
    "gptq": lambda m, d, c: auto_gptq(m, d, common=c),
    "gptq-asym": lambda m, d, c: auto_gptq(m, d, Gptq(w_sym=False, w_group_size=32), common=c),
    "gptq-act": lambda m, d, c: auto_gptq(m, d, Gptq(desc_act=True, static_groups=False, w_group_size=32), common=c),
    "gptq-3": lambda m, d, c: auto_gptq(m, d, Gptq(w_bits=3, w_group_size=32), common=c),
    "gptq-8-row": lambda m, d, c: auto_gptq(m, d, Gptq(w_bits=8, w_group_size=-1), common=c),
    "awq+gptq": lambda m, d, c: auto_awq(m, d, Awq(rounding="gptq"), common=c),
    "auto_round": lambda m, d, c: auto_round(m, d, AutoRound(iters=1, w_group_size=32), common=c),
    "search": lambda m, d, c: search(m, d, Search(bits=4.6), common=c),
    "int8": lambda m, d, c: smooth_quant(m, d, common=c),
    "fp8": lambda m, d, c: smooth_quant(m, d, SmoothQuant(quant_dtype="fp8"), common=c),
    "e5m2": lambda m, d, c: smooth_quant(m, d, SmoothQuant(quant_dtype="float8_e5m2"), common=c),
    "tiles": lambda m, d, c: blocked_fp8(m, d, common=c),
    "mxfp4": lambda m, d, c: mxfp4(m, d, common=c),
}
# Every format that holds what a method makes; it is refused in all others.
FORMATS: dict[str, tuple[str, ...]] = {
    "awq": ("awq", "gptq_v2", "compressed-tensors", "auto_round", "gguf"),
    "awq-sym": ("awq", "gptq", "gptq_v2", "compressed-tensors", "auto_round", "gguf"),
    "gptq": ("gptq", "gptq_v2", "compressed-tensors", "awq", "auto_round", "gguf"),
    "gptq-asym": ("gptq_v2", "compressed-tensors", "awq", "auto_round", "gguf"),
    "gptq-act": ("gptq", "gptq_v2"),
    "gptq-3": ("gptq", "gptq_v2", "compressed-tensors", "auto_round", "gguf"),
    "gptq-8-row": ("gptq", "gptq_v2", "compressed-tensors", "auto_round", "gguf"),
    "awq+gptq": ("awq", "gptq_v2", "compressed-tensors", "auto_round", "gguf"),
    "auto_round": ("auto_round", "gptq", "gptq_v2", "compressed-tensors", "awq", "gguf"),
    "search": ("compressed-tensors", "gptq_v2", "auto_round", "gguf"),
    "int8": ("w8a8", "compressed-tensors"),
    "fp8": ("w8a8", "compressed-tensors"),
    "e5m2": ("w8a8",),
    "tiles": ("fp8", "compressed-tensors"),
    "mxfp4": ("compressed-tensors", "mxfp4"),
}
EVERY_FORMAT = tuple(dict.fromkeys(form for forms in FORMATS.values() for form in forms))
Case = tuple[str, str, str]  # method, format, family
CASES: list[Case] = [(m, form, family) for m, forms in FORMATS.items() for form in forms for family in FAMILIES]
# What a GGUF file cannot say, so that its numbers would be run as another model than was measured.
GGUF_SAYS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "gemma2": {"query_pre_attn_scalar": 32},
    "qwen3_moe": {"mlp_only_layers": []},
}
EXPERTS = ("mixtral", "qwen3_moe")


def pairs_of(case: Case) -> set[tuple[tuple[int, str], ...]]:
    return set(combinations(enumerate(case), 2))


def covering(cases: list[Case]) -> list[Case]:
    """Few of ``cases`` in which every two things are together that are so in any: always the one with most pairs that
    are not there yet, the first of several."""
    left, chosen = set[Any]().union(*map(pairs_of, cases)), []
    while left:
        chosen.append(max(cases, key=lambda case: len(pairs_of(case) & left)))
        left -= pairs_of(chosen[-1])
    return chosen


PAIRWISE = covering([case for case in CASES if case[2] in APART])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("It was a bright cold day in April, and the clocks were striking thirteen times. " * 60)
    return path


def quick(text: Path, **more: Any) -> Common:
    return Common(
        calib_dataset=str(text),
        calib_samples=8,
        calib_seqlen=64,
        eval_tokens=256,
        batch_size=4,
        dtype="float32",
        **more,
    )


def check(path: Path, quality: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint is valid, and the perplexity of its own numbers is the one that was stated."""
    checkpoint = open_checkpoint(path)
    spec, stored = load_spec(checkpoint)
    validate_checkpoint(checkpoint, stored)
    weights = canonical_weights(checkpoint, stored)
    assert perplexity(spec, weights, checkpoint.tokenizer_dir, quality["tokens"]) == pytest.approx(
        quality["perplexity_after"], rel=2e-3
    )
    return weights


def perplexity(spec: Any, weights: dict[str, Any], tokenizer: Path, tokens: int) -> float:
    """Of the held-out text by our layers in float32."""
    from toolkit.artifacts.text.tokenizer import Tokenizer
    from toolkit.measure.text import heldout_text
    from toolkit.models.sites import layer_sites
    from toolkit.quant.layers.activations import input_rounding
    from toolkit.quant.layers.forward import embed, head_logits, layer_forward

    dense = {k: (v if isinstance(v, torch.Tensor) else v.dequantize()).float() for k, v in weights.items()}
    if spec.tied:
        dense[spec.head] = dense[spec.embed]
    ids = torch.tensor(Tokenizer.open(tokenizer).encode(heldout_text(tokens + 1))[: tokens + 1])
    hidden = embed(spec, dense[spec.embed], ids[None])
    for layer in spec.layers:
        near = input_rounding(layer_sites(layer), weights)
        hidden = layer_forward(layer, dense, hidden, rounding=near)
    return float(torch.nn.functional.cross_entropy(head_logits(spec, dense, hidden)[0, :-1], ids[1:]).exp())


def quantized_and_checked(case: Case, tiny_models: Any, support: Any, path: Path, text: Path) -> dict[str, Any]:
    """The quality that the run of ``case`` stated, found again in what it wrote to ``path``."""
    method, form, family = case
    model = tiny_models(family, **(GGUF_SAYS.get(family, {}) if form == "gguf" else {}))
    result = METHODS[method](str(model), path, quick(text, format=form))
    assert result.options["format"] == form
    if form == "gguf" and family in EXPERTS:
        spec, quality = _spec(model), result.quality
        weights = support("gguf_files").moe_parameters(path / "model.gguf", spec)
        found = perplexity(spec, weights, model, quality["tokens"])
        assert found == pytest.approx(quality["perplexity_after"], rel=2e-3)
    else:
        check(path / "model.gguf" if form == "gguf" else path, result.quality)
    return result.quality


def test_every_two_are_together_once() -> None:
    """Every method on every family, in every format, and every format on every family."""
    for choices, place in (
        ({(m, form) for m, forms in FORMATS.items() for form in forms}, (0, 1)),
        (set(product(METHODS, APART)), (0, 2)),
        (set(product(EVERY_FORMAT, APART)), (1, 2)),
    ):
        assert choices == {(case[place[0]], case[place[1]]) for case in PAIRWISE}
    assert len(PAIRWISE) < 1.2 * len(METHODS) * len(APART), "hardly more than methods x families, which it takes"


@pytest.mark.parametrize("method", METHODS)
def test_no_other_format_holds_it(method: str, tiny_models: Any, tmp_path: Path, text: Path) -> None:
    model = str(tiny_models("llama"))
    for form in set(EVERY_FORMAT) - set(FORMATS[method]):
        with pytest.raises(UsageError, match="--format"):
            METHODS[method](model, tmp_path / "out", quick(text, format=form))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", PAIRWISE, ids="-".join)
def test_method_format_family(case: Case, tiny_models: Any, support: Any, tmp_path: Path, text: Path) -> None:
    quality = quantized_and_checked(case, tiny_models, support, tmp_path / "out", text)
    assert all(0 <= x["rel_error"] < 0.6 for x in quality["layers"])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_method_in_every_format_on_every_family(
    case: Case, tiny_models: Any, support: Any, tmp_path: Path, text: Path
) -> None:
    quantized_and_checked(case, tiny_models, support, tmp_path / "out", text)


def test_patterns_choose_what_is_quantized(tiny_models: Any, tmp_path: Path, text: Path) -> None:
    model = str(tiny_models("llama"))
    for form in ("awq", "gptq", "compressed-tensors"):
        out = tmp_path / form
        common = quick(text, format=form, skip=(r"down_proj", r"layers\.1\.self_attn\.q"))
        auto_awq(model, out, Awq(w_sym=True), common=common)
        weights = canonical_weights(*_opened(out))
        kinds = {name: type(w).__name__ for name, w in weights.items() if name.endswith("_proj")}
        skipped = {n for n in kinds if n.endswith("down_proj") or n == "model.layers.1.self_attn.q_proj"}
        assert {n for n, kind in kinds.items() if kind == "Dense"} == skipped
        stated = json.dumps(json.loads((out / "config.json").read_text())["quantization_config"])
        assert "down_proj" in stated
    result = auto_gptq(model, tmp_path / "inc", common=quick(text, include=(r"\.mlp\.",)))
    assert {x["name"].split(".")[3] for x in result.quality["layers"]} == {"mlp"}
    assert result.quality["bits_per_weight"] > 10
    for pattern, words in (("(", "not a regular expression"), ("nosuch", "fits no linear")):
        with pytest.raises(UsageError, match=words):
            auto_gptq(model, tmp_path / "x", common=quick(text, skip=(pattern,)))
    with pytest.raises(UsageError, match="no linear is left"):
        auto_gptq(model, tmp_path / "x", common=quick(text, skip=("proj",)))


def test_a_fused_module_is_skipped_whole(tiny_models: Any, tmp_path: Path, text: Path) -> None:
    auto_gptq(str(tiny_models("phi3")), tmp_path / "out", common=quick(text, skip=(r"layers\.0\.self_attn\.k_proj",)))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.layers.0.self_attn.qkv_proj.weight" in tensors
    assert "model.layers.1.self_attn.qkv_proj.qweight" in tensors


@pytest.mark.parametrize(
    ("method", "family", "form"),
    [
        ("gptq", "qwen2", "gptq"), ("gptq", "llama", "compressed-tensors"), ("gptq", "internlm2", "gptq"),
        ("awq", "llama", "awq"), ("awq+gptq", "qwen2", "auto_round"), ("auto_round", "llama", "auto_round"),
        ("auto_round", "qwen2", "gptq"), ("search", "qwen2", "compressed-tensors"), ("search", "llama", "gptq_v2"),
        ("search", "llama", "auto_round"), ("int8", "qwen2", "w8a8"), ("mxfp4", "llama", "mxfp4"),
    ],
)  # fmt: skip
def test_the_head_too(method: str, family: str, form: str, tiny_models: Any, tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"
    common = quick(text, format=form, quantize_lm_head=True)
    result = METHODS[method](str(tiny_models(family)), out, common)
    weights = check(out, result.quality)
    spec = _spec(out)
    assert not spec.tied
    assert type(weights[spec.head]).__name__ != "Dense" and type(weights[spec.embed]).__name__ == "Dense"
    assert result.quality["layers"][-1]["name"] == spec.head


@pytest.mark.parametrize(("family", "place", "layers"), [("gemma2", 16, 2), ("mixtral", 22, 1)])
def test_a_killed_gptq_run_goes_on_bit_identically(
    family: str, place: int, layers: int, tiny_models: Any, tmp_path: Path, text: Path
) -> None:
    """Inputs come through the quantized layers, so what was saved must be passed through again."""
    from toolkit.quant.methods import gptq

    model = str(tiny_models(family))
    auto_gptq(model, tmp_path / "whole", common=quick(text))
    made = 0
    real = gptq.relative_error

    def dying(*args: Any) -> float:
        nonlocal made
        made += 1
        if made == place:
            raise KeyboardInterrupt
        return real(*args)

    patch = pytest.MonkeyPatch()
    patch.setattr(gptq, "relative_error", dying)
    with pytest.raises(KeyboardInterrupt):
        auto_gptq(model, tmp_path / "broken", common=quick(text))
    patch.undo()
    assert not (tmp_path / "broken").exists()
    saved = sorted(p.name for p in (tmp_path / ".broken.partial" / "state").glob("*"))
    assert saved == ["calibration.safetensors", *(f"layer.{i}.safetensors" for i in range(layers)), "scratch"]
    made = -1000
    auto_gptq(model, tmp_path / "broken", common=quick(text))
    names = ("model.safetensors", "config.json")
    assert [(tmp_path / "whole" / n).read_bytes() == (tmp_path / "broken" / n).read_bytes() for n in names] == [
        True
    ] * 2


def test_statistics_are_taken_once_and_give_the_same_result(tiny_models: Any, tmp_path: Path, text: Path) -> None:
    model = str(tiny_models("mixtral"))
    told: list[str] = []
    calibrate(model, tmp_path / "statistics", common=quick(text, notice=told.append))
    planned = planned_bytes(LayerSource(Path(model)))
    assert told[0] == f"statistics: at most {planned / 1e9:.2f} GB (twice that while they are taken)"
    size = sum(f.stat().st_size for f in (tmp_path / "statistics").glob("*.safetensors"))
    assert 0.3 * planned < size <= 1.05 * planned, "fewer rows than are kept at most came by"
    awq = partial(auto_awq, options=Awq(rounding="nearest", tune_steps=0))  # GPTQ sees inputs of quantized layers
    for name, run in (("awq", awq), ("smooth", smooth_quant)):
        run(model, tmp_path / name, common=quick(text))
        told.clear()
        saved = quick(text, calibration=str(tmp_path / "statistics"), notice=told.append)
        run(model, tmp_path / f"{name}-saved", common=saved)
        assert f"--calib-dataset {text}: not read, for --calibration stands in place of text" in told
        a, b = (load_file(tmp_path / x / "model.safetensors") for x in (name, f"{name}-saved"))
        assert all(torch.equal(a[key], b[key]) for key in a)
    other = str(tiny_models("mixtral", seed=5))
    with pytest.raises(ToolkitError, match="taken from"):
        auto_awq(other, tmp_path / "x", common=quick(text, calibration=str(tmp_path / "statistics")))
    with pytest.raises(UsageError, match="--calibration"):
        mxfp4(model, tmp_path / "x", common=quick(text, calibration=str(tmp_path / "statistics")))
    with pytest.raises(UsageError, match="written by tool lite calibrate"):
        auto_awq(model, tmp_path / "x", common=quick(text, calibration=str(tmp_path / "nosuch")))
    with pytest.raises(UsageError, match="written by tool lite calibrate, found one made by 'lite auto_awq'"):
        auto_awq(model, tmp_path / "x", common=quick(text, calibration=str(tmp_path / "awq")))


@pytest.mark.parametrize(("family", "attention"), [("gemma2", "self_attn"), ("internlm2", "attention")])
def test_scales_of_the_cache(family: str, attention: str, tiny_models: Any, tmp_path: Path, text: Path) -> None:
    """Beside the attention as the family names it, where the runner finds them."""
    from toolkit.configs.engine import PytorchEngineConfig
    from toolkit.engine.process.frontend import AsyncEngine
    from toolkit.runners.choose import open_model

    model = tiny_models(family)
    layers = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    result = kv(str(model), tmp_path / "out", common=quick(text))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    scales = {k: float(v) for k, v in tensors.items() if k.endswith(("k_scale", "v_scale"))}
    assert set(scales) == {f"model.layers.{i}.{attention}.{x}_scale" for i in range(layers) for x in "kv"}
    read = open_model(tmp_path / "out").weights()
    for name, value in scales.items():
        assert float(read[name.replace(f".{attention}.", ".self_attn.")]) == value
    assert all(1e-4 < v < 0.2 for v in scales.values())
    assert 0 < result.quality["kl"] < 0.05
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    logits = []
    for path in (model, tmp_path / "out"):
        with AsyncEngine.open(path, backend_config=PytorchEngineConfig(dtype="float32", session_len=128)) as engine:
            logits.append(engine.score(list(range(10, 40))))
    assert (logits[0] == logits[1]).all(), "weights are untouched"


def test_options_that_cannot_be(tiny_models: Any, tmp_path: Path, text: Path) -> None:
    model = str(tiny_models("llama"))
    cases: list[tuple[Any, Any, str | None, str]] = [
        (auto_gptq, Gptq(w_bits=5), None, "--w-bits"),
        (auto_gptq, Gptq(damp=2.0), None, "--damp"),
        (auto_awq, Awq(rounding="gptq", shrink=1.5), None, "--shrink"),
        (auto_awq, Awq(rounding="up"), None, "--rounding"),
        (auto_awq, Awq(w_bits=3), None, "--format gptq_v2"),
        (smooth_quant, SmoothQuant(quant_dtype="int3"), None, "--quant-dtype"),
        (smooth_quant, SmoothQuant(strength=1.5), None, "--strength"),
        (blocked_fp8, BlockedFp8(scale_fmt="e5m2"), None, "--scale-fmt"),
        (auto_gptq, Gptq(), "w8a8", "--format"),
        (auto_gptq, Gptq(w_sym=False), "gptq", "zero point of 0; .*--format gptq_v2"),
        (smooth_quant, SmoothQuant(quant_dtype="float8_e5m2"), "compressed-tensors", "e4m3"),
        (
            auto_gptq,
            Gptq(desc_act=True, static_groups=False, w_group_size=32),
            "compressed-tensors",
            "act-order",
        ),
    ]
    for run, options, form, words in cases:
        with pytest.raises(UsageError, match=words):
            run(model, tmp_path / "out", options, common=quick(text, format=form))
    assert not (tmp_path / "out").exists()
    auto_gptq(model, tmp_path / "done", common=quick(text))
    for run in (auto_gptq, mxfp4, calibrate, kv):
        with pytest.raises(ToolkitError, match="quantized"):
            run(str(tmp_path / "done"), tmp_path / "again", common=quick(text))


def _opened(path: Path) -> tuple[Any, Any]:
    checkpoint = open_checkpoint(path)
    return checkpoint, load_spec(checkpoint)[1]


def _spec(path: Path) -> Any:
    return load_spec(open_checkpoint(path))[0]


AUTO: dict[str, tuple[Any, str]] = {  # method → how it is run, the format that it chooses for layers of two kinds
    "awq": (lambda m, d, c: auto_awq(m, d, common=c), "compressed-tensors"),
    "awq+gptq": (lambda m, d, c: auto_awq(m, d, Awq(rounding="gptq"), common=c), "compressed-tensors"),
    "gptq": (lambda m, d, c: auto_gptq(m, d, common=c), "gptq"),
    "auto_round": (lambda m, d, c: auto_round(m, d, AutoRound(iters=1), common=c), "auto_round"),
    "search": (lambda m, d, c: search(m, d, Search(bits=4.6), common=c), "compressed-tensors"),
}


@pytest.mark.parametrize("method", AUTO)
def test_inputs_that_no_group_divides(method: str, tiny_models: Any, tmp_path: Path, text: Path) -> None:
    """176 is to 64 what 688 is to 256, which tutorials give a small Llama: 11 times 16."""
    model, told = str(tiny_models("llama", intermediate_size=176)), list[str]()
    run, form = AUTO[method]
    result = run(model, tmp_path / "out", quick(text, notice=told.append))
    assert result.options["format"] == form
    weights = check(tmp_path / "out", result.quality)
    down, up = (weights[f"model.layers.0.mlp.{name}_proj"] for name in ("down", "up"))
    if method == "auto_round":
        assert isinstance(down, Dense | torch.Tensor) and isinstance(up, Dense | torch.Tensor)
        assert "rows or columns of mlp.down_proj, mlp.gate_proj, mlp.up_proj; they stay dense" in " ".join(told)
        return
    assert down.group_size == 176 and up.group_size <= 64
    if method != "search":
        assert "the inputs of mlp.down_proj; they have one scale a row, the others groups of 64" in " ".join(told)


@pytest.mark.parametrize("form", ["awq", "gguf"])
def test_a_format_of_one_group_size_leaves_the_others_dense(
    form: str, tiny_models: Any, tmp_path: Path, text: Path
) -> None:
    model, told = str(tiny_models("llama", intermediate_size=176)), list[str]()
    result = auto_awq(model, tmp_path / "out", common=quick(text, format=form, notice=told.append))
    assert f"they stay dense: {form} holds no row as one group beside others" in " ".join(told)
    assert {layer["name"].rpartition(".")[2] for layer in result.quality["layers"]} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"
    }  # fmt: skip
    if form == "awq":
        check(tmp_path / "out", result.quality)
    odd = str(tiny_models("llama", hidden_size=48, intermediate_size=80))
    told.clear()
    rows = auto_awq(odd, tmp_path / "rows", common=quick(text, notice=told.append))
    assert rows.options["w_group_size"] == -1 and "do not divide the inputs of any layer" in " ".join(told)
    check(tmp_path / "rows", rows.quality)
