"""Embeddings, reranking and scoring over HTTP, by a tiny model and transformers' numbers for it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests.serve.asking import ask
from toolkit import PytorchEngineConfig
from toolkit.artifacts.text_head import longest_text
from toolkit.errors import ToolkitError
from toolkit.serve.generation.pooling import INSTRUCTION, SYSTEM


@pytest.fixture(scope="module")
def served(tiny_models: Any, serve_tiny: Any) -> Iterator[Any]:
    """(url, engine, template) of a server with mean pooling."""
    config = PytorchEngineConfig(device_type="cpu", dtype="float32", session_len=500)
    with serve_tiny(tiny_models("qwen2"), config, pooling="mean") as (server, engine, template):
        yield server.url, engine, template


@pytest.fixture(scope="module")
def model(tiny_models: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_models("qwen2"), dtype=torch.float32)


def states(model: Any, ids: list[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model.model(torch.tensor([ids])).last_hidden_state[0].double().numpy()


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x)


def test_the_official_client(served: Any, model: Any) -> None:
    url, engine, _ = served
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    texts = ["Hello", "It was the best of times, it was the worst of times."]
    for form in ("float", "base64", openai.NOT_GIVEN):  # not given, the client asks for base64 and reads it
        got = client.embeddings.create(model="tiny", input=texts, encoding_format=form)
        assert [d.index for d in got.data] == [0, 1] and got.model == "tiny"
        ids = [engine.tokenizer.encode(text) for text in texts]
        assert got.usage.prompt_tokens == got.usage.total_tokens == sum(map(len, ids))
        for d, row in zip(got.data, ids, strict=True):
            values = d.embedding
            if isinstance(values, str):
                values = np.frombuffer(base64.b64decode(values), "<f4").tolist()
            assert np.dot(values, unit(states(model, row).mean(0))) > 0.9999
    short = client.embeddings.create(model="tiny", input="Hello", dimensions=7).data[0].embedding
    assert short == pytest.approx(unit(states(model, ids[0]).mean(0)[:7]).tolist(), abs=1e-4)
    by_ids = client.embeddings.create(model="tiny", input=ids).data
    assert by_ids[1].embedding == pytest.approx(values, abs=1e-5)
    assert client.embeddings.create(model="tiny", input=ids[0]).data[0].embedding == pytest.approx(
        by_ids[0].embedding, abs=1e-5
    )


def test_more_inputs_than_a_wave(served: Any) -> None:
    url, *_ = served
    status, got = ask(url, "/v1/embeddings", {"model": "tiny", "input": [[5, n] for n in range(70, 170)]})
    assert status == 200 and [d["index"] for d in got["data"]] == list(range(100))
    assert len({d["embedding"][0] for d in got["data"]}) > 90 and got["usage"]["prompt_tokens"] == 200


def test_a_folder_whose_texts_are_turns_of_a_chat(
    tiny_models: Any, serve_tiny: Any, support: Any, tmp_path: Path
) -> None:
    """As sentence-transformers has saved it (see ``chat/embedded_text.py``): whole, and cut."""
    from transformers import AutoTokenizer

    folder = support("tiny").copy_of(tiny_models("qwen2"), tmp_path / "saved")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"modality_config": {"text": {}, "message": {}}}))
    turn = [{"role": "user", "content": "A ship at sea."}]
    ids = AutoTokenizer.from_pretrained(folder).apply_chat_template(turn, return_dict=False)
    config = PytorchEngineConfig(device_type="cpu", dtype="float32", session_len=500)
    with serve_tiny(folder, config) as (server, *_):
        for most in (None, -1, len(ids), len(ids) - 3):
            body = {"model": "tiny", "input": ["A ship at sea.", ids], "truncate_prompt_tokens": most}
            status, got = ask(server.url, "/v1/embeddings", body)
            assert status == 200, got
            text, whole = (d["embedding"] for d in got["data"])
            cut = most == len(ids) - 3  # of ids the end, of a text what stands before the end of its turn
            assert (np.dot(text, whole) > 0.99999) != cut
            assert got["usage"]["prompt_tokens"] == 2 * (len(ids) - 3 * cut)
        status, got = ask(server.url, "/v1/embeddings", {"model": "tiny", "input": "A ship. " * 900})
        assert status == 400 and "input" in got["error"]["message"]


def test_a_text_is_read_as_far_as_its_folder_says(
    tiny_models: Any, serve_tiny: Any, support: Any, tmp_path: Path
) -> None:
    """As sentence-transformers reads it, unless somebody asks for more."""
    folder = support("tiny").copy_of(tiny_models("qwen2"), tmp_path / "saved")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12}))
    ids = list(range(70, 90))
    for session_len, most in ((None, 12), (500, 20)):
        config = PytorchEngineConfig(device_type="cpu", dtype="float32", session_len=session_len)
        with serve_tiny(folder, config) as (server, *_):
            body = {"model": "tiny", "input": [ids, ids[:most]], "truncate_prompt_tokens": -1}
            status, got = ask(server.url, "/v1/embeddings", body)
            assert status == 200 and got["usage"]["prompt_tokens"] == 2 * most, got
            assert got["data"][0]["embedding"] == pytest.approx(got["data"][1]["embedding"], abs=1e-5)
            status, got = ask(server.url, "/v1/embeddings", {"model": "tiny", "input": ids})
            assert status == (400 if most == 12 else 200)
            assert most == 20 or ("12" in got["error"]["message"] and "--session-len" in got["error"]["message"])


@pytest.mark.parametrize(
    ("told", "of_tokenizer", "most"),
    [({"max_seq_length": 256}, 512, 256), ({}, 512, 512), ({}, int(1e30), None), ({}, None, None), (None, 512, None)],
)
def test_where_the_length_of_texts_stands(tmp_path: Path, told: Any, of_tokenizer: Any, most: Any) -> None:
    if told is not None:
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps(told))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": of_tokenizer}))
    assert longest_text(tmp_path) == most


@pytest.mark.parametrize("wrong", ["12", 0, True, 1.5])
def test_a_length_of_texts_that_is_none(tiny_models: Any, support: Any, tmp_path: Path, wrong: Any) -> None:
    folder = support("tiny").copy_of(tiny_models("qwen2"), tmp_path / "saved")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": wrong}))
    with pytest.raises(ToolkitError, match="max_seq_length: expected"):
        longest_text(folder)


def yes_share(
    model: Any, engine: Any, template: Any, query: str, document: str, instruction: str = INSTRUCTION
) -> float:
    import torch

    text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    ids = template.encode(messages, enable_thinking=False)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1].double()
    yes, no = (engine.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))
    return float(torch.softmax(logits[[yes, no]], 0)[0])


def test_rerank_is_the_chance_of_yes(served: Any, model: Any) -> None:
    url, engine, template = served
    query, documents = "times?", ["Hello", "the best of times", "a lazy dog"]
    body = {"model": "tiny", "query": query, "documents": documents}
    _, got = ask(url, "/v1/rerank", body)
    expected = [yes_share(model, engine, template, query, d) for d in documents]
    order = sorted(range(3), key=lambda i: -expected[i])
    assert [r["index"] for r in got["results"]] == order
    for r in got["results"]:
        assert r["relevance_score"] == pytest.approx(expected[r["index"]], abs=1e-4)
        assert r["document"] == {"text": documents[r["index"]]}
    assert got["usage"]["total_tokens"] > 3 * 30
    _, best = ask(url, "/rerank", {**body, "documents": [{"text": d} for d in documents], "top_n": 1})
    assert [r["index"] for r in best["results"]] == order[:1]
    _, bare = ask(url, "/v2/rerank", {**body, "return_documents": False, "instruction": "Be strict"})
    assert all("document" not in r for r in bare["results"])
    told = {r["index"]: r["relevance_score"] for r in bare["results"]}
    assert told[1] == pytest.approx(yes_share(model, engine, template, query, documents[1], "Be strict"), abs=1e-4)


def test_score_by_vectors_and_by_words(served: Any, model: Any) -> None:
    url, engine, template = served
    one, two = "times?", ["Hello", "the best of times"]
    pooled = [unit(states(model, engine.tokenizer.encode(t)).mean(0)) for t in (one, *two)]
    _, got = ask(url, "/v1/score", {"model": "tiny", "text_1": one, "text_2": two, "method": "embedding"})
    assert [d["score"] for d in got["data"]] == pytest.approx([float(pooled[0] @ v) for v in pooled[1:]], abs=1e-4)
    _, got = ask(url, "/score", {"model": "tiny", "queries": two, "documents": [one, one]})
    assert [d["score"] for d in got["data"]] == pytest.approx(
        [yes_share(model, engine, template, q, one) for q in two], abs=1e-4
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", ""]}, "input.1"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "dimensions": 65}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/embeddings", {"input": [5] * 600}, "input"),
        ("/v1/embeddings", {"input": [[5], [100000]]}, "input.1"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["x", "word " * 600]}, "documents.1"),
        ("/v1/rerank", {"query": "a", "documents": [{"image": "x"}]}, "documents.0"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "method": "bm25"}, "method"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
    ],
)
def test_bad_fields_are_named(served: Any, path: str, body: dict[str, Any], param: str) -> None:
    status, told = ask(served[0], path, {"model": "tiny", **body})
    assert status == 400 and told["error"]["param"] == param, told


def test_another_model_is_not_served(served: Any) -> None:
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/v1/rerank", {"query": "a", "documents": ["b"]})):
        assert ask(served[0], path, {"model": "gpt", **body})[0] == 404
