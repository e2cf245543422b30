"""``eval compare`` against logits of transformers and a KL written out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.errors import UsageError
from toolkit.measure.compare import compare
from toolkit.measure.predictions import Before


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The quick brown fox jumps over the lazy dog while all happy families are alike. " * 12)
    return path


def logits(path: Path, ids: list[list[int]]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(torch.tensor(ids)).logits.double()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_figures_equal_those_from_transformers(family: str, tiny_models: Any, text: Path) -> None:
    from toolkit.artifacts.text.tokenizer import Tokenizer

    a, b = tiny_models(family), tiny_models(family, seed=7)
    found = compare(str(a), str(b), text, window=64)
    ids = Tokenizer.open(a).encode(text.read_text())
    rows = [ids[i : i + 64] for i in range(0, len(ids) - 63, 64)]
    p, q = (logits(x, rows)[:, :-1].log_softmax(-1) for x in (a, b))
    targets = torch.tensor(rows)[:, 1:, None]
    means = (p.exp() * (p - q)).sum(-1).mean(1)
    assert found["tokens"] == targets.numel()
    assert found["kl"] == pytest.approx(float(means.mean()), rel=1e-4)
    assert found["kl_stderr"] == pytest.approx(float(means.std() / len(means) ** 0.5), rel=1e-3)
    assert found["perplexity_a"] == pytest.approx(float((-p.gather(-1, targets).mean()).exp()), rel=1e-4)
    assert found["perplexity_b"] == pytest.approx(float((-q.gather(-1, targets).mean()).exp()), rel=1e-4)
    assert found["top1_agreement"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()), abs=0.01)


def test_a_model_and_itself(tiny_models: Any, text: Path) -> None:
    found = compare(str(tiny_models("qwen3")), str(tiny_models("qwen3")), text, window=100)
    assert found["kl"] == pytest.approx(0, abs=1e-9) and found["top1_agreement"] == 1
    assert found["perplexity_a"] == found["perplexity_b"]


def test_refusals(tiny_models: Any, text: Path, tmp_path: Path) -> None:
    a = str(tiny_models("llama"))
    for options, words in (({"window": 1}, "--window"), ({"window": 100_000}, "longest context")):
        with pytest.raises(UsageError, match=words):
            compare(a, a, text, **options)
    with pytest.raises(UsageError, match="cannot be read"):
        compare(a, a, tmp_path / "nosuch")


@pytest.mark.parametrize("bad", [math.nan, 1e6])
def test_what_a_broken_model_lost_is_a_number(bad: float) -> None:
    """For JSON has neither NaN nor infinity."""
    before = Before()
    before.add(torch.tensor([[0.0, 1.0]]), torch.tensor([[0.0, bad]]), torch.tensor([0]))
    found = before.figures()
    assert found["perplexity_before"] == pytest.approx(1 + math.e)
    assert found["perplexity_after"] == pytest.approx(math.exp(700)) and found["kl"] == 700
