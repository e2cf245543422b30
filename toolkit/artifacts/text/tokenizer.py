"""A model's tokenizer: ``tokenizer.json`` through the ``tokenizers`` library, plus what its neighbours say.

``tokenizer_config.json`` adds tokens, names bos/eos and says whether bos is put in front; ``generation_config.json``
(or ``config.json``) names more end tokens; ``chat_template.jinja`` wins over the template in the config. Files of
sentencepiece (``tokenizer.model``) and of ranks (``qwen.tiktoken``) are read here; other slow files (``vocab.json`` +
``merges.txt``) go through transformers, imported then only.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from toolkit.artifacts.json_file import read_json_object
from toolkit.artifacts.text.config_tokens import token_text, with_config_tokens
from toolkit.artifacts.text.token_bytes import byte_rule
from toolkit.artifacts.text.tokenizer_box import BoxedEncoder
from toolkit.artifacts.text.tokenizer_check import check_ids, harmless, read_parts
from toolkit.artifacts.text.tokenizer_classes import PIECES, SPECIAL_NAMES, open_pieces, put_before
from toolkit.artifacts.text.tokenizer_ranks import find_ranks, read_ranks
from toolkit.artifacts.text.written import MeantEncoder, Names, Written
from toolkit.configs.limits import TOKEN_ID
from toolkit.errors import ToolkitError

SLOW_FILES = (PIECES, "spiece.model", "vocab.json", "sentencepiece.bpe.model")


class Tokenizer:
    """Text <-> token ids of one model. Safe to share between threads; importing it imports no transformers.

    ``eos_ids``: every id that ends an answer by the model's own files. ``special_ids``: ids that
    ``skip_special_tokens`` drops. ``special_tokens``: "bos_token", "eos_token" … -> their text, for chat templates.
    ``chat_templates``: name -> Jinja source ("default" is the usual one). ``vocab_size``: one more than the highest
    id; the model's own vocabulary may be larger (padding rows) or smaller.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        path: Path,
        config: dict[str, Any],
        boxed: BoxedEncoder | None = None,
        file: Path | None = None,
    ) -> None:
        self.backend = backend
        self._file = file or path  # as errors name it
        self._boxed = boxed  # encodes in a process of its own
        self.path = path
        self.config = config
        self._rule = byte_rule(backend.decoder)
        self._bytes: dict[int, bytes] = {}
        self._making = threading.Lock()
        self._encoders: dict[Names, MeantEncoder] = {}  # the last one
        self._added = backend.get_added_tokens_decoder()
        self.special_ids = {i for i, token in self._added.items() if token.special}
        self.special_tokens = {n: t for n in SPECIAL_NAMES if (t := token_text(config.get(n))) is not None}
        self.bos_id = self._id_of("bos_token")
        self.chat_templates = _chat_templates(path, config)
        self._prefix, self._suffix = self._surroundings()

    @classmethod
    def open(cls, path: Path | str) -> Tokenizer:
        """The tokenizer of a model directory. Raises ToolkitError, one line, for missing or broken files."""
        path = Path(path)
        config = _optional(path / "tokenizer_config.json")
        file = path / "tokenizer.json"
        trusted, ranks = True, None
        if file.is_file():
            raw = _bytes_of_file(file)
            trusted = harmless(read_parts(raw, file), file)
            if not trusted:
                _try_out(file, raw)
            with _blame(file):
                backend = tokenizers.Tokenizer.from_buffer(raw)
        elif (ranks := find_ranks(path)) is not None:
            file = path / ranks.name
            backend = read_ranks(path, ranks, config)
        elif (path / PIECES).is_file():
            file = path / PIECES
            with _blame(file):
                backend, config = open_pieces(path, config)
            trusted = harmless({"normalizer": json.loads(backend.normalizer.__getstate__())}, file)
            if not trusted:
                _try_out(file, backend.to_str().encode())
        elif any((path / name).is_file() for name in SLOW_FILES):
            backend = _convert_slow(path)
        else:
            raise ToolkitError(
                f"{path}: no tokenizer (expected tokenizer.json or one of {', '.join(SLOW_FILES)}); "
                "copy the files from the original model"
            )
        with _blame(file):
            backend.no_padding()
            backend.no_truncation()
            backend = with_config_tokens(backend, config, path)
            if ranks is not None:
                put_before(backend, ranks.prefix)
            boxed = None if trusted else BoxedEncoder(backend.to_str().encode())
            opened = cls(backend, path, config, boxed, file)
        opened._check_ids(max([*opened._prefix, *opened._suffix], default=0))
        sizes = [backend.get_vocab_size(with_added_tokens=added) for added in (False, True)]
        if any(backend.id_to_token(size - 1) is None for size in sizes):  # there are gaps
            opened.vocab_size  # noqa: B018
        opened.eos_ids  # noqa: B018  # read here, so that a broken one is refused now and not by every request
        return opened

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; with ``add_special_tokens`` between what the model wants around it (bos …).

        Special tokens spelled out in the text are recognised either way, but in a ``Written`` only those of the
        template. Raises ToolkitError, one line, where the
        model's tokenizer fails on the text or takes too much memory or time for it.
        """
        try:
            ids = self._bare(text)
        except (TypeError, UnicodeEncodeError):
            ids = self._bare(text.through(_clean) if isinstance(text, Written) else _clean(text))
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def encode_beginning(self, text: str, most: int) -> list[int]:
        """``encode``, of so much of the text that it is at most ``most`` tokens with what the model wants around it."""
        room = max(most - len(self._prefix) - len(self._suffix), 0)
        return [*self._prefix, *self.encode(text, add_special_tokens=False)[:room], *self._suffix]

    def encode_pair(self, first: str, second: str, most: int | None = None) -> tuple[list[int], int]:
        """Token ids of two texts that are read together, as the model's own files join them, and where the second one
        begins in the eyes of its token types; 0: they do not tell them apart. ``most``: the second one is cut so that
        there are at most so many. Raises as ``encode`` does."""
        before, between, behind, apart = self._joints
        a, b = self.encode(first, add_special_tokens=False), self.encode(second, add_special_tokens=False)
        if most is not None:
            b = b[: max(most - len(before) - len(a) - len(between) - len(behind), 0)]
        ids = [*before, *a, *between, *b, *behind]
        return ids, 0 if apart is None else len(before) + len(a) + apart

    @cached_property
    def _joints(self) -> tuple[list[int], list[int], list[int], int | None]:
        """Ids put before, between and behind two texts, and how many of those between belong to the first one."""
        a, b = (self.backend.encode(text, add_special_tokens=False).ids for text in ("a", "b"))
        both = self.backend.encode("a", "b", add_special_tokens=True)
        ids, types = both.ids, both.type_ids
        start = next(i for i in range(len(ids)) if ids[i : i + len(a)] == a)
        stop = start + len(a)
        then = next(i for i in range(stop, len(ids)) if ids[i : i + len(b)] == b)
        apart = sum(t == 0 for t in types[stop:then]) if any(types) else None
        return ids[:start], ids[stop:then], ids[then + len(b) :], apart

    def decode(
        self, ids: list[int], skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """The text of ``ids``; ids outside the vocabulary give nothing, bytes that are no UTF-8 give U+FFFD.

        ``spaces_between_special_tokens`` concerns transformers' slow tokenizers alone; every tokenizer here is a fast
        one, which never adds such blanks.
        """
        if self._rule is None:
            known = [i for i in ids if 0 <= i < self.vocab_size]
            return self.backend.decode(known, skip_special_tokens=skip_special_tokens)
        skip = self.special_ids if skip_special_tokens else ()
        text = b"".join(self.bytes_of(i) for i in ids if i not in skip).decode("utf-8", "replace")
        return text[1:] if self._rule.strip and text.startswith(" ") else text

    @property
    def byte_exact(self) -> bool:
        """Whether text is the concatenation of ``bytes_of`` its tokens (all but WordPiece and its like)."""
        return self._rule is not None

    @property
    def strips_leading_space(self) -> bool:
        """Whether a text loses one blank at its start when decoded (sentencepiece's dummy prefix)."""
        return self._rule is not None and self._rule.strip

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes this token adds to a text; empty for ids outside the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._bytes_of(token_id)
        return found

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """``bytes_of`` every id, ``vocab_size`` entries."""
        return [self.bytes_of(i) for i in range(self.vocab_size)]

    @cached_property
    def vocab_size(self) -> int:
        """Raises ToolkitError where ids lie too far apart. It takes all of them: not for who only wants an answer."""
        highest = max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._check_ids(highest)
        return highest + 1

    @cached_property
    def eos_ids(self) -> list[int]:
        """End-of-answer ids: the tokenizer's eos, then generation_config.json's (config.json's where there is none)."""
        eos = self._id_of("eos_token")
        found = [] if eos is None else [eos]
        for name in ("generation_config.json", "config.json"):
            values = _optional(self.path / name).get("eos_token_id")
            if values is None:
                continue
            for value in values if isinstance(values, list) else [values]:
                if not isinstance(value, int) or isinstance(value, bool) or not TOKEN_ID.low <= value <= TOKEN_ID.high:
                    raise ToolkitError(
                        f"{self.path / name}: eos_token_id: expected a token id or a list of them, found {values!r:.60}"
                    )
                if value not in found:
                    found.append(value)
            break
        return found

    def names(self, special: bool) -> set[str]:
        """The texts of the tokens that are added to the vocabulary, those that are ``special`` or the others. Tokens
        that are such only between blanks are left out."""
        return {t.content for t in self._added.values() if t.special == special and not t.single_word and t.content}

    @property
    def chat_template(self) -> str | None:
        """The default chat template's Jinja source, or None."""
        return self.chat_templates.get("default")

    @property
    def around(self) -> tuple[list[int], list[int]]:
        """Ids that ``encode`` puts before and behind a text."""
        return self._prefix, self._suffix

    @cached_property
    def start_text(self) -> str:
        """What ``encode`` puts in front of a text, spelled out ("<s>", "[gMASK]<sop>" …); empty for many models."""
        return self.decode(self._prefix, skip_special_tokens=False)

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled exactly ``text`` in the vocabulary, or None."""
        return self.backend.token_to_id(text)

    def _check_ids(self, highest: int) -> None:
        check_ids(highest, self.backend.get_vocab_size(with_added_tokens=True), self._file)

    def _bare(self, text: str) -> list[int]:
        """Token ids of ``text`` alone."""
        try:
            if isinstance(text, Written) and text.spelled:
                return self._meant(text.names).encode(text)
            if self._boxed is not None:
                return self._boxed.encode(text)
            return self.backend.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError):
            raise
        except BaseException as e:
            if not isinstance(e, Exception) and not _is_panic(e):
                raise
            why = str(e).splitlines()[0] if str(e) else type(e).__name__
            raise ToolkitError(f"{self.path}: its tokenizer cannot encode this text: {why:.300}") from e

    def _meant(self, names: Names) -> MeantEncoder:
        with self._making:
            if names not in self._encoders:
                self._encoders = {names: MeantEncoder(self.backend, names, self._boxed is not None)}
            return self._encoders[names]

    def _bytes_of(self, token_id: int) -> bytes:
        text = self.backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None
        if text is None:
            return b""
        if self._rule is None:
            return self.backend.decode([token_id], skip_special_tokens=False).encode()
        return self._rule.token(text, added=token_id in self._added)

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    def _surroundings(self) -> tuple[list[int], list[int]]:
        """Ids put before and after a text: the post-processor's, corrected by add_bos_token and add_eos_token."""
        bare = self.backend.encode("a", add_special_tokens=False).ids
        full = self.backend.encode("a", add_special_tokens=True).ids
        start = next((i for i in range(len(full) + 1) if full[i : i + len(bare)] == bare), 0)
        prefix, suffix = full[:start], full[start + len(bare) :]
        eos = self._id_of("eos_token")
        for name, ids, token in (("add_bos_token", prefix, self.bos_id), ("add_eos_token", suffix, eos)):
            wanted = self.config.get(name)
            if not isinstance(wanted, bool) or token is None or (token in ids) == wanted:
                continue
            if wanted:
                ids.insert(0, token)
            else:
                ids.remove(token)
        return prefix, suffix


def _clean(text: str) -> str:
    """Without lone surrogates, as they come from badly escaped JSON."""
    return text.encode("utf-8", "replace").decode()


def _bytes_of_file(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ToolkitError(f"{file}: cannot be read: {error.strerror}") from error


def _optional(file: Path) -> dict[str, Any]:
    """A JSON object from ``file``, empty if the file does not exist. Raises ToolkitError if it is anything else."""
    return read_json_object(file) if file.is_file() else {}


@contextmanager
def _blame(file: Path) -> Iterator[None]:
    """Turn what the tokenizers library raises (its panics are no Exception) into a ToolkitError about ``file``."""
    try:
        yield
    except BaseException as e:
        if isinstance(e, ToolkitError) or not (isinstance(e, Exception) or _is_panic(e)):
            raise
        why = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise ToolkitError(f"{file}: not a tokenizer of the tokenizers library ({why}); fetch the file again") from e


def _is_panic(error: BaseException) -> bool:
    """Whether it is how a fault of a Rust library arrives."""
    return type(error).__name__ == "PanicException"


def _try_out(file: Path, definition: bytes) -> None:
    """Open a tokenizer, given as tokenizer.json, and encode a letter in a box. Raises ToolkitError where that is too
    much."""
    try:
        BoxedEncoder(definition).try_out()
    except RuntimeError:
        return  # it cannot be read: opening it says why
    except ValueError as e:
        raise ToolkitError(f"{file}: not opened: {e}; fetch the file from the original model") from e


def _convert_slow(path: Path) -> tokenizers.Tokenizer:
    """Slow tokenizer files, converted by transformers in memory."""
    try:
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
        return slow.backend_tokenizer
    except (Exception, SystemExit) as e:
        why = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise ToolkitError(f"{path}: cannot convert its tokenizer files ({why}); provide tokenizer.json") from e


def _chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Name -> Jinja source. Files beside the config win over what stands in it, as in transformers."""
    found: dict[str, str] = {}
    value = config.get("chat_template")
    if isinstance(value, str):
        found["default"] = value
    elif isinstance(value, list):
        for entry in value:
            if not (isinstance(entry, dict) and isinstance(entry.get("template"), str)):
                raise ToolkitError(
                    f"{path / 'tokenizer_config.json'}: chat_template: expected a string or a list of "
                    f"{{name, template}}, found {entry!r:.60}"
                )
            found[str(entry.get("name", "default"))] = entry["template"]
    elif isinstance(value, dict):
        found.update({str(k): v for k, v in value.items() if isinstance(v, str)})
    elif value is not None:
        raise ToolkitError(
            f"{path / 'tokenizer_config.json'}: chat_template: expected a string or a list of {{name, template}}, "
            f"found {type(value).__name__}"
        )
    for name in ("chat_template.json", "processor_config.json"):  # what older processors have theirs in
        if isinstance(text := _optional(path / name).get("chat_template"), str):
            found["default"] = text
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = _read_text(file)
    if (path / "chat_template.jinja").is_file():
        found["default"] = _read_text(path / "chat_template.jinja")
    return found


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ToolkitError(f"{file}: cannot read the chat template ({e})") from e
