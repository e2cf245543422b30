"""What LMDeploy's pages show of models that see, as it stands there, on tiny ones in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import toolkit
from toolkit import GenerationConfig, PytorchEngineConfig, TurbomindEngineConfig, pipeline
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import load_spec
from toolkit.pipeline.pipeline import Pipeline
from toolkit.runners.native.library import available
from toolkit.runners.tensor.devices.find import find_dtype
from toolkit.serve.client import APIClient
from toolkit.vl.constants import IMAGE_TOKEN
from toolkit.vl.utils import encode_image_base64

BACKENDS = (PytorchEngineConfig, TurbomindEngineConfig) if available() is None else (PytorchEngineConfig,)
SHORT = GenerationConfig(max_new_tokens=4)
GREEDY = GenerationConfig(top_k=1, max_new_tokens=4)  # as it stands there


def picture(seed: int, size: tuple[int, int] = (40, 30)) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


@contextlib.contextmanager
def opened(path: Path, kind: Any = PytorchEngineConfig, **more: Any) -> Iterator[Pipeline]:
    """A pipeline in float32."""
    options = {"session_len": 512, "max_batch_size": 2, "dtype": "float32"} | more
    with pipeline(str(path), kind(**options)) as made:
        yield made


def spelled(pipe: Pipeline, prompt: Any) -> str:
    """The prompt as the tokenizer gets it, each run of a picture's tokens one mark."""
    messages = [{"role": "user", "content": prompt}]
    text = pipe.reader.see(messages, pipe.chat_template.render(messages))[1]
    assert pipe.reader.eyes is not None
    token = pipe.reader.eyes.recipe.token
    while token + token in text:
        text = text.replace(token + token, token)
    return text.replace(token, "[PICTURE]")


def test_a_picture_stands_where_the_text_says(tiny_models: Any) -> None:
    """DeepSeek-VL, whose pictures may stand anywhere."""
    image = picture(0)
    with opened(tiny_models("multi_modality")) as pipe:
        asked = [
            ("describe this image", image),
            (f"describe this image{IMAGE_TOKEN}", image),
            (f"from {IMAGE_TOKEN} to", image),
        ]
        answers = pipe(asked, gen_config=SHORT)
        assert not any(a.error_message for a in answers)
        parts = [{"type": "text", "text": "describe this image"}, {"type": "image_data", "image_data": {"data": image}}]
        assert spelled(pipe, parts).index("[PICTURE]") > spelled(pipe, parts).index("describe")
        same = pipe([{"role": "user", "content": parts}], gen_config=SHORT)
        assert same.token_ids == answers[1].token_ids
        assert len({tuple(a.token_ids) for a in answers}) > 1


@pytest.mark.parametrize("kind", BACKENDS)
def test_sessions_and_sampling_are_those_of_models_of_texts(kind: Any, tiny_models: Any) -> None:
    sampled = GenerationConfig(
        top_k=40, top_p=0.8, temperature=0.6, do_sample=True, random_seed=7, max_new_tokens=8, ignore_eos=True
    )
    asked = ("describe this image", picture(0))
    with opened(tiny_models("internvl"), kind, session_len=320) as pipe:
        assert pipe.engine.session_len == 320
        greedy = pipe(asked, gen_config=replace(sampled, do_sample=False))
        one, same, other = (pipe(asked, gen_config=replace(sampled, random_seed=seed)) for seed in (7, 7, 8))
        assert one.token_ids == same.token_ids != other.token_ids and len(one.token_ids) == 8
        assert greedy.token_ids != one.token_ids
        long = pipe(("describe this image " * 100, picture(0)), gen_config=sampled)
        assert "320" in str(long.error_message) and "\n" not in str(long.error_message)


def test_frames_and_a_later_turn_of_text(tiny_models: Any) -> None:
    """InternVL's video: frames that the user has cut, then a question without any."""
    frames = [picture(seed) for seed in range(4)]
    question = "".join(f"Frame{i + 1}: {IMAGE_TOKEN}\n" for i in range(len(frames))) + "What is it doing?"
    content: list[dict[str, Any]] = [{"type": "text", "text": question}]
    for frame in frames:
        url = f"data:image/jpeg;base64,{encode_image_base64(frame)}"
        content.append({"type": "image_url", "image_url": {"max_dynamic_patch": 1, "url": url}})
    messages: list[dict[str, Any]] = [dict(role="user", content=content)]
    path = tiny_models("internvl_chat")
    with opened(path) as pipe:
        first = pipe(messages, gen_config=GREEDY)
        again = dict(role="user", content="Describe this video in detail.")
        more = [*messages, dict(role="assistant", content=first.text), again]
        second = pipe(more, gen_config=GREEDY)
        assert not first.error_message and not second.error_message
        assert second.input_token_len > first.input_token_len + first.generate_token_len
        other = [dict(role="user", content=[content[0], *content[:0:-1]]), *more[1:]]  # the frames the other way round
        assert pipe(other, gen_config=GREEDY).input_token_len == second.input_token_len
        logits = GenerationConfig(top_k=1, max_new_tokens=1, output_logits="generation")
        cached, turned = pipe(more, gen_config=logits).logits, pipe(other, gen_config=logits).logits
        assert not np.allclose(cached, turned, atol=1e-3)  # the later turn sees the frames of the first
    with opened(path, enable_prefix_caching=False) as pipe:
        np.testing.assert_allclose(pipe(more, gen_config=logits).logits, cached, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", BACKENDS)
def test_xcomposer_beyond_the_length_it_was_trained_on(kind: Any, tiny_models: Any) -> None:
    """Positions are stretched as its config says, pictures and texts together."""
    rope = {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 64}
    path = tiny_models("internlmxcomposer2", **rope)
    with opened(path, kind) as pipe:
        answer = pipe(("describe this image " * 20, picture(0)), gen_config=SHORT)
        assert answer.input_token_len > 2 * 64 and not answer.error_message


def test_xcomposer_talks_about_pictures(tiny_models: Any) -> None:
    """A collage of frames with a question behind it, and three pictures named in a text, with its sampling."""
    with opened(tiny_models("internlmxcomposer2")) as pipe:
        sampled = GenerationConfig(top_k=50, top_p=0.8, temperature=1.0, do_sample=True, max_new_tokens=4)
        sess = pipe.chat(("Here are some frames of a video. Describe it", picture(0, (60, 90))), gen_config=sampled)
        first = sess.response
        sess = pipe.chat("tell me the athlete code", session=sess, gen_config=sampled)
        assert sess.response.input_token_len > first.input_token_len + first.generate_token_len
        assert not sess.response.error_message and sess.response.generate_token_len
        cars = [picture(seed) for seed in range(3)]
        query = f"Image1 {IMAGE_TOKEN}; Image2 {IMAGE_TOKEN}; Image3 {IMAGE_TOKEN}; which of the three cars"
        assert "Image1 [PICTURE]; Image2 [PICTURE]; Image3 [PICTURE]; which" in spelled(
            pipe,
            [*({"type": "image_data", "image_data": {"data": car}} for car in cars), {"type": "text", "text": query}],
        )
        free = GenerationConfig(top_k=0, top_p=0.8, do_sample=True, random_seed=89247526689433939, max_new_tokens=4)
        answers = [pipe((query, cars), gen_config=free) for _ in range(2)]
        assert answers[0].token_ids == answers[1].token_ids and not answers[0].error_message


def test_xcomposer_writes_without_its_system_text(tiny_models: Any) -> None:
    """Web pages and articles: no text before the question, and long answers."""
    with opened(tiny_models("internlmxcomposer2"), session_len=64) as pipe:
        pipe.chat_template.meta_instruction = "You are a pirate."
        query = "A website for Research institutions."
        assert "pirate" in pipe.chat_template.render([{"role": "user", "content": query}])
        pipe.chat_template.meta_instruction = None
        bare = pipe.chat_template.render([{"role": "user", "content": query}])
        assert "pirate" not in bare and "system" not in bare and query in bare
        for most in (2048, 8192):
            answer = pipe(query, gen_config=GenerationConfig(max_new_tokens=most, ignore_eos=True))
            assert answer.finish_reason == "length" and not answer.error_message
            assert answer.input_token_len + answer.generate_token_len == 64


def test_examples_before_the_question(tiny_models: Any, tmp_path: Path) -> None:
    """MiniCPM-V few-shot: turns of example pictures and answers, by file names; each counts."""
    for i, name in enumerate(("example1", "example2", "test")):
        picture(i).save(tmp_path / f"{name}.png")

    def asked(name: str) -> dict[str, Any]:
        url = dict(url=str(tmp_path / f"{name}.png"))
        return dict(role="user", content=[dict(type="text", text="date"), dict(type="image_url", image_url=url)])

    def talk(*shown: str) -> list[dict[str, Any]]:
        answers = ({"role": "assistant", "content": text} for text in ("2023.08.04", "2007.04.24"))
        first, second, third = map(asked, shown)
        return [first, next(answers), second, next(answers), third]

    logits = GenerationConfig(top_k=1, max_new_tokens=1, output_logits="generation")
    with opened(tiny_models("minicpmv")) as pipe:
        found = pipe([talk("example1", "example2", "test"), talk("example2", "example1", "test")], gen_config=logits)
        assert not any(a.error_message for a in found)
        assert not np.allclose(found[0].logits, found[1].logits, atol=1e-3)
        one = pipe([asked("test")], gen_config=GREEDY)
        assert found[0].input_token_len > 3 * one.input_token_len


def test_the_client_sends_messages_with_images(tiny_models: Any, tmp_path: Path) -> None:
    """``APIClient`` of a server in a process of its own: data URLs, and what is wrong as one line."""
    path, image = tiny_models("llava"), picture(0)
    url = f"data:image/png;base64,{encode_image_base64(image, 'PNG')}"
    parts = [
        {"type": "text", "text": "Describe the image please"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    config = PytorchEngineConfig(session_len=512, max_batch_size=2, dtype="float32")
    with toolkit.serve(str(path), backend_config=config, server_port=0, limit_mm_per_prompt='{"image": 1}') as server:
        api_client = APIClient(server.url)
        model_name = api_client.available_models[0]
        fields: dict[str, Any] = {"model": model_name, "max_tokens": 4, "temperature": 0}
        (item,) = api_client.chat_completions_v1(messages=[{"role": "user", "content": parts}], **fields)
        chunks = list(
            api_client.chat_completions_v1(messages=[{"role": "user", "content": parts}], stream=True, **fields)
        )
        with pytest.raises(ToolkitError, match=r"at most 1 image \(--limit-mm-per-prompt\), found 2"):
            list(api_client.chat_completions_v1(messages=[{"role": "user", "content": [*parts, parts[1]]}], **fields))
    with opened(path) as pipe:
        order = [{"type": "text", "text": parts[0]["text"]}, {"type": "image_data", "image_data": {"data": image}}]
        expected = pipe([{"role": "user", "content": order}], gen_config=SHORT)
    assert item["choices"][0]["message"]["content"] == expected.text
    assert item["usage"]["prompt_tokens"] == expected.input_token_len
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]) == expected.text


def test_mono_internvl_is_not_run_in_float16(tiny_models: Any) -> None:
    """Its authors run it in bfloat16 alone; a checkpoint in float16, as quantizers write, is run in bfloat16 too."""
    path = tiny_models("internvl_chat", shape=2, dtype="float16")
    for kind in BACKENDS:
        with pytest.raises(UsageError, match="dtype: this model is not stable in float16, its authors say"):
            opened(path, kind, dtype="float16").__enter__()
    with opened(path, dtype="bfloat16") as pipe:
        assert not pipe(("what is it", picture(0)), gen_config=SHORT).error_message
    spec = load_spec(open_checkpoint(path))[0]
    assert not spec.float16 and load_spec(open_checkpoint(tiny_models("internvl_chat")))[0].float16
    gpu = torch.device("cuda")
    assert find_dtype("auto", torch.float16, gpu, float16=spec.float16) == torch.bfloat16
    assert find_dtype("auto", torch.float16, gpu) == torch.float16
