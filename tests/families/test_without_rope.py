"""Families that turn nothing have heads of any size: a rope that was not there once asked for even ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native.library import available

BACKENDS = ("pytorch", "turbomind") if available() is None else ("pytorch",)
WIDE, HEADS = 36, 4  # heads of 9 numbers
SIZES = {
    "bloom": {"hidden_size": WIDE, "n_head": HEADS},
    "mpt": {"d_model": WIDE, "n_heads": HEADS},
    "gpt2": {"n_embd": WIDE, "n_head": HEADS},
    "gpt_bigcode": {"n_embd": WIDE, "n_head": HEADS},
    "gpt_neo": {"hidden_size": WIDE, "num_heads": HEADS},
    "opt": {"hidden_size": WIDE, "word_embed_proj_dim": WIDE},
    "falcon": {"hidden_size": WIDE, "alibi": True},
}
TEXT = [7, 8, 9, 300, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", SIZES)
def test_heads_of_an_odd_size(family: str, backend: Any, tiny_models: Any, support: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = tiny_models(family, **SIZES[family])
    form = "sdpa" if family == "falcon" else "eager"  # in the eager form transformers add Falcon's biases twice
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=form).eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([TEXT]), use_cache=False).logits[0].numpy()
    runner, _ = open_runner(path, backend=backend, options=RunnerOptions(device="cpu", dtype="float32", block_size=16))
    driver = support("steps").Driver(runner)
    found = driver.step({driver.add(): TEXT}, want="all").logits
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)
