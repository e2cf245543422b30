"""Which runner opens a model, and what is refused in one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import apply_overrides
from toolkit.runners import choose
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_model, open_runner
from toolkit.runners.tensor.devices import find as module
from toolkit.runners.tensor.devices.find import find_dtype


def _open(path, backend="pytorch", **options):
    return open_runner(path, backend=backend, options=RunnerOptions(**({"device": "cpu"} | options)))


def test_the_pytorch_backend_is_the_torch_runner(tiny_models):
    runner, note = _open(tiny_models("llama"), dtype="float32")
    assert (runner.name, runner.device, runner.dtype, note) == ("tensor", "cpu", "float32", "")


@pytest.mark.parametrize("backend", ["turbomind", None])
def test_a_float8_cache_is_the_torch_runners(backend, tiny_models):
    pytest.importorskip("toolkit.runners.native.runner")
    runner, note = _open(tiny_models("llama"), backend, dtype="float32", quant_policy=16)
    assert runner.name == "tensor" and "\n" not in note
    assert backend is None or "its KV cache knows no float8 (quant_policy 16), only 0, 8, 4 and 44; pytorch" in note
    plain, _ = _open(tiny_models("llama"), dtype="float32")
    assert runner.memory().block_bytes[0] * 4 == plain.memory().block_bytes[0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"backend": "tensorrt"}, "turbomind, pytorch"),
        ({"device": "gpu"}, "expected auto, cpu, cuda"),
        ({"device": "meta"}, "expected auto, cpu, cuda"),
        ({"dtype": "int8"}, "float16, bfloat16, float32"),
        ({"quant_policy": 5}, "expected 0, 4, 8, 16, 17 or 44"),
    ],
)
def test_options_that_cannot_be_are_named(arguments, message, tiny_models):
    with pytest.raises(UsageError, match=message) as error:
        _open(tiny_models("llama"), **arguments)
    assert "\n" not in str(error.value)


def test_a_gpu_that_is_not_there_is_one_line(tiny_models, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=r"built without CUDA|sees no GPU|cannot use a GPU"):
        _open(tiny_models("llama"), device="cuda:1")
    runner, _ = _open(tiny_models("llama"), device="auto")
    assert runner.device == "cpu"


def test_memory_that_runs_out_is_one_line_with_the_numbers(tiny_models, monkeypatch):
    from toolkit.runners.base import RunnerError
    from toolkit.runners.tensor import runner as tensor_runner

    def full(*arguments):
        raise MemoryError

    runner, _ = _open(tiny_models("llama"))
    for name, call in (("build_decoder", runner.load_weights), ("KVCache", lambda: runner.allocate_cache((4,)))):
        monkeypatch.setattr(tensor_runner, name, full)
        with pytest.raises(RunnerError, match=r"^cpu ran out of memory while .*: \d+\.\d\d of \d+\.\d\d GiB are free"):
            call()


def test_auto_dtype_is_one_that_the_cpu_multiplies(tiny_models, monkeypatch):
    cpu = torch.device("cpu")
    for native, name, expected in ((True, "bfloat16", torch.bfloat16), (False, "float32", torch.float32)):
        monkeypatch.setattr(module, "bf16_is_native", lambda native=native: native)
        runner, note = _open(tiny_models("llama", dtype="bfloat16"))
        assert (runner.dtype, runner.notes, note) == (name, [f"dtype auto is {name}"], "")
        assert find_dtype("auto", torch.float16, cpu) == find_dtype("auto", torch.bfloat16, cpu) == expected
        assert find_dtype("auto", torch.bfloat16, cpu, roomy=False) == torch.bfloat16
        assert find_dtype("auto", torch.float32, cpu) == torch.float32
        assert find_dtype("float16", torch.float32, cpu) == torch.float16


def test_model_format_must_be_what_is_there(tiny_models):
    path = tiny_models("llama")
    assert open_model(path, model_format="hf").target is None
    with pytest.raises(UsageError, match="holds hf weights, not awq"):
        open_model(path, model_format="awq")


def test_overrides_reach_the_spec(tiny_models):
    path = tiny_models("llama")
    assert open_model(path, hf_overrides={"rms_norm_eps": 0.25}).spec.final_norm.eps == 0.25


def test_a_missing_tensor_is_found_before_loading(tiny_checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    path = tiny_checkpoint("llama", tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ToolkitError, match=r"layers\.1\.mlp\.up_proj"):
        _open(path)


def test_an_unusable_kernel_family_is_a_usage_error(tiny_models, monkeypatch):
    monkeypatch.setenv("TOOLKIT_KERNELS", "fast")
    with pytest.raises(UsageError, match="TOOLKIT_KERNELS"):
        _open(tiny_models("llama"))


def test_kernels_that_are_asked_for_run(tiny_models, monkeypatch):
    """The native runner has none to choose from, so that the wish would be lost."""
    monkeypatch.setenv("TOOLKIT_KERNELS", "reference")
    runner, note = _open(tiny_models("llama"), None)
    assert runner.name == "tensor" and "TOOLKIT_KERNELS=reference chooses kernels that it has not" in note


def test_reference_kernels_alone_run_a_model(tiny_models, steps, monkeypatch):
    torch_logits = []
    for forced in ("", "reference"):
        monkeypatch.setenv("TOOLKIT_KERNELS", forced)
        runner, _ = _open(tiny_models("gemma2"), dtype="float32", block_size=16)
        driver = steps.Driver(runner)
        torch_logits.append(driver.step({driver.add(): list(range(3, 40)), driver.add(): [5]}, "all").logits)
    assert abs(torch_logits[0] - torch_logits[1]).max() < 1e-4


def test_choosing_imports_no_torch():
    code = "import sys, toolkit.runners.choose; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.fixture
def native(monkeypatch):
    """``native(reason)``: the native runner answers ``reason``, and is a mere record where it has none."""
    from toolkit.runners.native import runner as native_runner

    def answer(reason):
        monkeypatch.setattr(choose, "native_unsupported", lambda opened, options: reason)
        monkeypatch.setattr(
            native_runner, "NativeRunner", lambda spec, weights, options, **more: SimpleNamespace(name="native")
        )

    return answer


@pytest.mark.parametrize(
    "backend, reason, name, said",
    [
        (None, None, "native", ""),
        ("turbomind", None, "native", ""),
        ("pytorch", None, "tensor", ""),
        (None, "no compiler", "tensor", "turbomind's native runner does not run here: no compiler; pytorch"),
        ("turbomind", "no compiler", "tensor", "turbomind's native runner does not run here: no compiler; pytorch"),
    ],
)
def test_native_runs_where_it_can(backend, reason, name, said, native, tiny_models):
    native(reason)
    runner, note = _open(tiny_models("llama"), backend, dtype="float32")
    assert runner.name == name and note.startswith(said) and bool(note) == bool(said)


def test_an_artifacts_target_decides(native, tiny_models, tmp_path, monkeypatch):
    from toolkit.convert.convert import convert
    from toolkit.convert.options import Packing

    path = tmp_path / "engine"
    convert(str(tiny_models("llama")), path, Packing(target="torch"))
    native(None)
    assert _open(path, None, dtype="float32")[0].name == "tensor"
    assert _open(path, "turbomind")[0].name == "native"
    with pytest.raises(UsageError, match=r"^model_format: .*holds hf weights, not awq"):
        open_model(path, model_format="awq")
    assert open_model(path, model_format="hf").target == open_model(path, model_format="engine").target == "torch"
    with pytest.raises(UsageError, match="packed for its config"):
        open_model(path, hf_overrides={"rms_norm_eps": 0.25})
    opened = replace(open_model(path), target="cpu")
    monkeypatch.setattr(choose, "open_model", lambda path, **options: opened)
    assert _open(path, None)[0].name == "native"


NAMES = {"torch": "pytorch", "cpu": "turbomind"}


@pytest.mark.parametrize("target", NAMES)
def test_an_artifact_takes_other_positions(target, tiny_models, tmp_path, steps):
    """It then computes what an artifact does that was made of the changed checkpoint."""
    from toolkit.convert.convert import convert
    from toolkit.convert.options import Packing

    longer = {"rope_scaling_factor": 4.0, "hf_overrides": {"max_position_embeddings": 48}}
    changed = tmp_path / "changed"
    shutil.copytree(model := tiny_models("llama", max_position_embeddings=16), changed)
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(apply_overrides(config, longer["hf_overrides"], 4.0)))
    logits = []
    for path, options in ((model, longer), (changed, {})):
        engine = tmp_path / f"engine-{len(logits)}"
        convert(str(path), engine, Packing(target=target))
        asked = RunnerOptions(device="cpu", dtype="float32", block_size=16)
        driver = steps.Driver(open_runner(engine, backend=NAMES[target], options=asked, **options)[0])
        assert driver.runner.spec.max_position == 4 * 48
        logits.append(driver.step({driver.add(): list(range(3, 40))}, "all").logits)
    assert (logits[0] == logits[1]).all()


@pytest.mark.parametrize("target", NAMES)
def test_an_artifact_is_of_the_format_that_it_was_made_of(target, tiny_models, tmp_path):
    """As LMDeploy's users type it, behind `convert` too."""
    from toolkit.convert.convert import convert
    from toolkit.convert.options import Packing
    from toolkit.quant.lite import Common, auto_awq
    from toolkit.quant.options import Awq

    (tmp_path / "text.txt").write_text("It was a dark and stormy night. " * 60)
    common = Common(calib_dataset=str(tmp_path / "text.txt"), calib_samples=2, calib_seqlen=32, eval_tokens=64)
    auto_awq(str(tiny_models("llama")), tmp_path / "awq", Awq(tune_steps=0), common=common)
    convert(str(tmp_path / "awq"), tmp_path / "engine", Packing(target=target), quiet=True)
    for known in ("awq", "engine", None):
        assert open_model(tmp_path / "engine", model_format=known).target == target
    with pytest.raises(UsageError, match=r"^model_format: .*engine holds awq weights, not gptq; leave it out"):
        open_model(tmp_path / "engine", model_format="gptq")


def test_eager_mode_takes_the_runner_without_graphs(tiny_models):
    opened = open_model(tiny_models("llama"))
    runner, why = choose._fast_runner(opened, RunnerOptions(device="cuda", eager=True))
    assert runner is None and "eager_mode" in why and why.endswith("pytorch stands in")


@pytest.mark.parametrize("target", NAMES)
def test_dynamic_rope_reaches_as_far_as_a_session(target, tiny_models, tmp_path, steps):
    """A request of that length is turned as transformers turns it, of a converted model too."""
    from transformers import AutoModelForCausalLM

    from toolkit.convert.convert import convert
    from toolkit.convert.options import Packing

    model, ids = tiny_models("llama", max_position_embeddings=24), list(range(3, 63))
    bits = 16 if target == "cpu" else None
    convert(str(model), tmp_path / "engine", Packing(target=target, head_bits=bits), quiet=True)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, rope_parameters=rope).eval()
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0].numpy()
    asked = RunnerOptions(device="cpu", dtype="float32", block_size=16)
    found = {}
    for length in (None, 60):
        options = {"rope_scaling_factor": 2.0, "session_len": length}
        driver = steps.Driver(open_runner(tmp_path / "engine", backend=NAMES[target], options=asked, **options)[0])
        found[length] = driver.step({driver.add(long=True): ids}, "all").logits
    np.testing.assert_allclose(found[60], expected, rtol=1e-3, atol=1e-4)
    assert not np.isclose(found[None], expected, rtol=1e-3, atol=1e-3).all()


@pytest.mark.parametrize("target", NAMES)
def test_a_session_beyond_the_trained_length_switches_dynamic_rope_on(target, tiny_models, steps):
    """Requests within that length are turned as ever; what scales positions already stays."""
    from transformers import AutoModelForCausalLM

    from toolkit.models.positions import stretched_from

    model, ids = tiny_models("qwen2", max_position_embeddings=24), list(range(3, 63))
    theta = open_model(model).spec.ropes()[0].theta
    rope = {"rope_type": "dynamic", "factor": 1.0, "rope_theta": theta}
    oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, rope_parameters=rope).eval()
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0].numpy()
    asked = RunnerOptions(device="cpu", dtype="float32", block_size=16)
    found = {}
    for length in (60, 24):
        driver = steps.Driver(open_runner(model, backend=NAMES[target], options=asked, session_len=length)[0])
        assert stretched_from(driver.runner.spec) == (24 if length == 60 else None)
        found[length] = driver.step({driver.add(): ids[:20]}, "all").logits
        if length == 60:
            long = driver.step({driver.add(long=True): ids}, "all").logits
    np.testing.assert_allclose(long, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(found[60], found[24])
    yarn = {"rope_type": "yarn", "factor": 2.0, "rope_theta": theta, "original_max_position_embeddings": 24}
    kept = open_model(model, hf_overrides={"rope_parameters": yarn}, session_len=60).spec
    assert {r.kind for r in kept.ropes()} == {"yarn"}


@pytest.mark.parametrize("target", NAMES)
def test_queries_grow_beyond_the_length_of_the_config_where_asked(target, tiny_models, tmp_path, steps):
    """Of a converted model too, with and without scaled rope; up to that length nothing changes."""
    from toolkit.convert.convert import convert
    from toolkit.convert.options import Packing
    from toolkit.models.spec import QueryScale

    model = str(tiny_models("llama", max_position_embeddings=16))
    convert(model, tmp_path / "engine", Packing(target=target), quiet=True)
    asked, logits = RunnerOptions(device="cpu", dtype="float32", block_size=16), []
    for options in ({}, {"use_logn_attn": True}, {"use_logn_attn": True, "rope_scaling_factor": 2.0}):
        driver = steps.Driver(open_runner(tmp_path / "engine", backend=NAMES[target], options=asked, **options)[0])
        scale = driver.runner.spec.attention_layers()[0][1].q_scale
        assert scale == (QueryScale("log", 16) if options else None)
        logits.append(driver.step({driver.add(): list(range(3, 35))}, "all").logits)
    np.testing.assert_array_equal(logits[0][:16], logits[1][:16])
    assert not np.isclose(logits[0][17:], logits[1][17:]).all(1).any()
    assert not np.isclose(logits[1][17:], logits[2][17:]).all(1).any()


def test_a_model_without_such_attention_is_refused(tiny_models):
    with pytest.raises(UsageError, match="use_logn_attn: this model has no attention"):
        open_model(tiny_models("deepseek_v2"), use_logn_attn=True)


def test_an_artifact_gives_the_checkpoints_logits(tiny_models, tmp_path, steps):
    from toolkit.convert.convert import convert
    from toolkit.convert.options import Packing

    path = tmp_path / "engine"
    convert(str(tiny_models("gemma2")), path, Packing(target="torch"))
    logits = []
    for model in (tiny_models("gemma2"), path):
        driver = steps.Driver(_open(model, block_size=16)[0])
        logits.append(driver.step({driver.add(): [3, 4, 5, 6]}, "all").logits)
    assert (logits[0] == logits[1]).all()
