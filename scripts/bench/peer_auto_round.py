"""The auto-round library by itself, for scripts/bench_quant; it may run in our environment, which has it.

python peer_auto_round.py MODEL OUT --method auto_round --calib notes.txt --samples 64 --seqlen 512 --group-size 64
"""

from __future__ import annotations

import argparse
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from auto_round import AutoRound
from transformers import AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--method", choices=["auto_round"], default="auto_round")
    parser.add_argument("--calib", required=True)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--iters", type=int, default=200)
    args = parser.parse_args()
    ids = AutoTokenizer.from_pretrained(args.model)(open(args.calib, encoding="utf-8").read())["input_ids"]
    chunks = [ids[i : i + args.seqlen] for i in range(0, len(ids) - args.seqlen + 1, args.seqlen)]
    rows = [torch.tensor(c) for c in random.Random(0).sample(chunks, args.samples)]
    samples: Any = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
    rounder = AutoRound(
        args.model, scheme="W4A16", group_size=args.group_size, sym=False, nsamples=args.samples, seqlen=args.seqlen,
        iters=args.iters, batch_size=8, dataset=torch.utils.data.DataLoader(samples, batch_size=8), device_map="cpu",
        enable_torch_compile=False,
    )  # fmt: skip
    scratch = args.out.with_name(f".{args.out.name}.library")
    rounder.quantize_and_save(str(scratch), format="auto_round")
    next(iter(sorted(scratch.rglob("config.json")))).parent.rename(args.out)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
