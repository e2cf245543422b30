"""Does a loss carry over? Methods by the text they calibrate on and the text they are measured on: a heat map.

    bash scripts/bench_quant --matrix --model demo-rescaled --methods awq awq+gptq llm-compressor/awq \\
        --calib self fiction=a.txt code=b.txt fiction+self --data fiction=c.txt code=d.txt german=e.txt --plot m.png

A cell is a method calibrated on one text and measured on another. It is added to --results as soon as it is known, and
not made again. ``self`` is the text that the model writes itself, ``NAME+self`` both, half of the samples each; peers
read files alone. The method ``int4`` is ``--load-format int4``, which reads no text; ``nearest`` is rounding alone, in
the same groups. --rough multiplies in bfloat16 where that is faster, in both models alike. --table prints what the file
holds, --plot draws it, --beside METHOD shows what others lose beside it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
from native import need_native
from quant import OURS, PEERS, add, command_of, environment, timed

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.output.result_file import check_plot, save_plot
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.artifacts.weights import canonical_weights
from toolkit.measure.predictions import Before
from toolkit.models.registry import load_spec
from toolkit.quant.layers.forward import embed, head_logits, in_bf16, layer_forward, narrow
from toolkit.quant.layers.forward_parts import Weights
from toolkit.quant.layers.result import LayerResult
from toolkit.quant.layers.source import LayerSource
from toolkit.runners.weights.rounded import BITS, RoundedWeights, rounded

CPU = torch.device("cpu")
WINDOW = 512  # tokens that the models see at once
BESIDE = "+self"  # behind the name of a calibration text: with text of the model's own
AT_FIRST = {"bits": 4}  # of cells that were made when there was no such option
AS_READ = (*BITS, "nearest")  # methods that round while the model is read
NO_TEXT = "no text"  # what a method is calibrated on that reads none


class Texts:
    """Held-out texts, cut into windows that do not overlap, and the original model's last hidden states on them.
    ``rough``: layers multiply in bfloat16 where that is faster."""

    def __init__(self, model: Path, files: Mapping[str, str], tokens: int, rough: bool) -> None:
        self.source, self.rough = LayerSource(model), rough
        self.outer = self.source.outer_weights(CPU)
        tokenizer = Tokenizer.open(self.source.checkpoint.tokenizer_dir)
        self.windows: dict[str, Tensor] = {}
        for name, file in files.items():
            ids = torch.tensor(tokenizer.encode(Path(file).read_text(encoding="utf-8"))[:tokens])
            if len(ids) < WINDOW:
                sys.exit(f"--data {name}={file}: expected at least {WINDOW} tokens, found {len(ids)}")
            self.windows[name] = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
        self.exact: dict[str, list[Tensor]] = {}

    def figures(self, out: Path, name: str, method: str = "") -> dict[str, Any]:
        """How far the checkpoint ``out``, rounded while it is read where ``method`` says so, is from the original on
        the text ``name``: ``Before.figures``, and the KL divergence in every window."""
        if name not in self.exact:
            self.exact[name] = self._states(name, lambda i: self.source.layer(i, CPU))
        checkpoint = open_checkpoint(out)
        spec, stored = load_spec(checkpoint)
        weights = canonical_weights(checkpoint, stored)
        weights = RoundedWeights(weights, spec, 4) if method == "nearest" else rounded(weights, spec, method)
        own = [{part.name for item in items for part in item.parts} for items in self.source.stored]

        def layer(i: int) -> Weights:
            return LayerResult({n: weights[n] for n in weights if n.removesuffix(".bias") in own[i]}, []).dense()

        found, sums, norm = Before(), [0.0], self.source.spec.final_norm.name
        after = self.outer | {norm: weights[norm]}
        for ids, x, y in zip(self.windows[name], self.exact[name], self._states(name, layer), strict=True):
            p, q = (head_logits(self.source.spec, w, h[0, :-1]) for w, h in ((self.outer, x), (after, y)))
            found.add(p, q, ids[1:])
            so_far = found.figures()
            sums.append(so_far["kl"] * so_far["tokens"])
        return found.figures() | {"kl_windows": [(b - a) / (WINDOW - 1) for a, b in pairwise(sums)]}

    def _states(self, name: str, weights: Any) -> list[Tensor]:
        """Hidden states behind the last layer, window by window; ``weights(i)``: of layer i."""
        spec = self.source.spec
        states = [embed(spec, self.outer[spec.embed], ids[None]) for ids in self.windows[name]]
        for i, layer in enumerate(spec.layers):
            own = dict(narrow(weights(i), CPU) if self.rough else weights(i))
            with in_bf16(CPU) if self.rough else nullcontext():
                states = [layer_forward(layer, own, x).float() for x in states]
        return states


@dataclass(frozen=True)
class Row:
    """A method calibrated on one text: a row of the picture."""

    peer: str
    method: str
    calib: str

    @property
    def title(self) -> str:
        return self.method if self.peer == "ours" else f"{self.peer} {self.method}"


def quantize(args: argparse.Namespace, row: Row, file: str) -> tuple[Path, dict[str, float]]:
    """The checkpoint of ``row``, and what it took."""
    own = argparse.Namespace(**vars(args) | {"peer": row.peer, "method": row.method, "calib": file, "iters": 200})
    own.self_samples = args.samples // 2 if row.calib.endswith(BESIDE) else 0
    own.samples -= own.self_samples
    if row.peer != "ours" and own.peer_python is None:
        own.peer_python = environment(row.peer, (args.work_dir / f"env-{row.peer}").absolute())
    out = args.work_dir / f"{row.peer}-{row.method}-{row.calib}"
    if row.peer == "ours":
        need_native()
    else:  # ours goes on where it was killed
        shutil.rmtree(out, ignore_errors=True)
    more = ["--include", args.include] if args.include else []
    more += ["--rough"] if args.rough and row.peer == "llm-compressor" else []
    return out, timed([*command_of(own, out), *more])


def fill(args: argparse.Namespace, rows: Sequence[Row], calib: Mapping[str, str], data: Mapping[str, str]) -> None:
    """Make the cells that the results file lacks."""
    known = read(args.results)
    texts = None
    for row in rows:
        key = {
            "peer": row.peer, "method": row.method, "calib": row.calib, "model": args.model, "samples": args.samples,
            "seqlen": args.seqlen, "group_size": args.group_size, "bits": args.bits, "eval_tokens": args.eval_tokens,
            "rough": args.rough, "include": args.include,
        }  # fmt: skip
        missing = [name for name in data if not any(cell | key | {"data": name} == cell for cell in known)]
        if not missing:
            continue
        texts = texts or Texts(Path(args.model), data, args.eval_tokens, args.rough)
        out, took = (Path(args.model), {}) if row.method in AS_READ else quantize(args, row, calib[row.calib])
        for name in missing:
            found = texts.figures(out, name, row.method)
            add(args.results, key | {"data": name} | took | found)
            print(f"{row.title}, calibrated on {row.calib}, measured on {name}: {loss(found):+.1f} %", flush=True)
        if out != Path(args.model):
            shutil.rmtree(out)


def read(results: Path) -> list[dict[str, Any]]:
    cells = json.loads(results.read_text(encoding="utf-8")) if results.exists() else []
    return [AT_FIRST | cell for cell in cells]


def loss(cell: Mapping[str, Any]) -> float:
    """By how many per cent perplexity rose."""
    return 100 * (cell["perplexity_after"] / cell["perplexity_before"] - 1)


def divergence(cell: Mapping[str, Any]) -> float:
    """KL to the original in thousandths of a nat a token."""
    return 1000 * float(cell["kl"])


FIGURES = {"loss": (loss, "Perplexity lost, %"), "kl": (divergence, "KL to the original, nats a token / 1000")}


def by_row(cells: Sequence[Mapping[str, Any]], figure: str) -> dict[Row, dict[str, float]]:
    """One of ``FIGURES``: row → text → figure, in the order in which they came."""
    found: dict[Row, dict[str, float]] = {}
    for cell in cells:
        found.setdefault(Row(cell["peer"], cell["method"], cell["calib"]), {})[cell["data"]] = FIGURES[figure][0](cell)
    return found


def table(cells: Sequence[Mapping[str, Any]], figure: str) -> Iterator[str]:
    """The figures in Markdown, the worst of each row last."""
    data = list(dict.fromkeys(cell["data"] for cell in cells))
    yield "| method | calibrated on | " + " | ".join(data) + " | worst |"
    yield "|---" * (len(data) + 3) + "|"
    for row, losses in by_row(cells, figure).items():
        found = " | ".join(f"{losses[name]:.1f}" if name in losses else "" for name in data)
        yield f"| {row.title} | {row.calib} | {found} | {max(losses.values()):.1f} |"


def beside(cells: Sequence[Mapping[str, Any]], method: str) -> Iterator[str]:
    """KL of each row as a share of ``method``'s on the same windows, text by text, and of all texts together, ± the
    standard error (a window left out at a time)."""
    windows: dict[Row, dict[str, list[float]]] = {}
    for cell in cells:
        row = Row(cell["peer"], cell["method"], cell["calib"])
        windows.setdefault(row, {})[cell["data"]] = cell.get("kl_windows", [])
    against = next((of for row, of in windows.items() if row.title == method), None)
    if against is None:
        sys.exit(f"--beside: expected one of {', '.join(dict.fromkeys(row.title for row in windows))}, found {method}")
    for row, of in windows.items():
        texts = [name for name in of if len(of[name]) > 1 and len(of[name]) == len(against.get(name, ()))]
        if row.title == method or not texts:
            continue
        own, other = (torch.tensor([x for name in texts for x in all_of[name]]) for all_of in (of, against))
        each = ", ".join(f"{name} {sum(of[name]) / sum(against[name]):.2f}" for name in texts)
        yield f"{row.title}, calibrated on {row.calib}, beside {method}: {share(own, other)} ({each})"


def share(own: Tensor, other: Tensor) -> str:
    """The ratio of the sums ± its standard error."""
    left_out = (own.sum() - own) / (other.sum() - other)
    error = (len(own) - 1) / len(own) ** 0.5 * float(left_out.std())
    return f"{float(own.sum() / other.sum()):.3f} ± {error:.3f}"


def plot(cells: Sequence[Mapping[str, Any]], figure_of: str, path: Path) -> None:
    """A heat map: methods and what they were calibrated on downwards, what they were measured on to the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = by_row(cells, figure_of)
    data = list(dict.fromkeys(cell["data"] for cell in cells))
    titles = list(dict.fromkeys(row.title for row in rows))
    order = sorted(rows, key=lambda row: titles.index(row.title))
    grid = [[rows[row].get(name, float("nan")) for name in data] for row in order]
    most = max(max(losses.values()) for losses in rows.values())
    figure, axes = pyplot.subplots(figsize=(4 + 0.75 * len(data), 1.5 + 0.42 * len(rows)))
    axes.imshow(grid, cmap="YlOrRd", vmin=0, vmax=most, aspect="auto")
    for y, line in enumerate(grid):
        for x, value in enumerate(line):
            if value == value:
                colour = "white" if value > 0.6 * most else "black"
                axes.text(x, y, f"{value:.1f}", ha="center", va="center", fontsize="small", color=colour)
    axes.set_xticks(range(len(data)), data, rotation=45, ha="right")
    axes.set_yticks(range(len(order)), [f"{row.title}, on {row.calib}" for row in order])
    axes.set_xlabel("measured on")
    axes.set_title(FIGURES[figure_of][1], fontsize="medium")
    figure.tight_layout()
    save_plot("--plot", figure, path, dpi=120)
    pyplot.close(figure)


def named(option: str, given: Sequence[str]) -> dict[str, str]:
    """NAME=FILE as a mapping; ``self`` stands for itself, NAME+self for the file of an earlier NAME."""
    found: dict[str, str] = {}
    for one in given:
        name, equals, file = one.partition("=")
        if option == "--calib" and one.endswith(BESIDE) and one.removesuffix(BESIDE) in found:
            found[one] = found[one.removesuffix(BESIDE)]
            continue
        if not equals and not (option == "--calib" and one == "self"):
            sys.exit(f"{option}: expected NAME=FILE, found {one}")
        if equals and not Path(file).is_file():
            sys.exit(f"{option} {one}: no such file")
        found[name] = file if equals else one
    return found


def rows_of(methods: Sequence[str], calib: Sequence[str]) -> Iterator[Row]:
    """Methods, PEER/METHOD or METHOD for ours, by calibration text; a peer cannot have its text written."""
    for name in methods:
        if name in AS_READ:
            yield Row("ours", name, NO_TEXT)
            continue
        peer, _, method = name.rpartition("/")
        known = OURS if not peer else PEERS.get(peer, ())
        if method not in known:
            sys.exit(f"--methods: expected PEER/METHOD or one of {', '.join((*OURS, *AS_READ))}, found {name}")
        yield from (Row(peer or "ours", method, c) for c in calib if not (peer and c.endswith("self")))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="directory of the unquantized model")
    methods = ["awq-untuned", "awq", "awq+gptq-untuned", "awq+gptq"]
    parser.add_argument("--methods", nargs="+", default=methods, help="METHOD of ours, or PEER/METHOD")
    parser.add_argument("--calib", nargs="+", default=["self"], help="NAME=FILE, self, or NAME+self")
    parser.add_argument("--data", nargs="+", default=[], help="NAME=FILE: held-out texts")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--bits", type=int, default=4, choices=(2, 3, 4, 8), help="of a weight (not llm-compressor)")
    parser.add_argument("--eval-tokens", type=int, default=8192, help="of each held-out text")
    parser.add_argument("--rough", action="store_true", help="layers are measured in bfloat16 where that is faster")
    parser.add_argument("--include", help="only linears that this pattern fits (not int4, nearest, auto-round)")
    parser.add_argument("--peer-python", help="interpreter of the peers' environment (default: made in --work-dir)")
    parser.add_argument("--results", type=Path, default=Path("bench-matrix.json"))
    parser.add_argument("--work-dir", type=Path, default=Path("bench-quant"))
    parser.add_argument("--figure", choices=list(FIGURES), default="loss", help="what tables and pictures show")
    parser.add_argument("--plot", type=Path, help="draw the results file as a heat map (.png)")
    parser.add_argument("--beside", metavar="METHOD", help="show losses beside this method's, with standard errors")
    parser.add_argument("--table", action="store_true", help="print (and draw) what the results file holds, and leave")
    args = parser.parse_args()
    check_plot("--plot", args.plot)
    if not args.table:
        if args.model is None or not args.data:
            parser.error("--model and --data are needed")
        calib, data = named("--calib", args.calib), named("--data", args.data)
        args.work_dir.mkdir(parents=True, exist_ok=True)
        with torch.inference_mode():
            fill(args, list(rows_of(args.methods, list(calib))), calib, data)
    cells = read(args.results)
    if not cells:
        sys.exit(f"{args.results}: no cells yet")
    print("\n".join(table(cells, args.figure)))
    if args.beside is not None:
        print("\n".join(beside(cells, args.beside)))
    if args.plot is not None:
        plot(cells, args.figure, args.plot)


if __name__ == "__main__":
    main()
