"""Engine artifacts hold exactly the checkpoint's weights, are made deterministically, and are checked when opened."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.artifacts.canonical import ChannelInt8, Codebook, Dense, Fp4, Fp8, GroupInt, SuperScales
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.engine.artifact import ENGINE_ARRAYS, ENGINE_JSON, EngineArtifact
from toolkit.artifacts.engine.files import open_engine, write_engine
from toolkit.artifacts.engine.torch_target import pack_codes, pack_torch, torch_weights, unpack_codes
from toolkit.artifacts.formats import awq, w8a8
from toolkit.artifacts.json_file import write_json_object
from toolkit.artifacts.side_files import copy_side_files
from toolkit.artifacts.text.tokenizer import SLOW_FILES, Tokenizer
from toolkit.artifacts.weight_files import safetensors_file
from toolkit.artifacts.weight_files.safetensors_file import PAGE, read_header, write_tensors
from toolkit.artifacts.weights import canonical_weights
from toolkit.convert.convert import convert as convert_for
from toolkit.convert.formats import rewrite
from toolkit.convert.options import Packing
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import load_spec
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.tensor.runner import TensorRunner

TORCH = Packing(target="torch")  # whose weights come back as they were


def convert(model: str, path: Path, options: Packing = TORCH, **more: Any) -> Any:
    return convert_for(model, path, options, **more)


def same(a: Any, b: Any) -> bool:
    """Equal values, bit for bit, of the same form."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if dataclasses.is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return a == b


def assert_holds(engine: Path, model: Path) -> None:
    artifact, checkpoint = open_engine(engine), open_checkpoint(model)
    spec, stored = load_spec(checkpoint)
    assert artifact.spec == spec
    expected, found = canonical_weights(checkpoint, stored), torch_weights(artifact)
    assert set(found) == set(expected)
    for name, weight in expected.items():
        assert same(found[name], weight), name


def quantized(model: Path, path: Path, method: str) -> Path:
    """A copy of a tiny checkpoint with its linears quantized at random, in ``method``'s format."""
    checkpoint = open_checkpoint(model)
    _, stored = load_spec(checkpoint)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    for item in stored:
        if item.kind != "linear":
            continue
        rows, columns = item.shape
        weight: Any
        if method == "awq":
            codes = torch.randint(0, 16, (rows, columns), generator=generator).to(torch.uint8)
            zeros = torch.randint(0, 16, (rows, columns // 32), generator=generator).to(torch.uint8)
            weight = GroupInt(codes, torch.rand(rows, columns // 32).half(), zeros, 4, 32)
            new = awq.write_linear(item.name, weight)
        else:
            weight = ChannelInt8(torch.randint(-127, 128, (rows, columns)).to(torch.int8), torch.rand(rows))
            new = w8a8.write_linear(item.name, weight)
        del tensors[f"{item.name}.weight"]
        tensors.update(new)
    shutil.copytree(model, path)
    write_tensors(path / "model.safetensors", tensors)
    quantization = awq.config(group_size=32, zero_point=True) if method == "awq" else w8a8.config()
    write_json_object(path / "config.json", {**checkpoint.config, "quantization_config": quantization})
    return path


def test_every_family_survives(tiny_models: Any, tmp_path: Path, family: str) -> None:
    model = tiny_models(family)
    done = convert(str(model), tmp_path / "e")
    assert (done.target, done.already_there) == ("torch", False)
    assert_holds(tmp_path / "e", model)
    side = {p.name for p in model.iterdir()} - {"model.safetensors"}
    assert side <= {p.name for p in (tmp_path / "e").iterdir()}


@pytest.mark.parametrize("method", ["awq", "smooth_quant"])
@pytest.mark.parametrize("family", ["llama", "phi3", "internlm2"])
def test_quantized_checkpoints_survive(tiny_models: Any, tmp_path: Path, family: str, method: str) -> None:
    model = quantized(tiny_models(family), tmp_path / "q", method)
    convert(str(model), tmp_path / "e")
    assert_holds(tmp_path / "e", model)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16"])
def test_gguf_survives(
    tiny_models: Any, support: Any, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOOLKIT_HOME", str(tmp_path / "home"))
    gguf = support("gguf_files").write_gguf(tiny_models("qwen2", use_sliding_window=False), tmp_path / "m.gguf", kind)
    convert(str(gguf), tmp_path / "e", replace(TORCH, model_format="gguf"))
    assert_holds(tmp_path / "e", gguf)
    assert (tmp_path / "e" / "tokenizer.json").is_file()


def test_chat_templates_in_files_of_their_own_go_along(tiny_checkpoint: Any, tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    convert(str(model), tmp_path / "e")
    assert Tokenizer.open(tmp_path / "e").chat_templates["tool_use"] == "{{ tools }}"
    convert(str(model), tmp_path / "e", overwrite=True)  # the folder is the artifact's own


@pytest.mark.parametrize("name", SLOW_FILES)
def test_a_tokenizer_of_any_name_goes_along(tiny_models: Any, tmp_path: Path, name: str) -> None:
    model = shutil.copytree(tiny_models("llama"), tmp_path / "model")
    (model / name).write_bytes(b"pieces")
    (tmp_path / "next").mkdir()
    copy_side_files(open_checkpoint(model), tmp_path / "next")
    assert (tmp_path / "next" / name).read_bytes() == b"pieces"


def test_awq_does_not_grow(tiny_models: Any, tmp_path: Path) -> None:
    model = quantized(tiny_models("llama"), tmp_path / "q", "awq")
    convert(str(model), tmp_path / "e")
    infos = open_engine(tmp_path / "e").infos
    linears = load_spec(open_checkpoint(model))[0].linears()
    for linear in linears:
        mine = sum(info.nbytes for name, info in infos.items() if name.startswith(f"{linear.name}."))
        theirs = open_checkpoint(model).infos
        assert mine == sum(info.nbytes for name, info in theirs.items() if name.startswith(f"{linear.name}."))


def test_conversion_is_deterministic(tiny_models: Any, tmp_path: Path) -> None:
    model = quantized(tiny_models("llama"), tmp_path / "q", "awq")
    for name in ("a", "b"):
        convert(str(model), tmp_path / name)
    for file in (ENGINE_ARRAYS, ENGINE_JSON):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_arrays_are_page_aligned_views(tiny_models: Any, tmp_path: Path) -> None:
    convert(str(tiny_models("llama")), tmp_path / "e")
    arrays = open_engine(tmp_path / "e").arrays()
    assert len(arrays) == 21
    assert all(array.ctypes.data % PAGE == 0 and not array.flags.owndata for array in arrays.values())
    weight = torch_weights(open_engine(tmp_path / "e"))["model.norm"]
    assert isinstance(weight, torch.Tensor) and np.array_equal(arrays["model.norm"], weight.numpy())


def test_opening_and_mapping_need_no_torch(tiny_models: Any, tmp_path: Path) -> None:
    convert(str(tiny_models("llama")), tmp_path / "e")
    code = (
        "import sys; from pathlib import Path\n"
        "from toolkit.artifacts.engine.files import open_engine\n"
        f"open_engine(Path({str(tmp_path / 'e')!r})).arrays()\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr


@settings(max_examples=100, deadline=None)
@given(bits=st.sampled_from([2, 3, 4, 8]), rows=st.integers(1, 7), columns=st.integers(1, 9), seed=st.integers(0, 99))
def test_packing_codes_is_invertible(bits: int, rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (rows, columns), generator=generator).to(torch.uint8)
    packed = pack_codes(codes, bits)
    assert packed.numel() == (codes.numel() if bits == 8 else (codes.numel() + 1) // 2)
    assert torch.equal(unpack_codes(packed, bits, (rows, columns)), codes)


def test_every_canonical_form_comes_back(tiny_models: Any, tmp_path: Path) -> None:
    codes = torch.randint(0, 4, (4, 64)).to(torch.uint8)
    grid = torch.rand(4, 2)
    small = torch.randint(-9, 9, (4, 2)).to(torch.int8)
    supers = SuperScales(torch.rand(4, 1).half(), small, torch.rand(4, 1).half(), small.flip(0))
    plain = SuperScales(supers.d, small)
    weights: list[tuple[str, Any]] = [
        ("dense", Dense(torch.rand(3, 5).bfloat16())),
        ("minima", GroupInt(codes, grid.half(), None, 2, 32, minima=grid.half())),
        ("order", GroupInt(codes, grid, torch.ones(4, 2, dtype=torch.uint8), 3, 32, group_index=codes[0].int() % 2)),
        ("symmetric", GroupInt(codes, grid, torch.full((4, 2), 8, dtype=torch.uint8), 4, 32)),
        ("k_minima", GroupInt(codes, supers.scales(), None, 4, 32, supers.minima(), super_scales=supers)),
        ("k_zero", GroupInt(codes, plain.scales(), torch.full((4, 2), 32).byte(), 6, 32, super_scales=plain)),
        ("int8", ChannelInt8(torch.ones(4, 8, dtype=torch.int8), torch.rand(4))),
        ("fp8", Fp8(torch.rand(4, 8).to(torch.float8_e5m2), torch.rand(4))),
        ("nvfp4", Fp4(codes, grid.to(torch.float8_e4m3fn), 32, torch.rand(1))),
        ("table", Codebook(codes, torch.rand(16), grid.half(), 4, 32)),
        ("k_table", Codebook(codes, torch.rand(16), plain.scales(), 4, 32, plain)),
        ("norm", torch.rand(7)),
    ]
    spec, _ = load_spec(open_checkpoint(tiny_models("llama")))
    params: dict[str, dict[str, Any]] = {}
    write_engine(tmp_path, spec, pack_torch(iter(weights), params), target="torch", params=params)
    infos = read_header(tmp_path / ENGINE_ARRAYS)
    found = torch_weights(EngineArtifact(tmp_path, spec, "torch", params, infos))
    assert list(found) == [name for name, _ in weights]
    for name, weight in weights:
        assert same(found[name], weight), name
    assert "symmetric.zeros" not in infos and params["symmetric"]["zero"] == 8
    assert "k_minima.scales" not in infos and "k_minima.minima" not in infos


@pytest.mark.parametrize("to", ["fp8", "mxfp4"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_float_blocks_survive(tiny_models: Any, tmp_path: Path, family: str, to: str) -> None:
    rewrite(str(tiny_models(family)), tmp_path / "q", to=to)
    convert(str(tmp_path / "q"), tmp_path / "e")
    assert_holds(tmp_path / "e", tmp_path / "q")


@pytest.mark.parametrize("to, told", [("mxfp4", ["held as bfloat16"]), ("w8a8", [])])
def test_what_grows_when_it_is_packed_is_told(tiny_models: Any, tmp_path: Path, to: str, told: list[str]) -> None:
    rewrite(str(tiny_models("llama")), tmp_path / "q", to=to)
    done = convert(str(tmp_path / "q"), tmp_path / "e", Packing(target="cpu", head_bits=16))
    assert len(done.notes) == len(told) and all(what in note for what, note in zip(told, done.notes, strict=True))


@pytest.mark.parametrize("target", ["torch", "cpu", "cuda-sm80"])
def test_scales_of_a_float8_cache_are_kept(tiny_checkpoint: Any, tmp_path: Path, target: str) -> None:
    model = tiny_checkpoint("llama", tmp_path / "m")
    checkpoint = open_checkpoint(model)
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names()}
    scales = {f"model.layers.{i}.self_attn.{x}_scale": torch.tensor(0.5 + i) for i in range(2) for x in "kv"}
    write_tensors(model / "model.safetensors", tensors | scales)
    convert(str(model), tmp_path / "e", Packing(target=target, dtype="float16"))
    options = RunnerOptions(device="cpu", dtype="float32", quant_policy=16)
    runner, _ = open_runner(tmp_path / "e", backend=None, options=options)
    assert isinstance(runner, TensorRunner)
    found = runner._weights()
    assert {name: (found[name].dtype, found[name].tolist()) for name in scales} == {
        name: (torch.float32, [scale.item()]) for name, scale in scales.items()
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dtype_casts_what_is_dense(tiny_models: Any, tmp_path: Path, dtype: str) -> None:
    convert(str(tiny_models("llama")), tmp_path / "e", replace(TORCH, dtype=dtype))
    weights = torch_weights(open_engine(tmp_path / "e"))
    found = {w.dtype if isinstance(w, torch.Tensor) else w.weight.dtype for w in weights.values()}  # type: ignore[union-attr]
    assert found == {getattr(torch, dtype)}


def test_values_beyond_float16_are_named(tiny_checkpoint: Any, tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "m")
    checkpoint = open_checkpoint(model)
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e6
    write_tensors(model / "model.safetensors", tensors)
    with pytest.raises(ToolkitError, match=r"model\.layers\.1\.mlp\.up_proj.*float16"):
        convert(str(model), tmp_path / "e", replace(TORCH, dtype="float16"))
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"options": Packing(tp=0)}, "--tp"),
        ({"options": Packing(dtype="int8")}, "--dtype"),
        ({"options": Packing(target="abacus")}, "--target"),
        ({"options": Packing(model_format="awq")}, "holds hf"),
        ({"revision": "main"}, "--revision"),
    ],
)
def test_wrong_options_are_misuse(tiny_models: Any, tmp_path: Path, options: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        convert(str(tiny_models("llama")), tmp_path / "e", **options)
    assert not list(tmp_path.iterdir())


def test_an_engine_artifact_is_not_converted_again(tiny_models: Any, tmp_path: Path) -> None:
    convert(str(tiny_models("llama")), tmp_path / "e")
    with pytest.raises(ToolkitError, match=r"convert takes checkpoint or quantized, found an engine"):
        convert(str(tmp_path / "e"), tmp_path / "f")


def test_a_broken_checkpoint_writes_nothing(tiny_checkpoint: Any, tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "m")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ToolkitError, match="truncated"):
        convert(str(model), tmp_path / "e")
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_full_disk_while_writing_leaves_nothing(
    tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = safetensors_file.array_bytes
    left = [5]

    def filling(array: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(array)

    monkeypatch.setattr(safetensors_file, "array_bytes", filling)
    with pytest.raises(ToolkitError, match="disk full"):
        convert(str(tiny_models("llama")), tmp_path / "e")
    assert not list(tmp_path.iterdir())


def test_killed_while_converting_the_next_run_succeeds(tiny_models: Any, tmp_path: Path) -> None:
    model = tiny_models("llama")
    code = (
        "import time; from toolkit.convert.convert import convert\n"
        "def slow(done, total):\n    print(done, flush=True); time.sleep(60 if done == 3 else 0)\n"
        f"convert({str(model)!r}, {str(tmp_path / 'e')!r}, progress=slow)\n"
    )
    victim = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd="/")
    assert victim.stdout is not None
    assert [victim.stdout.readline() for _ in range(3)] == ["1\n", "2\n", "3\n"]
    victim.send_signal(signal.SIGKILL)
    victim.wait(60)
    assert not (tmp_path / "e").exists()
    convert(str(model), tmp_path / "e")
    assert_holds(tmp_path / "e", model)
    assert [p.name for p in tmp_path.iterdir()] == ["e"]


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(engine: Path) -> None:
        data = json.loads((engine / ENGINE_JSON).read_text())
        change(data)
        (engine / ENGINE_JSON).write_text(json.dumps(data))

    return apply


def sign(engine: Path) -> None:
    """Record the digest of a changed engine.json, as another packer's would be."""
    manifest = json.loads((engine / "manifest.json").read_text())
    for entry in manifest["files"]:
        if entry["name"] == ENGINE_JSON:
            entry["sha256"] = hashlib.sha256((engine / ENGINE_JSON).read_bytes()).hexdigest()
    (engine / "manifest.json").write_text(json.dumps(manifest))


def cut(engine: Path) -> None:
    path = engine / ENGINE_ARRAYS
    path.write_bytes(path.read_bytes()[:-1])


NAME = "model.layers.0.mlp.up_proj"
BREAKAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no json": (lambda e: (e / ENGINE_JSON).unlink(), "no such file"),
    "no arrays": (lambda e: (e / ENGINE_ARRAYS).unlink(), "no such file"),
    "truncated": (cut, "truncated"),
    "broken json": (lambda e: (e / ENGINE_JSON).write_text("{"), "line 1"),
    "newer schema": (edit(lambda d: d.update(schema_version=99)), "99"),
    "schema of words": (edit(lambda d: d.update(schema_version="x")), "schema_version"),
    "no spec": (edit(lambda d: d.pop("spec")), "spec"),
    "unknown field in spec": (edit(lambda d: d["spec"].update(colour="red")), "colour"),
    "vocab at odds": (edit(lambda d: d["spec"].update(vocab_size=7)), "expected shape [7, 64]"),
    "no params": (edit(lambda d: d.update(params=[])), "params"),
    "missing param": (edit(lambda d: d["params"].pop(NAME)), NAME),
    "param of none": (edit(lambda d: d["params"].update({NAME: None})), NAME),
    "wrong shape": (edit(lambda d: d["params"][NAME].update(shape=[1, 2])), "[1, 2]"),
    "unknown form": (edit(lambda d: d["params"][NAME].update(form="knot")), "knot"),
    "form at odds with arrays": (
        edit(lambda d: d["params"][NAME].update(form="group_int", bits=4, group_size=32)),
        f"{NAME}.codes",
    ),
    "bits that do not exist": (
        edit(lambda d: d["params"][NAME].update(form="group_int", bits=9, group_size=32)),
        "unknown form",
    ),
    "a value that only the digest shows": (edit(lambda d: d["spec"].update(head_scale=0.5)), "changed"),
    "no manifest": (lambda e: (e / "manifest.json").unlink(), "changed"),
    "manifest of another kind": (
        lambda e: (e / "manifest.json").write_text(
            (e / "manifest.json").read_text().replace('"engine"', '"quantized"')
        ),
        "takes engine",
    ),
}


@pytest.mark.parametrize(("breakage", "words"), BREAKAGES.values(), ids=BREAKAGES.keys())
def test_broken_artifacts_are_refused_in_one_line(
    tiny_models: Any, tmp_path: Path, breakage: Callable[[Path], None], words: str
) -> None:
    convert(str(tiny_models("llama")), tmp_path / "e")
    breakage(tmp_path / "e")
    with pytest.raises(ToolkitError) as caught:
        open_engine(tmp_path / "e")
    message = str(caught.value)
    assert words in message and "\n" not in message and str(tmp_path / "e") in message


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_change_of_engine_json_is_one_line(
    data: st.DataObject, tiny_models: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "e"
    convert(str(tiny_models("llama")), path)
    record = json.loads((path / ENGINE_JSON).read_text())
    node: Any = record
    while True:  # walk to a random place and put something else there
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        inner = node[key]
        if not isinstance(inner, (dict, list)) or not inner or data.draw(st.integers(0, 4)) == 0:
            break
        node = inner
    wrong = st.sampled_from([None, -1, 0, 1 << 70, 1.5, "x", [], {}, [[]], True])
    node[key] = data.draw(wrong.filter(lambda value: value != inner or type(value) is not type(inner)))
    (path / ENGINE_JSON).write_text(json.dumps(record))
    with pytest.raises(ToolkitError) as caught:
        open_engine(path)
    assert "\n" not in str(caught.value)


def test_another_target_names_the_remedy(tiny_models: Any, tmp_path: Path) -> None:
    convert(str(tiny_models("llama")), tmp_path / "e")
    edit(lambda d: d.update(target="cpu-abacus"))(tmp_path / "e")
    sign(tmp_path / "e")
    artifact = open_engine(tmp_path / "e")
    assert artifact.target == "cpu-abacus"
    with pytest.raises(ToolkitError, match=r"cpu-abacus.*--target torch"):
        torch_weights(artifact)


@pytest.mark.parametrize(
    ("family", "packing"),
    [
        ("llama", Packing()),
        ("qwen2", Packing(load_format="int8")),
        ("llama", Packing(load_format="int4")),
        ("mixtral", Packing(target="torch")),
        ("gemma2", Packing(dtype="bfloat16", head_bits=16)),
    ],
)
def test_a_disk_without_room_is_told_first_and_one_with_room_is_never_refused(
    tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, packing: Packing
) -> None:
    from types import SimpleNamespace

    model, out = str(tiny_models(family)), tmp_path / "out"
    monkeypatch.setattr("toolkit.artifacts.output.room.shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(ToolkitError, match=r"out: about .* are needed there for the result .*, 0\.0 MB are free"):
        convert_for(model, out, packing, quiet=True)
    assert not list(tmp_path.iterdir())
    counted: list[int] = []
    monkeypatch.setattr("toolkit.convert.convert.check_room", lambda target, needed: counted.append(needed))
    convert_for(model, out, packing, quiet=True)
    assert 0 < counted[0] <= (out / ENGINE_ARRAYS).stat().st_size
