"""How far two models are apart on a text: perplexity of both, KL divergence, agreement on the best token."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.source import resolve_model
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.base.user_path import user_path
from toolkit.engine.load.setup import tokenizer_dir
from toolkit.errors import ToolkitError, UsageError
from toolkit.measure.divergence import Divergence, perplexity_of
from toolkit.measure.next_logits import make_ready, next_logits
from toolkit.measure.text import read_text
from toolkit.runners.base import Runner, RunnerOptions
from toolkit.runners.choose import open_runner


def compare(
    model_a: str,
    model_b: str,
    data: Path | str,
    *,
    window: int = 512,
    options: RunnerOptions | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Run both models over the text file ``data`` in windows that do not overlap, all tokens but each first scored.

    Returns perplexity_a, perplexity_b, kl (mean over tokens of KL(A ‖ B), nats), kl_stderr (of that mean, windows being
    taken as independent), top1_agreement, tokens, window. ``options`` None: the tensor runner in float32.
    ``progress`` is called with (windows done, windows in all). Raises UsageError or ToolkitError, one line; two models
    whose tokenizers give the text different tokens cannot be compared.
    """
    options = options or RunnerOptions(dtype="float32")
    if window < 2:
        raise UsageError(f"--window: expected 2 or more tokens, found {window}")
    text = read_text(user_path(data))
    paths = [resolve_model(name) for name in (model_a, model_b)]
    runners: list[Runner] = []
    try:
        for path in paths:
            runners.append(open_runner(path, backend="pytorch", options=options)[0])
        ids = _tokens(paths, Path(data), text)
        windows = _windows(ids, window, [model_a, model_b], runners)
        found = Divergence()
        for runner in runners:
            make_ready(runner, windows.shape[1])
        for i, row in enumerate(windows):
            a, b = (next_logits(runner, row, rows=len(row) - 1) for runner in runners)
            found.add(a, b, row[1:])
            progress(i + 1, len(windows))
    finally:
        for runner in runners:
            runner.close()
    return _figures(found) | {"window": windows.shape[1]}


def _tokens(paths: list[Path], data: Path, text: str) -> NDArray[np.int32]:
    found = [Tokenizer.open(tokenizer_dir(path)).encode(text) for path in paths]
    if found[0] != found[1]:
        raise UsageError(f"{paths[0]} and {paths[1]}: their tokenizers give {data} different tokens")
    return np.asarray(found[0], dtype=np.int32)


def _windows(ids: NDArray[np.int32], window: int, names: list[str], runners: list[Runner]) -> NDArray[np.int32]:
    """The text cut up, [windows, tokens]; a rest too short for a window is left out unless it is all there is."""
    if len(ids) < 2:
        raise UsageError(f"--data: expected at least 2 tokens, found {len(ids)}")
    for name, runner in zip(names, runners, strict=True):
        if runner.spec.mask_token is not None:
            raise UsageError(f"{name}: guesses blocks of tokens together: it has no probabilities of the next token")
        if window > runner.spec.max_position:
            raise UsageError(f"--window {window}: longer than {name}'s longest context, {runner.spec.max_position}")
        if int(ids.max()) >= runner.spec.vocab_size:
            raise ToolkitError(f"{name}: the tokenizer gives token id {int(ids.max())}, beyond the model's vocabulary")
    length = min(window, len(ids))
    return ids[: len(ids) // length * length].reshape(-1, length)


def _figures(found: Divergence) -> dict[str, Any]:
    lost_a, lost_b, kl = (np.concatenate(parts) for parts in (found.lost_a, found.lost_b, found.kl))
    if not math.isfinite(lost_a.sum()) or not math.isfinite(lost_b.sum()):
        raise ToolkitError("log-probabilities: some are not finite; the weights of one of the models are broken")
    means = np.array([window.mean() for window in found.kl])
    return {
        "perplexity_a": perplexity_of(float(lost_a.mean())),
        "perplexity_b": perplexity_of(float(lost_b.mean())),
        "kl": float(means.mean()),
        "kl_stderr": float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else None,
        "top1_agreement": found.agreed / len(kl),
        "tokens": len(kl),
    }
