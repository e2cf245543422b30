"""What the frozen language model is to read in place of a picture: for each trait of a picture a few rows, learned.

They begin as the embeddings of words such as "Colour: red." and are then turned, by the language model's own answers to
questions, into rows that it understands best. The tower only has to learn to write them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tiny_vlm.drawings import APART, COLOURS, COUNTS, DIGITS, PLACES, QUESTIONS, SHAPES, Scene

VALUES = {"shape": (*SHAPES, *DIGITS), "colour": tuple(COLOURS), "count": COUNTS, "place": (*PLACES, APART)}
WIDTH = 4  # rows a trait
ROWS = WIDTH * len(VALUES)
BATCH = 24
NOISE = 0.3
IGNORED = -100


class Words(torch.nn.Module):
    """A table for each kind of trait, [values, WIDTH, hidden]."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        embedding = model.get_input_embeddings().weight
        self.spread = float(embedding.float().std())
        self.tables = torch.nn.ParameterDict()
        for kind, values in VALUES.items():
            found = []
            for value in values:
                name = "Digit" if value in DIGITS else kind.capitalize()
                ids = tokenizer.encode(f"{name}: {value}.", add_special_tokens=False)
                found.append(embedding[[*ids[: WIDTH - 1], ids[-1]]])
            self.tables[kind] = torch.nn.Parameter(torch.stack(found).float())

    def numbers(self, scenes: list[Scene]) -> dict[str, list[int]]:
        """Which value of each kind a scene has."""
        told = [{"shape" if k == "digit" else k: v for k, v in scene.traits.items()} for scene in scenes]
        return {kind: [values.index(one[kind]) for one in told] for kind, values in VALUES.items()}

    def forward(self, scenes: list[Scene]) -> Tensor:
        """[scenes, ROWS, hidden]."""
        return torch.cat([self.tables[kind][found] for kind, found in self.numbers(scenes).items()], 1)


def learn_words(
    words: Words,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    steps: int,
    say: Callable[[str], None],
    rate: float = 0.5,
) -> None:
    """Such that right answers get likely. A little noise is on the rows, as a tower never writes them exactly.
    ``rate``: of learning, in units of the spread of the model's embeddings."""
    rng = np.random.default_rng(0)
    optimizer = torch.optim.Adam(words.parameters(), lr=rate * words.spread)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate * words.spread, total_steps=steps)
    for step in range(steps):
        scenes = [Scene.draw_lots(rng) for _ in range(BATCH)]
        rows = words(scenes)
        rows = rows + NOISE * words.spread * torch.randn_like(rows)
        loss = answer_loss(model, tokenizer, rows, *_asked(scenes, rng))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 9:
            say(f"words: step {step + 1} of {steps}, loss {loss.item():.3f}")


def _asked(scenes: list[Scene], rng: np.random.Generator) -> tuple[list[str], list[str]]:
    kinds = [str(rng.choice(scene.kinds())) for scene in scenes]
    return [str(rng.choice(QUESTIONS[kind])) for kind in kinds], [
        s.answer(k) for s, k in zip(scenes, kinds, strict=True)
    ]


def answer_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Tensor, questions: list[str], answers: list[str]
) -> Tensor:
    """Mean over the tokens of the answers of how unlikely each was. ``rows``: [questions, ROWS, hidden]."""
    embed = model.get_input_embeddings()
    texts, labels = [], []
    for question, answer in zip(questions, answers, strict=True):
        ids = [tokenizer.encode(part) for part in (BEFORE, between(question), f"{answer}<|im_end|>")]
        texts.append(ids)
        labels.append([IGNORED] * (len(ids[0]) + ROWS + len(ids[1])) + ids[2])
    longest = max(len(label) for label in labels)
    inputs = []
    for (before, after, answer), row in zip(texts, rows, strict=True):
        parts = [embed(torch.tensor(before)), row.to(model.dtype), embed(torch.tensor(after + answer))]
        whole = torch.cat(parts)
        inputs.append(functional.pad(whole, (0, 0, 0, longest - len(whole))))
    target = torch.tensor([label + [IGNORED] * (longest - len(label)) for label in labels])[:, 1:]
    hidden = model.model(inputs_embeds=torch.stack(inputs)).last_hidden_state[:, :-1]
    told = target != IGNORED
    return functional.cross_entropy(model.lm_head(hidden[told]).float(), target[told])


BEFORE = "<|im_start|>user\n"


def between(question: str) -> str:
    """What stands between a picture's rows and the answer."""
    return f"\n{question}<|im_end|>\n<|im_start|>assistant\n"
