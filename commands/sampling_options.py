"""The sampling flags of commands that generate: one parameter ``sampling``, and a decorator."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from toolkit.commands.options import with_flags


def _flag(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Sampling")


@dataclass
class DrawingFlags:
    """How tokens are drawn; None = not given."""

    do_sample: Annotated[
        bool | None, _flag("--do-sample/--greedy", help="Draw tokens, or take the likeliest. Default: the model's.")
    ] = None
    temperature: Annotated[float | None, _flag("--temperature", help="0 to 2; 0 is greedy.")] = None
    top_p: Annotated[float | None, _flag("--top-p", help="Keep the likeliest tokens of this mass.")] = None
    top_k: Annotated[int | None, _flag("--top-k", help="Keep this many likeliest tokens; 0 = all.")] = None
    min_p: Annotated[
        float | None, _flag("--min-p", help="Keep tokens of at least this share of the likeliest one's.")
    ] = None
    repetition_penalty: Annotated[float | None, _flag("--repetition-penalty", help="Above 1 discourages repeats.")] = (
        None
    )
    presence_penalty: Annotated[
        float | None, _flag("--presence-penalty", help="-2 to 2, once for every token used before.")
    ] = None
    frequency_penalty: Annotated[
        float | None, _flag("--frequency-penalty", help="-2 to 2, for every time a token was used before.")
    ] = None

    def given(self) -> dict[str, Any]:
        """The flags that were given, by the names of ``toolkit.chat.settings``."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in found.items() if value not in (None, [])}


@dataclass
class AnswerFlags(DrawingFlags):
    """The same, and how long an answer is."""

    max_new_tokens: Annotated[int | None, _flag("--max-new-tokens", help="Longest answer. Default: 512.")] = None
    min_new_tokens: Annotated[int | None, _flag("--min-new-tokens", help="Shortest answer.")] = None
    seed: Annotated[int | None, _flag("--seed", help="The same seed draws the same answer.")] = None
    stop: Annotated[list[str] | None, _flag("--stop", help="Text that ends the answer; repeatable.")] = None
    ignore_eos: Annotated[bool | None, _flag("--ignore-eos", help="Go on where the model would end its answer.")] = None


@dataclass
class LoadFlags(DrawingFlags):
    """The same for load that is measured, greedy unless told otherwise."""

    do_sample: Annotated[
        bool | None, _flag("--do-sample/--greedy", help="Draw tokens, or take the likeliest. Default: greedy.")
    ] = None


with_answer_flags = with_flags("sampling", AnswerFlags)
with_load_flags = with_flags("sampling", LoadFlags)
