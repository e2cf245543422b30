"""Activations on disk beyond --cache-memory, the plan that is said first, and the memory that a run really takes."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import ToolkitError, UsageError
from toolkit.kernels.torch.product import prefers_int8
from toolkit.quant.calibrate import calibrate
from toolkit.quant.layers.spill import Spill, Tensors
from toolkit.quant.lite import Common, auto_gptq, auto_round, search, smooth_quant
from toolkit.quant.methods.kv import kv
from toolkit.quant.options import AutoRound, Gptq, Search


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("It was a bright cold day in April, and the clocks were striking thirteen times. " * 400)
    return path


def quick(text: Path, **more: Any) -> Common:
    return Common(calib_dataset=str(text), calib_samples=8, calib_seqlen=64, eval_tokens=256, batch_size=3, **more)


@given(sizes=st.lists(st.integers(1, 40), max_size=8), memory=st.integers(0, 800), data=st.data())
@settings(max_examples=60, deadline=None)
def test_tensors_are_a_list_wherever_they_lie(
    sizes: list[int], memory: int, data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("spill") / "here"
    expected = [torch.randn(n, 3) for n in sizes]
    with Spill(directory, memory) as spill:
        found = Tensors(expected, spill)
        for _ in range(5 if sizes else 0):
            i = data.draw(st.integers(0, len(sizes) - 1))
            expected[i] = torch.randn(sizes[i], 3)
            found[i] = expected[i]
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))
        held = sum(x.numel() * 4 for x in found._held if x is not None)
        assert held <= memory
        files = list(directory.glob("*")) if directory.exists() else []
        assert sum(f.stat().st_size for f in files) == 12 * sum(sizes) - held
    assert not directory.exists()


@pytest.mark.parametrize("run", [auto_gptq, smooth_quant, auto_round, search, kv, calibrate])
def test_nothing_depends_on_where_activations_lie(run: Any, tiny_models: Any, tmp_path: Path, text: Path) -> None:
    model = str(tiny_models("llama"))
    own = {search: Search(bits=5.0, tune_steps=2), auto_round: AutoRound(iters=1), auto_gptq: Gptq(tune_steps=2)}
    options = {"options": own[run]} if run in own else {}
    said: list[str] = []
    for name, memory in (("memory", 1.0), ("disk", 0.0)):
        common = replace(quick(text), cache_memory=memory, notice=said.append)
        run(model, tmp_path / name, common=common, **options)
    for file in sorted((tmp_path / "memory").glob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "disk" / file.name).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["disk", "memory"], "nothing is left behind"
    plan = r"memory: peak about .* GiB; activations (.*) GiB in memory, (.*) GiB on disk"
    lines = [re.fullmatch(plan, line) for line in said if line.startswith("memory:")]
    assert all(lines) and len(lines) == 2


@pytest.mark.parametrize("run", [auto_gptq, smooth_quant, kv, calibrate])
def test_a_disk_without_room_is_told_before_anything_is_computed(
    run: Any, tiny_models: Any, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = str(tiny_models("llama")), list[Path]()

    def full(folder: Path) -> Any:
        asked.append(Path(folder))
        return SimpleNamespace(free=1000)

    monkeypatch.setattr("toolkit.artifacts.output.room.shutil.disk_usage", full)
    work = []
    common = quick(text)
    told = r"are needed there for the result and the work on it, 0\.0 MB are free"
    with pytest.raises(ToolkitError, match=told):
        run(model, tmp_path / "new" / "out", common=common, progress=lambda *at: work.append(at))
    assert asked == [tmp_path] and not work and not list(tmp_path.iterdir())


@pytest.mark.parametrize("run", [smooth_quant, kv, calibrate])
def test_what_is_there_already_needs_no_room(
    run: Any, tiny_models: Any, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, common = str(tiny_models("llama")), quick(text)
    assert not run(model, tmp_path / "out", common=common).already_there
    monkeypatch.setattr("toolkit.artifacts.output.room.shutil.disk_usage", lambda folder: SimpleNamespace(free=1000))
    assert run(model, tmp_path / "out", common=common).already_there
    with pytest.raises(ToolkitError, match="are needed there"):
        run(model, tmp_path / "out", common=replace(common, overwrite=True))


def test_what_disk_is_said_to_take_is_taken(
    tiny_models: Any, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers as they are saved, what gradients tell and the result lie there together at the end."""
    model, counted, saved = str(tiny_models("llama", hidden_size=256, intermediate_size=512)), list[int](), list[int]()
    monkeypatch.setattr("toolkit.quant.run.check_room", lambda target, needed, overwrite: counted.append(needed))

    def watch(what: str, done: int, total: int) -> None:
        partial = tmp_path / ".out.partial"
        files = [*partial.rglob("layer.*.safetensors"), *partial.rglob("guide/*")]
        saved.append(sum(file.stat().st_size for file in files) if what == "writing" else 0)

    auto_gptq(model, tmp_path / "out", Gptq(tune_steps=0), common=quick(text), progress=watch)
    taken = max(saved) + sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert max(saved) > 0 and 0.8 * taken < counted[0] < 1.25 * taken


def test_the_plan_is_said_before_anything_is_read(tiny_models: Any, tmp_path: Path, text: Path) -> None:
    heard: list[str] = []
    common = replace(quick(text), cache_memory=0.0, notice=heard.append)
    smooth_quant(
        str(tiny_models("llama")), tmp_path / "out", common=common, progress=lambda what, *_: heard.append(what)
    )
    assert heard[0].startswith("memory: peak about") and heard[1].startswith("disk: about 0.")
    assert heard[2] == "reading the model"
    with pytest.raises(UsageError, match="--cache-memory: expected GiB, 0 or more, found -1"):
        smooth_quant(str(tiny_models("llama")), tmp_path / "x", common=replace(common, cache_memory=-1.0))


def test_nothing_of_a_layer_is_held_beside_the_next(tiny_models: Any, tmp_path: Path, text: Path) -> None:
    sizes: list[int] = []

    def look(what: str, done: int, total: int) -> None:
        if what == "quantizing and measuring layers":
            found = {
                t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                for t in gc.get_objects()
                if type(t) is torch.Tensor and t.dtype in (torch.float32, torch.uint8)
            }
            sizes.append(sum(found.values()))

    common = replace(quick(text), cache_memory=0.0)
    model = tiny_models("llama")
    gc.collect()
    auto_gptq(str(model), tmp_path / "out", Gptq(tune_steps=0), common=common, progress=look)
    assert len(sizes) == 3 and max(sizes) <= sizes[0], "a layer's weights, codes and statistics are gone after it"


MEASURED = """
import json, sys
from toolkit.quant import lite, options as o
method, model, out, text, samples, given = sys.argv[1:]
common = lite.Common(calib_dataset=text, calib_samples=int(samples), calib_seqlen=256, eval_tokens=512,
                     cache_memory=0.0, notice=print)
kinds = {"auto_awq": o.Awq, "auto_gptq": o.Gptq, "auto_round": o.AutoRound, "search": o.Search,
         "smooth_quant": o.SmoothQuant}
getattr(lite, method)(model, out, kinds[method](**json.loads(given)), common=common)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
GIB = 1 << 30
SHAPES = {  # hidden, inner, heads, vocabulary
    "large-vocabulary": (512, 2048, 8, 150_000),  # breaks the limit if the embedding is held in float32
    "7b": (4096, 11008, 32, 32_000),
}


def measured(
    method: str, model: Path, tmp_path: Path, text: Path, samples: int = 8, **options: Any
) -> tuple[float, float]:
    """GiB that the process took at most, and those that it had said."""
    arguments = [method, model, tmp_path / "out", text, samples, json.dumps(options)]
    command = [sys.executable, "-c", MEASURED, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    planned = re.search(r"about ([0-9.]+) GiB", done.stdout)
    assert planned is not None
    peak = int(done.stdout.split()[-1]) / (1 << 20)
    print(f"{method}: {peak:.2f} GiB, {planned[1]} planned")
    return peak, float(planned[1])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
@pytest.mark.parametrize("method", ["auto_gptq", "smooth_quant", "auto_awq"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_peak_is_within_the_limit_and_near_the_plan(
    shape: str, method: str, tiny_checkpoint: Any, tmp_path: Path, text: Path
) -> None:
    """1 GiB + 4 × the largest MLP in float32 + 4 · K² in float32, activations on disk; two layers, for the second must
    not add to the first."""
    hidden, inner, heads, vocabulary = SHAPES[shape]
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocabulary, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    model = tiny_checkpoint("llama", tmp_path / "model", dtype="bfloat16", **sizes)
    peak, planned = measured(method, model, tmp_path, text)
    assert peak <= 1 + 4 * 4 * (3 * hidden * inner + inner**2) / GIB
    # The plan counts quantized layers in float32; int8 products, where they are fast, take a quarter of that.
    above = 1.75 if method == "smooth_quant" and prefers_int8() else 1.35
    assert peak <= planned <= above * peak + 0.1  # rounded up to a tenth; peaks differ by 7 % from run to run


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
@pytest.mark.parametrize("method", ["auto_gptq", "smooth_quant"])
def test_experts_do_not_add_up(method: str, tiny_checkpoint: Any, tmp_path: Path, text: Path) -> None:
    """A layer of 1.1 GiB in float32, 96 experts of 12 MiB: the limit counts one of them."""
    size, count = 1024, 96
    shape = {"hidden_size": size, "intermediate_size": size, "num_hidden_layers": 1, "num_local_experts": count}
    model = tiny_checkpoint("mixtral", tmp_path / "model", dtype="bfloat16", num_attention_heads=8, **shape)
    peak, planned = measured(method, model, tmp_path, text)
    expert, matrix = 4 * 3 * size**2, 4 * size**2
    assert count * expert > 1.1 * GIB
    assert peak <= 1 + 4 * (expert + matrix) / GIB
    assert peak <= planned <= 1.35 * peak + 0.1  # rounded up to a tenth; peaks differ by 7 % from run to run


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_the_plan_counts_the_inputs_that_auto_round_is_handed(tiny_checkpoint: Any, tmp_path: Path) -> None:
    """Activations are on disk between the layers, but its library wants those of a layer in memory."""
    samples, shape = 256, {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1}
    text = tmp_path / "long.txt"
    text.write_text("It was a bright cold day in April, and the clocks were striking thirteen times. " * 9000)
    model = tiny_checkpoint("llama", tmp_path / "model", dtype="bfloat16", num_attention_heads=8, **shape)
    peak, planned = measured("auto_round", model, tmp_path, text, samples, iters=2)
    assert peak <= planned <= 1.35 * peak + 0.1
