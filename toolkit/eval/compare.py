"""How far two models are apart on a text: perplexity of both, KL divergence, agreement on the best token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.artifacts.source import resolve_model
from toolkit.artifacts.tokenizer import Tokenizer
from toolkit.errors import ToolkitError, UsageError
from toolkit.eval.perplexity import read_text
from toolkit.runners.base import Runner, RunnerError, RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.step import SamplingBatch, StepBatch

ROWS = 128  # positions whose log-probabilities are held at once

F32 = NDArray[np.float32]


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
    text = read_text(Path(data).expanduser())
    paths = [resolve_model(name) for name in (model_a, model_b)]
    runners: list[Runner] = []
    try:
        for path in paths:
            runners.append(open_runner(path, backend="pytorch", options=options)[0])
        ids = _tokens(paths, Path(data), text)
        windows = _windows(ids, window, [model_a, model_b], runners)
        tally = _Tally()
        for runner in runners:
            runner.load_weights()
            runner.allocate_cache((-(-windows.shape[1] // options.block_size),) * len(runner.spec.cache_groups))
        for i, row in enumerate(windows):
            a, b = (_logits(runner, row) for runner in runners)
            tally.add(a, b, row[1:])
            progress(i + 1, len(windows))
    finally:
        for runner in runners:
            runner.close()
    return tally.figures() | {"window": windows.shape[1]}


def _tokens(paths: list[Path], data: Path, text: str) -> NDArray[np.int32]:
    found = [Tokenizer.open(path if path.is_dir() else _side_dir(path)).encode(text) for path in paths]
    if found[0] != found[1]:
        raise UsageError(f"{paths[0]} and {paths[1]}: their tokenizers give {data} different tokens")
    return np.asarray(found[0], dtype=np.int32)


def _side_dir(path: Path) -> Path:
    """Where the tokenizer of a single-file model lies."""
    from toolkit.artifacts.checkpoint import open_checkpoint

    return open_checkpoint(path).tokenizer_dir


def _windows(ids: NDArray[np.int32], window: int, names: list[str], runners: list[Runner]) -> NDArray[np.int32]:
    """The text cut up, [windows, tokens]; a rest too short for a window is left out unless it is all there is."""
    if len(ids) < 2:
        raise UsageError(f"--data: expected at least 2 tokens, found {len(ids)}")
    for name, runner in zip(names, runners, strict=True):
        if window > runner.spec.max_position:
            raise UsageError(f"--window {window}: longer than {name}'s longest context, {runner.spec.max_position}")
        if int(ids.max()) >= runner.spec.vocab_size:
            raise ToolkitError(f"{name}: the tokenizer gives token id {int(ids.max())}, beyond the model's vocabulary")
    length = min(window, len(ids))
    return ids[: len(ids) // length * length].reshape(-1, length)


def _logits(runner: Runner, ids: NDArray[np.int32]) -> F32:
    """Logits [tokens - 1, vocabulary] of every token but the last, in one step."""
    count, groups, size = len(ids), len(runner.spec.cache_groups), runner.options.block_size
    blocks = np.arange(-(-count // size), dtype=np.int32)[None]
    none_i, none_f = np.zeros(0, np.int32), np.zeros(0, np.float32)
    batch = StepBatch(
        token_ids=np.ascontiguousarray(ids),
        from_previous=np.full(count, -1, np.int32),
        positions=np.arange(count, dtype=np.int32)[None],
        cu_seqlens=np.array([0, count], np.int32),
        seq_lens=np.array([count], np.int32),
        block_tables=(blocks,) * groups,
        slot_mapping=(np.arange(count, dtype=np.int64),) * groups,
        rope_set=np.zeros(1, np.int8),
        adapter=np.full(1, -1, np.int32),
        sample_index=none_i,
        sampling=SamplingBatch(
            none_f, none_i, none_f, none_f, none_f, none_f, none_f, np.zeros(0, np.uint64), np.zeros(0, np.int64),
            np.zeros(1, np.int32), none_i, none_i, np.zeros(1, np.int32), none_i, none_f, none_i,
        ),
        logits_index=np.arange(count - 1, dtype=np.int32),
        hidden_index=none_i,
        target_index=none_i,
        target_ids=none_i,
    )  # fmt: skip
    try:
        return runner.submit(batch).result().logits
    except RunnerError as error:
        raise ToolkitError(f"the model failed on the text: {error}") from error


@dataclass
class _Tally:
    """Sums over the tokens so far; ``kl_means``: of each window."""

    lost_a: float = 0.0
    lost_b: float = 0.0
    agreed: int = 0
    tokens: int = 0
    kl_means: list[float] = field(default_factory=list)

    def add(self, a: F32, b: F32, targets: NDArray[np.int32]) -> None:
        """Count in one window: logits of both [tokens, vocabulary] and the tokens that followed."""
        kl = 0.0
        for start in range(0, len(targets), ROWS):
            part = slice(start, start + ROWS)
            p, q = _log_softmax(a[part]), _log_softmax(b[part])
            here, row = targets[part], np.arange(len(targets[part]))
            self.lost_a -= float(p[row, here].sum())
            self.lost_b -= float(q[row, here].sum())
            self.agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
            likely = np.exp(p)
            kl += float(np.where(likely > 0, likely * (p - q), 0.0).sum())
        self.tokens += len(targets)
        self.kl_means.append(kl / len(targets))

    def figures(self) -> dict[str, Any]:
        if not math.isfinite(self.lost_a) or not math.isfinite(self.lost_b):
            raise ToolkitError("the log-probabilities of a model are not finite; its weights are broken")
        means = np.asarray(self.kl_means)
        several = len(means) > 1
        return {
            "perplexity_a": _exp(self.lost_a / self.tokens),
            "perplexity_b": _exp(self.lost_b / self.tokens),
            "kl": float(means.mean()),
            "kl_stderr": float(means.std(ddof=1) / math.sqrt(len(means))) if several else None,
            "top1_agreement": self.agreed / self.tokens,
            "tokens": self.tokens,
        }


def _log_softmax(x: F32) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
