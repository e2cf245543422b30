"""What a step gave, on its way to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

import numpy as np

from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import DecoderSpec
from toolkit.runners.base import RunnerError
from toolkit.runners.routes import by_layer
from toolkit.runners.step import StepOutput
from toolkit.runners.tensor.devices.device import Fetched


@dataclass
class Failed:
    """A step that could not run."""

    error: RunnerError

    def result(self) -> StepOutput:
        raise self.error


@dataclass
class Pending:
    """A submitted step. ``rows``: sampled rows, the first of those that were copied, ``senseless`` [rows] those with
    parameters that cannot be drawn by.
    """

    fetched: Fetched
    rows: int
    senseless: np.ndarray
    spec: DecoderSpec
    explain: Callable[[Exception], RunnerError]
    _output: StepOutput | None = field(default=None, repr=False)

    def result(self) -> StepOutput:
        """Wait for the step. Raises RunnerError where the device failed."""
        if self._output is None:
            try:
                self.fetched.mark.synchronize()
            except RuntimeError as error:
                raise self.explain(error) from error
            self._output = self._read()
        return self._output

    def _read(self) -> StepOutput:
        found, n = self.fetched.arrays, self.rows
        none = np.zeros((n, 0))
        best = found["best"][:n] if n else np.zeros(0, np.float32)
        logprob = found["logprob"][:, None] if "logprob" in found else np.full((n, 1), np.nan, np.float32)
        output = StepOutput(
            tokens=found["tokens"][:n].astype(np.int32)[:, None] if n else np.zeros((0, 1), np.int32),
            logprob=logprob,
            top_ids=found.get("top_ids", none).astype(np.int32),
            top_logprobs=found.get("top_logprobs", none).astype(np.float32),
            logits=found.get("logits", np.zeros((0, self.spec.vocab_size), np.float32)),
            hidden=found.get("hidden", np.zeros((0, self.spec.hidden_size), np.float32)),
            target_logprobs=found.get("targets", np.zeros(0, np.float32)),
            bad_rows=np.flatnonzero(~np.isfinite(best) | self.senseless).astype(np.int32),
        )
        if "aux" in found:
            output.aux = found["aux"]
        if "routes" in found:
            output.routes = by_layer(found["routes"].astype(np.uint16), self.spec)
        return output
