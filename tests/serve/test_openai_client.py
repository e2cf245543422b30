"""The official client against the server: what it parses without complaint is OpenAI's format."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest

from toolkit.engine.process.adapter_names import AdapterNames
from toolkit.errors import UsageError


@pytest.fixture
def server(start: Any) -> Any:
    return start()


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"model": "echo", "messages": [{"role": "user", "content": "héllo"}], **fields}
    return client.chat.completions.create(**fields)


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["echo"]
    assert client.models.retrieve("echo").owned_by == "toolkit"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_the_model_of_a_request_chooses_an_adapter(start: Any) -> None:
    server = start(adapters=("tales", "verse"))
    client = openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == ["echo", "tales", "verse"]
    assert client.models.retrieve("verse").model_extra["parent"] == "echo"
    for name in ("tales", "echo", "verse"):
        answer = client.chat.completions.create(model=name, messages=[{"role": "user", "content": "a"}])
        assert answer.model == name
    assert client.completions.create(model="tales", prompt=["a", "b"]).model == "tales"
    assert server.engine.adapters == ["tales", None, "verse", "tales", "tales"]
    with pytest.raises(openai.NotFoundError, match="this server has 'echo', 'tales', 'verse'"):
        client.completions.create(model="other", prompt="a")


def test_an_adapter_that_is_not_there_cannot_be_unloaded(start: Any, tmp_path: Path) -> None:
    server = start(adapters=("tales",), adapter_dir=tmp_path)
    server.engine.adapters = AdapterNames(lambda *told: True, ("tales",), "echo")
    client = openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="there is no adapter 'other'; there is tales"):
        client.post("/unload_lora_adapter", body={"lora_name": "other"}, cast_to=object)


def test_a_model_has_other_names(start: Any) -> None:
    server = start(adapters=("tales",), alias=("gpt-4",))
    client = openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == ["echo", "gpt-4", "tales"]
    assert client.completions.create(model="gpt-4", prompt="a").model == "gpt-4"
    assert server.engine.adapters == [None]


def test_chat(client: openai.OpenAI) -> None:
    done = ask(client, messages=[{"role": "user", "content": "hello"}])
    assert done.object == "chat.completion" and done.id.startswith("chatcmpl-") and done.model == "echo"
    choice = done.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "[user]hello", "stop")
    usage = done.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (11, 11, 22)
    assert usage.prompt_tokens_details.cached_tokens == 3


def test_chat_stream_equals_whole(client: openai.OpenAI) -> None:
    chunks = list(
        ask(
            client, messages=[{"role": "user", "content": "hello"}], stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "[user]hello"
    ends = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert ends[-1] == "stop" and set(ends[:-1]) == {None}
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 22
    assert len({c.id for c in chunks}) == 1 and all(c.usage is None for c in chunks[:-1])


def test_stream_without_usage_has_none(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True))
    assert all(c.choices for c in chunks) and all(c.usage is None for c in chunks)


def test_choices_have_their_own_seed(client: openai.OpenAI, server: Any) -> None:
    done = ask(client, n=3, seed=7, max_tokens=4)
    assert [c.index for c in done.choices] == [0, 1, 2]
    assert sorted(c.random_seed for _, c in server.engine.seen) == [7, 8, 9]
    assert done.usage.prompt_tokens == len("[user]héllo".encode()) and done.usage.completion_tokens == 12
    streamed = list(ask(client, n=2, max_tokens=3, stream=True))
    texts = {0: "", 1: ""}
    for c in streamed:
        texts[c.choices[0].index] += c.choices[0].delta.content or ""
    assert texts == {0: "[us", 1: "[us"}


def test_the_largest_seed_wraps(client: openai.OpenAI, server: Any) -> None:
    ask(client, n=2, seed=(1 << 64) - 1, max_tokens=1)
    assert sorted(c.random_seed for _, c in server.engine.seen) == [0, (1 << 64) - 1]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    content = ask(client, logprobs=True, top_logprobs=2, max_tokens=2).choices[0].logprobs.content
    assert [c.token for c in content] == ["[", "u"] and content[0].logprob == -0.5 and content[0].bytes == [91]
    assert [(t.token, t.logprob) for t in content[0].top_logprobs] == [("[", -0.5), ("\0", -1.0)]
    streamed = [c.choices[0].logprobs for c in ask(client, logprobs=True, max_tokens=2, stream=True)]
    assert [x.content[0].token for x in streamed if x] == ["[", "u"]
    assert ask(client, max_tokens=1).choices[0].logprobs is None


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([100, 101], ["de"]),
        ([[100], [101, 102]], ["d", "ef"]),
    ],
)
def test_completion_prompts(client: openai.OpenAI, prompt: Any, texts: list[str]) -> None:
    done = client.completions.create(model="echo", prompt=prompt)
    assert [c.text for c in done.choices] == texts and [c.index for c in done.choices] == list(range(len(texts)))
    assert done.object == "text_completion" and done.usage.prompt_tokens == sum(map(len, texts))
    streamed = dict.fromkeys(range(len(texts)), "")
    for chunk in client.completions.create(model="echo", prompt=prompt, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert list(streamed.values()) == texts


def test_completion_choices_are_numbered_by_prompt(client: openai.OpenAI) -> None:
    done = client.completions.create(model="echo", prompt=["a", "b"], n=2)
    assert [c.text for c in done.choices] == ["a", "a", "b", "b"]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    got = client.completions.create(model="echo", prompt="abc", logprobs=1).choices[0].logprobs
    assert got.tokens == ["a", "b", "c"] and got.token_logprobs == [-0.5] * 3 and got.text_offset == [0, 1, 2]
    assert got.top_logprobs[0] == {"a": -0.5}


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, server: Any) -> None:
    done = client.completions.create(model="echo", prompt="abc", logprobs=0, echo=True, max_tokens=0)
    choice = done.choices[0]
    assert choice.text == "abc" and choice.finish_reason == "length"
    assert choice.logprobs.token_logprobs == [None, -0.25, -0.25] and choice.logprobs.tokens == ["a", "b", "c"]
    assert done.usage.completion_tokens == 0
    both = client.completions.create(model="echo", prompt="abc", logprobs=0, echo=True, max_tokens=1).choices[0]
    assert both.text == "abca" and both.logprobs.text_offset == [0, 1, 2, 3]
    assert client.completions.create(model="echo", prompt=[97, 98], echo=True, max_tokens=1).choices[0].text == "aba"


def test_offsets_are_those_of_the_text(client: openai.OpenAI, server: Any, monkeypatch: Any) -> None:
    """Which has neither the tokens nor the blank that a tokenizer puts around a prompt."""
    end, fields = 256, {"model": "echo", "logprobs": 0, "echo": True, "max_tokens": 3}
    tokenizer = server.engine.tokenizer
    monkeypatch.setattr(tokenizer, "encode", lambda text, **more: [end, *text.encode(), end])
    for prompt in ("ab", [end, 97, 98, end]):
        choice = client.completions.create(prompt=prompt, **fields).choices[0]
        assert choice.text.startswith("ab") and choice.logprobs.tokens[:5] == ["<eos>", "a", "b", "<eos>", "<eos>"]
        assert choice.logprobs.text_offset == [0, 0, 1, 2, 2, 2, 3]
    monkeypatch.setattr(tokenizer, "encode", lambda text, **more: [end, *f" {text}".encode()])
    assert client.completions.create(prompt="ab", **fields).choices[0].logprobs.text_offset[:5] == [0, 0, 0, 1, 2]


def test_every_sampling_field_arrives(client: openai.OpenAI, server: Any) -> None:
    ask(
        client,
        temperature=0.3,
        top_p=0.5,
        seed=11,
        stop=["a", "bc"],
        max_completion_tokens=5,
        max_tokens=9,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": 10},
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        extra_body={
            "top_k": 3,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "skip_special_tokens": False,
            "min_new_tokens": 2,
            "stop_token_ids": [4],
            "include_stop_str_in_output": True,
            "bad_words": ["x"],
            "chat_template_kwargs": {"shout": True},
        },
    )
    ids, config = server.engine.seen[-1]
    assert bytes(ids).decode() == "[USER]HÉLLO"
    assert (config.do_sample, config.temperature, config.top_p, config.top_k, config.min_p) == (True, 0.3, 0.5, 3, 0.1)
    assert (config.max_new_tokens, config.min_new_tokens, config.random_seed) == (5, 2, 11)
    assert config.stop_words == ["a", "bc", "<end>"] and config.stop_token_ids == [4] and config.bad_words == ["x"]
    assert (config.presence_penalty, config.frequency_penalty, config.repetition_penalty) == (0.5, -0.5, 1.1)
    assert config.logit_bias == {5: 10.0} and config.ignore_eos and not config.skip_special_tokens
    assert config.include_stop_str_in_output
    assert config.response_format == {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ({"guided_json": {"type": "object"}}, "json_schema"),
        ({"guided_json": '{"type": "object"}'}, "json_schema"),
        ({"guided_regex": "a+"}, "regex_schema"),
        ({"guided_choice": ["yes", "no"]}, "choice"),
        ({"guided_grammar": 'root ::= "a"'}, "grammar"),
        ({"structured_outputs": {"json": {"type": "object"}}}, "json_schema"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "choice"),
        ({"structured_outputs": {"json_object": True}}, "json_object"),
    ],
)
def test_formats_as_vllm_spells_them(client: openai.OpenAI, server: Any, asked: dict[str, Any], kind: str) -> None:
    client.completions.create(model="echo", prompt="a", extra_body=asked)
    config = server.engine.seen[-1][1]
    assert config.response_format["type"] == kind
    rule = next(iter(asked.values()))
    rule = next(iter(rule.values())) if "structured_outputs" in asked else rule
    if kind == "json_schema":
        assert config.response_format[kind]["schema"] == {"type": "object"}
    elif kind != "json_object":
        assert config.response_format[kind] == rule


@pytest.mark.parametrize("stream", [False, True])
def test_ids_come_as_vllm_tells_them(client: openai.OpenAI, server: Any, stream: bool) -> None:
    more: Any = {"extra_body": {"return_token_ids": True, "min_tokens": 2}, "stream": stream, "n": 2}
    chat, text = ask(client, **more), client.completions.create(model="echo", prompt=["ab", "c"], **more)
    parts = list(chat) if stream else [chat]
    ids = {
        i: [t for p in parts for c in p.choices if c.index == i for t in c.model_extra.get("token_ids", [])]
        for i in (0, 1)
    }
    assert ids == {0: list("[user]héllo".encode()), 1: list("[user]héllo".encode())}
    assert parts[0].model_extra["prompt_token_ids"] == ids[0]
    choices = [choice for part in (list(text) if stream else [text]) for choice in part.choices if choice.index == 2]
    assert [t for choice in choices for t in choice.model_extra.get("token_ids", [])] == [ord("c")]
    assert next(e["prompt_token_ids"] for c in choices if "prompt_token_ids" in (e := c.model_extra)) == [ord("c")]
    assert {config.min_new_tokens for _, config in server.engine.seen} == {2}


def test_message_forms(client: openai.OpenAI, server: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    ask(client, messages=messages)
    assert bytes(server.engine.seen[-1][0]).decode() == "[system]be kind[user]one two[assistant][tool]3"
    ask(client, messages="plain")
    assert bytes(server.engine.seen[-1][0]).decode() == "[user]plain"


def test_64_clients_at_once(start: Any) -> None:
    server = start(engine={"delay": 0.01})
    texts = [f"question {i}" for i in range(64)]

    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        messages: Any = [{"role": "user", "content": texts[i]}]
        if i % 2:
            done = await client.chat.completions.create(model="echo", messages=messages)
            return done.choices[0].message.content or ""
        stream = await client.chat.completions.create(model="echo", messages=messages, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.v1, api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    assert asyncio.run(all_of_them()) == [f"[user]{t}" for t in texts]
    assert server.engine.most_running > 32


def test_concurrent_requests_wait_for_a_slot(start: Any) -> None:
    server = start(engine={"delay": 0.005}, max_concurrent_requests=2)

    async def six() -> None:
        async with openai.AsyncOpenAI(base_url=server.v1, api_key="x", max_retries=0) as client:
            await asyncio.gather(*(client.completions.create(model="echo", prompt="abc") for _ in range(6)))

    asyncio.run(six())
    assert server.engine.most_running == 2


def test_keys_of_a_file_are_read_again_when_it_changes(start: Any, tmp_path: Path, caplog: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nfirst\n\n  schlüssel \r\n")
    server = start(api_keys=["given"], api_key_file=file)

    def known(key: str) -> bool:
        sent = urllib.request.Request(f"{server.v1}/models", headers={"x-api-key": key.encode().decode("latin-1")})
        try:
            return bool(urllib.request.urlopen(sent).status == 200)
        except urllib.error.HTTPError as error:
            assert error.code == 401
            return False

    keys = ("given", "first", "schlüssel", "second", "# of the team")
    assert [known(key) for key in keys] == [True, True, True, False, False]
    file.write_text("second\n")
    assert [known(key) for key in keys] == [True, False, False, True, False]
    for gone in (lambda: file.write_text("\n"), file.unlink):  # never open to all
        gone()
        assert [known(key) for key in keys] == [True, False, False, True, False]
    assert not any(key in caplog.text for key in keys[:4])
    for empty in ("", " "):
        with pytest.raises(UsageError, match="expected non-empty keys"):
            start(api_keys=[empty])
    with pytest.raises(UsageError, match=r"--api-key-file .*keys: cannot be read"):
        start(api_key_file=file)


def test_keys(start: Any) -> None:
    server = start(api_keys=["right", "other", "schlüssel"])
    for key in ("right", "other"):
        assert openai.OpenAI(base_url=server.v1, api_key=key, max_retries=0).models.list().data
    for key in ("wrong", "righ", "right2"):
        with pytest.raises(openai.AuthenticationError, match="unknown API key"):
            openai.OpenAI(base_url=server.v1, api_key=key, max_retries=0).models.list()


def test_a_slash_at_the_end_changes_nothing(server: Any) -> None:
    """No redirect, which would name this server's own address and lead clients behind TLS astray."""

    class Straight(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *args: Any) -> None:
            return None

    opener = urllib.request.build_opener(Straight)
    body = json.dumps({"model": "echo", "messages": [{"role": "user", "content": "Hello."}]}).encode()
    for path, data in (("/v1/chat/completions/", body), ("/v1/models/", None), ("/v1/models/echo/", None)):
        sent = urllib.request.Request(server.url + path, data, {"content-type": "application/json"})
        with opener.open(sent) as reply:
            assert reply.status == 200 and json.load(reply)["object"] in ("chat.completion", "list", "model")


def test_refusals_of_an_assistant_are_what_it_said(client: openai.OpenAI) -> None:
    part = {"type": "refusal", "refusal": "I will not."}
    for refused in ({"content": [part]}, {"content": None, "refusal": "I will not."}):
        asked: Any = [{"role": "assistant", **refused}, {"role": "user", "content": "Why?"}]
        assert ask(client, messages=asked).choices[0].message.content == "[assistant]I will not.[user]Why?"
    for role, sent in (("user", part), ("assistant", {"type": "refusal", "refusal": None})):
        asked = [{"role": role, "content": [sent]}]
        with pytest.raises(openai.BadRequestError, match="part 0: "):
            ask(client, messages=asked)
