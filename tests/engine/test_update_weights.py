"""New weights in a running engine: what it says afterwards is what an engine opened with them says, bit for bit, and
weights that cannot be leave the old ones."""

from __future__ import annotations

import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from toolkit import GenerationConfig, PytorchEngineConfig, TurbomindEngineConfig, pipeline
from toolkit.artifacts.weight_files.new_weight_files import WeightFiles
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.errors import ToolkitError, UsageError
from toolkit.messages import Response

PROMPT = list(range(5, 155))
GREEDY = GenerationConfig(max_new_tokens=12, ignore_eos=True, logprobs=0)
LONG = GenerationConfig(max_new_tokens=200, ignore_eos=True)
CONFIGS = {
    "torch": PytorchEngineConfig(device_type="cpu", session_len=400),
    "ranks": PytorchEngineConfig(device_type="cpu", session_len=400, tp=2),
    "native": TurbomindEngineConfig(device="cpu", session_len=400),
    "int8": TurbomindEngineConfig(device="cpu", session_len=400, load_format="int8"),
}


def answer(engine: AsyncEngine, prompt: list[int] = PROMPT, config: GenerationConfig = GREEDY) -> Response:
    whole = Response()
    for delta in engine.generate_sync(prompt, config):
        whole.extend(delta)
    return whole


def said(found: Response) -> tuple[list[int], list[dict[int, float]]]:
    assert found.finish_reason == "length", found.error_message
    return found.token_ids, found.logprobs or []


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.fixture(scope="module")
def trained(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Of a family a model, and the same after some training."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(family: str) -> tuple[Path, Path]:
        if family not in made:
            before, after = tiny_models(family), tmp_path_factory.mktemp("trained") / family
            shutil.copytree(before, after)
            generator = torch.Generator().manual_seed(3)
            for file in after.glob("*.safetensors"):
                tensors = load_file(file)
                for name in sorted(tensors):
                    noise = torch.randn(tensors[name].shape, generator=generator)
                    tensors[name] = tensors[name] + (0.05 * noise).to(tensors[name].dtype)
                save_file(tensors, file, {"format": "pt"})
            made[family] = before, after
        return made[family]

    return make


def files_of(what: Path | dict[str, Any]) -> WeightFiles:
    files = WeightFiles()
    if isinstance(what, dict):
        files.add_tensors(what.items())
    else:
        files.add_copy(what)
    return files


@pytest.mark.parametrize(
    ("family", "runner", "process"),
    [
        ("llama", "torch", False),
        ("llama", "ranks", False),
        ("llama", "native", False),
        ("llama", "native", True),
        ("qwen3_moe", "native", False),
        ("qwen3_moe", "torch", False),
        ("llama", "int8", False),
    ],
)
def test_it_says_what_an_engine_with_those_weights_says(trained: Any, family: str, runner: str, process: bool) -> None:
    before, after = trained(family)
    with AsyncEngine.open(after, backend_config=CONFIGS[runner]) as fresh:
        wanted = said(answer(fresh))
    with AsyncEngine.open(before, backend_config=CONFIGS[runner], process=process) as engine:
        old = said(answer(engine))
        assert old != wanted and answer(engine).cached_tokens > 0
        for _ in range(2):
            engine.weights.update(files_of(after))
            found = answer(engine)
            assert said(found) == wanted and found.cached_tokens == 0
        engine.weights.sleep()
        engine.weights.wake()
        assert said(answer(engine)) == wanted
        engine.weights.update(files_of(tensors_of(before)))
        assert said(answer(engine)) == old


def test_a_process_that_is_started_again_has_them(trained: Any, kill_process: Any) -> None:
    before, after = trained("llama")
    with AsyncEngine.open(before, backend_config=CONFIGS["native"], process=True) as engine:
        old = said(answer(engine))
        engine.weights.update(files_of(after))
        new = said(answer(engine))
        kill_process(engine)
        assert said(answer(engine)) == new != old


def without(tensors: dict[str, Any], name: str) -> dict[str, Any]:
    return {k: v for k, v in tensors.items() if k != name}


NAME = "model.layers.1.mlp.down_proj.weight"
WRONG: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    f"{NAME} is missing": lambda t: without(t, NAME),
    rf"{NAME}: expected shape .*found \[2, 3\]": lambda t: t | {NAME: torch.zeros(2, 3, dtype=t[NAME].dtype)},
    f"{NAME}: expected .*found I64": lambda t: t | {NAME: torch.zeros(t[NAME].shape, dtype=torch.int64)},
    f"{NAME}: expected .*as the model has it, found F16": lambda t: t | {NAME: t[NAME].half()},
    "model.layers.2.mlp.down_proj.weight.*layers": lambda t: t | {NAME.replace("1", "2"): t[NAME]},
}


def answer_after(trained: Any, runner: str) -> list[int]:
    with AsyncEngine.open(trained("llama")[1], backend_config=CONFIGS[runner]) as fresh:
        return answer(fresh).token_ids


@pytest.mark.parametrize("runner", ["torch", "native"])
def test_wrong_weights_leave_the_old_ones(trained: Any, runner: str) -> None:
    before, after = trained("llama")
    good = tensors_of(after)
    with AsyncEngine.open(before, backend_config=CONFIGS[runner], process=runner == "native") as engine:
        old = answer(engine).token_ids
        for match, spoil in WRONG.items():
            files = files_of(spoil(good))
            with pytest.raises(ToolkitError, match=f"update_weights: .*{match}") as caught:
                engine.weights.update(files, "abort")
            assert not files.path.exists() and str(files.path) not in str(caught.value)
        with pytest.raises(UsageError, match="mode"):
            engine.weights.update(files_of(after), "later")
        assert answer(engine).token_ids == old != answer_after(trained, runner)


def test_weights_that_fail_while_they_are_loaded_leave_the_old_ones(
    trained: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = trained("llama")
    with AsyncEngine.open(before, backend_config=CONFIGS["native"]) as engine:
        old = said(answer(engine))
        loop: Any = engine._loop
        load, calls = loop._core.runner.load_weights, []

        def fail_once() -> None:
            calls.append(0)
            if len(calls) == 1:
                raise MemoryError("no room")
            load()

        monkeypatch.setattr(loop._core.runner, "load_weights", fail_once)
        with pytest.raises(ToolkitError, match="old ones are back: no room"):
            engine.weights.update(files_of(after))
        assert len(calls) == 2 and said(answer(engine)) == old
        engine.weights.update(files_of(after))
        assert said(answer(engine)) != old


def test_what_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"x": torch.ones(2)}, tmp_path / "torch.bin")
    with closing(WeightFiles()) as files:
        for data in (pickle.dumps(Bomb()), (tmp_path / "torch.bin").read_bytes()):
            with pytest.raises(ToolkitError, match="pickle"):
                files.add_bytes(data)
        for data in (b"", b"\x10", (1 << 60).to_bytes(8, "little"), b"\x02\0\0\0\0\0\0\0[]", b"x" * 100):
            with pytest.raises(ToolkitError, match="part 1 of the new weights"):
                files.add_bytes(data)
        assert not (tmp_path / "ran").exists() and not files.names
        files.add_tensors({"a": torch.ones(3)}.items())
        with pytest.raises(ToolkitError, match=r"part 2.* a is there already"):
            files.add_tensors({"b": np.ones(2, np.float32), "a": torch.ones(3)}.items())
        for wrong, match in ((("a", 3), "a: expected a torch tensor"), ("b", "expected names"), ((1, 2), "names")):
            with pytest.raises(UsageError, match=match):
                files.add_tensors([wrong])  # type: ignore[list-item]
        for path in (tmp_path, tmp_path / "torch.bin", tmp_path / "nowhere"):
            with pytest.raises(ToolkitError, match=r"expected a \.safetensors file"):
                files.add_copy(path)


class Stream:
    """A long answer that is read by a thread."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.whole = Response()
        self.begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(engine.generate_sync(PROMPT, LONG),))
        self._thread.start()
        assert self.begun.wait(60)

    def _read(self, deltas: Iterator[Response]) -> None:
        for delta in deltas:
            self.whole.extend(delta)
            if len(self.whole.token_ids) > 3:
                self.begun.set()

    def end(self) -> Response:
        self._thread.join(60)
        return self.whole


def interrupted(
    engine: AsyncEngine, before: Path, after: Path, mode: str, good: Callable[[Response], bool]
) -> Response:
    """A long answer during which the weights have been replaced; one that was over before is asked for again."""
    for _ in range(50):
        engine.weights.update(files_of(before))
        files = files_of(after)
        stream = Stream(engine)
        engine.weights.update(files, mode)
        if good(found := stream.end()):
            return found
    raise AssertionError("every answer was over before its weights were replaced")


@pytest.mark.parametrize(("runner", "process"), [("torch", False), ("native", False), ("native", True)])
def test_streams_in_flight(trained: Any, runner: str, process: bool) -> None:
    before, after = trained("llama")
    with AsyncEngine.open(after, backend_config=CONFIGS[runner]) as fresh:
        with AsyncEngine.open(before, backend_config=CONFIGS[runner], process=process) as engine:
            old = answer(engine, config=LONG).token_ids
            ended = interrupted(engine, before, after, "abort", lambda answer: answer.finish_reason == "abort")
            assert ended.token_ids == old[: len(ended.token_ids)]
            assert interrupted(engine, before, after, "wait", lambda answer: True).token_ids == old
            kept = interrupted(engine, before, after, "keep", lambda answer: answer.token_ids != old).token_ids
            assert len(kept) == 200
            first = next(i for i, (a, b) in enumerate(zip(kept, old, strict=True)) if a != b)
            again = GenerationConfig(max_new_tokens=200 - first, ignore_eos=True)
            assert answer(fresh, PROMPT + kept[:first], again).token_ids == kept[first:]
            assert answer(engine, config=LONG).token_ids == answer(fresh, config=LONG).token_ids


@pytest.mark.parametrize(("runner", "process"), [("torch", False), ("native", False), ("native", True)])
def test_an_engine_without_weights_waits_for_them(trained: Any, tmp_path: Path, runner: str, process: bool) -> None:
    from dataclasses import replace

    before, after = trained("llama")
    bare = tmp_path / "bare"
    shutil.copytree(before, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    with AsyncEngine.open(after, backend_config=CONFIGS[runner]) as fresh:
        wanted = said(answer(fresh))
    for model in (bare, before):
        config = replace(CONFIGS[runner], empty_init=True)
        with AsyncEngine.open(model, backend_config=config, process=process) as engine:
            assert engine.weights.asleep and engine.weights.empty
            refused = answer(engine)
            assert refused.error_code == 503 and "update_weights" in (refused.error_message or "")
            engine.weights.wake(["weights"])  # as LMDeploy's users do first
            with pytest.raises(UsageError, match="update_weights"):
                engine.weights.wake()
            with pytest.raises(ToolkitError, match="is missing"):
                engine.weights.update(files_of(without(tensors_of(after), NAME)))
            assert engine.weights.asleep and answer(engine).error_code == 503
            engine.weights.update(files_of(after))
            assert not engine.weights.asleep and said(answer(engine)) == wanted
            engine.weights.wake(["kv_cache"])  # as they do last


def test_asleep_they_are_taken_and_the_cache_stays_away(trained: Any) -> None:
    before, after = trained("llama")
    with AsyncEngine.open(after, backend_config=CONFIGS["native"]) as fresh:
        wanted = said(answer(fresh))
    with AsyncEngine.open(before, backend_config=CONFIGS["native"]) as engine:
        for awake in ([], ["weights"]):
            engine.weights.sleep()
            engine.weights.wake(awake)
            engine.weights.update(files_of(after))
            assert engine.weights.asleep and answer(engine).error_code == 503
            engine.weights.wake(["kv_cache"])
            assert not engine.weights.asleep and said(answer(engine)) == wanted


def test_what_is_packed_is_refused(packed_model: Path, trained: Any) -> None:
    with AsyncEngine.open(packed_model, backend_config=CONFIGS["native"]) as engine:
        with pytest.raises(UsageError, match="engine artifact is packed"):
            engine.weights.update(files_of(trained("llama")[1]))
    with pytest.raises(UsageError, match="engine artifact is packed"):
        AsyncEngine.open(packed_model, backend_config=TurbomindEngineConfig(device="cpu", empty_init=True))


@pytest.fixture(scope="module")
def packed_model(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from toolkit.convert.convert import convert
    from toolkit.convert.options import Packing

    path = tmp_path_factory.mktemp("packed") / "engine"
    convert(str(tiny_models("llama")), path, Packing(target="cpu"), quiet=True)
    return path


def test_a_pipeline_takes_tensors_pairs_and_paths(trained: Any) -> None:
    before, after = trained("llama")
    config = GenerationConfig(max_new_tokens=12, ignore_eos=True)
    with pipeline(str(after), CONFIGS["native"]) as fresh, pipeline(str(before), CONFIGS["native"]) as pipe:
        texts = fresh("hello", config, do_preprocess=False), pipe("hello", config, do_preprocess=False)
        wanted, old = (text.token_ids for text in texts)
        assert wanted != old
        ways: list[Any] = [tensors_of(after), iter(tensors_of(after).items()), after, next(after.glob("*.safetensors"))]
        for weights in ways:
            pipe.update_weights(weights)
            assert pipe("hello", config, do_preprocess=False).token_ids == wanted
            pipe.update_weights(str(before), mode="keep")
            assert pipe("hello", config, do_preprocess=False).token_ids == old
