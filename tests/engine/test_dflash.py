"""Drafts of DFlash: guesses are those of the paper's model, and change no answer."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.engine.test_mtp import Made, answers_of, rows_read
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.drafts.dflash import open_dflash
from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.models.registry import load_spec
from toolkit.runners.native import library

pytestmark = pytest.mark.skipif(library.available() is not None, reason="the native library is not here")


@pytest.fixture(scope="module")
def dflash(support: Any) -> Any:
    return support("dflash")


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def model(request: Any, tiny_models: Any) -> Path:
    path: Path = tiny_models(request.param)
    return path


FORMS = {
    "authors": {},
    "some with a window": {"windows": (20, None, 20)},
    "speculators": {"form": "speculators"},
    "windows, few tokens": {"form": "speculators", "windows": (20, 20), "tokens": 100},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("backend, chunk", [("turbomind", 9), ("turbomind", 64), ("pytorch", 9)])
def test_guesses_are_those_of_the_paper(
    model: Path, backend: str, chunk: int, form: dict[str, Any], dflash: Any, tmp_path: Path
) -> None:
    made: Made = []
    draft = dflash.write_dflash(model, tmp_path / "draft", **form)
    answers, _ = answers_of(model, draft, made, backend, max_prefill_token_num=chunk)
    assert answers == answers_of(model, False, None, backend)[0]
    made = [one for one in made if one[1]]
    assert len(made) > 40
    tried = 0
    for tokens, guess in made[:: len(made) // 20]:
        for token, (right, margin) in zip(guess, dflash.guess(model, draft, tokens, 5), strict=False):
            if margin > 0.02:
                assert token == right
                tried += 1
    assert tried > 40


@pytest.mark.parametrize(
    "options", [{"blocks": 8}, {"max_batch_size": 1}, {"turns": 2}, {"layer_blocks": 3}, {"quant_policy": 8}], ids=str
)
@pytest.mark.parametrize("backend", ["turbomind", "pytorch"])
def test_answers_stay_what_they_are(
    model: Path, backend: str, options: dict[str, Any], dflash: Any, tmp_path: Path
) -> None:
    path = dflash.constant(model, tmp_path / "model")
    draft = dflash.write_dflash(path, tmp_path / "draft", right=True)
    same = {name: value for name, value in options.items() if name != "layer_blocks"}
    plain = answers_of(path, False, None, backend, **same)[0]
    answers, accepted = answers_of(path, draft, None, backend, **options)
    assert answers == plain
    assert accepted > 20


def test_a_prompt_is_read_in_parts(model: Path, dflash: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as a whole, for which others would wait."""
    path = dflash.constant(model, tmp_path / "model")
    draft = dflash.write_dflash(path, tmp_path / "draft", right=True)
    plain = answers_of(path, False)[0]
    read = rows_read(monkeypatch)
    answers, accepted = answers_of(path, draft, max_prefill_token_num=24)
    assert answers == plain and accepted > 20
    assert max(read) <= 24 and sum(read) > 100


def test_ranks_give_the_bits_of_one_process(model: Path, dflash: Any, tmp_path: Path) -> None:
    path = dflash.constant(model, tmp_path / "model")
    draft = dflash.write_dflash(path, tmp_path / "draft", right=True)
    answers, accepted = answers_of(path, draft, ranks=2)
    assert answers == answers_of(path, False)[0] and accepted > 20


@pytest.mark.parametrize("backend", [TurbomindEngineConfig, PytorchEngineConfig])
def test_it_is_found_and_guesses_again_after_sleep(backend: Any, model: Path, dflash: Any, tmp_path: Path) -> None:
    from toolkit import pipeline
    from toolkit.messages import GenerationConfig

    path = dflash.constant(model, tmp_path / "model")
    draft = dflash.write_dflash(path, tmp_path / "draft", right=True)
    config = GenerationConfig(max_new_tokens=20, ignore_eos=True, do_sample=False)

    def counted(p: Any) -> Any:
        core = p.engine._loop._core
        core.speculator.options = replace(core.speculator.options, always=True)
        core.speculator.drafts = [d for d in core.speculator.drafts if d.name == "dflash"]
        return p("Once", gen_config=config).text, p.engine.stats()["spec_by_method"]["dflash"]

    fields = {"speculative_algorithm": "dflash", "speculative_dflash_block_size": 4}
    with pipeline(
        str(path), backend_config=backend(speculative_draft_model=str(draft), session_len=128, **fields)
    ) as p:
        before, counts = counted(p)
        assert counts["accepted"] > 10 and counts["tokens"] <= 3 * counts["drafts"]
        assert "DFlash draft" in [row[0] for row in p.engine.plan.rows]
        p.engine.weights.sleep()
        p.engine.weights.wake()
        again, more = counted(p)
        assert again == before and more["accepted"] > 20


def test_the_size_of_a_block_stands_in_either_place(model: Path, dflash: Any, tmp_path: Path) -> None:
    """The drafts for Qwen3.5 have it in ``dflash_config``."""
    spec, _ = load_spec(open_checkpoint(model))
    draft = dflash.write_dflash(model, tmp_path / "draft", block_size=4)
    assert open_dflash(draft, spec)[1].spec.block == 6
    config = json.loads((draft / "config.json").read_text())
    del config["block_size"]
    (draft / "config.json").write_text(json.dumps(config))
    assert open_dflash(draft, spec)[1].spec.block == 4


def test_what_of_speculators_form_cannot_be_is_refused_in_a_line(
    support: Any, tiny_models: Any, dflash: Any, tmp_path: Path
) -> None:
    path, refusals = tiny_models("qwen3"), support("refused_drafts")
    draft = dflash.write_dflash(path, tmp_path / "draft", form="speculators", tokens=100)
    far = tmp_path / "far"
    shutil.copytree(draft, far)
    tensors = load_file(draft / "model.safetensors")
    save_file(tensors | {"d2t": tensors["d2t"] + 300}, far / "model.safetensors", {"format": "pt"})
    for told, fields in {
        ".*aux_hidden_state_layer_ids: .* different numbers below": {"aux_hidden_state_layer_ids": [1, 99]},
        ".*sample_from_anchor: found True, expected false": {"sample_from_anchor": True},
        ".*mask_token_id": {"mask_token_id": None},
        ".*transformer_layer_config: expected an object": {"transformer_layer_config": None},
        ".*model_type: expected llama or qwen3": {"transformer_layer_config": {"model_type": "gpt2"}},
        r".*model_type: expected llama or qwen3, found \['qwen3'\]": {
            "transformer_layer_config": {"model_type": ["qwen3"]}
        },
        ".*hidden_size: found wide": {"transformer_layer_config": {"model_type": "llama", "hidden_size": "wide"}},
        ".*draft_vocab_size": {"draft_vocab_size": 1000},
        ".*tensor lm_head.weight: expected shape .101, ": {"draft_vocab_size": 101},
    }.items():
        changed = refusals.changed(draft, tmp_path / str(len(list(tmp_path.iterdir()))), **fields)
        refusals.refused(told, path, changed)
    refusals.refused(".*expected a tensor d2t", path, refusals.changed(draft, tmp_path / "lacks", "d2t"))
    refusals.refused(".*tensor d2t: expected ids below", path, far)


def test_what_is_none_for_a_model_is_refused_in_a_line(
    support: Any, tiny_models: Any, dflash: Any, tmp_path: Path
) -> None:
    path = tiny_models("qwen3")
    draft = dflash.write_dflash(path, tmp_path / "draft")

    refusals = support("refused_drafts")

    def refused(told: str, model: Path = path, draft: Path = draft, **fields: Any) -> None:
        refusals.refused(told, model, draft, **fields)

    def changed(name: str, lacks: str = "", **fields: Any) -> Path:
        made: Path = refusals.changed(draft, tmp_path / name, lacks, **fields)
        return made

    refused(".*is of a model of width 64 and 320 tokens, the model has", tiny_models("qwen3", hidden_size=32))
    refused(".*is a DFlash draft; use dflash", speculative_algorithm="eagle3")
    refused(".*is no DFlash draft", draft=path, speculative_algorithm="dflash")
    refused(".*dflash_config: mask_token_id", draft=changed("none", dflash_config=None))
    ids = {"mask_token_id": 7, "target_layer_ids": [0, 99]}
    refused(".*target_layer_ids: .* different numbers below", draft=changed("far", dflash_config=ids))
    refused(".*block_size: ", draft=changed("odd", block_size=1))
    refused(".*expected a tensor fc.weight .*, found none", draft=changed("lacks", "fc.weight"))
    name = "layers.1.mlp.up_proj.weight"
    refused(f".*tensor {name} is missing", draft=changed("torn", name))
