"""One method of llm-compressor on a CPU, for scripts/bench_quant. Runs in an environment of its own:

pip install torch==2.13.0 && pip install llmcompressor (scripts/bench_quant does it)
python peer_llm_compressor.py MODEL OUT --method awq --calib notes.txt --samples 64 --seqlen 512 --group-size 64
"""

from __future__ import annotations

import argparse
import random
from typing import Any

import torch

if not torch.cuda.is_available():  # its AWQ pins memory, which needs a GPU
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def recipe(method: str, group_size: int, include: str) -> list[Any]:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.modifiers.awq import AWQModifier
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from llmcompressor.modifiers.smoothquant import SmoothQuantModifier

    weights = QuantizationArgs(num_bits=4, type="int", symmetric=False, strategy="group", group_size=group_size)
    groups = {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}
    common: dict[str, Any] = {"ignore": ["lm_head", f"re:^(?!.*(?:{include}))"]}
    match method:
        case "rtn":
            return [QuantizationModifier(config_groups=groups, **common)]
        case "awq":
            return [AWQModifier(config_groups=groups, **common)]
        case "gptq":
            return [GPTQModifier(config_groups=groups, actorder=None, **common)]
        case "gptq-desc-act":
            return [GPTQModifier(config_groups=groups, actorder="static", **common)]
        case "w8a8-int8":
            return [
                SmoothQuantModifier(smoothing_strength=0.5),
                GPTQModifier(targets="Linear", scheme="W8A8", **common),
            ]
        case _:
            return [QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", **common)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--method", required=True)
    parser.add_argument("--calib", required=True)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--include", default="", help="only linears that this pattern fits")
    parser.add_argument("--rough", action="store_true", help="products of float32 in bfloat16 where that is faster")
    args = parser.parse_args()
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if args.rough:
        torch.set_float32_matmul_precision("medium")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = tokenizer(open(args.calib, encoding="utf-8").read())["input_ids"]
    chunks = [ids[i : i + args.seqlen] for i in range(0, len(ids) - args.seqlen + 1, args.seqlen)]
    chosen = random.Random(0).sample(chunks, args.samples)
    data = Dataset.from_list([{"input_ids": c, "attention_mask": [1] * len(c)} for c in chosen])
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    oneshot(
        model=model,
        dataset=data,
        recipe=recipe(args.method, args.group_size, args.include),
        max_seq_length=args.seqlen,
        num_calibration_samples=args.samples,
    )
    model.save_pretrained(args.out, save_compressed=True)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
