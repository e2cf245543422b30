"""Text and token ids over HTTP, as vLLM and LMDeploy have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.asking import ask
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.chat.template import ChatTemplate
from toolkit.serve.client import APIClient


@pytest.fixture(scope="module")
def tokenizer(tiny_models: Any) -> Tokenizer:
    return Tokenizer.open(tiny_models("llama"))


@pytest.fixture(scope="module")
def template(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate.open(tokenizer, tokenizer.path)


@pytest.fixture(scope="module")
def url(tokenizer: Tokenizer, template: ChatTemplate, request: Any) -> Iterator[str]:
    conftest = request.config.pluginmanager.get_plugin(str(request.path.parent / "conftest.py"))
    engine = conftest.FakeEngine(tokenizer)
    app = conftest.create_app(engine, template, conftest.ServerSettings(model_name="tiny"))
    with conftest.running(app, engine) as it:
        yield it.url


TEXT = "Grüß Gott, 世界"


def test_an_adapter_called_as_a_template_is_talked_to_by_that_one(tokenizer: Tokenizer, request: Any) -> None:
    conftest = request.config.pluginmanager.get_plugin(str(request.path.parent / "conftest.py"))
    engine, own = conftest.FakeEngine(tokenizer), ChatTemplate.open(tokenizer, tokenizer.path)
    found = ChatTemplate.of_adapters(("internlm2", "tales"), tokenizer, tokenizer.path)
    settings = conftest.ServerSettings(model_name="tiny", adapters=("internlm2", "tales"))
    messages = [{"role": "user", "content": "Hi"}]
    with conftest.running(conftest.create_app(engine, own, settings, None, found), engine) as it:
        prompts = {}
        for name in ("tiny", "tales", "internlm2"):
            prompts[name] = ask(it.url, "/apply-template", {"model": name, "messages": messages})[1]["prompt"]
            ids = ask(it.url, "/tokenize", {"model": name, "messages": messages})[1]["tokens"]
            assert ask(it.url, "/v1/chat/completions", {"model": name, "messages": messages, "max_tokens": 1})[0] == 200
            assert engine.seen[-1][0] == ids == tokenizer.encode(prompts[name], False)
    assert prompts["tiny"] == prompts["tales"] == own.render(messages)
    assert prompts["internlm2"] == ChatTemplate.open(tokenizer, "x", "internlm2").render(messages) != prompts["tiny"]


def test_tokenize_and_back(url: str, tokenizer: Tokenizer) -> None:
    for special in (True, False):
        _, got = ask(url, "/tokenize", {"prompt": TEXT, "add_special_tokens": special, "return_token_strs": True})
        ids = tokenizer.encode(TEXT, special)
        assert (got["tokens"], got["count"], got["max_model_len"]) == (ids, len(ids), 512)
        assert len(got["token_strs"]) == len(ids)
    assert ask(url, "/tokenize", {"model": "tiny", "prompt": TEXT})[1]["tokens"] == tokenizer.encode(TEXT)
    assert ask(url, "/tokenize", {"prompt": ""})[0] == 200
    assert ask(url, "/detokenize", {"tokens": ids})[1]["prompt"] == tokenizer.decode(ids, False)
    assert ask(url, "/detokenize", {"tokens": []})[1] == {"prompt": "", "content": ""}


def test_tokenize_a_conversation(url: str, template: ChatTemplate) -> None:
    talk = [{"role": "user", "content": "Hi"}]
    assert ask(url, "/tokenize", {"messages": talk})[1]["tokens"] == template.encode(talk)
    open_end = ask(url, "/tokenize", {"messages": talk, "add_generation_prompt": False})[1]["tokens"]
    assert open_end == template.encode(talk, add_generation_prompt=False)


def test_tokenizer_info_has_what_a_client_needs(url: str, tokenizer: Tokenizer) -> None:
    status, info = ask(url, "/tokenizer_info")
    assert status == 200 and info["tokenizer_class"]
    assert info["eos_token"] == tokenizer.special_tokens["eos_token"]
    assert info.get("chat_template") == tokenizer.chat_templates.get("default")


def test_encode_as_lmdeploy_has_it(url: str, tokenizer: Tokenizer, template: ChatTemplate) -> None:
    ids = tokenizer.encode(TEXT)
    assert ask(url, "/v1/encode", {"input": TEXT})[1] == {"input_ids": ids, "length": len(ids)}
    bare = tokenizer.encode(TEXT, False)
    many = ask(url, "/v1/encode", {"input": [TEXT, "a"], "add_bos": False})[1]
    assert many["input_ids"][0] == bare and many["length"][0] == len(bare) and len(many["length"]) == 2
    assert ask(url, "/v1/encode", {"input": TEXT, "do_preprocess": True})[1]["input_ids"] == template.encode(TEXT)
    assert APIClient(url).encode([TEXT, "a"], add_bos=False) == (many["input_ids"], many["length"])
    assert APIClient(url).encode(TEXT) == (ids, len(ids))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": "b"}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": "b", "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ("/detokenize", {"tokens": [1 << 30]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/v1/encode", {"input": []}, "input.list[constrained-str]"),
        ("/v1/encode", {}, "input"),
        ("/v1/encode", {"input": "a", "nonsense": 1}, "nonsense"),
    ],
)
def test_bad_fields(url: str, path: str, body: Any, param: str) -> None:
    status, told = ask(url, path, body)
    assert status == 400 and told["error"]["param"].partition(".")[0] == param.partition(".")[0]


def test_another_model_is_not_served(url: str) -> None:
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []}), ("/v1/encode", {"input": "a"})):
        assert ask(url, path, {**body, "model": "gpt"})[0] == 404


def test_the_log_shows_the_prompt_after_templating(
    url: str, template: ChatTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="toolkit.serve"):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Well now"}], "max_tokens": 1}
        assert ask(url, "/v1/chat/completions", body)[0] == 200
    assert any(repr(template.render("Well now")) in line for line in caplog.messages)
