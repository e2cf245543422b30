"""Held-out drawings shown to a model through the toolkit's own fronts, and how many answers are right."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from tiny_vlm.drawings import QUESTIONS, Scene, draw

HELD_OUT = 20_261_122  # begins every seed of these; training has others


@dataclass(frozen=True)
class Asked:
    kind: str
    image: Image.Image
    question: str
    answer: str


def held_out(count: int) -> Iterator[Asked]:
    """A question about each of so many drawings."""
    for i in range(count):
        rng = np.random.default_rng((HELD_OUT, i))
        scene = Scene.draw_lots(rng)
        kind = str(rng.choice(scene.kinds()))
        yield Asked(kind, draw(scene, rng), str(rng.choice(QUESTIONS[kind])), scene.answer(kind))


def answers(model: str, asked: Sequence[Asked], batch: int = 16) -> list[str]:
    """Of a server (http://…, asked by the openai client) or of a model in a directory."""
    if model.startswith("http"):
        return [_served(model, one) for one in asked]
    from toolkit import GenerationConfig, pipeline

    with pipeline(model) as pipe:
        config = GenerationConfig(max_new_tokens=24)
        some = [asked[i : i + batch] for i in range(0, len(asked), batch)]
        return [a.text for part in some for a in pipe([(x.image, x.question) for x in part], gen_config=config)]


def _served(url: str, asked: Asked) -> str:
    import openai

    client = openai.OpenAI(base_url=f"{url.rstrip('/')}/v1", api_key="none", max_retries=0)
    file = io.BytesIO()
    asked.image.save(file, "PNG")
    data = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": data}}, {"type": "text", "text": asked.question}]
    name = client.models.list().data[0].id
    talk = [{"role": "user", "content": parts}]
    found = client.chat.completions.create(model=name, messages=talk, max_tokens=24, temperature=0)  # type: ignore[arg-type]
    return found.choices[0].message.content or ""


def shares(asked: Sequence[Asked], found: Sequence[str]) -> dict[str, tuple[int, int]]:
    """(right, asked) by kind of question; an answer is right that is word for word the expected one."""
    right = Counter(one.kind for one, text in zip(asked, found, strict=True) if text.strip() == one.answer)
    return {kind: (right[kind], count) for kind, count in sorted(Counter(one.kind for one in asked).items())}
