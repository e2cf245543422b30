"""Calibration text of one run: chosen by its options, kept in its stage."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from toolkit.artifacts.manifest import file_digest
from toolkit.artifacts.output.stage import Stage
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.user_path import user_path
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.text.calibration import CalibrationPlan, interleave, read_samples, shown_files
from toolkit.quant.text.datasets import find_known
from toolkit.quant.text.pictures import FIRST, Pictures
from toolkit.quant.text.selftext import self_samples

Progress = Callable[[str, int, int], None]
"""Called with (what is going on, steps done, steps in all)."""


@dataclass(frozen=True)
class CalibrationText:
    """The text of ``plan`` for ``source``."""

    source: LayerSource
    plan: CalibrationPlan

    def options(self) -> dict[str, Any]:
        """What a result depends on, for the stage's key."""
        own = {"calib_self_samples": self.plan.own} if self.plan.own else {}
        return own | {
            "calib_dataset": self.plan.dataset if self.plan.dataset == "self" else self._named(),
            "calib_samples": self.plan.samples - self.plan.own,
            "calib_seqlen": self.plan.seqlen,
            "seed": self.plan.seed,
        }

    def read(self, stage: Stage, tokenizer: Tokenizer, digest: str, progress: Progress) -> torch.Tensor:
        """Token ids [samples, seqlen], those of pictures behind the vocabulary, whose rows ``source`` is given; kept in
        the stage, so that a resumed run sees the same text. ``digest``: the model's. Raises ToolkitError or UsageError,
        one line."""
        if stage.done("calibration"):
            kept = stage.load("calibration")
            self.source.rows = kept.get("rows")
            return kept["ids"]
        parts, pictures = [], Pictures(self.source)
        if (given := self.plan.given) is not None:
            parts.append(read_samples(given, tokenizer, self.source.checkpoint.tokenizer_dir, pictures))
        if (written := self.plan.written) is not None:
            told = partial(progress, "writing calibration text")
            parts.append(self_samples(self.source.path, digest, written, tokenizer, told))
        ids = torch.tensor(interleave(parts), dtype=torch.int64)
        self.source.check_tokens(ids.where(ids < FIRST, 0))
        kept = {"ids": ids}
        if bool((ids >= FIRST).any()):
            progress("looking at pictures", 0, 1)
            ids, rows = pictures.rows(ids)
            self.source.rows = rows
            kept = {"ids": ids, "rows": rows}
        stage.save("calibration", kept)
        return ids

    def _named(self) -> str:
        """The dataset as the stage's key sees it: a local one by content, and by that of the pictures it shows."""
        dataset = self.plan.dataset
        known = find_known(dataset)
        path = known[1] if known and known[1] else user_path(dataset)
        if not path.exists():
            return dataset
        here = path.resolve()
        files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
        if known is None and self.source.spec.vision is not None:
            files += [f for f in shown_files(path) if here not in f.resolve().parents]
        if files == [path]:
            return f"{here} sha256:{file_digest(path)}"
        digests = "\n".join(f"{os.path.relpath(f, path)} {file_digest(f)}" for f in files)
        return f"{here} sha256:{hashlib.sha256(digests.encode()).hexdigest()}"
