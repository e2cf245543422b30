"""Classifiers of several labels and reward models over HTTP: /classify and /pooling, and their numbers by
transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.serve.asking import ask
from toolkit import PytorchEngineConfig, pipeline
from toolkit.errors import UsageError
from toolkit.serve.http.openapi.answers import Classes, Rewards

CONFIG = PytorchEngineConfig(device_type="cpu", dtype="float32")
TEXTS = ["In a harbour.", "On a hill, far away.", "Nobody knows"]
NAMES = ["calm", "angry", "sad"]


def changed(path: Path, **fields: Any) -> Path:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return path


@pytest.fixture(scope="module")
def sorter(tiny_checkpoint: Any, tmp_path_factory: Any) -> Path:
    """A classifier of three labels, which have names."""
    path: Path = tiny_checkpoint("bert", tmp_path_factory.mktemp("m") / "sorter", labels=3)
    return changed(path, id2label={str(i): name for i, name in enumerate(NAMES)})


@pytest.fixture(scope="module")
def served(sorter: Path, serve_tiny: Any) -> Iterator[Any]:
    with serve_tiny(sorter, CONFIG) as (server, engine, _):
        yield server.url, engine


def logits_of(path: Path, rows: list[list[int]]) -> np.ndarray:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return np.stack([model(torch.tensor([ids])).logits[0].numpy() for ids in rows])


def test_labels_are_as_likely_as_transformers_says(served: Any, sorter: Path) -> None:
    url, engine = served
    rows = [engine.tokenizer.encode(text) for text in TEXTS]
    wanted = logits_of(sorter, rows)
    shares = np.exp(wanted) / np.exp(wanted).sum(1, keepdims=True)
    for given in (TEXTS, rows):
        status, reply = ask(url, "/classify", {"model": "tiny", "input": given})
        assert status == 200 and [one["index"] for one in reply["data"]] == [0, 1, 2], reply
        np.testing.assert_allclose([one["probs"] for one in reply["data"]], shares, atol=1e-4)
        assert [one["label"] for one in reply["data"]] == [NAMES[i] for i in wanted.argmax(1)]
        assert {one["num_classes"] for one in reply["data"]} == {3}
        assert reply["usage"]["prompt_tokens"] == sum(map(len, rows))
        Classes.model_validate(reply, strict=True)
    status, reply = ask(url, "/classify", {"input": TEXTS[1], "use_activation": False})
    np.testing.assert_allclose(reply["data"][0]["probs"], wanted[1], atol=1e-3)
    status, reply = ask(url, "/pooling", {"input": TEXTS})
    Rewards.model_validate(reply, strict=True)
    np.testing.assert_allclose([one["data"] for one in reply["data"]], wanted, atol=1e-3)
    with pipeline(str(sorter), CONFIG) as pipe:
        found = pipe.classify(TEXTS)
        assert [list(one) for one in found] == [NAMES] * 3
        np.testing.assert_allclose([list(one.values()) for one in found], shares, atol=1e-4)
        with pytest.raises(UsageError, match="expected a reward model, which has one label, found 3"):
            pipe.get_reward_score(rows)


def test_a_table_of_texts_gets_labels(served: Any, sorter: Path, tmp_path: Path) -> None:
    """By their own lines, and by the column of a table."""
    parquet = pytest.importorskip("pyarrow.parquet")
    _, wanted = ask(served[0], "/classify", {"input": TEXTS})
    rows = [{"text": text} for text in TEXTS]
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/pooling", "body": {"input": text}}
        for i, text in enumerate(TEXTS)
    ]
    with pipeline(str(sorter), CONFIG) as pipe:
        assert pipe.batch(rows, tmp_path / "out.parquet", prompt="{text}", endpoint="/classify").completed == 3
        assert pipe.batch(lines, tmp_path / "out.jsonl").completed == 3
    found = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["text"] for row in found] == [one["label"] for one in wanted["data"]]
    told = [json.loads(line)["response"]["body"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [len(one["data"][0]["data"]) for one in told] == [3, 3, 3]


def test_labels_that_do_not_exclude_each_other(tiny_checkpoint: Any, tmp_path: Path) -> None:
    path = changed(tiny_checkpoint("bert", tmp_path / "m", labels=3), problem_type="multi_label_classification")
    ids = [5, 6, 7, 8]
    with pipeline(str(path), CONFIG) as pipe:
        (found,) = pipe.classify(ids)
    assert list(found) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    np.testing.assert_allclose(list(found.values()), 1 / (1 + np.exp(-logits_of(path, [ids])[0])), atol=1e-4)


@pytest.mark.parametrize(
    "path, body, told",
    [
        ("/classify", {}, "expected either input or messages"),
        ("/classify", {"input": "a", "messages": "b"}, "expected either input or messages"),
        ("/classify", {"input": "a harbour " * 600}, "at most 512"),
        ("/pooling", {"input": []}, "input"),
        ("/pooling", {"input": "a", "use_activation": True}, "use_activation"),
    ],
)
def test_what_cannot_be_judged_is_refused(path: str, body: dict[str, Any], told: str, served: Any) -> None:
    status, reply = ask(served[0], path, {"model": "tiny", **body})
    assert status == 400 and told in reply["error"]["message"], reply


def test_long_texts_are_cut_where_that_is_asked_for(served: Any) -> None:
    asked = {"input": "a harbour " * 600, "truncate_prompt_tokens": -1}
    status, reply = ask(served[0], "/classify", asked)
    assert status == 200 and reply["usage"]["prompt_tokens"] == 512


def test_a_model_without_a_classifier_says_so(tiny_models: Any, serve_tiny: Any) -> None:
    with serve_tiny(tiny_models("llama"), CONFIG) as (server, *_):
        for path in ("/classify", "/pooling"):
            status, reply = ask(server.url, path, {"input": "Hello"})
            assert status == 400 and "no classifier" in reply["error"]["message"], reply
    with pipeline(str(tiny_models("llama")), CONFIG) as pipe, pytest.raises(UsageError, match="with a classifier"):
        pipe.get_reward_score([5, 6])


def test_a_conversation_ends_with_the_token_of_the_reward(
    tiny_models: Any, support: Any, serve_tiny: Any, tmp_path: Path
) -> None:
    """InternLM2's: the linear ``v_head`` reads the state of a token that is put behind what it judges."""
    path = support("tiny").copy_of(tiny_models("internlm2"), tmp_path / "reward")
    rewarded(path, {"v_head.weight": torch.randn(1, 64, generator=torch.Generator().manual_seed(2))})
    changed(path, architectures=["InternLM2ForRewardModel"], reward_token_id=9)
    talk = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "In a harbour."}]
    with serve_tiny(path, CONFIG) as (server, engine, template):
        ids = engine.tokenizer.encode(template.render(talk, add_generation_prompt=False), add_special_tokens=False)
        _, said = ask(server.url, "/pooling", {"messages": talk})
        _, ended = ask(server.url, "/pooling", {"input": [[*ids, 9]]})
        _, bare = ask(server.url, "/pooling", {"input": [ids]})
        cut = {"input": "a harbour " * 600, "truncate_prompt_tokens": 20}
        assert ask(server.url, "/pooling", cut)[1]["usage"]["prompt_tokens"] == 20
    found = [reply["data"][0]["data"] for reply in (said, ended, bare)]
    assert found == pytest.approx(found[:1] * 3, abs=1e-4)
    with pipeline(str(path), CONFIG) as pipe:
        assert pipe.get_reward_score(ids) == pytest.approx(found[:1], abs=1e-4)


def rewarded(path: Path, head: dict[str, torch.Tensor]) -> Path:
    """The language model at ``path`` with the tensors of a reward model in place of its head's."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    for name in ("lm_head.weight", "output.weight"):
        tensors.pop(name, None)
    save_file({**tensors, **head}, path / "model.safetensors")
    return path


def test_rewards_of_qwen2_are_those_of_its_layers(tiny_models: Any, support: Any, tmp_path: Path) -> None:
    """Two linears with a ReLU between them, and more than a sigmoid would tell: from a checkpoint and an artifact."""
    from transformers import AutoModel

    from toolkit.convert.convert import convert
    from toolkit.convert.options import Packing

    draw = torch.Generator().manual_seed(3)
    first, second = torch.randn(64, 64, generator=draw), torch.randn(1, 64, generator=draw)
    head = {
        "score.0.weight": first,
        "score.0.bias": torch.ones(64),
        "score.2.weight": second,
        "score.2.bias": torch.ones(1),
    }
    source = tiny_models("qwen2", shape=1, tie_word_embeddings=False)
    ids = [7, 8, 9, 10]
    model = AutoModel.from_pretrained(source, dtype=torch.float32).eval()
    with torch.inference_mode():
        state = model(torch.tensor([ids])).last_hidden_state[0, -1]
        wanted = float(second @ torch.relu(first @ state + 1) + 1)
    path = changed(
        rewarded(support("tiny").copy_of(source, tmp_path / "reward"), head), architectures=["Qwen2ForRewardModel"]
    )
    convert(str(path), str(tmp_path / "engine"), Packing(target="torch"))
    for folder in (path, tmp_path / "engine"):
        with pipeline(str(folder), CONFIG) as pipe:
            assert pipe.get_reward_score(ids) == pytest.approx([wanted], rel=1e-3)


def test_a_decoder_that_classifies_needs_no_head_that_writes(tiny_models: Any, tmp_path: Path) -> None:
    """Embedding and head are not one in the whole model (Skywork's rewards by Llama 3.1 8B), which has no such head."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    source = tiny_models("llama")
    config = AutoConfig.from_pretrained(source, num_labels=1, tie_word_embeddings=False, architectures=None)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "m")
    for file in source.glob("tokenizer*"):
        (tmp_path / "m" / file.name).write_bytes(file.read_bytes())
    ids = [5, 6, 7]
    with pipeline(str(tmp_path / "m"), CONFIG) as pipe:
        assert pipe.get_reward_score(ids) == pytest.approx(logits_of(tmp_path / "m", [ids])[0], abs=1e-4)
