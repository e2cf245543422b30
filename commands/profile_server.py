"""``tool profile api_server``: load on a server over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.progress import Progress
from toolkit.commands.options import json_object, with_flags
from toolkit.commands.output import say, stdout, table, write_json
from toolkit.commands.sampling_options import SamplingFlags, with_load_flags
from toolkit.errors import UsageError
from toolkit.profile.options import Traffic

if TYPE_CHECKING:
    from toolkit.profile.http_client import Client
    from toolkit.profile.serving import Run

CHAT = ("openai-chat", "vllm-chat", "lmdeploy-chat", "sglang-oai-chat")  # --backend of other load clients
COMPLETIONS = ("openai", "vllm", "lmdeploy", "sglang-oai", "sglang")
LIMIT_NAMES = {"e2el": "e2e_latency"}  # as vLLM calls them


@dataclass(frozen=True)
class Results:
    """Where figures go besides the table: a JSON file (- = standard output, and no table), a CSV file, a picture."""

    json: str | None
    csv: Path | None
    plot: Path | None

    def check(self, columns: list[str]) -> None:
        """Raise UsageError where rows of ``columns`` cannot be written there."""
        from toolkit.artifacts.output import result_file

        result_file.check_json("--json", self.json, columns[:3])  # later ones depend on what is measured
        result_file.check_csv("--csv", self.csv, ["target", *columns])
        result_file.check_plot("--plot", self.plot)

    def write(self, found: list[Run], model: str | None, target: str, traffic: Traffic, progress: Progress) -> None:
        from toolkit.artifacts.output.result_file import append_csv

        rows = [run.row for run in found]
        if failed := sum(row["failed"] for row in rows):
            first = next(record.error for run in found for record in run.records if record.error)
            say(f"{failed} requests failed and count in no figure; the first one said: {first}", progress.console)
        write_json(self.json, rows)
        if self.csv is not None:
            append_csv("--csv", self.csv, *({"target": target, **row} for row in rows))
        if self.plot is not None:
            _plot(found, f"{model} at {target}, {traffic.num_prompts} requests", self.plot)
        if self.json != "-":
            _print(f"{model} at {target}", traffic, rows)


@with_load_flags
@with_flags("traffic", Traffic)
def api_server(
    sampling: SamplingFlags,
    traffic: Traffic,
    target: Annotated[
        str | None, typer.Argument(metavar="URL|MODEL", help="A server's address, or a model to serve meanwhile.")
    ] = None,
    base_url: Annotated[str | None, typer.Option(help="The server's address, in place of the argument.")] = None,
    model: Annotated[str | None, typer.Option(help="Which of its models. Default: the first.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="completions or chat. Default: completions, for drawings chat.")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="The same, as vLLM's and SGLang's clients name it.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Model whose tokenizer measures prompts. Default: a word is a token.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key that the server asks for.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Over HTTPS, whatever certificate the server has.")
    ] = False,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="<str>", help="NAME:MS, what a request may take to count: ttft, tpot, itl, e2el; repeatable."
        ),
    ] = None,
    no_ignore_eos: Annotated[
        bool, typer.Option("--no-ignore-eos", help="Let the model end its answers. Default: they go on.")
    ] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", hidden=True)] = True,  # of vLLM's client: our default
    extra_body: Annotated[
        str | None,
        typer.Option(help="JSON object of fields for every request."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, metavar="<float>", help="Seconds of silence after which a request failed.")
    ] = 600.0,
    json_file: Annotated[
        str | None,
        typer.Option("--json", help="Write a row a run as JSON to this file (- = standard output)."),
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Append a row a run to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the figures into this .png file.")] = None,
) -> None:
    """Send requests to any server of OpenAI's API and report throughput and latencies.

    Several rates or concurrencies make a run each.

    Example: tool profile api_server demo --num-prompts 16 --concurrency 1,8 --goodput ttft:500
    """
    from toolkit.profile.http_client import Client
    from toolkit.profile.serving import check_endpoint
    from toolkit.profile.serving import columns as row_names

    if (target is None) == (base_url is None):
        raise UsageError("URL|MODEL: expected a server's address or a model, or --base-url")
    target = target or base_url or ""
    remote = target.startswith(("http://", "https://"))
    limits, words = _limits(goodput or []), _tokenizer(tokenizer or (None if remote else target))
    traffic = replace(traffic, limits=limits, tokenizer=words)
    traffic.check()
    extra = _fields(sampling, extra_body, ends=not ignore_eos or no_ignore_eos)
    api = _endpoint(endpoint, backend, drawings=traffic.images > 0)
    check_endpoint(traffic, api)
    results = Results(json_file, csv_file, plot)
    results.check(row_names(traffic))
    progress = Progress()
    with progress, _served(target, remote, progress) as url:
        client = Client(url, model, api, api_key, extra, timeout, insecure)
        found = _measured(client, traffic, progress)
    results.write(found, client.model, target, traffic, progress)


@contextlib.contextmanager
def _served(target: str, remote: bool, progress: Progress) -> Iterator[str]:
    """The address of the server to measure; of one that is started for it, where ``target`` is a model."""
    if remote:
        yield target
        return
    from toolkit.serve.background import serve

    progress.update(f"loading {target}")
    with serve(target, server_port=0) as server:
        yield server.url


def _measured(client: Client, traffic: Traffic, progress: Progress) -> list[Run]:
    """A run for every rate and concurrency."""
    from toolkit.profile.serving import measure

    done, total = 0, traffic.num_prompts * len(traffic.request_rate) * max(len(traffic.concurrency), 1)

    def advance(record: object) -> None:
        nonlocal done
        done += 1
        progress.update("requests", done, total)

    return asyncio.run(measure(client, traffic, on_done=advance))


def _fields(sampling: SamplingFlags, extra_body: str | None, *, ends: bool) -> dict[str, Any]:
    """What every request has besides its prompt. ``ends``: the model may end its answers."""
    from toolkit.chat import settings

    more = {} if extra_body is None else json_object("--extra-body", extra_body)
    given = sampling.given()
    drawn = settings.change(settings.GREEDY, **given)  # as the other profiles draw
    given["temperature"] = 0.0 if drawn.greedy else drawn.temperature
    given.pop("do_sample", None)  # no field of a request
    return {**({} if ends else {"ignore_eos": True}), **given, **more}


def _endpoint(endpoint: str | None, backend: str | None, *, drawings: bool) -> Any:
    known = {"completions": "completions", "chat": "chat", **dict.fromkeys(CHAT, "chat")}
    known |= dict.fromkeys(COMPLETIONS, "completions")
    found = {}
    for option, given in (("--endpoint", endpoint), ("--backend", backend)):
        name = (given or "").removeprefix("/v1/").replace("chat/completions", "chat")
        if given is not None and name not in known:
            raise UsageError(f"{option}: expected completions or chat, found {given!r}")
        if given is not None:
            found[known[name]] = f"{option} {given}"
    if len(found) > 1:
        raise UsageError(f"expected one endpoint, found {' and '.join(found.values())}; leave one out")
    return next(iter(found), "chat" if drawings else "completions")


def _limits(entries: list[str]) -> dict[str, float] | None:
    found = {}
    for entry in (part for text in entries for part in text.split(",")):
        name, _, value = entry.partition(":")
        try:
            found[LIMIT_NAMES.get(name, name)] = float(value)
        except ValueError:
            raise UsageError(f"--goodput: expected NAME:MILLISECONDS such as ttft:500, found {entry!r}") from None
    return found or None


def _tokenizer(model: str | None) -> Any:
    if model is None:
        return None
    from toolkit.artifacts.text.tokenizer import Tokenizer
    from toolkit.engine.load.setup import find

    return Tokenizer.open(find(model, None, None).tokenizer_dir)


def _plot(runs: list[Run], title: str, file: Path) -> None:
    from toolkit.profile.plot import plot_latencies, plot_sweep

    if len(runs) == 1:
        plot_latencies(runs[0].records, title, file)
    else:
        plot_sweep([run.row for run in runs], title, file)


def _print(title: str, traffic: Traffic, rows: list[dict[str, Any]]) -> None:
    """One column a run."""

    def told(value: float | None) -> str:
        return "no limit" if value is None else f"{value:g}"

    from toolkit.profile.labels import LABELS, LATENCY_LABELS, latency_label

    lines: list[tuple[Any, ...]] = [
        (LABELS[key], *(told(row[key]) for row in rows)) for key in ("request_rate", "max_concurrency")
    ]
    figures = ["completed", "failed", "duration", "request_throughput", "input_throughput", "output_throughput"]
    figures += ["total_images", "image_throughput"] if traffic.images else []
    figures += ["goodput"] if traffic.limits else []
    keys = {key: LABELS[key] for key in figures}
    for name in LATENCY_LABELS:
        for statistic in ("mean", *(f"p{percent:g}" for percent in traffic.metric_percentiles)):
            keys[f"{statistic}_{name}_ms"] = latency_label(name, statistic)
    lines += [(label, *(row[key] for row in rows)) for key, label in keys.items()]
    stdout().print(table(title, ["", *(f"run {i + 1}" for i in range(len(rows)))], lines))
