"""What is said of tokenizer files that cannot be read or contradict one another: the whole line."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from toolkit.artifacts.text import tokenizer_pieces, tokenizer_ranks
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.errors import ToolkitError


@pytest.fixture
def folder(tiny_models: Any, tmp_path: Path) -> Path:
    shutil.copytree(tiny_models("llama"), tmp_path / "m")
    return tmp_path / "m"


def refused(folder: Path) -> str:
    with pytest.raises(ToolkitError) as error:
        Tokenizer.open(folder)
    return str(error.value).removeprefix(str(folder))


TOKENS, TEMPLATE = "added_tokens_decoder", "chat_template: expected a string or a list of {name, template}"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({TOKENS: {"x": 1}}, f"{TOKENS}: expected id -> {{content, …}}, found {{'x': 1}}"),
        (
            {TOKENS: {"999": {"content": "<new>"}}},
            f"{TOKENS} puts '<new>' at id 999, but the next free id of tokenizer.json is 320",
        ),
        (
            {TOKENS: {"5": {"content": "<s>"}}},
            f"{TOKENS} puts '<s>' at id 5, but tokenizer.json has '!' there; take both files from the same model",
        ),
        ({"chat_template": 5}, f"{TEMPLATE}, found int"),
        ({"chat_template": [{"name": "rag"}]}, f"{TEMPLATE}, found {{'name': 'rag'}}"),
    ],
)
def test_tokenizer_config(folder: Path, fields: dict[str, Any], told: str) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    assert refused(folder) == f"/tokenizer_config.json: {told}"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("tokenizer.json", b"nope", "not valid JSON: Expecting value at line 1, column 1; restore the file"),
        (
            "tokenizer.json",
            b"{}",
            "not a tokenizer of the tokenizers library (Cannot instantiate Tokenizer from buffer: Model missing. at "
            "line 1 column 2); fetch the file again",
        ),
        (
            "chat_template.jinja",
            b"\xff\xfe",
            "cannot read the chat template ('utf-8' codec can't decode byte 0xff in position 0: invalid start byte)",
        ),
        (
            "generation_config.json",
            b'{"eos_token_id": "x"}',
            "eos_token_id: expected a token id or a list of them, found 'x'",
        ),
    ],
)
def test_files_beside_the_weights(folder: Path, name: str, content: bytes, told: str) -> None:
    (folder / name).write_bytes(content)
    assert refused(folder) == f"/{name}: {told}"


def test_no_tokenizer_at_all(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    names = "tokenizer.json or one of tokenizer.model, spiece.model, vocab.json, sentencepiece.bpe.model"
    assert refused(folder) == f": no tokenizer (expected {names}); copy the files from the original model"
    (folder / "vocab.json").write_text("nope")
    told = refused(folder)
    assert told.startswith(": cannot convert its tokenizer files (") and told.endswith("; provide tokenizer.json")


def rank(token: bytes, number: int) -> bytes:
    return base64.b64encode(token) + b" %d" % number


BYTES = [rank(bytes([i]), i) for i in range(256)]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([*BYTES, b"!!! x"], "line 257: found b'!!! x', expected base64 and a rank"),
        (BYTES[:5], "found 5 tokens, expected each rank from 0 up once, 256 or more"),
        ([*BYTES, rank(b"ab", 5)], "found 257 tokens, expected each rank from 0 up once, 256 or more"),
        ([rank(b"zz", 0), *BYTES[1:]], "no token is the byte 0x00, expected one for every byte"),
        ([*BYTES, rank(b"a" * 6000, 256)], "line 257: 8,004 bytes, more than the 2,048 of a token"),
    ],
)
def test_files_of_ranks(folder: Path, lines: list[bytes], told: str) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines))
    assert refused(folder) == f"/tiktoken.model: {told}"


def test_files_that_are_too_large(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tiktoken.model").write_bytes(b"\n".join(BYTES))
    monkeypatch.setattr(tokenizer_ranks, "MAX_CUTS", 255)
    assert refused(folder) == "/tiktoken.model: 256 bytes to compare for its pairs, more than 255"
    monkeypatch.setattr(tokenizer_ranks, "MAX_BYTES", 100)
    size = (folder / "tiktoken.model").stat().st_size
    assert refused(folder) == f"/tiktoken.model: {size:,} bytes, more than the 100 that are read"
    (folder / "tiktoken.model").unlink()
    (folder / "tokenizer.model").write_bytes(bytes(11))
    monkeypatch.setattr(tokenizer_pieces, "MAX_BYTES", 10)
    assert refused(folder) == "/tokenizer.model: 11 bytes, expected at most 10 of a tokenizer"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\n\3abc", "not a file of sentencepiece (it ends within a field); fetch it again from the original model"),
        (b"", "0 pieces, 0 of them different: expected each once"),
    ],
)
def test_files_of_sentencepiece(folder: Path, content: bytes, told: str) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(content)
    assert refused(folder) == f"/tokenizer.model: {told}"
