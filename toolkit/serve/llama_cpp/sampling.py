"""How tokens are drawn, in the words of llama.cpp, which are Ollama's, too."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from toolkit.configs.checks import shown
from toolkit.serve.fields.parameters import given_parameters, parameter
from toolkit.serve.fields.protocol import Breakers, Stop, with_sampling
from toolkit.serve.fields.strict import Strict

SEEDLESS = 0xFFFFFFFF  # how llama.cpp says that a seed is drawn: -1 in 32 bits


def only(neutral: Any, or_below: bool = False) -> AfterValidator:
    """A field of what is not built here: it may have the value that changes nothing, and perhaps any below that."""

    def check(found: Any) -> Any:
        if found not in (None, neutral) and not (or_below and found < neutral):
            raise ValueError(f"not built here; leave it out, found {shown(found)}")
        return found

    return AfterValidator(check)


def _most(found: int | None) -> int | None:
    if found == 0:
        raise ValueError("expected at least 1, or -1 for as many as fit, found 0")
    return None if found is None or found < 0 else found


MostTokens = Annotated[
    int | None,
    Field(ge=-2, le=1 << 30, description="Most tokens; below 0: as many as fit"),
    AfterValidator(_most),
]


@with_sampling
class LlamaSampling(Strict):
    """What is left out is drawn as the server's other routes draw it."""

    stop: Stop = None
    repeat_penalty: float | None = parameter("repetition_penalty")
    repeat_last_n: int | None = Field(None, description="-1 where there are penalties: they look at the whole text")
    tfs_z: Annotated[float | None, only(1.0)] = None
    mirostat: Annotated[int | None, only(0)] = None
    penalize_newline: Annotated[bool | None, only(True)] = None
    # What goes with mirostat:
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dry_sequence_breakers: Breakers | None = None

    @model_validator(mode="after")
    def _can_be_drawn(self) -> LlamaSampling:
        given = self.sampling()
        off = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
        punished = any(given.get(name) not in (None, none) for name, none in off.items())
        if punished and self.repeat_last_n not in (None, -1):
            raise ValueError(
                f"repeat_last_n: penalties look at the whole text here; expected -1, found {shown(self.repeat_last_n)}"
            )
        return self

    def sampling(self) -> dict[str, Any]:
        """The same in the words of our own API."""
        given = given_parameters(self)
        if given.get("seed", 0) < 0 or given.get("seed") == SEEDLESS:
            del given["seed"]  # any
        if self.repeat_penalty is not None:
            given["repetition_penalty"] = self.repeat_penalty
        if self.stop:
            given["stop"] = self.stop
        if self.dry_sequence_breakers is not None:
            given["dry_sequence_breakers"] = self.dry_sequence_breakers
        return given
