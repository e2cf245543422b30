"""Texts that become vectors, of folders that sentence-transformers has saved: the ids are those that it makes.

They were compared with sentence-transformers 6.2.0 itself: ``SentenceTransformer.preprocess`` of such folders calls
``apply_chat_template`` with a user's turn and no more, which transformers does here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from toolkit import TurbomindEngineConfig, pipeline
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.chat.embedded_text import EmbeddedText
from toolkit.chat.template import ChatTemplate
from toolkit.errors import ToolkitError

TEXTS = ["A ship at sea.", "x", "The town of Riga, in winter"]


@pytest.fixture
def folder(tiny_models: Any, support: Any, tmp_path: Path) -> Path:
    found: Path = support("tiny").copy_of(tiny_models("qwen3"), tmp_path / "saved")
    return found


def say(folder: Path, **config: Any) -> None:
    (folder / "sentence_bert_config.json").write_text(json.dumps(config))


def reader(folder: Path) -> EmbeddedText:
    tokenizer = Tokenizer.open(folder)
    return EmbeddedText(tokenizer, ChatTemplate.open(tokenizer, folder))


MESSAGE = {"text": {"method": "forward"}, "message": {"method": "forward", "format": "flat"}}


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": True}])
def test_a_folder_with_messages(folder: Path, options: dict[str, Any]) -> None:
    say(folder, modality_config=MESSAGE, processing_kwargs={"chat_template": {**options, "restore_suffix": True}})
    read, theirs = reader(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        turn = [{"role": "user", "content": text}]
        assert read.encode(text) == theirs.apply_chat_template(turn, tokenize=True, return_dict=False, **options)


@pytest.mark.parametrize("config", [None, {}, {"modality_config": {"text": {"method": "forward"}}}])
def test_other_folders(folder: Path, config: dict[str, Any] | None) -> None:
    if config is not None:
        say(folder, **config)
    read, theirs = reader(folder), AutoTokenizer.from_pretrained(folder)
    assert [read.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]


@pytest.mark.parametrize("message", [False, True])
def test_a_default_prompt_stands_before_the_text(folder: Path, message: bool) -> None:
    """As ``SentenceTransformer.encode`` has it: in the text, or as the system's turn."""
    prompts = {"query": "Find this: ", "document": ""}
    told = {"prompts": prompts, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(told))
    say(folder, modality_config=MESSAGE if message else {"text": {}})
    read, theirs = reader(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        turns = [{"role": "system", "content": "Find this: "}, {"role": "user", "content": text}]
        whole = theirs.apply_chat_template(turns, return_dict=False) if message else theirs.encode(f"Find this: {text}")
        assert read.encode(text) == whole
        assert read.encode(text, len(whole)) == whole
    bare = theirs.apply_chat_template(turns[1:], return_dict=False) if message else theirs.encode(text)
    for name in ("document", None):
        (folder / "config_sentence_transformers.json").write_text(json.dumps({**told, "default_prompt_name": name}))
        assert reader(folder).encode(text) == bare


def test_what_is_cut_keeps_the_end_of_the_turn(folder: Path) -> None:
    say(folder, modality_config=MESSAGE)
    read, text = reader(folder), "A ship at sea. " * 9
    whole, other = read.encode(text), read.encode("x")
    kept = next(i for i in range(len(other)) if whole[-1 - i] != other[-1 - i])
    assert kept
    for most in (len(whole), len(whole) - 1, len(whole) - 7):
        cut = read.encode(text, most)
        assert len(cut) == most and cut[-kept:] == whole[-kept:] and cut[: most - kept] == whole[: most - kept]


def test_the_vectors_are_of_the_turns(folder: Path) -> None:
    config = TurbomindEngineConfig(dtype="float32", device="cpu")
    with pipeline(str(folder), config) as pipe:
        plain = pipe.get_embeddings(TEXTS)
    say(folder, modality_config=MESSAGE)
    theirs = AutoTokenizer.from_pretrained(folder)
    turns = [theirs.apply_chat_template([{"role": "user", "content": t}], return_dict=False) for t in TEXTS]
    with pipeline(str(folder), config) as pipe:
        found = pipe.get_embeddings(TEXTS)
        assert (found == pipe.get_embeddings(turns)).all()
    assert abs(found - plain).max() > 1e-3


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"modality_config": []}, None),
        ({"modality_config": [1]}, "expected objects as modality_config and processing_kwargs; fetch the model again"),
        (
            {"modality_config": MESSAGE, "processing_kwargs": {"chat_template": {"chat_template": "{{ 1 }}"}}},
            "processing_kwargs names a chat template of its own; write it into chat_template.jinja",
        ),
    ],
)
def test_what_is_refused(folder: Path, config: dict[str, Any], told: str | None) -> None:
    say(folder, **config)
    if told is None:
        assert reader(folder).alone
        return
    with pytest.raises(ToolkitError, match=told):
        reader(folder)


def test_default_prompts_that_are_refused(folder: Path) -> None:
    file = folder / "config_sentence_transformers.json"
    file.write_text(json.dumps({"prompts": {"query": "Find: "}, "default_prompt_name": "passage"}))
    with pytest.raises(ToolkitError, match="default_prompt_name: 'passage' is none of its prompts; fetch the model"):
        reader(folder)
    file.write_text(json.dumps({"prompts": {"query": "Find: "}, "default_prompt_name": "query"}))
    (folder / "1_Pooling").mkdir()
    told = {"pooling_mode_mean_tokens": True, "include_prompt": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(told))
    with pytest.raises(ToolkitError, match="include_prompt: found false, expected true beside a default prompt"):
        reader(folder)
