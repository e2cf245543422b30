"""The demo model against transformers in float32. Collected where the demo has been fetched (``tool pull demo``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from toolkit.artifacts.home import toolkit_home
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native.library import available

BACKENDS = ("pytorch", "turbomind") if available() is None else ("pytorch",)
DEMO = toolkit_home() / "models" / "demo"
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Once upon a time, in a village by the sea, there lived an old man who",
    "1, 1, 2, 3, 5, 8,",
]
NEW = 16

if (DEMO / "config.json").is_file():

    @pytest.fixture(scope="module")
    def oracle() -> Any:
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32, attn_implementation="eager").eval()

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_logits_and_greedy_tokens_of_a_ragged_batch(oracle: Any, support: Any, backend: Any) -> None:
        import torch
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(DEMO)
        prompts = [tokenizer(t).input_ids for t in TEXTS]
        runner, _ = open_runner(DEMO, backend=backend, options=RunnerOptions(device="cpu", dtype="float32"))
        assert runner.name == ("native" if backend == "turbomind" else "tensor")
        driver = support("steps").Driver(runner)
        new = {driver.add(): p for p in prompts}
        output = driver.step(new, want="all")
        found: dict[int, list[int]] = {n: [int(t)] for n, t in zip(new, output.tokens[:, 0], strict=True)}
        while len(found[0]) < NEW:
            step = driver.step({n: ids[-1:] for n, ids in found.items()})
            for ids, token in zip(found.values(), step.tokens[:, 0], strict=True):
                ids.append(int(token))

        # One pass over prompt and answer tells what the oracle would have taken behind each token.
        with torch.inference_mode():
            seen = [
                oracle(torch.tensor([p + ids[:-1]])).logits[0].numpy()
                for p, ids in zip(prompts, found.values(), strict=True)
            ]
        expected = np.concatenate([logits[: len(p)] for p, logits in zip(prompts, seen, strict=True)])
        np.testing.assert_allclose(output.logits, expected, atol=2e-3, rtol=1e-3)
        greedy = [logits[len(p) - 1 :].argmax(-1).tolist() for p, logits in zip(prompts, seen, strict=True)]
        assert list(found.values()) == greedy
