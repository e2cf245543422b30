"""What measurements say of texts and models that cannot be: the whole line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.refused import refusing
from toolkit.errors import ToolkitError, UsageError
from toolkit.measure.compare import compare
from toolkit.measure.next_logits import next_logits
from toolkit.measure.perplexity import perplexity
from toolkit.runners.base import RunnerError

refused = refusing(UsageError)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("zebra " * 20)
    return path


@pytest.fixture
def wordy(tiny_models: Any, support: Any, tmp_path: Path) -> Path:
    """A model whose tokenizer has one token more than it."""
    return support("tiny").wordy_copy(tiny_models("llama"), tmp_path / "wordy", "zebra")


@pytest.mark.parametrize("measure", ["compare", "perplexity"])
def test_a_text_of_one_token(measure: str, tiny_models: Any, tmp_path: Path) -> None:
    model, text = str(tiny_models("llama")), tmp_path / "text.txt"
    text.write_text("a")
    if measure == "compare":
        assert refused(lambda: compare(model, model, text)) == "--data: expected at least 2 tokens, found 1"
    else:
        assert (
            refused(lambda: perplexity(model, text, window=64, stride=64))
            == f"--data {text}: expected at least 2 tokens, found 1"
        )


def test_two_tokenizers(tiny_models: Any, wordy: Path, text: Path) -> None:
    one = tiny_models("llama")
    told = f"{one} and {wordy}: their tokenizers give {text} different tokens"
    assert refused(lambda: compare(str(one), str(wordy), text)) == told


def test_a_token_that_the_model_does_not_know(wordy: Path, text: Path) -> None:
    model = str(wordy)
    told = f"{model}: the tokenizer gives token id 320, beyond the model's vocabulary"
    assert refused(lambda: compare(model, model, text), ToolkitError) == told


def test_a_model_that_draws_blocks(tiny_models: Any, text: Path) -> None:
    model = str(tiny_models("sdar"))
    told = f"{model}: guesses blocks of tokens together: it has no probabilities of the next token"
    assert refused(lambda: compare(model, model, text)) == told


def test_weights_that_are_broken(tiny_models: Any, support: Any, text: Path, tmp_path: Path) -> None:
    model = str(support("tiny").broken_copy(tiny_models("llama"), tmp_path / "broken"))
    told = "log-probabilities: some are not finite; the weights of one of the models are broken"
    assert refused(lambda: compare(model, model, text), ToolkitError) == told
    told = f"{model}: the model's log-probabilities are not finite; its weights are broken"
    assert refused(lambda: perplexity(model, text, window=64, stride=64), ToolkitError) == told


def test_a_model_that_fails() -> None:
    def submit(batch: Any) -> None:
        raise RunnerError("no room")

    options = SimpleNamespace(block_size=4)
    runner: Any = SimpleNamespace(spec=SimpleNamespace(cache_groups=()), options=options, submit=submit)
    told = "the model failed on the text: no room"
    assert refused(lambda: next_logits(runner, np.ones(3, np.int32)), ToolkitError) == told
