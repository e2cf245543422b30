"""Files of ranks (qwen.tiktoken) against a BPE tokenizer with the same tokens, and broken ones."""

import base64
import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from toolkit.artifacts.text import tokenizer
from toolkit.artifacts.text.token_bytes import byte_level_table
from toolkit.artifacts.text.tokenizer_ranks import GLM, HUNYUAN, KIMI, QWEN
from toolkit.errors import ToolkitError

TEXT = (
    "The quick brown fox jumps over the lazy dog. It's the best of times; 天地玄黄, naïve café 12345!\n\n  It'll do. "
    * 3
)


@pytest.fixture(scope="module")
def bpe():
    """Trained on a text, its merges in the order of its ids, as tiktoken's ranks are."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(QWEN.pattern), "isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = sorted(byte_level_table())
    made.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return made


@pytest.fixture(scope="module")
def folder(bpe, tmp_path_factory):
    path, table = tmp_path_factory.mktemp("qwen"), byte_level_table()
    tokens = sorted(bpe.get_vocab().items(), key=lambda x: x[1])
    lines = [f"{base64.b64encode(bytes(table[c] for c in text)).decode()} {rank}" for text, rank in tokens]
    (path / "qwen.tiktoken").write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def found(folder):
    return tokenizer.Tokenizer.open(folder)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40) | st.text(alphabet="The quickbrown'stfox 12\n", max_size=40))
def test_texts_are_cut_as_by_merges(bpe, found, text):
    clean = text.encode("utf-8", "replace").decode()
    ids = found.encode(clean)
    assert ids == bpe.encode(clean).ids
    assert found.decode(ids) == bpe.normalizer.normalize_str(clean)


def test_special_tokens_stand_behind_the_ranks(bpe, found):
    first = bpe.get_vocab_size()
    ids = found.encode("<|im_start|>user\nIt's<|im_end|>")
    assert ids[0] == first + 1 and ids[-1] == first + 2
    assert found.decode(ids) == "user\nIt's"
    assert {first, first + 1, first + 2, first + 3} <= found.special_ids


def test_qwen_vl_s_marks_of_pictures_stand_behind_the_others(bpe, folder, tmp_path):
    shutil.copy(folder / "qwen.tiktoken", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"visual": {"image_start_id": 151857}}))
    first = bpe.get_vocab_size() + 151857 - 151643  # of Qwen's ranks there are so many
    assert tokenizer.Tokenizer.open(tmp_path).encode("<img><imgpad></img>") == [first, first + 2, first + 1]


def test_glm_s_file_has_sentencepiece_s_name_and_its_special_tokens_beside_it(bpe, folder, tmp_path):
    shutil.copy(folder / "qwen.tiktoken", tmp_path / "tokenizer.model")
    first = bpe.get_vocab_size()
    special = {str(first + i): {"content": text, "special": True} for i, text in enumerate(("[gMASK]", "<sop>"))}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": special}))
    opened = tokenizer.Tokenizer.open(tmp_path)
    assert opened.encode("<sop>The fox, quick", False) == [first + 1, *bpe.encode("The fox, quick").ids]
    assert opened.encode("fox")[:2] == [first, first + 1] and opened.start_text == "[gMASK]<sop>"
    assert opened.decode(opened.encode("e\u0301")) == "e\u0301"  # texts are taken as they are
    assert first + 1 in opened.special_ids


def test_kimi_s_special_tokens_have_the_ids_that_the_config_says(bpe, folder, tmp_path):
    shutil.copy(folder / "qwen.tiktoken", tmp_path / "tiktoken.model")
    first = bpe.get_vocab_size()
    special = {str(first + i): {"content": text, "special": True} for i, text in ((0, "[BOS]"), (4, "<|im_end|>"))}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": special}))
    opened = tokenizer.Tokenizer.open(tmp_path)
    assert opened.encode("fox<|im_end|>") == [*bpe.encode("fox").ids, first + 4]
    assert opened.vocab_size == first + 258


@pytest.mark.parametrize(
    "kind, text, cut",
    [
        (KIMI, "HTTPServer's camelCase你好world 12345", "HTTPServer's| camel|Case|你好|world| |123|45"),
        (QWEN, "HTTPServer's camelCase你好 123", "HTTPServer|'s| camelCase你好| |1|2|3"),
        (HUNYUAN, "It'LL 12", "It|'LL| |1|2"),
        (GLM, "It'LL 12345\n\n x", "It|'LL| |123|45|\n\n| x"),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_texts_are_cut_as_the_model_s_own_code_does(kind, text, cut):
    found = pre_tokenizers.Split(Regex(kind.pattern), "isolated").pre_tokenize_str(text)
    assert [part for part, _ in found] == cut.split("|")


@pytest.mark.parametrize(
    "content, says",
    [
        ("IQ== 0\nnot base64! 1\n", "line 2: found b'not base64! 1', expected base64 and a rank"),
        ("IQ== 0\n", "found 1 tokens, expected each rank from 0 up once, 256 or more"),
        (
            "".join(f"{base64.b64encode(bytes([65, i])).decode()} {i}\n" for i in range(256)),
            "no token is the byte 0x00",
        ),
        (f"{base64.b64encode(bytes(200_000)).decode()} 0\n", "line 1: 266,670 bytes, more than the 2,048 of a token"),
    ],
    ids=["base64", "few", "byte", "long"],
)
def test_what_is_no_such_file_is_said(tmp_path, content, says):
    (tmp_path / "qwen.tiktoken").write_text(content)
    with pytest.raises(ToolkitError) as error:
        tokenizer.Tokenizer.open(tmp_path)
    assert says in str(error.value)
