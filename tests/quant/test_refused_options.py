"""What ``tool lite`` says of options, files and weights that cannot be: the whole line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.refused import refusing
from toolkit.errors import ToolkitError, UsageError
from toolkit.quant.calibrate import calibrate
from toolkit.quant.draft.run import draft
from toolkit.quant.lite import auto_awq, auto_gptq, auto_round, blocked_fp8, mxfp4, search, smooth_quant
from toolkit.quant.merge import merge
from toolkit.quant.methods.kv import kv
from toolkit.quant.options import AutoRound, Awq, Common, DraftHead, Gptq, Search, SmoothQuant
from toolkit.quant.text.calibration import local_texts

NO_USE = "has no use for it; leave the option out"
READS_NONE = "--calibration: this method reads no statistics; leave the option out"
SAVED = Common(calibration="saved")

refused = refusing(UsageError)


@pytest.mark.parametrize(
    ("method", "options", "common", "told"),
    [
        (auto_awq, Awq(w_bits=5), Common(), "--w-bits: expected 4, 8, 3 or 2, found 5"),
        (auto_awq, Awq(rounding="up"), Common(), "--rounding: expected nearest or gptq, found 'up'"),
        (
            auto_awq,
            Awq(damp=0.5, rounding="nearest"),
            Common(),
            "--damp, --shrink, --carry-error, --guide-samples, --sweeps, --desc-act, --static-groups: they are GPTQ's; "
            "give --rounding gptq too",
        ),
        (
            auto_gptq,
            Gptq(guide_samples=5),
            SAVED,
            "--guide-samples: it reads calibration text, and --calibration gives statistics alone; leave the option "
            "out",
        ),
        (auto_gptq, Gptq(sweeps=-1), Common(), "--sweeps: expected 0 or more, found -1"),
        (auto_awq, Awq(guide_samples=-1), Common(), "--guide-samples: expected 0 or more, found -1"),
        (
            search,
            Search(bits=4.5, guide_samples=4),
            Common(format="gguf"),
            "--guide-samples, --sweeps: not with --format gguf, whose blocks have a search of their own",
        ),
        (
            auto_awq,
            Awq(w_bits=8),
            Common(),
            "--w-bits: the AWQ gemm format holds 4-bit weights alone, found 8; give --format gptq_v2, "
            "compressed-tensors or trellis too, or leave it out",
        ),
        (
            auto_awq,
            Awq(w_group_size=48),
            Common(),
            "--w-group-size: expected auto, 128, 64, 32 or -1, found 48; this model takes 64, 32, -1, auto",
        ),
        (
            auto_awq,
            Awq(),
            Common(format="mxfp4"),
            "--format: expected awq or gptq_v2 or gptq or compressed-tensors or auto_round or gguf or trellis for this "
            "method, found 'mxfp4'",
        ),
        (
            auto_awq,
            Awq(),
            Common(format="gptq"),
            "--format gptq: model.layers.0.self_attn.q_proj: GPTQ version 1 cannot hold a zero point of 0; use "
            "gptq_v2; try --format awq",
        ),
        (
            auto_awq,
            Awq(tune_steps=5),
            SAVED,
            "--tune-steps: it reads calibration text, and --calibration gives statistics alone; leave the option out",
        ),
        (auto_awq, Awq(tune_steps=-1), Common(), "--tune-steps: expected 0 or more, found -1"),
        (auto_gptq, Gptq(w_bits=5), Common(), "--w-bits: GPTQ holds weights of 2, 3, 4 or 8 bits, found 5"),
        (auto_gptq, Gptq(damp=2.0), Common(), "--damp: expected a share between 0 and 1, found 2"),
        (auto_gptq, Gptq(shrink=2.0), Common(), "--shrink: expected a share from 0 to 1, found 2"),
        (search, Search(bits=4.5), SAVED, f"--calibration: search {NO_USE}"),
        (search, Search(), Common(), "--bits, --size: give one of them"),
        (
            search,
            Search(bits=4.5),
            Common(quantize_lm_head=True, skip=("layers",)),
            "--skip, --include: no linear of a layer is left to choose for",
        ),
        (auto_awq, Awq(), Common(batch_size=0), "--batch-size: expected 1 or more, found 0"),
        (auto_awq, Awq(), Common(eval_tokens=0), "--eval-tokens: expected 2 or more, found 0"),
        (auto_awq, Awq(), Common(cache_memory=-1), "--cache-memory: expected GiB, 0 or more, found -1"),
        (auto_awq, Awq(), Common(dtype="odd"), "--dtype: expected auto, float16, bfloat16, float32, found 'odd'"),
        (search, Search(bits=-1.0), Common(), "--bits: expected bits a weight, such as 4.5, found -1"),
        (
            smooth_quant,
            SmoothQuant(quant_dtype="int4"),
            Common(),
            "--quant-dtype: expected int8, fp8, float8_e4m3fn, float8_e5m2, found 'int4'",
        ),
        (
            smooth_quant,
            SmoothQuant(strength=2.0),
            Common(),
            "--strength: expected a number from 0 to 1, found 2",
        ),
    ],
)
def test_options(tiny_models: Any, tmp_path: Path, method: Any, options: Any, common: Common, told: str) -> None:
    assert refused(lambda: method(str(tiny_models("llama")), tmp_path / "out", options, common=common)) == told
    assert not (tmp_path / "out").exists()


def test_widths_that_do_not_fill_blocks(tiny_models: Any, tmp_path: Path) -> None:
    odd, name = str(tiny_models("llama", intermediate_size=100)), "model.layers.0.mlp.down_proj: 100 inputs"
    told = refused(lambda: mxfp4(odd, tmp_path / "out"))
    assert told == f"{name} are no multiple of mxfp4's 32; leave it out with --skip"
    told = refused(lambda: search(odd, tmp_path / "out", Search(bits=4.5), common=Common(format="gguf")))
    assert told == f"{name} are no multiple of 32; leave it out by --skip"


def test_models_that_write_nothing(tiny_models: Any, tmp_path: Path) -> None:
    model = tiny_models("bert")
    told = "reads texts and writes none; give a file of texts as it will read, or a known name such as wikitext2"
    assert refused(lambda: auto_awq(str(model), tmp_path / "out")) == f"--calib-dataset: {model} {told}"
    told = f"--quantize-lm-head: {model} writes no text and has no head; leave the option out"
    assert refused(lambda: mxfp4(str(model), tmp_path / "out", common=Common(quantize_lm_head=True))) == told
    told = f"{model}: a model that writes its text from left to right is needed"
    assert refused(lambda: draft(str(model), tmp_path / "out"), ToolkitError) == told
    call = lambda: draft(str(model), tmp_path / "out", DraftHead(num_draft_tokens=17))  # noqa: E731
    assert refused(call) == "--num-draft-tokens: expected 1 to 16, found 17"


def test_a_head_that_was_not_saved(tiny_models: Any, tmp_path: Path) -> None:
    """As of embedding models: there the head is the embedding, whatever lies beside it."""
    model = tmp_path / "model"
    shutil.copytree(tiny_models("llama", tie_word_embeddings=True), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))
    told = f"--quantize-lm-head: {model} writes no text and has no head; leave the option out"
    assert refused(lambda: mxfp4(str(model), tmp_path / "out", common=Common(quantize_lm_head=True))) == told


@pytest.mark.parametrize("method", [mxfp4, blocked_fp8])
def test_methods_without_statistics(tiny_models: Any, tmp_path: Path, method: Any) -> None:
    assert refused(lambda: method(str(tiny_models("llama")), tmp_path / "out", common=SAVED)) == READS_NONE


@pytest.mark.parametrize(
    ("options", "common", "told"),
    [
        (AutoRound(w_bits=5), Common(), "--w-bits: expected 4, 8, 3 or 2, found 5"),
        (AutoRound(iters=-1), Common(), "--iters: expected 0 or more, found -1"),
        (AutoRound(), SAVED, f"--calibration: auto_round {NO_USE}"),
    ],
)
def test_options_of_auto_round(tmp_path: Path, options: AutoRound, common: Common, told: str) -> None:
    pytest.importorskip("auto_round")
    assert refused(lambda: auto_round("nosuch", tmp_path / "out", options, common=common)) == told


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.doc", b"x", ": expected a .txt, .jsonl, .json, .parquet file or a folder of them"),
        (
            "x.json",
            b"{",
            ": not valid JSON: Expecting property name enclosed in double quotes at line 1, column 2; restore the file",
        ),
        ("x.json", b"{}", ": expected a list of texts or objects, found dict"),
        ("x.json", b"[5]", ": row 1: expected text or messages, found int"),
        (
            "x.jsonl",
            b"\n\nnope\n",
            ": line 3: not valid JSON: Expecting value at line 1, column 1; restore the file",
        ),
        (
            "x.txt",
            b"\xff",
            ": not a valid .txt file ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte)",
        ),
        ("x.txt", b"", ": the file holds no text"),
    ],
)
def test_files_of_text(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    assert refused(lambda: list(local_texts(file, 0))) == f"--calib-dataset {file}{told}"


def test_a_folder_without_text(tmp_path: Path) -> None:
    told = f"--calib-dataset {tmp_path}: expected .txt, .jsonl, .json, .parquet files in the folder, found none"
    assert refused(lambda: list(local_texts(tmp_path, 0))) == told
    none = tmp_path / "none.txt"
    told = f"--calib-dataset {none}: cannot be read: No such file or directory"
    assert refused(lambda: list(local_texts(none, 0))) == told


@pytest.fixture
def huge(tiny_models: Any, tmp_path: Path) -> Callable[[str], Path]:
    """A model in which one number of a tensor is beyond float16, or is ``value``."""

    def make(name: str, value: float = 1e9) -> Path:
        shutil.copytree(tiny_models("llama"), tmp_path / "m")
        tensors = {key: value.float() for key, value in load_file(tmp_path / "m/model.safetensors").items()}
        tensors[name].view(-1)[0] = value
        save_file(tensors, tmp_path / "m/model.safetensors")
        return tmp_path / "m"

    return make


PLAIN = {"calib_samples": 2, "calib_self_samples": 0, "calib_seqlen": 16}


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("A zebra met a zebra, and this is long enough to be cut into samples. " * 99)
    return str(path)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("model.layers.0.self_attn.v_proj.weight", 1e22, "activations of layer 0 overflow at "),
        ("model.layers.0.input_layernorm.weight", 1e30, "activations of layer 0 are not finite"),
    ],
)
def test_activations_that_are_no_numbers(
    name: str, value: float, told: str, huge: Callable[..., Path], text: str, tmp_path: Path
) -> None:
    model = huge(name, value)
    common = Common(calib_dataset=text, **PLAIN)  # type: ignore[arg-type]
    call = lambda: auto_awq(str(model), tmp_path / "out", Awq(rounding="nearest", tune_steps=0), common=common)  # noqa: E731
    found = refused(call, ToolkitError)
    assert found.startswith(f"{model}: {told}") and found.endswith("; nothing to calibrate on")


def test_a_tokenizer_with_more_tokens_than_the_model(tiny_models: Any, support: Any, text: str, tmp_path: Path) -> None:
    model = support("tiny").wordy_copy(tiny_models("llama"), tmp_path / "wordy", "zebra")
    told = "the tokenizer gives token id 320, but the model has 320 tokens; tokenizer and weights disagree"
    common = Common(calib_dataset=text, **PLAIN)  # type: ignore[arg-type]
    assert refused(lambda: calibrate(str(model), tmp_path / "out", common=common), ToolkitError) == f"{model}: {told}"


@pytest.mark.parametrize("method", [mxfp4, blocked_fp8])
def test_a_tokenizer_with_more_tokens_than_the_model_for_what_is_measured(
    method: Any, tiny_models: Any, support: Any, tmp_path: Path
) -> None:
    """The held-out text has the word, be there a text to calibrate on or not."""
    model = support("tiny").wordy_copy(tiny_models("llama"), tmp_path / "wordy", "Whale")
    told = "the tokenizer gives token id 320, but the model has 320 tokens; tokenizer and weights disagree"
    call = lambda: method(str(model), tmp_path / "out", common=Common(eval_tokens=64))  # noqa: E731
    assert refused(call, ToolkitError) == f"{model}: {told}"


def test_a_model_that_cannot_write_its_text(tiny_models: Any, support: Any, tmp_path: Path) -> None:
    model = support("tiny").broken_copy(tiny_models("llama"), tmp_path / "broken")
    common = Common(calib_dataset="self", calib_samples=1, calib_seqlen=16)
    told = refused(lambda: calibrate(str(model), tmp_path / "out", common=common), ToolkitError)
    assert told.startswith(f"{model}: the model cannot write its own calibration text: no token can be drawn")
    told = refused(lambda: draft(str(model), tmp_path / "head", DraftHead(tokens=512)), ToolkitError)
    assert told.startswith(f"{model}: the model cannot write its own text: no token can be drawn")


def test_statistics_that_are_not_whole(tiny_models: Any, text: str, tmp_path: Path) -> None:
    model, saved = str(tiny_models("llama")), tmp_path / "statistics"
    calibrate(model, saved, common=Common(calib_dataset=text, **PLAIN))  # type: ignore[arg-type]
    (gone := sorted(saved.glob("*.safetensors"))[0]).unlink()
    call = lambda: auto_awq(model, tmp_path / "out", common=Common(calibration=str(saved)))  # noqa: E731
    told = f"--calibration {saved}: {gone.name} is missing; run tool lite calibrate again"
    assert refused(call, ToolkitError) == told


def test_a_model_without_keys(tiny_models: Any, tmp_path: Path) -> None:
    model = tiny_models("mamba2")
    told = "lite kv finds scales of keys and values, of which this model keeps none; --quant-policy 8 or 16 needs none"
    assert refused(lambda: kv(str(model), tmp_path / "out"), ToolkitError) == f"{model}: {told}"


@pytest.mark.parametrize(
    ("method", "options"), [(auto_awq, Awq(rounding="nearest", tune_steps=0)), (auto_gptq, Gptq(tune_steps=0))]
)
def test_weights_whose_scales_are_infinite(
    huge: Callable[[str], Path], tmp_path: Path, method: Any, options: Any
) -> None:
    name = "model.layers.0.mlp.down_proj"
    text = tmp_path / "text.txt"
    text.write_text("Some text that is long enough to be cut into samples. " * 99)
    plain = Common(calib_dataset=str(text), calib_samples=2, calib_self_samples=0, calib_seqlen=16, dtype="float16")
    call = lambda: method(str(huge(f"{name}.weight")), tmp_path / "out", options, common=plain)  # noqa: E731
    told = "a weight of 1e+09 needs a scale beyond float16; expected weights below about 480,000"
    assert refused(call, ToolkitError) == f"{name}: {told}"


def test_tuned_scales_that_are_infinite(huge: Callable[[str], Path], text: str, tmp_path: Path) -> None:
    pytest.importorskip("auto_round")
    name = "model.layers.0.mlp.down_proj"
    common = Common(calib_dataset=text, **PLAIN)  # type: ignore[arg-type]
    call = lambda: auto_round(str(huge(f"{name}.weight")), tmp_path / "out", AutoRound(iters=1), common=common)  # noqa: E731
    assert refused(call, ToolkitError) == f"{name}: its scales do not fit float16; leave it out with --skip"


def test_norms_that_are_beyond_the_dtype(huge: Callable[[str], Path], tmp_path: Path) -> None:
    model, half = str(huge("model.norm.weight")), Common(dtype="float16")
    told = refused(lambda: mxfp4(model, tmp_path / "out", common=half), ToolkitError)
    assert told == "model.norm: values up to 1e+09 do not fit float16; give --dtype bfloat16"


def test_an_adapter_is_merged_into_floats_alone(tiny_models: Any, tmp_path: Path) -> None:
    mxfp4(str(tiny_models("llama")), tmp_path / "four")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    pair = {f"{q}.lora_A.weight": torch.ones(2, 64), f"{q}.lora_B.weight": torch.ones(64, 2)}
    save_file(pair, adapter / "adapter_model.safetensors")
    told = refused(lambda: merge(str(tmp_path / "four"), str(adapter), tmp_path / "merged"), ToolkitError)
    assert told == (
        f"{tmp_path / 'four'}: it is quantized already; merge the adapter into the float model and quantize that"
    )


def test_an_adapter_for_a_tensor_that_is_not_there(tiny_models: Any, tmp_path: Path) -> None:
    shutil.copytree(tiny_models("llama"), tmp_path / "m")
    tensors = load_file(tmp_path / "m/model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, tmp_path / "m/model.safetensors")
    (adapter := tmp_path / "adapter").mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    pair = {f"{q}.lora_A.weight": torch.ones(2, 64), f"{q}.lora_B.weight": torch.ones(64, 2)}
    save_file(pair, adapter / "adapter_model.safetensors")
    told = refused(lambda: merge(str(tmp_path / "m"), str(adapter), tmp_path / "merged"), ToolkitError)
    gone = "model.layers.0.self_attn.q_proj.weight"
    assert told == f"{tmp_path / 'm'}: expected a tensor {gone}, which the adapter changes; found none"
