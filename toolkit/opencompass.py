"""Our engine as a model of OpenCompass; the extra ``opencompass`` brings it.

A configuration of OpenCompass names it where LMDeploy's stood: ``from toolkit.opencompass import TurboMindModel``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from opencompass.models.base import BaseModel

from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.configs.generation import PARAMETERS
from toolkit.messages import GenerationConfig
from toolkit.pipeline.pipeline import pipeline
from toolkit.pipeline.prompts import Prompt

SAMPLING = {p.name for p in PARAMETERS.values() if p.draws}


class TurboMindModel(BaseModel):
    """Answers and scores prompts as they stand: ``meta_template`` (roles and ``eos_token_id``) is what wraps them.

    path: what ``pipeline`` takes. engine_config and gen_config: fields of ``TurbomindEngineConfig`` (of
    ``PytorchEngineConfig`` where ``backend`` is "pytorch") and ``GenerationConfig``; their session_len and
    max_new_tokens come before max_seq_len and a data set's max_out_len. end_str: answers are cut there.
    concurrency: requests at once. Answers are greedy unless gen_config says ``do_sample``.
    """

    def __init__(
        self,
        path: str,
        backend: str = "turbomind",
        concurrency: int = 8,
        max_seq_len: int = 2048,
        meta_template: dict[str, Any] | None = None,
        engine_config: dict[str, Any] | None = None,
        gen_config: dict[str, Any] | None = None,
        end_str: str | None = None,
    ) -> None:
        super().__init__(path=path, max_seq_len=max_seq_len, meta_template=meta_template)
        settings = {"session_len": max_seq_len, "max_batch_size": concurrency, **(engine_config or {})}
        kind = PytorchEngineConfig if backend == "pytorch" else TurbomindEngineConfig
        self.pipe = pipeline(path, kind(**settings))
        self.gen_config = dict(gen_config or {})
        self.end_str = end_str

    def generate(
        self, inputs: list[str], max_out_len: int = 512, stopping_criteria: list[str] | None = None, **kwargs: Any
    ) -> list[str]:
        """One answer a prompt, in order."""
        settings = {"max_new_tokens": max_out_len, **self.gen_config}
        if not settings.get("do_sample"):  # what configurations say of sampling has no effect then, as with LMDeploy
            settings = {name: value for name, value in settings.items() if name not in SAMPLING}
        if stopping_criteria:
            settings["stop_words"] = list(dict.fromkeys([*settings.get("stop_words", ()), *stopping_criteria]))
        batch: list[Prompt] = [*inputs]
        replies = self.pipe(batch, GenerationConfig(**settings), do_preprocess=False)
        return [reply.text if self.end_str is None else reply.text.split(self.end_str)[0] for reply in replies]

    def get_token_len(self, prompt: str) -> int:
        """Tokens of a text."""
        return len(self.pipe.tokenizer.encode(str(prompt)))

    def get_ppl(self, inputs: list[str], mask_length: list[int] | None = None) -> np.ndarray:
        """Mean cross-entropy of each text, of its tokens from ``mask_length`` on: float [N]."""
        masks = mask_length or [1] * len(inputs)
        rows = [self._log_probs(text)[max(mask - 1, 0) :] for text, mask in zip(inputs, masks, strict=True)]
        return np.array([-float(row.mean()) for row in rows])

    def get_loglikelihood(
        self, inputs: list[str], conts: list[str], mask_length: list[int] | None = None
    ) -> np.ndarray:
        """Sum of log p of the tokens of each ``conts`` at the end of its text: float [N]."""
        starts = [self.get_token_len(text.removesuffix(end).rstrip()) for text, end in zip(inputs, conts, strict=True)]
        rows = [self._log_probs(text)[max(start - 1, 0) :] for text, start in zip(inputs, starts, strict=True)]
        return np.array([float(row.sum()) for row in rows])

    def _log_probs(self, text: str) -> np.ndarray:
        return self.pipe.engine.score(self.pipe.tokenizer.encode(text))
