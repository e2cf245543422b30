"""What is added to the embeddings of tokens: in BERT and what came of it, which read a text as a whole and write none,
and in decoders whose positions are learned (GPT-2)."""

from __future__ import annotations

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.record import later
from toolkit.models.spec import sound
from toolkit.models.spec.parts import NormSpec


@dataclass(frozen=True)
class EncoderSpec:
    """What a model adds to the embeddings of tokens. ``writes``: it is a decoder.

    ``positions`` names a matrix of ``position_rows`` rows, of which a token at position p is given number p +
    ``offset``; ``types`` one of ``type_rows``, of which the tokens of a text are given number 0, and those of the
    second text of a pair number 1. None: the model has no such matrix. ``norm``: of the sum, before all layers, where
    the residual stream begins with what it gives (BLOOM); encoders have it in their first layer.
    """

    positions: str | None = None
    position_rows: int = 0
    offset: int = 0
    types: str | None = None
    type_rows: int = 0
    writes: bool = later(False)
    norm: NormSpec | None = later(None)

    def vectors(self, hidden: int) -> dict[str, int]:
        """Its parameters: name → numbers in it."""
        return {name: rows * hidden for name, (rows, _) in self.shapes(hidden).items()}

    def shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """As checkpoints store them: name → shape."""
        both = (self.positions, self.position_rows), (self.types, self.type_rows)
        return {name: (rows, hidden) for name, rows in both if name is not None}

    def check(self, max_position: int, hidden: int) -> None:
        """Raise ValueError for numbers that cannot be."""
        if self.norm is not None:
            sound.norm(self.norm, hidden)
        for name, rows in (("positions", self.position_rows), ("types", self.type_rows)):
            given = getattr(self, name)
            sound.expect(name, bool(rows) == (given is not None), given, f"a name, as there are {rows} rows")
        least = max_position + self.offset if self.positions else 0
        sound.expect("position_rows", self.position_rows >= least, self.position_rows, f"at least {least}")
