"""LoRA adapters on the native runner, in float32: the oracles are models with the adapter merged into their weights by
torch, and the same requests alone."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from toolkit.artifacts.adapters.adapter import read_changes
from toolkit.artifacts.adapters.modules import modules_of
from toolkit.errors import ToolkitError
from toolkit.models.registry import get, names
from toolkit.quant.merge import merge
from toolkit.runners.base import RunnerError, RunnerOptions
from toolkit.runners.choose import open_model, open_runner
from toolkit.runners.native import library
from toolkit.runners.native.adapters import ABSENT, PackedAdapter, Shelf
from toolkit.runners.native.packing.pack import pack_alike, pack_dense

pytestmark = pytest.mark.skipif(library.available() is not None, reason="the native library does not run here")
ATTENTION = "q_proj|v_proj"
ALL = r"(?:[qkvo]|gate|up|down|qkv|gate_up|wqkv|wo)_?(?:proj)?|w[123]"
LATENT = "q_[ab]_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj"
EXPERTS = r"experts\.\d+\.w[123]|gate|[qkvo]_proj"


def runner_for(model: Path, *adapters: Path, **options: Any) -> Any:
    fields = {"device": "cpu", "dtype": "float32", "block_size": 16, "threads": 2} | options
    named = tuple((a.name, str(a)) for a in adapters)
    load_format = fields.pop("load_format", "auto")
    made = RunnerOptions(adapters=named, **fields)
    runner, why = open_runner(model, backend="turbomind", options=made, load_format=load_format)
    assert runner.name == "native", why
    return runner


def ids(count: int, seed: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(3, 300, count)]


def alone(support: Any, runner: Any, prompt: list[int], adapter: int = -1) -> np.ndarray:
    """[len(prompt), V]: all but the last tokens as a prompt, then one alone."""
    driver = support("steps").Driver(runner)
    number, use = driver.add(), {"adapter": np.array([adapter], np.int32)}
    first = driver.step({number: prompt[:-1]}, "all", **use).logits
    return np.concatenate([first, driver.step({number: prompt[-1:]}, "all", **use).logits])


def check_merged(support: Any, model: Path, made: Path, merged: Path, **options: Any) -> None:
    """An adapter gives what merged weights give, and rows without it the base's bits."""
    expected = alone(support, runner_for(merged, **options), ids(43, 0))
    runner = runner_for(model, made, **options)
    found = alone(support, runner, ids(43, 0), adapter=0)
    np.testing.assert_allclose(found, expected, rtol=3e-4, atol=3e-4)
    base = alone(support, runner_for(model, **options), ids(43, 0))
    np.testing.assert_array_equal(alone(support, runner, ids(43, 0)), base)
    assert np.abs(found - base).max() > 0.05


@pytest.mark.parametrize(
    "family, targets, config",
    [
        ("llama", ATTENTION, {}),
        ("llama", ALL, {"rank": 24, "use_rslora": True}),
        ("llama", ALL, {"rank_pattern": {"o_proj": 2}, "alpha_pattern": {"down_proj": 3}}),
        ("llama", f"{ALL}|lm_head", {"rank": 40}),
        ("llama", "embed_tokens", {}),
        ("llama", ALL, {"use_dora": True}),
        ("llama", "q_proj|down_proj", {"modules_to_save": ["lm_head", "embed_tokens"]}),
        ("phi3", ALL, {"use_dora": True}),
        ("internlm2", ALL, {}),
        ("gemma2", ALL, {}),
        ("deepseek_v3", LATENT, {}),
        ("deepseek_v3", LATENT, {"use_dora": True}),
        ("minicpm3", "kv_b_proj", {"modules_to_save": ["kv_a_proj_with_mqa"]}),
        ("mixtral", EXPERTS, {}),
    ],
)
def test_an_adapter_gives_what_merged_weights_give(
    family: str, targets: str, config: Any, tiny_models: Any, support: Any, tmp_path: Path
) -> None:
    model, adapters = tiny_models(family), support("adapters")
    made = adapters.write_adapter(tmp_path / "one", model, targets, **config)
    check_merged(support, model, made, adapters.merge(model, made, tmp_path / "merged"))


@pytest.mark.parametrize("down_first", [True, False])
def test_experts_that_one_parameter_holds(down_first: bool, tiny_models: Any, support: Any, tmp_path: Path) -> None:
    """As PEFT writes them (target_parameters), whichever of the two it wraps first; and merged."""
    model, g, rank = tiny_models("mixtral"), torch.Generator().manual_seed(3), 3
    weights = load_file(model / "model.safetensors")
    tensors = {}
    for layer in range(2):
        experts = [f"model.layers.{layer}.block_sparse_moe.experts.{e}" for e in range(4)]
        for place, joined in ((".base_layer", ("w1", "w3")), ("", ("w2",))):
            place = place if not down_first else "" if place else ".base_layer"
            rows, columns = (sum(weights[f"{experts[0]}.{n}.weight"].shape[i] for n in joined) for i in (0, 1))
            a = torch.randn(4 * rank, columns // len(joined), generator=g) / 8
            b = torch.randn(rows, 4 * rank, generator=g) / 8
            begin = f"base_model.model.model.layers.{layer}.mlp.experts{place}"
            tensors |= {f"{begin}.lora_A.weight": a, f"{begin}.lora_B.weight": b}
            # ParamWrapper.get_delta_weight in peft/tuners/lora/layer.py
            added = torch.einsum("o r e, e r i -> e o i", b.view(rows, rank, 4), a.view(4, rank, -1)) * 6 / rank
            for e, expert in enumerate(experts):
                for n, part in zip(joined, added[e].chunk(len(joined)), strict=True):
                    weights[f"{expert}.{n}.weight"] += part
    (made := tmp_path / "made").mkdir()
    save_file(tensors, made / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_parameters": ["gate_up_proj", "down_proj"]}
    (made / "adapter_config.json").write_text(json.dumps(fields))
    expected = shutil.copytree(model, tmp_path / "expected")
    save_file(weights, expected / "model.safetensors", {"format": "pt"})
    check_merged(support, model, made, expected)
    merge(str(model), str(made), tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert all(torch.allclose(merged[name], weights[name], atol=1e-6) for name in weights)


def write_three(model: Path, support: Any, root: Path) -> list[Path]:
    write = support("adapters").write_adapter
    return [
        write(root / "a", model, ATTENTION, rank=3, seed=2),
        write(root / "b", model, f"{ALL}|lm_head", rank=20, seed=3, use_rslora=True),
        write(root / "c", model, ALL, rank=8, seed=4, use_dora=True, modules_to_save=["embed_tokens"]),
    ]


@pytest.mark.parametrize("load_format, dtype", [("auto", "bfloat16"), ("int4", "float32"), ("int8", "bfloat16")])
def test_a_rows_bits_depend_on_nothing_but_itself(
    load_format: str, dtype: str, tiny_models: Any, support: Any, tmp_path: Path
) -> None:
    """Rows with and without adapters in one step, prompts and single tokens, on one thread and on two."""
    model = tiny_models("llama")
    made = write_three(model, support, tmp_path)
    how = {"dtype": dtype, "load_format": load_format}
    use, lengths = np.array([1, -1, 2, 0, 1, -1], np.int32), [5, 19, 1, 300, 30, 8]
    prompts = [ids(n, i) for i, n in enumerate(lengths)]
    single = runner_for(model, *made, threads=1, **how)
    expected = [alone(support, single, [*prompt, 7], int(a)) for prompt, a in zip(prompts, use, strict=True)]
    plain = runner_for(model, threads=1, **how)
    for prompt, a, rows in zip(prompts, use, expected, strict=True):
        base = alone(support, plain, [*prompt, 7])
        assert (a < 0) == bool((base == rows).all())
    driver = support("steps").Driver(runner_for(model, *made, threads=2, **how))
    numbers = [driver.add() for _ in use]
    first = driver.step(dict(zip(numbers, prompts, strict=True)), "all", adapter=use).logits
    more = driver.step({n: [7] for n in numbers}, "all", adapter=use).logits
    for n, rows in enumerate(np.split(first, np.cumsum(lengths)[:-1])):
        np.testing.assert_array_equal(np.concatenate([rows, more[n : n + 1]]), expected[n])


def test_each_row_of_latent_attention_has_its_own_keys_and_values(
    tiny_models: Any, support: Any, tmp_path: Path
) -> None:
    """Few tokens or many (400); beside others as alone."""
    model, adapters = tiny_models("deepseek_v3"), support("adapters")
    made = [adapters.write_adapter(tmp_path / name, model, LATENT, seed=seed) for name, seed in (("a", 2), ("b", 3))]
    use, lengths = np.array([0, -1, 1, 0, 1, -1], np.int32), [5, 9, 1, 8, 12, 1]
    prompts = [ids(n, i) for i, n in enumerate(lengths)]
    single = runner_for(model, *made, threads=1)
    expected = [alone(support, single, [*prompt, 7], int(a)) for prompt, a in zip(prompts, use, strict=True)]
    runner = runner_for(model, *made)
    driver = support("steps").Driver(runner)
    numbers = [driver.add() for _ in use]
    first = driver.step(dict(zip(numbers, prompts, strict=True)), "all", adapter=use).logits
    more = driver.step({n: [7] for n in numbers}, "all", adapter=use).logits
    for n, rows in enumerate(np.split(first, np.cumsum(lengths)[:-1])):
        np.testing.assert_array_equal(np.concatenate([rows, more[n : n + 1]]), expected[n])
    packed = runner._shelf._held[0].tensors
    assert all(whole.data.nbytes == 0 for whole in packed[3::5])  # of low rank, kv_b too
    long = ids(400, 9)
    merged = [adapters.merge(model, one, tmp_path / f"merged {one.name}") for one in made]
    for i, other in enumerate(merged):
        found, right = alone(support, runner, long, i), alone(support, runner_for(other), long)
        np.testing.assert_allclose(found, right, rtol=1e-3, atol=1e-3)


def test_more_adapters_than_memory_are_read_again(tiny_models: Any, support: Any, tmp_path: Path) -> None:
    model = tiny_models("llama")
    made = write_three(model, support, tmp_path)
    whole = runner_for(model, *made)
    expected = [alone(support, whole, ids(9, 0), i) for i in range(3)]
    size = max(whole._shelf._held[i].nbytes for i in range(3))
    small = runner_for(model, *made, adapter_memory=size)
    for i in (0, 1, 2, 2, 0):
        np.testing.assert_array_equal(alone(support, small, ids(9, 0), i), expected[i])
        assert small._shelf.nbytes <= size and i in small._shelf.held
    assert small._shelf.reads > 3


def test_an_adapter_is_read_while_others_run(
    tiny_models: Any, support: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps do not wait for the files of one that a request will need; what is wrong with it, its first step tells."""
    model = tiny_models("llama")
    made = write_three(model, support, tmp_path)
    expected = alone(support, runner_for(model, made[1]), ids(9, 0), 0)
    runner = runner_for(model, *made, adapter_memory=1)
    base = alone(support, runner, ids(9, 0))
    assert runner._shelf.held == [2] and runner.adapter_ready(2)
    begin, go_on, reads = threading.Event(), threading.Event(), 0

    def slowly(*given: Any) -> Any:
        nonlocal reads
        reads += 1
        begin.set()
        assert go_on.wait(60)
        return read_changes(*given)

    monkeypatch.setattr("toolkit.artifacts.adapters.adapter.read_changes", slowly)
    assert not runner.adapter_ready(1)
    assert begin.wait(60)
    np.testing.assert_array_equal(alone(support, runner, ids(9, 0)), base)
    assert not runner.adapter_ready(1)
    go_on.set()
    assert runner.adapter_ready(1, seconds=60)
    np.testing.assert_array_equal(alone(support, runner, ids(9, 0), 1), expected)
    assert reads == 1  # by no step again

    (made[0] / "adapter_model.safetensors").write_bytes(b"spoiled")
    assert runner.adapter_ready(0, seconds=60)
    with pytest.raises(RunnerError, match=r"adapter_model\.safetensors"):
        alone(support, runner, ids(9, 0), 0)
    np.testing.assert_array_equal(alone(support, runner, ids(9, 0)), base)


_CROWDED = """
import resource, sys
from pathlib import Path
import numpy as np
from toolkit.runners.base import RunnerError, RunnerOptions
from toolkit.runners.choose import open_runner
sys.path.insert(0, sys.argv[1])
import steps
options = RunnerOptions(device="cpu", dtype="float32", block_size=16, threads=1)
runner = open_runner(Path(sys.argv[2]), backend="turbomind", options=options)[0]
driver = steps.Driver(runner)
runner.add_adapter(0, sys.argv[3])
runner.read_adapter(1, sys.argv[4])
assert runner.adapter_ready(1, 60)
def found():
    return driver.step({driver.add(): [7] * 300}, "all", adapter=np.array([0], np.int32)).logits
before = found()
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (40 << 20),) * 2)
try:
    runner.add_adapter(1, sys.argv[4])
except RunnerError as error:
    print(error, np.array_equal(found(), before))
"""


def test_one_that_memory_does_not_hold_leaves_the_others(tiny_models: Any, support: Any, tmp_path: Path) -> None:
    """What is made of 512 rows in 4096 ranks takes more than the process may have."""
    model, write = tiny_models("llama"), support("adapters").write_adapter
    made = [write(tmp_path / str(rank), model, "q_proj", rank=rank) for rank in (4, 4096)]
    command = [sys.executable, "-c", _CROWDED, str(Path(__file__).parents[1] / "support"), str(model), *map(str, made)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == "out of memory True", done.stderr


def test_an_adapter_that_leaves_is_there_until_no_step_reads_it() -> None:
    """``drop`` waits for the step that runs: the matrices that it reads may go after that alone."""
    alive: dict[int, weakref.ref[PackedAdapter]] = {}
    dropped = []

    def read(number: int) -> PackedAdapter:
        made = PackedAdapter(np.array([0], np.int32), (ABSENT,) * 4)
        alive[number] = weakref.ref(made)
        return made

    def drop(number: int) -> None:
        dropped.append((number, alive[number]() is not None))

    shelf = Shelf(read, lambda number, adapter: None, drop)
    for number in range(3):
        shelf.need([number])
    shelf.forget(1)
    shelf.empty()
    assert dropped == [(1, True), (0, True), (2, True)] and not any(one() for one in alive.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matrices_packed_together_are_those_packed_alone(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    shapes = [(4, 64), (64, 4), (24, 33), (4, 64), (1, 16), (64, 4)]
    weights = [torch.randn(shape, generator=g) for shape in shapes] + [torch.randn(16, 5, generator=g).T]
    for weight, found in zip(weights, pack_alike(weights, dtype), strict=True):
        expected = pack_dense(weight.to(dtype)).in_memory()
        assert found.meta == expected.meta
        np.testing.assert_array_equal(found.data, expected.data)


def test_adapters_come_and_go(tiny_models: Any, support: Any, tmp_path: Path) -> None:
    model = tiny_models("llama")
    made = write_three(model, support, tmp_path)
    expected = alone(support, runner_for(model, made[0]), ids(9, 0), 0)
    runner = runner_for(model)
    base = alone(support, runner, ids(9, 0))
    runner.add_adapter(5, made[0])
    np.testing.assert_array_equal(alone(support, runner, ids(9, 0), 5), expected)
    runner.remove_adapter(5)
    with pytest.raises(RunnerError, match="adapter: there is none of number 5"):
        alone(support, runner, ids(9, 0), 5)
    np.testing.assert_array_equal(alone(support, runner, ids(9, 0)), base)


def spoil(path: Path, change: Any) -> Path:
    """The adapter with its tensors changed."""
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return path


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.update({k: v * float("nan") for k, v in list(t.items())[:1]}), "expected finite numbers"),
        (
            lambda t: t.update(
                {k: v[:0] for k, v in t.items() if "lora_A" in k} | {k: v[:, :0] for k, v in t.items() if "lora_B" in k}
            ),
            "rank: expected 1 to",
        ),
        (lambda t: t.pop(next(k for k in t if "lora_B" in k)), "is missing beside its partner"),
        (
            lambda t: t.update(
                {f"{NOWHERE}.lora_A.weight": torch.ones(4, 8), f"{NOWHERE}.lora_B.weight": torch.ones(8, 4)}
            ),
            "which the model has not",
        ),
    ],
)
def test_bad_tensors_are_said_in_one_line(
    change: Any, message: str, tiny_models: Any, support: Any, tmp_path: Path
) -> None:
    model = tiny_models("llama")
    made = spoil(support("adapters").write_adapter(tmp_path / "a", model, ATTENTION), change)
    with pytest.raises(ToolkitError) as error:
        runner_for(model, made).load_weights()
    assert message in str(error.value) and "\n" not in str(error.value)


def test_another_models_adapter_and_a_hostile_pickle(tiny_models: Any, support: Any, tmp_path: Path) -> None:
    model, write = tiny_models("llama"), support("adapters").write_adapter
    with pytest.raises(ToolkitError, match=r"q_proj: expected lora_A \[r, 96\].*found \[4, 64\]"):
        runner_for(tiny_models("llama", hidden_size=96), write(tmp_path / "a", model, "q_proj")).load_weights()
    made = write(tmp_path / "b", model, "q_proj")
    (made / "adapter_model.safetensors").unlink()
    with pytest.raises(ToolkitError, match=r"expected adapter_model.safetensors or adapter_model.bin"):
        runner_for(model, made).load_weights()
    (made / "adapter_model.bin").write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    with pytest.raises(ToolkitError, match=r"adapter_model\.bin"):
        runner_for(model, made).load_weights()
    assert not (tmp_path / "ran").exists()


NOWHERE = "base_model.model.model.layers.0.self_attn.w_proj"


class Hostile:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


FAMILIES = [name for name in names() if get(name).recipe is None and not get(name).encodes]


def test_modules_of_a_model_that_sees_are_known_by_transformers_names_too(
    tiny_models: Any, support: Any, tmp_path: Path
) -> None:
    """PEFT writes model.language_model.layers…, where checkpoints have language_model.model.layers…."""
    model = tiny_models("gemma3")
    made = support("adapters").write_adapter(tmp_path / "a", model, "language_model.*(?:q_proj|v_proj)")
    opened = open_model(model)
    expected = read_changes(made, opened.spec, opened.stored)
    assert expected and any("language_model" in name for name in load_file(made / "adapter_model.safetensors"))
    for begin in ("language_model.model.", "model.language_model."):
        tensors = {
            re.sub(r"(?<=^base_model\.model\.)(language_model\.model|model\.language_model)\.", begin, name): tensor
            for name, tensor in load_file(made / "adapter_model.safetensors").items()
        }
        save_file(tensors, made / "adapter_model.safetensors")
        found = read_changes(made, opened.spec, opened.stored)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name].a, change.a) for name, change in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tiny_models: Any, support: Any, tmp_path: Path) -> None:
    """All linears that can be changed at once, by the names and shapes of the family's checkpoint."""
    model = tiny_models(family)
    opened = open_model(model)
    known = modules_of(opened.spec, opened.stored, wide=True)
    linears = [s for s in known.values() if s.kind == "linear" and not (s.transposed and s.stacked) and not s.unit_rows]
    modules, turned = {s.name for s in linears}, {s.name for s in linears if s.transposed}
    stored = load_file(next(model.glob("*.safetensors")))
    targets = "|".join(re.escape(name) for name in sorted(modules) if f"{name}.weight" in stored)
    made = support("adapters").write_adapter(tmp_path / "one", model, f"^(?:{targets})", rank=5, turned=turned)
    merge(str(model), str(made), tmp_path / "merged")
    expected = alone(support, runner_for(tmp_path / "merged"), ids(23, 0))
    found = alone(support, runner_for(model, made), ids(23, 0), adapter=0)
    base = alone(support, runner_for(model), ids(23, 0))
    error, change = np.abs(found - expected).max(), np.abs(base - expected).max()
    assert error < 2e-3 * max(1.0, np.abs(expected).max()) and error < 0.05 * change
