"""Files of sentencepiece against sentencepiece itself, what families' classes add to them, and broken ones."""

import io
import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.errors import ToolkitError

CORPUS = [
    "the river runs to the sea and the fox jumps",
    "the quick  brown fox: Grüße, 你好世界 привет 12345 é ﬁ",
    "def f(x):\n    return x+1",
]
OWN = ["<user>", "<|x|>", "▁▁", "▁▁▁"]
KINDS = {
    "llama": {},
    "gemma": {"add_dummy_prefix": False},
    "own": {"user_defined_symbols": OWN},
    "own without prefix": {"user_defined_symbols": OWN, "add_dummy_prefix": False},
    "squeezed": {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    "unigram": {"model_type": "unigram", "vocab_size": 310, "user_defined_symbols": OWN[:2]},
}


def trained(**options):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    usual = {
        "vocab_size": 330,
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20), model_writer=model, **(usual | options)
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()), model.getvalue()


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """Kind -> (sentencepiece's, ours, the file)."""
    found = {}
    for kind, options in KINDS.items():
        reference, model = trained(**options)
        folder = tmp_path_factory.mktemp("kind")
        (folder / "tokenizer.model").write_bytes(model)
        found[kind] = reference, Tokenizer.open(folder), model
    return found


def folder_of(tmp_path, model, **config):
    (tmp_path / "tokenizer.model").write_bytes(model)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@settings(max_examples=40, deadline=None)
@given(text=st.text(alphabet="the quick brown foxé你 \n|x12Ω", max_size=30) | st.text(max_size=20))
@pytest.mark.parametrize("kind", KINDS)
def test_texts_become_the_same_ids_and_back(kinds, kind, text):
    reference, ours, _ = kinds[kind]
    clean = text.encode("utf-8", "replace").decode().replace("\0", "").replace("▁", "")
    for whole in (clean, f"{clean}<user>{clean}<|x|>"):
        if "<s>" in whole or "</s>" in whole:
            continue  # here what is spelled out is the special token
        ids = reference.encode(whole)
        assert ours.encode(whole, add_special_tokens=False) == ids
        assert ours.decode(ids, skip_special_tokens=False) == reference.decode(ids)


def test_a_table_of_characters_of_the_file_s_own_is_applied_in_a_box(kinds):
    assert kinds["squeezed"][1]._boxed is not None and kinds["llama"][1]._boxed is None


@pytest.mark.parametrize(
    ("config", "starts"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, [1]),
        ({"tokenizer_class": "BaichuanTokenizer", "add_bos_token": False, "add_eos_token": False}, []),
        ({"tokenizer_class": "InternLMTokenizer"}, [1]),
        ({"tokenizer_class": "Ernie4_5_Tokenizer"}, []),
        ({}, [1]),
    ],
)
def test_bos_is_added_as_by_the_family_s_class(kinds, tmp_path, config, starts):
    reference, _, model = kinds["llama"]
    opened = Tokenizer.open(folder_of(tmp_path, model, **config))
    assert opened.encode("the fox") == [*starts, *reference.encode("the fox")]
    assert (opened.bos_id, opened.eos_ids, opened.vocab_size) == (1, [2], 330)
    assert opened.decode(opened.encode("the fox")) == "the fox"


@pytest.mark.parametrize("named", [{"tokenizer_class": "ChatGLMTokenizer"}, {}])
def test_chatglm_s_special_tokens_stand_behind_the_pieces(kinds, tmp_path, named):
    reference, _, model = kinds["llama"]
    folder = folder_of(tmp_path, model, **named)
    (folder / "config.json").write_text('{"model_type": "chatglm"}')
    opened = Tokenizer.open(folder)
    assert opened.encode("the sopranos") == [331, 333, *reference.encode("the sopranos")]
    assert opened.encode("[gMASK]sop<|user|>\n the", False) == [331, 333, 336, *reference.encode("\n the")]
    assert opened.start_text == "[gMASK]sop" and opened.vocab_size == 339


def test_parts_between_special_tokens_are_encoded_one_by_one_unless_the_config_is_not_legacy(kinds, tmp_path):
    reference, _, model = kinds["llama"]
    first, rest = reference.encode("the"), reference.encode("fox")
    (tmp_path / "new").mkdir()
    old = Tokenizer.open(folder_of(tmp_path, model))
    new = Tokenizer.open(folder_of(tmp_path / "new", model, legacy=False))
    assert old.encode("the</s>fox", False) == [*first, 2, *rest]
    assert new.encode("the</s>fox", False)[: len(first) + 1] == [*first, 2]
    assert new.decode(new.encode("the</s>fox", False)) == "thefox" and old.decode([2, *rest]) == "fox"


def test_older_files_beside_it_add_tokens(kinds, tmp_path):
    folder = folder_of(tmp_path, kinds["llama"][2])
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_start|>": 330, "[PAD]": 331}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "[PAD]", "eos_token": "[PAD]"}))
    opened = Tokenizer.open(folder)
    assert opened.encode("<|im_start|>[PAD]", False) == [330, 331]
    assert 331 in opened.special_ids and 330 not in opened.special_ids
    assert opened.special_tokens["pad_token"] == "[PAD]"
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_start|>": "330"}))
    with pytest.raises(ToolkitError, match="expected a token id, found '330'"):
        Tokenizer.open(folder)


def _piece(text, kind=1, score=0.0):
    body = b"\n" + bytes([len(text)]) + text + b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([kind])
    return b"\n" + bytes([len(body)]) + body


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "0 pieces"),
        (_piece(b"a"), "expected one piece for what is unknown"),
        (_piece(b"<unk>", 2) * 2, "2 pieces, 1 of them different"),
        (_piece(b"<unk>", 2) + b"\x12\x02\x18\x04", "model_type 4: expected unigram"),
        (_piece(b"<unk>", 2) + b"\x12\x03\xc0\x01\x01", "blanks behind words"),
        (b"\n\xff\xff\xff\xff\x0f", "it ends within a field"),
        (b"\xff" * 11, "a number of more than 64 bits"),
        (b"\n\x02\x0a\xff", "not a file of sentencepiece"),
        (b"\n\x03\x0a\x01\xff", "not a file of sentencepiece"),
        (b"\n\x02\x08\x01", "not a file of sentencepiece"),
        (b"\x12\x03\x1a\x01a", "model is of another type"),
        (_piece(b"<unk>", 2) + b"".join(_piece(b"x%d" % i, 4) for i in range(4097)), "more than 4096 pieces"),
        (b"version https://git-lfs.github.com/spec/v1\n", "not a file of sentencepiece"),
    ],
)
def test_broken_files_end_in_one_line(tmp_path, content, says):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(ToolkitError, match=says) as error:
        Tokenizer.open(tmp_path)
    assert "\n" not in str(error.value) and "tokenizer.model" in str(error.value)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_spoilt_file_opens_or_ends_in_one_line(kinds, tmp_path_factory, data):
    model = bytearray(kinds["llama"][2])
    for _ in range(data.draw(st.integers(1, 4))):
        model[data.draw(st.integers(0, len(model) - 1))] = data.draw(st.integers(0, 255))
    folder = tmp_path_factory.mktemp("spoilt")
    (folder / "tokenizer.model").write_bytes(model[: data.draw(st.integers(len(model) - 200, len(model)))])
    try:
        Tokenizer.open(folder).encode("the fox é")
    except ToolkitError as error:
        assert "\n" not in str(error)
