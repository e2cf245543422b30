"""Gemma 4's assistants: guesses are transformers', and change no answer."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.engine.test_mtp import Made, answers_of
from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.engine.load.drafts.assistant import open_assistant_model
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native import library
from toolkit.runners.native.runner import NativeRunner
from toolkit.runners.step import StepBatch
from toolkit.runners.tensor.runner import TensorRunner

pytestmark = pytest.mark.skipif(library.available() is not None, reason="the native library is not here")
KINDS = {"small": ("gemma4_text", 0, False), "mixed": ("gemma4_text", 1, True), "sees": ("gemma4", 0, True)}


@pytest.fixture(scope="module")
def assistant(support: Any) -> Any:
    return support("assistant")


@pytest.fixture(scope="module", params=KINDS)
def model(request: Any, tiny_models: Any) -> tuple[Path, bool]:
    """A tiny Gemma 4, and whether its assistant chooses clusters."""
    family, number, clusters = KINDS[request.param]
    return tiny_models(family, shape=number), clusters


@pytest.mark.parametrize("backend", ["turbomind", "pytorch"])
def test_guesses_are_transformers(model: tuple[Path, bool], backend: str, assistant: Any, tmp_path: Path) -> None:
    path, clusters = model
    made: Made = []
    small = assistant.write_assistant(path, tmp_path / "small", clusters=clusters)
    answers, _ = answers_of(path, small, made, backend)
    assert answers == answers_of(path, False, None, backend)[0]
    made = [one for one in made if one[1]]
    assert len(made) > 40
    tried = 0
    for tokens, guess in made[:: len(made) // 20]:
        for token, (right, margin) in zip(guess, assistant.guess(path, small, tokens, len(guess)), strict=True):
            if margin < 0.02:
                break
            assert token == right
            tried += 1
    assert tried > 12


@pytest.mark.parametrize(
    "options", [{"blocks": 8}, {"max_batch_size": 1}, {"turns": 2}, {"quant_policy": 8}, {"quant_policy": 4}], ids=str
)
@pytest.mark.parametrize("backend", ["turbomind", "pytorch"])
def test_answers_stay_what_they_are(
    model: tuple[Path, bool], backend: str, options: dict[str, Any], assistant: Any, tmp_path: Path
) -> None:
    path = assistant.alone(model[0], tmp_path / "model")
    small = assistant.write_assistant(path, tmp_path / "small", right=True)
    plain = answers_of(path, False, None, backend, **options)[0]
    answers, accepted = answers_of(path, small, None, backend, **options)
    assert answers == plain
    assert accepted > 20


@pytest.mark.parametrize("backend", [TurbomindEngineConfig, PytorchEngineConfig])
def test_it_is_found_sleeps_and_meets_new_weights(
    backend: Any, tiny_models: Any, assistant: Any, tmp_path: Path
) -> None:
    from toolkit import pipeline
    from toolkit.messages import GenerationConfig

    path = assistant.alone(tiny_models("gemma4_text"), tmp_path / "model")
    small = assistant.write_assistant(path, tmp_path / "small", right=True)
    config = GenerationConfig(max_new_tokens=20, ignore_eos=True, do_sample=False)

    def counted(p: Any) -> Any:
        core = p.engine._loop._core
        core.speculator.options = replace(core.speculator.options, always=True)
        core.speculator.drafts = [d for d in core.speculator.drafts if d.name == "mtp"]
        text = p("Once", gen_config=config).text
        return text, p.engine.stats()["spec_by_method"]["mtp"]["accepted"]

    with pipeline(str(path), backend_config=backend(speculative_draft_model=str(small), session_len=128)) as p:
        before, accepted = counted(p)
        assert accepted > 10 and "assistant" in [row[0] for row in p.engine.plan.rows]
        p.engine.weights.sleep()
        p.engine.weights.wake()
        again, more = counted(p)
        assert again == before and more > accepted + 10
        tensors = load_file(path / "model.safetensors")
        p.update_weights(tensors | {"model.norm.weight": -tensors["model.norm.weight"]})
        assert counted(p)[0] != before
        assert [draft.name for draft in p.engine._loop._core.speculator.drafts] == ["mtp"]


def test_of_a_prompt_the_newest_state_alone_comes_back(
    tiny_models: Any, assistant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = assistant.alone(tiny_models("gemma4_text"), tmp_path / "model")
    small = assistant.write_assistant(path, tmp_path / "small", right=True)
    steps: list[StepBatch] = []
    submit = NativeRunner.submit
    monkeypatch.setattr(NativeRunner, "submit", lambda self, batch: steps.append(batch) or submit(self, batch))
    _, accepted = answers_of(path, small)
    assert accepted > 20
    steps = [batch for batch in steps if batch.embeds is None]  # of the model
    guesses, texts = 5, 4
    assert max(len(batch.aux_index) for batch in steps) <= (1 + guesses) * texts
    assert max(len(batch.token_ids) for batch in steps) > 60


def test_a_cache_that_is_given_back_is_not_held(tiny_models: Any, assistant: Any, tmp_path: Path) -> None:
    """Two of them would not fit a GPU, where a new one is made behind failures."""
    path = tiny_models("gemma4_text")
    target, _ = open_runner(path, backend="pytorch", options=RunnerOptions(dtype="float32"))
    beside = open_assistant_model(assistant.write_assistant(path, tmp_path / "small"), target)
    target.load_weights()
    target.allocate_cache((4,) * len(target.spec.cache_groups))
    beside.head.load(())
    assert isinstance(target, TensorRunner) and isinstance(beside.head.runner, TensorRunner)
    cache = weakref.ref(beside.head.runner._ready().cache)
    target.release_cache()
    gc.collect()
    assert cache() is None
    beside.close()
    target.close()


def test_what_is_none_for_a_model_is_refused_in_a_line(
    support: Any, tiny_models: Any, assistant: Any, tmp_path: Path
) -> None:
    path = tiny_models("gemma4_text")
    small = assistant.write_assistant(path, tmp_path / "small", clusters=True)

    refusals = support("refused_drafts")

    def refused(told: str, model: Path = path, draft: Path = small, **fields: Any) -> None:
        refusals.refused(told, model, draft, **fields)

    def changed(name: str, lacks: str = "", **fields: Any) -> Path:
        made: Path = refusals.changed(small, tmp_path / name, lacks, **fields)
        return made

    refused(".*has a layer that sees a window, the model has none", tiny_models("llama", vocab_size=320))
    refused(".*is of a model of width 64 and 320 tokens, the model has", tiny_models("gemma4_text", hidden_size=32))
    refused(".*reads keys of .* heads of 16 where it sees a window, the model", tiny_models("gemma4_text", head_dim=32))
    refused(".*is an assistant, no head; use mtp", speculative_algorithm="eagle3")
    refused(".*is no assistant, as mtp expects", draft=path, speculative_algorithm="mtp")
    refused(".*reads the cache of one rank", tp=2)
    refused(".*Gemma4AssistantForCausalLM needs keys", draft=changed("listed", model_type=[]))
    refused(".*text_config: expected an object", draft=changed("flat", text_config=None))
    refused(".*num_centroids: found 7, expected a divisor of", draft=changed("odd", num_centroids=7))
    name = "pre_projection.weight"
    refused(f".*expected a tensor {name} .*, found none", draft=changed("lacks", name))
    refused(
        ".*tensor model.layers.1.mlp.up_proj.weight is missing",
        draft=changed("torn", "model.layers.1.mlp.up_proj.weight"),
    )
