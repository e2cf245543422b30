"""``disable_vision_encoder``: the language model of one that sees, alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

from toolkit import GenerationConfig, PytorchEngineConfig, TurbomindEngineConfig, pipeline
from toolkit.errors import UsageError
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native.library import available
from toolkit.serve.app import create_app
from toolkit.serve.options import ServerSettings

BACKENDS = ("pytorch", "turbomind") if available() is None else ("pytorch",)
SHORT = GenerationConfig(max_new_tokens=6)
KINDS: dict[str, Any] = {"pytorch": PytorchEngineConfig, "turbomind": TurbomindEngineConfig}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "mllama", "cogvlm"])
def test_texts_are_answered_the_same(tiny_models: Any, family: str, backend: str) -> None:
    path = str(tiny_models(family))
    answers = []
    for option in ({}, {"disable_vision_encoder": True}, {"language_model_only": True}):
        config = KINDS[backend](session_len=128, max_batch_size=1, dtype="float32", **option)
        with pipeline(path, config) as opened:
            answers.append(opened("what is it", gen_config=SHORT).token_ids)
    assert answers[0] == answers[1] == answers[2] and answers[0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llava", "mllama"])
def test_what_it_sees_with_is_not_loaded(family: str, backend: Any, tiny_models: Any) -> None:
    options = RunnerOptions(device="cpu", dtype="float32", block_size=16, threads=1)
    sees, blind = (
        open_runner(tiny_models(family), backend=backend, options=options, blind=blind)[0] for blind in (False, True)
    )
    planned = blind.memory()
    assert planned.weights < sees.memory().weights and planned.picture_patch == 0
    blind.load_weights()
    assert abs(blind.memory().weights - planned.weights) < 1000  # nothing was packed or held that is not used
    blind.close()


def test_pictures_are_refused_in_one_line(tiny_models: Any, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    config = PytorchEngineConfig(session_len=128, max_batch_size=1, dtype="float32", disable_vision_encoder=True)
    with pipeline(str(tiny_models("llava")), config) as opened:
        answer = opened(("what", str(tmp_path / "a.png")), gen_config=SHORT)
        assert "reads text alone" in answer.error_message and "--disable-vision-encoder" in answer.error_message
        with pytest.raises(UsageError, match="reads text alone; leave out --disable-vision-encoder"):
            opened.checked_image(str(tmp_path / "a.png"))
        settings = ServerSettings(model_name="tiny")
        with TestClient(create_app(opened.engine, opened.chat_template, settings)) as client:
            content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]
            body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
            refused = client.post("/v1/chat/completions", json=body)
            assert refused.status_code == 400 and "reads text alone" in refused.json()["error"]["message"]
