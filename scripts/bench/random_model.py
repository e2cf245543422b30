"""Write a Llama checkpoint of a given shape with random weights, for speed measurements where no real one is at hand.

    python scripts/bench/random_model.py DIR --shape 1b            bf16, dense
    python scripts/bench/random_model.py DIR --shape 1b --awq      4-bit AWQ, groups of 64

Shapes: 1b and 7b are Llama-3.2-1B's and Llama-2-7B's. The tokenizer is the demo model's,
cut to the vocabulary.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from toolkit.artifacts.checkpoint_writer import write_model
from toolkit.artifacts.source import resolve_model

SHAPES = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
}
GROUP = 64


def linears(shape: dict) -> Iterator[tuple[str, int, int]]:
    """(name, out, in) of the linears of one layer."""
    hidden, inner, d = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * d, shape["num_key_value_heads"] * d
    yield from (("self_attn.q_proj", q, hidden), ("self_attn.k_proj", kv, hidden), ("self_attn.v_proj", kv, hidden))
    yield from (("self_attn.o_proj", hidden, q), ("mlp.gate_proj", inner, hidden), ("mlp.up_proj", inner, hidden))
    yield "mlp.down_proj", hidden, inner


def weight(rows: int, columns: int, awq: bool, rng: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """(suffix, tensor) pairs that hold one random matrix of standard deviation 0.02."""
    if not awq:
        yield "weight", (torch.randn(rows, columns, generator=rng) * 0.02).bfloat16()
        return
    groups = columns // GROUP
    ints = {"dtype": torch.int32, "generator": rng}
    yield "qweight", torch.randint(-(1 << 31), (1 << 31) - 1, (columns, rows // 8), **ints)
    yield "qzeros", torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32)
    yield "scales", torch.full((groups, rows), 0.02 / 4.6).half()


def tensors(shape: dict, awq: bool) -> Iterator[tuple[str, Tensor]]:
    rng = torch.Generator().manual_seed(0)
    hidden, vocab = shape["hidden_size"], shape["vocab_size"]
    yield "model.embed_tokens.weight", (torch.randn(vocab, hidden, generator=rng) * 0.02).bfloat16()
    for i in range(shape["num_hidden_layers"]):
        for name, rows, columns in linears(shape):
            for suffix, tensor in weight(rows, columns, awq, rng):
                yield f"model.layers.{i}.{name}.{suffix}", tensor
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{i}.{name}.weight", torch.ones(hidden).bfloat16()
    yield "model.norm.weight", torch.ones(hidden).bfloat16()
    if not shape["tie_word_embeddings"]:
        yield "lm_head.weight", (torch.randn(vocab, hidden, generator=rng) * 0.02).bfloat16()


def cut_tokenizer(path: Path, size: int) -> dict:
    """The byte-pair tokenizer at ``path`` with its first ``size`` ids."""
    data = json.loads(path.read_text())
    model = data["model"]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < size}
    pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    model["merges"] = [pair for pair in pairs if {*pair, "".join(pair)} <= model["vocab"].keys()]
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--awq", action="store_true")
    args = parser.parse_args()
    args.dir.mkdir(parents=True)
    config = SHAPES[args.shape] | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }
    if args.awq:
        quantization = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True}
        config["quantization_config"] = quantization
    (args.dir / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(resolve_model("demo") / name, args.dir / name)
    tokenizer = cut_tokenizer(resolve_model("demo") / "tokenizer.json", SHAPES[args.shape]["vocab_size"])
    (args.dir / "tokenizer.json").write_text(json.dumps(tokenizer))
    write_model(args.dir, tensors(SHAPES[args.shape], args.awq), 1 << 30)  # shard by shard: never whole in memory


if __name__ == "__main__":
    main()
