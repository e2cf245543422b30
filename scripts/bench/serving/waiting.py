"""How long tokens of running streams wait while long prompts arrive, for several target times of a step in turn.

    python scripts/bench/serving/waiting.py MODEL --targets default,150,0

A row a target: gaps between the streams' tokens without and with prompts, what the prompts waited for their first
token, and tokens computed a second of both kinds together. Streams begin anew until the prompts have their answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.native import need_native

from toolkit.commands.output import stderr, stdout, table
from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.engine.process.frontend import AsyncEngine
from toolkit.messages import GenerationConfig
from toolkit.profile.load import run_all, run_one
from toolkit.profile.metrics import RequestRecord, completed
from toolkit.profile.workload import Ask, random_asks


async def keep_writing(engine: AsyncEngine, ask: Ask, name: str, prompts: asyncio.Task[Any]) -> list[RequestRecord]:
    """One answer after another, until the prompts have theirs."""
    records: list[RequestRecord] = []
    while not records or not prompts.done():
        records.append(await run_one(engine, ask, f"{name}-{len(records)}", GenerationConfig()))
    return records


async def load(engine: AsyncEngine, args: argparse.Namespace) -> tuple[list[RequestRecord], list[RequestRecord]]:
    """Records of the streams and of the prompts that arrive beside them, one every ``args.every`` seconds."""
    streams = random_asks(1, engine.tokenizer, args.streams, 32, args.stream_tokens)
    prompts = random_asks(2, engine.tokenizer, args.prompts, args.prompt_len, 8)
    await run_all(engine, random_asks(3, engine.tokenizer, 1, 16, 4), name="warm-up")
    starts = [args.first + i * args.every for i in range(len(prompts))]
    arriving = asyncio.create_task(run_all(engine, prompts, starts=starts, name="prompt"))
    writing = (keep_writing(engine, ask, f"stream-{i}", arriving) for i, ask in enumerate(streams))
    records = [record for stream in await asyncio.gather(*writing) for record in stream]
    return completed(records), completed((await arriving)[0])


def figures(streams: list[RequestRecord], prompts: list[RequestRecord]) -> dict[str, float]:
    """Milliseconds and tokens a second, by the engine's own times."""
    begin = min(r.start for r in prompts)
    end = max(r.in_engine().arrivals[0][0] for r in prompts)
    quiet, beside, tokens = [], [], sum(r.input_tokens for r in prompts)
    for record in streams:
        times = np.array([t for t, _ in record.in_engine().arrivals])
        gaps = np.diff(times) * 1000
        busy = (times[1:] > begin) & (times[:-1] < end)
        quiet += gaps[~busy].tolist()
        beside += gaps[busy].tolist()
        tokens += int(((times > begin) & (times < end)).sum())
    waits = [r.in_engine().ttft for r in prompts]
    return {
        "gap alone, p50": float(np.median(quiet)),
        "gap beside prompts, p50": float(np.median(beside)),
        "gap beside prompts, p99": float(np.percentile(beside, 99)),
        "longest gap": float(max(beside)),
        "prompt's first token, s": float(np.mean(waits)),
        "tokens/s": tokens / (end - begin),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--targets", default="default,150,0", help="of target_step_ms, separated by commas")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--stream-tokens", type=int, default=800)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-len", type=int, default=4000)
    parser.add_argument("--session-len", type=int, help="for prompts beyond the model's own length")
    parser.add_argument("--first", type=float, default=1.0, help="seconds before the first prompt arrives")
    parser.add_argument("--every", type=float, default=5.0, help="seconds from one prompt to the next")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    need_native()
    rows: dict[str, dict[str, Any]] = {}
    for target in args.targets.split(","):
        told = None if target == "default" else float(target)
        config = TurbomindEngineConfig(
            target_step_ms=told,
            enable_prefix_caching=False,
            session_len=args.session_len,
            speculative="off",  # tokens of a guess come together: their gaps are 0
            speculative_shared="off",
        )
        engine = AsyncEngine.open(args.model, backend_config=config, process=True)
        try:
            rows[target] = figures(*asyncio.run(load(engine, args)))
        finally:
            engine.close()
        stderr().print(f"target {target} ms: p99 {rows[target]['gap beside prompts, p99']:.0f} ms")
    names = list(next(iter(rows.values())))
    stdout().print(table("Milliseconds", ("target_step_ms", *names), [(t, *r.values()) for t, r in rows.items()]))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
