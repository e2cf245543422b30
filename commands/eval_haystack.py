"""``tool eval passkey`` and ``tool eval needle``: what is found again in a long text."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.progress import Progress
from toolkit.base.user_path import user_path
from toolkit.commands.options import EngineFlags, with_engine_flags, with_flags
from toolkit.commands.output import say, stdout, table, write_json
from toolkit.configs.option import option
from toolkit.errors import ToolkitError, UsageError

if TYPE_CHECKING:
    from toolkit.configs.engine import EngineConfig
    from toolkit.eval.haystack import Grid, Kind
    from toolkit.pipeline.pipeline import Pipeline
    from toolkit.pipeline.prompts import Prompt

MODEL = "A directory, a hub id, a .gguf file, an artifact, or `demo`."


@dataclass(frozen=True)
class Haystack:
    lengths: tuple[int, ...] = option(
        (1000, 2000, 4000), "Tokens of prompt, template and answer together, separated by commas."
    )
    depths: tuple[float, ...] = option(
        (0, 25, 50, 75, 100), "Percent of the text before what is hidden, separated by commas."
    )
    rounds: int = option(1, "Questions of each length and depth.")
    seed: int = option(0, "Other questions with another one.")
    plot: str | None = option(None, "Draw a heat map into this PNG file.")
    json: str | None = option(None, "Write the figures to this file (- is standard output).")

    def grid(self) -> Grid:
        from toolkit.eval.haystack import Grid

        lengths, depths = tuple(dict.fromkeys(self.lengths)), tuple(dict.fromkeys(self.depths))
        return Grid(lengths, depths, self.rounds, self.seed)


@with_engine_flags
@with_flags("haystack", Haystack)
def passkey(model: Annotated[str, typer.Argument(help=MODEL)], engine: EngineFlags, haystack: Haystack) -> None:
    """Is a number found again between sentences that say nothing? By length and depth, as LMDeploy's script asks.

    Example: tool eval passkey demo --lengths 1000,2000
    """
    _run("passkey", model, engine, haystack)


@with_engine_flags
@with_flags("haystack", Haystack)
def needle(
    model: Annotated[str, typer.Argument(help=MODEL)],
    engine: EngineFlags,
    haystack: Haystack,
    data: Annotated[
        Path, typer.Option("--data", help="The haystack, a text file; `heldout`: the book that comes with it.")
    ] = Path("heldout"),
) -> None:
    """Is a sentence found again in a book? By length and depth, scored as OpenCompass's NeedleBench does.

    Example: tool eval needle demo --lengths 1000,2000
    """
    from toolkit.measure.text import read_text

    _run("needle", model, engine, haystack, read_text(user_path(data)))


def _run(kind: Kind, model: str, engine: EngineFlags, haystack: Haystack, text: str = "") -> None:
    from toolkit.artifacts.output.result_file import check_json, check_plot
    from toolkit.eval.haystack import Asked, search

    check_json("--json", haystack.json, ("length", "depth", "score"))
    check_plot("--plot", haystack.plot)
    grid, config = haystack.grid(), engine.config()
    longest = max(grid.lengths)
    if config.session_len is None:
        config.session_len = longest
    elif config.session_len < longest:
        raise UsageError(f"--session-len {config.session_len}: expected {longest}, the longest of --lengths, or more")
    if config.max_batch_size is None:
        config.max_batch_size = min(grid.rounds, 8)
    rows = []
    with opened(model, engine, config) as pipe, Progress() as bar:
        for row in search(kind, Asked(pipe.tokenizer.encode, partial(answered, pipe)), grid, text):
            rows.append(row)
            bar.update(f"{row['length']} tokens", len(rows), len(grid.cells))
    if haystack.json != "-":
        found = {(row["length"], row["depth"]): f"{row['score']:.0f}" for row in rows}
        cells = [(f"{d:g} %", *(found[length, d] for length in grid.lengths)) for d in grid.depths]
        mean = sum(row["score"] for row in rows) / len(rows)
        title = f"{kind}: score by depth and tokens, {mean:.1f} of 100 in the mean"
        stdout().print(table(title, ("depth", *(f"{length:,}" for length in grid.lengths)), cells))
    write_json(haystack.json, rows)
    if haystack.plot is not None:
        from toolkit.eval.heat_map import draw

        draw(rows, f"{kind}: {model}", Path(haystack.plot))


def opened(model: str, engine: EngineFlags, config: EngineConfig) -> Pipeline:
    """The model, with the first adapter of ``config``, that of ``engine``; what is to be said goes to stderr."""
    from toolkit.pipeline.pipeline import pipeline

    return pipeline(
        model,
        config,
        engine.chat_template,
        adapter_name=config.first_adapter,
        packed=engine.packed(config, say),
        progress=say,
    )


def answered(pipe: Pipeline, prompts: list[str], max_tokens: int) -> list[tuple[str, int]]:
    """What the model answers, greedily, and how many tokens each prompt had. Raises ToolkitError where it fails."""
    from toolkit.messages import GenerationConfig

    batch: list[Prompt] = [*prompts]
    replies = pipe.infer(batch, GenerationConfig(max_new_tokens=max_tokens, do_sample=False))
    for reply in replies:
        if reply.finish_reason == "error":
            raise ToolkitError(f"the model fails: {reply.error_message}")
        if reply.finish_reason == "length" and not reply.generate_token_len:  # no wrong answer, but none
            found, most = reply.input_token_len, pipe.engine.plan.session_len
            raise ToolkitError(f"a question has {found} tokens, a session {most}; use a larger --session-len")
    return [(reply.text, reply.input_token_len) for reply in replies]
