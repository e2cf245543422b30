"""``tool eval``: measure quality."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from toolkit.commands.groups import Group
from toolkit.commands.options import EngineFlags, with_engine_flags
from toolkit.commands.output import stderr, stdout, table, write_json
from toolkit.progress import Progress

DATA = "A text file (UTF-8), or `heldout`: the text that `tool lite` measures on."

app = typer.Typer(
    cls=Group,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Measure the quality of a model.",
)


@app.command("ppl")
@with_engine_flags
def ppl(
    model: Annotated[str, typer.Argument(help="A directory, a hub id, a .gguf file, an artifact, or `demo`.")],
    engine: EngineFlags,
    data: Annotated[Path, typer.Option("--data", help=DATA)],
    window: Annotated[int, typer.Option("--window", help="Tokens that the model sees at once.")] = 1024,
    stride: Annotated[int, typer.Option("--stride", help="Tokens from one window to the next.")] = 512,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Take so many tokens from the start of the text.  [default: all]")
    ] = None,
    json: Annotated[
        str | None, typer.Option("--json", help="Write the figures to this file (- is standard output).")
    ] = None,
) -> None:
    """Perplexity on a text, each token scored once; the torch runner in float32 unless flags say otherwise.

    What `tool lite` measured is measured again by: --data heldout --window 1024 --stride 1024

    Example: tool eval ppl demo --data book.txt
    """
    from toolkit.artifacts.result_file import check_json
    from toolkit.eval.perplexity import perplexity

    check_json("--json", json, ("perplexity", "tokens", "stride"))
    engine.check_unused_template("perplexity takes the text as it is")
    if engine.backend is None:
        engine.backend = "pytorch"
    if engine.dtype == "auto" and engine.backend == "pytorch":
        engine.dtype = "float32"
    config = engine.config()
    with Progress() as bar:
        found = perplexity(
            model,
            data,
            window=window,
            stride=stride,
            max_tokens=max_tokens,
            config=config,
            packed=engine.packed(config, lambda line: stderr().print(line, markup=False, soft_wrap=True)),
            progress=partial(bar.update, "scoring"),
        )
    if json != "-":
        stdout().print(table("Perplexity", ("", "value"), [(k, v) for k, v in found.items()]))
    write_json(json, found)


@app.command("compare")
def compare(
    model_a: Annotated[str, typer.Argument(metavar="A", help="The original: a directory, hub id, .gguf file, `demo`.")],
    model_b: Annotated[str, typer.Argument(metavar="B", help="What was made of it.")],
    data: Annotated[Path, typer.Option("--data", help=DATA)],
    window: Annotated[int, typer.Option("--window", help="Tokens that the models see at once.")] = 512,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="Activations: float32, bfloat16, float16.")] = "float32",
    json: Annotated[
        str | None, typer.Option("--json", help="Write the figures to this file (- is standard output).")
    ] = None,
) -> None:
    """How far B is from A: perplexity of both, KL divergence with its standard error, agreement on the best token.

    Example: tool eval compare demo demo-awq --data book.txt
    """
    from toolkit.artifacts.result_file import check_json
    from toolkit.eval.compare import compare as measure
    from toolkit.runners.base import RunnerOptions

    check_json("--json", json, ("perplexity_a", "perplexity_b"))
    with Progress() as bar:
        found = measure(
            model_a,
            model_b,
            data,
            window=window,
            options=RunnerOptions(device=device, dtype=dtype),
            progress=partial(bar.update, "comparing"),
        )
    if json != "-":
        stdout().print(table("Comparison", ("", "value"), [(k, v) for k, v in found.items()]))
    write_json(json, found)
