"""Write a checkpoint of a given shape with random weights, for speed measurements where no real one is at hand.

    python scripts/bench/random_model.py DIR --shape 1b            bf16, dense
    python scripts/bench/random_model.py DIR --shape 1b --awq      4-bit AWQ, groups of 64
    python scripts/bench/random_model.py DIR --shape 1b --trellis 3    3-bit trellis codes, groups of 64
    python scripts/bench/random_model.py DIR --shape v2-lite --awq --config-only      for --load-format dummy
    python scripts/bench/random_model.py DIR --layers 1 --length 40960                long contexts, read quickly

Shapes: 1b, 7b and 8b are Llama-3.2-1B's, Llama-2-7B's and Llama-3.1-8B's, moe, v2-lite, qwen3-next and lfm2
Qwen3-30B-A3B's, DeepSeek-V2-Lite's, Qwen3-Next-80B-A3B's and LFM2-1.2B's with fewer layers, experts or words,
gemma4-e2b Gemma 4 E2B's. The tokenizer is the demo model's, cut to the vocabulary.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from gpu.models import BIG

from toolkit.artifacts.output.checkpoint_writer import write_model
from toolkit.artifacts.source import resolve_model
from toolkit.models.registry import build
from toolkit.runners.native.packing.pack import trellis_table

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 500000.0}
SHAPES: dict[str, dict[str, Any]] = {
    "1b": LLAMA | BIG["1b"],
    "7b": LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    "8b": LLAMA | {"tie_word_embeddings": False} | BIG["8b"],
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
        "rope_theta": 1000000.0,
    },
    "v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "num_hidden_layers": 7,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    },
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 128,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
        "rope_theta": 10000000.0,
    },
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 16,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "conv_L_cache": 3,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
    },
    "gemma4-e2b": {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
}
GROUP = 64
SPREAD = 0.02  # standard deviation of weights


def random_weight(rows: int, columns: int, form: str, bits: int, rng: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """(suffix, tensor) pairs that hold one random matrix."""
    if form == "trellis":
        words = torch.randint(-(1 << 31), (1 << 31) - 1, (rows, columns * bits // 32), dtype=torch.int32, generator=rng)
        yield "qweight", words
        yield "scales", torch.full((rows, columns // GROUP), SPREAD / 38).half()
        yield "table", trellis_table(bits)
        return
    if form == "dense":
        yield "weight", (torch.randn(rows, columns, generator=rng) * SPREAD).bfloat16()
        return
    groups = columns // GROUP
    ints = {"dtype": torch.int32, "generator": rng}
    yield "qweight", torch.randint(-(1 << 31), (1 << 31) - 1, (columns, rows // 8), **ints)
    yield "qzeros", torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32)
    yield "scales", torch.full((groups, rows), SPREAD / 4.6).half()


def tensors(config: dict[str, Any], form: str, bits: int) -> Iterator[tuple[str, Tensor]]:
    """All of the checkpoint, as its family spells them."""
    rng = torch.Generator().manual_seed(0)
    for item in build(config)[1]:
        if item.kind == "norm":
            yield item.weight_name, torch.ones(item.shape).bfloat16()
        elif item.kind == "vector":
            yield item.weight_name, torch.randn(item.shape, generator=rng).bfloat16()
        elif item.optional and config["tie_word_embeddings"]:
            continue
        else:
            for suffix, tensor in random_weight(*item.shape, form if item.kind == "linear" else "dense", bits, rng):
                yield f"{item.name}.{suffix}", tensor


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
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--awq", action="store_true")
    kind.add_argument("--trellis", type=int, choices=(2, 3, 4), metavar="BITS")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--length", type=int, default=8192, help="of a context, at most")
    parser.add_argument("--config-only", action="store_true", help="no weights")
    args = parser.parse_args()
    args.dir.mkdir(parents=True)
    config = SHAPES[args.shape] | {
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": args.length,
        "torch_dtype": "bfloat16",
    }
    if args.layers is not None:
        config["num_hidden_layers"] = args.layers
    if args.awq:
        quantization = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP, "zero_point": True}
        config["quantization_config"] = quantization
    if args.trellis:
        config["quantization_config"] = {"quant_method": "trellis", "bits": args.trellis, "group_size": GROUP}
    (args.dir / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        shutil.copy(resolve_model("demo") / name, args.dir / name)
    tokenizer = cut_tokenizer(resolve_model("demo") / "tokenizer.json", config["vocab_size"])
    (args.dir / "tokenizer.json").write_text(json.dumps(tokenizer))
    if not args.config_only:
        form = "awq" if args.awq else "trellis" if args.trellis else "dense"
        found = tensors(config, form, args.trellis or 4)
        write_model(args.dir, found, 1 << 30)  # shard by shard: never whole in memory


if __name__ == "__main__":
    main()
