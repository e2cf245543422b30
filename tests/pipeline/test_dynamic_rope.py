"""Requests beyond the trained length that turn by their own length: as transformers' dynamic NTK, on both runners."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit import GenerationConfig, PytorchEngineConfig, TurbomindEngineConfig, pipeline
from toolkit.errors import UsageError

TRAINED = 24
ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
CONFIGS = {"native": TurbomindEngineConfig, "tensor": PytorchEngineConfig}


@pytest.fixture(scope="module")
def model(tiny_models: Any) -> Path:
    path: Path = tiny_models("llama", max_position_embeddings=TRAINED, rope_parameters=ROPE)
    return path


@pytest.fixture
def oracle(model: Path) -> Any:
    """A fresh one: it would turn a later prompt by the longest length that it has seen."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def opened(model: Path, runner: str, **options: Any) -> Any:
    config = CONFIGS[runner](session_len=200, dtype="float32", max_batch_size=4, **options)
    pipe = pipeline(str(model), backend_config=config)
    assert pipe.engine.runner_name == runner
    return pipe


@pytest.mark.parametrize("runner", CONFIGS)
@pytest.mark.parametrize("words", [8, 22, 60])  # short; across the trained length while it answers; beyond it
def test_each_request_turns_by_its_own_length(model: Path, oracle: Any, runner: str, words: int) -> None:
    """Log-probabilities of the whole answer, whose later tokens transformers turns by ever longer lengths. Chunks of
    16 tokens are turned by the prompt's length all the same."""
    text = " ".join(["the fox and the sea"] * 40)
    new = GenerationConfig(max_new_tokens=12, ignore_eos=True, logprobs=1)
    with opened(model, runner, dynamic_rope="request", max_prefill_token_num=16) as pipe:
        ids = pipe.tokenizer.encode(text)[:words]
        prompt = pipe.tokenizer.decode(ids)
        ids = pipe.tokenizer.encode(prompt)
        found = pipe(prompt, gen_config=new, do_preprocess=False)
    assert len(ids) > TRAINED or words < 60
    with torch.inference_mode():
        out = oracle.generate(
            torch.tensor([ids]), max_new_tokens=12, min_new_tokens=12, do_sample=False, output_logits=True,
            return_dict_in_generate=True, pad_token_id=0,
        )  # fmt: skip
    assert found.token_ids == out.sequences[0, len(ids) :].tolist()
    expected = torch.cat(out.logits).log_softmax(-1).max(-1).values
    mine = torch.tensor([row[token] for row, token in zip(found.logprobs, found.token_ids, strict=True)])
    torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("runner", CONFIGS)
def test_what_it_costs_in_reuse(model: Path, runner: str) -> None:
    """Beyond the trained length a prefix serves prompts of the same length alone; by the session's length any."""
    short = GenerationConfig(max_new_tokens=1, ignore_eos=True)
    reused = {}
    for way in ("session", "request"):
        size = {"cache_block_seq_len" if runner == "native" else "block_size": 16}
        with opened(model, runner, dynamic_rope=way, **size) as pipe:
            words = pipe.tokenizer.encode(" ".join(["the fox and the sea"] * 40))
            prompts = [pipe.tokenizer.decode(words[:n]) for n in (100, 100, 120)]
            reused[way] = [pipe(p, gen_config=short, do_preprocess=False).cached_tokens for p in prompts]
    assert reused["session"][1] > 0 and reused["session"][2] > 0
    assert reused["request"] == [0, reused["session"][1], 0]


def test_models_without_dynamic_rope_refuse_it(tiny_models: Any) -> None:
    with pytest.raises(UsageError, match=r"^dynamic_rope: .*do not scale dynamically"):
        pipeline(str(tiny_models("llama")), backend_config=TurbomindEngineConfig(dynamic_rope="request"))
    with pytest.raises(UsageError, match=r"^dynamic_rope: expected one of session, request"):
        TurbomindEngineConfig(dynamic_rope="each")


def test_that_positions_scale_is_said(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(model, "native"):
        pass
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("turned by dynamic NTK" in line for line in said)
