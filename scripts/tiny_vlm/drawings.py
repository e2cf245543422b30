"""Pictures drawn from a seed, and what can be asked about them: shapes, digits, colours, counts, places."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE = 128  # pixels of a drawing
SHAPES = ("circle", "square", "triangle", "star", "cross")
DIGITS = tuple("0123456789")
COLOURS = {
    "red": (220, 30, 30),
    "green": (20, 150, 40),
    "blue": (30, 60, 220),
    "yellow": (240, 210, 20),
    "black": (15, 15, 15),
    "orange": (250, 130, 10),
}
COUNTS = ("one", "two", "three", "four")
PLACES = {"left": (0.23, 0.5), "right": (0.77, 0.5), "top": (0.5, 0.23), "bottom": (0.5, 0.77), "middle": (0.5, 0.5)}
APART = "apart"  # the place of several, each in a cell of its own
CELLS = np.array([(x, y) for y in (0.2, 0.5, 0.8) for x in (0.2, 0.5, 0.8)])
WHERE = {name: f"at the {name}" for name in ("top", "bottom")} | {name: f"on the {name}" for name in ("left", "right")}
WHERE["middle"] = "in the middle"
QUESTIONS = {
    "shape": ("What shape is it?", "What shape do you see?", "What is in the picture?"),
    "digit": ("Which digit is it?", "What digit do you see?", "What is in the picture?"),
    "colour": ("What colour is it?", "What color is it?", "Which colour do you see?"),
    "count": ("How many shapes are there?", "How many are there?", "How many things do you see?"),
    "place": ("Where is it?", "Where in the picture is it?", "In which part of the picture is it?"),
    "all": ("Describe the picture.", "What do you see?", "Describe the image."),
}


@dataclass(frozen=True)
class Scene:
    """One digit or one shape at a place, or several equal shapes apart from one another."""

    thing: str
    colour: str
    count: str
    place: str

    @classmethod
    def draw_lots(cls, rng: np.random.Generator) -> Scene:
        one = rng.random() < 0.6
        digit = one and rng.random() < 0.6
        thing, colour = str(rng.choice(DIGITS if digit else SHAPES)), str(rng.choice(list(COLOURS)))
        if one:
            return cls(thing, colour, "one", str(rng.choice(list(PLACES))))
        return cls(thing, colour, str(rng.choice(COUNTS[1:])), APART)

    @property
    def traits(self) -> dict[str, str]:
        """What there is to see, by kind of question."""
        kind = "digit" if self.thing in DIGITS else "shape"
        return {kind: self.thing, "colour": self.colour, "count": self.count, "place": self.place}

    def answer(self, kind: str) -> str:
        """To a question of a kind of ``kinds``."""
        name = f"digit {self.thing}" if self.thing in DIGITS else self.thing
        some = self.place == APART
        if kind in ("shape", "digit"):
            if some:
                return f"They are {plural(name)}."
            return f"It is the {name}." if kind == "digit" else f"It is a {name}."
        if kind == "colour":
            return f"{'They are' if some else 'It is'} {self.colour}."
        if kind == "count":
            return f"There {'are' if some else 'is'} {self.count}."
        if kind == "place":
            return f"It is {WHERE[self.place]}."
        if some:
            return f"{self.count.capitalize()} {self.colour} {plural(name)}."
        return f"{'An' if self.colour == 'orange' else 'A'} {self.colour} {name} {WHERE[self.place]}."

    def kinds(self) -> list[str]:
        """The kinds of questions that have an answer."""
        found = [*self.traits, "all"]
        return [kind for kind in found if kind != "place" or self.place != APART]


def plural(name: str) -> str:
    return f"{name}es" if name == "cross" else f"{name}s"


def draw(scene: Scene, rng: np.random.Generator) -> Image.Image:
    """RGB, SIDE × SIDE, on light paper; size, tilt, exact place and shade are chance."""
    paper = tuple(int(x) for x in rng.integers(225, 256, 3))
    image = Image.new("RGB", (SIDE, SIDE), paper)
    pen = ImageDraw.Draw(image)
    shade = tuple(int(x) for x in np.clip(np.array(COLOURS[scene.colour]) + rng.integers(-20, 21, 3), 0, 255))
    count = COUNTS.index(scene.count) + 1
    if count == 1:
        cells, radius = np.array([PLACES[scene.place]]), rng.uniform(0.17, 0.22) * SIDE
    else:
        cells, radius = rng.choice(CELLS, count, replace=False), rng.uniform(0.11, 0.14) * SIDE
    spots = (cells + rng.uniform(-0.03, 0.03, cells.shape)) * SIDE
    for spot in spots:
        if scene.thing in DIGITS:
            font = ImageFont.load_default(size=int(3 * radius))
            pen.text(tuple(spot), scene.thing, fill=shade, font=font, anchor="mm", stroke_width=1)
        else:
            _shape(pen, scene.thing, spot, radius, shade, rng)
    return image


def _shape(
    pen: ImageDraw.ImageDraw, name: str, spot: np.ndarray, r: float, shade: tuple[int, ...], rng: np.random.Generator
) -> None:
    if name == "circle":
        pen.circle(tuple(spot), 0.9 * r, fill=shade)
        return
    tilt = rng.uniform(-0.2, 0.2)
    turn = {"square": math.pi / 4, "triangle": -math.pi / 2, "star": -math.pi / 2, "cross": 0.0}[name] + tilt
    if name == "cross":
        for angle in (turn, turn + math.pi / 2):
            along, across = np.array([math.cos(angle), math.sin(angle)]), np.array([-math.sin(angle), math.cos(angle)])
            ends = [spot + r * (a * along + 0.3 * b * across) for a, b in ((-1, -1), (1, -1), (1, 1), (-1, 1))]
            pen.polygon([tuple(end) for end in ends], fill=shade)
        return
    corners = {"square": 4, "triangle": 3, "star": 10}[name]
    points = []
    for i in range(corners):
        angle, far = turn + 2 * math.pi * i / corners, r * (0.42 if name == "star" and i % 2 else 1)
        points.append((spot[0] + far * math.cos(angle), spot[1] + far * math.sin(angle)))
    pen.polygon(points, fill=shade)
