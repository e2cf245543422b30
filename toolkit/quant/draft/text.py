"""What a head is trained on: answers and texts that the model writes itself, seeded, a part at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.chat.template import ChatTemplate
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.errors import ToolkitError
from toolkit.messages import GenerationConfig
from toolkit.quant.text.selftext import open_writer, openings

LENGTH = 256  # tokens of a sample, where the model reads as many
PIECE = 320  # new tokens of an answer, at most
HELD_BACK = 15  # openings of texts that are not trained on
TOGETHER = 64  # requests that run at a time
ASKED = (  # what users ask, about an opening
    "{}",
    "Continue this text: {}",
    "Write a short story that begins so: {}",
    "Explain to a child what this is about: {}",
    "Answer with a numbered list: what could come next? {}",
    "Rewrite this in plain words: {}",
)
QUESTIONED = "What is this?"  # stands for a question
QUESTION = 64  # tokens of a question that the model asks itself, at most
TEMPERATURES = (0.0, 0.7)  # of answers; questions, and texts without one, are drawn as the model has them


class Writer:
    """Writes parts of text; a context manager. ``model``: a directory, opened when the first part is asked for."""

    def __init__(self, model: Path, tokenizer: Tokenizer, seed: int, session_len: int) -> None:
        self._model, self._tokenizer, self._seed = model, tokenizer, seed
        self._room = session_len - 1
        self._template = ChatTemplate.open(tokenizer, model) if _has_template(tokenizer, model) else None
        starts = openings()
        random.Random(seed).shuffle(starts)
        self._held, self._starts = starts[:HELD_BACK], starts[HELD_BACK:]
        self._loop = asyncio.Runner()
        self._engine: AsyncEngine | None = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        if self._engine is not None:
            self._engine.close()
        self._loop.close()

    def part(self, number: int, samples: int, length: int, progress: Callable[[int], None]) -> Tensor:
        """Token ids, int64 [samples, length]; ``number`` -1: of openings that no other part begins with.
        ``progress``: told how many tokens there are. Raises ToolkitError where the model writes none."""
        return self._loop.run(self._write(number, samples * length, progress)).view(samples, length)

    async def _write(self, number: int, count: int, progress: Callable[[int], None]) -> Tensor:
        engine = self._engine = self._engine or open_writer(self._model, self._room + 1)
        pieces: dict[int, list[int]] = {}
        asked, made = iter(range(1 << 30)), 0

        async def write() -> None:
            nonlocal made
            while not _whole(pieces, count):
                index = next(asked)
                pieces[index] = await self._piece(engine, number, index)
                made += len(pieces[index])
                progress(min(made, count))

        writers = [asyncio.create_task(write()) for _ in range(min(TOGETHER, 1 + count // LENGTH))]
        ended, others = await asyncio.wait(writers, return_when=asyncio.FIRST_COMPLETED)
        for writer in others:  # there is enough, or an error
            writer.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for writer in ended:
            writer.result()
        ids = [i for index in sorted(pieces) for i in pieces[index]]
        return torch.tensor(ids[:count], dtype=torch.int64)

    async def _piece(self, engine: AsyncEngine, number: int, index: int) -> list[int]:
        starts = self._held if number < 0 else self._starts
        draw = random.Random(f"{self._seed} {number} {index}")
        text, asks = draw.choice(starts), self._template is not None and draw.random() < 0.85
        seed, temperature = draw.getrandbits(32), 1.0
        if asks:
            assert self._template is not None
            temperature, text = draw.choice(TEMPERATURES), draw.choice(ASKED).format(text)
            if draw.random() < 0.75:
                text = await self._question(engine, self._template, seed) or text
            said = self._template.render([{"role": "user", "content": text}], add_generation_prompt=True)
            ids = self._tokenizer.encode(said, add_special_tokens=False)
        else:
            ids = self._tokenizer.encode(text)
        ids = ids[: max(1, self._room // 2)]
        return ids + await self._behind(engine, ids, PIECE, temperature, seed)

    async def _question(self, engine: AsyncEngine, template: ChatTemplate, seed: int) -> str:
        """What the model takes a user to say first. Idea: Xu et al., "Magpie" (2024)."""
        before, mark, _ = template.render([{"role": "user", "content": QUESTIONED}]).partition(QUESTIONED)
        if not mark:
            return ""
        ids = self._tokenizer.encode(before, add_special_tokens=False)[: max(1, self._room // 2)]
        new = await self._behind(engine, ids, QUESTION, 1.0, seed)
        return self._tokenizer.decode([i for i in new if i not in self._tokenizer.eos_ids]).strip()

    async def _behind(self, engine: AsyncEngine, ids: list[int], most: int, temperature: float, seed: int) -> list[int]:
        """Up to ``most`` tokens that the model writes behind ``ids``, the one that ends them included."""
        config = GenerationConfig(
            max_new_tokens=max(1, min(most, self._room - len(ids))),
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0 if temperature < 1 else 0.95,
            random_seed=seed,
        )
        new: list[int] = []
        reason = None
        async for delta in engine.generate(ids, config):
            if delta.finish_reason == "error":
                raise ToolkitError(f"{self._model}: the model cannot write its own text: {delta.error_message}")
            new += delta.token_ids
            reason = delta.finish_reason or reason
        eos = self._tokenizer.eos_ids
        if reason == "stop" and eos and (not new or new[-1] not in eos):
            new.append(min(eos))
        return new


def _whole(pieces: dict[int, list[int]], count: int) -> bool:
    """Whether the pieces before the first that is missing are enough, whichever ended first."""
    total = index = 0
    while index in pieces:
        total += len(pieces[index])
        index += 1
    return total >= count


def _has_template(tokenizer: Tokenizer, model: Path) -> bool:
    try:
        ChatTemplate.open(tokenizer, model).render([{"role": "user", "content": "a"}], add_generation_prompt=True)
    except ToolkitError:
        return False
    return True
