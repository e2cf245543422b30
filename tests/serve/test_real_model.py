"""The command itself: a tiny model in its own engine process, a real port, the official client, real signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest

from tests.serve.asking import ended

COMMAND = [sys.executable, "-c", "import sys; from toolkit.commands.main import main; main(sys.argv[1:])"]
PROMPT = [5, 77, 200, 13, 260, 33, 91]


def launch(model: Path, *flags: str) -> subprocess.Popen[str]:
    arguments = [
        "serve",
        "api_server",
        str(model),
        "--server-port",
        "0",
        "--dtype",
        "float32",
        "--device",
        "cpu",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen(
        [*COMMAND, *arguments, *flags], stderr=subprocess.PIPE, text=True, cwd="/", env=env, start_new_session=True
    )


def wait_for_url(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if found := re.search(r"http://[0-9.]+:\d+", line):
            break
    else:
        raise AssertionError(f"the server ended: {seen}")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{found[0]}/health", timeout=60).close()
            return found[0]
        time.sleep(0.02)
    raise AssertionError("the server never answered")


@contextlib.contextmanager
def serving(model: Path, *flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    process = launch(model, *flags)
    assert process.stderr is not None
    with process.stderr, ended(process):
        yield wait_for_url(process), process


@pytest.fixture(scope="module")
def server(packed: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with serving(packed, "--model-name", "tiny", "--session-len", "400") as found:
        yield found


@pytest.fixture(scope="module")
def url(server: tuple[str, subprocess.Popen[str]]) -> str:
    return server[0]


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def reference(tiny_models: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_models("llama"), dtype=torch.float32)

    def log_probabilities(token_ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([token_ids])).logits[0].double().log_softmax(-1).numpy()

    return log_probabilities


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"toolkit:{name} "))


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    extra = {"ignore_eos": True, "skip_special_tokens": False, **fields.pop("extra_body", {})}
    settings = {"max_tokens": 12, "temperature": 0, **fields}
    return client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **settings)


def test_greedy_is_the_model(client: openai.OpenAI, reference: Callable[[list[int]], np.ndarray]) -> None:
    choice = complete(client, logprobs=3).choices[0]
    tokens = list(PROMPT)
    for logprob, top in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True):
        expected = reference(tokens)[-1]
        best = int(expected.argmax())
        assert logprob == pytest.approx(expected[best], abs=1e-3)
        assert sorted(top.values())[::-1] == pytest.approx(np.sort(expected)[::-1][: len(top)].tolist(), abs=1e-3)
        tokens.append(best)
    assert choice.finish_reason == "length" and len(choice.logprobs.tokens) == 12
    spelled = "".join(choice.logprobs.tokens)
    assert choice.text == spelled or "bytes:\\x" in spelled


def test_echo_scores_the_prompt(client: openai.OpenAI, reference: Callable[[list[int]], np.ndarray]) -> None:
    expected = reference(PROMPT)
    expected = [float(expected[i, token]) for i, token in enumerate(PROMPT[1:])]
    got = complete(client, echo=True, logprobs=0, max_tokens=0)
    assert got.choices[0].logprobs.token_logprobs[0] is None
    assert got.choices[0].logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-3)
    assert got.usage.completion_tokens == 0 and got.usage.prompt_tokens == len(PROMPT)


def test_a_greedy_token_s_own_log_probability_is_the_largest_to_the_last_bit(client: openai.OpenAI) -> None:
    """As lm-eval asks for it: batches of token ids, one token more, its entry too; it compares floats with ``==``."""
    ids = list(PROMPT)
    for _ in range(4):  # the likeliest token after ids, as the last entry of a longer prompt names it
        done = complete(client, [*ids, 0], max_tokens=1, extra_body={"prompt_logprobs": 1})
        entry = done.choices[0].model_extra["prompt_logprobs"][-1]
        ids.append(next(int(token) for token, told in entry.items() if told["rank"] == 1))
    other = [9, 8, 7]
    both = complete(client, [ids, other], echo=True, logprobs=1, max_tokens=1, seed=1234).choices
    for choice, prompt in zip(sorted(both, key=lambda c: c.index), (ids, other), strict=True):
        own, top = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
        assert len(own) == len(top) == len(prompt) + 1 and own[0] is None
    own, top = both[0].logprobs.token_logprobs, both[0].logprobs.top_logprobs
    assert all(mine == max(best.values()) for mine, best in zip(own[len(PROMPT) :], top[len(PROMPT) :], strict=True))
    assert not all(mine == max(best.values()) for mine, best in zip(own[1:], top[1:], strict=True))


def test_an_end_token_has_its_entry_too(client: openai.OpenAI, tiny_models: Any) -> None:
    eos = json.loads((tiny_models("llama") / "config.json").read_text())["eos_token_id"]
    bias = {str(eos if isinstance(eos, int) else eos[0]): 100}
    fields = {"logit_bias": bias, "max_tokens": 1, "logprobs": 1, "extra_body": {"ignore_eos": False}}
    choice = complete(client, echo=True, **fields).choices[0]
    assert choice.finish_reason == "stop" and len(choice.logprobs.token_logprobs) == len(PROMPT) + 1


def test_prompt_logprobs_as_vllm_has_them(client: openai.OpenAI, reference: Callable[[list[int]], np.ndarray]) -> None:
    expected = reference(PROMPT)
    done = complete(client, max_tokens=1, extra_body={"prompt_logprobs": 2})
    found = done.choices[0].model_extra["prompt_logprobs"]
    assert found[0] is None and len(found) == len(PROMPT)
    for i, (token, entry) in enumerate(zip(PROMPT[1:], found[1:], strict=True)):
        best = np.argsort(-expected[i])[:2].tolist()
        assert set(entry) == {str(t) for t in (token, *best)}
        assert [entry[str(t)]["rank"] for t in best] == [1, 2]
        for each in entry:
            assert entry[each]["logprob"] == pytest.approx(expected[i, int(each)], abs=1e-3)
    talk = [{"role": "user", "content": "Hi"}]
    chat = client.chat.completions.create(model="tiny", messages=talk, max_tokens=1, extra_body={"prompt_logprobs": 0})
    told = chat.model_extra["prompt_logprobs"]
    assert told[0] is None and len(told) == chat.usage.prompt_tokens and all(len(entry) == 1 for entry in told[1:])
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs: not with stream"):
        complete(client, stream=True, extra_body={"prompt_logprobs": 1})


def test_stream_equals_whole(client: openai.OpenAI) -> None:
    for fields in ({}, {"temperature": 1.0, "seed": 3, "n": 2}):
        whole = complete(client, max_tokens=40, **fields)
        texts, ends = ["", ""], ["", ""]
        for chunk in complete(client, max_tokens=40, stream=True, **fields):
            choice = chunk.choices[0]
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason or ends[choice.index]
        assert texts[: len(whole.choices)] == [c.text for c in whole.choices]
        assert ends[: len(whole.choices)] == ["length"] * len(whole.choices)


def test_choice_i_is_seed_plus_i(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "max_tokens": 20}
    together = [c.text for c in complete(client, n=3, seed=40, **fields).choices]
    assert together == [complete(client, seed=40 + i, **fields).choices[0].text for i in range(3)]
    assert len(set(together)) == 3


def test_best_of_returns_those_of_the_highest_mean_log_probability(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "max_tokens": 6, "seed": 7}
    drawn = complete(client, prompt=[PROMPT, PROMPT[:3]], n=5, logprobs=0, **fields).choices
    means = [float(np.mean(c.logprobs.token_logprobs)) for c in drawn]
    expected = [i for first in (0, 5) for i in sorted(range(first, first + 5), key=lambda i: -means[i])[:2]]
    best = complete(client, prompt=[PROMPT, PROMPT[:3]], n=2, best_of=5, **fields)
    assert [c.text for c in best.choices] == [drawn[i].text for i in expected] != [drawn[i].text for i in (0, 1, 5, 6)]
    assert [c.index for c in best.choices] == [0, 1, 2, 3] and all(c.logprobs is None for c in best.choices)
    assert best.usage.completion_tokens == 60  # of all that were drawn
    for wrong in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}):
        with pytest.raises(openai.BadRequestError, match=r"^Error code: 400.*best_of: "):
            complete(client, **fields, **wrong)


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_says_how_far_its_prompt_has_come(client: openai.OpenAI, chat: bool) -> None:
    words = " ".join(f"w{i}" for i in range(40 + chat))  # its own: the other kind's prompt is cached
    asked: dict[str, Any] = {"model": "tiny", "stream": True, "max_tokens": 2, "extra_body": {"return_progress": True}}
    told: list[list[dict[str, Any]]] = []
    for _ in range(2):
        if chat:
            chunks = list(client.chat.completions.create(messages=[{"role": "user", "content": words}], **asked))
        else:
            chunks = list(client.completions.create(prompt=words, **asked))
        found = [i for i, chunk in enumerate(chunks) if (chunk.model_extra or {}).get("prompt_progress")]
        text = [i for i, c in enumerate(chunks) if (c.choices[0].delta.content if chat else c.choices[0].text)]
        assert found and (not text or found[-1] < text[0])
        told.append([chunks[i].model_extra["prompt_progress"] for i in found])
    for i, progress in enumerate(told):
        first, last = progress[0], progress[-1]
        assert set(last) == {"total", "cache", "processed", "time_ms"} and last["processed"] == last["total"] > 64
        assert first["cache"] == last["cache"] and (first["cache"] >= 64) == bool(i)  # the second finds the first's
        assert [p["processed"] for p in progress] == sorted(p["processed"] for p in progress)
    with pytest.raises(openai.BadRequestError, match="return_progress: only with stream"):
        complete(client, extra_body={"return_progress": True})


def test_stop_strings_of_many_tokens(client: openai.OpenAI) -> None:
    text = complete(client, max_tokens=40).choices[0].text
    stop = text[7:13]
    assert len(stop) == 6
    short = complete(client, max_tokens=40, stop=["never there", stop]).choices[0]
    assert short.text == text[: text.index(stop)] and short.finish_reason == "stop"
    assert short.stop_reason == stop
    chunks = list(complete(client, max_tokens=40, stop=stop, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == short.text
    kept = complete(client, max_tokens=40, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == short.text + stop


def test_prefix_cache_shows_in_usage(client: openai.OpenAI) -> None:
    prompt = list(np.random.default_rng(8).integers(3, 300, 200))
    prompt = [int(token) for token in prompt]
    first, second = complete(client, prompt), complete(client, prompt)
    assert first.choices[0].text == second.choices[0].text
    assert second.usage.prompt_tokens_details.cached_tokens >= 128


def test_structured_output(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 60}
    choice = {"response_format": {"type": "choice", "choice": ["yes", "no"]}, "ignore_eos": False}
    assert complete(client, extra_body=choice, **fields).choices[0].text in ("yes", "no")
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    done = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a"}],
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        seed=1,
        max_tokens=200,
    )
    if done.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(done.choices[0].message.content or "")["ok"], bool)
    with pytest.raises(openai.BadRequestError, match="response_format"):
        complete(client, extra_body={"response_format": {"type": "regex_schema", "regex_schema": "(("}})


def test_bias_and_penalties_reach_the_sampler(client: openai.OpenAI) -> None:
    forced = complete(client, logit_bias={"70": 100}, max_tokens=3).choices[0].text
    assert forced == complete(client, [70, 70, 70], echo=True, max_tokens=0).choices[0].text


def test_no_other_tokens_are_drawn(client: openai.OpenAI) -> None:
    """Of allowed_token_ids, at any temperature and beside a format, and what log-probabilities they then have."""
    more = {"allowed_token_ids": [70, 75, 81], "return_token_ids": True, "ignore_eos": True}
    drawn = complete(client, n=4, temperature=2.0, seed=1, max_tokens=20, logprobs=3, extra_body=more)
    ids = {i for choice in drawn.choices for i in choice.model_extra["token_ids"]}
    assert ids == {70, 75, 81}
    for best in drawn.choices[0].logprobs.top_logprobs:
        assert sum(math.exp(x) for x in best.values()) == pytest.approx(1, abs=1e-4)


def test_a_prompt_s_last_tokens_may_be_all_that_is_read(client: openai.OpenAI) -> None:
    def read(prompt: Any, most: int, **more: Any) -> list[int]:
        extra = {"return_token_ids": True, "truncate_prompt_tokens": most, **more}
        done = complete(client, prompt, max_tokens=1, extra_body=extra)
        return list(done.choices[0].model_extra["prompt_token_ids"])

    text = "The sea, the sea, and a ship at sea, " * 3
    whole = read(text, 10_000, add_special_tokens=False)
    assert read(text, 5, add_special_tokens=False) == whole[-5:] == read(whole, 5)
    assert read(text * 400, 7, add_special_tokens=False) == whole[-7:]
    assert len(read(text * 400, -1)) == len(read(list(range(3, 40)) * 400, -1)) > 100
    with pytest.raises(openai.BadRequestError, match="session length"):
        complete(client, text * 400)
    talk = [{"role": "user", "content": text}]
    cut = client.chat.completions.create(
        model="tiny", messages=talk, max_tokens=1, extra_body={"truncate_prompt_tokens": 6, "return_token_ids": True}
    )
    assert cut.usage.prompt_tokens == len(cut.model_extra["prompt_token_ids"]) == 6


def test_what_texts_begin_with_may_be_left_out(client: openai.OpenAI) -> None:
    asked = {"return_token_ids": True}
    whole = complete(client, "a sea", max_tokens=1, extra_body=asked).choices[0].model_extra["prompt_token_ids"]
    bare = complete(client, "a sea", max_tokens=1, extra_body=asked | {"add_special_tokens": False})
    ids = bare.choices[0].model_extra["prompt_token_ids"]
    assert whole[-len(ids) :] == ids and len(whole) >= len(ids)


def test_chat(client: openai.OpenAI) -> None:
    done = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hello"}], temperature=0, max_tokens=5
    )
    assert done.choices[0].message.role == "assistant" and 1 <= done.usage.completion_tokens <= 5


def test_a_prompt_longer_than_the_session(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="--session-len") as error:
        complete(client, [7] * 400)
    assert error.value.code == "context_length_exceeded"
    fits = complete(client, [7] * 390, max_tokens=50)
    assert fits.usage.total_tokens == 400 and fits.choices[0].finish_reason == "length"


def test_64_at_once(url: str) -> None:
    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        stream = await client.completions.create(
            model="tiny",
            prompt=[i + 3, 50, 60],
            max_tokens=16,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "skip_special_tokens": False},
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i) for i in range(64)))

    together = asyncio.run(all_of_them())
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        assert together[:4] == [complete(client, [i + 3, 50, 60], max_tokens=16).choices[0].text for i in range(4)]


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_frees_the_blocks(server: tuple[str, subprocess.Popen[str]], stream: bool) -> None:
    """Waits for counts alone, which stay; a state such as "4 are running" may be over before it is looked at."""
    url, process = server
    host, port = url.removeprefix("http://").split(":")
    engine = engine_of(process.pid)
    body = {"model": "tiny", "prompt": [9, 8, 7], "max_tokens": 390, "ignore_eos": True, "stream": stream, "n": 4}
    data = json.dumps(body).encode()
    for _ in range(20):  # where the machine is busy an answer may be whole before the engine is stopped
        steps, ended, aborted = metric(url, "engine_steps_total"), finished(url), finished(url, "abort")
        connection = socket.create_connection((host, int(port)), timeout=60)
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        )
        _until(lambda before=steps: metric(url, "engine_steps_total") > before)
        engine.suspend()  # or it would be done before the server hears that nobody waits
        try:
            connection.close()
            _until(lambda before=ended: finished(url) == before + 4)
        finally:
            engine.resume()
        _until(lambda: metric(url, "num_requests_running") == 0)
        _until(lambda: metric(url, "kv_cache_usage_perc") == 0)
        if finished(url, "abort") == aborted + 4:
            assert metric(url, "engine_steps_total") - steps < 390, "the engine went on for nobody"
            return
    raise AssertionError("no answer was ever cut short")


def finished(url: str, reason: str = "") -> float:
    """How many choices have ended, of all or for one reason."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    kept = (line for line in lines if line.startswith("toolkit:request_finished_total{"))
    return sum(float(line.split()[-1]) for line in kept if f'finished_reason="{reason}' in line)


def _until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "the condition never came true"
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("to", [os.kill, os.killpg])  # one process, as a supervisor does; the group, as a terminal does
def test_a_signal_ends_it_cleanly(packed: Path, number: int, to: Callable[[int, int], None]) -> None:
    with serving(packed, "--grace-period", "0.3", "--log-level", "warning") as (url, process):
        children = psutil.Process(process.pid).children(recursive=True)
        assert children, "the engine should have a process of its own"
        host, port = url.removeprefix("http://").split(":")
        body = {"model": "x", "prompt": [9, 8], "max_tokens": 500, "ignore_eos": True, "stream": True}
        with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as reply:
            body["model"] = json.load(reply)["data"][0]["id"]
        data = json.dumps(body).encode()
        connection = socket.create_connection((host, int(port)), timeout=60)
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        )
        assert b"200 OK" in connection.recv(500)
        to(process.pid, number)
        seen = b""
        while part := connection.recv(65536):
            seen += part
        connection.close()
        assert b"[DONE]" in seen and (b"shutting down" in seen or b'"length"' in seen)
        assert process.wait(60) == 0
        assert process.stderr is not None
        left = process.stderr.read()
        assert "Traceback" not in left and "restarting" not in left
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive


def test_a_signal_while_the_model_loads(packed: Path) -> None:
    process = launch(packed)
    _until(lambda: bool(psutil.Process(process.pid).children()))
    children = psutil.Process(process.pid).children()
    process.terminate()
    _, error = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in error
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive


def engine_of(server: int) -> psutil.Process:
    """The engine's process; beside it a server has those that render untrusted templates."""
    (found,) = (p for p in psutil.Process(server).children() if "engine.process.worker" in " ".join(p.cmdline()))
    return found


def test_an_engine_that_dies_is_replaced(packed: Path) -> None:
    with serving(packed, "--model-name", "tiny", "--log-level", "critical") as (url, process):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def back(gone: psutil.Process) -> bool:
            with contextlib.suppress(ValueError, psutil.Error, urllib.error.HTTPError):
                if engine_of(process.pid) != gone and urllib.request.urlopen(f"{url}/health", timeout=60):
                    return True
            return False

        told = ""
        for _ in range(5):  # where the machine is busy an answer may be whole before its engine is killed
            worker = engine_of(process.pid)
            stream = complete(client, max_tokens=500, stream=True)
            next(stream)
            worker.kill()
            try:
                list(stream)
            except openai.APIError as error:
                told = str(error)
            _until(lambda gone=worker: back(gone))
            if told:
                break
        assert "engine failed" in told
        assert complete(client).choices[0].finish_reason == "length"
        assert engine_of(process.pid) != worker


def test_a_port_in_use(packed: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = launch(packed, "--server-port", str(port))
        _, error = process.communicate(timeout=300)
    assert process.returncode in (1, 2)
    assert len(error.strip().splitlines()) == 1 and str(port) in error and "in use" in error


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--server-port", "70000"], "--server-port"),
        (["--server-name", "300.1.2.3"], "--server-name"),
        (["--log-level", "loud"], "--log-level"),
        (["--ssl"], "SSL_KEYFILE"),
        (["--api-keys", ""], "--api-keys"),
        (["--api-key-file", "/no such file"], "--api-key-file /no such file: cannot be read"),
        (["--chat-template", "no such template"], "no such template"),
        (["--backend", "fancy"], "--backend"),
    ],
)
def test_bad_flags_are_one_line(support: Any, packed: Path, flags: list[str], says: str) -> None:
    done = support("command").tool("serve", "api_server", packed, "--server-port", "0", *flags)
    assert done.returncode in (1, 2), done.stderr
    lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("loading weights")]
    assert len(lines) == 1 and says in lines[0]
