"""The tokenizer against the tokenizers library and transformers, and what it says to broken files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from toolkit.artifacts.text.token_bytes import byte_level_table
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.errors import ToolkitError

TEXTS = [
    "The quick brown fox",
    "it's  fine , really .",
    " leading and trailing ",
    "Grüße, 你好 🙂👍🏽 привет",
    "line\n\n  two\ttabs",
    "<|im_start|>user\nhi<|im_end|>",
    "x",
    "",
]
KINDS = ["byte_level", "sentencepiece", "metaspace", "wordpiece"]


def edit(source: Path, target: Path, **config: object) -> Path:
    """A copy of a tokenizer directory with other keys in tokenizer_config.json."""
    shutil.copytree(source, target)
    file = target / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return target


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_encode_and_decode_are_the_library_s(tokenizer_dirs: dict[str, Path], kind: str, text: str) -> None:
    ours = Tokenizer.open(tokenizer_dirs[kind])
    library = tokenizers.Tokenizer.from_file(str(tokenizer_dirs[kind] / "tokenizer.json"))
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == library.encode(text, add_special_tokens=special).ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == library.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", ["The fox", "it's  fine , really .", "你好 🙂", "<|im_start|>hi<|im_end|> x"])
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_transformers_agrees(tokenizer_dirs: dict[str, Path], kind: str, text: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tokenizer_dirs[kind]))
    ours = Tokenizer.open(tokenizer_dirs[kind])
    ids = theirs(text)["input_ids"]
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.bos_id == theirs.bos_token_id
    assert ours.eos_ids == [theirs.eos_token_id]
    assert ours.vocab_size == len(theirs)


def test_byte_level_table_is_a_bijection_that_keeps_printable_ascii() -> None:
    table = byte_level_table()
    assert sorted(table.values()) == list(range(256))
    assert all(table[chr(b)] == b for b in range(0x21, 0x7F))
    assert table["Ġ"] == 0x20 and table["Ċ"] == 0x0A


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_token_bytes_spell_any_text(tokenizer_dirs: dict[str, Path], kind: str) -> None:
    tok = Tokenizer.open(tokenizer_dirs[kind])
    assert len(tok.token_bytes) == tok.vocab_size
    for text in (t for t in TEXTS if "<|" not in t):  # each piece after a special token gets its own dummy blank
        spelled = b"".join(tok.token_bytes[i] for i in tok.encode(text, add_special_tokens=False))
        assert spelled.decode().removeprefix(" " if kind == "sentencepiece" else "") == text


def test_an_added_token_stands_for_itself(tokenizer_dirs: dict[str, Path]) -> None:
    tok = Tokenizer.open(tokenizer_dirs["byte_level"])
    text = "a <｜ünlaut▁｜> <tool_call>b"
    assert tok.decode(tok.encode(text)) == text
    assert tok.token_id("<tool_call>") not in tok.special_ids
    assert tok.token_bytes[tok.encode("<｜ünlaut▁｜>")[0]].decode() == "<｜ünlaut▁｜>"


def test_ids_outside_the_vocabulary_give_no_text(tokenizer_dirs: dict[str, Path]) -> None:
    for kind in KINDS:
        tok = Tokenizer.open(tokenizer_dirs[kind])
        ids = tok.encode("The fox", add_special_tokens=False)
        assert tok.decode([*ids, tok.vocab_size, 1 << 40, -1]) == tok.decode(ids)


def test_lone_surrogates_are_replaced(tokenizer_dirs: dict[str, Path]) -> None:
    tok = Tokenizer.open(tokenizer_dirs["byte_level"])
    assert tok.decode(tok.encode("a\ud800b")) == "a?b"
    assert tok.encode_beginning("a\ud800b", 100) == tok.encode("a\ud800b")


@pytest.mark.parametrize(("add", "expected"), [(True, [1]), (False, [])])
def test_add_bos_token_of_the_config_wins(
    tokenizer_dirs: dict[str, Path], tmp_path: Path, add: bool, expected: list[int]
) -> None:
    tok = Tokenizer.open(edit(tokenizer_dirs["sentencepiece"], tmp_path / "t", add_bos_token=add))
    assert tok.encode("fox") == expected + tok.encode("fox", add_special_tokens=False)
    plain = Tokenizer.open(edit(tokenizer_dirs["byte_level"], tmp_path / "b", add_bos_token=True, add_eos_token=True))
    assert plain.encode("fox") == [plain.bos_id, *plain.encode("fox", add_special_tokens=False), plain.eos_ids[0]]


@pytest.mark.parametrize(("value", "more"), [(7, [7]), ([7, 9], [7, 9]), (None, [])])
def test_eos_ids_come_from_both_files(
    tokenizer_dirs: dict[str, Path], tmp_path: Path, value: object, more: list[int]
) -> None:
    path = edit(tokenizer_dirs["byte_level"], tmp_path / "t")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    tok = Tokenizer.open(path)
    assert tok.eos_ids == [tok.token_id("</s>"), *more]


def test_config_json_names_eos_where_there_is_no_generation_config(
    tokenizer_dirs: dict[str, Path], tmp_path: Path
) -> None:
    path = edit(tokenizer_dirs["byte_level"], tmp_path / "t", eos_token=None)
    (path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert Tokenizer.open(path).eos_ids == [3]


def internlm2_like(source: Path, target: Path) -> tuple[Path, int]:
    """A vocabulary slot with a placeholder name whose real name stands in added_tokens_decoder only."""
    shutil.copytree(source, target)
    data = json.loads((target / "tokenizer.json").read_text())
    vocab = data["model"]["vocab"]
    slot = max(vocab.values()) + 1
    vocab["[UNUSED_TOKEN_145]"] = slot
    data["added_tokens"] = []
    data["post_processor"] = None
    (target / "tokenizer.json").write_text(json.dumps(data))
    names = {str(slot): {"content": "<|im_start|>", "special": True}, "1": {"content": "<s>", "special": True}}
    (target / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": names, "bos_token": "<s>"}))
    return target, slot


def test_names_in_the_config_fill_placeholder_slots(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    path, slot = internlm2_like(tokenizer_dirs["sentencepiece"], tmp_path / "t")
    tok = Tokenizer.open(path)
    assert tok.encode("<|im_start|>", add_special_tokens=False) == [slot]
    assert tok.vocab_size == slot + 1
    assert {slot, 1} <= tok.special_ids
    assert tok.encode("<s>", add_special_tokens=False) == [1]
    assert tok.decode(tok.encode("<|im_start|>x")) == "x"


def test_tokens_declared_in_the_config_alone_are_added(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    size = Tokenizer.open(tokenizer_dirs["byte_level"]).vocab_size
    entries = {str(size): {"content": "<new>", "special": False}}
    tok = Tokenizer.open(edit(tokenizer_dirs["byte_level"], tmp_path / "t", added_tokens_decoder=entries))
    assert tok.encode("<new>") == [size] and tok.vocab_size == size + 1


def test_chat_template_sources_in_order(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    path = edit(tokenizer_dirs["byte_level"], tmp_path / "t", chat_template=named)
    assert Tokenizer.open(path).chat_templates == {"default": "A", "tool_use": "B"}
    (path / "processor_config.json").write_text('{"chat_template": "P"}')
    assert Tokenizer.open(path).chat_template == "P"
    (path / "chat_template.jinja").write_text("C", encoding="utf-8")
    assert Tokenizer.open(path).chat_template == "C"
    assert Tokenizer.open(tokenizer_dirs["byte_level"]).chat_template is None


def test_slow_files_alone_are_converted(tmp_path: Path) -> None:
    from tokenizers import models, pre_tokenizers, trainers

    tok = tokenizers.Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tok.train_from_iterator(["the river and the sea"] * 3, trainer)
    tok.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    opened = Tokenizer.open(tmp_path)
    assert opened.decode(opened.encode("the sea é")) == "the sea é"


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({}, "no tokenizer"),
        ({"tokenizer.json": "{"}, "tokenizer.json"),
        ({"tokenizer.json": "[]"}, "tokenizer.json"),
        ({"tokenizer.json": ""}, "tokenizer.json"),
        ({"tokenizer.json": '{"version": "1.0", "model": {"type": "BPE"}}'}, "tokenizer.json"),
        ({"tokenizer_config.json": "[1]"}, "expected a JSON object"),
        ({"tokenizer_config.json": "nope"}, "tokenizer_config.json"),
        ({"tokenizer_config.json": "[" * 100_000}, "tokenizer_config.json"),
        ({"tokenizer.model": "not a sentencepiece model"}, "tokenizer.model: not a file of sentencepiece"),
    ],
)
def test_broken_files_end_in_one_line(tmp_path: Path, files: dict[str, str], names: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ToolkitError) as error:
        Tokenizer.open(tmp_path)
    assert names in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"x": {"content": "a"}}},
        {"added_tokens_decoder": {"5": "a"}},
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"999999": {"content": "<far>"}}},
        {"added_tokens_decoder": {"3": {"content": "</s>", "special": True}}},
        {"chat_template": 3},
        {"chat_template": [{"name": "default"}]},
    ],
)
def test_broken_config_values_end_in_one_line(
    tokenizer_dirs: dict[str, Path], tmp_path: Path, config: dict[str, object]
) -> None:
    with pytest.raises(ToolkitError, match="tokenizer_config") as error:
        Tokenizer.open(edit(tokenizer_dirs["byte_level"], tmp_path / "t", **config))
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_panics_when_it_is_used(tokenizer_dirs: dict[str, Path], tmp_path: Path) -> None:
    """The library accepts this file and panics at the first text: the token of the template does not exist."""
    path = edit(tokenizer_dirs["sentencepiece"], tmp_path / "t")
    data = json.loads((path / "tokenizer.json").read_text())
    data["post_processor"]["special_tokens"]["<s>"] = "nothing"
    (path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(ToolkitError, match=r"tokenizer\.json"):
        Tokenizer.open(path)


@pytest.mark.parametrize("value", ["2", -1, True, [1, "a"], 1.5, {}, 10**30, [2**31]])
def test_broken_eos_ids_are_refused_when_the_model_is_opened(
    tokenizer_dirs: dict[str, Path], tmp_path: Path, value: object
) -> None:
    path = edit(tokenizer_dirs["byte_level"], tmp_path / "t")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ToolkitError, match=r"generation_config\.json: eos_token_id"):
        Tokenizer.open(path)


def test_opening_imports_nothing_heavy(tokenizer_dirs: dict[str, Path]) -> None:
    code = (
        "import sys; from toolkit.artifacts.text.tokenizer import Tokenizer; import toolkit.engine.text.detokenizer\n"
        f"Tokenizer.open({str(tokenizer_dirs['byte_level'])!r}).encode('x')\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
