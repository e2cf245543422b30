"""``tool eval``: measure quality."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.progress import Progress
from toolkit.commands.app.groups import new_app
from toolkit.commands.eval_haystack import MODEL, answered, needle, opened, passkey
from toolkit.commands.options import EngineFlags, with_engine_flags, with_flags
from toolkit.commands.output import say, stdout, table, write_json
from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.configs.option import option, same_option
from toolkit.errors import UsageError

JSON = Annotated[str | None, typer.Option("--json", help="Write the figures to this file (- is standard output).")]
DATA = "A text file (UTF-8), or `heldout`: the text that `tool lite` measures on."

app = new_app(help="Measure the quality of a model.", no_args_is_help=True)


@app.command("ppl")
@with_engine_flags
def ppl(
    model: Annotated[str, typer.Argument(help=MODEL)],
    engine: EngineFlags,
    data: Annotated[Path, typer.Option("--data", help=DATA)],
    window: Annotated[int, typer.Option("--window", help="Tokens that the model sees at once.")] = 1024,
    stride: Annotated[
        int | None, typer.Option("--stride", help="Tokens from one window to the next. Default: half of --window.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", help="Take so many tokens from the start of the text. Default: all.")
    ] = None,
    reference: Annotated[
        bool, typer.Option("--reference", help="By torch in float32, whatever would serve the model here.")
    ] = False,
    json: JSON = None,
) -> None:
    """Perplexity on a text, each token scored once, by the runner that serves the model here.

    What `tool lite` measured is measured again by: --data heldout --window 1024 --stride 1024 --reference

    Example: tool eval ppl demo --data book.txt
    """
    from toolkit.artifacts.output.result_file import check_json
    from toolkit.measure.perplexity import perplexity

    check_json("--json", json, ("perplexity", "tokens", "stride"))
    engine.check_unused_template("perplexity takes the text as it is")
    if reference:
        if engine.backend == "turbomind" or engine.dtype not in ("auto", "float32"):
            raise UsageError("--reference: it is --backend pytorch --dtype float32; leave other ones out")
        engine.backend, engine.dtype = "pytorch", "float32"
    config = engine.config()
    with Progress() as bar:
        found = perplexity(
            model,
            data,
            window=window,
            stride=stride,
            max_tokens=max_tokens,
            config=config,
            packed=engine.packed(config, say),
            progress=partial(bar.update, "scoring"),
            tell=say,
        )
    if json != "-":
        stdout().print(table("Perplexity", ("", "value"), found.items()))
    write_json(json, found)


@dataclass(frozen=True)
class Place:
    device: str = same_option(TurbomindEngineConfig, "device")
    dtype: str = option("float32", "Activations: float32, bfloat16, float16.")


@app.command("compare")
@with_flags("place", Place)
def compare(
    place: Place,
    model_a: Annotated[str, typer.Argument(metavar="A", help="The original: a directory, hub id, .gguf file, `demo`.")],
    model_b: Annotated[str, typer.Argument(metavar="B", help="What was made of it.")],
    data: Annotated[Path, typer.Option("--data", help=DATA)],
    window: Annotated[int, typer.Option("--window", help="Tokens that the models see at once.")] = 512,
    json: JSON = None,
) -> None:
    """How far B is from A: perplexity of both, KL divergence with its standard error, agreement on the best token.

    Both are computed by torch, in float32 unless --dtype says otherwise, so that their weights alone differ.

    Example: tool eval compare demo demo-awq --data book.txt
    """
    from toolkit.artifacts.output.result_file import check_json
    from toolkit.measure.compare import compare as measure
    from toolkit.runners.base import RunnerOptions

    check_json("--json", json, ("perplexity_a", "perplexity_b"))
    with Progress() as bar:
        found = measure(
            model_a,
            model_b,
            data,
            window=window,
            options=RunnerOptions(device=place.device, dtype=place.dtype),
            progress=partial(bar.update, "comparing"),
        )
    if json != "-":
        stdout().print(table("Comparison", ("", "value"), found.items()))
    write_json(json, found)


@app.command("tasks")
@with_engine_flags
def tasks(
    model: Annotated[str, typer.Argument(help=MODEL)],
    engine: EngineFlags,
    names: Annotated[
        list[str] | None, typer.Option("--task", help="cloze, passkey, json_schema or tool_calls; repeatable.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Items of each task.")] = 100,
    json: JSON = None,
) -> None:
    """Four small tasks that need no network: a book's words, a number found again, JSON by a schema, function calls.

    Example: tool eval tasks demo --limit 20
    """
    from toolkit.artifacts.output.result_file import check_json
    from toolkit.eval.tasks import TASKS, Model, run_task

    check_json("--json", json, ("task", "items", "accuracy"))
    for name in names or ():
        if name not in TASKS:
            raise UsageError(f"--task {name}: expected one of {', '.join(TASKS)}")
    chosen = list(dict.fromkeys(names or TASKS))
    rows = []
    with opened(model, engine, engine.config()) as pipe, Progress() as bar:
        asked = Model(
            pipe.tokenizer.encode,
            lambda ids: pipe.engine.score(ids, pipe.adapter_name).tolist(),
            lambda prompts, most: [text for text, _ in answered(pipe, prompts, most)],
        )
        for name in chosen:
            tell = partial(bar.update, name, total=limit)
            rows.append(run_task(name, asked, limit, tell))
    if json != "-":
        cells = [(r["task"], r["accuracy"], r["stderr"], TASKS[r["task"]].about) for r in rows]
        stdout().print(table(f"{limit} items a task", ("task", "accuracy", "±", "what it asks for"), cells))
    write_json(json, rows)


app.command("passkey")(passkey)
app.command("needle")(needle)


@app.command("lm_eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def lm_eval(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model, which is served for as long, or the address of a server.")],
    tasks: Annotated[
        str, typer.Option("--tasks", help="lm-eval's tasks, separated by commas; ours are toolkit_cloze and so on.")
    ],
    chat: Annotated[
        bool, typer.Option("--chat", help="Through the chat template: for tasks whose answers are written.")
    ] = False,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Items of each task. Default: all.")] = None,
    model_format: Annotated[
        str | None, typer.Option("--model-format", help="hf, awq, gptq, w8a8, gguf or engine. Default: read.")
    ] = None,
) -> None:
    """lm-evaluation-harness on a model as it is served; it needs `pip install "lm-eval\\[api]"`.

    What follows these options goes to lm-eval as it is.

    Example: tool eval lm_eval demo --tasks toolkit_cloze --limit 20
    """
    from toolkit.eval.harness import check_installed, run_lm_eval
    from toolkit.serve.background import serve
    from toolkit.serve.client import APIClient

    check_installed()

    def run(client: APIClient) -> None:
        name = client.available_models[0]
        run_lm_eval(client.url, name, tasks.split(","), chat=chat, limit=limit, more=_theirs(context.args))

    if model.startswith(("http://", "https://")):
        run(APIClient(model.rstrip("/")))
        return
    with serve(model, backend_config=TurbomindEngineConfig(model_format=model_format), server_port=0) as server:
        run(server)


def _theirs(args: list[str]) -> list[str]:
    """Flags as lm-eval spells them, with underscores: all that is typed after ``tool`` has been given dashes."""
    return [re.sub(r"^--[a-z][a-z-]*", lambda name: "--" + name[0][2:].replace("-", "_"), arg) for arg in args]
