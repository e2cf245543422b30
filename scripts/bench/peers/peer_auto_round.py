"""The auto-round library by itself, for scripts/bench_quant; it may run in our environment, which has it.

python peer_auto_round.py MODEL OUT --method auto_round --calib notes.txt --samples 64 --seqlen 512 --group-size 64
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from auto_round import AutoRound, AutoScheme
from auto_round.schemes import QuantizationScheme
from transformers import AutoTokenizer

# Bits and groups that AutoScheme may choose from: those that `tool lite search` tries where 64 divides all inputs.
OPTIONS = ((2, 32), (3, 64), (3, 32), (4, 64), (4, 32), (8, 64))
SCORED = (16, 256)  # samples and tokens that AutoScheme scores each of them on, the library's defaults
MARGIN = 16  # tokens more than a sample takes: text that is tokenized again may give fewer


def scheme(width: int, group_size: int) -> AutoScheme:
    """To the bits a weight that codes of ``width`` bits with this group take, counted as the library does: a scale of
    16 bits and a zero point of the codes' width for every group (of 8-bit codes too, which it makes symmetric)."""
    options: list[QuantizationScheme | str] = [
        QuantizationScheme(bits=bits, group_size=group, sym=False, data_type="int", act_bits=16)
        for bits, group in OPTIONS
    ]
    samples, seqlen = SCORED
    average = width + (16 + width) / group_size
    return AutoScheme(avg_bits=average, options=options, nsamples=samples, seqlen=seqlen, low_cpu_mem_usage=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", choices=["auto_round", "search"], default="auto_round")
    parser.add_argument("--calib", required=True)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--iters", type=int, default=200)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = tokenizer(open(args.calib, encoding="utf-8").read())["input_ids"]
    starts = random.Random(0).sample(range(0, len(ids) - args.seqlen + 1, args.seqlen), args.samples)
    scratch = args.out.with_name(f".{args.out.name}.library")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    common: dict[str, Any] = {"nsamples": args.samples, "seqlen": args.seqlen, "iters": args.iters, "batch_size": 8}
    common |= {"sym": False, "device_map": "cpu", "enable_torch_compile": False}
    if args.method == "search":  # AutoScheme reads text alone, from a file
        text = scratch / "text.json"
        text.write_text(json.dumps([tokenizer.decode(ids[i : i + args.seqlen + MARGIN]) for i in starts]))
        rounder = AutoRound(args.model, scheme=scheme(args.bits, args.group_size), dataset=str(text), **common)
    else:
        rows = [torch.tensor(ids[i : i + args.seqlen]) for i in starts]
        samples: Any = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
        loader = torch.utils.data.DataLoader(samples, batch_size=8)
        rounder = AutoRound(args.model, scheme=f"W{args.bits}A16", group_size=args.group_size, dataset=loader, **common)
    rounder.quantize_and_save(str(scratch / "made"), format="auto_round")
    next(iter(sorted(scratch.rglob("config.json")))).parent.rename(args.out)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
