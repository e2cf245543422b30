"""Training a head on a model's own text, judged on text that was held back; a killed run goes on from what it kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from toolkit.artifacts.drafts.draft_head import HeadSpec
from toolkit.artifacts.output.stage import Stage
from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.spec import DecoderSpec
from toolkit.quant.draft.layer import Passes, Weights, first_weights
from toolkit.quant.draft.muon import Muon
from toolkit.quant.layers.forward import fast_bf16, head_logits, in_bf16

BATCH = 4  # samples of a step
RATE = 1e-3  # of AdamW, which trains norms and the vocabulary
MATRIX_RATE = 2e-3  # of Muon, which trains the other matrices: after 300 steps the loss is 3.70, by AdamW alone 4.08
WARM_UP = 0.04  # of all steps
LARGEST_GRADIENT = 1.0
FURTHER = 3  # one row in so many is gone on with in further passes: what they learn differs little from row to row
POINTS = 20  # at which the held-out text is looked at
KEEP_SECONDS = 60.0  # between two times that what was trained is kept
KEY = "training"
MOMENTS = ("momentum", "exp_avg", "exp_avg_sq")  # that optimizers keep of a parameter


@dataclass(frozen=True)
class Part:
    """``ids`` int64 [samples, length]; ``states``: of each sample, by its number, the model's hidden states, bfloat16
    [length, fused + 1, hidden], read when they are asked for."""

    ids: Tensor
    states: Mapping[str, Tensor]


class Text:
    """Samples, a part after another."""

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self._places = [(part, i) for part in parts for i in range(len(part.ids))]

    def __len__(self) -> int:
        return len(self._places)

    @property
    def tokens(self) -> int:
        """Of all samples."""
        return sum(part.ids.numel() for part in self.parts)

    def take(self, chosen: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """(ids, states) of samples by their numbers."""
        places = [self._places[i] for i in chosen]
        ids = torch.stack([part.ids[i] for part, i in places])
        return ids.to(device), torch.stack([part.states[str(i)] for part, i in places]).to(device)


class Teacher:
    """What the model itself says, of the ``kept`` [draft vocabulary] ids. ``outer``: its embedding, norm and head."""

    def __init__(self, spec: DecoderSpec, outer: Mapping[str, Tensor], kept: Tensor) -> None:
        self.embed = outer[spec.embed].float() * spec.embed_scale
        own = {spec.head: outer[spec.head][kept]}
        if (bias := outer.get(f"{spec.head}.bias")) is not None:
            own[f"{spec.head}.bias"] = bias[kept]
        self._spec, self._outer, self.kept = spec, {**outer, **own}, kept

    def logits(self, last: Tensor) -> Tensor:
        """Of hidden states behind the last layer [batch, length, hidden]."""
        return head_logits(self._spec, self._outer, last.float()).float()


class Training:
    """A head under training; ``step`` counts what is behind."""

    def __init__(self, spec: HeadSpec, teacher: Teacher, norm: Tensor, head: Tensor, seed: int, depth: int) -> None:
        self.spec, self.teacher, self.depth = spec, teacher, depth
        weights = first_weights(spec, norm, head, seed)
        self.weights: Weights = {name: w.requires_grad_() for name, w in sorted(weights.items())}
        matrices = {name: w for name, w in self.weights.items() if w.ndim == 2 and name != "lm_head.weight"}
        others = {name: w for name, w in self.weights.items() if name not in matrices}
        products = torch.bfloat16 if fast_bf16(teacher.embed.device) else torch.float32
        muon = Muon(matrices.values(), MATRIX_RATE, products)
        adam = torch.optim.AdamW(others.values(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (muon, adam)
        self._optimizer_of = dict.fromkeys(matrices, muon) | dict.fromkeys(others, adam)
        self.step = 0
        self.curve: list[dict[str, Any]] = []

    def run(self, text: Text, held: Text, steps: int, seed: int, stage: Stage, progress: Callable[[int], None]) -> None:
        """Train up to ``steps`` steps, from where ``stage`` has kept it."""
        if stage.done(KEY):
            self._restore(stage)
        kept = time.monotonic()
        marks = {round(steps * i / POINTS) for i in range(POINTS + 1)}
        while True:
            if self.step in marks and not any(point["step"] == self.step for point in self.curve):
                self.curve.append({"step": self.step, **self.judge(held)})
            if self.step == steps or time.monotonic() - kept >= KEEP_SECONDS:
                self._keep(stage)
                kept = time.monotonic()
            progress(self.step)
            if self.step == steps:
                return
            ids, states = text.take(_chosen(len(text), self.step, seed), self.teacher.embed.device)
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = optimizer.defaults["lr"] * _share(self.step, steps)
            self._learn(ids, states, _further(ids.shape[1] - 1, self.depth, self.step, seed))
            self.step += 1

    def _learn(self, ids: Tensor, states: Tensor, further: Tensor) -> None:
        """``further``: rows of which the passes behind the first are."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        with in_bf16(ids.device):
            with torch.no_grad():
                wanted = self.teacher.logits(states[:, 1:, -1]).softmax(-1)
            passes = self._passes(ids, states)
            loss, rows = torch.zeros((), device=ids.device), torch.arange(wanted.shape[1])
            for depth in range(self.depth):
                if depth == 1:
                    rows = further
                    passes.narrow(rows.to(ids.device))
                mine = wanted[:, (rows + depth).to(ids.device)]
                loss = loss - (mine * passes.next().float().log_softmax(-1)).sum(-1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), LARGEST_GRADIENT)
        for optimizer in self._optimizers:
            optimizer.step()

    def _passes(self, ids: Tensor, states: Tensor) -> Passes:
        return Passes(self.spec, self.weights, self.teacher.embed, ids, states[:, :, :-1].flatten(2).float())

    @torch.no_grad()
    def judge(self, held: Text) -> dict[str, Any]:
        """By place in a guess: ``accepted``, the share of its tokens that the text has, of those that it has all before
        of; ``best``: the share that the model would have taken had it taken its likeliest; ``loss``: of the first, in
        nats."""
        right, tried, best, seen = ([0] * self.depth for _ in range(4))
        loss, rows = 0.0, 0
        for start in range(0, len(held), BATCH):
            chosen = list(range(start, min(start + BATCH, len(held))))
            ids, states = held.take(chosen, self.teacher.embed.device)
            with in_bf16(ids.device):
                model = self.teacher.logits(states[:, 1:, -1])
                passes = self._passes(ids, states)
                alive = torch.ones_like(ids[:, 2:], dtype=torch.bool)
                for depth in range(self.depth):
                    logits = passes.next()[:, : model.shape[1] - depth].float()
                    if not depth:
                        loss -= float((model.softmax(-1) * logits.log_softmax(-1)).sum())
                        rows += logits.shape[0] * logits.shape[1]
                    guess = logits.argmax(-1)
                    best[depth] += int((guess == model[:, depth:].argmax(-1)).sum())
                    seen[depth] += guess.numel()
                    hit = self.teacher.kept[guess[:, :-1]] == ids[:, 2 + depth :]
                    alive = alive[:, : hit.shape[1]]
                    tried[depth] += int(alive.sum())
                    alive = alive & hit
                    right[depth] += int(alive.sum())
        share = lambda some, of: [round(a / b, 4) if b else 0.0 for a, b in zip(some, of, strict=True)]  # noqa: E731
        return {"loss": round(loss / rows, 4), "accepted": share(right, tried), "best": share(best, seen)}

    def _keep(self, stage: Stage) -> None:
        tensors = {name: w.detach() for name, w in self.weights.items()}
        for name, w in self.weights.items():
            state = self._optimizer_of[name].state.get(w, {})
            tensors |= {f"{name}:{part}": state[part] for part in MOMENTS if part in state}
        stage.save(KEY, tensors, {"step": self.step, "curve": self.curve})

    def _restore(self, stage: Stage) -> None:
        kept, meta = stage.load(KEY), stage.load_meta(KEY)
        self.step, self.curve = meta["step"], meta["curve"]
        for name, w in self.weights.items():
            w.data.copy_(kept[name])
            if parts := {part: kept[f"{name}:{part}"].clone() for part in MOMENTS if f"{name}:{part}" in kept}:
                self._optimizer_of[name].state[w] = {"step": torch.tensor(float(self.step)), **parts}


def _chosen(count: int, step: int, seed: int) -> list[int]:
    """The samples of a step: all of them in an order of each round's own."""
    found = []
    for i in range(step * BATCH, (step + 1) * BATCH):
        turn, at = divmod(i, count)
        draw = torch.Generator().manual_seed(seed * 1_000_003 + turn)
        found.append(int(torch.randperm(count, generator=draw)[at]))
    return found


def _further(rows: int, depth: int, step: int, seed: int) -> Tensor:
    """Rows of a step that go on, those that have text as far as the last pass, ascending."""
    draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
    behind = max(1, rows - depth + 1)
    return torch.randperm(behind, generator=draw)[: max(1, behind // FURTHER)].sort().values


def _share(step: int, steps: int) -> float:
    warm = max(1, round(WARM_UP * steps))
    return min(1.0, (step + 1) / warm) * (0.05 + 0.95 * (0.5 + 0.5 * math.cos(math.pi * step / steps)))
