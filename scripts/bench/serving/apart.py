"""How long do running streams stand still while long prompts of others are computed? One server for both, two servers
that each do both, and two of which one computes prompts and one writes answers, on the same cores.

    python scripts/bench/serving/apart.py work/demo-engine --cores 2 --prompt 7900 --json apart.json

Named by docs/how-to/several-machines.md. Needs a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
from traffic.servers import Served, Server  # noqa: E402

WAYS = ("one server", "two servers", "apart")


@contextmanager
def proxy(nodes: list[Server], strategy: str, log: Path) -> Iterator[str]:
    words = ["proxy", "--server-port", "0", "--heartbeat", "1", "--serving-strategy", strategy]
    words += [word for node in nodes for word in ("--node", node.url)]
    with Served(words, log) as front:
        while not all(node["healthy"] for node in front.get("/nodes/status").values()):
            time.sleep(0.1)
        yield front.url


@contextmanager
def serving(way: str, model: str, cores: int, folder: Path) -> Iterator[str]:
    """The URL that clients ask."""
    common = ["--session-len", "8192", "--max-batch-size", "8", "--cache-max-entry-count", "400", "--model-name", "m"]
    half = [*common, "--threads", str(max(1, cores // 2))]
    with ExitStack() as stack:

        def start(name: str, flags: list[str]) -> Server:
            return stack.enter_context(Server(model, flags, folder / f"{way}-{name}.log"))

        if way == WAYS[0]:
            yield start("a", [*common, "--threads", str(cores)]).url
            return
        roles = (["--role", "prefill"], ["--role", "decode"]) if way == WAYS[2] else ([], [])
        nodes = [start(name, [*half, *role]) for name, role in zip("ab", roles, strict=True)]
        strategy = "DistServe" if way == WAYS[2] else "Hybrid"
        yield stack.enter_context(proxy(nodes, strategy, folder / f"{way}-proxy.log"))


async def measure(url: str, args: argparse.Namespace) -> dict[str, Any]:
    gaps: list[float] = []
    first: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False) as http:
        stop = asyncio.Event()

        async def stream(number: int) -> None:
            """One short question after the other."""
            turn = 0
            while not stop.is_set():
                turn += 1
                body = {"model": "m", "prompt": f"{number} {turn} once", "max_tokens": 400, "temperature": 0}
                await told(http, body | {"ignore_eos": True, "stream": True}, gaps, stop)

        async def long(number: int) -> None:
            draw = random.Random(number)
            prompt = [draw.randrange(1000, 40000) for _ in range(args.prompt)]
            body = {"model": "m", "prompt": prompt, "max_tokens": 16, "temperature": 0, "stream": True}
            began = time.monotonic()
            await told(http, body, [], None, first, began)

        streams = [asyncio.create_task(stream(number)) for number in range(args.streams)]
        await asyncio.sleep(3)
        gaps.clear()
        for number in range(args.count):
            await long(number)
        stop.set()
        await asyncio.gather(*streams)
    cut = statistics.quantiles(gaps, n=100)
    return {
        "gaps_s": gaps,
        "tokens": len(gaps),
        "p50_ms": round(1000 * cut[49], 1),
        "p99_ms": round(1000 * cut[98], 1),
        "longest_ms": round(1000 * max(gaps), 1),
        "ttft_s": [round(seconds, 2) for seconds in first],
    }


async def told(
    http: httpx.AsyncClient,
    body: dict[str, Any],
    gaps: list[float],
    stop: asyncio.Event | None,
    first: list[float] | None = None,
    began: float = 0.0,
) -> None:
    """Seconds between events; until ``stop``."""
    last = None
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            raise SystemExit(f"{reply.status_code}: {(await reply.aread()).decode()[:500]}")
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.monotonic()
            if last is None and first is not None:
                first.append(now - began)
            if last is not None:
                gaps.append(now - last)
            last = now
            if stop is not None and stop.is_set():
                return


def draw(found: dict[str, Any], file: str, title: str) -> None:
    """Of all gaps the share that is longer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    for way, told in found.items():
        gaps = sorted(told["gaps_s"])
        axes.step([1000 * gap for gap in gaps], [1 - i / len(gaps) for i in range(len(gaps))], label=way, where="post")
    axes.axhline(0.01, color="grey", linewidth=0.7)
    axes.set(
        xscale="log", yscale="log", xlabel="ms between two tokens of a running stream", ylabel="share that is longer"
    )
    axes.set_title(title, fontsize=9)
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an artifact that tool convert wrote for a CPU")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--streams", type=int, default=3, help="answers that run all the time")
    parser.add_argument("--prompt", type=int, default=7900, help="tokens of a long prompt")
    parser.add_argument("--count", type=int, default=3, help="long prompts, one after the other")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="draw how long the gaps are")
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory(prefix="toolkit-apart-") as folder:
        for way in args.ways.split(","):
            with serving(way, args.model, args.cores, Path(folder)) as url:
                found[way] = asyncio.run(measure(url, args))
            told = {name: value for name, value in found[way].items() if name != "gaps_s"}
            print(f"{way:12} {told}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found))
    if args.plot:
        draw(found, args.plot, f"{args.streams} streams beside prompts of {args.prompt:,} tokens, {args.cores} cores")


if __name__ == "__main__":
    main()
