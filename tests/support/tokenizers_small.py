"""Small tokenizers of each kind, made with the tokenizers library: no downloads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and it's  fine.",
    "def f(x):\n    return x + 1\n",
    "Grüße aus Köln: naïve café, 你好世界, привет мир, 🙂👍🏽",
    "The river runs to the sea; the sea is never full.",
] * 4
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tok.train_from_iterator(CORPUS, trainer)
    tok.add_special_tokens(SPECIALS)
    tok.add_tokens(["<tool_call>", AddedToken("<｜ünlaut▁｜>", normalized=False)])
    return tok


def sentencepiece() -> Tokenizer:
    """BPE with byte fallback and a dummy prefix, as Llama 2's; few characters, so that bytes are needed."""
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.Replace(" ", "▁")
    tok.train_from_iterator(CORPUS[1:2], trainers.BpeTrainer(vocab_size=80, show_progress=False))
    trained = json.loads(tok.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    names += [t for t in trained["vocab"] if t not in names]
    merges = [tuple(m) for m in trained["merges"]]
    tok = Tokenizer(
        models.BPE({t: i for i, t in enumerate(names)}, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tok.add_special_tokens(["<unk>", *SPECIALS])
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tok


def metaspace() -> Tokenizer:
    tok = Tokenizer(models.Unigram())
    tok.pre_tokenizer = pre_tokenizers.Metaspace()
    tok.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    tok.train_from_iterator(CORPUS, trainer)
    tok.add_special_tokens(SPECIALS)
    return tok


def wordpiece() -> Tokenizer:
    tok = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Whitespace()
    tok.decoder = decoders.WordPiece(cleanup=False)
    tok.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False)
    )
    tok.add_special_tokens(SPECIALS)
    return tok


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
}


def make_all(root: Path) -> dict[str, Path]:
    """Kind -> directory with tokenizer.json and tokenizer_config.json."""
    for kind, make in KINDS.items():
        (root / kind).mkdir()
        make().save(str(root / kind / "tokenizer.json"))
        (root / kind / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return {kind: root / kind for kind in KINDS}
