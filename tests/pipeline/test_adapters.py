"""LoRA adapters through the Python API and the engine, against models with the adapter merged into their weights."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from toolkit import GenerationConfig, PytorchEngineConfig, TurbomindEngineConfig, pipeline
from toolkit.chat.template import ChatTemplate
from toolkit.errors import ToolkitError, UsageError
from toolkit.pipeline.pipeline import Pipeline

SHORT = GenerationConfig(max_new_tokens=10, ignore_eos=True)
PROMPTS = ["the fox", "a", "the fox and the sea and the hills and the long way home " * 3]
TARGETS = "q_proj|v_proj|o_proj|up_proj|down_proj"


def config(**fields: Any) -> PytorchEngineConfig:
    return PytorchEngineConfig(session_len=256, max_batch_size=8, dtype="float32", block_size=16, **fields)


@pytest.fixture(scope="module")
def model(tiny_models: Any) -> Path:
    path: Path = tiny_models("llama")
    return path


@pytest.fixture(scope="module")
def adapters(model: Path, support: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, make = tmp_path_factory.mktemp("adapters"), support("adapters").write_adapter
    return {name: make(root / name, model, TARGETS, rank=r, seed=r) for name, r in (("tales", 4), ("verse", 24))}


@pytest.fixture(scope="module")
def expected(
    model: Path, adapters: dict[str, Path], support: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str | None, list[list[int]]]:
    """Tokens of ``PROMPTS`` by the plain model (None) and by each merged one."""
    merged = {
        name: support("adapters").merge(model, path, tmp_path_factory.mktemp("merged") / name)
        for name, path in adapters.items()
    }
    found: dict[str | None, list[list[int]]] = {}
    for name, path in [(None, model), *merged.items()]:
        with pipeline(str(path), backend_config=config()) as pipe:
            found[name] = [r.token_ids for r in pipe(PROMPTS, gen_config=SHORT)]
    assert len({str(tokens) for tokens in found.values()}) == 3
    return found


@pytest.fixture(scope="module")
def pipe(model: Path, adapters: dict[str, Path]) -> Iterator[Pipeline]:
    with pipeline(str(model), backend_config=config(adapters={k: str(v) for k, v in adapters.items()})) as made:
        yield made


def test_an_adapter_called_as_a_template_is_talked_to_by_that_one(model: Path, adapters: dict[str, Path]) -> None:
    with pipeline(str(model), backend_config=config(adapters={"internlm2": str(adapters["tales"])})) as pipe:
        length = len(ChatTemplate.open(pipe.tokenizer, "x", "internlm2").encode("Hi"))
        named, plain = pipe("Hi", gen_config=SHORT, adapter_name="internlm2"), pipe("Hi", gen_config=SHORT)
    assert named.input_token_len == length != plain.input_token_len


def test_a_call_names_its_adapter_and_the_prefix_cache_keeps_them_apart(pipe: Pipeline, expected: Any) -> None:
    cached = []
    for name in (None, "tales", None, "verse", "tales"):
        answers = pipe(PROMPTS, gen_config=SHORT, adapter_name=name)
        assert [r.token_ids for r in answers] == expected[name], name
        cached.append(answers[2].cached_tokens)
    assert cached[0] == cached[1] == cached[3] == 0 and cached[2] > 0 and cached[4] > 0


def test_requests_of_several_adapters_share_steps(pipe: Pipeline, expected: Any) -> None:
    def run(name: str | None) -> list[list[int]]:
        return [r.token_ids for r in pipe(PROMPTS, gen_config=SHORT, adapter_name=name)]

    names = ["verse", None, "tales", "verse"]
    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(run, names))
    assert found == [expected[name] for name in names]


def test_a_conversation_with_an_adapter(pipe: Pipeline) -> None:
    plain = pipe.chat("the fox", gen_config=SHORT).response.token_ids  # type: ignore[union-attr]
    told = pipe.chat("the fox", gen_config=SHORT, adapter_name="tales").response.token_ids  # type: ignore[union-attr]
    assert plain != told


def test_an_adapter_of_all_calls(model: Path, adapters: dict[str, Path], expected: Any) -> None:
    one = config(adapters={"verse": str(adapters["verse"])})
    with pipeline(str(model), backend_config=one, adapter_name="verse") as pipe:
        assert [r.token_ids for r in pipe(PROMPTS, gen_config=SHORT)] == expected["verse"]


def test_unknown_names_and_bad_adapters_are_refused(pipe: Pipeline, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected one of the model's adapters \(tales, verse\), found 'other'"):
        pipe("a", adapter_name="other")
    with pytest.raises(UsageError, match="adapters: expected names and paths"):
        config(adapters={"a": 3})
    for missing in (str(tmp_path / "none"), "demo"):  # there is a demo model, no adapter of that name
        with pytest.raises(UsageError, match=r"adapters: a: .*no such directory, and not a hub id \(owner/name\)$"):
            pipeline(str(model), backend_config=config(adapters={"a": missing}))
    with pytest.raises(ToolkitError, match=r"found no adapter_config\.json"):
        pipeline(str(model), backend_config=config(adapters={"a": str(tmp_path)}))
    with pytest.raises(UsageError, match="adapter_name: expected one of the model's adapters"):
        pipeline(str(model), backend_config=TurbomindEngineConfig(session_len=64), adapter_name="tales")
