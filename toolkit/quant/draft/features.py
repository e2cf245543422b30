"""What a model's layers make of text, as a head is given it: hidden states of prompts, told by the engine."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.engine.drafts.draft import NO_GUESS, Draft, Guess
from toolkit.engine.load.setup import find
from toolkit.engine.load.start import start
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.errors import ToolkitError

if TYPE_CHECKING:
    from toolkit.engine.core import EngineCore
    from toolkit.engine.sequence import Sequence
    from toolkit.engine.step import Step
    from toolkit.runners.step import StepOutput


class _Recorder(Draft):
    """Guesses nothing. ``found``: by requests the states of their tokens, bfloat16 [length, layers, hidden]."""

    name = "states"

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.aux_layers = layers
        self.found: dict[str, Tensor] = {}

    def propose(self, asked: Seq[tuple[Sequence, int]]) -> list[Guess]:
        return [NO_GUESS] * len(asked)

    def observe(self, step: Step, out: StepOutput) -> None:
        cu, ends = step.batch.cu_seqlens.tolist(), step.batch.seq_lens.tolist()
        for i, seq in enumerate(step.plan.sequences()):
            first, stop = cu[i], cu[i + 1]
            rows = torch.from_numpy(np.ascontiguousarray(out.aux[first:stop], np.float32))
            self.found[seq.id][ends[i] - (stop - first) : ends[i]] = rows


class States:
    """An engine that tells hidden states; a context manager. ``model``: a directory, opened when they are asked for;
    ``layers``: whose inputs are told, the number of layers standing for what the last one gives, all different;
    ``length``: tokens of a sample, at most."""

    def __init__(self, model: Path, layers: tuple[int, ...], length: int, device: str) -> None:
        self._model, self._length, self._device = model, length, device
        self._recorder = _Recorder(layers)
        self._core: EngineCore | None = None

    def __enter__(self) -> States:
        return self

    def __exit__(self, *error: object) -> None:
        if self._core is not None:
            self._core.close()

    def of(self, ids: Tensor, progress: Callable[[int], None]) -> Tensor:
        """Of samples ``ids`` [samples, length]: bfloat16 [samples, length, layers, hidden]. ``progress``: told how
        many samples are behind. Raises ToolkitError where the engine fails."""
        core = self._core = self._core or self._open()
        shape = *ids.shape, len(self._recorder.aux_layers), core.runner.spec.hidden_size
        states = torch.empty(shape, dtype=torch.bfloat16)
        for i, sample in enumerate(ids.tolist()):
            self._recorder.found[str(i)] = states[i]
            core.add(EngineRequest(str(i), sample, SamplingParams(1, temperature=0.0)))
        behind = 0
        while core.has_work:
            for output in core.step():
                if output.error is not None:
                    raise ToolkitError(f"{self._model}: hidden states cannot be taken: {output.error}")
                behind += output.finish_reason is not None
            progress(behind)
        self._recorder.found.clear()
        if core.speculator is None or self._recorder not in core.speculator.drafts:  # it failed, as the log says
            raise ToolkitError(f"{self._model}: its engine tells no hidden states")
        return states

    def _open(self) -> EngineCore:
        config = TurbomindEngineConfig(
            device=self._device,
            session_len=self._length + 1,
            enable_prefix_caching=False,  # what is in the cache is not computed, and tells nothing
            speculative_algorithm="lookup",  # asked for, so that every runner verifies, and tells what it is told to
            speculative_shared="off",
        )
        core, _ = start(find(str(self._model), config, None, None), None, lambda line: None, [self._recorder])
        return core
