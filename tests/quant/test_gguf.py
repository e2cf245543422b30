"""``--format gguf`` and importance from calibration: what was measured is what the file holds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.gguf.container import read_container
from toolkit.artifacts.scales import read_scales
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.artifacts.weights import canonical_weights, validate_checkpoint
from toolkit.convert.formats import rewrite
from toolkit.errors import ToolkitError, UsageError
from toolkit.measure.text import heldout_text
from toolkit.models.registry import load_spec
from toolkit.quant import gguf
from toolkit.quant.calibrate import calibrate
from toolkit.quant.layers.forward import embed, head_logits, layer_forward
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.lite import Common, auto_awq, auto_gptq, auto_round, search
from toolkit.quant.methods import search as finder
from toolkit.quant.options import AutoRound, Awq, Gptq, Search

METHODS: dict[str, tuple[Any, str]] = {
    "awq": (lambda m, d, c: auto_awq(m, d, common=c), "Q4_1"),
    "awq-sym": (lambda m, d, c: auto_awq(m, d, Awq(w_sym=True), common=c), "Q4_0"),
    "awq+gptq": (lambda m, d, c: auto_awq(m, d, Awq(rounding="gptq"), common=c), "Q4_1"),
    "gptq": (lambda m, d, c: auto_gptq(m, d, common=c), "Q4_0"),
    "gptq-8": (lambda m, d, c: auto_gptq(m, d, Gptq(w_bits=8), common=c), "Q8_0"),
    "gptq-3": (lambda m, d, c: auto_gptq(m, d, Gptq(w_bits=3, w_sym=False, w_group_size=-1), common=c), "Q4_1"),
    "auto_round": (lambda m, d, c: auto_round(m, d, AutoRound(iters=1), common=c), "Q4_0"),
}


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> Common:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("It was a bright cold day in April, and the clocks were striking thirteen times. " * 60)
    return Common(
        calib_dataset=str(path), calib_samples=8, calib_seqlen=64, eval_tokens=256, dtype="float32", format="gguf"
    )


def perplexity(file: Path, tokenizer: Path) -> float:
    """Of the file's own numbers on the held-out text."""
    checkpoint = open_checkpoint(file)
    spec, stored = load_spec(checkpoint)
    validate_checkpoint(checkpoint, stored)
    weights = canonical_weights(checkpoint, stored)
    dense = {k: (v if isinstance(v, torch.Tensor) else v.dequantize()).float() for k, v in weights.items()}
    if spec.tied:
        dense[spec.head] = dense[spec.embed]
    ids = torch.tensor(Tokenizer.open(tokenizer).encode(heldout_text(256))[:256])
    hidden = embed(spec, dense[spec.embed], ids[None])
    for layer in spec.layers:
        hidden = layer_forward(layer, dense, hidden)
    return float(torch.nn.functional.cross_entropy(head_logits(spec, dense, hidden)[0, :-1], ids[1:]).exp())


def types_of(file: Path) -> dict[str, str]:
    """Type of every matrix by GGUF name, by the gguf package."""
    import gguf

    return {t.name: t.tensor_type.name for t in gguf.GGUFReader(file).tensors if len(t.shape) > 1}


@pytest.mark.parametrize(
    ("method", "family"),
    [
        ("awq", "llama"), ("awq", "qwen3"), ("awq-sym", "llama"), ("awq+gptq", "llama"), ("gptq", "internlm2"),
        ("gptq-8", "phi3"), ("gptq-3", "qwen3"), ("auto_round", "internlm2"),
    ],
)  # fmt: skip
def test_the_file_holds_what_was_measured(
    method: str, family: str, tiny_models: Any, tmp_path: Path, common: Common
) -> None:
    run, kind = METHODS[method]
    model = tiny_models(family)
    result = run(str(model), tmp_path / "out", common)
    file = tmp_path / "out" / "model.gguf"
    assert result.options["format"] == "gguf" and not list((tmp_path / "out").glob("*.safetensors"))
    found = types_of(file)
    inner = {k for name, k in found.items() if name.startswith("blk.") and "gate_inp" not in name}
    assert inner == {kind}
    assert perplexity(file, model) == pytest.approx(result.quality["perplexity_after"], rel=2e-3)
    scales = read_scales(file)
    assert scales is not None and bool(scales) == method.startswith("awq")
    assert result.quality["size_bytes"] == file.stat().st_size
    assert result.quality["bits_per_weight"] == {"Q4_0": 4.5, "Q4_1": 5.0, "Q8_0": 8.5}[kind]


@pytest.mark.parametrize(
    ("method", "tied", "kind"),
    [("awq", False, "Q4_1"), ("gptq", True, "Q4_0"), ("auto_round", True, "Q4_0"), ("search", True, "Q8_0")],
)
def test_the_head_too(method: str, tied: bool, kind: str, tiny_models: Any, tmp_path: Path, common: Common) -> None:
    """It has a tensor of its own then, also where it was the embedding's."""
    model, out = tiny_models("llama", tie_word_embeddings=tied), tmp_path / "out"
    common = replace(common, quantize_lm_head=True)
    if method == "search":
        result = search(str(model), out, Search(size=200_000), common=common)
        assert result.quality["size_bytes"] <= 200_000
    else:
        result = METHODS[method][0](str(model), out, common)
    types = types_of(out / "model.gguf")
    embed = "Q8_0" if method == "search" else "F32"  # with a size the embedding counts, and is rounded too
    assert types["output.weight"] == kind and types["token_embd.weight"] == embed
    found, near = perplexity(out / "model.gguf", model), 5e-3 if method == "search" else 2e-3
    assert found == pytest.approx(result.quality["perplexity_after"], rel=near)


def test_experts_and_what_the_file_cannot_say(tiny_models: Any, tmp_path: Path, common: Common) -> None:
    quality = auto_awq(str(tiny_models("mixtral")), tmp_path / "out", common=common).quality
    found = types_of(tmp_path / "out" / "model.gguf")
    assert found["blk.0.ffn_down_exps.weight"] == "Q4_1" and found["blk.0.ffn_gate_inp.weight"] == "F32"
    assert quality["types"]["Q4_1"] == 2 * (4 + 3)
    quality = auto_awq(str(tiny_models("qwen2")), tmp_path / "window", common=common).quality
    assert any("window" in note for note in quality["notes"])


def test_what_gguf_cannot_hold(tiny_models: Any, tmp_path: Path, common: Common) -> None:
    model = str(tiny_models("llama"))
    cases: list[tuple[Any, Any, str]] = [
        (auto_gptq, Gptq(w_bits=8, w_sym=False), "asymmetric codes of up to 5 bits"),
        (auto_gptq, Gptq(desc_act=True, static_groups=False, w_group_size=32), "act-order"),
        (search, Search(bits=4.4), "--bits 4.4: too few, 4.50 bits"),
    ]
    for run, options, words in cases:
        with pytest.raises(UsageError, match=words):
            run(model, tmp_path / "out", options, common=common)
    assert not (tmp_path / "out").exists()


def test_what_no_file_can_say_is_told_before_any_work(
    tiny_models: Any, tiny_checkpoint: Any, tmp_path: Path, common: Common
) -> None:
    worked: list[Any] = []
    odd = tiny_checkpoint("llama", tmp_path / "odd")
    tokenizer = json.loads((odd / "tokenizer.json").read_text())
    (odd / "tokenizer.json").write_text(json.dumps(tokenizer | {"normalizer": {"type": "Lowercase"}}))
    for model, words in (
        (tiny_models("falcon_h1"), "has the model's multipliers in its weights, .* leave it out by --skip"),
        (odd, "normalizer: found 'Lowercase'"),
    ):
        with pytest.raises(ToolkitError, match=words):
            auto_gptq(str(model), tmp_path / "out", common=common, progress=lambda *told: worked.append(told))
    assert not worked and not (tmp_path / "out").exists()


def test_search_mixes_types_within_the_budget(
    tiny_models: Any, tmp_path: Path, common: Common, monkeypatch: pytest.MonkeyPatch
) -> None:
    supers = {kind: grid for kind, grid in finder.GGUF_GRIDS.items() if grid.ggml is not None}
    monkeypatch.setattr(finder, "GGUF_GRIDS", supers)
    model = tiny_models("llama", hidden_size=256, intermediate_size=256)
    result = search(str(model), tmp_path / "out", Search(bits=5.4), common=common)
    file = tmp_path / "out" / "model.gguf"
    assert 4.5 < result.quality["bits_per_weight"] <= 5.4
    kinds = {row["kind"] for row in result.quality["search"]}
    assert len(kinds) > 1 and set(types_of(file).values()) >= kinds
    assert perplexity(file, model) == pytest.approx(result.quality["perplexity_after"], rel=2e-3)


def test_search_to_a_file_size(tiny_models: Any, tmp_path: Path, common: Common) -> None:
    model = str(tiny_models("llama"))
    small, large = (
        search(model, tmp_path / str(size), Search(size=size), common=common).quality for size in (112_000, 150_000)
    )
    for quality, size in ((small, 112_000), (large, 150_000)):
        assert 0.85 * size < quality["size_bytes"] <= size
    assert small["bits_per_weight"] < large["bits_per_weight"]
    assert types_of(tmp_path / "112000" / "model.gguf")["token_embd.weight"] == "Q8_0"


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("mixtral", {"num_local_experts": 16, "hidden_size": 2048, "intermediate_size": 32}),
        ("qwen2", {"num_attention_heads": 64, "num_key_value_heads": 64, "hidden_size": 4096}),
    ],
)
def test_what_is_not_quantized_is_never_more_than_was_counted(
    tiny_models: Any, tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    """Routers and biases, float32 in the file, among it: else ``search --size`` makes files beyond its budget."""
    from toolkit.quant.gguf import overhead_bits

    model = tiny_models(family, num_hidden_layers=1, dtype="bfloat16", **changes)
    source = LayerSource(model)
    rewrite(str(model), tmp_path / "m.gguf", to="gguf")
    size = (tmp_path / "m.gguf").stat().st_size
    counted = (finder.fixed_bits(source, [], torch.bfloat16) + overhead_bits(source)) / 8
    assert 0 <= counted - size < 60_000


def test_merges_that_one_architecture_alone_states_are_counted(tiny_checkpoint: Any, tmp_path: Path) -> None:
    """Gemma 4's, half a million: else ``search --size`` makes files beyond its budget."""
    from toolkit.quant.gguf import overhead_bits

    model = tiny_checkpoint("gemma4_text", tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["byte_fallback"] = True
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    rewrite(str(model), tmp_path / "m.gguf", to="gguf")
    merges = read_container(tmp_path / "m.gguf").metadata["tokenizer.ggml.merges"]
    told = overhead_bits(LayerSource(model))
    tokenizer["model"]["merges"] = []
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert told - overhead_bits(LayerSource(model)) == 8 * sum(len(pair.encode()) + 8 for pair in merges) > 0


def test_importance_from_calibration_reaches_the_rounding(
    support: Any, tiny_models: Any, tmp_path: Path, common: Common
) -> None:
    from toolkit.quant.gguf import importance_of

    model = tiny_models("llama")
    calibrate(str(model), tmp_path / "statistics", common=replace(common, format=None, dtype="auto"))
    importance = importance_of(model, tmp_path / "statistics")
    q = importance["model.layers.0.self_attn.q_proj"]
    assert q.shape == (64,) and bool((q > 0).all())
    tool = support("command").tool
    for name, more in (("plain", []), ("weighted", ["--calibration", str(tmp_path / "statistics")])):
        file = tmp_path / f"{name}.gguf"
        done = tool("convert", model, "--to", "gguf", "--gguf-type", "q4_0", "--dst-path", file, *more)
        assert done.returncode == 0, done.stderr
    exact = dense_of(model)["model.layers.0.self_attn.q_proj"]
    lost = {}
    for name in ("plain", "weighted"):
        back = dense_of(tmp_path / f"{name}.gguf")["model.layers.0.self_attn.q_proj"]
        lost[name] = float(((back - exact).square() * q).sum())
    assert lost["weighted"] < lost["plain"]
    for options, words in (
        (["--to", "gguf", "--calibration", "x"], "--calibration"),
        (["--to", "awq", "--calibration", "x"], "--calibration"),
        (["--calibration", "x"], "--calibration"),
    ):
        done = tool("convert", model, "--dst-path", tmp_path / "x", *options)
        assert done.returncode == 2 and words in done.stderr, done.stderr


@pytest.mark.parametrize("kind", ["q4_0", "q5_1", "q8_0", "q4_k_s", "q6_k"])
def test_quantized_files_are_not_quantized_again(tiny_models: Any, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "m.gguf"
    rewrite(str(tiny_models("llama", hidden_size=256, intermediate_size=256)), file, to="gguf", gguf_type=kind)
    found = kind.removesuffix("_s").upper()
    with pytest.raises(ToolkitError, match=rf"already quantized \(gguf {found}\); give the unquantized model"):
        auto_awq(str(file), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_float_files_are_quantized(tiny_models: Any, tmp_path: Path, common: Common, kind: str) -> None:
    rewrite(str(tiny_models("llama")), tmp_path / "m.gguf", to="gguf", gguf_type=kind)
    assert auto_awq(str(tmp_path / "m.gguf"), tmp_path / "out", common=common).quality["types"]["Q4_1"]


def dense_of(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(path)
    weights = canonical_weights(checkpoint, load_spec(checkpoint)[1])
    return {k: (v if isinstance(v, torch.Tensor) else v.dequantize()).float() for k, v in weights.items()}


def test_a_killed_search_goes_on(
    tiny_models: Any, tmp_path: Path, common: Common, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Super-blocks are kept in the saved state like everything else."""
    from toolkit.quant import run

    monkeypatch.setattr(finder, "GGUF_GRIDS", {"Q4_K": finder.GGUF_GRIDS["Q4_K"]})
    model = str(tiny_models("llama", hidden_size=256, intermediate_size=256))
    search(model, tmp_path / "whole", Search(bits=4.9), common=common)
    real = run.write_gguf
    patch = pytest.MonkeyPatch()

    def dies(*args: Any) -> Any:
        raise KeyboardInterrupt

    patch.setattr(run, "write_gguf", dies)
    with pytest.raises(KeyboardInterrupt):
        search(model, tmp_path / "broken", Search(bits=4.9), common=common)
    patch.setattr(run, "write_gguf", real)
    search(model, tmp_path / "broken", Search(bits=4.9), common=common)
    patch.undo()
    a, b = (np.fromfile(tmp_path / x / "model.gguf", np.uint8) for x in ("whole", "broken"))
    same = len(a) == len(b) and (a == b).mean() > 0.999  # general.name is the directory's
    assert same, json.dumps([len(a), len(b)])


def test_a_tower_that_no_file_holds_is_told_before_the_work(tiny_models: Any) -> None:
    source = LayerSource(tiny_models("internvl_chat", shape=1))
    with pytest.raises(ToolkitError, match="internvl has RMS norms where its tower is 3200 wide and nowhere else"):
        gguf.check(source, [])
