"""``tool profile``: how fast a model is in the engine, and a server over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.base.progress import Progress
from toolkit.commands.app.groups import new_app
from toolkit.commands.options import EngineFlags, with_engine_flags, with_flags
from toolkit.commands.output import say, show_engine, stdout, table, write_json
from toolkit.commands.profile_server import api_server
from toolkit.commands.sampling_options import SamplingFlags, with_load_flags
from toolkit.errors import UsageError
from toolkit.profile.options import Grid, Load, Texts, Traced

if TYPE_CHECKING:
    from toolkit.engine.process.frontend import AsyncEngine
    from toolkit.messages import GenerationConfig

app = new_app(no_args_is_help=True)

MODEL = Annotated[str, typer.Argument(help="Local directory, hub id, .gguf file, artifact, or demo.")]
IMAGES = ("total_images", "image_throughput")
JSON = Annotated[
    str | None, typer.Option("--json", help="Write the figures as JSON to this file (- = standard output).")
]
PLOT = Annotated[Path | None, typer.Option(help="Draw the figures into this .png file.")]


@app.callback()
def group() -> None:
    """Measure speed: throughput under load, latency at fixed batch sizes, embeddings, or a server over HTTP.

    The prefix cache is off unless --enable-prefix-caching asks for it.
    """


class Watch:
    """Progress on standard error: first that the model loads, then the requests done."""

    def __init__(self, model: str, total: int) -> None:
        self.progress = Progress()
        self.console = self.progress.console
        self.model, self.done, self.total = model, 0, total
        self.progress.update(f"loading {model}")

    def start(self, engine: AsyncEngine) -> None:
        show_engine(self.console, engine)
        self.progress.update("requests", 0, self.total)

    def advance(self, record: object) -> None:
        self.done += 1
        self.progress.update("requests", self.done, self.total)

    def run(self, measure: Callable[..., Any], wish: object, engine: EngineFlags, config: Any, **more: Any) -> Any:
        """What ``measure`` of ``toolkit.profile`` finds."""
        with self.progress:
            return measure(
                self.model,
                wish,
                engine_config=config,
                packed=engine.packed(config, lambda line: say(line, self.console)),
                progress=self.progress.update,
                on_start=self.start,
                on_done=self.advance,
                **more,
            )


def _config(engine: EngineFlags) -> Any:
    """The engine config; the prefix cache only where the command line asks for it."""
    engine.check_unused_template("prompts are measured as they are")
    engine.enable_prefix_caching = engine.prefix_caching(default=False)
    engine.no_enable_prefix_caching = not engine.enable_prefix_caching
    if engine.speculative is None and not (engine.speculative_algorithm or engine.speculative_draft_model):
        engine.speculative = "off"  # answers to random prompts repeat themselves: guesses would be too good
    return engine.config()


def _drawing(sampling: SamplingFlags) -> GenerationConfig:
    """How tokens are drawn; greedily where no flag asks for more."""
    from toolkit.chat import settings

    return settings.change(settings.GREEDY, **sampling.given())


@app.command("throughput")
@with_engine_flags
@with_load_flags
@with_flags("load", Load)
def throughput(
    model: MODEL,
    engine: EngineFlags,
    sampling: SamplingFlags,
    load: Load,
    old_model: Annotated[str | None, typer.Argument(hidden=True)] = None,
    json_file: JSON = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Append the figures as a row to this file.")] = None,
    plot: PLOT = None,
) -> None:
    """Send many requests and report throughput and latencies.

    Example: tool profile throughput demo --num-prompts 64 --concurrency 16 --json result.json
    """
    if old_model is not None:  # LMDeploy's profile_throughput.py DATASET MODEL
        raise UsageError(
            f"found {model} and {old_model}, expected the model alone; "
            f"write: tool profile throughput {old_model} --dataset {model}"
        )
    config = _config(engine)
    from toolkit.artifacts.output import result_file
    from toolkit.profile import throughput as runner
    from toolkit.profile.metrics import throughput_summary

    columns = ["model", "concurrency", *throughput_summary([], 1.0, load.images)]
    result_file.check_json("--json", json_file, list(throughput_summary([], 1.0)))
    result_file.check_csv("--csv", csv_file, columns)
    result_file.check_plot("--plot", plot)
    load = replace(load, sampling=_drawing(sampling))
    watch, guesses = Watch(model, load.num_prompts), dict[str, Any]()
    result = watch.run(runner.measure, load, engine, config, on_end=guesses.update)
    if failed := len(result.records) - int(result.summary["completed"]):
        watch.console.print(f"{failed} of {len(result.records)} requests failed; they count in no figure")
    write_json(json_file, result.summary | ({"speculation": guesses} if guesses else {}))
    if csv_file is not None:
        result_file.append_csv("--csv", csv_file, {"model": model, "concurrency": load.concurrency, **result.summary})
    if plot is not None:
        from toolkit.profile.plot import plot_latencies

        plot_latencies(result.records, f"{model}, {load.num_prompts} requests, {load.concurrency} at once", plot)
    if json_file != "-":
        _print_throughput(model, result.summary)
        _print_guesses(guesses)


def _print_throughput(model: str, summary: dict[str, float | int]) -> None:
    out = stdout()
    from toolkit.profile.labels import LABELS, LATENCY_LABELS, latency_label

    keys = [
        *("completed", "duration", "total_input_tokens", "total_output_tokens", *IMAGES),
        *("request_throughput", "input_throughput", "output_throughput"),
    ]
    rows = [(LABELS[key], summary[key]) for key in keys if key in summary]
    out.print(table(f"Throughput of {model}", ("", "value"), rows))
    latencies = [
        (latency_label(name), *(summary[f"{statistic}_{name}_ms"] for statistic in ("mean", "median", "p99")))
        for name in LATENCY_LABELS
    ]
    out.print(table("Latency", ("", "Mean", "Median", "P99"), latencies))


def _print_guesses(guesses: dict[str, Any]) -> None:
    """What came of them, if any were made."""
    if not guesses:
        return
    places = guesses["acceptance_by_position"]
    rows: list[tuple[str, Any]] = [
        ("Drafts verified", guesses["drafts"]),
        ("Draft tokens", guesses["draft_tokens"]),
        ("Draft tokens accepted (%)", 100 * guesses["acceptance_rate"]),
        ("Tokens per step with a draft", guesses["tokens_per_step"]),
        *(
            (f"Draft tokens of {name} accepted (%)", 100 * count["accepted"] / max(1, count["tokens"]))
            for name, count in guesses["by_method"].items()
        ),
        *((f"Drafts with {i} or more tokens accepted (%)", 100 * share) for i, share in enumerate(places, start=1)),
    ]
    stdout().print(table("Speculation", ("", "value"), rows))


app.command("api_server")(api_server)
app.command("restful_api", hidden=True)(api_server)


@app.command("generation")
@with_engine_flags
@with_load_flags
@with_flags("grid", Grid)
def generation(
    model: MODEL,
    engine: EngineFlags,
    sampling: SamplingFlags,
    grid: Grid,
    json_file: JSON = None,
    plot: PLOT = None,
) -> None:
    """Generate at fixed batch sizes and report prefill and decode speed, token latencies and peak memory.

    Memory of GPUs is all that is in use on those of this machine, by whatever process: let nothing else run there.

    Example: tool profile generation demo --concurrency 1,8 --prompt-tokens 128 --json -
    """
    config = _config(engine)
    from toolkit.artifacts.output import result_file

    result_file.check_json("--json", json_file, ("concurrency", "prefill_throughput", "decode_throughput"))
    result_file.check_plot("--plot", plot)
    from toolkit.profile import generation as runner

    grid = replace(grid, sampling=_drawing(sampling))
    watch, guesses = Watch(model, sum(grid.concurrency) * grid.rounds), dict[str, Any]()
    rows = watch.run(runner.measure, grid, engine, config, on_end=guesses.update)
    write_json(json_file, rows)
    if plot is not None:
        from toolkit.profile.plot import plot_generation

        plot_generation(rows, f"{model}, {grid.prompt_tokens} tokens in, {grid.completion_tokens} out", plot)
    if json_file != "-":
        _print_generation(model, rows)
        _print_guesses(guesses)


@app.command("embeddings")
@with_engine_flags
@with_flags("texts", Texts)
def embeddings(model: MODEL, engine: EngineFlags, texts: Texts, json_file: JSON = None) -> None:
    """Turn texts into vectors at fixed batch sizes and report texts and tokens a second, latencies and peak memory.

    Example: tool profile embeddings bge-m3 --concurrency 1,32 --prompt-tokens 256 --json -
    """
    config = _config(engine)
    from toolkit.artifacts.output import result_file

    result_file.check_json("--json", json_file, ("concurrency", "request_throughput", "input_throughput"))
    from toolkit.profile import embeddings as runner

    rows = Watch(model, sum(texts.concurrency) * texts.rounds).run(runner.measure, texts, engine, config)
    write_json(json_file, rows)
    if json_file != "-":
        _print_embeddings(model, rows)


@app.command("ranks")
@with_engine_flags
@with_load_flags
@with_flags("wish", Traced)
def ranks(
    model: MODEL,
    engine: EngineFlags,
    sampling: SamplingFlags,
    wish: Traced,
    json_file: JSON = None,
    plot: PLOT = None,
) -> None:
    """Where the time of a model's ranks goes (--tp, --pp, --dp): computing, or messages to each other.

    --plot draws two steps: a prompt's end is past, one token of each request follows another.

    Example: tool profile ranks demo --tp 2 --plot ranks.png
    """
    config = _config(engine)
    from toolkit.artifacts.output import result_file

    result_file.check_json("--json", json_file, ("rank", "step_seconds", "message_seconds"))
    result_file.check_plot("--plot", plot)
    from toolkit.profile import ranks as runner

    wish = replace(wish, sampling=_drawing(sampling))
    found = Watch(model, wish.concurrency).run(runner.measure, wish, engine, config)
    write_json(json_file, found.rows)
    if plot is not None:
        from toolkit.profile.plot import plot_ranks

        plot_ranks(runner.timeline(found.events), f"{model}, {len(found.rows)} ranks: two steps", plot)
    if json_file != "-":
        _print_ranks(model, found.rows)


def _print_ranks(model: str, rows: list[dict[str, Any]]) -> None:
    """One line a rank and kind of message."""
    lines = []
    for row in rows:
        kinds = row["messages"] or {"none": {"messages": 0, "bytes": 0, "seconds": 0.0}}
        for i, (name, kind) in enumerate(kinds.items()):
            share = 100 * kind["seconds"] / max(row["step_seconds"], 1e-9)
            head = (row["rank"], row["steps"], row["step_seconds"]) if i == 0 else ("", "", "")
            each = kind["messages"] / max(row["steps"], 1)
            lines.append(
                (*head, name, each, kind["bytes"] / max(row["steps"], 1) / 1024, kind["seconds"], f"{share:.0f} %")
            )
    columns = ("rank", "steps", "seconds", "message", "a step", "KiB a step", "seconds in it", "of steps")
    stdout().print(table(f"Ranks of {model}", columns, lines))


def _by_size(title: str, rows: list[dict[str, Any]], lines: list[tuple[str, list[Any]]]) -> None:
    """One column a batch size: a row each would be wider than a terminal."""
    columns = ["", *(f"{row['concurrency']} at once" for row in rows)]
    stdout().print(table(title, columns, [(name, *values) for name, values in lines]))


def _print_embeddings(model: str, rows: list[dict[str, Any]]) -> None:
    from toolkit.profile.labels import LABELS, latency_label

    lines = [
        *((LABELS[key], [row[key] for row in rows]) for key in ("request_throughput", "input_throughput")),
        *((latency_label("e2e_latency", key), [row["e2e_latency_ms"][key] for row in rows]) for key in ("p50", "p99")),
        (f"Peak memory of {rows[0]['peak_memory_of']} (MiB)", [row["peak_memory_mib"] for row in rows]),
    ]
    first = rows[0]
    _by_size(f"Embeddings by {model}: {first['prompt_tokens']} tokens to {first['dimensions']} numbers", rows, lines)


def _print_generation(model: str, rows: list[dict[str, Any]]) -> None:
    from toolkit.profile.labels import LABELS, latency_label
    from toolkit.profile.memory import GPUS

    first, each = "first_token_latency_ms", "token_latency_ms"
    speeds = ("prefill_throughput", "decode_throughput", "output_throughput")
    of = rows[0]["peak_memory_of"]
    lines = [
        *((LABELS[key], [row[key] for row in rows]) for key in speeds),
        (latency_label("ttft", "mean"), [row[first]["ave"] for row in rows]),
        (latency_label("ttft", "max"), [row[first]["max"] for row in rows]),
        *((latency_label("itl", key), [row[each][key] for row in rows]) for key in ("p50", "p75", "p95", "p99")),
        (f"Peak memory of {of} (MiB)", [row["peak_memory_mib"] for row in rows]),
    ]
    _by_size(
        f"Generation by {model}: {rows[0]['prompt_tokens']} tokens in, {rows[0]['completion_tokens']} out", rows, lines
    )
    if of == GPUS:
        stdout().print("Memory of GPUs is that of all processes on this machine; let nothing else run there.")
