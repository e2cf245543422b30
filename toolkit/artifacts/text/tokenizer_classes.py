"""What the tokenizer classes of models add to a file of sentencepiece, as data: their code is never run.

Sources: the models' own ``tokenization_*.py`` and transformers' slow classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, processors

from toolkit.artifacts.json_file import read_json_object
from toolkit.base.lazy_dataclass import dataclass
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from toolkit.artifacts.text.tokenizer_pieces import PiecesFile

PIECES = "tokenizer.model"
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


@dataclass(frozen=True)
class Added:
    """``special``: tokens behind those of the file. ``words``: those of them that count only as a whole word.
    ``prefix``: what stands before every text. ``bos``: whether bos does where tokenizer_config.json says nothing."""

    special: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    prefix: tuple[str, ...] = ()
    bos: bool = True


_CHATGLM = Added(  # 2 and 3, of which 2 never learned the roles
    ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    words=("sop", "eop"),
    prefix=("[gMASK]", "sop"),
    bos=False,
)
_OF_CLASS = {"ChatGLMTokenizer": _CHATGLM, "Ernie4_5_Tokenizer": Added(bos=False)}
_OF_MODEL = {"chatglm": _CHATGLM}


def open_pieces(folder: Path, config: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer of a model's ``tokenizer.model``, and tokenizer_config.json (``config``) with what its class and
    the other files say. Raises ToolkitError, one line, for broken files."""
    from toolkit.artifacts.text.tokenizer_pieces import build, read_pieces  # most models have another file

    found = read_pieces(folder / PIECES)
    added = _added(folder, config)
    config = with_older_files(folder, _defaults(found, added) | config)
    made = build(found, everywhere=config.get("legacy") is not False)
    for text in added.special:
        made.add_special_tokens([AddedToken(text, normalized=False, single_word=text in added.words)])
    put_before(made, added.prefix)
    return made, config


def put_before(made: tokenizers.Tokenizer, prefix: Iterable[str]) -> None:
    """Have these tokens stand before every text, if the tokenizer has all of them."""
    ids = [(text, made.token_to_id(text)) for text in prefix]
    if ids and all(i is not None for _, i in ids):
        made.post_processor = processors.TemplateProcessing(
            single=[*(text for text, _ in ids), "$A"], special_tokens=ids
        )


def with_older_files(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """``config`` with what special_tokens_map.json and added_tokens.json say beyond it."""
    file = folder / "special_tokens_map.json"
    if file.is_file():
        names = read_json_object(file)
        config = {key: names[key] for key in (*SPECIAL_NAMES, "additional_special_tokens") if key in names} | config
    file = folder / "added_tokens.json"
    if not file.is_file():
        return config
    special = {_text(config.get(name)) for name in SPECIAL_NAMES}
    if isinstance(extra := config.get("additional_special_tokens"), list):
        special |= {_text(token) for token in extra}
    declared = config.get("added_tokens_decoder") or {}
    if not isinstance(declared, dict):
        raise ToolkitError(f"{folder / 'tokenizer_config.json'}: added_tokens_decoder: expected an object by id")
    for text, i in read_json_object(file).items():
        if not isinstance(i, int) or isinstance(i, bool):
            raise ToolkitError(f"{file}: {text!r:.60}: expected a token id, found {i!r:.40}")
        declared = {str(i): {"content": text, "special": text in special}} | declared
    return config | {"added_tokens_decoder": declared}


def _text(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _added(folder: Path, config: dict[str, Any]) -> Added:
    name = config.get("tokenizer_class")
    if isinstance(name, str):
        return _OF_CLASS.get(name, Added())
    file = folder / "config.json"
    kind = read_json_object(file).get("model_type") if file.is_file() else None
    return _OF_MODEL.get(kind, Added()) if isinstance(kind, str) else Added()


def _defaults(found: PiecesFile, added: Added) -> dict[str, Any]:
    names = {"bos_token": found.named(found.bos), "eos_token": found.named(found.eos)}
    return {**{name: text for name, text in names.items() if text is not None}, "add_bos_token": added.bos}
