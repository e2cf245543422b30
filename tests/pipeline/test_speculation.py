"""Draft models through the Python API: answers are those without one, with adapters and with pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from toolkit import GenerationConfig, PytorchEngineConfig, SpeculativeConfig, TurbomindEngineConfig, pipeline
from toolkit.errors import UsageError

CONFIGS = [
    GenerationConfig(max_new_tokens=24, ignore_eos=True),
    GenerationConfig(max_new_tokens=24, ignore_eos=True, do_sample=True, temperature=0.8, random_seed=3),
    GenerationConfig(max_new_tokens=24, repetition_penalty=1.2, bad_words=["sea"]),
]
FEW: dict[str, Any] = {"session_len": 512, "max_batch_size": 4, "dtype": "float32"}


def answers(model: Path, draft: Path | None, config: Any, prompt: Any, **fields: Any) -> list[str]:
    how = {} if draft is None else {"speculative_config": SpeculativeConfig("draft_model", str(draft), 4)}
    with pipeline(str(model), backend_config=config, **how) as pipe:
        found = pipe([prompt] * 3, gen_config=CONFIGS, **fields)
        assert all(answer.finish_reason != "error" for answer in found), found
        assert draft is None or "draft model" in {what for what, _, _ in pipe.engine.plan.rows}
        return [answer.text for answer in found]


@pytest.mark.parametrize("kind", [TurbomindEngineConfig, PytorchEngineConfig])
def test_answers_with_a_draft_model_are_those_without(tiny_models: Any, kind: Any) -> None:
    model = tiny_models("llama")
    plain = answers(model, None, kind(**FEW, speculative="off"), "the fox and the sea")
    assert answers(model, model, kind(**FEW), "the fox and the sea") == plain


def test_answers_of_adapters(tiny_models: Any, support: Any, tmp_path: Path) -> None:
    model = tiny_models("llama")
    adapter = support("adapters").write_adapter(tmp_path / "tales", model, "q_proj|up_proj", rank=4, seed=1)
    config = TurbomindEngineConfig(**FEW, adapters={"tales": str(adapter)})
    plain = answers(model, None, config, "the fox", adapter_name="tales")
    assert plain != answers(model, None, config, "the fox")
    assert answers(model, model, config, "the fox", adapter_name="tales") == plain


def test_answers_about_a_picture(tiny_models: Any) -> None:
    """The draft does not see it."""
    model = tiny_models("llava")
    pixels = np.random.default_rng(1).integers(0, 256, (40, 40, 3), np.uint8)
    prompt = ("the fox", Image.fromarray(pixels))
    plain = answers(model, None, TurbomindEngineConfig(**FEW), prompt)
    assert answers(model, model, TurbomindEngineConfig(**FEW), prompt) == plain


def test_a_draft_model_that_is_not_there(tiny_models: Any) -> None:
    with pytest.raises(UsageError, match=r"^speculative_draft_model: nowhere: no such file or directory"):
        pipeline(str(tiny_models("llama")), speculative_config=SpeculativeConfig("draft_model", "nowhere"))
