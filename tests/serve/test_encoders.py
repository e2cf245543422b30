"""Encoders and cross-encoders over HTTP, and files of texts through `tool embed`, killed half-way too."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.serve.asking import ask
from toolkit import PytorchEngineConfig
from toolkit.serve.generation.read import encode_embedded, encode_pair

PAIR = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "</s>", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}},
        {"SpecialToken": {"id": "</s>", "type_id": 1}},
    ],
    "special_tokens": {},
}


@pytest.fixture(scope="module")
def scorer(tiny_checkpoint: Any, tmp_path_factory: Any) -> Path:
    """A cross-encoder whose tokenizer joins two texts as BERT's does."""
    path = tiny_checkpoint("bert", tmp_path_factory.mktemp("m") / "scorer", labels=1)
    file = path / "tokenizer.json"
    known = json.loads(file.read_text())
    ids = {token["content"]: token["id"] for token in known["added_tokens"]} | known["model"]["vocab"]
    begin, end = (next(t for t in ids if ids[t] == i) for i in (1, 2))
    named = {"<s>": begin, "</s>": end}
    text = json.dumps(PAIR | {"special_tokens": {n: {"id": n, "ids": [ids[n]], "tokens": [n]} for n in named.values()}})
    for old, new in named.items():
        text = text.replace(json.dumps(old), json.dumps(new))
    known["post_processor"] = json.loads(text)
    file.write_text(json.dumps(known))
    for name in ("chat_template.jinja",):
        (path / name).unlink(missing_ok=True)
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "chat_template"}))
    return path


@pytest.fixture(scope="module")
def served(scorer: Path, serve_tiny: Any) -> Iterator[Any]:
    with serve_tiny(scorer, PytorchEngineConfig(device_type="cpu", dtype="float32")) as (server, engine, _):
        yield server.url, engine


def test_a_cross_encoder_ranks_as_transformers(served: Any, scorer: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    url, engine = served
    model = AutoModelForSequenceClassification.from_pretrained(scorer, dtype=torch.float32).eval()
    query, documents = "Where do ships land?", ["In a harbour.", "On a hill, far away.", "Nobody knows"]
    wanted = []
    for document in documents:
        both = engine.tokenizer.backend.encode(query, document)
        assert engine.tokenizer.encode_pair(query, document) == (both.ids, both.type_ids.index(1))
        with torch.inference_mode():
            found = model(torch.tensor([both.ids]), token_type_ids=torch.tensor([both.type_ids])).logits
        wanted.append(float(torch.sigmoid(found)[0, 0]))
    status, reply = ask(url, "/v1/score", {"model": "tiny", "text_1": query, "text_2": documents})
    assert status == 200
    assert [one["score"] for one in reply["data"]] == pytest.approx(wanted, abs=1e-4)
    status, reply = ask(url, "/v1/rerank", {"model": "tiny", "query": query, "documents": documents, "top_n": 2})
    assert [one["index"] for one in reply["results"]] == [int(i) for i in np.argsort(wanted)[::-1][:2]]


def test_what_is_too_long_is_refused_or_cut(served: Any) -> None:
    url, _ = served
    long = "a harbour " * 600
    for path, body in (
        ("/v1/embeddings", {"input": long}),
        ("/v1/rerank", {"query": "ships", "documents": [long]}),
    ):
        status, reply = ask(url, path, {"model": "tiny", **body})
        assert status == 400 and "at most 512" in json.dumps(reply), reply
        status, reply = ask(url, path, {"model": "tiny", "truncate_prompt_tokens": -1, **body})
        assert status == 200 and reply["usage"]["prompt_tokens"] == 512
    status, reply = ask(url, "/v1/embeddings", {"model": "tiny", "truncate_prompt_tokens": 9, "input": long})
    assert reply["usage"]["prompt_tokens"] == 9


class Words:
    """A tokenizer whose tokens are words, however long they are."""

    def encode(self, text: str, most: int | None = None, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()[:most]]

    def encode_pair(self, first: str, second: str, most: int | None = None) -> tuple[list[int], int]:
        return (self.encode(first) + self.encode(second))[:most], 0


@pytest.mark.parametrize("most", [-1, 9])
def test_a_text_of_long_words_is_cut_where_its_tokens_end(most: int) -> None:
    async def run(work: Callable[[], Any], size: int) -> Any:
        return work()

    words, lengths = Words(), [*range(20, 70)]
    engine, lanes = SimpleNamespace(tokenizer=words, session_len=41), SimpleNamespace(run=run)
    state: Any = SimpleNamespace(embedded=words, engine=engine, lanes=lanes)
    text, limit = "  ".join("x" * length for length in lengths), 40 if most < 0 else most
    assert asyncio.run(encode_embedded(state, text, "input", most)) == lengths[:limit]
    assert asyncio.run(encode_pair(state, "abc", text, "documents.0", most))[0] == [3, *lengths][:limit]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_it_writes_nothing_and_says_so(path: str, served: Any) -> None:
    asked = {"prompt": "Hello"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hello"}]}
    status, reply = ask(served[0], path, {"model": "tiny", **asked})
    assert status == 400 and reply["error"]["message"]


def test_the_first_adapter_reads_a_file_of_texts(tiny_models: Any, support: Any, tmp_path: Path) -> None:
    from toolkit import TurbomindEngineConfig, pipeline

    model = tiny_models("llama")
    made = support("adapters").write_adapter(tmp_path / "a", model, "q_proj|down_proj")
    source, target = tmp_path / "texts.jsonl", tmp_path / "v.npy"
    source.write_text('{"text": "A ship at sea."}\n')
    flags = ("--model", model, "--dtype", "float32", "--adapters", f"a={made}")
    done = support("command").tool("embed", source, target, *flags)
    assert done.returncode == 0, done.stderr
    with pipeline(str(model), TurbomindEngineConfig(dtype="float32", adapters={"a": str(made)})) as pipe:
        expected = pipe.get_embeddings(["A ship at sea."], adapter_name="a")
        base = pipe.get_embeddings(["A ship at sea."])
    np.testing.assert_allclose(np.load(target), expected, atol=1e-5)
    assert np.abs(expected - base).max() > 0.01


def embed(*arguments: str, stop: float | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "toolkit", "embed", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if stop is not None:
        deadline = time.monotonic() + 100
        answers = Path(arguments[1]).with_name(f".{Path(arguments[1]).name}.partial.jsonl")
        while time.monotonic() < deadline and process.poll() is None:
            if answers.exists() and answers.stat().st_size > stop:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.01)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.slow
def test_a_file_of_texts_killed_and_gone_on(scorer: Path, tmp_path: Path) -> None:
    rows = [{"text": f"Ship number {i} lies in the harbour. " * (1 + i % 9), "id": f"n{i}"} for i in range(600)]
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    more = ("--model", str(scorer), "--backend", "pytorch", "--dtype", "float32", "--no-pack-cache")
    whole, cut = tmp_path / "whole.npy", tmp_path / "cut.npy"
    done = embed(str(source), str(whole), *more)
    assert done.returncode == 0 and "600 vectors of 64" in done.stderr, done.stderr
    killed = embed(str(source), str(cut), *more, stop=4000)
    assert killed.returncode == -signal.SIGKILL and not cut.exists()
    assert embed(str(source), str(cut), *more).returncode == 0
    a, b = np.load(whole), np.load(cut)
    assert a.shape == (600, 64) and np.linalg.norm(a, axis=1) == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(a, b, atol=1e-5)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    refused = embed(str(source), str(cut), *more)
    assert refused.returncode == 2 and "--overwrite" in refused.stderr
    table = tmp_path / "t.parquet"
    assert embed(str(source), str(table), *more, "--id-column", "id", "--dimensions", "8").returncode == 0
    from pyarrow import parquet

    found = parquet.read_table(table)
    assert found["custom_id"].to_pylist() == [row["id"] for row in rows] and len(found["embedding"][5]) == 8
    refused = embed(str(source), str(tmp_path / "x.bin"), *more)
    assert refused.returncode == 2 and ".npy" in refused.stderr
