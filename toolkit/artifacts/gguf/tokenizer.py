"""tokenizer.json out of a GGUF file's metadata, built with the ``tokenizers`` library."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.artifacts.gguf.keys import NEVER, TEMPLATE
from toolkit.artifacts.gguf.pre_tokenizers import BY_NAME, COMPOSED, WHOLE_PIECES, build_cuts
from toolkit.artifacts.gguf.wordpiece import WORDPIECE, special_tokens, wordpiece
from toolkit.artifacts.json_file import write_json_object
from toolkit.artifacts.text.tokenizer_pieces import CONTROL, SPACE, USER_DEFINED, merges_by_score
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from tokenizers import Tokenizer, models

GEMMA = "gemma4"  # a kind of tokenizer

_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<｜end▁of▁sentence｜> [e~[".split()
)
_OF_MESSAGES = (("<|return|>", "<|call|>"), ("<|flush|>", "<|calls|>"))  # gpt-oss, Solar Open
# llama.cpp's converter writes names of letters, digits and _. They become names of files.
_NAMED_TEMPLATE = re.compile(re.escape(TEMPLATE) + r"\.([A-Za-z0-9_]{1,64})")


def build_tokenizer(path: Path, metadata: Mapping[str, Any]) -> Tokenizer:
    """The fast tokenizer of a GGUF file. Raises ToolkitError that names file and key for what it cannot be."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    kind = metadata.get("tokenizer.ggml.model")
    if not isinstance(tokens, list) or not tokens:
        raise ToolkitError(f"{path}: tokenizer.ggml.tokens is missing: the file has no tokenizer")
    if kind == "gpt2":
        built = _byte_level(path, metadata, tokens)
    elif kind == "llama":
        built = _sentencepiece(path, metadata, tokens)
    elif kind == GEMMA:
        built = _gemma(path, metadata, tokens)
    elif kind == WORDPIECE:
        built = wordpiece(path, metadata)
    else:
        expected = f"gpt2, llama, {GEMMA} or {WORDPIECE}"
        raise ToolkitError(f"{path}: tokenizer.ggml.model: expected {expected}, found {kind!r:.40}")
    _add_tokens(path, built, metadata, tokens)
    if kind != WORDPIECE:
        _add_ends(path, built, metadata, tokens)
    return built


def _list(path: Path, metadata: Mapping[str, Any], key: str, length: int) -> list[Any]:
    values = metadata.get(key)
    if values is None or len(values) != length:
        found = "nothing" if values is None else f"{len(values)}"
        raise ToolkitError(f"{path}: {key}: expected {length} entries, found {found}")
    return list(values)


def _byte_level(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, normalizers

    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in BY_NAME:
        raise ToolkitError(f"{path}: tokenizer.ggml.pre: expected one of {', '.join(BY_NAME)}, found {pre!r:.40}")
    built = Tokenizer(_merged(path, metadata, tokens, ignore_merges=pre in WHOLE_PIECES))
    built.pre_tokenizer = build_cuts(BY_NAME[pre])
    if pre in COMPOSED:
        built.normalizer = normalizers.NFC()
    built.decoder = decoders.ByteLevel()
    return built


def _merged(path: Path, metadata: Mapping[str, Any], tokens: list[str], **more: Any) -> models.BPE:
    """What joins tokens by the file's list of merges."""
    from tokenizers import models

    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ToolkitError(f"{path}: tokenizer.ggml.merges: expected a list of strings, found {merges!r:.40}")
    ends = [merge.find(" ", 1) for merge in merges]  # the first of a pair may be a blank
    if bad := next((merge for merge, end in zip(merges, ends, strict=True) if end < 0), None):
        raise ToolkitError(f"{path}: tokenizer.ggml.merges: expected pairs of tokens, found {bad!r:.40}")
    pairs = [(merge[:end], merge[end + 1 :]) for merge, end in zip(merges, ends, strict=True)]
    try:
        return models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs, **more)
    except Exception as error:  # the library's own exception type for merges of unknown tokens
        raise ToolkitError(f"{path}: tokenizer.ggml.merges: {str(error).splitlines()[0]:.80}") from error


def _gemma(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """Gemma 4's: characters, not bytes, are joined, in whole lines with their blanks, and runs of line ends."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    unknown = tokens[_token_id(path, metadata, "unknown", len(tokens)) or 0]
    more = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    built = Tokenizer(_merged(path, metadata, tokens, **more))
    built.normalizer = normalizers.Replace(" ", SPACE)
    built.pre_tokenizer = pre_tokenizers.Split(Regex("\n+"), "isolated")
    undo = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence(undo)
    return built


def _sentencepiece(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    """A sentencepiece BPE: merges follow from the scores (a merge ranks as the score of the token that it makes)."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _list(path, metadata, "tokenizer.ggml.scores", len(tokens))
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = merges_by_score(tokens, scores)
    unknown = tokens[_token_id(path, metadata, "unknown", len(tokens)) or 0]
    built = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend(SPACE)] if prefix else []
    built.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    undo = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix else undo)
    return built


def _add_tokens(path: Path, built: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    from tokenizers import AddedToken

    types = _list(path, metadata, "tokenizer.ggml.token_type", len(tokens))
    special, plain = ([t for t, k in zip(tokens, types, strict=True) if k == kind] for kind in (CONTROL, USER_DEFINED))
    # all at once: for each call the library goes through all that it has
    built.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    built.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])


def _add_ends(path: Path, built: Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """What stands around every text: bos, and eos where the file asks for it."""
    from tokenizers import processors

    wanted = {"bos": adds_bos(metadata), "eos": adds_eos(metadata)}
    found = {name: _token_id(path, metadata, name, len(tokens)) for name in wanted if wanted[name]}
    ids = {name: token for name, token in found.items() if token is not None}
    if ids:
        bos, eos = (tokens[ids[name]] if name in ids else "" for name in wanted)
        one, two = (" ".join(filter(None, (bos, text, eos))) for text in ("$A", "$B"))
        special = [(tokens[token], token) for token in dict.fromkeys(ids.values())]
        built.post_processor = processors.TemplateProcessing(single=one, pair=f"{one} {two}", special_tokens=special)
    elif metadata["tokenizer.ggml.model"] == "gpt2":
        built.post_processor = processors.ByteLevel(trim_offsets=False)


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether the model expects its bos token before every text; where the file is silent, by tokenizer kind."""
    if metadata.get("tokenizer.ggml.model") == GEMMA:
        return True  # whatever the file says, as llama.cpp has it
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    return bool(
        metadata.get(
            "tokenizer.ggml.add_bos_token", sentencepiece or metadata.get("tokenizer.ggml.pre") in WHOLE_PIECES
        )
    )


def adds_eos(metadata: Mapping[str, Any]) -> bool:
    """Whether the model expects its eos token behind every text."""
    return bool(metadata.get("tokenizer.ggml.add_eos_token", False))


def end_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The tokens that end an answer: those that the file names, eos first, and those that llama.cpp knows by their
    names, for a file has no place for more than three."""
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    types = np.asarray(metadata.get("tokenizer.ggml.token_type", ()))[: len(tokens)]
    called = {tokens[i]: i for i in np.flatnonzero(types == CONTROL).tolist() if tokens[i] in _ENDS}
    if any(all(name in called for name in pair) for pair in _OF_MESSAGES):
        called.pop("<|end|>", None)  # of a message, of which an answer has several
    return list(dict.fromkeys(i for i in (*named, *called.values()) if i is not None))


def never_drawn(path: Path, metadata: Mapping[str, Any]) -> list[int]:
    """The tokens that the file rules out of every answer. Raises ToolkitError for one that is no token id."""
    found, vocab = (
        np.asarray(metadata.get(NEVER, np.zeros(0, np.int32))),
        len(metadata.get("tokenizer.ggml.tokens") or ()),
    )
    if found.size and (found.dtype.kind not in "iu" or not 0 <= found.min() <= found.max() < vocab):
        raise ToolkitError(f"{path}: {NEVER}: expected token ids below {vocab}, found {found.tolist()!r:.40}")
    return [int(i) for i in found]


def _token_id(path: Path, metadata: Mapping[str, Any], name: str, vocab: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab:
        raise ToolkitError(f"{path}: {key}: expected a token id below {vocab}, found {value!r:.40}")
    return value


def tokenizer_config(path: Path, metadata: Mapping[str, Any], context_length: int) -> dict[str, Any]:
    """``tokenizer_config.json`` to go with ``build_tokenizer``."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context_length}
    if metadata["tokenizer.ggml.model"] == WORDPIECE:  # tokens around a text stand in tokenizer.json
        return config | special_tokens(path, metadata)
    config |= {
        "add_bos_token": adds_bos(metadata),
        "add_eos_token": adds_eos(metadata),
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        found = _token_id(path, metadata, key, len(tokens))
        config[f"{name}_token"] = None if found is None else tokens[found]
    return config


def write_tokenizer(path: Path, metadata: Mapping[str, Any], context_length: int, target: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat templates of the GGUF file ``path`` to ``target``."""
    built = build_tokenizer(path, metadata)
    config = tokenizer_config(path, metadata, context_length)
    built.save(str(target / "tokenizer.json"))
    write_json_object(target / "tokenizer_config.json", config)
    more = target / "additional_chat_templates"
    for key, template in metadata.items():
        if not isinstance(template, str) or not template:
            continue
        if key == TEMPLATE:
            (target / "chat_template.jinja").write_text(template, encoding="utf-8")
        elif found := _NAMED_TEMPLATE.fullmatch(key):
            more.mkdir(exist_ok=True)
            (more / f"{found[1]}.jinja").write_text(template, encoding="utf-8")
