"""Tokenizers from strangers: refused or survived, in one line and in bounded memory and time."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from toolkit.artifacts.text import tokenizer_box
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.artifacts.text.tokenizer_check import KNOWN, harmless
from toolkit.box.box import Limits
from toolkit.errors import ToolkitError


@pytest.fixture(scope="module")
def definition(support: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folders = support("tokenizers_small").make_all(tmp_path_factory.mktemp("tokenizers"))
    return json.loads((folders["byte_level"] / "tokenizer.json").read_text())


def directory(tmp_path: Path, definition: dict[str, Any]) -> Path:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    return tmp_path


def test_what_can_only_do_harm_is_not_opened(
    definition: dict[str, Any], corpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_box.BoxedEncoder.__init__, "__defaults__", (Limits(256 << 20, cpu_seconds=1.0),))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for what, bad in corpus("tokenizers").refused(definition):
        with pytest.raises(ToolkitError, match=r"tokenizer\.json") as error:
            Tokenizer.open(directory(tmp_path / "bad", bad))
        assert "\n" not in str(error.value), what
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10


def test_a_text_that_takes_for_ever_is_one_line(
    definition: dict[str, Any], corpus: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_box.BoxedEncoder.__init__, "__defaults__", (Limits(1 << 30, cpu_seconds=1.0),))
    for bad, text in corpus("tokenizers").slow(definition):
        tokenizer = Tokenizer.open(directory(tmp_path / "bad", bad))
        with pytest.raises(ToolkitError, match="cannot encode this text") as error:
            tokenizer.encode(text)
        assert "\n" not in str(error.value)
        assert tokenizer.encode("ab\ud800") == tokenizer.encode("ab?")


def test_a_boxed_tokenizer_gives_the_same_ids(definition: dict[str, Any], tmp_path: Path) -> None:
    odd = {"type": "Split", "pattern": {"Regex": r" ?[a-zé]+|\s+"}, "behavior": "Isolated", "invert": False}
    after = {"type": "Sequence", "pretokenizers": [odd, definition["pre_tokenizer"]]}
    boxed = Tokenizer.open(directory(tmp_path, definition | {"pre_tokenizer": after}))
    assert boxed._boxed is not None
    for text in ("", "The quick <|im_start|> brown é 你好", "word " * 2000):
        assert boxed.encode(text) == boxed.backend.encode(text, add_special_tokens=True).ids


def test_a_panic_of_the_library_is_one_line(definition: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(directory(tmp_path, definition))

    class PanicException(BaseException):
        """As the library raises it."""

    class Backend:
        def encode(self, text: str, add_special_tokens: bool) -> Any:
            raise PanicException("first line\nsecond line")

    tokenizer.backend = Backend()
    with pytest.raises(ToolkitError, match=r"cannot encode this text: first line$"):
        tokenizer.encode("x")


@pytest.mark.parametrize(
    "pattern", ["[0-9][0-9][0-9]", r"\p{N}{1,3}", *sorted(KNOWN)], ids=lambda p: str(len(p))
)  # fmt: skip
def test_patterns_of_widespread_models_stay_in_process(definition: dict[str, Any], pattern: str) -> None:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    assert harmless(definition | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split]}}, Path("x"))


def test_small_tokenizers_of_every_kind_stay_in_process(support: Any, tmp_path: Path) -> None:
    for folder in support("tokenizers_small").make_all(tmp_path).values():
        assert Tokenizer.open(folder)._boxed is None
