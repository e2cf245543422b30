"""Perplexity of a model on a text, by the engine that serves it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from toolkit.base.user_path import user_path
from toolkit.configs.engine import EngineConfig, TurbomindEngineConfig
from toolkit.engine.load.setup import Packed
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.errors import ToolkitError, UsageError
from toolkit.measure.divergence import perplexity_of
from toolkit.measure.text import read_text
from toolkit.measure.windows import scoring_windows


def perplexity(
    model: str,
    data: Path | str,
    *,
    window: int = 1024,
    stride: int | None = None,
    max_tokens: int | None = None,
    config: EngineConfig | None = None,
    packed: Packed | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """exp of the mean negative log-likelihood of the tokens of the text file ``data`` ("heldout": the packaged text).

    Windows of ``window`` tokens start ``stride`` apart (None: half of it); each token is scored once. ``max_tokens``:
    so many from the start of the text, None = all. ``config`` None: as the model would be served here; with
    its first adapter, if it has any.
    ``progress`` is called with (tokens scored, tokens in all), ``tell`` with lines about loading. Returns perplexity,
    tokens (scored ones), window, stride, backend, runner, dtype. Raises UsageError or ToolkitError, one line.
    """
    if window < 2:
        raise UsageError(f"--window: expected 2 or more tokens, found {window}")
    stride = window // 2 if stride is None else stride
    if not 1 <= stride <= window:
        raise UsageError(f"--stride: expected 1 to --window ({window}), found {stride}")
    if max_tokens is not None and max_tokens < 2:
        raise UsageError(f"--max-tokens: expected 2 or more, found {max_tokens}")
    text = read_text(user_path(data))
    if config is None:
        config = TurbomindEngineConfig()
    if config.session_len is not None and config.session_len < window:
        raise UsageError(f"--session-len {config.session_len}: expected --window ({window}) or more; leave it out")
    if config.max_batch_size is None:
        config.max_batch_size = 1  # windows go one by one: the cache need hold no more
    if config.target_step_ms is None:
        config.target_step_ms = 0.0  # nobody waits for a step's end
    with AsyncEngine.open(model, backend_config=config, progress=tell, packed=packed) as engine:
        if engine.session_len < window:
            raise UsageError(
                f"--window {window}: longer than the longest context here, {engine.session_len} tokens; --session-len "
                f"{window} stretches the positions"
            )
        ids = engine.tokenizer.encode(text)[:max_tokens]
        if len(ids) < 2:
            raise UsageError(f"--data {data}: expected at least 2 tokens, found {len(ids)}")
        lost, scored = 0.0, 0
        for start, stop, first in scoring_windows(len(ids), window, stride):
            log_probs = engine.score(ids[start:stop], config.first_adapter)[first - start - 1 :]
            lost -= float(log_probs.astype("float64").sum())
            scored += stop - first
            progress(stop, len(ids))
        if not math.isfinite(lost):
            raise ToolkitError(f"{model}: the model's log-probabilities are not finite; its weights are broken")
        backend, runner, dtype = engine.backend, engine.runner_name, engine.dtype
    return {
        "perplexity": perplexity_of(lost / scored),
        "tokens": scored,
        "window": window,
        "stride": stride,
        "backend": backend,
        "runner": runner,
        "dtype": dtype,
    }
