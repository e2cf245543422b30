"""``tool convert --to``: tiny models through every format, and back."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from toolkit.artifacts.canonical import GroupInt
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.formats import blocked_fp8
from toolkit.artifacts.formats.ct_scheme import CACHE_SCHEME, cache_config
from toolkit.artifacts.formats.describe import layout_of
from toolkit.artifacts.formats.writers import WRITERS, Writer
from toolkit.artifacts.gguf.container import read_container
from toolkit.artifacts.manifest import read_manifest
from toolkit.artifacts.output import stage
from toolkit.artifacts.rounding import to_group_int
from toolkit.artifacts.scales import Scales, write_scales
from toolkit.artifacts.side_files import copy_side_files
from toolkit.artifacts.text.tokenizer import SLOW_FILES, Tokenizer
from toolkit.artifacts.text_head import find_head, head_numbers, own_modules
from toolkit.artifacts.weights import canonical_weights, validate_checkpoint
from toolkit.convert.formats import FORMATS, rewrite
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import load_spec

PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
GGUF_FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {},
    "internlm2": {"shape": 1},
    "gemma2": {"query_pre_attn_scalar": 32},
    "phi3": {},
}
MIXTURES = {"mixtral": {}, "qwen3_moe": {"mlp_only_layers": []}}


def numbers(path: Path) -> dict[str, torch.Tensor]:
    """Every canonical parameter, dense."""
    checkpoint = open_checkpoint(path)
    _, stored = load_spec(checkpoint)
    validate_checkpoint(checkpoint, stored)
    found = canonical_weights(checkpoint, stored)
    return {k: v.float() if isinstance(v, torch.Tensor) else v.dequantize() for k, v in found.items()}


def same(a: Path, b: Path) -> bool:
    x, y = numbers(a), numbers(b)
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


@pytest.fixture(scope="module")
def quantized(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A tiny llama quantized as ``GroupInt``, in GPTQ (v2) form."""

    def make(family: str = "llama", *, bits: int = 4, group: int = 32, symmetric: bool = True) -> Path:
        source = tiny_models(family, **PLAIN) if family == "llama" else tiny_models(family)
        target = tmp_path_factory.mktemp("quantized") / "m"
        target.mkdir()
        for file in source.glob("*.json"):
            (target / file.name).write_bytes(file.read_bytes())
        tensors, layouts = {}, {}
        g = torch.Generator().manual_seed(bits)
        for name, tensor in load_file(source / "model.safetensors").items():
            if "_proj" not in name:
                tensors[name] = tensor.bfloat16()
                continue
            n_out, n_in = tensor.shape
            zeros = torch.full((n_out, n_in // group), 1 << (bits - 1), dtype=torch.uint8)
            if not symmetric:
                zeros = torch.randint(0, 1 << bits, zeros.shape, generator=g).to(torch.uint8)
            scales = (torch.rand(zeros.shape, generator=g) / 20 + 0.01).half()
            codes = torch.randint(0, 1 << bits, tensor.shape, generator=g).to(torch.uint8)
            weight = GroupInt(codes, scales, zeros, bits, group)
            stem = name.removesuffix(".weight")
            tensors |= WRITERS["gptq_v2"].write(stem, weight)
            layouts[stem] = layout_of(weight)
        save_file(tensors, target / "model.safetensors")
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] = WRITERS["gptq_v2"].config(layouts)
        (target / "config.json").write_text(json.dumps(config))
        return target

    return make


def test_four_bits_go_round_every_format_that_holds_them(quantized: Any, tmp_path: Path) -> None:
    source = quantized()
    path = source
    for step in ("awq", "gptq", "compressed-tensors", "gguf", "gptq_v2", "hf"):
        target = tmp_path / (f"{step}.gguf" if step == "gguf" else step)
        done = rewrite(str(path), target, to=step)
        assert any("lossless" in note for note in done.notes), done.notes
        assert same(source, target)
        path = target
    manifest = read_manifest(path)
    assert manifest is not None and manifest.stage == "convert" and manifest.kind == "checkpoint"
    assert manifest.parent["manifest"]["options"]["to"] == "gptq_v2"


def test_one_group_size_is_found_where_a_group_is_a_whole_row_of_most_linears(quantized: Any, tmp_path: Path) -> None:
    source = quantized(group=64)  # hidden size 64, intermediate 128
    for step in ("awq", "gptq_v2"):
        rewrite(str(source), tmp_path / step, to=step)
        stated = json.loads((tmp_path / step / "config.json").read_text())["quantization_config"]
        assert stated["group_size"] == 64 and "dynamic" not in stated and same(source, tmp_path / step)


@pytest.mark.parametrize(
    ("bits", "symmetric", "to", "kind"),
    [(4, False, "gguf", "Q5_0"), (3, True, "gguf", "Q4_0"), (8, True, "gguf", "Q8_0"), (3, True, "awq", None),
     (2, False, "gptq_v2", None), (8, False, "compressed-tensors", None)],
)  # fmt: skip
def test_other_widths_find_a_form_with_the_same_numbers(
    quantized: Any, tmp_path: Path, bits: int, symmetric: bool, to: str, kind: str | None
) -> None:
    source = quantized(bits=bits, symmetric=symmetric)
    target = tmp_path / ("m.gguf" if to == "gguf" else "m")
    rewrite(str(source), target, to=to)
    assert same(source, target)
    if kind is not None:
        assert open_checkpoint(target).info("model.layers.0.mlp.up_proj.weight").dtype == kind


@pytest.mark.parametrize(
    ("bits", "symmetric", "options", "words"),
    [
        (4, False, {"to": "gptq"}, ("zero point of 0", "gptq_v2")),
        (8, True, {"to": "awq"}, ("AWQ holds 4-bit",)),
        (4, True, {"to": "w8a8"}, ("W8A8 holds",)),
        (4, True, {"to": "fp8"}, ("blocked fp8 holds",)),
        (4, True, {"to": "mxfp4"}, ("mxfp4 holds",)),
        (4, True, {"to": "gguf", "gguf_type": "q4_1"}, ("Q4_1", "Q4_0 holds it exactly")),
    ],
)
def test_quantized_weights_are_never_rounded_again(
    quantized: Any, tmp_path: Path, bits: int, symmetric: bool, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    source = quantized(bits=bits, symmetric=symmetric)
    target = tmp_path / ("m.gguf" if options["to"] == "gguf" else "m")
    with pytest.raises(ToolkitError) as caught:
        rewrite(str(source), target, **options)
    message = str(caught.value)
    assert all(word in message for word in (*words, str(source), "_proj")) and "\n" not in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_head_is_named_for_auto_round(quantized: Any, tmp_path: Path, bits: int) -> None:
    source = quantized()
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    head = to_group_int(tensors.pop("lm_head.weight").float(), bits, 32)
    save_file(tensors | WRITERS["gptq_v2"].write("lm_head", head), source / "model.safetensors")
    config["quantization_config"] |= {"lm_head": True, "dynamic": {"+:^lm_head$": {"bits": bits}}}
    (source / "config.json").write_text(json.dumps(config))
    done = rewrite(str(source), tmp_path / "m", to="auto_round")
    stated = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    assert stated["extra_config"] == {"lm_head": {"bits": bits, "group_size": 32, "sym": bits == 8}}
    assert same(source, tmp_path / "m") and any("lossless" in note for note in done.notes)


@pytest.mark.parametrize("to", ["awq", "gptq", "gptq_v2", "auto_round", "compressed-tensors"])
@pytest.mark.parametrize("source", ["hf", "gguf", "kv"])
def test_dense_models_are_sent_to_lite(
    tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, to: str
) -> None:
    """Before a byte is written, also where a file of floats or scales of the KV cache alone look like a format."""
    model = tiny_models("llama", **PLAIN)
    if source == "gguf":
        rewrite(str(model), tmp_path / "dense.gguf", to="gguf", gguf_type="bf16")
        model = tmp_path / "dense.gguf"
    elif source == "kv":
        model = with_cache_scales(model, tmp_path / "kv")
    before = sorted(tmp_path.iterdir())
    monkeypatch.setattr("toolkit.convert.formats.open_stage", lambda *_, **__: pytest.fail("something was written"))
    with pytest.raises(ToolkitError, match=f"{model.name}: not quantized, and {to} needs calibration: use tool lite"):
        rewrite(str(model), tmp_path / "m", to=to)
    assert sorted(tmp_path.iterdir()) == before


def with_cache_scales(model: Path, target: Path) -> Path:
    """A dense checkpoint as ``tool lite kv`` leaves it."""
    target.mkdir()
    scales = {f"model.layers.{i}.self_attn.{x}_scale": torch.tensor([0.5 + i]) for i in range(2) for x in "kv"}
    save_file(load_file(model / "model.safetensors") | scales, target / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": cache_config(CACHE_SCHEME)}))
    return target


@pytest.mark.parametrize("to", ["w8a8", "fp8", "mxfp4"])
def test_a_model_with_scales_of_its_cache_alone_is_rounded_whole(tiny_models: Any, tmp_path: Path, to: str) -> None:
    source = with_cache_scales(tiny_models("llama", **PLAIN), tmp_path / "kv")
    done = rewrite(str(source), tmp_path / "m", to=to)
    assert done.manifest is not None and len(done.manifest.quality["layers"]) == 14


@pytest.mark.parametrize("to", ["w8a8", "fp8", "mxfp4"])
def test_linears_that_were_left_dense_stay_so(tiny_models: Any, tmp_path: Path, to: str) -> None:
    rewrite(str(tiny_models("llama", **PLAIN)), tmp_path / "all", to=to)
    partly = tmp_path / "partly"
    partly.mkdir()
    dense = load_file(tiny_models("llama", **PLAIN) / "model.safetensors")
    tensors = load_file(tmp_path / "all" / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "down_proj" not in name}
    kept |= {name: tensor for name, tensor in dense.items() if "down_proj" in name}
    save_file(kept, partly / "model.safetensors")
    config = json.loads((tmp_path / "all" / "config.json").read_text())
    skipped = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    config["quantization_config"]["modules_to_not_convert"] = skipped
    (partly / "config.json").write_text(json.dumps(config))
    done = rewrite(str(partly), tmp_path / "again", to=to)
    assert same(partly, tmp_path / "again") and any("lossless" in note for note in done.notes)
    stated = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert set(stated["modules_to_not_convert"]) >= set(skipped)


@pytest.mark.parametrize(
    ("to", "field"),
    [
        ("fp8", "modules_to_not_convert"),
        ("w8a8", "modules_to_not_convert"),
        ("compressed-tensors", "ignore"),
    ],
)
def test_what_a_model_sees_with_is_named_as_dense(tiny_models: Any, tmp_path: Path, to: str, field: str) -> None:
    source = tiny_models("qwen2_vl")
    if to == "compressed-tensors":
        rewrite(str(source), tmp_path / "w8a8", to="w8a8")
        source = tmp_path / "w8a8"
    rewrite(str(source), tmp_path / "m", to=to)
    stated = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    seeing = [n for n in open_checkpoint(source).names() if "visual" in n and n.endswith(("qkv.weight", "fc1.weight"))]
    assert seeing and {n.removesuffix(".weight") for n in seeing} <= set(stated[field])


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_a_classifier_keeps_its_head_among_its_weights(tiny_models: Any, tmp_path: Path, family: str) -> None:
    """Where other tools look for it; they are told that it is dense."""
    source, target = tiny_models(family, labels=3), tmp_path / "m"
    rewrite(str(source), target, to="w8a8")
    heads = own_modules(open_checkpoint(source))
    assert "classifier" in heads and not list(target.glob("text_head*"))
    tensors, exact = load_file(target / "model.safetensors"), load_file(source / "model.safetensors")
    assert all(torch.equal(tensors[f"{name}.weight"], exact[f"{name}.weight"]) for name in heads)
    stated = json.loads((target / "config.json").read_text())["quantization_config"]
    assert set(heads) <= set(stated["modules_to_not_convert"])
    head = find_head(target)
    assert head is not None and head == find_head(source)
    before, after = head_numbers(source, head), head_numbers(target, head)
    assert before.keys() == after.keys() and all((before[name] == after[name]).all() for name in before)


def test_modules_of_sentence_transformers_stay_as_they_were(tiny_models: Any, tmp_path: Path) -> None:
    """Other tools pool by them: without they take the first token's vector, or the mean."""
    source = Path(shutil.copytree(tiny_models("bert"), tmp_path / "st"))
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense", "3_Normalize": "Normalize"}
    entries = [{"type": f"sentence_transformers.models.{kind}", "path": path} for path, kind in kinds.items()]
    (source / "modules.json").write_text(json.dumps(entries))
    for path in ("1_Pooling", "2_Dense"):
        (source / path).mkdir()
    (source / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (source / "2_Dense" / "config.json").write_text(json.dumps({"activation_function": "torch.nn.Identity"}))
    save_file({"linear.weight": torch.randn(8, 64)}, source / "2_Dense" / "model.safetensors")
    rewrite(str(source), tmp_path / "m", to="w8a8")
    kept = ("modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors")
    assert all((tmp_path / "m" / name).read_bytes() == (source / name).read_bytes() for name in kept)
    assert not list((tmp_path / "m").glob("text_head*")) and find_head(tmp_path / "m") == find_head(source)
    manifest = read_manifest(tmp_path / "m")
    assert manifest is not None and set(kept) <= {entry.name for entry in manifest.files}


@pytest.mark.parametrize("to", ["awq", "gptq", "gptq_v2", "auto_round"])
def test_a_model_whose_head_alone_is_quantized_is_quantized(tiny_models: Any, tmp_path: Path, to: str) -> None:
    head = tmp_path / "head"
    head.mkdir()
    tensors = load_file(tiny_models("llama", **PLAIN) / "model.safetensors")
    dense = tensors.pop("lm_head.weight")
    code = to_group_int(dense, 4, 32)
    tensors |= WRITERS["gptq_v2"].write("lm_head", code)
    save_file(tensors, head / "model.safetensors")
    config = json.loads((tiny_models("llama", **PLAIN) / "config.json").read_text())
    layouts = {name.removesuffix(".weight"): None for name in tensors if name.endswith("_proj.weight")}
    config["quantization_config"] = WRITERS["gptq_v2"].config(layouts | {"lm_head": layout_of(code)})
    (head / "config.json").write_text(json.dumps(config))
    rewrite(str(head), tmp_path / "out", to=to)
    assert same(head, tmp_path / "out")


@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral", "internlm2", "gemma2"])
@pytest.mark.parametrize("to", ["w8a8", "fp8", "mxfp4"])
def test_dense_models_are_rounded_and_it_is_said(tiny_models: Any, tmp_path: Path, family: str, to: str) -> None:
    source = tiny_models(family)
    done = rewrite(str(source), tmp_path / "m", to=to)
    assert any("rounded" in note for note in done.notes)
    assert done.manifest is not None and done.manifest.quality["layers"][0]["rel_error"] > 0
    before, after = numbers(source), numbers(tmp_path / "m")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        limit = {"w8a8": 0.02, "fp8": 0.04, "mxfp4": 0.2}[to] if "_proj" in name and weight.dim() == 2 else 0
        assert float((after[name] - weight).norm()) <= limit * float(weight.norm()), name
    # and from there without loss
    rewrite(str(tmp_path / "m"), tmp_path / "ct", to="compressed-tensors")
    assert same(tmp_path / "m", tmp_path / "ct")


@pytest.mark.parametrize("family", list(GGUF_FAMILIES))
def test_gguf_of_every_family_reads_back_as_the_same_model(tiny_models: Any, tmp_path: Path, family: str) -> None:
    """Spec, numbers and tokenizer survive: rope permutation, norms plus one, fused and split matrices."""
    source = tiny_models(family, **GGUF_FAMILIES[family])
    done = rewrite(str(source), tmp_path / "m.gguf", to="gguf")
    assert done.manifest is None and any("lossless" in note for note in done.notes)
    before, after = numbers(source), numbers(tmp_path / "m.gguf")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        # Gemma's norms are stored plus one, which costs their last bits
        assert torch.allclose(after[name], weight, rtol=0, atol=2e-7 if weight.dim() == 1 else 0), name
    ours, theirs = load_spec(open_checkpoint(source))[0], load_spec(open_checkpoint(tmp_path / "m.gguf"))[0]
    for (_, a), (_, b) in zip(ours.attention_layers(), theirs.attention_layers(), strict=True):
        assert (a.heads, a.kv_heads, a.head_dim, a.softcap) == (b.heads, b.kv_heads, b.head_dim, b.softcap)
        assert a.scale == pytest.approx(b.scale) and a.rope is not None and b.rope is not None
        assert (a.rope.theta, a.rope.rotary_dim) == (b.rope.theta, b.rope.rotary_dim)
    assert (ours.tied, ours.vocab_size, ours.final_norm.eps) == (theirs.tied, theirs.vocab_size, theirs.final_norm.eps)
    text = "Call me Ishmael. <|im_start|>\n 12 foxes  ünder"
    one, two = (Tokenizer.open(open_checkpoint(p).tokenizer_dir) for p in (source, tmp_path / "m.gguf"))
    assert one.encode(text) == two.encode(text)
    assert one.chat_template == two.chat_template


def test_a_gguf_that_grows_says_so_and_how_a_small_one_is_made(tiny_models: Any, tmp_path: Path) -> None:
    """What 688 columns in groups of a row are to a Llama of 256: blocks of 32 do not divide them."""
    from toolkit.quant.lite import Common, auto_gptq

    source = str(tiny_models("llama", **PLAIN, intermediate_size=176))
    text = tmp_path / "text.txt"
    text.write_text("One two three four five six seven. " * 100)
    quick = Common(calib_dataset=str(text), calib_samples=4, calib_seqlen=32, eval_tokens=64)
    auto_gptq(source, tmp_path / "odd", common=quick)
    done = rewrite(str(tmp_path / "odd"), tmp_path / "odd.gguf", to="gguf")
    (grown,) = (note for note in done.notes if "larger" in note)
    assert grown.startswith("F32 for ffn_down, which makes the file larger: no smaller type holds 4-bit integers")
    assert "176 columns" in grown and "by --gguf-type q4_k_m" in grown and "lossless" in done.notes[-1]
    assert same(tmp_path / "odd", tmp_path / "odd.gguf")
    plain = rewrite(source, tmp_path / "plain.gguf", to="gguf")
    assert "--gguf-type q4_k_m makes" in plain.notes[0] and not any("larger" in note for note in plain.notes)
    small = rewrite(source, tmp_path / "small.gguf", to="gguf", gguf_type="q4_k_m")
    assert not any("--gguf-type" in note for note in small.notes)
    assert any("F16 instead of Q6_K for ffn_down" in note for note in small.notes), small.notes


@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m", "bf16"])
def test_gguf_types_round_and_say_so(tiny_models: Any, tmp_path: Path, kind: str) -> None:
    import gguf

    source = tiny_models("llama", **PLAIN, hidden_size=256, num_attention_heads=4, intermediate_size=320)
    done = rewrite(str(source), tmp_path / "m.gguf", to="gguf", gguf_type=kind)
    found = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert any("rounded" in note for note in done.notes)
    assert found["blk.0.attn_norm.weight"] == "F32"
    if kind == "q4_k_m":
        assert found["blk.0.attn_q.weight"] == "Q4_K" and found["output.weight"] == "Q6_K"
        assert found["blk.0.ffn_down.weight"] == "Q5_0"  # 320 columns
        assert any("Q5_0 instead of Q4_K for ffn_down" in note and "320" in note for note in done.notes)
    before, after = numbers(source), numbers(tmp_path / "m.gguf")
    for name, weight in before.items():
        limit = {"q8_0": 0.01, "q4_k_m": 0.12, "bf16": 0.004}[kind] if weight.dim() == 2 else 0
        assert float((after[name] - weight).norm()) <= limit * float(weight.norm()), name
    again = rewrite(str(tmp_path / "m.gguf"), tmp_path / "again.gguf", to="gguf")
    assert any("lossless" in note for note in again.notes) and same(tmp_path / "m.gguf", tmp_path / "again.gguf")


@pytest.mark.parametrize(("kind", "wanted", "block"), [("q8_0", "Q8_0", 32), ("q4_k_m", "Q4_K", 256)])
def test_blocks_that_do_not_divide_are_named(
    tiny_models: Any, tmp_path: Path, kind: str, wanted: str, block: int
) -> None:
    done = rewrite(str(tiny_models("llama", intermediate_size=48)), tmp_path / "m.gguf", to="gguf", gguf_type=kind)
    note = next(note for note in done.notes if "ffn_down" in note)
    assert f"F16 instead of {wanted} for ffn_down: blocks of {block} do not divide 48 columns" in note


@pytest.mark.parametrize("family", list(MIXTURES))
def test_experts_become_one_tensor_a_layer(tiny_models: Any, tmp_path: Path, family: str) -> None:
    import gguf

    source = tiny_models(family, **MIXTURES[family])
    rewrite(str(source), tmp_path / "m.gguf", to="gguf", gguf_type="f32")
    found = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    for name, weight in numbers(source).items():
        parts = name.split(".")
        if "experts" not in parts:
            continue
        kind = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}[parts[-1]]
        stacked = found[f"blk.{parts[2]}.ffn_{kind}_exps.weight"]
        assert torch.equal(torch.from_numpy(stacked[int(parts[5])].copy()), weight)
    assert found["blk.0.ffn_gate_inp.weight"].dtype == "float32"


@pytest.mark.parametrize("family", list(MIXTURES))
@pytest.mark.parametrize("kind", ["bf16", "q8_0", "q4_0"])
def test_experts_come_back_one_by_one(tiny_models: Any, tmp_path: Path, family: str, kind: str) -> None:
    """The same model with the numbers that the gguf package reads, and the same file when it is written again."""
    import gguf

    source = tiny_models(family, **MIXTURES[family], dtype="bfloat16")
    file, again = tmp_path / "m.gguf", tmp_path / "again.gguf"
    rewrite(str(source), file, to="gguf", gguf_type=kind)
    rewrite(str(file), again, to="gguf")
    one, two = ([(t.name, t.tensor_type, t.data.tobytes()) for t in gguf.GGUFReader(p).tensors] for p in (file, again))
    assert one == two
    assert load_spec(open_checkpoint(source))[0] == load_spec(open_checkpoint(file))[0]
    want, found = numbers(source), numbers(file)
    assert found.keys() == want.keys()
    read = {t.name: t for t in gguf.GGUFReader(file).tensors}
    for name, weight in want.items():
        parts = name.split(".")
        if "experts" in parts:
            stacked = read[f"blk.{parts[2]}.ffn_{parts[-1].removesuffix('_proj')}_exps.weight"]
            expert = gguf.dequantize(stacked.data, stacked.tensor_type)[int(parts[5])]
            assert stacked.tensor_type.name == kind.upper() and torch.equal(found[name], torch.from_numpy(expert)), name
        exact = kind == "bf16" or weight.dim() == 1 or name.endswith("mlp.gate")
        assert torch.equal(found[name], weight) == exact, name


@pytest.mark.parametrize("family", list(MIXTURES))
@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
def test_experts_in_gguf_run_as_in_transformers(
    tiny_models: Any, tmp_path: Path, support: Any, family: str, kind: str
) -> None:
    from transformers import AutoModelForCausalLM

    from toolkit.runners.base import RunnerOptions
    from toolkit.runners.choose import open_runner

    source = tiny_models(family, **MIXTURES[family], dtype="bfloat16")
    rewrite(str(source), tmp_path / "m.gguf", to="gguf", gguf_type=kind)
    if kind != "bf16":
        source = rewrite(str(tmp_path / "m.gguf"), tmp_path / "dense", to="hf").path
    ids = list(range(5, 60))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    runner, _ = open_runner(
        tmp_path / "m.gguf", backend="pytorch", options=RunnerOptions(dtype="float32", block_size=16, device="cpu")
    )
    driver = support("steps").Driver(runner, 64)
    found = torch.from_numpy(driver.step({driver.add(): ids}, "all").logits)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_experts_at_odds_with_the_metadata(tiny_models: Any, tmp_path: Path) -> None:
    """Counts, dimensions and files that end early are one line."""
    file = tmp_path / "m.gguf"
    rewrite(str(tiny_models("mixtral")), file, to="gguf")
    raw = file.read_bytes()
    key = b"llama.expert_count" + (4).to_bytes(4, "little")
    for changed in (
        raw.replace(key + b"\x04", key + b"\x05"),
        raw.replace(key + b"\x04", key + b"\x00"),
        raw.replace(b"ffn_down_exps", b"ffn_town_exps"),
        raw.replace(b"blk.0.ffn_up_exps.weight\x03", b"blk.0.ffn_up_exps.weight\x02"),
        raw[:-9000],
    ):
        assert changed != raw
        file.write_bytes(changed)
        with pytest.raises(ToolkitError) as caught:
            numbers(file)
        assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral"])
def test_importance_reaches_the_rounding(tiny_models: Any, tmp_path: Path, family: str) -> None:
    """Under the names of the linears that calibration sees, also where a file has them fused or stacked."""
    from toolkit.quant.layers.source import LayerSource

    source = tiny_models(family)
    importance = {}
    for i, linear in enumerate(LayerSource(source).quantizable()):
        importance[linear.name] = torch.ones(linear.in_features)
        first = 8 * (i % 4) if linear.name.endswith(("o_proj", "down_proj")) else 0  # the others share their inputs
        importance[linear.name][first : first + 8] = 100.0
    rewrite(str(source), tmp_path / "a.gguf", to="gguf", gguf_type="q4_0")
    rewrite(str(source), tmp_path / "b.gguf", to="gguf", gguf_type="q4_0", importance=importance)
    want, a, b = (numbers(p) for p in (source, tmp_path / "a.gguf", tmp_path / "b.gguf"))
    for name, weight in importance.items():
        lost_a, lost_b = (float(((x[name] - want[name]).square() * weight).sum()) for x in (a, b))
        assert lost_b < lost_a, name


def test_the_same_command_again_finds_its_result(tiny_models: Any, tmp_path: Path) -> None:
    source = str(tiny_models("llama"))
    assert not rewrite(source, tmp_path / "m", to="w8a8").already_there
    assert rewrite(source, tmp_path / "m", to="w8a8").already_there
    with pytest.raises(UsageError, match="not empty"):
        rewrite(source, tmp_path / "m", to="fp8")
    assert not rewrite(source, tmp_path / "m", to="fp8", overwrite=True).already_there


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.json", {"chat_template": "{{ messages }} one"}),
        ("tokenizer_config.json", {"chat_template": [{"name": "rag", "template": "{{ messages }} one"}]}),
    ],
)
def test_gguf_has_the_chat_template_that_the_model_is_served_with(
    tiny_models: Any, tmp_path: Path, name: str, content: dict[str, Any]
) -> None:
    model = shutil.copytree(tiny_models("llama", **PLAIN), tmp_path / "model")
    (model / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    earlier = json.loads((model / name).read_text()) if (model / name).is_file() else {}
    (model / name).write_text(json.dumps({**earlier, **content}))
    rewrite(str(model), tmp_path / "m.gguf", to="gguf", gguf_type="q8_0")
    assert read_container(tmp_path / "m.gguf").metadata["tokenizer.chat_template"] == "{{ messages }} one"


def test_gguf_has_all_chat_templates_of_the_model(tiny_models: Any, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_models("llama", **PLAIN), tmp_path / "model")
    (model / "additional_chat_templates").mkdir()
    for name in ("rag", "tool_use"):
        (model / "additional_chat_templates" / f"{name}.jinja").write_text(f"{name} {{{{ messages }}}}")
    rewrite(str(model), tmp_path / "m.gguf", to="gguf", gguf_type="q8_0")
    assert read_container(tmp_path / "m.gguf").metadata["tokenizer.chat_templates"] == ["rag", "tool_use"]
    ours, theirs = (Tokenizer.open(open_checkpoint(p).tokenizer_dir) for p in (tmp_path / "m.gguf", model))
    assert len(ours.chat_templates) == 3 and ours.chat_templates == theirs.chat_templates


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("llama", {"attention_factor": 2.0}),
        ("llama", {"attention_factor": 1.0}),
        ("llama", {"mscale": 1.0, "mscale_all_dim": 0.5}),
        ("llama", {"beta_fast": 16.0, "beta_slow": 2.0}),
        ("deepseek_v2", {"mscale": 0.7, "mscale_all_dim": 0.7, "beta_fast": 16.0}),
    ],
)
def test_gguf_turns_by_the_model_s_yarn(tiny_models: Any, tmp_path: Path, family: str, more: dict[str, Any]) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128, **more}
    model = tiny_models(family, rope_parameters=rope)
    rewrite(str(model), tmp_path / "m.gguf", to="gguf", gguf_type="q8_0")
    (wanted, found) = (load_spec(open_checkpoint(path))[0] for path in (model, tmp_path / "m.gguf"))
    for before, after in zip(wanted.mixers(), found.mixers(), strict=True):
        old, new = getattr(before[1], "rope", None), getattr(after[1], "rope", None)
        if old is not None:
            assert new.attention_factor == pytest.approx(old.attention_factor)
            assert (new.kind, new.factor, new.beta_fast, new.beta_slow) == ("yarn", 4.0, old.beta_fast, old.beta_slow)


def test_a_broken_tokenizer_is_one_line(tiny_models: Any, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_models("llama", **PLAIN), tmp_path / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps({**tokenizer, "added_tokens": [5]}))
    with pytest.raises(ToolkitError, match=r"tokenizer\.json"):
        rewrite(str(model), tmp_path / "m.gguf", to="gguf", gguf_type="q8_0")


@pytest.mark.parametrize("to", ["hf", "w8a8", "gguf"])
def test_what_is_left_out_is_told(tiny_models: Any, tmp_path: Path, to: str) -> None:
    """Such as layers for multi-token prediction; not the scales of a KV cache, which have a line of their own."""
    model = shutil.copytree(tiny_models("llama", **PLAIN), tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    more = {"mtp.fc.weight": torch.ones(4, 4), "model.layers.0.self_attn.k_scale": torch.ones(1)}
    save_file({**tensors, **more}, model / "model.safetensors", {"format": "pt"})
    done = rewrite(str(model), tmp_path / "m", to=to)
    assert [note for note in done.notes if "as nothing here computes them: 1 tensors, mtp.fc.… (1)" in note]


def test_a_gguf_file_has_the_name_of_the_hub(tiny_models: Any, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--acme--Tiny-1B" / "snapshots" / ("0" * 40)
    shutil.copytree(tiny_models("llama", **PLAIN), snapshot)
    for source, name in ((snapshot, "Tiny-1B"), (tiny_models("llama", **PLAIN), tiny_models("llama", **PLAIN).name)):
        rewrite(str(source), tmp_path / f"{name}.gguf", to="gguf")
        assert read_container(tmp_path / f"{name}.gguf").metadata["general.name"] == name


def test_gguf_into_a_directory_has_a_manifest(tiny_models: Any, tmp_path: Path) -> None:
    done = rewrite(str(tiny_models("llama", **PLAIN)), tmp_path / "m", to="gguf", gguf_type="q8_0")
    assert done.manifest is not None and (tmp_path / "m" / "model.gguf").is_file()
    assert [entry.name for entry in done.manifest.files] == ["model.gguf"]


def test_a_gguf_file_is_not_replaced_unasked(tiny_models: Any, tmp_path: Path) -> None:
    source, target = str(tiny_models("llama", **PLAIN)), tmp_path / "m.gguf"
    rewrite(source, target, to="gguf")
    before = target.read_bytes()
    with pytest.raises(UsageError, match="--overwrite"):
        rewrite(source, target, to="gguf")
    with pytest.raises(UsageError, match="the model itself"):
        rewrite(str(target), target, to="gguf", overwrite=True)
    rewrite(source, target, to="gguf", overwrite=True)
    assert target.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf"]


def test_the_scales_of_a_gguf_file_are_replaced_with_it(
    tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or neither is: those of the old file went before the new one was in its place."""
    shutil.copytree(tiny_models("llama", **PLAIN), tmp_path / "model")
    target, scales = tmp_path / "m.gguf", tmp_path / "m.gguf.scales"
    write_scales(tmp_path / "model", {"a": Scales(torch.ones(3))})
    rewrite(str(tmp_path / "model"), target, to="gguf")
    before = (target.read_bytes(), scales.read_bytes())
    (tmp_path / "model" / "folded.scales").unlink()

    def fails(*arguments: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(stage.os, "replace", fails)
        with pytest.raises(ToolkitError, match="Input/output error"):
            rewrite(str(tmp_path / "model"), target, to="gguf", gguf_type="q8_0", overwrite=True)
    assert (target.read_bytes(), scales.read_bytes()) == before
    rewrite(str(tmp_path / "model"), target, to="gguf", gguf_type="q8_0", overwrite=True)
    assert target.read_bytes() != before[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "model"]


def test_what_an_older_model_saw_with_goes_with_its_gguf_file(tiny_models: Any, tmp_path: Path) -> None:
    """Else one that does not see would be opened with it; what this tool has not written stays."""
    source, target, eyes = str(tiny_models("llama", **PLAIN)), tmp_path / "m.gguf", tmp_path / "mmproj-m.gguf"
    rewrite(source, target, to="gguf")
    shutil.copyfile(target, eyes)  # any file of ours by that name
    rewrite(source, target, to="gguf", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf"]
    eyes.write_text("of somebody else")
    rewrite(source, target, to="gguf", overwrite=True)
    assert eyes.read_text() == "of somebody else"


def test_a_gguf_file_of_an_artifact_is_not_replaced_alone(tiny_models: Any, tmp_path: Path) -> None:
    """Its manifest would tell of another file."""
    source = str(tiny_models("llama", **PLAIN))
    rewrite(source, tmp_path / "m", to="gguf")
    with pytest.raises(UsageError, match="is a file of the artifact"):
        rewrite(source, tmp_path / "m" / "model.gguf", to="gguf", gguf_type="q8_0", overwrite=True)


def test_two_runs_do_not_write_one_gguf_file(tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second says so in one line, whichever part the first is at; the file is the first one's."""
    from toolkit.artifacts.gguf import export as gguf_export

    source, target = str(tiny_models("llama", **PLAIN)), tmp_path / "m.gguf"
    code = "import sys; from toolkit.commands.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "convert", source, "--to", "gguf", "--dst-path", str(target), "--overwrite"]
    real, seen = gguf_export.write_gguf, []

    def meanwhile(*arguments: Any) -> None:
        seen.append(subprocess.run(command, capture_output=True, text=True, check=False))
        real(*arguments)

    monkeypatch.setattr(gguf_export, "write_gguf", meanwhile)
    rewrite(source, target, to="gguf", gguf_type="q8_0")
    (second,) = seen
    assert second.returncode == 1 and len(second.stderr.strip().splitlines()) == 1, second.stderr
    assert f"{target}: another process is writing it" in second.stderr
    assert open_checkpoint(target).info("model.layers.0.mlp.up_proj.weight").dtype == "Q8_0"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf"]


def test_a_gguf_file_that_cannot_be_finished_leaves_nothing(
    tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toolkit.artifacts.gguf import export as gguf_export

    def fails(path: Path, *_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_export, "write_gguf", fails)
    with pytest.raises(ToolkitError, match=r"m\.gguf: disk full"):
        rewrite(str(tiny_models("llama", **PLAIN)), tmp_path / "m.gguf", to="gguf")
    assert list(tmp_path.iterdir()) == []


def test_hf_in_another_dtype_says_that_it_rounds(tiny_models: Any, tmp_path: Path) -> None:
    source = tiny_models("llama")
    done = rewrite(str(source), tmp_path / "m", to="hf", dtype="bfloat16")
    assert any("rounded to bfloat16" in note for note in done.notes)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}


def test_stacks_and_vectors_that_are_rounded_are_told_too(tiny_models: Any, tmp_path: Path) -> None:
    done = rewrite(str(tiny_models("gpt_oss")), tmp_path / "all", to="hf", dtype="bfloat16")
    before, after = (load_file(path / "model.safetensors") for path in (tiny_models("gpt_oss"), tmp_path / "all"))
    changed = sum(not torch.equal(before[name], after[name].float()) for name in before)
    assert done.notes[0].startswith(f"{changed} tensors rounded to bfloat16")
    alone = tmp_path / "alone"  # a vector in float32 among bfloat16, as those of states often are
    shutil.copytree(tmp_path / "all", alone)
    name = "model.layers.0.self_attn.sinks"
    save_file(after | {name: before[name]}, alone / "model.safetensors", {"format": "pt"})
    (alone / "manifest.json").unlink()
    done = rewrite(str(alone), tmp_path / "again", to="hf", dtype="bfloat16")
    assert done.notes[0].startswith("1 tensors rounded to bfloat16")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"to": "exl2"}, "--to"),
        ({"to": "gguf", "gguf_type": "q3_k_m"}, "does not write"),
        ({"to": "hf", "gguf_type": "q8_0"}, "--gguf-type"),
        ({"to": "w8a8", "dtype": "float16"}, "--dtype"),
        ({"to": "hf", "dtype": "int8"}, "--dtype"),
    ],
)
def test_wrong_options(tiny_models: Any, tmp_path: Path, options: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        rewrite(str(tiny_models("llama")), tmp_path / "m", **options)


def test_biases_come_back_or_are_refused(tiny_models: Any, tmp_path: Path) -> None:
    source = tiny_models("llama", **PLAIN, attention_bias=True, mlp_bias=True)
    rewrite(str(source), tmp_path / "m.gguf", to="gguf")
    assert same(source, tmp_path / "m.gguf")
    assert load_spec(open_checkpoint(source))[0] == load_spec(open_checkpoint(tmp_path / "m.gguf"))[0]
    for family, changes in (("qwen3", {}), ("qwen3_moe", {"mlp_only_layers": []})):
        with pytest.raises(
            ToolkitError, match=r"has no biases, this model has model\.layers\.0\.self_attn\.q_proj\.bias"
        ):
            rewrite(str(tiny_models(family, **changes, attention_bias=True)), tmp_path / "x.gguf", to="gguf")


def test_models_that_gguf_cannot_express_are_refused(tiny_models: Any, tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="scales queries"):
        rewrite(str(tiny_models("gemma2")), tmp_path / "m.gguf", to="gguf")
    done = rewrite(str(tiny_models("internlm2")), tmp_path / "i.gguf", to="gguf")
    assert any("dynamic rope" in note for note in done.notes)
    done = rewrite(str(tiny_models("mistral")), tmp_path / "s.gguf", to="gguf")
    assert any("sliding window" in note for note in done.notes)


def test_the_command(support: Any, tiny_models: Any, tmp_path: Path) -> None:
    source = tiny_models("llama", **PLAIN)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return support("command").tool("convert", source, *arguments)

    done = run("--to", "gguf", "--gguf-type", "q8_0", "--dst-path", str(tmp_path / "m.gguf"))
    assert done.returncode == 0 and "Q8_0" in done.stdout and (tmp_path / "m.gguf").is_file()
    for arguments in (["--gguf-type", "q8_0"], ["--to", "hf", "--target", "torch"], ["--to", "nonsense"]):
        done = run(*arguments, "--dst-path", str(tmp_path / "x"))
        assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("to", ["compressed-tensors", "hf", "fp8", "auto_round", "gguf"])
def test_scales_of_a_float8_cache_are_kept_or_missed_aloud(quantized: Any, tmp_path: Path, to: str) -> None:
    source = quantized()
    scales = {f"model.layers.{i}.self_attn.{x}_scale": torch.tensor([0.5 + i]) for i in range(2) for x in "kv"}
    if to == "fp8":  # which four bits cannot be
        rewrite(str(source), tmp_path / "dense", to="hf")
        source = tmp_path / "dense"
    save_file(load_file(source / "model.safetensors") | scales, source / "model.safetensors")
    (source / "manifest.json").unlink(missing_ok=True)  # it tells that the tensors were changed
    done = rewrite(str(source), tmp_path / "q", to=to)
    missed = [note for note in done.notes if "KV cache" in note]
    if to in ("auto_round", "gguf"):
        assert missed == [
            f"4 scales of a float8 KV cache are left out, for which {to} has no place; compressed-tensors, fp8, hf do"
        ]
        return
    found = open_checkpoint(tmp_path / "q")
    assert {name: found.tensor(name).tolist() for name in scales} == {n: s.tolist() for n, s in scales.items()}
    assert not missed and (to == "fp8" or found.quantization["kv_cache_scheme"]["num_bits"] == 8)
    validate_checkpoint(found, load_spec(found)[1])


@pytest.mark.parametrize(
    ("source", "to", "options"),
    [
        ("llama", "hf", {}),
        ("llama", "hf", {"dtype": "bfloat16"}),
        ("llama", "fp8", {}),
        ("mixtral", "mxfp4", {}),
        ("phi3", "w8a8", {}),
        ("qwen3", "gguf", {"gguf_type": "q8_0"}),
        ("gguf", "hf", {}),
        ("gptq_v2", "awq", {}),
        ("gptq_v2", "hf", {"dtype": "float16"}),
        ("gptq_v2", "gguf", {}),
        ("fp8", "hf", {}),
        ("w8a8", "hf", {"dtype": "float32"}),
    ],
)
def test_a_disk_without_room_is_told_first_and_one_with_room_is_never_refused(
    quantized: Any, tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, to: str,
    options: dict[str, Any],
) -> None:  # fmt: skip
    if source == "gptq_v2":
        model = quantized()
    elif source in FORMATS:
        model = tmp_path / ("source.gguf" if source == "gguf" else "source")
        rewrite(str(tiny_models("llama", **PLAIN)), model, to=source, quiet=True)
    else:
        model = tiny_models(source)
    out, before = tmp_path / "out", set(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr("toolkit.artifacts.output.room.shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
        for target in [out] + [tmp_path / "out.gguf"] * (to == "gguf"):
            with pytest.raises(ToolkitError, match=rf"{target}: about .* are needed there for the result .* are free"):
                rewrite(str(model), target, to=to, quiet=True, **options)
    assert set(tmp_path.iterdir()) == before
    counted: list[int] = []
    for module in ("formats", "weights"):
        monkeypatch.setattr(
            f"toolkit.convert.{module}.check_room", lambda target, needed: counted.append(needed), raising=False
        )
    rewrite(str(model), out, to=to, quiet=True, **options)
    taken = sum(file.stat().st_size for file in out.iterdir() if file.suffix in (".safetensors", ".gguf"))
    assert taken / 3 < counted[0] <= taken


def test_formats_are_those_of_the_help() -> None:
    assert set(FORMATS) == {
        "awq", "gptq", "gptq_v2", "auto_round", "compressed-tensors", "w8a8", "fp8", "mxfp4", "trellis",
        "gguf", "hf",
    }  # fmt: skip


def _floats_a_row(model: Path, target: Path) -> Path:
    """``model`` with its linears in float8, a scale a row, by a scheme that rounds weights alone."""
    target.mkdir()
    tensors = load_file(model / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        scales = tensors[name].float().abs().amax(1, keepdim=True) / 448
        tensors[name] = (tensors[name].float() / scales).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scales
    save_file(tensors, target / "model.safetensors")
    scheme = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    stated = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}},
        "ignore": ["lm_head"],
    }
    config = json.loads((model / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    return target


def test_float8_of_weights_alone_stays_so(tiny_models: Any, tmp_path: Path) -> None:
    source = _floats_a_row(tiny_models("llama", **PLAIN), tmp_path / "rows")
    rewrite(str(source), tmp_path / "m", to="compressed-tensors")
    assert same(source, tmp_path / "m")
    stated = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert [group["weights"]["strategy"] for group in stated.values()] == ["channel"]
    assert stated["group_0"]["input_activations"] is None and stated["group_0"]["targets"] == ["Linear"]


def test_tiles_that_a_format_cannot_state_together_are_refused_at_the_first(
    tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _floats_a_row(tiny_models("llama", **PLAIN), tmp_path / "rows")
    written: list[str] = []
    write = blocked_fp8.write_linear
    note = Writer(
        "fp8", blocked_fp8.cannot_hold, lambda name, w: written.append(name) or write(name, w), blocked_fp8.config
    )
    monkeypatch.setitem(WRITERS, "fp8", note)
    with pytest.raises(ToolkitError, match=r"^.*rows: blocked fp8: expected one tile size .*; use compressed-tensors$"):
        rewrite(str(source), tmp_path / "m", to="fp8")
    assert all(".layers.0." in name for name in written)


@pytest.mark.parametrize("place", [("compression_config",), ("text_config", "quantization_config")])
def test_where_else_quantization_is_told(tiny_models: Any, tmp_path: Path, place: tuple[str, ...]) -> None:
    """As LMDeploy and vLLM find it; what is written has it at the top."""
    made = tmp_path / "made"
    rewrite(str(tiny_models("llama" if len(place) == 1 else "qwen2_vl")), made, to="w8a8")
    other = Path(shutil.copytree(made, tmp_path / "other"))
    (other / "manifest.json").unlink()
    config = json.loads((other / "config.json").read_text())
    told = config.pop("quantization_config")
    (config if len(place) == 1 else config[place[0]])[place[-1]] = told
    (other / "config.json").write_text(json.dumps(config))
    assert same(made, other)
    rewrite(str(other), tmp_path / "again", to="w8a8")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == json.loads(
        (made / "config.json").read_text()
    )


@pytest.mark.parametrize("there", [True, False])
def test_a_model_s_own_classes_are_found_by_others(tiny_models: Any, tmp_path: Path, there: bool) -> None:
    """Code that lies beside it goes with it; what was left on the hub is told to be there."""
    snapshot = tmp_path / "models--acme--tiny" / "snapshots" / ("0" * 40)
    shutil.copytree(tiny_models("llama"), snapshot)
    for name, classes in (("config.json", "modeling_a.A"), ("tokenizer_config.json", ["tokens.B", None])):
        data = json.loads((snapshot / name).read_text())
        (snapshot / name).write_text(json.dumps(data | {"auto_map": {"AutoA": classes, "AutoB": "who/else--c.C"}}))
    if there:
        for name in ("modeling_a.py", "tokens.py", "helper.py"):
            (snapshot / name).write_text(f"# {name}\n")
    rewrite(str(snapshot), tmp_path / "m", to="w8a8")
    begin = "" if there else "acme/tiny--"
    for name, classes in (
        ("config.json", f"{begin}modeling_a.A"),
        ("tokenizer_config.json", [f"{begin}tokens.B", None]),
    ):
        found = json.loads((tmp_path / "m" / name).read_text())["auto_map"]
        assert found == {"AutoA": classes, "AutoB": "who/else--c.C"}
    assert {file.name for file in (tmp_path / "m").glob("*.py")} == (
        {"modeling_a.py", "tokens.py", "helper.py"} if there else set()
    )


@pytest.mark.parametrize("name", [*SLOW_FILES, "tekken.json", "tiktoken.model", "qwen.tiktoken", "vocab.txt"])
def test_every_form_of_a_vocabulary_travels(tiny_models: Any, tmp_path: Path, name: str) -> None:
    source, target = Path(shutil.copytree(tiny_models("llama"), tmp_path / "m")), tmp_path / "next"
    (source / name).write_text("words")
    target.mkdir()
    assert name in copy_side_files(open_checkpoint(source), target) and (target / name).read_text() == "words"
