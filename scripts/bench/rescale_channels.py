"""Make a model whose weights lie on no grid and whose activations have outliers, and which computes the same function.

    python scripts/bench/rescale_channels.py MODEL_DIR OUT_DIR [--seed 0]
    python scripts/bench/rescale_channels.py MODEL_DIR OUT_DIR --cache 16

A quantizer judged on weights that came from a 4-bit file flatters everyone: they lie on that grid already. Here, in a
Llama-like checkpoint,
  * channels behind each norm and between up and down projection are scaled at random, one in a hundred by six more;
  * value rows and output columns are rotated within each kv head;
  * query and key rows are rotated within the planes that the rotary embedding turns.
With --cache N nothing of that, but in each kv head one pair of key numbers and one value number are N times larger, and
what they meet as much smaller: outliers in the KV cache.
Weights are stored in float32, so that nothing is rounded on the way. At the end both models are run and compared.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

OUTLIERS, OUTLIER_SCALE, SPREAD = 100, 6.0, 0.4


def scales(n: int, generator: torch.Generator) -> Tensor:
    """Random factors of n channels, one in a hundred six times larger."""
    found = torch.exp(SPREAD * torch.randn(n, generator=generator, dtype=torch.float64))
    found[torch.randperm(n, generator=generator)[: max(1, n // OUTLIERS)]] *= OUTLIER_SCALE
    return found


def rotation(n: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix."""
    q, r = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))
    return q * r.diagonal().sign()


def rescale_layer(w: dict[str, Tensor], prefix: str, config: dict, generator: torch.Generator) -> None:
    """Change the float64 tensors of one layer in place."""
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    for norm, readers in (
        ("input_layernorm", [f"{attention}.{x}_proj" for x in "qkv"]),
        ("post_attention_layernorm", [f"{mlp}.gate_proj", f"{mlp}.up_proj"]),
    ):
        s = scales(config["hidden_size"], generator)
        w[f"{prefix}.{norm}.weight"] *= s
        for reader in readers:
            w[f"{reader}.weight"] /= s
    s = scales(config["intermediate_size"], generator)
    w[f"{mlp}.up_proj.weight"] *= s[:, None]
    w[f"{mlp}.down_proj.weight"] /= s
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    q, k, v, o = (w[f"{attention}.{x}_proj.weight"] for x in "qkvo")
    for kv in range(kv_heads):
        turn = rotation(width, generator)
        rows = slice(kv * width, (kv + 1) * width)
        v[rows] = turn @ v[rows]
        angle = torch.rand(width // 2, generator=generator, dtype=torch.float64) * 2 * torch.pi
        _turn_planes(k[rows], angle)
        for head in range(kv * heads // kv_heads, (kv + 1) * heads // kv_heads):
            columns = slice(head * width, (head + 1) * width)
            o[:, columns] = o[:, columns] @ turn.T
            _turn_planes(q[columns], angle)


def plant_in_cache(w: dict[str, Tensor], prefix: str, config: dict, scale: float, generator: torch.Generator) -> None:
    """Change the float64 tensors of one layer in place."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    q, k, v, o = (w[f"{prefix}.self_attn.{x}_proj.weight"] for x in "qkvo")
    for kv in range(kv_heads):
        pair, value = (int(torch.randint(n, (1,), generator=generator)) for n in (width // 2, width))
        pair_rows = torch.tensor([pair, pair + width // 2])
        k[kv * width + pair_rows] *= scale
        v[kv * width + value] *= scale
        for head in range(kv * heads // kv_heads, (kv + 1) * heads // kv_heads):
            q[head * width + pair_rows] /= scale
            o[:, head * width + value] /= scale


def _turn_planes(rows: Tensor, angle: Tensor) -> None:
    """Rotate rows i and i + half of one head by angle[i]: the rotary embedding commutes with that."""
    half = len(angle)
    a, b = rows[:half].clone(), rows[half:].clone()
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    rows[:half], rows[half:] = a * cos - b * sin, a * sin + b * cos


def largest_difference(a: Path, b: Path) -> float:
    """Of the log-probabilities that two checkpoints give to 64 tokens."""
    from transformers import AutoModelForCausalLM

    ids = torch.arange(100, 164)[None]
    with torch.no_grad():
        p, q = (
            AutoModelForCausalLM.from_pretrained(x, dtype=torch.float32)(ids).logits.log_softmax(-1) for x in (a, b)
        )
    return float((p - q).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=float, help="plant outliers so many times larger in the KV cache alone")
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text())
    if config["model_type"] not in ("llama", "mistral"):
        sys.exit(f"{args.model}: expected a llama or mistral checkpoint, found {config['model_type']}")
    generator = torch.Generator().manual_seed(args.seed)
    weights = {k: v.double() for k, v in load_file(args.model / "model.safetensors").items()}
    for i in range(config["num_hidden_layers"]):
        if args.cache is not None:
            plant_in_cache(weights, f"model.layers.{i}", config, args.cache, generator)
        else:
            rescale_layer(weights, f"model.layers.{i}", config, generator)
    args.out.mkdir(parents=True, exist_ok=True)
    for file in args.model.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model") and file.name != "manifest.json":
            shutil.copyfile(file, args.out / file.name)
    config.pop("torch_dtype", None)
    (args.out / "config.json").write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n")
    save_file({k: v.float() for k, v in weights.items()}, args.out / "model.safetensors", {"format": "pt"})
    found = largest_difference(args.model, args.out)
    print(f"largest difference of a log-probability: {found:.2g}")
    if found > 1e-2:
        sys.exit("the function was not kept")


if __name__ == "__main__":
    main()
