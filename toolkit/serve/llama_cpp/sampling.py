"""How tokens are drawn, in the words of llama.cpp, which are Ollama's, too."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from toolkit.configs.checks import shown
from toolkit.serve.fields.parameters import given_parameters, parameter, with_parameters
from toolkit.serve.fields.protocol import StopWords, as_list
from toolkit.serve.fields.strict import Strict

# Ways of drawing that are not built here: the value that changes nothing.
NEUTRAL = {
    "typical_p": 1.0,
    "tfs_z": 1.0,
    "mirostat": 0,
    "penalize_newline": True,
    "top_n_sigma": -1.0,
    "dynatemp_range": 0.0,
    "xtc_probability": 0.0,
    "dry_multiplier": 0.0,
}


@with_parameters(
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "random_seed",
    top_k=parameter("top_k", ge=-1, description="Keep this many likeliest tokens; 0 or -1 = all."),
)
class LlamaSampling(Strict):
    """What is left out is drawn as the server's other routes draw it."""

    stop: Annotated[StopWords | None, BeforeValidator(as_list, json_schema_input_type=str | list[str] | None)] = None
    repeat_penalty: float | None = parameter("repetition_penalty")
    repeat_last_n: int | None = Field(None, description="-1 where there are penalties: they look at the whole text")
    # Not built here; what changes nothing is taken:
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None
    penalize_newline: bool | None = None
    top_n_sigma: float | None = None
    dynatemp_range: float | None = None
    xtc_probability: float | None = None
    dry_multiplier: float | None = None
    # What goes with those:
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dynatemp_exponent: float | None = None
    xtc_threshold: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None

    @model_validator(mode="after")
    def _can_be_drawn(self) -> LlamaSampling:
        for name, value in NEUTRAL.items():
            if (found := getattr(self, name)) not in (None, value):
                raise ValueError(f"{name}: not built here; leave it out, found {shown(found)}")
        given = self.sampling()
        penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
        punished = any(given.get(name) not in (None, 0.0, 1.0) for name in penalties)
        if punished and self.repeat_last_n not in (None, -1):
            raise ValueError(
                f"repeat_last_n: penalties look at the whole text here; expected -1, found {shown(self.repeat_last_n)}"
            )
        return self

    def sampling(self) -> dict[str, Any]:
        """The same in the words of our own API."""
        given = given_parameters(self)
        if given.get("seed", 0) < 0:
            del given["seed"]  # any
        if self.repeat_penalty is not None:
            given["repetition_penalty"] = self.repeat_penalty
        if self.stop:
            given["stop"] = self.stop
        return given
